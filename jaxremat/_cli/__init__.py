"""Words on a command line -> the library's functions -> text or JSON, and an exit code. Needs typer and rich."""

from ._app import application as application
