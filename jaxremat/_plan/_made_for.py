"""What a plan is made for, in words -> how that differs from what it is followed with.

Law: a step and arguments of which all of this is equal have the same program, unless the step's own code differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MOST = 3
"""How many arguments an error names; of an optimizer's state all would differ."""


@dataclass(frozen=True)
class MadeFor:
    """**Fields:** `jax` its version; `mesh` axes and sizes, "" without one; `arguments` the place, type and sharding
    of each traced argument, of which `donated` are; `static` arguments and their values.
    """

    jax: str
    mesh: str
    arguments: tuple[tuple[str, str], ...]
    donated: tuple[str, ...]
    static: tuple[tuple[str, str], ...]

    def differences(self, now: "MadeFor") -> list[str]:
        """What of it differs from another, and how."""
        found = [
            f"{name} was {before or 'none'} and is {after or 'none'}"
            for name, before, after in (("jax", self.jax, now.jax), ("the mesh", self.mesh, now.mesh))
            if before != after
        ]
        found += _changes("argument", dict(self.arguments), dict(now.arguments))
        found += _changes("static argument", dict(self.static), dict(now.static))
        for words, places in (
            ("was donated and is not", sorted(set(self.donated) - set(now.donated))),
            ("was not donated and is", sorted(set(now.donated) - set(self.donated))),
        ):
            found += _few([f"argument {place} {words}" for place in places])
        return found


def _changes(kind: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    found = [
        f"{kind} {place} was {before.get(place, 'not there')} and is {after.get(place, 'not there')}"
        for place in dict.fromkeys((*before, *after))
        if before.get(place) != after.get(place)
    ]
    return _few(found)


def _few(found: Sequence[str]) -> list[str]:
    more = [f"so are {len(found) - _MOST} more"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]
