"""Traced step -> hashes: of equal fingerprints two programs can follow the same plan; of equal structure they have the
same equations but for shapes, so that the plan of one says much of the other.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom
from ._selections import INSTEAD
from ._trace import Traced

_ASKED = {asks.name: selects.name for selects, asks in INSTEAD.items()}
"""Of which selection a comparison is whether an operand is the result."""


def fingerprint(traced: Traced) -> str:
    """Return a hash of the normalised program: primitives, parameters, types and data flow, without names and
    places.
    """
    jaxpr = traced.jaxpr.jaxpr
    index: dict[Any, int] = {}
    digest = hashlib.sha256()
    selected: dict[tuple[str, frozenset[str]], str] = {}

    def atom(a: Atom) -> str:
        return f"{a.val!r}:{a.aval}" if _compat.is_literal(a) else str(index[a])

    def define(variables: Iterable[jex.Var]) -> str:
        return ",".join(f"{index.setdefault(v, len(index))}:{v.aval}" for v in variables)

    digest.update(
        f"{define(jaxpr.constvars)};{define(jaxpr.invars)};{traced.donated};{_compat.JAX_VERSION}".encode()
    )
    for loop in traced.loops:
        options = {k: v for k, v in loop.eqn.params.items() if k in ("reverse", "unroll", "_split_transpose")}
        digest.update(f"{loop.id},{loop.group},{loop.length},{loop.role},{loop.parent},{options};".encode())
    for i, (eqn, loop_of) in enumerate(zip(jaxpr.eqns, traced.loop_of, strict=True)):
        params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(eqn.params.items(), key=lambda item: item[0])))
        # Masks tell nothing apart by what they read here, so that plans made before they did are still found.
        read = (a if _compat.is_literal(a) else traced.program.masked.get(i, a) for a in eqn.invars)
        name, ins = eqn.primitive.name, [*map(atom, read)]
        outs = define(eqn.outvars)
        if name in _ASKED.values():
            selected[name, frozenset(ins)] = atom(eqn.outvars[0])
        # Nor do comparisons with the other operand of a selection, which were with its result: see `_selections`.
        elif name in _ASKED and (result := selected.get((_ASKED[name], frozenset(ins)))):
            name, ins = "eq", [ins[0], result]
        digest.update(f"{outs}={name} {' '.join(ins)} {params} {loop_of}\n".encode())
    digest.update(" ".join(map(atom, jaxpr.outvars)).encode())
    if traced.around is not None:
        digest.update(traced.around.words.encode())
    hints = sorted((index[hint.variable], hint.action) for hint in traced.hints if hint.variable in index)
    digest.update(repr(hints).encode() if hints else b"")
    return digest.hexdigest()


def structure(traced: Traced) -> str:
    """Return a hash of the normalised program without types and parameters: primitives, name stacks, data flow and the
    lengths of loops, in order.
    """
    jaxpr = traced.jaxpr.jaxpr
    index: dict[Any, int] = {}
    digest = hashlib.sha256()

    def define(variables: Iterable[jex.Var]) -> str:
        return ",".join(str(index.setdefault(v, len(index))) for v in variables)

    loops = [(loop.group, loop.length, loop.role, loop.parent) for loop in traced.loops]
    digest.update(f"{define(jaxpr.constvars)};{define(jaxpr.invars)};{traced.donated};{loops}".encode())
    for eqn, loop_of in zip(jaxpr.eqns, traced.loop_of, strict=True):
        ins = ["" if _compat.is_literal(a) else str(index[a]) for a in eqn.invars]
        stack = _compat.name_stack_text(eqn)
        digest.update(
            f"{define(eqn.outvars)}={eqn.primitive.name} {' '.join(ins)} {stack} {loop_of}\n".encode()
        )
    return digest.hexdigest()
