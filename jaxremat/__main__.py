"""The entry point of `jaxremat` and of `python -m jaxremat`; the commands are in `_cli`."""

import sys
from importlib.util import find_spec

import jax

from . import __version__


def main() -> None:
    """Run the command line, or say what it needs."""
    if sys.argv[1:] == ["--version"]:  # which needs nothing
        print(f"jaxremat {__version__}, jax {jax.__version__}")
        return
    missing = [name for name in ("typer", "rich") if not _installed(name)]
    if missing:
        print(
            f"jaxremat: the command line needs {', '.join(missing)}, which is not installed. "
            'Run in a checkout of jaxremat: pip install ".[tools]"',
            file=sys.stderr,
        )
        raise SystemExit(4)
    from ._cli import application

    application()(prog_name="jaxremat")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # present in sys.modules without a spec
        return False


if __name__ == "__main__":
    main()
