"""`jaxremat plan` and `memory`: what a step needs, and how it fits."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .._api import Step
from .._api import memory as memory_of
from .._budget import format_nbytes, parse_budget
from .._program import MemoryStats
from .._target import Target
from ._command import Answer, command
from ._subject import BudgetText, Planning, Subject, parsed, step_of, writable


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @command(app, "plan")
    def plan(
        *,
        subject: Subject,
        budget: BudgetText = None,
        planning: Planning,
        save: Annotated[
            Path | None, typer.Option(metavar="FILE", callback=writable, help="Write the plan here.")
        ] = None,
    ) -> Answer:
        """Plan a train step within a budget, and print what is saved and what is recomputed."""
        call = subject.load()
        found = step_of(subject, call.fn, budget, planning).plan(*call.args, **call.kwargs)
        if save is not None:
            found.save(save)
        return Answer(json.loads(found.to_json()), str(found))

    @command(app, "memory")
    def memory(subject: Subject, budget: BudgetText = None) -> Answer:
        """Compile a function and print what it needs on one device; with a budget, whether it fits."""
        call = subject.load()
        options = subject.jit_options(call.fn)
        if isinstance(call.fn, Step):
            step = step_of(subject, call.fn, None, Planning())
            stats = MemoryStats.of(step.compile(*call.args, **call.kwargs))
        else:
            flat = call.by_position()
            stats = memory_of(flat.fn, *flat.args, **options)
        device_nbytes = None if subject.target is None else Target(subject.target).spec.memory_nbytes
        limit = None if budget is None else parse_budget(parsed(budget), device_nbytes)
        if limit == "min":
            raise typer.BadParameter("'min' is for `jaxremat plan`: this compiles the function as it is")
        fits = None if limit is None else stats.peak_nbytes <= limit
        data = {**_figures(stats), "budget_nbytes": limit, "fits": fits}
        return Answer(data, _table(stats, limit), code=1 if fits is False else 0)


def _figures(stats: MemoryStats) -> dict[str, int]:
    names = ("arguments_nbytes", "outputs_nbytes", "aliased_nbytes", "temporaries_nbytes", "peak_nbytes")
    return {name: getattr(stats, name) for name in names}


def _table(stats: MemoryStats, limit: int | None) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for name, nbytes in _figures(stats).items():
        sign = "-" if name == "aliased_nbytes" and nbytes else ""
        style = "bold" if name == "peak_nbytes" else ""
        table.add_row(
            name.removesuffix("_nbytes"), sign + format_nbytes(nbytes), f"{nbytes:,} bytes", style=style
        )
    if limit is not None:
        spare = limit - stats.peak_nbytes
        verdict = (
            f"fits, {format_nbytes(spare)} to spare" if spare >= 0 else f"{format_nbytes(-spare)} too much"
        )
        table.add_row("budget", format_nbytes(limit), verdict)
    return table
