"""Outcome -> the report as text, with rich."""

import io
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ._content import price, remarks, verdict
from ._outcome import Outcome
from ._text import Section, sections

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
        long = name in ("line", "module", "where")  # these give way where the terminal is narrow
        table.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            overflow="ellipsis",
            no_wrap=not long,
        )
    for row in section.rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell.split(" ")[0], "")) for cell in row))
    return table
