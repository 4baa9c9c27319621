"""A function that makes very many small objects -> the same without Python's cyclic garbage collector looking on.

Planning a step of 100,000 equations makes millions of objects that stay; to walk through all of them again and again
is a third of its time. Invariants: afterwards the collector is on or off as it was before; where one such function
calls another, what the inner one leaves behind is looked through once, at its end.
"""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_outer: list[Callable[..., object]] = []  # those that have turned the collector off


def uncollected(fn: Callable[P, R]) -> Callable[P, R]:
    """Return the function, with the collector off while it runs."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            try:
                return fn(*args, **kwargs)
            finally:
                if _outer:  # else the user has turned it off
                    gc.collect(
                        0
                    )  # what was made since the last time; what stays is never walked through again
        gc.disable()
        _outer.append(fn)
        try:
            return fn(*args, **kwargs)
        finally:
            _outer.pop()
            gc.enable()

    return run
