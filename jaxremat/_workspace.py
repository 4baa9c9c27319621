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
from ._cost import aval_nbytes
from ._devices import cache_dir, write_atomically
from ._primitives import is_contraction
from ._program import MemoryStats
from ._slices import SLICES, expands, sliced
from ._trace import Traced


def workspaces(traced: Traced, options: dict[str, Any], above_nbytes: int) -> dict[int, int]:
    """Scratch bytes by equation index, for contractions and expanding equations with operands above a size."""
    cache = _Cache(options)
    found: dict[int, int] = {}
    for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns):
        if not (expands(eqn) or is_contraction(eqn)) or eqn.effects or not eqn.outvars:
            continue
        if max((aval_nbytes(a.aval) for a in (*eqn.invars, *eqn.outvars)), default=0) > above_nbytes:
            found[i] = cache.get(eqn)
    cache.store()
    return found


class _Cache:
    def __init__(self, options: dict[str, Any]):
        self.options = options
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
            sorted(self.options.items()),
            jax.__version__,
            jax.default_backend(),
            expands(eqn) and SLICES,
        )
        key = hashlib.sha256(repr((what, where)).encode()).hexdigest()
        if key not in self.known:
            self.fresh = True
            self.known[key] = _measure(eqn, self.options)
        return self.known[key]

    def store(self) -> None:
        if self.fresh:
            with contextlib.suppress(OSError):  # a cache that cannot be written is no cache
                write_atomically(self.path, json.dumps(self.known))


def _measure(eqn: Any, options: dict[str, Any]) -> int:
    alone = (
        sliced(eqn) if expands(eqn) else _compat.single(eqn, [_compat.new_var(a.aval) for a in eqn.invars])
    )
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in alone.jaxpr.invars]
    try:
        compiled = jax.jit(jex.jaxpr_as_fun(alone), compiler_options=options or None).lower(*types).compile()
    except Exception:  # what cannot be compiled alone (collectives, custom calls) has no figure
        return 0
    return MemoryStats.of(compiled).temporaries_nbytes
