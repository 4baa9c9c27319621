"""Names of primitives of which the graph knows more than their sizes and seconds."""

LOOP_SLICES = frozenset({"scan_slice", "scan_part"})
"""Primitives that read an iteration's part of an array, see `_loop_inlining`."""

LOOP_EDGES = frozenset({*LOOP_SLICES, "scan_carry", "scan_last", "scan_stack"})
"""The boundary between an iteration of an inlined loop and the rest."""

OVERWRITING = frozenset({"dynamic_update_slice", "scan_last", "scatter", "scatter-add"})
"""Heavy work that writes over its operand: into a part of it, or as the next iteration's carry."""

FETCH, PUT = "fetch", "put"
"""What copies an array from host memory, and what copies one there, by the user's own `jax.device_put`s."""

GATHER = "all_gather"
"""What gathers an operand over devices, see `_gathered_operands`."""
