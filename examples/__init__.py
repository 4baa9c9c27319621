"""Runnable examples and benchmarks."""
