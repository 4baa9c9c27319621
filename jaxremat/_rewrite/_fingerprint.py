"""Traced step -> hashes: programs with equal fingerprints can follow the same plan; programs of equal structure have
the same equations up to shapes, and the plan of one is a good start for the other. `Outline` matches their equations.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.extend.core as jex

from .._model._variant import ROWS
from .._program import _compat
from .._program._compat import Atom
from ._flat_program import within
from ._selections import INSTEAD
from ._trace import Traced

_ASKED = {asks.name: selects.name for selects, asks in INSTEAD.items()}
"""For each comparison, the selection of which it tells whether an operand is the result."""


def fingerprint(traced: Traced) -> str:
    """Return a hash of the normalised program: primitives, parameters, types and data flow, without names and source
    lines.
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
        # Masks count as reading their operand, not a result, so plans from before masks read results still apply.
        read = (a if _compat.is_literal(a) else traced.program.masked.get(i, a) for a in eqn.invars)
        name, ins = eqn.primitive.name, [*map(atom, read)]
        outs = define(eqn.outvars)
        if name in _ASKED.values():
            selected[name, frozenset(ins)] = atom(eqn.outvars[0])
        # So do comparisons with a selection's other operand, as comparisons with its result: see `_selections`.
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
    """Return a hash of the normalised program's arguments, loops, primitives and name stacks. It ignores types,
    parameters, numbers of iterations, and the order, which depends on sizes.
    """
    loops = [(loop.group, loop.role, loop.parent) for loop in traced.loops]
    made = Outline.of(traced)
    told = f"{made.arguments};{traced.donated};{loops};{sorted(made.words)}"
    return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True)
class Outline:
    """The identity of the equations of a step's form, and of values by their equations.

    **Fields:** `arguments` the number of arguments and constants; `lengths` of the loops; `rows` the regions that the
    form runs in chunks, by number, which depends on sizes, and by name; `words` of the equations, in order, each a hash
    of its primitive, its name stack and the loops around it, with the number of its results.
    """

    arguments: int
    lengths: tuple[int, ...]
    rows: tuple[tuple[int, str], ...]
    words: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, traced: Traced) -> "Outline":
        """Return the outline of a form."""
        jaxpr = traced.jaxpr.jaxpr
        found = []
        for eqn, loop_of in zip(jaxpr.eqns, traced.loop_of, strict=True):
            around = [traced.loops[each].role for each in within(loop_of, traced.loops)]
            found.append((_word(eqn, around), len(eqn.outvars)))
        arguments = len(jaxpr.constvars) + len(jaxpr.invars)
        chosen = sorted(traced.form.settings(ROWS))
        names = region_names(traced) if chosen else []
        rows = tuple((site, names[site]) for site in chosen)
        return cls(arguments, traced.sites.lengths, rows, tuple(found))

    def __str__(self) -> str:
        rows = ",".join(f"{site}:{name}" for site, name in self.rows)
        words = (f"{name}{count:x}" for name, count in self.words)
        return " ".join((str(self.arguments), ",".join(map(str, self.lengths)), rows, *words))

    @classmethod
    def parse(cls, text: str) -> "Outline":
        """Return the outline of a text."""
        arguments, lengths, rows, *words = text.split(" ")
        named = (each.split(":") for each in rows.split(",") if each)
        return cls(
            int(arguments),
            tuple(map(int, filter(None, lengths.split(",")))),
            tuple((int(site), name) for site, name in named),
            tuple((word[:HASHED], int(word[HASHED:], 16)) for word in words),
        )

    @property
    def numbers(self) -> tuple[object, ...]:
        """The data that equations and values are numbered by: forms that agree in it can follow the same numbers."""
        return self.arguments, self.words

    @property
    def starts(self) -> list[int]:
        """The first value of each equation, by its number in a graph."""
        return [*accumulate((count for _, count in self.words), initial=self.arguments)]

    def matches(self, other: "Outline") -> dict[int, int]:
        """Return a map from equations of this form to those of another one: those with equal words in order of
        occurrence.
        """
        places: dict[tuple[str, int], list[int]] = {}
        for i, word in enumerate(other.words):
            places.setdefault(word, []).append(i)
        found: dict[int, int] = {}
        seen: Counter[tuple[str, int]] = Counter()
        for i, word in enumerate(self.words):
            if seen[word] < len(places.get(word, ())):
                found[i] = places[word][seen[word]]
            seen[word] += 1
        return found


def region_names(traced: Traced) -> list[str]:
    """Return names of a step's regions of rows: "whole", or a hash of their equations, with a number after a repeated
    name.
    """
    opened, found, seen = traced.sites.found.opened, list[str](), Counter[str]()
    for region in traced.sites.regions:
        eqns = (traced.merged.program if region.loop < 0 or opened is None else opened).eqns
        words = " ".join(sorted(_word(eqns[i]) for i in region.rules))
        name = "whole" if region.whole else hashlib.sha256(words.encode()).hexdigest()[:HASHED]
        found.append(f"{name}{seen[name] or ''}")
        seen[name] += 1
    return found


def _word(eqn: jex.JaxprEqn, around: Sequence[str] = ()) -> str:
    told = f"{eqn.primitive.name} {_compat.name_stack_text(eqn)} {around}"
    return hashlib.sha256(told.encode()).hexdigest()[:HASHED]


HASHED = 5
"""Hexadecimal digits of a word: a million values, while a step has some hundreds of words."""
