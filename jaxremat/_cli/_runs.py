"""Variants of a step and its arguments -> arguments to run it with, and seconds of each run."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._api._comparison import Run, copied
from .._program._compat import Args, Kwargs


def concrete(args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments with arrays in place of shapes, and whether there were any.

    Floats are random in [0, 0.1), which suits weights and second moments alike; integers are 0.
    """
    shapes = 0

    def fill(leaf: object) -> Any:
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


def time_in_turn(runs: Mapping[str, Run], args: object, kwargs: object, count: int) -> dict[str, list[float]]:
    """Return seconds of each run of each, in turn, so that whatever else the machine does meets all of them.

    Each starts from a copy of the arguments, made outside of the time, as a step may overwrite them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, count):  # run -1 warms up
        for name, run in runs.items():
            own, named = jax.block_until_ready(copied((args, kwargs)))
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
