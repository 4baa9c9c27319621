"""Two variants of a step and its arguments -> how far their results are apart, and seconds of each run."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Run = Callable[..., Any]

ROUNDINGS = 8.0
"""What results may differ by, as a multiple of what the plain step's move by when its arguments move by their last bit:
programs that add in another order differ that much."""


@dataclass(frozen=True)
class Leaf:
    """One array of the results.

    **Fields:** `path` in them; `shape` with its type; `apart` the largest difference between the two; `scale` the
    largest entry, or the largest change of an argument that stands in the same place; `rounding` the largest difference
    that the last bit of the arguments makes; `allowed`; `finite` whether it is so in both.
    """

    path: str
    shape: str
    apart: float
    scale: float
    rounding: float
    allowed: float
    finite: bool

    @property
    def agrees(self) -> bool:
        """Whether the difference is one of rounding."""
        return self.apart <= self.allowed

    @property
    def relative(self) -> float:
        """The difference as a share of the scale."""
        return self.apart / self.scale if self.scale else float(self.apart > 0)


def concrete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments with arrays in place of shapes, and whether there were any.

    Floats are random in [0, 0.1), which suits weights and second moments alike; integers are 0.
    """
    shapes = 0

    def fill(leaf: Any) -> Any:
        nonlocal shapes
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        shapes += 1
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        key = jax.random.fold_in(jax.random.key(0), shapes)
        return jax.random.uniform(key, leaf.shape, jnp.float32, maxval=0.1).astype(leaf.dtype)

    args, kwargs = jax.tree.map(fill, (args, kwargs))
    return args, kwargs, shapes > 0


def compare(plain: Run, planned: Run, args: Any, kwargs: Any, rtol: float) -> list[Leaf]:
    """Every leaf of the results of both, in order. **Arguments:** `rtol` allowed of a leaf's scale."""

    def results(run: Run, args: Any, kwargs: Any) -> list[tuple[str, np.ndarray]]:
        args, kwargs = _copied((args, kwargs))
        leaves = jax.tree.leaves_with_path(run(*args, **kwargs))
        return [(jax.tree_util.keystr(path), _array(leaf)) for path, leaf in leaves]

    before = {
        jax.tree_util.keystr(path): _array(leaf)
        for path, leaf in jax.tree.leaves_with_path(args)
        if isinstance(leaf, (jax.Array, np.ndarray))
    }
    rows = zip(
        results(plain, args, kwargs),
        results(planned, args, kwargs),
        results(plain, *_nudged((args, kwargs))),
        strict=True,
    )
    return [_leaf(path, a, b, c, before.get(path), rtol) for (path, a), (_, b), (_, c) in rows]


def _leaf(path: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, before: Any, rtol: float) -> Leaf:
    shape = f"{a.dtype}[{','.join(map(str, a.shape))}]"
    exact = a.dtype.kind not in "fc" and not jnp.issubdtype(a.dtype, jnp.floating)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    eps = 0.0 if exact else float(jnp.finfo(a.dtype).eps)
    a, b, c = (x.astype(wide) for x in (a, b, c))
    start = before.astype(wide) if before is not None and before.shape == a.shape else 0.0
    rounding = _apart(a, c)
    scale = float(np.abs(np.nan_to_num(a - start)).max(initial=0.0))
    bound = 0.0 if exact else max(rtol, 8 * eps) * scale
    return Leaf(
        path=path,
        shape=shape,
        apart=_apart(a, b),
        scale=scale,
        rounding=rounding,
        allowed=max(bound, ROUNDINGS * rounding if np.isfinite(rounding) else 0.0),
        finite=bool(np.isfinite(a).all() and np.isfinite(b).all()),
    )


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where not the same entries are finite."""
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    return float(np.abs(np.nan_to_num(a - b)).max(initial=0.0))


def time_in_turn(runs: Mapping[str, Run], args: Any, kwargs: Any, count: int) -> dict[str, list[float]]:
    """Seconds of each run of each, in turn, so that whatever else the machine does meets all of them.

    Each starts from a copy of the arguments, made outside of the time, as a step may overwrite them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, count):  # run -1 warms up
        for name, run in runs.items():
            own, named = jax.block_until_ready(_copied((args, kwargs)))
            began = time.perf_counter()
            jax.block_until_ready(run(*own, **named))
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, fastest and slowest of each."""
    return {
        name: {"median": statistics.median(each), "fastest": min(each), "slowest": max(each)}
        for name, each in seconds.items()
    }


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, (jax.Array, np.ndarray)) else x, tree)


def _nudged(tree: Any) -> Any:
    """The same with every float moved to a neighbour."""

    def nudge(x: Any) -> Any:
        if isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.nextafter(jnp.asarray(x), jnp.asarray(jnp.inf, x.dtype))
        return x

    return jax.tree.map(nudge, tree)


def _array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
