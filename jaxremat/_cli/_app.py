"""The commands, put together."""

from typing import Annotated

import jax
import typer

from .. import __version__
from ._check import register as _add_runs
from ._command import EXIT_CODES, Commands
from ._doctor import register as _add_doctor
from ._machine import register as _add_machine
from ._plans import register as _add_plans
from ._zoo import register as _add_zoo


def application() -> typer.Typer:
    """Return the command-line application."""
    app = typer.Typer(
        cls=Commands,
        help="Rematerialisation for JAX: fit a train step into a memory budget.",
        epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning, _ in EXIT_CODES) + ".",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # whose tables have no room for words in 80 columns
    )

    @app.callback(invoke_without_command=True)
    def everything(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            typer.echo(f"jaxremat {__version__}, jax {jax.__version__}")
            raise typer.Exit()
        if context.invoked_subcommand is None:
            typer.echo(context.get_help(), err=True)
            raise typer.Exit(2)

    for add in (_add_plans, _add_runs, _add_zoo, _add_machine, _add_doctor):
        add(app)
    return app
