"""Text or number -> bytes, and back: the one place where byte counts are read and written."""

import math
import re
from typing import Final

from ._errors import BudgetError

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**k for k, p in enumerate("KMGTP", 1)},
    **{f"{p}IB": 1024**k for k, p in enumerate("KMGTP", 1)},
}
BYTES: Final = 'bytes as an int or as text such as "24GiB", "24GB" or "500MiB"'
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: object, spellings: str = BYTES) -> int:
    """Return bytes from an int or from text with a decimal (`GB`) or binary (`GiB`) unit.

    **Arguments:** `spellings` what the error of another one says to write.

    **Raises:** `BudgetError` where `text` is no positive number of bytes.
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise BudgetError(f"A budget cannot be a {type(text).__name__} ({text!r}). Write {spellings}.")
    if isinstance(text, str):
        match = _TEXT.fullmatch(text)
        if match is None or match[2].upper() not in _UNITS:
            raise BudgetError(f"The budget {text!r} is not a number of bytes. Write {spellings}.")
        nbytes = float(match[1]) * _UNITS[match[2].upper()]
    else:
        nbytes = text
    if not math.isfinite(nbytes) or nbytes < 1 or (isinstance(text, float) and nbytes != int(nbytes)):
        raise BudgetError(f"The budget {text!r} is not a positive whole number of bytes. Write {spellings}.")
    return int(nbytes)


def format_nbytes(nbytes: float) -> str:
    """Return bytes for people, in binary units with three significant digits: `1.50 GiB`."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while len(units) > 1 and abs(size) >= 1023.5:
        size /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{size:.0f} B"
    digits = 2 if abs(round(size, 2)) < 10 else 1 if abs(round(size, 1)) < 100 else 0
    return f"{size:.{digits}f} {units[0]}"


def least_budget(nbytes: int) -> str:
    """Return bytes as a user may write them, exactly and as text that is not less: `4784652 bytes ("4.57MiB")`."""
    rounded = format_nbytes(nbytes)
    if parse_nbytes(rounded) < nbytes:  # up in the last of the digits
        number, unit = rounded.split()
        _, _, decimals = number.partition(".")
        rounded = f"{float(number) + 10.0 ** -len(decimals):.{len(decimals)}f} {unit}"
    return f'{nbytes} bytes ("{rounded.replace(" ", "")}")'
