"""Phases -> bars on a terminal, with rich: on standard error, gone when planning is over.

Where there is no terminal, as in notebooks and batch jobs, a line for each phase that stays, if that is asked for.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ._progress import is_watched, watched

_NO = ("0", "off", "no", "false")


@contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """Show the phases of what happens inside, if that is wanted (see `wanted`): with `progress=True` and no terminal as
    lines.
    """
    if is_watched() or not wanted(progress):
        lines = progress and not (is_watched() or _switched_off() or sys.stderr.isatty())
        with watched(_Lines()) if lines else nullcontext():
            yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        _if_counted(BarColumn)(24),
        _if_counted(MofNCompleteColumn)(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    # What the step prints while it is traced keeps its way; warnings go above the bars.
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars,
        watched(_Bars(bars)),
    ):
        yield


def wanted(progress: bool | None) -> bool:
    """Return whether to show bars: on a terminal, and neither in tests nor in continuous integration.

    **Arguments:** `progress`: False for never, True in tests and continuous integration too. The environment's
    `JAXREMAT_PROGRESS=0` turns bars off everywhere.
    """
    if progress is False or _switched_off() or not sys.stderr.isatty():
        return False
    return bool(progress) or not {"CI", "PYTEST_CURRENT_TEST"} & set(os.environ)


def _switched_off() -> bool:
    return os.environ.get("JAXREMAT_PROGRESS", "").strip().lower() in _NO


class _Lines:
    """A `Watcher` that writes a line when a phase ends: its seconds, and what was known last."""

    def begin(self, name: str, total: int | None) -> Any:
        return {"name": name, "began": time.monotonic(), "note": None}

    def update(self, task: Any, parts: int, note: str | None) -> None:
        task["note"] = note or task["note"]

    def end(self, task: Any) -> None:
        known = f" ({task['note']})" if task["note"] else ""
        sys.stderr.write(f"jaxremat: {task['name']}: {time.monotonic() - task['began']:.1f} s{known}\n")
        sys.stderr.flush()


class _Bars:
    """A `Watcher` that keeps a bar for each phase that goes on."""

    def __init__(self, bars: Any):
        self._bars = bars

    def begin(self, name: str, total: int | None) -> Any:
        return self._bars.add_task(name, total=total, note="")

    def update(self, task: Any, parts: int, note: str | None) -> None:
        self._bars.update(task, advance=parts, **({} if note is None else {"note": note}))

    def end(self, task: Any) -> None:
        self._bars.remove_task(task)


def _if_counted(column: Any) -> Any:
    """Return the same column, empty for phases of which nobody knows how long they are."""

    class Counted(column):
        def render(self, task: Any) -> Any:
            return super().render(task) if task.total is not None else ""

    return Counted
