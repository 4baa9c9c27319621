"""Program that reads and writes references (`jax.new_ref`) -> the same as a function of their values.

A reference is an argument, closed over, or created inside. A read becomes a value and a write a new value, in loops a
carry. So data dependencies keep reads and writes in order, and they are planned like all else. Compilers do the same.

Invariant: the function of values returns the program's results, then the final values of the references.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from . import _compat


@dataclass(frozen=True)
class References:
    """The references that a program receives from outside.

    **Fields:** `held` those that it closes over, whose values are now its first arguments; `places` of the others among
    its original arguments; `written` for each, `held` ones first, whether it is written; `results` the number of the
    program's own results.
    """

    held: tuple[Any, ...]
    places: tuple[int, ...]
    written: tuple[bool, ...]
    results: int

    def donated(self, donated: Sequence[bool]) -> tuple[bool, ...]:
        """Return which arguments may be overwritten: of references those that are written."""
        own = dict(zip(self.places, self.written[len(self.held) :], strict=True))
        return (*self.written[: len(self.held)], *(own.get(i, given) for i, given in enumerate(donated)))

    def run(self, evaluate: Callable[..., Sequence[object]], leaves: Sequence[Any]) -> Sequence[Any]:
        """Call a function of values with arguments that include references, and write the references."""
        known = [*self.held, *(leaves[i] for i in self.places)]
        values = [leaf[...] if i in self.places else leaf for i, leaf in enumerate(leaves)]
        made = evaluate(*(ref[...] for ref in self.held), *values)
        written = [ref for ref, so in zip(known, self.written, strict=True) if so]
        for ref, value in zip(written, made[self.results :], strict=True):
            ref[...] = value
        return made[: self.results]


def of_values(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, References | None]:
    """Return the program as a function of values, and the references that it receives from outside; the program itself,
    and None, if it has no references or JAX cannot remove them.
    """
    if not _compat.has_references(closed):
        return closed, None
    jaxpr = closed.jaxpr
    outer = [_compat.is_reference(v) for v in jaxpr.constvars]
    held = [c for c, so in zip(closed.consts, outer, strict=True) if so]
    known = [(v, c) for v, c, so in zip(jaxpr.constvars, closed.consts, outer, strict=True) if not so]
    invars = [*(v for v, so in zip(jaxpr.constvars, outer, strict=True) if so), *jaxpr.invars]
    opened = _compat.new_jaxpr(
        [v for v, _ in known], [c for _, c in known], invars, jaxpr.outvars, jaxpr.eqns
    )
    try:
        pure = _compat.discharged(opened)
    except NotImplementedError:
        return closed, None
    found, count = pure.jaxpr, len(jaxpr.outvars)
    places = [i for i, v in enumerate(invars) if _compat.is_reference(v)]
    ends = list(zip(places, found.outvars[count:], strict=True))
    written = tuple(v is not found.invars[i] for i, v in ends)
    kept = [v for (_, v), so in zip(ends, written, strict=True) if so]
    values = _compat.new_jaxpr(
        found.constvars, pure.consts, found.invars, [*found.outvars[:count], *kept], found.eqns
    )
    own = tuple(i - len(held) for i in places if i >= len(held))
    return values, References(tuple(held), own, written, count)
