"""Schedule -> program: equations in stages behind barriers, or names and policies, or a forward and a backward pass.

In: `Traced`, `Graph`, `Schedule`. Out: a jaxpr, or a function for JAX to differentiate. Law: it computes what the
function computes; a schedule without stages leaves the equations as they were.

Reading order: `_emit` (the joint program of a whole step); `_analysis` (cached queries of it) with `_hoisting` and
`_layouts`; `_constraints` (orderings that barriers enforce, by named rules that can be switched off), `_writer`
(equations and barriers), `_transfers` (copies from and to host memory), `_detaching`; `_validation` (proof that the
program computes the step); for functions that are differentiated later `_joint`, `_bodies`, `_halves` (custom_vjp), and
`_naming`, `_segmentation`, `_policy` (policies).
"""
