"""Equation -> a program of that single equation, and a cache on disk of figures measured on such programs.

Invariant: equations with the same key compile to the same program, so each figure is measured once per machine.

- `workspaces`: bytes of scratch memory, by compiling the equation separately. Layout copies of a convolution's operands
  and library scratch appear in no jaxpr. Figures are cached by equation, compiler options and jax version.
- `alone_seconds`: seconds by a roofline of the equation's kernels.
- `kernels_work`: whether the attention kernels run on this machine's device, with the results of XLA's operations. Each
  distinct attention is tried once per kind of device, version of jax and of the kernels, on random numbers, with two
  examples and two heads. If a kernel fails or differs, plans for the device do not use it.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._attention import _gradient_kernels, _kernels, _tiles
from .._attention._finding import Site
from .._attention._operations import ATTENTION, GRADIENT
from .._attention._pattern import Axes, Pattern
from .._model._graph import backend
from .._program import _compat
from .._program._compat import Aval
from .._program._flops import aval_nbytes
from .._program._primitives import is_contraction, is_in_chunks
from .._rewrite._kernel_choice import with_bodies_replaced
from .._rewrite._trace import Traced
from .._runtime._cache_folder import cache_dir, read, store
from .._runtime._errors import warn
from .._runtime._progress import phase
from ._devices import DeviceSpec
from ._hlo import parse
from ._memory_stats import MemoryStats
from ._program import Compiled, Program
from ._roofline import roofline


def alone(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Return a program of the single equation."""
    return _compat.single(eqn, [_compat.new_var(a.aval) for a in eqn.invars])


def key(eqn: jex.JaxprEqn, where: object) -> str:
    """Return the cache key of an equation: its primitive, types and parameters, and `where` it is compiled."""
    params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(eqn.params.items(), key=lambda item: item[0])))
    what = (eqn.primitive.name, [str(a.aval) for a in eqn.invars], params)
    return hashlib.sha256(repr((what, where)).encode()).hexdigest()


class Figures:
    """Numbers by key in a file of the cache folder. **Arguments:** `name` of the file; `kind` its numbers' type."""

    def __init__(self, name: str, kind: Callable[[Any], object]):
        self.path: Path = cache_dir() / name
        self.kind = kind
        self.fresh: dict[str, Any] = {}
        self.known = self._read()

    def _read(self) -> dict[str, Any]:
        def parse(text: str) -> dict[str, Any]:
            return {str(k): None if v is None else self.kind(v) for k, v in json.loads(text).items()}

        return read(self.path, parse) or {}

    def get(self, key: str, measure: Callable[[], object]) -> Any:
        """Return the number for a key, measured if it is not known."""
        if key not in self.known:
            self.known[key] = self.fresh[key] = measure()
        return self.known[key]

    def __enter__(self) -> "Figures":
        return self

    def __exit__(self, *_: object) -> None:
        self.store()  # also after Ctrl-C

    def store(self) -> None:
        """Add the new numbers to the file, and keep those that other processes added since."""
        if self.fresh:
            store(self.path, json.dumps(self.fresh | self._read()))


def workspaces(
    traced: Traced,
    program: Program,
    platform: str,
    above_nbytes: int,
    among: Collection[int] | None = None,
) -> dict[int, int]:
    """Return scratch bytes by equation index, for contractions with operands above a size, and for rows in chunks,
    which may need many times their operands; `among` restricts the equations.

    They are compiled for the program's device with its options. **Arguments:** `platform` JAX's name for the device's.
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
        and (
            is_in_chunks(eqn) or max(aval_nbytes(a.aval) for a in (*eqn.invars, *eqn.outvars)) > above_nbytes
        )
    ]
    found: dict[int, int] = {}
    with phase("compiling single operations", len(large), kind="compile") as progress, cache:
        for i, eqn in large:
            measure = functools.partial(_measure, eqn, program)
            found[i] = cache.get(key(eqn, where), measure)
            progress.advance()
    return found


def alone_seconds(eqns: Sequence[jex.JaxprEqn], program: Program, device: DeviceSpec) -> list[float]:
    """Return the seconds of each equation, compiled separately, by a roofline of its kernels."""
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
            found.append(cache.get(key(eqn, where), lambda eqn=eqn: _seconds(eqn, program, device)))
            progress.advance()
    return found


def _seconds(eqn: jex.JaxprEqn, program: Program, device: DeviceSpec) -> float:
    return roofline(parse(_compiled(eqn, program).as_text() or ""), device).seconds


MOST_KEPT = 32
_kept: dict[str, Compiled] = {}
"""The last compiled single equations by key: some are used for memory and for time."""


def _compiled(eqn: jex.JaxprEqn, program: Program) -> Compiled:
    name = key(eqn, (program.compiler_options, program.otherwise, program.target))
    if name not in _kept:
        closed = alone(eqn)
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in closed.jaxpr.invars]
        _kept[name] = program.compile(program.jit(jex.jaxpr_as_fun(closed)), tuple(types), {})
        while len(_kept) > MOST_KEPT:
            del _kept[next(iter(_kept))]
    return _kept[name]


def _nothing() -> None:
    """Stand in for the function of a program of single equations."""


def _measure(eqn: jex.JaxprEqn, program: Program) -> int:
    try:
        compiled = _compiled(eqn, program)
    except Exception:  # some equations cannot be compiled separately (collectives, custom calls)
        return 0
    return MemoryStats.of(compiled).temporaries_nbytes


FEW = 2
"""Number of examples and of heads that is enough to see whether kernels work."""

APART = 0.05
"""Results in short formats may differ by this share of the largest entry even if kernels are correct."""


def kernels_work(sites: Sequence[Site], device: Any) -> bool:
    """Return whether the kernels compute all of these attentions correctly on a `jax.Device`; warn if not."""
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
    """Return the fault of the kernels for an attention, as text, "" if there is none."""
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
            if "RESOURCE_EXHAUSTED" in str(error):  # the device's memory is in use, no fault of kernels
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
    """Return random numbers of a type, with the sizes of the pattern's axes."""
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
