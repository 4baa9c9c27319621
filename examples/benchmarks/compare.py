"""Compiled variants of a train step and its arguments -> seconds of each, and how far their results are apart."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Args = tuple[Any, Any]
"""The state, which steps consume, and the batch."""


def time_in_turn(steps: Mapping[str, jax.stages.Compiled], args: Args, runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each step; the steps take turns, each going on where the last one stopped.

    Steps consume the state that they are given, the first one that of `args`.
    """
    state, batch = args
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(-1, runs):  # run -1 warms up
        for name, step in steps.items():
            began = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            if run >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def largest_differences(steps: Mapping[str, jax.stages.Compiled], args: Args) -> dict[str, tuple[float, str]]:
    """For each step but the plain one, how far its results from `args` are from the plain one's.

    That is the largest over all leaves of max |difference| / max |plain|, with the path of the leaf.
    """
    state, batch = args

    def results(step: jax.stages.Compiled) -> list[tuple[str, Any]]:
        leaves = jax.tree.leaves_with_path(step(jax.tree.map(jnp.copy, state), batch))
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]

    plain = results(steps["plain"])
    found = {}
    for name, step in steps.items():
        if name != "plain":
            pairs = zip(plain, results(step), strict=True)
            found[name] = max((_difference(a, b), path) for (path, a), (_, b) in pairs)
    return found


def _difference(a: Any, b: Any) -> float:
    finite, apart, largest = _compared(a, b)
    if not finite:
        raise FloatingPointError("A step's results are not finite; compare steps on other data.")
    return float(apart) / max(float(largest), float(jnp.finfo(jnp.float32).tiny)) if apart else 0.0


@jax.jit  # on the device: results are gigabytes
def _compared(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether both are finite, how far they are apart at most, and the largest of the first."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    finite = jnp.isfinite(a).all() & jnp.isfinite(b).all()
    return finite, jnp.abs(a - b).max(initial=0.0), jnp.abs(a).max(initial=0.0)
