"""A budget as the user writes it -> bytes, a share of something, or the least: the grammar of budgets.

| Written | Means |
|---|---|
| `24 * 2**30`, `"24GiB"`, `"500MB"` | bytes |
| `None`, `0.9`, `"0.9"`, `"90% of device"` | a share of the device's memory |
| `"50%"`, `"50% of peak"` | a share of the plain step's peak |
| `"50% of temporaries"` | the plain step's arguments and outputs, and a share of its temporaries |
| `"40% of residuals"` | a share of what plain JAX keeps for the backward pass: of functions differentiated later |
| `"min"` | about the least that can be reached |
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ._bytes import BYTES, format_nbytes, parse_nbytes
from ._errors import BudgetError

Budget = int | float | str | None
"""Bytes, a share, "min", or None for the device's own memory; see the table of this module."""

Whole = Literal["device", "peak", "temporaries", "residuals"]
Parts = tuple[int, int]
"""Bytes of a step that are there all the time, and its temporaries."""

_PERCENT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*(?:of\s+([a-z]+)\s*)?", re.IGNORECASE)
_DECIMAL = re.compile(r"\s*[0-9]*\.[0-9]+\s*")
_WHOLES: Final[tuple[Whole, ...]] = ("device", "peak", "temporaries", "residuals")
OF_STEPS: Final = (
    f'{BYTES}, None for the device\'s memory or a share of it such as 0.9, "50% of peak" or "50% of temporaries" of '
    'the plain step, or "min"'
)
"""How the budget of a step is written."""
OF_PARTS: Final = f'{BYTES}, "40% of residuals" of what plain JAX would keep, "dots", "free" or "min"'
"""How the budget of a function is written that something else differentiates."""


@dataclass(frozen=True)
class Share:
    """A share in (0, 1] of something that is known later."""

    share: float
    whole: Whole

    def __str__(self) -> str:
        return f"{100 * self.share:g}% of {self.whole}"


def read_budget(budget: Budget, grammar: str = OF_STEPS) -> int | Share | Literal["min"]:
    """Return what a budget means. **Raises:** `BudgetError`, with the `grammar`, for anything else."""
    if budget is None:
        return Share(1.0, "device")
    if isinstance(budget, float) and 0 < budget <= 1:
        return Share(budget, "device")
    if isinstance(budget, str):
        if budget.strip().lower() == "min":
            return "min"
        if _DECIMAL.fullmatch(budget) and 0 < float(budget) <= 1:
            return Share(float(budget), "device")
        if match := _PERCENT.fullmatch(budget):
            percent, whole = float(match[1]), (match[2] or "peak").lower()
            if whole not in _WHOLES:
                raise BudgetError(
                    f"The budget {budget!r} is a share of an unknown quantity. Write {grammar}."
                )
            if not 0 < percent <= 100:
                raise BudgetError(
                    f"The budget {budget!r} is not a share between 0 and 100%. Write {grammar}."
                )
            return Share(percent / 100, whole)
    return parse_nbytes(budget, grammar)


def parse_budget(
    budget: Budget, device_nbytes: int | None, plain: Callable[[], Parts] | None = None
) -> int | Literal["min"]:
    """Return the budget of a step in bytes, or `"min"`.

    **Arguments:** `device_nbytes` what the device reports as its memory, or None where it reports nothing; `plain` what
    the plain step needs, asked for shares of it alone; None where that is not known.

    **Raises:** `BudgetError` for anything else, and for shares of what is not known.
    """
    found = read_budget(budget)
    if not isinstance(found, Share):
        return found
    if found.whole == "residuals":
        raise BudgetError(
            f"The budget {budget!r} is for functions that are differentiated later (`jaxremat.checkpoint`), but "
            f"this is a whole step. Write {OF_STEPS}."
        )
    if found.whole == "device":
        if device_nbytes is None:
            raise BudgetError(
                f"The budget {budget!r} is a share of the device's memory, and this device reports none. "
                'Write the budget in bytes instead, for example "8GiB", or a share of the plain step\'s peak: "50%".'
            )
        return int(found.share * device_nbytes)
    if plain is None:
        raise BudgetError(
            f"The budget {budget!r} is a share of a step's memory, but there is no step here. Write {BYTES}."
        )
    base, temporaries = plain()
    if found.whole == "temporaries":
        return base + int(found.share * temporaries)
    return int(found.share * (base + temporaries))


def parse_margin(margin: int | float | str, budget_nbytes: int | None) -> int:
    """Return the bytes to keep free below a budget.

    **Arguments:** `margin`: an int of bytes (0 for none), text such as "500MiB", or a share of the budget: a float in
    [0, 1) or text such as "5%"; `budget_nbytes`: None where it is not known yet, and shares come to 0.

    **Raises:** `BudgetError` for anything else, and where nothing of the budget is left.
    """
    if isinstance(margin, (int, float)) and not isinstance(margin, bool) and margin == 0:
        return 0
    try:
        share = _share_of_budget(margin)
        nbytes = int(share * (budget_nbytes or 0)) if share else parse_nbytes(margin)
    except BudgetError:
        raise BudgetError(
            f"`workspace_margin={margin!r}` is not a number of bytes. Write an int of bytes, text such as "
            '"500MiB", or a share of the budget such as 0.05 or "5%".'
        ) from None
    if budget_nbytes is not None and nbytes >= budget_nbytes:
        raise BudgetError(
            f"`workspace_margin={margin!r}` keeps {format_nbytes(nbytes)} free, but the budget is "
            f"{format_nbytes(budget_nbytes)}. Write a smaller margin."
        )
    return nbytes


def with_margin(nbytes: int, margin: int | float | str) -> int:
    """Return the least budget of which a margin (see `parse_margin`) leaves so many bytes."""
    budget = int(nbytes / (1 - _share_of_budget(margin))) + parse_margin(margin, None)
    return next(b for b in range(budget - 1, budget + 3) if b - parse_margin(margin, b) >= nbytes)


def _share_of_budget(margin: int | float | str) -> float:
    """Return a margin as a share of the budget, 0 for bytes."""
    if isinstance(margin, str):
        if _DECIMAL.fullmatch(margin):
            margin = float(margin)
        elif (match := _PERCENT.fullmatch(margin)) and not match[2]:
            margin = float(match[1]) / 100
    return margin if isinstance(margin, float) and 0 < margin < 1 else 0.0
