"""The public functions: `optimize`, `plan`, `memory`, `cost`, `search_plan`, `sweep`, `compare`, `checkpoint`,
`name_values`, `policy`.

In: what users write. Out: what they call. Law: bad arguments are refused where they are written.

Reading order: `_optimize`, `_jitted_functions`, `_step`, `_call_keys`, `_step_copies`, `_bound_step` (methods),
`_argument_kinds` with `_nnx_objects` and `_strict_trees`, `_host_state` (optimizers' states in host memory),
`_planning`, `_sweep`, `_comparison`, `_checkpoint`, `_names`.
"""
