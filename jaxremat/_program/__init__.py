"""Programs as flat equations: how they are read, flattened, compared and marked.

In: the result of `jax.jit(...).trace`. Out: equations without calls, equal ones merged. Law: they compute what the
function computes; only `_compat` uses private or versioned parts of JAX.

Reading order: `_compat`, `_splice`, `_primitives`, `_axes`, `_flops`, `_inline`, `_common_subexpressions`, `_hints`,
`_host_arguments`, `_references`, `_run_counts`, `_sharding_propagation`; `_equivalence` (two programs compute the same)
with `_value_numbers`, `_operation_keys`, `_row_indices`, `_index_rules`, `_array_rules`, `_carries`, `_windows`,
`_chunk_kinds`, `_chunk_slabs`, `_chunk_loops`; `_plugin_messages` (of JAX's first import).
"""
