"""Equation -> a program of that equation alone, and a cache on disk of what was measured of such programs.

Law: equations with the same key compile to the same program, so that a figure is measured once per machine.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.extend.core as jex

from .._program import _compat
from .._runtime._cache_folder import cache_dir, read, store


def alone(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Return the equation as a program of its own."""
    return _compat.single(eqn, [_compat.new_var(a.aval) for a in eqn.invars])


def key(eqn: jex.JaxprEqn, where: object) -> str:
    """Return what tells the equation's program from others: primitive, types, parameters; `where` it is compiled."""
    params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(eqn.params.items(), key=lambda item: item[0])))
    what = (eqn.primitive.name, [str(a.aval) for a in eqn.invars], params)
    return hashlib.sha256(repr((what, where)).encode()).hexdigest()


class Figures:
    """Numbers by key in a file of the cache folder. **Arguments:** `name` of the file; `kind` its numbers' type."""

    def __init__(self, name: str, kind: Callable[[Any], object]):
        self.path: Path = cache_dir() / name
        self.kind = kind
        self.fresh: dict[str, Any] = {}
        self.known = self._read()

    def _read(self) -> dict[str, Any]:
        def parse(text: str) -> dict[str, Any]:
            return {str(k): None if v is None else self.kind(v) for k, v in json.loads(text).items()}

        return read(self.path, parse) or {}

    def get(self, key: str, measure: Callable[[], object]) -> Any:
        """Return the number for a key, measured if it is not known."""
        if key not in self.known:
            self.known[key] = self.fresh[key] = measure()
        return self.known[key]

    def __enter__(self) -> "Figures":
        return self

    def __exit__(self, *_: object) -> None:
        self.store()  # what was measured before Ctrl-C too

    def store(self) -> None:
        """Add the new numbers to the file; what other processes have added meanwhile stays."""
        if self.fresh:
            store(self.path, json.dumps(self.fresh | self._read()))
