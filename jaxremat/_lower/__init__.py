"""Traced step, compiled baseline, device -> `Graph`: sizes and seconds of every equation.

In: `Traced`, the plain step's kernels. Out: `Graph`. Law: facts come from the plain step's compiled program;
rules are used only where it shows nothing.

Reading order: `_build` (`build_graph`: facts and a variant become a graph), `_facts` (what the compiled plain step
shows); `_lower`, `_kernel_prices`; for loops `_loop_memory` and `_iteration` (one, compiled separately).
"""
