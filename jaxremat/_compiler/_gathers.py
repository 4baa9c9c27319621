"""Traced step on several devices -> the operands of its products that the compiler has to gather.

Rule: an operand is gathered along a mesh axis unless the matching dimension of the result, or of the other operand for
a contracted dimension, is sharded over it too. A contraction over such an axis is added up over the devices instead.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from .._program import _compat
from .._program._compat import Args, Kwargs
from .._program._sharding_propagation import Layout, propagated
from .._rewrite._gathered_operands import Gather
from .._rewrite._trace import Traced
from ._program import Program
from ._shardings import meshes
from ._tags import TAG


def gathers(traced: Traced, program: Program, args: Args, kwargs: Kwargs) -> tuple[Gather, ...]:
    """Return the gathered operands of products outside of loops, also for meshes with explicit axes: a product may
    contract a dimension that is sharded in only one of its operands.
    """
    flat = traced.flat.jaxpr
    known = list(dict.fromkeys(meshes(flat.eqns, jax.tree.leaves((args, kwargs, program.in_shardings)))))
    if (
        len(known) != 1
        or len(set(known[0].axis_types)) != 1
        or jax.sharding.AxisType.Manual in known[0].axis_types
    ):
        return ()
    (mesh,) = known
    named = [_compat.in_scope(eqn, f"#{i}") for i, eqn in enumerate(flat.eqns)]
    closed = _compat.new_jaxpr(flat.constvars, traced.flat.consts, flat.invars, flat.outvars, named)
    operations, _ = propagated(program.lower(program.evaluating(closed, traced), args, kwargs))
    found = []
    for stack, read, made in operations:
        tags = TAG.findall(stack.partition('"(')[0] + "/")
        eqn = flat.eqns[int(tags[-1])] if tags else None
        if eqn is None or eqn.primitive.name != "dot_general" or len(read) != 2:
            continue
        for operand, wanted in _wanted(eqn, read, made[0][1]):
            spec = PartitionSpec(*(tuple(name for name, _, _ in axes) for axes in wanted))
            found.append(Gather(int(tags[-1]), operand, NamedSharding(mesh, spec)))
    return tuple(found)


def _wanted(eqn: jex.JaxprEqn, read: Sequence[Layout], made: Layout) -> Iterator[tuple[int, Layout]]:
    """Yield the operands of a product that have to be gathered, and the layout that the product needs."""
    contracted, batched = eqn.params["dimension_numbers"]
    behind = len(batched[0])
    for operand, layout in enumerate(read):
        if any(outer != 1 for axes in layout for _, outer, _ in axes):
            continue  # a part of an axis: no `PartitionSpec` can express it
        other = read[1 - operand]
        wanted = []
        for d, axes in enumerate(layout):
            if d in contracted[operand]:
                partner = other[contracted[1 - operand][contracted[operand].index(d)]]
            elif d in batched[operand]:
                partner = made[batched[operand].index(d)]
            else:
                free = [k for k in range(len(layout)) if k not in (*contracted[operand], *batched[operand])]
                first = behind if operand == 0 else len(made) - len(free)
                partner = made[first + free.index(d)]
            wanted.append(tuple(axis for axis in axes if axis in partner))
        if tuple(wanted) != tuple(layout):
            yield operand, tuple(wanted)
