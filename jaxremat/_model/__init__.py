"""A step in plain numbers: its graph, and the memory and time of a schedule.

In: sizes, seconds, the readers of each value. Out: stages, schedules, profiles. Invariant: no JAX in this room;
`simulate` is the only definition of memory and time, and every solver is judged by it.

Reading order: `_graph`, `_stages` (the cuts of the backward pass), `_schedule`, `_simulate` (on a `_tape`),
`_timeline`; then properties derived from the graph: `_later_passes` (of steps that differentiate several times),
`_optimizer_updates`, `_host_copies`; its surroundings: `_device_specs`, `_primitive_names`, `_pins`; the variants that
a step may take: `_variant`, `_sites` with `_loop_levels`; and `_example_graphs`, for testing planners.
"""
