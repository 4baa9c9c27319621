"""Attention without its matrix of scores.

In: flat equations. Out: the same, with two operations in place of each attention and its gradient, in XLA's operations
or in kernels of a GPU. Law: they compute what the equations computed, up to the order of sums.

Reading order: `_pattern` (what one attention computes, in any layout); `_reading`, `_finding` (equations -> where
attention is, forward and backward); `_operations` (the two, one part at a time); `_tiles`, `_kernels`,
`_gradient_kernels` (the same, a tile at a time); `_places` (one device's part, ring attention included); `_rewriting`
(which replaces the equations).
"""
