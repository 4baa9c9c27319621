"""`jaxremat plan` and `memory`: what a step needs, and how it fits."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .._api._planning import memory as memory_of
from .._api._step import Step
from .._api._sweep import sweep as frontier_of
from .._compiler._memory_stats import MemoryStats
from .._compiler._target import Target
from .._plan._plan import Plan
from .._plan._request import Planning
from .._runtime._budgets import parse_budget
from .._runtime._bytes import format_nbytes
from .._runtime._extras import require
from ._command import Answer, command
from ._subject import BudgetText, PlanningOptions, Subject, step_of, writable


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @command(app, "plan")
    def plan(
        *,
        subject: Subject,
        budget: BudgetText = None,
        planning: PlanningOptions,
        save: Annotated[
            Path | None, typer.Option(metavar="FILE", callback=writable, help="Write the plan to this file.")
        ] = None,
    ) -> Answer:
        """Plan a train step within a budget.

        Prints the peak, the overhead, and what is saved and recomputed.
        """
        call = subject.load()
        found = step_of(subject, call.fn, budget, planning).plan(*call.args, **call.kwargs)
        if save is not None:
            found.save(save)
        return Answer(json.loads(found.to_json()), str(found))

    @command(app, "memory")
    def memory(subject: Subject, budget: BudgetText = None) -> Answer:
        """Print the memory that a function needs on one device.

        With a budget, print whether it fits.

        If the compiler refuses the function, the figures are the model's, and marked as such.
        """
        call = subject.load()
        row, options = call.by_position(), subject.jit_options(call.fn)
        if isinstance(call.fn, Step):
            stats = memory_of(step_of(subject, call.fn, None, PlanningOptions()), *row.args)
        else:
            stats = memory_of(row.fn, *row.args, **options)
        device_nbytes = None if subject.target is None else Target(subject.target).spec.memory_nbytes
        parts = stats.base_nbytes, stats.temporaries_nbytes
        limit = None if budget is None else parse_budget(budget, device_nbytes, lambda: parts)
        if limit == "min":
            raise typer.BadParameter(
                "'min' needs a plan: use `jaxremat plan`. This command compiles the step as written"
            )
        fits = None if limit is None else stats.peak_nbytes <= limit
        data = {**_figures(stats), "budget_nbytes": limit, "fits": fits, "modelled": stats.modelled}
        return Answer(data, _table(stats, limit), code=1 if fits is False else 0)

    @command(app, "sweep")
    def sweep(
        *,
        subject: Subject,
        points: Annotated[int, typer.Option(min=2, help="Number of budgets.")] = 12,
        plot: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", callback=writable, help="Plot the frontier to a .png, .svg or .pdf file."
            ),
        ] = None,
        save: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", callback=writable, help="Write the frontier and its plans to a JSON file."
            ),
        ] = None,
        planning: PlanningOptions,
    ) -> Answer:
        """Print the overhead of plans for several budgets.

        The budgets range from the plain step's memory down to the least.

        An interrupted sweep continues where it stopped.
        """
        if plot is not None:
            require("--plot", "tools", "matplotlib")
        call = subject.load()
        row, options = call.by_position(), subject.jit_options(call.fn)
        if isinstance(call.fn, Step):
            found = frontier_of(step_of(subject, call.fn, None, planning), *row.args, points=points)
        else:
            options |= planning.question()
            found = frontier_of(
                row.fn, *row.args, points=points, planning=Planning(**planning.fields()), **options
            )
        if save is not None:
            found.save(save)
        if plot is not None:
            import matplotlib

            matplotlib.use("agg")  # a file is wanted, not a window
            found.plot().figure.savefig(plot, dpi=150)  # type: ignore[union-attr]
        return Answer(json.loads(found.to_json()), str(found))

    @command(app, "report")
    def report(
        file: Annotated[
            Path, typer.Argument(metavar="PLAN", help="A file that `plan --save` or `Plan.save` wrote.")
        ],
        html: Annotated[
            Path | None,
            typer.Option(metavar="FILE", callback=writable, help="Write the report as an HTML page."),
        ] = None,
    ) -> Answer:
        """Show a plan as pictures and tables.

        The report has the memory over the step, the largest values, the modules, and what was verified.
        """
        plan = Plan.load(file)
        found = plan.report()
        if html is not None:
            found.save(html)
        return Answer(json.loads(plan.to_json()), found)


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
            f"fits, {format_nbytes(spare)} to spare"
            if spare >= 0
            else f"{format_nbytes(-spare)} over the budget"
        )
        table.add_row("budget", format_nbytes(limit), verdict)
    if stats.modelled:
        table.add_row("by the model", "", stats.modelled)
    return table
