"""Names of primitives that the graph treats specially."""

LOOP_SLICES = frozenset({"scan_slice", "scan_part"})
"""Primitives that read one iteration's part of an array, see `_loop_inlining`."""

LOOP_EDGES = frozenset({*LOOP_SLICES, "scan_carry", "scan_last", "scan_stack"})
"""The boundary between an iteration of an inlined loop and the rest."""

OVERWRITING = frozenset({"dynamic_update_slice", "scan_last", "scatter", "scatter-add"})
"""Heavy operations that write over their operand: into a part of it, or as the next iteration's carry."""

FETCH, PUT = "fetch", "put"
"""The copies of an array from host memory and to it that the user writes as `jax.device_put`."""

GATHER = "all_gather"
"""The gathering of an operand over devices, see `_gathered_operands`."""
