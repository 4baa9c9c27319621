"""What a device does of an attention whose keys are divided -> the same of all keys, which pass round.

    in each turn    attention of a device's queries over the keys that it has, and those go on to the next device
    results         rescaled to the largest score so far, and added up, as in a kernel
    gradients       of queries are added up; those of keys and values go round with them, and are home after all turns

A device has two parts of the keys at once, the one that it works on and the one that it receives, and never all of
them. Law: what all devices do together is the attention, up to the order of sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._pattern import Axes, Pattern, delta, results_of, spread

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
