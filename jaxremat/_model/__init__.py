"""A step in plain numbers: its graph, and the memory and the time of a schedule.

In: sizes, seconds, readers of values. Out: stages, schedules, profiles. Law: no JAX here; `simulate` is the only
definition of memory and time, by which every solver is judged.

Reading order: `_graph`, `_stages` (where the backward pass may stop and recompute), `_schedule`, `_simulate` (on a
`_tape`), `_timeline`; then what the graph derives: `_later_passes` (of steps that differentiate several times),
`_optimizer_updates`; what surrounds it: `_device_specs`, `_primitive_names`, `_pins`; which variants the step may take:
`_variant`, `_sites` with `_loop_levels`; and `_example_graphs`, on which planners are tried.
"""
