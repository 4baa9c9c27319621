"""Frozen dataclass <-> JSON text and files, as plans are kept and handed on.

Laws: what is written is read again as an equal object. A text may lack a field that has a default, which stands for
what was meant before there was the field; it may lack no other, and has none that is unknown here: no plan is followed
that is only half understood. So a field that is added gets a default, or the format its next number.

JSON data -> dataclasses and named tuples, by their annotations.

Law: `read(cls, json.loads(json.dumps(asdict(x)))) == x`, and data of another kind is refused where it stands. A field
that has a default may be missing; an unknown one may not be there.
"""

import json
import os
import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from ._cache_folder import write_atomically
from ._errors import PlanMismatchError


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


class Written:
    """**Fields:** `FORMAT` the key that the text says its format under, and the number of the one that is written;
    `WHAT` this is, and what to do where a text has another format.
    """

    FORMAT: ClassVar[tuple[str, int]]
    WHAT: ClassVar[tuple[str, str]] = "plan", "Plan again"

    def to_json(self) -> str:
        """Return this as JSON text, a line for each field and for each item of the lists of objects."""
        data: Any = self
        key, number = self.FORMAT
        return "{\n" + ",\n".join(_line(k, v) for k, v in {key: number, **asdict(data)}.items()) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote, in this version of the library or in an earlier one that had fewer fields.

        **Raises:** `PlanMismatchError` where the text is nothing of the kind, or of another format.
        """
        (key, number), (what, again) = cls.FORMAT, cls.WHAT
        try:
            data: Any = json.loads(text)
            version = data.pop(key)
            if version != number and (data := cls.upgraded(data, version)) is None:
                raise PlanMismatchError(
                    f"The {what} has format {version}, but this jaxremat reads format {number}. {again}."
                )
            return read(cls, data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlanMismatchError):
                raise
            name = cls.__name__
            raise PlanMismatchError(
                f"This text is not a jaxremat {what} ({type(error).__name__}: {error}). Pass what "
                f"`{name}.to_json` or `{name}.save` wrote."
            ) from error

    @classmethod
    def upgraded(cls, data: dict[str, object], version: int) -> dict[str, Any] | None:
        """Return the fields of a text of an earlier format, as today's; None where that cannot be."""
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this to a file, whole or not at all."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. **Raises:** `PlanMismatchError` where the file holds nothing of the kind."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""
        return cls.from_json(text)


def _line(name: str, value: object) -> str:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        items = ",\n".join(f"  {_compact(item)}" for item in value)
        return f" {_compact(name)}: [\n{items}\n ]"
    return f" {_compact(name)}: {_compact(value)}"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
