"""The entry point of `jaxremat` and of `python -m jaxremat`; the commands are in `_cli`."""

import sys

import jax

from . import __version__
from ._runtime._errors import InstallError
from ._runtime._extras import require


def main() -> None:
    """Run the command line, or say what it needs."""
    if sys.argv[1:] == ["--version"]:  # which needs nothing
        print(f"jaxremat {__version__}, jax {jax.__version__}")
        return
    try:
        require("the command line", "tools", "typer")
    except InstallError as error:
        print(f"jaxremat: {error}", file=sys.stderr)
        raise SystemExit(4) from None
    from ._cli import application

    application()(prog_name="jaxremat")


if __name__ == "__main__":
    main()
