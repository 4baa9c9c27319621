"""`jaxremat zoo list`, `show` and `export`: plans of the benchmark networks that come with the library."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from .. import zoo
from .._runtime._bytes import format_nbytes
from ._command import Answer, Commands, command
from ._subject import writable

_Network = Annotated[str, typer.Argument(help="A network of `zoo list`.")]
_Budget = Annotated[str, typer.Argument(help="A budget of `zoo list`.")]
_Target = Annotated[str, typer.Option(help="The device that the plan is for.")]
_Scale = Annotated[str, typer.Option(help="full or small.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(cls=Commands, help="Plans of the benchmark networks.", no_args_is_help=True)
    app.add_typer(group, name="zoo")

    @command(group, "list")
    def list_() -> Answer:
        """List the plans for all versions of jax."""
        found = zoo.entries()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
        for name in ("network", "scale", "budget", "target", "jax"):
            table.add_column(name, no_wrap=name == "network")  # to be copied, on a narrow terminal too
        for name in ("peak", "of plain", "overhead"):
            table.add_column(name, justify="right")
        for e in found:
            peak, plain = (
                e.plan.compiled_peak_nbytes or e.plan.predicted_peak_nbytes,
                e.plan.baseline_peak_nbytes,
            )
            overhead = e.plan.overhead if e.plan.compiled_overhead is None else e.plan.compiled_overhead
            figures = (format_nbytes(peak), f"{peak / plain:.0%}", f"{overhead:.1%}")
            style = "" if e.here else "dim"
            table.add_row(e.network, e.scale, e.budget, e.target, e.jax, *figures, style=style)
        return Answer([_data(e) for e in found], table)

    @command(group, "show")
    def show(network: _Network, budget: _Budget, target: _Target = "h100", scale: _Scale = "full") -> Answer:
        """Print a plan and how it was made.

        Prints the settings of its program and the versions of the packages too.
        """
        e = zoo.find(network, budget, target=target, scale=scale)
        facts = [f"  {key}: {value}" for key, value in (*e.settings.items(), *e.versions.items())]
        return Answer(_data(e), "\n".join([f"{e.name}, for jax {e.jax}", *facts, str(e.plan)]))

    @command(group, "export")
    def export(
        network: _Network,
        budget: _Budget,
        file: Annotated[Path, typer.Argument(callback=writable, help="The file to write.")],
        target: _Target = "h100",
        scale: _Scale = "full",
    ) -> Answer:
        """Write a plan to a file, for `optimize(plan="plan.json")`."""
        e = zoo.find(network, budget, target=target, scale=scale)
        e.plan.save(file)
        return Answer({**_data(e), "file": str(file)}, f"{e.name} is in {file}")


def _data(e: zoo.Entry) -> dict[str, Any]:
    """Return an entry but for its plan's details."""
    plan = json.loads(e.plan.to_json())
    figures = {key: value for key, value in plan.items() if not isinstance(value, list)}
    names = ("network", "scale", "target", "budget", "jax", "here", "versions", "settings")
    return {**{name: getattr(e, name) for name in names}, "plan": figures}
