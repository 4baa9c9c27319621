"""Equation -> seconds of running it separately on this machine's device: the planner's times with `profile="measure"`.

Each distinct equation that is a kernel, or ends one, is compiled separately and timed once per kind of device and
version of jax. Figures are rounded and kept on disk, so that a machine gives the same plans every time.
"""

import functools
import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from .._program._compat import Aval
from .._program._flops import aval_nbytes
from .._program._primitives import is_light, is_view
from .._rewrite._trace import Traced
from .._runtime._progress import phase
from ._single_equation import Figures, alone, key

RUNS, BATCHES = 5, 5
"""Runs per batch, which are started in a row so that a GPU is not idle between them; and the number of batches."""


def measure(
    traced: Traced, device: Any, compiler_options: Sequence[tuple[str, object]], above_nbytes: int
) -> dict[int, float]:
    """Return seconds of single runs by equation index, for equations with an operand or result above a size.

    **Arguments:** `device` a `jax.Device`; `compiler_options` of the step; `above_nbytes`: smaller equations take less
    time than their launch from the host, and keep the roofline's figure. So do those that cannot run separately
    (collectives, callbacks) or move no data.
    """
    options = tuple(sorted(compiler_options))
    where = (str(device.device_kind), jax.__version__, options)
    name = hashlib.sha256(repr(where).encode()).hexdigest()[:16]
    cache = Figures(f"seconds-{name}.json", float)
    large = [
        (i, eqn)
        for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns)
        if not (eqn.effects or not eqn.outvars or is_view(eqn) or (is_light(eqn) and not eqn.invars))
        and max(aval_nbytes(a.aval) for a in (*eqn.invars, *eqn.outvars)) > above_nbytes
    ]
    found: dict[int, float] = {}
    with phase("timing single operations", len(large), kind="measure") as progress, cache:
        for i, eqn in large:
            run = functools.partial(_run_seconds, alone(eqn), device, dict(options))
            seconds = cache.get(key(eqn, where), run)
            if seconds is not None:
                found[i] = seconds
            progress.advance()
    return found


def _run_seconds(closed: jex.ClosedJaxpr, device: Any, options: dict[str, object]) -> float | None:
    """Return the median time of a run, to two digits; None if the equation cannot run separately."""
    try:
        with jax.default_device(device):
            operands = [_something(v.aval) for v in closed.jaxpr.invars]
            jitted = jax.jit(jex.jaxpr_as_fun(closed), compiler_options=options or None)
            compiled = jitted.lower(*operands).compile()
            results = jax.block_until_ready(compiled(*operands))
            times = []
            for _ in range(BATCHES):
                began = time.perf_counter()
                for _ in range(RUNS):
                    results = compiled(*operands)
                jax.block_until_ready(results)
                times.append((time.perf_counter() - began) / RUNS)
    except Exception:  # collectives, custom calls, or too little free memory
        return None
    return float(f"{statistics.median(times):.1e}")


def _something(aval: Aval) -> jax.Array:
    """Return an array of this type, with random floating-point numbers, because a device is faster on zeros."""
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        return jax.random.uniform(jax.random.key(0), aval.shape, jax.numpy.float32).astype(aval.dtype)
    return jax.numpy.zeros(aval.shape, aval.dtype)
