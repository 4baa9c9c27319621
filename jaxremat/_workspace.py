"""Equation -> bytes of scratch memory, by compiling the equation alone.

Layout copies of a convolution's operands, index arrays of a pooling gradient and library scratch appear in no jaxpr.
Figures are cached on disk by equation, compiler options and jax version.
"""

import contextlib
import hashlib
import json
import re
from typing import Any

import jax
import jax.extend.core as jex

from . import _compat
from ._backend import backend
from ._cost import aval_nbytes
from ._devices import cache_dir, write_atomically
from ._primitives import is_contraction
from ._program import MemoryStats, Program
from ._slices import SLICES, expands, sliced
from ._trace import Traced


def workspaces(traced: Traced, program: Program, platform: str, above_nbytes: int) -> dict[int, int]:
    """Scratch bytes by equation index, for contractions and expanding equations with operands above a size.

    They are compiled for the device and with the options of the program; `platform` is the device's, as JAX calls it.
    """
    cache = _Cache(
        Program(_nothing, compiler_options=program.compiler_options, target=program.target), platform
    )
    found: dict[int, int] = {}
    for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns):
        if not (expands(eqn) or is_contraction(eqn)) or eqn.effects or not eqn.outvars:
            continue
        if max((aval_nbytes(a.aval) for a in (*eqn.invars, *eqn.outvars)), default=0) > above_nbytes:
            found[i] = cache.get(eqn)
    cache.store()
    return found


class _Cache:
    def __init__(self, program: Program, platform: str):
        self.program = program
        self.slicing = backend(platform).hoists  # as the emitter does
        self.path = cache_dir() / "workspace.json"
        self.fresh = False
        try:
            self.known: dict[str, int] = {
                str(k): int(v) for k, v in json.loads(self.path.read_text()).items()
            }
        except (OSError, ValueError, AttributeError, TypeError):
            self.known = {}

    def get(self, eqn: Any) -> int:
        params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(eqn.params.items(), key=lambda item: item[0])))
        what = (eqn.primitive.name, [str(a.aval) for a in eqn.invars], params)
        where = (
            sorted(self.program.compiler_options),
            jax.__version__,
            jax.default_backend() if self.program.target is None else self.program.target.name,
            expands(eqn) and self.slicing and SLICES,
        )
        key = hashlib.sha256(repr((what, where)).encode()).hexdigest()
        if key not in self.known:
            self.fresh = True
            self.known[key] = _measure(eqn, self.program, self.slicing)
        return self.known[key]

    def store(self) -> None:
        if self.fresh:
            with contextlib.suppress(OSError):  # a cache that cannot be written is no cache
                write_atomically(self.path, json.dumps(self.known))


def _nothing() -> None:
    """What a program of single equations has in place of a function."""


def _measure(eqn: Any, program: Program, slicing: bool) -> int:
    alone = (
        sliced(eqn)
        if slicing and expands(eqn)
        else _compat.single(eqn, [_compat.new_var(a.aval) for a in eqn.invars])
    )
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in alone.jaxpr.invars]
    try:
        compiled = program.lower(program.jit(jex.jaxpr_as_fun(alone)), tuple(types), {}).compile()
    except Exception:  # what cannot be compiled alone (collectives, custom calls) has no figure
        return 0
    return MemoryStats.of(compiled).temporaries_nbytes
