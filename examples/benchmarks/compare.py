"""Compiled variants of a train step and its arguments -> seconds of each, and how far their results are apart."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    a, b = np.asarray(a), np.asarray(b)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise FloatingPointError("A step's results are not finite; compare steps on other data.")
    apart = float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
    return apart / max(float(np.abs(a).max(initial=0.0)), float(np.finfo(np.float32).tiny)) if apart else 0.0
