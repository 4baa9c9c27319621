"""Equation -> bytes of scratch memory, by compiling the equation alone.

Layout copies of a convolution's operands and library scratch appear in no jaxpr.
Figures are cached on disk by equation, compiler options and jax version.
"""

import functools
from collections.abc import Collection, Sequence

import jax
import jax.extend.core as jex

from .._model._backend import backend
from .._program._flops import aval_nbytes
from .._program._primitives import is_contraction
from .._rewrite._kernel_choice import with_bodies_replaced
from .._rewrite._trace import Traced
from .._runtime._progress import phase
from ._devices import DeviceSpec
from ._hlo import parse
from ._memory_stats import MemoryStats
from ._program import Compiled, Program
from ._roofline import roofline
from ._single_equation import Figures, alone, key


def workspaces(
    traced: Traced,
    program: Program,
    platform: str,
    above_nbytes: int,
    among: Collection[int] | None = None,
) -> dict[int, int]:
    """Return scratch bytes by equation index, for contractions with operands above a size; with
    `among` for those of them alone.

    They are compiled for the device and with the options of the program; `platform` is the device's, as JAX calls it.
    """
    program = program.alone(_nothing)
    device = jax.default_backend() if program.target is None else program.target.device
    where = (sorted(program.compiler_options), jax.__version__, device)
    cache = Figures("workspace.json", int)
    large = [
        (i, with_bodies_replaced(eqn, backend(platform)))
        for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns)
        if (among is None or i in among)
        and is_contraction(eqn)
        and not eqn.effects
        and eqn.outvars
        and max(aval_nbytes(a.aval) for a in (*eqn.invars, *eqn.outvars)) > above_nbytes
    ]
    found: dict[int, int] = {}
    with phase("compiling single operations", len(large), kind="compile") as progress, cache:
        for i, eqn in large:
            measure = functools.partial(_measure, alone(eqn), program)
            found[i] = cache.get(key(eqn, where), measure)
            progress.advance()
    return found


def alone_seconds(eqns: Sequence[jex.JaxprEqn], program: Program, device: DeviceSpec) -> list[float]:
    """Return seconds of each of these equations, compiled alone, by a roofline of its kernels."""
    program = program.alone(_nothing)
    where = (sorted(program.compiler_options), jax.__version__, device)
    found: list[float] = []
    if not eqns:
        return found
    with (
        phase("compiling single operations", len(eqns), kind="compile") as progress,
        Figures("alone.json", float) as cache,
    ):
        for eqn in (with_bodies_replaced(each, backend(device.platform)) for each in eqns):
            found.append(cache.get(key(eqn, where), lambda eqn=eqn: _seconds(alone(eqn), program, device)))
            progress.advance()
    return found


def _seconds(closed: jex.ClosedJaxpr, program: Program, device: DeviceSpec) -> float:
    return roofline(parse(_compiled(closed, program).as_text() or ""), device).seconds


def _compiled(closed: jex.ClosedJaxpr, program: Program) -> Compiled:
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in closed.jaxpr.invars]
    return program.compile(program.jit(jex.jaxpr_as_fun(closed)), tuple(types), {})


def _nothing() -> None:
    """Stand for what a program of single equations has in place of a function."""


def _measure(closed: jex.ClosedJaxpr, program: Program) -> int:
    try:
        compiled = _compiled(closed, program)
    except Exception:  # what cannot be compiled alone (collectives, custom calls) has no figure
        return 0
    return MemoryStats.of(compiled).temporaries_nbytes
