"""Names of optional packages -> whether they are installed, and an error that says how to install them."""

import importlib.metadata
from importlib.util import find_spec

from ._errors import InstallError


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ValueError:  # in sys.modules without a spec
        return False


def version_of(distribution: str) -> str | None:
    """Return the version of a package as pip names it, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(what: str, extra: str, *modules: str) -> None:
    """**Raises:** `InstallError`, with the command that installs them, where modules are missing that `what` needs."""
    if missing := [name for name in modules if not installed(name)]:
        raise InstallError(
            f"{what} needs {', '.join(missing)}, which is not installed. "
            f'Run in a checkout of jaxremat: pip install ".[{extra}]"'
        )
