"""Traced step, compiled baseline, device -> `Graph`: sizes and seconds of every equation.

In: `Traced`, the plain step's kernels. Out: `Graph`. Law: what the plain step's program shows is believed; rules stand
in only where it cannot be asked.

Reading order: `_build` (`build_graph`: facts and a variant become a graph), `_facts` (what the compiled plain step
shows); `_lower`, `_kernel_prices`; of loops `_loop_memory` and `_iteration` (one compiled alone).
"""
