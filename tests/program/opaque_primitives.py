"""Primitives that have no rule in `_axes` -> the reason for which nothing of theirs is known to be independent.

Each mixes everything, for all that is known: a region ends before it. Calls that `_inline` replaces by their bodies are
in `BODIES`, with loops and branches.
"""

BODIES = frozenset(
    {
        "call", "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call",
        "custom_vjp_call_jaxpr", "eval_jaxpr", "jit", "pjit", "remat2", "scan", "while",
    }
)  # fmt: skip
"""Equations whose axes are those of their bodies' equations: calls, scans, loops and branches."""

_BY_REASON: dict[str, tuple[str, ...]] = {
    "devices take part together, and in one order": (
        "global_array_to_host_local_array", "host_local_array_to_global_array",
        "all_gather", "all_gather_done", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start",
        "all_gather_start", "all_to_all", "all_to_all_done", "all_to_all_start", "axis_index", "pbroadcast",
        "pbroadcast_done", "pbroadcast_start", "pmax", "pmin", "ppermute", "ppermute_done", "ppermute_start", "precv",
        "preduced", "psend", "psum", "psum_done", "psum_invariant", "psum_invariant_start", "psum_start", "pvary",
        "ragged_all_to_all", "reduce_scatter", "reduce_scatter_done", "reduce_scatter_start", "reduced_vary_cast_p",
        "shard_map", "unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_psum_start",
        "unreduced_reduce_scatter", "unreduced_reduce_scatter_start", "vary_unreduced_cast_p",
    ),
    "says where, or in which layout, a whole array is": (
        "compute_on", "device_put", "inspect_sharding", "layout_constraint", "relayout", "remove_memory_space",
        "reshard", "shard_alike", "with_memory_space_constraint",
    ),
    "has effects, or an order among those that have": (
        "after_all", "buffer_callback", "check", "create_token", "debug_callback", "debug_print", "io_callback",
        "optimization_barrier", "program_order", "pure_callback", "shape_assertion", "tie",
    ),
    "draws one stream of numbers for the whole array": (
        "iota_2x32_shape", "philox2x32", "philox4x32", "random_gamma", "rng_bit_generator", "rng_uniform",
        "threefry4x32",
    ),
    "is code from outside of the program": (
        "call_exported", "core_map", "cudnn_fusion", "custom_fusion", "ffi_call", "fused_call", "fusible",
        "mosaic_gpu_p", "mpmd_map", "pallas_call", "platform_index", "tpu_custom_call", "unreachable",
        "xla_metadata_call", "xla_metadata_value",
    ),
    "is a function with rules of the user's own": (
        "composite", "custom_lin", "custom_linear_solve", "custom_partitioning", "custom_vmap_call", "linear_call",
        "remat_opt", "stage",
    ),
    "is a library's kernel with a layout of its own": (
        "dot_product_attention_bwd", "dot_product_attention_bwd_wrapper", "dot_product_attention_fp8_bwd",
        "dot_product_attention_fp8_bwd_wrapper", "dot_product_attention_fp8_fwd",
        "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper",
        "rnn_bwd", "rnn_fwd", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper",
    ),
    "is divided by a form of its own": ("attention", "attention_gradient"),
    "reads or writes references": ("create_linear", "pin", "run_scoped", "run_state", "unpin"),
    "is of a kernel's body": (
        "assert_consumed_value", "bitcast", "broadcast_to", "consume", "einshape_lo", "max_contiguous", "multiple_of",
        "reciprocal", "roll",
    ),
    "is of a sparse array's entries, in no order": (
        "bcoo_dot_general", "bcoo_dot_general_sampled", "bcoo_extract", "bcoo_fromdense", "bcoo_sort_indices",
        "bcoo_spdot_general", "bcoo_sum_duplicates", "bcoo_todense", "bcoo_transpose", "bcsr_dot_general",
        "bcsr_extract", "bcsr_fromdense", "bcsr_todense", "coo_fromdense", "coo_matmat", "coo_matvec", "coo_spmm",
        "coo_spmv", "coo_todense", "csr_fromdense", "csr_matmat", "csr_matvec", "csr_spmm", "csr_spmv", "csr_todense",
        "spsolve", "todense",
    ),
    "is the edge of an iteration of a loop that is inlined": (
        "scan_apart", "scan_carry", "scan_last", "scan_part", "scan_slice", "scan_stack",
    ),
    "has a size that is data": ("dim_as_value", "dimension_size"),
    "has no array, or none whose entries are known": ("dce_sink", "empty", "empty2"),
    "is of one matrix": ("cholesky_update",),
    "iterates until all entries have converged, which moves roundoff": ("regularized_incomplete_beta",),
    "makes numbers of an extended type, which is anybody's": ("from_edtype", "to_edtype"),
}  # fmt: skip

OPAQUE: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""The reason of each."""
