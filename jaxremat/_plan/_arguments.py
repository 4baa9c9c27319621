"""Arguments that several public functions take: checked where they are written."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._model._sites import EXACT, REVERSIBLE
from .._rewrite._encodings import INEXACT
from .._runtime._bytes import parse_nbytes
from .._runtime._errors import ArgumentError, BudgetError
from ._request import Offload


def as_tuple(value: int | str | Sequence[int] | Sequence[str]) -> tuple[Any, ...]:
    """Return one number or name, or several, as `jax.jit` takes them."""
    return (value,) if isinstance(value, (int, str, np.integer)) else tuple(value)


def parse_forms(allow: object, known: tuple[str, ...] = (*EXACT, REVERSIBLE, *INEXACT)) -> tuple[str, ...]:
    """Return the forms that a plan may use, of those that are `known`. **Raises:** `ArgumentError`."""
    given = (allow,) if isinstance(allow, str) else allow
    if not isinstance(given, Iterable) or not set(given) <= set(known):
        names = ", ".join(f'"{name}"' for name in known)
        raise ArgumentError(f"`allow={allow!r}` is unknown. Write some of {names}, or `()` for none of them.")
    return tuple(sorted(set(given)))


def check_offload(offload: Offload) -> None:
    """**Raises:** `ArgumentError` for what `optimize` cannot take."""
    if isinstance(offload, bool) or offload == "auto":
        return
    try:
        parse_nbytes(offload)
    except BudgetError:
        raise ArgumentError(
            f'`offload={offload!r}` is not valid. Write True, False, "auto", or the most host memory to use, as '
            'an int of bytes or text such as "64GiB".'
        ) from None
