"""Benchmarks of memory and time on whole train steps."""
