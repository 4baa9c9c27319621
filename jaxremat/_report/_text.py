"""Outcome -> the report as text for terminals, logs and files: charts in characters, tables, notes, drawn with rich."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .._model._timeline import Timeline
from .._runtime._bytes import format_nbytes
from ._content import (
    NOTES,
    ROUND,
    Branch,
    format_seconds,
    is_plain,
    largest,
    memory_note,
    module_of,
    modules,
    price,
    remarks,
    rounds,
    verdict,
    verified,
)
from ._outcome import Outcome, alike, by_kind, bytes_of

ROWS = 12
"""Most rows of a table in a terminal."""

WIDE, SPARED = 100, ("gap", "stages", "solver")
"""Columns of the planner's log that are left out if the terminal is narrower."""

EIGHTHS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Section:
    """One part of the report: a title, a chart in characters, a table under its column names, and a note.

    Columns whose name begins with `>` are right-aligned.
    """

    title: str
    picture: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""


def sections(outcome: Outcome, width: int) -> list[Section]:
    """Return the report's parts; charts have at most `width` columns."""
    found = [_memory(outcome, width)]
    if outcome.actions:
        found.append(_values(outcome))
    if outcome.account.shares:
        found.append(_modules(outcome))
    if outcome.alive:
        found.append(_peak(outcome))
    if outcome.rounds:
        shown = [i for i, name in enumerate(ROUND) if width >= WIDE or name not in SPARED]
        columns = tuple(ROUND[i] if ROUND[i] in ("fits", "solver") else f">{ROUND[i]}" for i in shown)
        rows = tuple(tuple(row[i] for i in shown) for row in rounds(outcome))
        found.append(Section("How the plan was found", (), columns, rows, NOTES["rounds"]))
    figures = tuple(verified(outcome))
    note = NOTES["verified"] if figures else NOTES["not compiled"]
    found.append(Section("What was verified", (), ("", ">") if figures else (), figures, note))
    return found


def _memory(outcome: Outcome, width: int) -> Section:
    account = outcome.account
    names = ("plain",) if is_plain(outcome) else ("plain", "planned")
    runs = list(zip(names, account.runs, strict=True))
    highest = max([account.base_nbytes + m.nbytes for _, run in runs for m in run.moments], default=1)
    top = min(max(highest, outcome.budget_nbytes), int(1.3 * highest))
    columns = max(min(width - 12, 72), 20)
    longest = max(run.seconds for _, run in runs) or 1.0
    picture: list[str] = []
    for name, run in runs:
        share = max(int(columns * run.seconds / longest), 1)
        picture.append(f"{name}: {format_seconds(run.seconds)}, modelled")
        picture += _hill(run, account.base_nbytes, top, outcome.budget_nbytes, share)
    note = memory_note(outcome)
    return Section(
        "Memory over one step", tuple(picture), note=note.replace(" (orange)", "").replace(" (blue)", "")
    )


def _hill(
    run: Timeline, base_nbytes: int, top: int, budget: int, columns: int, height: int = 7
) -> Iterator[str]:
    """Yield a timeline in characters: the maximum in each column, the budget as dots, and the passes underneath."""
    most = [0] * columns
    begins = [min(int(columns * m.seconds / (run.seconds or 1.0)), columns - 1) for m in run.moments]
    for moment, (first, last) in zip(run.moments, pairwise([*begins, columns]), strict=True):
        for i in range(first, max(last, first + 1)):
            most[i] = max(most[i], base_nbytes + moment.nbytes)
    forward = int(columns * run.forward_seconds / (run.seconds or 1.0))
    passes = ["forward".ljust(forward)[:forward], "| backward"[: columns - forward]]
    for row in reversed(range(height)):
        low, high = top * row / height, top * (row + 1) / height
        here = low < budget <= high
        cells = ""
        for nbytes in most:
            eighths = max(0, min(8, round(8 * (nbytes - low) / (high - low))))
            cells += "┄" if here and eighths == 0 else EIGHTHS[eighths]
        label = "budget" if here else format_nbytes(high) if row == height - 1 else ""
        yield f"{label:>9} {cells}".rstrip()
    yield f"{'':>9} {''.join(passes)}".rstrip()
    for label, back in (("to host", False), ("and back", True)) if run.copies else ():
        lane = [" "] * columns
        for copy in run.copies:
            if copy.back == back:
                first, last = (int(columns * at / (run.seconds or 1.0)) for at in (copy.begin, copy.end))
                lane[first : last + 1] = "━" * len(lane[first : last + 1])
        yield f"{label:>9} {''.join(lane)}".rstrip()


def _values(outcome: Outcome) -> Section:
    values = largest(outcome.actions)
    rows = [
        (
            format_nbytes(v.nbytes),
            v.fate + (" (pinned)" if v.pin else ""),
            v.when,
            _times(v.count),
            v.name,
            v.shape,
            v.module or _line(v.source),
        )
        for v in values[:ROWS]
    ]
    if rest := values[ROWS:]:
        more = f"in {sum(v.count for v in rest)} more"
        rows.append((format_nbytes(sum(v.nbytes for v in rest)), more, "", "", "", "", ""))
    columns = (">bytes", "action", "stage", ">", "value", "shape", "where")
    return Section("The largest values", (), columns, tuple(rows), NOTES["values"])


def _modules(outcome: Outcome) -> Section:
    rows = [
        (("  " * depth + branch.name)[:44], format_nbytes(branch.saved_nbytes),
         format_nbytes(branch.recomputed_nbytes), format_nbytes(branch.dropped_nbytes),
         format_seconds(branch.extra_seconds))
        for depth, branch in _walk(modules(outcome.account), 0)
    ]  # fmt: skip
    columns = ("module", ">saved", ">recomputed", ">dropped", ">takes")
    return Section(
        "By module", (), columns, tuple(rows), NOTES["modules"].replace("longest bars", "largest figures")
    )


def _walk(branch: Branch, depth: int, most_depth: int = 2) -> Iterator[tuple[int, Branch]]:
    """Yield the larger branches near the root."""
    yield depth, branch
    if depth < most_depth:
        for child in branch.children.values():
            if child.nbytes >= 0.01 * max(branch.nbytes, 1):
                yield from _walk(child, depth + 1, most_depth)


def _peak(outcome: Outcome) -> Section:
    groups = alike(outcome.alive)
    rows = [
        (format_nbytes(bytes_of(group)), group[0].kind, _times(len(group)), group[0].shape, _line(group[0].source),
         module_of(group))
        for group in groups[:ROWS]
    ]  # fmt: skip
    if rest := groups[ROWS:]:
        more = f"in {sum(map(len, rest))} more"
        rows.append((format_nbytes(sum(map(bytes_of, rest))), more, "", "", "", ""))
    shares = ", ".join(f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in by_kind(outcome.alive))
    columns = (">bytes", "made by", ">", "array", "line", "module")
    return Section("At the compiled peak", (shares,), columns, tuple(rows), NOTES["peak"])


def _times(count: int) -> str:
    return f"{count} x" if count > 1 else ""


def _line(source: str) -> str:
    """Return a source line without its function, to save space: `file.py:12`."""
    return source.partition(" (")[0]


_COLOURS = {"save": "blue", "forward": "blue", "recompute": "yellow", "recomputed": "yellow", "backward": "green",
            "drop": "dim", "offload": "cyan", "no": "red", "yes": "green"}  # fmt: skip


def renderables(outcome: Outcome, width: int) -> Iterator[Any]:
    """Yield the report's parts."""
    yield Text(verdict(outcome), style="bold")
    yield Text(f"{price(outcome)} {remarks(outcome)}".rstrip())
    for section in sections(outcome, width):
        yield Text()
        yield Text(section.title, style="bold underline")
        yield from map(Text, section.picture)
        if section.rows:
            yield _table(section)
        yield Padding(Text(section.note, style="italic dim"), (0, 0, 0, 2))


def rendered(outcome: Outcome, width: int, colours: bool) -> str:
    """Return the report as text, for a terminal or a file."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colours, color_system="auto" if colours else None
    )
    with console.capture() as capture:
        for part in renderables(outcome, width):
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _table(section: Section) -> Table:
    named = any(name.strip(">") for name in section.columns)
    table = Table(
        box=box.SIMPLE_HEAD if named else None, show_header=named, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in section.columns:
        right = name.startswith(">")
        long = name in ("line", "module", "where")  # these shrink if the terminal is narrow
        table.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            overflow="ellipsis",
            no_wrap=not long,
        )
    for row in section.rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell.split(" ")[0], "")) for cell in row))
    return table
