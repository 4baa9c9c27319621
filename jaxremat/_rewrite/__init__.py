"""Equations -> equations in another form with the same results, for the planner to choose from.

In: a function or its flat equations. Out: `Traced`, in any form. Invariant: every form computes the same as the
function; only values in fewer bits or from inverses, which the user must allow, are rounded.

Reading order: `_source` is the step as traced, `_flat_program` the type that passes take and return, `_passes` the list
of passes, `_trace` runs them; `_backward_equations` tells the forward from the backward pass; `_loop_inlining` inlines
iterations and `_loop_closing` turns them into loops again, `_inner_loops` does so for inner loops, `_inlined_loops`
merges equal equations; `_nested_checkpointing` (levels), `_streamed_stacks` (rows of arrays in host memory),
`_optimizer_in_backward` (optimizer updates inside the loop), `_in_place_stacks`, `_fetch_turns`, `_sinking`;
`_program_readers`, `_row_scans`, `_region_cut`, `_region_loops`, `_row_parts`, `_halos`, `_regions`, `_row_regions`,
`_microbatches`, `_regions_in_loops`, `_row_chunks` (work on rows, or most of a step, one chunk at a time),
`_function_parts` (the same for functions that are differentiated later); `_pooling_places`, `_row_batches` (indices
that count rows), `_cotangent_chains`, `_kernel_choice` (equations that compile to better kernels); `_encodings` (values
in fewer bits); `_inverses`, `_reversed_loops`, `_reversed_chains` (undone blocks); `_gathered_operands`,
`_shard_map_body`, `_memory_order`, `_streamed_copies`; `_decisions`, `_domain_edges` and `_selections` (decisions that
run once); `_masks` (masks that read results instead of operands); `_fingerprint`.
"""
