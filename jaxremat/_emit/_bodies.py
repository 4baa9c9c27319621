"""Flat jaxpr of a function -> the same with every value named and every equation numbered.

JAX's checkpoint policies see names, not equations. So each value gets a name (`checkpoint_name`), and each equation a
scope by which the equations of its derivative are recognised. The bodies of scans have numbers of their own, because
the inside of an iteration is planned too.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Atom
from .._program._inline import Inliner
from ._naming import named_behind

PREFIX = "jaxremat"
_NUMBER = re.compile(r"#(\d+)")


@dataclass(frozen=True)
class Body:
    """A flat jaxpr. **Fields:** `numbers` of its equations; `inner` the bodies of its scans' bodies, by position;
    `labels` the user's `checkpoint_name`s by variable.
    """

    closed: jex.ClosedJaxpr
    numbers: tuple[int, ...]
    inner: dict[int, "Body"]
    labels: dict[Any, str]

    @property
    def jaxpr(self) -> jex.Jaxpr:
        """Without its constants."""
        return self.closed.jaxpr

    def walk(self) -> Iterator["Body"]:
        """Yield this body and all below."""
        yield self
        for scanned in self.inner.values():
            yield from scanned.walk()

    def called(self) -> dict[str, str]:
        """Return the user's names of values by their names here."""
        return {
            name_of(body.numbers[i], j): body.labels[v]
            for body in self.walk()
            for i, eqn in enumerate(body.jaxpr.eqns)
            for j, v in enumerate(eqn.outvars)
            if v in body.labels
        }


def bodies(closed: jex.ClosedJaxpr, labels: dict[jex.Var, str], first: int = 0) -> Body:
    """Return the bodies of a flat jaxpr, numbered from `first` on; inner bodies become flat, too."""
    numbers, inner = [], {}
    for i, eqn in enumerate(closed.jaxpr.eqns):
        numbers.append(first)
        first += 1
        if eqn.primitive.name == "scan" and not eqn.effects:
            inliner = Inliner(derivatives=True)
            scanned = inliner.program(eqn.params["jaxpr"])
            inner[i] = bodies(scanned, inliner.labels, first)
            first += sum(len(body.numbers) for body in inner[i].walk())
    return Body(closed, tuple(numbers), inner, labels)


def name_of(number: int, output: int) -> str:
    """Return the name of an equation's result."""
    return f"{PREFIX}/{number}/{output}"


def number_of(scope: str) -> int | None:
    """Return the number of the equation from which an equation with this name stack was derived."""
    found = _NUMBER.findall(scope)
    return int(found[-1]) if found else None


def without_numbers(scope: str) -> str:
    """Return a name stack without the scopes of numbers."""
    return re.sub(r"/?#\d+", "", scope).replace("()", "")


Naming = Callable[[Any, dict[int, str]], list[Any]]
"""A function that names an equation's results; see `_naming`."""


def numbered(body: Body, naming: Naming = named_behind) -> jex.ClosedJaxpr:
    """Return the body's jaxpr with all equations in numbered scopes and all values named."""
    jaxpr, consts = body.jaxpr, body.closed.consts
    scoped = [_compat.in_scope(eqn, f"#{n}") for eqn, n in zip(jaxpr.eqns, body.numbers, strict=True)]
    for i, scanned in body.inner.items():
        scoped[i] = scoped[i].replace(params={**scoped[i].params, "jaxpr": numbered(scanned, naming)})
    flat = _compat.new_jaxpr(jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, scoped)
    rename: dict[Any, Any] = {}
    eqns = copied(replace(body, closed=flat), range(len(scoped)), rename, lambda name: True, naming)
    outvars = [a if _compat.is_literal(a) else rename.get(a, a) for a in jaxpr.outvars]
    closed = _compat.new_jaxpr(jaxpr.constvars, consts, jaxpr.invars, outvars, eqns)
    _compat.check_jaxpr(closed)
    return closed


def copied(
    body: Body,
    positions: Iterable[int],
    rename: dict[jex.Var, Atom],
    chosen: Callable[[str], bool],
    naming: Naming,
) -> list[jex.JaxprEqn]:
    """Return copies of some of a body's equations, with names for chosen results. **Arguments:** `rename` maps the
    body's variables to their replacements; results are added.
    """
    eqns: list[Any] = []
    for i in positions:
        eqn = body.jaxpr.eqns[i]
        outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
        names = {j: name_of(body.numbers[i], j) for j in range(len(outvars))}
        made = _compat.renamed(eqn, rename).replace(outvars=outvars)
        eqns.extend(naming(made, {j: name for j, name in names.items() if chosen(name)}))
        rename.update(zip(eqn.outvars, outvars, strict=True))
    return eqns
