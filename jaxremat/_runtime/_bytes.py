"""Text, share or number -> bytes: the one place where budgets and byte counts are read and written."""

import math
import re
from typing import Final, Literal

from ._errors import BudgetError

Budget = int | float | str | None
"""Bytes, a share in (0, 1], text such as "24GiB", "min", or None for the device's own memory."""

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**k for k, p in enumerate("KMGTP", 1)},
    **{f"{p}IB": 1024**k for k, p in enumerate("KMGTP", 1)},
}
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_SPELLINGS = 'bytes as an int, text such as "24GiB", "24GB" or "500MiB", a share such as 0.9, None, or "min"'


def parse_budget(budget: Budget, device_nbytes: int | None) -> int | Literal["min"]:
    """Return the budget in bytes, or `"min"`.

    **Arguments:**

    - `budget`: see `Budget`.
    - `device_nbytes`: what the device reports as its memory, or None where it reports nothing.

    **Raises:** `BudgetError` for anything else, and for shares and None on a device that reports no memory.
    """
    if isinstance(budget, str) and budget.strip().lower() == "min":
        return "min"
    if budget is None or (isinstance(budget, float) and 0 < budget <= 1):
        if device_nbytes is None:
            raise BudgetError(
                f"The budget {budget!r} is a share of the device's memory, and this device reports none. "
                'Write the budget in bytes instead, for example "8GiB".'
            )
        return int(device_nbytes * (1.0 if budget is None else budget))
    return parse_nbytes(budget)


def parse_margin(margin: int | float | str, budget_nbytes: int | None) -> int:
    """Return the bytes to keep free below a budget.

    **Arguments:** `margin`: an int of bytes (0 for none), text such as "500MiB", or a float in [0, 1) as a share of the
    budget; `budget_nbytes`: None where it is not known yet, and shares come to 0.

    **Raises:** `BudgetError` for anything else, and where nothing of the budget is left.
    """
    if isinstance(margin, (int, float)) and not isinstance(margin, bool) and margin == 0:
        return 0
    try:
        share = isinstance(margin, float) and 0 < margin < 1
        nbytes = int(margin * (budget_nbytes or 0)) if share else parse_nbytes(margin)  # type: ignore[operator]
    except BudgetError:
        raise BudgetError(
            f"`workspace_margin={margin!r}` is no number of bytes. Write an int of bytes, text such as "
            '"500MiB", or a share of the budget such as 0.05.'
        ) from None
    if budget_nbytes is not None and nbytes >= budget_nbytes:
        raise BudgetError(
            f"`workspace_margin={margin!r}` keeps {format_nbytes(nbytes)} free, and the budget is "
            f"{format_nbytes(budget_nbytes)}. Write a smaller margin."
        )
    return nbytes


def with_margin(nbytes: int, margin: int | float | str) -> int:
    """Return the least budget of which a margin (see `parse_margin`) leaves so many bytes."""
    share = margin if isinstance(margin, float) and 0 < margin < 1 else 0.0
    budget = int(nbytes / (1 - share)) + parse_margin(margin, None)
    return next(b for b in range(budget - 1, budget + 3) if b - parse_margin(margin, b) >= nbytes)


def parse_nbytes(text: int | float | str) -> int:
    """Return bytes from an int or from text with a decimal (`GB`) or binary (`GiB`) unit.

    **Raises:** `BudgetError` where `text` is no positive number of bytes.
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise BudgetError(f"A budget cannot be a {type(text).__name__} ({text!r}). Write {_SPELLINGS}.")
    if isinstance(text, str):
        match = _TEXT.fullmatch(text)
        if match is None or match[2].upper() not in _UNITS:
            raise BudgetError(f"The budget {text!r} is no number of bytes. Write {_SPELLINGS}.")
        nbytes = float(match[1]) * _UNITS[match[2].upper()]
    else:
        nbytes = text
    if not math.isfinite(nbytes) or nbytes < 1 or (isinstance(text, float) and nbytes != int(nbytes)):
        raise BudgetError(f"The budget {text!r} is not a whole positive number of bytes. Write {_SPELLINGS}.")
    return int(nbytes)


def format_nbytes(nbytes: float) -> str:
    """Return bytes for people, in binary units with three significant digits: `1.50 GiB`."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while len(units) > 1 and abs(size) >= 1023.5:
        size /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{size:.0f} B"
    digits = 2 if abs(round(size, 2)) < 10 else 1 if abs(round(size, 1)) < 100 else 0
    return f"{size:.{digits}f} {units[0]}"
