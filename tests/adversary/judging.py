"""A plain step's results and another's -> whether the other's are right, by what rounding does to the plain step.

The plain step is run again with its inputs moved by one unit in the last place, in several directions. Law: a result is
wrong that differs from the plain one by more than `SLACK` times as much as those do, and than `ROUNDINGS` units of
rounding of the array's largest number; integers, truths and the places of numbers that are not finite are equal, but
where moved inputs change them too. Before a result is called wrong the plain step is run with more directions, and
operation by operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SLACK = 10
ROUNDINGS = 64
DIRECTIONS, MORE_DIRECTIONS = 3, 24
MORE_AT_RANDOM = 240
"""What happens in one of a hundred evaluations of the plain step that round at random is no fault of another program.
"""


def is_reference(x: Any) -> bool:
    """Whether an argument is a reference, which the step may write."""
    return isinstance(x, jax.Ref)


def copied(args: Any) -> Any:
    """Arguments that a step may consume."""
    return jax.tree.map(lambda x: jax.new_ref(x[...]) if is_reference(x) else jnp.copy(x), args)


def called(run: Callable[..., Any], args: Sequence[Any]) -> list[np.ndarray]:
    """Results of a step for copies of these arguments, and what its references hold then."""
    args = copied(args)
    results = jax.tree.leaves(run(*args))
    held = [x[...] for x in jax.tree.leaves(args) if is_reference(x)]
    return numbers([*results, *held])


def numbers(leaves: Sequence[Any]) -> list[np.ndarray]:
    """Arrays of NumPy's, of the bits of keys; narrow floats are widened."""

    def one(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(np.float64) if floats else x

    return [one(x) for x in leaves]


def moved(args: Any, rng: random.Random | None) -> Any:
    """Arguments whose floats are moved by one unit: all upward, or each in a random direction."""

    def one(x: Any) -> Any:
        if is_reference(x):
            return jax.new_ref(x[...])
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            return x
        if rng is None:
            return jax.device_put(jnp.nextafter(x, jnp.full_like(x, jnp.inf)), x.sharding)
        ways = np.random.default_rng(rng.getrandbits(32)).choice([-jnp.inf, jnp.inf], x.shape)
        return jax.device_put(jnp.nextafter(x, jnp.asarray(ways, x.dtype)), x.sharding)

    return jax.tree.map(one, args)


@dataclass
class Judge:
    """One step's.

    **Fields:** `plain` compiled; its `args`; `evaluated` gives its results operation by operation, rounded to the
    nearest or at random; whether `plain` rounds `at_random`, so that it differs from itself where moved inputs give no
    numbers.
    """

    plain: Callable[..., Any]
    args: tuple[Any, ...]
    evaluated: Callable[[np.random.Generator | None], list[Any]] | None = None
    at_random: bool = False
    want: list[np.ndarray] = field(init=False)
    others: list[list[np.ndarray]] = field(init=False)
    _more: bool = False

    def __post_init__(self) -> None:
        self.want = called(self.plain, self.args)
        self.others = []
        self._move(DIRECTIONS, "moved")

    def _move(self, count: int, seed: str) -> None:
        rng = random.Random(seed)
        for i in range(count):
            stays = self.at_random and i % 2 == 0
            args = self.args if stays else moved(self.args, rng if i or seed != "moved" else None)
            self.others.append(called(self.plain, args))

    def _doubt(self) -> None:
        """Learn more of what rounding does."""
        if not self._more:
            self._more = True
            self._move(MORE_AT_RANDOM if self.at_random else MORE_DIRECTIONS, "more")
            if self.evaluated is not None:
                rounding = np.random.default_rng(0)
                self.others += [
                    numbers(self.evaluated(rounding if i else None)) for i in range(MORE_DIRECTIONS)
                ]

    def wrong(self, got: list[np.ndarray]) -> str:
        """What is wrong with results; "" where nothing is."""
        if self._difference(got):
            self._doubt()
        return self._difference(got)

    def _difference(self, got: list[np.ndarray]) -> str:
        if len(got) != len(self.want):
            return f"{len(got)} results in place of {len(self.want)}"
        for i, (a, b) in enumerate(zip(self.want, got, strict=True)):
            if said := _difference(a, b, [other[i] for other in self.others if i < len(other)]):
                return f"result {i}: {said}"
        return ""


def _difference(a: np.ndarray, b: np.ndarray, others: list[np.ndarray]) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{b.dtype}{b.shape} in place of {a.dtype}{a.shape}"
    if not np.issubdtype(a.dtype, np.inexact):
        stable = np.ones(a.shape, bool)
        for other in others:
            stable &= other == a
        # Whoever reads decisions that are not stable may give other integers in other places too.
        differ = int((a != b).sum())
        return f"{differ} of {a.size} integers differ" if differ and stable.all() else ""
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        alike = all(np.array_equal(finite, np.isfinite(other)) for other in others)
        return "other numbers are not finite" if alike else ""
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "other infinities"
    most = np.abs(a).max(initial=0, where=finite)
    error = np.abs(a - b).max(initial=0, where=finite)
    able = [np.abs(a - o).max(initial=0, where=finite & np.isfinite(o)) for o in others]
    allowed = SLACK * max(able, default=0) + ROUNDINGS * 2.0**-23 * most + 1e-30
    return f"off by {error:.3g} of {most:.3g}, {allowed:.3g} allowed" if error > allowed else ""
