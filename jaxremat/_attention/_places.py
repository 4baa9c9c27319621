"""Attention on several devices -> each device's part of it.

    scores [batch, heads, queries, keys] over a mesh     names: (("data",), ("model",), (), ())
    a device has                                         an attention of its own rows and heads

A part is one along axes of the scores; where masks count places along one, a device counts from where its part begins.
What has no such axis, as keys have none of the queries, every device of that axis has whole, and its gradient is the
sum of theirs. Keys that are divided as queries are, as those of a long sequence, may pass round instead (see `Ring`):
the mesh's axes are then those of both.

What a device does of an attention whose keys are divided -> the same of all keys, which pass round.

    in each turn    attention of a device's queries over the keys that it has, and those go on to the next device
    results         rescaled to the largest score so far, and added up, as in a kernel
    gradients       of queries are added up; those of keys and values go round with them, and are home after all turns

A device has two parts of the keys at once, the one that it works on and the one that it receives, and never all of
them. Law: what all devices do together is the attention, up to the order of sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._program import _compat
from .._program._compat import Atom
from ._finding import Site
from ._pattern import Axes, Pattern, delta, results_of, spread, with_origins

Part = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True)
class Ring:
    """**Fields:** `names` of the mesh's axes over which keys are divided; the `pattern` of one turn on a device, whose
    last leaves are the numbers from which places are counted; `origins` the axis and the type of each of these, and
    `starts` those numbers for other axes than the keys'.
    """

    names: tuple[str, ...]
    pattern: Pattern
    origins: Sequence[tuple[int, Any]]
    starts: Callable[[int], jax.Array]

    def attend(self, part: Part, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the result of all turns, the largest scores and the totals, as `attend` does."""
        queries, keys, values, *leaves = operands
        pattern = self.pattern
        like, sums, _ = results_of(pattern, values)

        def turn(so_far: Sequence[jax.Array], i: jax.Array) -> tuple[Sequence[jax.Array], None]:
            keys, values, mean, most, total = so_far
            block = self._block(i)
            own = [self._leaf(a, axes, block) for a, axes in zip(leaves, pattern.leaves, strict=False)]
            made, largest, added = part(queries, keys, values, *own, *self._origins(block), pattern=pattern)
            larger = jnp.maximum(most, largest)
            finite = jnp.where(larger == -jnp.inf, 0.0, larger)
            less = jnp.exp(most - finite)
            seen = (
                largest > -jnp.inf
            )  # else no key of this part is for that query, and what was made is no number
            more = jnp.where(seen, added * jnp.exp(largest - finite), 0.0)
            made = jnp.where(spread(pattern, seen), made.astype(jnp.float32), 0.0)
            mean = mean * spread(pattern, less) + made * spread(pattern, more)
            return (*self._passed((keys, values)), mean, larger, total * less + more), None

        begun = (
            jnp.zeros(like.shape, jnp.float32),
            jnp.full(sums.shape, -jnp.inf, sums.dtype),
            jnp.zeros(sums.shape, sums.dtype),
        )
        (_, _, mean, most, total), _ = lax.scan(turn, (keys, values, *begun), self._turns())
        return [(mean / spread(pattern, total)).astype(like.dtype), most, total]

    def gradient(self, part: Part, operands: Sequence[jax.Array], *, kernels: bool) -> list[jax.Array]:
        """Return the gradients of all turns, as `attend_gradient` does. **Arguments:** `kernels` whether a part may be
        done in them, which read the result.
        """
        queries, keys, values, result, largest, total, cotangent, *leaves = operands
        pattern = self.pattern
        mean = delta(pattern, result, cotangent)  # of all keys, which no part has
        rows = (*((result,) if kernels else ()), largest, total, cotangent)

        def turn(so_far: Sequence[jax.Array], i: jax.Array) -> tuple[Sequence[jax.Array], None]:
            to_queries, *turning = so_far
            block = self._block(i)
            own = [self._leaf(a, axes, block) for a, axes in zip(leaves, pattern.leaves, strict=False)]
            origins = self._origins(block)
            made = part(queries, *turning[:2], *rows, *own, *origins, pattern=pattern, mean=mean)
            sums = (a + b.astype(a.dtype) for a, b in zip((to_queries, *turning[2:]), made, strict=True))
            to_queries, *to = sums
            return (to_queries, *self._passed((*turning[:2], *to))), None

        whole = (queries, keys, values)
        wide = [jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)) for a in whole]
        (to_queries, _, _, *to), _ = lax.scan(turn, (wide[0], keys, values, *wide[1:]), self._turns())
        return [a.astype(b.dtype) for a, b in zip((to_queries, *to), whole, strict=True)]

    def _turns(self) -> jax.Array:
        return jnp.arange(lax.axis_size(self.names), dtype=jnp.int32)

    def _block(self, turn: jax.Array) -> jax.Array:
        """Return the number of the part of the keys that this device has in a turn: its own in the first."""
        return lax.rem(
            lax.axis_index(self.names) - turn + lax.axis_size(self.names), lax.axis_size(self.names)
        )

    def _origins(self, block: jax.Array | int) -> list[jax.Array]:
        """Return where places are counted from, with this part of the keys."""
        size = self.pattern.sizes[self.pattern.key]
        found = (block * size if axis == self.pattern.key else self.starts(axis) for axis, _ in self.origins)
        return [jnp.asarray(a, kind) for a, (_, kind) in zip(found, self.origins, strict=True)]

    def _leaf(self, leaf: jax.Array, axes: Axes, block: jax.Array) -> jax.Array:
        """Return what of a leaf, which has all keys, belongs to a part of them."""
        key, size = self.pattern.key, self.pattern.sizes[self.pattern.key]
        if key not in axes or leaf.shape[axes.index(key)] == 1:
            return leaf
        return lax.dynamic_slice_in_dim(leaf, block * size, size, axes.index(key))

    def _passed(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return what the device before this one had of them."""
        count = lax.axis_size(self.names)
        return [lax.ppermute(a, self.names, [(i, (i + 1) % count) for i in range(count)]) for a in arrays]


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
