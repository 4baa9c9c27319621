"""Arguments that several public functions take: checked where they are written."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._model._sites import EXACT, REVERSIBLE
from .._rewrite._encodings import INEXACT
from .._runtime._bytes import parse_nbytes
from .._runtime._errors import ArgumentError, BudgetError
from ._request import Offload

ALLOWED = (*EXACT, REVERSIBLE, *INEXACT)
"""The transformations that users may allow."""


def as_tuple(value: int | str | Sequence[int] | Sequence[str], option: str) -> tuple[Any, ...]:
    """Return one or several numbers or names as a tuple, as `jax.jit` takes them. **Raises:** `ArgumentError`."""
    numbered = option.endswith("nums")
    kind, kinds = (
        ((int, np.integer), "an int or a tuple of ints") if numbered else (str, "a str or a tuple of strs")
    )
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(isinstance(each, kind) for each in given):
        other = option.replace("nums", "names") if numbered else option.replace("names", "nums")
        raise ArgumentError(
            f"`{option}={value!r:.60}` is not valid. Write {kinds}; {'names' if numbered else 'numbers'} of arguments "
            f"go into `{other}`."
        )
    return tuple(given)


def parse_forms(allow: object, known: tuple[str, ...] = ALLOWED) -> tuple[str, ...]:
    """Return the forms that a plan may use, of those that are `known`. **Raises:** `ArgumentError`."""
    given = (allow,) if isinstance(allow, str) else allow
    if not isinstance(given, Iterable) or not set(given) <= set(known):
        names = ", ".join(f'"{name}"' for name in known)
        raise ArgumentError(f"`allow={allow!r}` is unknown. Write some of {names}, or `()` for none of them.")
    return tuple(sorted(set(given)))


def check_offload(offload: Offload) -> None:
    """Check the argument `offload` of `optimize`. **Raises:** `ArgumentError`."""
    if isinstance(offload, bool) or offload == "auto":
        return
    try:
        parse_nbytes(offload)
    except BudgetError:
        raise ArgumentError(
            f'`offload={offload!r}` is not valid. Write True, False, "auto", or the most host memory to use, as '
            'an int of bytes or text such as "64GiB".'
        ) from None
