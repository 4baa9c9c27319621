"""Command line -> calls of the library -> text or JSON, and an exit code. Needs typer and rich."""

from ._app import application as application
