"""Function and arguments -> `Traced`: one flat jaxpr of the whole step, forward and backward.

Laws: evaluating `Traced.jaxpr`, its loops closed again, gives what the function gives. It holds no call that could be
inlined, no dead equation and no two equal pure equations of one loop: merging equals undoes the user's own
`jax.checkpoint`, so that the planner starts from the whole truth. With `respect_checkpoint` the regions that these
compute again in the backward pass are single equations instead. Its equations stand in the order of
`_order.memory_order`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from . import _compat
from ._inline import Inliner
from ._loops import Loop, Opened, open_loops, pairs
from ._order import memory_order
from ._primitives import is_loop_edge
from ._segments import segmented


@dataclass(frozen=True)
class Traced:
    """A step as one flat jaxpr.

    **Fields:** `jaxpr` normalised and ordered, with the loops of `_loops` laid open; `loop_of` for each of its
    equations the index in `loops` of the loop it is of, -1 for none; `flat` the same program merely inlined, in the
    user's order, which compiles to the plain step; `origin` for each equation of `flat` the index of the equation of
    `jaxpr` that computes the same, -1 where none does; `labels` the user's `checkpoint_name`s by variable; `in_tree`
    and `out_tree` the structures of `(args, kwargs)` without static arguments, and of the result; `donated` per flat
    argument; `rematted` whether the user's program has checkpoints of its own; `closed` the program as it was traced;
    `lengths` of its pairs of scans, outside of other loops, and `segments` how many segments each is cut into here;
    `respect_checkpoint` whether what the user's checkpoints compute again is left as it is.
    """

    jaxpr: jex.ClosedJaxpr
    loop_of: tuple[int, ...]
    loops: tuple[Loop, ...]
    flat: jex.ClosedJaxpr
    origin: tuple[int, ...]
    labels: dict[Any, str]
    in_tree: Any
    out_tree: Any
    donated: tuple[bool, ...]
    rematted: bool
    closed: jex.ClosedJaxpr
    lengths: tuple[int, ...]
    segments: tuple[int, ...]
    respect_checkpoint: bool

    def in_segments(self, segments: Sequence[int]) -> "Traced":
        """The same step with its pairs of scans in two levels, see `_segments`."""
        return normalise(
            self.closed,
            self.in_tree,
            self.out_tree,
            self.donated,
            segments,
            respect_checkpoint=self.respect_checkpoint,
        )

    def places(self, other: "Traced") -> dict[int, int]:
        """For this form's equations those of another form that compute the same, as far as there are any."""
        return {i: j for i, j in zip(self.origin, other.origin, strict=True) if i >= 0 and j >= 0}


def trace(
    jitted: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    respect_checkpoint: bool = False,
) -> Traced:
    """Trace a jitted step for these arguments (arrays or `jax.ShapeDtypeStruct`s) and normalise the result."""
    staged = jitted.trace(*args, **kwargs)  # type: ignore[attr-defined]
    infos, in_tree = jax.tree.flatten(staged.args_info)
    donated = tuple(bool(info.donated) for info in infos)
    out_tree = jax.tree.structure(staged.out_info)
    return normalise(staged.jaxpr, in_tree, out_tree, donated, respect_checkpoint=respect_checkpoint)


def normalise(
    closed: jex.ClosedJaxpr,
    in_tree: Any = None,
    out_tree: Any = None,
    donated: Sequence[bool] = (),
    segments: Sequence[int] | None = None,
    *,
    respect_checkpoint: bool = False,
) -> Traced:
    """Inline, lay open, merge, prune and order a jaxpr; with `segments` its pairs of scans in two levels."""
    inliner = Inliner(respect_checkpoint)
    flat = inliner.program(closed)
    forward = sorted(set(pairs(flat.jaxpr.eqns).values()))
    segments = tuple(segments or (1,) * len(forward))
    cut, of_flat, outer = segmented(flat, inliner, segments)
    opened = open_loops(cut, inliner, outer)
    merged, merged_of, loop_of = _merge(opened)
    kept = _alive(merged)
    order = memory_order(merged.jaxpr, kept, loop_of, opened.loops)
    place = {old: new for new, old in enumerate(order)}
    found = {
        of_flat[i]: place.get(new, -1) for i, new in zip(opened.origin, merged_of, strict=True) if i >= 0
    }
    jaxpr = _compat.new_jaxpr(
        merged.jaxpr.constvars,
        merged.consts,
        merged.jaxpr.invars,
        merged.jaxpr.outvars,
        [merged.jaxpr.eqns[i] for i in order],
    )
    _compat.check_jaxpr(jaxpr)
    return Traced(
        jaxpr=jaxpr,
        loop_of=tuple(loop_of[i] for i in order),
        loops=opened.loops,
        flat=flat,
        origin=tuple(found.get(i, -1) for i in range(len(flat.jaxpr.eqns))),
        labels=inliner.labels,
        in_tree=in_tree,
        out_tree=out_tree,
        donated=tuple(donated) or (False,) * len(closed.jaxpr.invars),
        rematted=inliner.rematted,
        closed=closed,
        lengths=tuple(flat.jaxpr.eqns[i].params["length"] for i in forward),
        segments=segments,
        respect_checkpoint=respect_checkpoint,
    )


def _merge(opened: Opened) -> tuple[jex.ClosedJaxpr, list[int], list[int]]:
    """Common subexpressions computed once; for each old equation the index of the new one, for each new one its loop.

    Within a loop and within its pair equals are merged: what the backward loop repeats it may as well read.
    """
    closed = opened.closed
    seen: dict[Any, int] = {}
    rename: dict[Any, Any] = {}
    eqns: list[Any] = []
    merged_of: list[int] = []
    loop_of: list[int] = []
    for eqn, loop in zip(closed.jaxpr.eqns, opened.loop_of, strict=True):
        invars = [a if _compat.is_literal(a) else rename.get(a, a) for a in eqn.invars]
        pure = not eqn.effects and eqn.primitive.name != "optimization_barrier" and not is_loop_edge(eqn)
        key = _key(eqn, invars) if pure else None
        if key is not None:
            key = (key, opened.loops[loop].group if loop >= 0 else -1)
        if key is not None and key in seen:
            twin = eqns[seen[key]]
            rename.update(zip(eqn.outvars, twin.outvars, strict=True))
            merged_of.append(seen[key])
            continue
        if key is not None:
            seen[key] = len(eqns)
        merged_of.append(len(eqns))
        loop_of.append(loop)
        eqns.append(eqn.replace(invars=invars))
    outvars = [a if _compat.is_literal(a) else rename.get(a, a) for a in closed.jaxpr.outvars]
    jaxpr = closed.jaxpr
    merged = _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, outvars, eqns)
    return merged, merged_of, loop_of


def _key(eqn: Any, invars: Sequence[Any]) -> Any:
    """What makes two pure equations the same; None where parameters cannot be compared."""

    def atom(a: Any) -> Any:
        if not _compat.is_literal(a):
            return a
        value = np.asarray(a.val)
        return (str(value.dtype), value.shape, value.tobytes(), str(a.aval))

    try:
        params = tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items()))
        key = (eqn.primitive, tuple(map(atom, invars)), params, eqn.ctx, tuple(v.aval for v in eqn.outvars))
        hash(key)
    except (TypeError, ValueError):
        return None
    return key


class _Typed(tuple):
    """A parameter with its type, ordered by name alone, so that `1`, `1.0` and `True` stay different."""

    __slots__ = ()

    def __lt__(self, other: Any) -> bool:
        return False


def _hashable(value: Any) -> Any:
    return _Typed((type(value), value))


def _alive(closed: jex.ClosedJaxpr) -> list[bool]:
    """For each equation whether an output or an effect needs it, in this iteration of its loop or the next."""
    eqns = closed.jaxpr.eqns
    needed = {a for a in closed.jaxpr.outvars if not _compat.is_literal(a)}
    carried = {_edge(eqn): eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "scan_carry"}
    alive = [False] * len(eqns)
    known = -1
    while known < (known := sum(alive)):
        for i in reversed(range(len(eqns))):
            eqn = eqns[i]
            last = eqn.primitive.name == "scan_last" and carried[_edge(eqn)] in needed
            if not alive[i] and (eqn.effects or last or any(v in needed for v in eqn.outvars)):
                alive[i] = True
                needed.update(a for a in eqn.invars if not _compat.is_literal(a))
                if eqn.primitive.name == "scan_last":
                    needed.add(carried[_edge(eqn)])
    return alive


def _edge(eqn: Any) -> tuple[int, int]:
    return eqn.params["loop"], eqn.params["index"]
