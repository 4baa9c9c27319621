"""A long phase of planning -> whoever watches: its name, how far it is, what is known so far; and how long it took.

Law: watching changes no result. Nobody watches unless `watched` says who; `_progress_bars` does, for people at one.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger("jaxremat")


class Watcher(Protocol):
    """Who is told. Phases lie inside each other; those begun last end first."""

    def begin(self, name: str, total: int | None) -> Any:
        """Return a phase begins, of `total` parts if that is known. Returns what stands for it from now on."""
        ...

    def update(self, task: Any, parts: int, note: str | None) -> None:
        """So many more parts are done; `note` replaces what was known so far."""
        ...

    def end(self, task: Any) -> None:
        """End the phase, which is over or was interrupted."""
        ...


@dataclass
class Stopwatch:
    """Seconds since it was started, and those that phases of each kind took, without the phases inside them; whether a
    clock has `interrupted` what would have given another result.
    """

    began: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=dict)
    inside: float = 0.0  # of the phases that ended within the innermost one that goes on
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began


_stopwatch: ContextVar[Stopwatch | None] = ContextVar("jaxremat_stopwatch", default=None)
_watcher: ContextVar[Watcher | None] = ContextVar("jaxremat_watcher", default=None)
_phases: ContextVar[tuple["Phase", ...]] = ContextVar("jaxremat_phases", default=())


class Phase:
    """A phase that goes on."""

    def __init__(self, watcher: Watcher | None, name: str, total: int | None):
        self._watcher = watcher
        self._task = watcher.begin(name, total) if watcher is not None else None

    def advance(self) -> None:
        """One more part is done."""
        if self._watcher is not None:
            self._watcher.update(self._task, 1, None)

    def note(self, text: str) -> None:
        """Note what is known so far."""
        if self._watcher is not None:
            self._watcher.update(self._task, 0, text)

    def end(self) -> None:
        """It is over."""
        if self._watcher is not None:
            self._watcher.end(self._task)


@contextmanager
def phase(name: str, total: int | None = None, *, kind: str = "other") -> Iterator[Phase]:
    """Yield what happens inside is a phase with a name, of `total` parts if that is known.

    **Arguments:** `kind` under which a stopwatch counts its seconds.
    """
    begun, stopwatch = Phase(_watcher.get(), name, total), _stopwatch.get()
    token = _phases.set((*_phases.get(), begun))
    began, outer = time.monotonic(), stopwatch.inside if stopwatch else 0.0
    if stopwatch:
        stopwatch.inside = 0.0
    try:
        yield begun
    finally:
        _phases.reset(token)
        begun.end()
        seconds = time.monotonic() - began
        logger.info("%s: %.1f s", name, seconds)
        if stopwatch:
            stopwatch.spent[kind] = stopwatch.spent.get(kind, 0.0) + seconds - stopwatch.inside
            stopwatch.inside = outer + seconds


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Yield the stopwatch that goes already, or one that is started here and counts what happens inside."""
    running = _stopwatch.get()
    if running is not None:
        yield running
        return
    token = _stopwatch.set(Stopwatch())
    try:
        stopwatch = _stopwatch.get()
        assert stopwatch is not None
        yield stopwatch
    finally:
        _stopwatch.reset(token)


def interrupt() -> None:
    """Note on the stopwatch, if one goes, that a clock has ended a search."""
    if stopwatch := _stopwatch.get():
        stopwatch.interrupted = True


def note(text: str) -> None:
    """Note what the innermost phase knows so far."""
    if phases := _phases.get():
        phases[-1].note(text)


def is_watched() -> bool:
    """Return whether somebody is told."""
    return _watcher.get() is not None


@contextmanager
def watched(watcher: Watcher | None) -> Iterator[None]:
    """Tell this watcher, or nobody, of the phases that begin inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def incumbent(best: tuple[float, ...], bound_seconds: float, step_seconds: float) -> str:
    """Return an incumbent and its gap, for people."""
    if best[0] > 0:
        return "nothing fits yet"
    overhead = best[1] / step_seconds
    return f"{overhead:.2%} extra time, gap {max(overhead - bound_seconds / step_seconds, 0.0):.2%}"
