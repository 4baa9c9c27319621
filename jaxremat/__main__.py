"""Command line -> one command: `jaxremat demo`."""

from importlib.util import find_spec
from typing import Annotated, Any

from ._errors import JaxrematError


def application() -> Any:
    """The command-line application; needs typer."""
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

    @app.callback()
    def everything() -> None:
        """Rematerialisation for JAX, planned and proven: train inside a byte budget."""

    @app.command()
    def demo(
        steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 40,
        batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 48,
        budget: Annotated[
            str | None,
            typer.Option(help='Memory: "60MiB", "min"; by default half of what the plain step needs.'),
        ] = None,
    ) -> None:
        """Train a Flax ResNet on handwritten digits, plainly and within a memory budget."""
        _require("sklearn")
        from rich.console import Console

        from ._demo import demo as run

        run(Console(), steps, batch, budget)

    return app


def _require(*modules: str) -> None:
    """Leave with one line that says what to install, where a module is missing."""
    missing = [name for name in modules if not _installed(name)]
    if missing:
        raise SystemExit(
            f"jaxremat: this command needs {', '.join(missing)}, which is not installed. "
            'Run: pip install "jaxremat[demo]"'
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # present in sys.modules without a spec
        return False


def main() -> None:
    """The entry point of `jaxremat` and of `python -m jaxremat`."""
    _require("typer", "rich")
    try:
        application()(prog_name="jaxremat")
    except JaxrematError as error:
        raise SystemExit(f"jaxremat: {error}") from None


if __name__ == "__main__":
    main()
