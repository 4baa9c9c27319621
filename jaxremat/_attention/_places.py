"""Attention on several devices -> each device's part of it.

    scores [batch, heads, queries, keys] over a mesh     names: (("data",), ("model",), (), ())
    a device has                                         an attention of its own rows and heads

A part is one along axes of the scores; where masks count places along one, a device counts from where its part begins.
What has no such axis, as keys have none of the queries, every device of that axis has whole, and its gradient is the
sum of theirs. Keys that are divided as queries are, as those of a long sequence, may pass round instead (see `_ring`):
the mesh's axes are then those of both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from .._program import _compat
from .._program._compat import Atom
from ._finding import Site
from ._pattern import Axes, Pattern, with_origins
from ._ring import Ring


@dataclass(frozen=True)
class Places:
    """Where an attention is done. **Fields:** the `mesh` of the devices; for each axis of scores the `names` of the
    mesh's axes that it is divided over, where keys pass round the keys' too; `key` the number of that one.
    """

    mesh: Any
    names: tuple[tuple[str, ...], ...]
    key: int

    @classmethod
    def of(
        cls, scores: NamedSharding, pattern: Pattern, operands: Sequence[NamedSharding | None] = ()
    ) -> "Places | None":
        """Return where the scores are; None where what a device has of them is no attention by itself, or not
        all alike.

        **Arguments:** `operands` where queries are, keys and values.
        """
        spec = dict(zip(pattern.scores.result, scores.spec, strict=False))
        each = (spec.get(axis) or () for axis in range(len(pattern.sizes)))
        places = cls(scores.mesh, tuple(map(_named, each)), pattern.key)
        able: tuple[Places | None, ...]
        if places.names[pattern.key]:
            # Where queries and keys are divided alike, the compiler divides scores along either.
            along = places._along_queries(pattern, operands[0]) if operands else None
            able = () if along is None else (along._passing(pattern, operands[1:]),)
        else:
            able = places._passing(pattern, operands[1:]), places
        return next((own for own in able if own is not None and own._is_even(pattern)), None)

    def _along_queries(self, pattern: Pattern, queries: NamedSharding | None) -> "Places | None":
        """Return the same with scores that are divided along queries, as these are, in place of keys; None where these
        are not divided so.
        """
        names, spec = self.names[self.key], queries.spec if queries is not None else ()
        rows = [
            axis for axis, over in zip(pattern.scores.rows, spec, strict=False) if _named(over or ()) == names
        ]
        if len(rows) != 1 or (row := rows[0]) is None or row >= len(self.names) or self.names[row]:
            return None
        return replace(
            self,
            names=tuple(names if a == row else () if a == self.key else n for a, n in enumerate(self.names)),
        )

    def _passing(self, pattern: Pattern, columns: Sequence[NamedSharding | None]) -> "Places | None":
        """Return the same with keys that pass round; None where they are not divided as queries are, or a device would
        have no more of all keys and values than it has of queries and results.
        """
        of = (pattern.scores.columns, pattern.mixed.columns)
        found = {
            _named(sharding.spec[axes.index(pattern.key)] or ()) if sharding is not None else ()
            for sharding, axes in zip(columns, of, strict=False)
            if pattern.key in axes
        }
        names = found.pop() if len(found) == 1 else ()
        wide = [axis for axis in pattern.rows if pattern.sizes[axis] > 1]
        rows = [axis for axis in wide if self.names[axis] == names and not any(axis in each for each in of)]
        if (
            not names
            or len(rows) != 1
            or pattern.learned
            or any(axis not in pattern.mixed.result for axis in wide)
        ):
            return None
        own = replace(
            self, names=tuple(names if axis == pattern.key else n for axis, n in enumerate(self.names))
        )
        part, query, value = self.part(pattern), *pattern.widths

        def count(*each: tuple[Axes, int]) -> int:
            return sum(
                width * math.prod(part.sizes[a] for a in axes if a is not None and a < len(part.sizes))
                for axes, width in each
            )

        here = count((pattern.scores.rows, query), (pattern.mixed.result, value))
        return own if count((of[0], query), (of[1], value)) > here else None

    def _is_even(self, pattern: Pattern) -> bool:
        """Return whether all devices have as much."""
        return all(n % self._parts(axis) == 0 for axis, n in enumerate(pattern.sizes))

    @property
    def turns(self) -> int:
        """In how many turns a device sees all keys: one where it has them."""
        return self._parts(self.key)

    def part(self, pattern: Pattern) -> Pattern:
        """Return what a device has, of one turn."""
        return replace(pattern, sizes=tuple(n // self._parts(axis) for axis, n in enumerate(pattern.sizes)))

    def on_each(
        self, part: Callable[..., Sequence[jax.Array]], pattern: Pattern, *, gradient: bool, kernels: bool
    ) -> Callable[..., Any]:
        """Return what the devices' parts make, of the operands and into the results of an attention or its gradient.

        **Arguments:** `part` what a device does, which takes the `pattern` of its part and operands of that.
        """
        read, made = pattern.axes(gradient=gradient, of_result=kernels or self.turns > 1)
        divided = [axis for axis, each in enumerate(self.names) if each]
        own, origins = with_origins(self.part(pattern), divided)

        def start(axis: int) -> jax.Array:
            return jax.lax.axis_index(self.names[axis]) * own.sizes[axis]

        ring = Ring(self.names[self.key], own, origins, start)

        def here(*operands: jax.Array) -> list[jax.Array]:
            if self.turns > 1:
                found = (
                    ring.gradient(part, operands, kernels=kernels)
                    if gradient
                    else ring.attend(part, operands)
                )
            else:
                found = part(*operands, *(start(axis).astype(kind) for axis, kind in origins), pattern=own)
            results = zip(found, made, strict=True)
            return [jax.lax.psum(a, names) if (names := self._shared(axes)) else a for a, axes in results]

        specs = [*map(self._spec, read), *(self._spec(axes, whole=self.key) for axes in pattern.leaves)]
        results = [self._spec(axes) for axes in made]
        return jax.shard_map(here, mesh=self.mesh, in_specs=tuple(specs), out_specs=results, check_vma=False)

    def _spec(self, axes: Axes, whole: int | None = None) -> PartitionSpec:
        """Return how an array with these axes lies, `whole` along one of them."""
        return PartitionSpec(*(None if axis == whole else self._over(axis) or None for axis in axes))

    def _over(self, axis: int | None) -> tuple[str, ...]:
        """Return the names that an axis is divided over, none for one beside the scores."""
        return () if axis is None or axis >= len(self.names) else self.names[axis]

    def _parts(self, axis: int) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names[axis])

    def _shared(self, axes: Axes) -> tuple[str, ...]:
        """Return the names over which an array with these axes is the sum of what devices have. Over those over which
        keys pass round nothing is left to be added up.
        """
        others = (each for axis, each in enumerate(self.names) if axis not in axes)
        return tuple(name for each in others if each != self.names[self.key] for name in each)


def ungathered(site: Site, makers: Mapping[Atom, jex.JaxprEqn]) -> list[Atom]:
    """Return keys and values as they are before all of them are gathered, where the program says that they are.

    **Arguments:** `makers` the equations by their results.
    """
    found: list[Atom] = []
    pattern = site.pattern
    for a, axes in zip(site.operands[1:], (pattern.scores.columns, pattern.mixed.columns), strict=True):
        maker = None if _compat.is_literal(a) else makers.get(a)
        gathers = maker is not None and maker.primitive.name == "sharding_constraint" and pattern.key in axes
        spec = maker.params["sharding"].spec if maker is not None and gathers else ()
        d = axes.index(pattern.key) if gathers else 0
        whole = gathers and not (d < len(spec) and spec[d])
        found.append(maker.invars[0] if maker is not None and whole else a)
    return found


def makers(closed: jex.ClosedJaxpr) -> dict[Any, jex.JaxprEqn]:
    """Return the equations by their results."""
    return {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}


def _named(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
