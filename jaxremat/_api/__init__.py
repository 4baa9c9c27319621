"""The public functions: `optimize`, `plan`, `memory`, `cost`, `search_plan`, `sweep`, `compare`, `checkpoint`,
`name_values`, `policy`.

In: users' functions and options. Out: planned functions and plans. Invariant: invalid arguments raise where they are
written.

Reading order: `_optimize`, `_step` (with its copies, and as a method), `_call_keys`, `_argument_kinds` with
`_nnx_objects` and `_strict_trees`, `_host_state` (optimizers' states in host memory), `_planning`, `_sweep`,
`_comparison`, `_checkpoint`, `_names`.
"""
