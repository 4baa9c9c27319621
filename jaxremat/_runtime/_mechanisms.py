"""Mechanisms of the planner by name: plans that are made without one, and a record of those that changed something.

    with switched_off("memory order"), recorded() as acted:
        jaxremat.plan(step, *args, budget=budget)

`examples/benchmarks/ablation.py` measures what each is worth. A mechanism is a function that somebody decorated:

    @mechanism("memory order", off=order_as_written)
    def memory_order(...): ...

Invariant: while nothing is switched off, the function does what it does without the decorator.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

disabled: set[str] = set()
"""The names of what is switched off. It is one set for all threads, because candidates are compiled in several."""

_known: set[str] = set()
_records: list[Counter[str]] = []


def mechanism(name: str, off: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a function that belongs to a mechanism; several functions may share the name.

    **Arguments:** `off` computes the result that stands for "nothing was done", of the same arguments.
    """
    _known.add(name)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if name in disabled:
                return off(*args, **kwargs)
            result = function(*args, **kwargs)
            if _records and not _alike(result, off(*args, **kwargs)):
                for record in _records:
                    record[name] += 1
            return result

        return run

    return decorate


def _alike(result: object, nothing: object) -> bool:
    # Only plain collections are compared by content: equations may hold arrays, which have no single truth value.
    plain = (bool, int, type(None), list, tuple, dict, set, frozenset)
    return result is nothing or (isinstance(result, plain) and result == nothing)


def known() -> frozenset[str]:
    """Return the names of the mechanisms whose modules are imported."""
    return frozenset(_known)


@contextmanager
def switched_off(*names: str) -> Iterator[None]:
    """Do without these mechanisms. **Raises:** ValueError where there is none of that name."""
    if unknown := set(names) - _known:
        raise ValueError(
            f"no mechanism is called {', '.join(sorted(unknown))}; the mechanisms are {', '.join(sorted(_known))}"
        )
    added = set(names) - disabled
    disabled.update(added)
    try:
        yield
    finally:
        disabled.difference_update(added)


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Yield a counter of the calls in which a mechanism changed something, by its name."""
    record: Counter[str] = Counter()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)
