"""`jaxremat doctor`: does what is installed work?"""

from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ._command import Answer, command
from ._health import Finding, findings

_MARKS = {"ok": ("ok", "green"), "absent": ("-", "yellow"), "broken": ("BROKEN", "bold red")}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(app, "doctor")
    def doctor(console: Console) -> Answer:
        """Check packages, devices, solvers, compilers and the cache."""
        with console.status("checking devices, solvers and compilers"):
            found = list(findings())
        broken = sum(each.state == "broken" for each in found)
        data = {"ok": not broken, "findings": [asdict(each) for each in found]}
        return Answer(data, _table(found, broken), code=1 if broken else 0)


def _table(found: Sequence[Finding], broken: int) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for each in found:
        word, style = _MARKS[each.state]
        # As `Text`, for extras are written in brackets, which are rich's markup.
        table.add_row(each.subject, Text(word, style), Text(each.found), Text(each.remedy))
    if broken:
        return Group(table, f"{broken} of {len(found)} checks failed.")
    rest = " Parts marked - are optional." if any(each.state == "absent" for each in found) else ""
    return Group(table, f"Everything required works.{rest}")
