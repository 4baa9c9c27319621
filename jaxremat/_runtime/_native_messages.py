"""Standard error of C libraries -> the same without the lines that match a pattern.

They write to the file descriptor, before and beside Python's logging, so the descriptor stands for a file meanwhile.
Law: every other line is there when the context ends, in order. Only a process that is killed within it loses some.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def without(unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """Yield a context whose end writes what standard error was given within it, but for lines that begin with a
    match.
    """
    _flush()
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed: there is nothing to keep out
        yield
        return
    with os.fdopen(stderr, "wb") as out, tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            held.seek(0)
            out.writelines(line for line in held if not unwanted.match(line))


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
