"""JSON data -> dataclasses and named tuples, by their annotations.

Law: `read(cls, json.loads(json.dumps(asdict(x)))) == x`, and data of another kind is refused where it stands. A field
that has a default may be missing; an unknown one may not be there.
"""

import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def read(kind: Any, data: object, where: str = "the text") -> Any:
    """Return the value of this type that the data stands for.

    **Arguments:** `kind`: a dataclass, a named tuple, a tuple, a literal, int, float, str, bool, or a union of them.

    **Raises:** `KeyError` for a field that is unknown, or missing without a default; `TypeError` for anything else that
    is no such value.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(parts, data, where)
    if origin is Literal:
        if data not in parts:
            raise TypeError(f"{where} is {data!r}")
        return data
    if origin is tuple:
        return _many(parts, data, where)
    if is_dataclass(kind):
        if not isinstance(data, dict):
            raise TypeError(f"{where} is {data!r:.60}")
        known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}
        if wrong := (data.keys() - known.keys()) | {
            n for n, needed in known.items() if needed and n not in data
        }:
            raise KeyError(", ".join(sorted(wrong)))
        make: Any = kind
        return make(**{name: read(_hints(kind)[name], value, name) for name, value in data.items()})
    if hasattr(kind, "_fields"):
        if isinstance(data, list):  # written before the last fields were there
            data = [
                *data,
                *(kind._field_defaults[n] for n in kind._fields[len(data) :] if n in kind._field_defaults),
            ]
        return kind(*_each([_hints(kind)[name] for name in kind._fields], data, kind._fields))
    wanted = (int, float) if kind is float else kind
    if not isinstance(data, wanted) or (isinstance(data, bool) and kind is not bool):
        raise TypeError(f"{where} is {data!r:.60}")
    return data


_hints = cache(get_type_hints)


def _one_of(kinds: Iterable[object], data: object, where: str) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    (kind,) = (kind for kind in kinds if kind is not types.NoneType)
    return read(kind, data, where)


def _many(kinds: Sequence[object], data: object, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise TypeError(f"{where} is {data!r:.60}")
    if kinds[-1] is Ellipsis:
        return tuple(read(kinds[0], item, where) for item in data)
    return tuple(_each(kinds, data, [where] * len(kinds)))


def _each(kinds: Sequence[object], data: object, names: Sequence[str]) -> list[Any]:
    if not isinstance(data, list) or len(data) != len(kinds):
        raise TypeError(f"{', '.join(names)} are {data!r:.60}")
    return [read(kind, item, name) for kind, item, name in zip(kinds, data, names, strict=True)]
