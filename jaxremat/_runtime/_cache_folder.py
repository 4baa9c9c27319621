"""Text by file name in a folder on disk: what one process found, every later one reads.

Laws: a file is there whole or not at all, however many processes write it; what cannot be read is reported with a
`JaxrematWarning` and counts as missing; so is, once, a folder that cannot be written, and left alone.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ._errors import warn

T = TypeVar("T")

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""How a parser refuses a text. JSON's errors are ValueErrors."""

_DRAFT_SECONDS = 3600.0
"""A draft older than this is that of a process that was killed while it wrote."""


_said: set[Path] = set()
"""Folders that were said to be unwritable."""


def cache_dir() -> Path:
    """Folder for what is found once: `$JAXREMAT_CACHE`, else the XDG cache folder's `jaxremat`."""
    if own := os.environ.get("JAXREMAT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxremat"


def read(path: Path, parse: Callable[[str], T]) -> T | None:
    """Return what a file holds; None where there is none, or where `parse` refuses its text, which is a warning.

    `parse` refuses by raising ValueError (JSON's errors are such), KeyError, TypeError or AttributeError.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except _UNREADABLE as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        warn(
            f"The cache file {path} cannot be read ({why[:120]}); it is ignored and will be overwritten. If "
            "that happens again, remove the file."
        )
        return None


def store(path: Path, text: str) -> None:
    """Write a file of the cache; where that is impossible there is no cache, which is a warning, once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        folder = cache_dir()
        if folder not in _said:
            _said.add(folder)
            warn(
                f"The cache folder {folder} cannot be written ({error}): plans are not kept for the next "
                "process. Set JAXREMAT_CACHE to a writable folder."
            )


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one go. **Raises:** OSError."""
    draft = _draft(path, text)
    try:
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _draft(path: Path, text: str) -> str:
    """Return the path of a new file with this text, beside the one that is meant. **Raises:** OSError."""
    draft = f"{path.with_suffix('')}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with open(
            draft, "x", encoding="utf-8"
        ) as file:  # with the rights of any new file, unlike `tempfile`'s
            file.write(text)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return draft


def touch(path: Path) -> None:
    """Note that a file was of use, so that `trim` removes others first."""
    with contextlib.suppress(OSError):
        os.utime(path)


def trim(folder: Path, most_nbytes: int) -> None:
    """Remove the files of a folder that were of use longest ago, until the rest have no more than that many bytes."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # another process has just removed it
                status = entry.stat()
                found.append((status.st_mtime, entry.path, status.st_size))
    spare = sum(nbytes for _, _, nbytes in found) - most_nbytes
    for modified, path, nbytes in sorted(found):
        dead = path.endswith(".tmp") and time.time() - modified > _DRAFT_SECONDS
        if spare > 0 or dead:
            with contextlib.suppress(OSError):
                os.unlink(path)
            spare -= nbytes
