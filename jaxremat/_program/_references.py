"""Program that reads and writes references (`jax.new_ref`) -> the same as a function of their values.

A reference is an argument, closed over, or made within. What is read of it becomes a value, what is written another
one, in loops a carry; so reads and writes keep their order by what they are made of, and are planned as all else is.
Compilers do the same. Law: the function of values gives what the program returns, then what the references hold at its
end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from . import _compat


@dataclass(frozen=True)
class References:
    """The references that a program has from outside.

    **Fields:** `held` those that it closes over, whose values are its first arguments now; `places` of the others among
    the arguments that it had; `written` for each, `held` ones first, whether it is written; `results` how many the
    program has of its own.
    """

    held: tuple[Any, ...]
    places: tuple[int, ...]
    written: tuple[bool, ...]
    results: int

    def donated(self, donated: Sequence[bool]) -> tuple[bool, ...]:
        """Return which arguments may be written over: of references those that are written."""
        own = dict(zip(self.places, self.written[len(self.held) :], strict=True))
        return (*self.written[: len(self.held)], *(own.get(i, given) for i, given in enumerate(donated)))

    def run(self, evaluate: Callable[..., Sequence[object]], leaves: Sequence[Any]) -> Sequence[Any]:
        """Call a function of values for arguments with references, and write these."""
        known = [*self.held, *(leaves[i] for i in self.places)]
        values = [leaf[...] if i in self.places else leaf for i, leaf in enumerate(leaves)]
        made = evaluate(*(ref[...] for ref in self.held), *values)
        written = [ref for ref, so in zip(known, self.written, strict=True) if so]
        for ref, value in zip(written, made[self.results :], strict=True):
            ref[...] = value
        return made[: self.results]


def of_values(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, References | None]:
    """Return the program as a function of values, and the references that it has from outside; the program itself, and
    None, where it has no references, or where JAX cannot do without them.
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
