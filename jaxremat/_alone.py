"""Equation -> a program of that equation alone, and a cache on disk of what was measured of such programs.

Law: equations with the same key compile to the same program, so that a figure is measured once per machine.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.extend.core as jex

from . import _compat
from ._devices import cache_dir, write_atomically
from ._slices import SLICES, expands, sliced


def alone(eqn: Any, slicing: bool) -> jex.ClosedJaxpr:
    """The equation as a program of its own; `slicing` as the emitter does on the CPU."""
    if slicing and expands(eqn):
        return sliced(eqn)
    return _compat.single(eqn, [_compat.new_var(a.aval) for a in eqn.invars])


def key(eqn: Any, slicing: bool, where: Any) -> str:
    """What tells the equation's program from others: primitive, types, parameters; `where` it is compiled."""
    params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(eqn.params.items(), key=lambda item: item[0])))
    what = (eqn.primitive.name, [str(a.aval) for a in eqn.invars], params)
    return hashlib.sha256(repr((what, where, expands(eqn) and slicing and SLICES)).encode()).hexdigest()


class Figures:
    """Numbers by key in a file of the cache folder. **Arguments:** `name` of the file; `kind` its numbers' type."""

    def __init__(self, name: str, kind: Callable[[Any], Any]):
        self.path: Path = cache_dir() / name
        self.fresh = False
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            self.known: dict[str, Any] = {str(k): None if v is None else kind(v) for k, v in stored.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            self.known = {}

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The number for a key, measured if it is not known."""
        if key not in self.known:
            self.fresh = True
            self.known[key] = measure()
        return self.known[key]

    def store(self) -> None:
        """Write the file, if a number is new."""
        if self.fresh:
            with contextlib.suppress(OSError):  # a cache that cannot be written is no cache
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, json.dumps(self.known))
