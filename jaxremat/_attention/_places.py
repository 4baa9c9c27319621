"""Attention on several devices -> each device's part of it.

    scores [batch, heads, queries, keys] over a mesh     names: (("data",), ("model",), (), ())
    a device has                                         an attention of its own rows and heads

A part is one along axes of the scores but for the keys'. What has no such axis, as keys have none of the queries,
every device of that axis has whole, and its gradient is the sum of theirs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ._pattern import Axes, Pattern


@dataclass(frozen=True)
class Places:
    """Where an attention is done. **Fields:** the `mesh` of the devices; for each axis of scores the `names` of the
    mesh's axes that it is divided over.
    """

    mesh: Any
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, scores: NamedSharding, pattern: Pattern) -> "Places | None":
        """Return where the scores are; None where what a device has of them is no attention by itself, or not
        all alike.
        """
        spec = dict(zip(pattern.scores.result, scores.spec, strict=False))
        each = (spec.get(axis) or () for axis in range(len(pattern.sizes)))
        places = cls(scores.mesh, tuple((own,) if isinstance(own, str) else tuple(own) for own in each))
        counted = {step.axis for step in (*pattern.before, *pattern.after)}
        even = all(n % places._parts(axis) == 0 for axis, n in enumerate(pattern.sizes))
        whole = all(not places.names[axis] or axis not in counted for axis in pattern.rows)
        return places if even and whole and not places.names[pattern.key] else None

    def part(self, pattern: Pattern) -> Pattern:
        """Return what a device has."""
        return replace(pattern, sizes=tuple(n // self._parts(axis) for axis, n in enumerate(pattern.sizes)))

    def sharding(self, axes: Axes) -> NamedSharding:
        """Return how an array with these axes lies."""
        return NamedSharding(self.mesh, PartitionSpec(*(self._over(axis) or None for axis in axes)))

    def on_each(
        self, part: Callable[..., Sequence[jax.Array]], read: Sequence[Axes], made: Sequence[Axes]
    ) -> Callable[..., Any]:
        """Return what the devices' parts make, of operands with the axes `read` and into results with those of
        `made`.
        """

        def here(*operands: jax.Array) -> list[jax.Array]:
            results = zip(part(*operands), made, strict=True)
            return [jax.lax.psum(a, names) if (names := self._shared(axes)) else a for a, axes in results]

        specs = [tuple(self.sharding(axes).spec for axes in each) for each in (read, made)]
        return jax.shard_map(
            here, mesh=self.mesh, in_specs=specs[0], out_specs=list(specs[1]), check_vma=False
        )

    def _over(self, axis: int | None) -> tuple[str, ...]:
        """Return the names that an axis is divided over, none for one beside the scores."""
        return () if axis is None or axis >= len(self.names) else self.names[axis]

    def _parts(self, axis: int) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names[axis])

    def _shared(self, axes: Axes) -> tuple[str, ...]:
        """Return the names over which an array with these axes is the sum of what devices have."""
        return tuple(name for axis, each in enumerate(self.names) if axis not in axes for name in each)
