"""Schedule -> program: equations in stages behind fences, or names and policies, or a forward and a backward pass.

In: `Traced`, `Graph`, `Schedule`. Out: a jaxpr, or a function for JAX to differentiate. Law: it computes what the
function computes; a schedule without stages leaves the equations as they were.

Reading order: `_emit` (the joint program of a whole step); `_validation` (that it computes the step); its fences
`_fence_operands`, `_triggers`, `_placement`, `_hoisting`, `_weight_copies`,
`_last_reads`, `_mask_operands`, `_layouts`, `_decoding` (values kept in
fewer bits), `_elsewhere`, `_stacks_elsewhere` and `_streams` (host memory), `_undone_blocks`, `_detaching`; for
functions that are differentiated later `_joint`, `_bodies`, `_halves` (custom_vjp), `_differentiable_barrier`, and
`_naming`, `_segmentation`, `_policy`, `_max_pool` (policies).
"""
