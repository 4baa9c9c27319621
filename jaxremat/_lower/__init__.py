"""Traced step, compiled baseline, device -> `Graph`: sizes and seconds of every equation.

In: `Traced`, the plain step's kernels. Out: `Graph`. Invariant: facts come from the plain step's compiled program;
rules are used only for equations on which it has no information.

Reading order: `_build` (`build_graph`: from facts and a variant to a graph), `_facts` (read off the compiled plain
step); `_lower`, `_kernel_prices`; for loops `_loop_memory` and `_iteration` (one iteration, compiled separately).
"""
