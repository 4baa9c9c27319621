"""Flat equations -> the same, with names on the cotangents that should be in memory although XLA:CPU would not write
them.

If layers pass their input on through pointwise operations only (`x * gate(x) + f(x)`, highway layers, unrolled
recurrent cells, dropout on a residual branch), so do their gradients: the cotangent of a layer's input is pointwise in
that of its output. XLA:CPU then recomputes it in each kernel that reads it, from the outputs of all later layers. The
work grows with the square of the depth, and the end of the backward pass still reads the residuals of its beginning, so
no stage could drop any. In such a chain, a cotangent is named if it has several readers and depends on more than
`CHAIN` times its size, counted from the last named one. In planned steps it passes its own barrier.

Invariant: only names are added. Bodies of loops have no such chains: they pass cotangents on in memory.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_backward, is_fusion_root, is_relabelling, reads_memory
from ._flat_program import with_eqns

CHAIN = 1.5
"""A cotangent is worth writing if it depends on more than this many times its size."""

SMALL_SHARE = 0.01
"""Cotangents below this share of the largest are not worth a barrier."""

MOST_SOURCES = 64
"""A value with more sources counts as being in memory: its sources are not followed."""

_SCOPE = "in_memory"


def is_named(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation computes a cotangent that should be in memory. Loops and calls may inherit its
    name.
    """
    return len(eqn.outvars) == 1 and _compat.has_scope(eqn, _SCOPE)


def in_memory(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Return the equation with a barrier behind its result."""
    (made,) = eqn.outvars
    before = _compat.new_var(made.aval)
    return [eqn.replace(outvars=[before]), _compat.barrier([before], [made], eqn.source_info)]


def with_names(flat: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the equations, with one more scope on those that compute such cotangents."""
    eqns = flat.jaxpr.eqns
    read = Counter(v for eqn in eqns for v in _compat.variables(eqn.invars))
    written = _read_by_fusion_root(eqns)
    in_backward = [is_backward(eqn) and not _compat.has_scope(eqn, _compat.REMATTED) for eqn in eqns]
    sizes = [
        aval_nbytes(v.aval)
        for eqn, is_so in zip(eqns, in_backward, strict=True)
        if is_so
        for v in eqn.outvars
    ]
    small = SMALL_SHARE * max(sizes, default=0)
    cotangents = {v for eqn, is_so in zip(eqns, in_backward, strict=True) if is_so for v in eqn.outvars}
    sources: dict[Any, frozenset[Any]] = {}
    named: list[Any] = []
    for eqn, is_so in zip(eqns, in_backward, strict=True):
        # Values that a fusion root computes or reads are in memory, so chains end there.
        if is_fusion_root(eqn) or len(eqn.outvars) != 1 or eqn.outvars[0] in written:
            named.append(eqn)
            continue
        (made,) = eqn.outvars
        of = frozenset().union(*(sources.get(v, {v}) for v in _compat.variables(eqn.invars)))
        nbytes = aval_nbytes(made.aval)
        chained = is_so and read[made] > 1 and nbytes > small
        chained = chained and sum(aval_nbytes(v.aval) for v in of & cotangents) > CHAIN * nbytes
        if not chained and len(of) <= MOST_SOURCES:
            sources[made] = of
        named.append(_compat.in_scope(eqn, _SCOPE) if chained else eqn)
    return with_eqns(flat, named)


def _read_by_fusion_root(eqns: Sequence[jex.JaxprEqn]) -> set[jex.Var]:
    """Return the values that contractions and the like read, directly or through views: they are in memory."""
    found: set[Any] = set()
    for eqn in reversed(eqns):
        if reads_memory(eqn) or (is_relabelling(eqn) and not found.isdisjoint(eqn.outvars)):
            found.update(_compat.variables(eqn.invars))
    return found
