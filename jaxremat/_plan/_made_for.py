"""Step, arguments -> what a plan is made for, in words, and how that differs from what it is followed with.

Law: a step and arguments of which all of this is equal have the same program, unless the step's own code differs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from .._compiler._program import Program

_MOST = 3
"""How many arguments an error names; of an optimizer's state all would differ."""

_LONGEST = 60  # characters of a static argument


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

    @classmethod
    def of(cls, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MadeFor":
        """What a plan for these arguments (arrays or `jax.ShapeDtypeStruct`s) is made for."""
        found, _ = tree_flatten_with_path(program.dynamic(args, kwargs))
        places = [_place(path) for path, _ in found]
        infos = jax.tree.leaves(program.plain.trace(*args, **kwargs).args_info)
        meshes = (leaf.sharding.mesh for _, leaf in found if isinstance(_sharding(leaf), NamedSharding))
        return cls(
            jax=jax.__version__,
            mesh=next((", ".join(f"{name}={size}" for name, size in m.shape.items()) for m in meshes), ""),
            arguments=tuple((place, _type(leaf)) for place, (_, leaf) in zip(places, found, strict=True)),
            donated=tuple(place for place, info in zip(places, infos, strict=True) if info.donated),
            static=tuple((str(place), _repr(value)) for place, value in program.static(args, kwargs)),
        )

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


def _place(path: Sequence[Any]) -> str:
    """`0['w']` of the first argument, `batch['x']` of one that is given by name."""
    first, *rest = path[1:]
    return f"{getattr(first, 'idx', getattr(first, 'key', first))}{keystr(tuple(rest))}"


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _type(leaf: Any) -> str:
    aval = jax.typeof(leaf)
    weak = " of a Python number" if getattr(aval, "weak_type", False) else ""
    where = _sharding(leaf)
    spec = f" over {tuple(where.spec)}" if isinstance(where, NamedSharding) and any(where.spec) else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}{spec}"


def _repr(value: Any) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
