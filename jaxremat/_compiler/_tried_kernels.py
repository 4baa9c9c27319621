"""Attention that was found, the device at hand -> whether its kernels run there, and give what XLA's operations give.

Each distinct attention is tried once per kind of device, version of jax and of the kernels: with random numbers, for
two examples and two heads of all that there are. What a device cannot run, or computes otherwise, no plan uses there.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._attention import _gradient_kernels, _kernels, _tiles
from .._attention._finding import Site
from .._attention._operations import ATTENTION, GRADIENT
from .._attention._pattern import Axes, Pattern
from .._program._compat import Aval
from .._runtime._errors import warn
from .._runtime._progress import phase
from ._single_equation import Figures

FEW = 2
"""So many examples, and heads, are enough to see whether kernels work."""

APART = 0.05
"""Results of products in short formats are as far apart as this share of the largest, where kernels are right."""


def kernels_work(sites: Sequence[Site], device: Any) -> bool:
    """Return whether kernels do what all of these attentions do, on a `jax.Device`. Where they do not, a warning
    says so.
    """
    written = b"".join(
        Path(str(module.__file__)).read_bytes() for module in (_kernels, _gradient_kernels, _tiles)
    )
    where = (str(device.device_kind), jax.__version__, hashlib.sha256(written).hexdigest())
    distinct = {site.pattern: site for site in sites}.values()
    with (
        phase("trying attention's kernels", len(distinct), kind="measure"),
        Figures("tried.json", str) as known,
    ):
        for site in distinct:
            text = repr((site.pattern, [str(a.aval) for a in (*site.operands, *site.leaves)], where))
            failure = known.get(
                hashlib.sha256(text.encode()).hexdigest(), functools.partial(_failure, site, device)
            )
            if failure:
                warn(
                    f"The attention kernels do not work on this {device.device_kind} with jax {jax.__version__} "
                    f"({failure}), so steps are planned without them. Please report it."
                )
                return False
    return True


def _failure(site: Site, device: Any) -> str:
    """Return what is wrong with kernels for an attention, "" where nothing is."""
    pattern = site.pattern
    shared = {axis for axis in pattern.scores.columns if axis is not None}
    sizes = [min(n, FEW) if d in shared and d != pattern.key else n for d, n in enumerate(pattern.sizes)]
    small = replace(pattern, sizes=tuple(sizes))
    (read, (result, *_)) = pattern.axes(gradient=False)
    random = np.random.default_rng(0)
    with jax.default_device(device):
        operands = [
            _something(random, small, axes, a.aval)
            for axes, a in zip((*read, *pattern.leaves), (*site.operands, *site.leaves), strict=True)
        ]
        cotangent = _something(random, small, result, site.result.aval)
        try:
            found, wanted = (
                jax.jit(functools.partial(_both_passes, small, kernels))(operands, cotangent)
                for kernels in (True, False)
            )
            names = ["result", "gradient of queries", "gradient of keys", "gradient of values"]
            names += ["gradient of a bias"] * len(pattern.learned)
            for name, a, b in zip(names, found, wanted, strict=True):
                a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                largest = float(np.nanmax(np.abs(b), initial=0.0))
                if not np.allclose(a, b, rtol=0, atol=APART * largest, equal_nan=True):
                    return f"the {name} differs"
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # beside what is there, which says nothing of kernels
                return ""
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _both_passes(
    pattern: Pattern, kernels: bool, operands: Sequence[jax.Array], cotangent: jax.Array
) -> list[jax.Array]:
    params = {"pattern": pattern, "kernels": kernels, "places": None}
    of, leaves = operands[:3], operands[3:]
    result, *sums = ATTENTION.bind(*of, *leaves, **params)
    whole = (result,) if kernels else ()
    return [result, *GRADIENT.bind(*of, *whole, *sums, cotangent, *leaves, **params)]


def _something(random: np.random.Generator, pattern: Pattern, axes: Axes, aval: Aval) -> jax.Array:
    """Return random numbers of this type, as large as the pattern has its axes."""
    rank = len(pattern.sizes)
    shape = [
        pattern.sizes[axis] if axis is not None and axis < rank else n
        for axis, n in zip(axes, aval.shape, strict=True)
    ]
    if aval.dtype == jnp.bool_:
        return jnp.asarray(random.random(shape) < 0.9)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(random.integers(0, FEW, shape), aval.dtype)
    return jnp.asarray(random.normal(size=shape), aval.dtype)
