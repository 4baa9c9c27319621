"""Frozen dataclass <-> JSON text and files, as plans are kept and handed on.

Laws: what is written is read again as an equal object. A text may lack a field that has a default, which stands for
what was meant before there was the field; it may lack no other, and has none that is unknown here: no plan is followed
that is only half understood. So a field that is added gets a default, or the format its next number.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

from ._cache_folder import write_atomically
from ._errors import PlanMismatchError
from ._json import read


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
                    f"The {what} has format {version}, this jaxremat reads format {number}. {again}."
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
