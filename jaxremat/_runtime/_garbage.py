"""A function that makes very many small objects -> the same without Python's cyclic garbage collector looking on.

Planning a step of 100,000 equations makes millions of objects that stay; to walk through all of them again and again
is a third of its time. Law: afterwards the collector is on or off as it was before.
"""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def uncollected(fn: Callable[P, R]) -> Callable[P, R]:
    """Return the function, with the collector off while it runs."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return fn(*args, **kwargs)
        gc.disable()
        try:
            return fn(*args, **kwargs)
        finally:
            gc.enable()

    return run
