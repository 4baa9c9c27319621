"""A function that returns an `Answer` -> a command with `--json` and `--debug`, one line for every error, an exit code.

A parameter whose type is a dataclass stands for the options that its fields describe, so that commands share them.
"""

import dataclasses
import functools
import inspect
import json
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from .._report import Report
from .._runtime._errors import (
    ArgumentError,
    BudgetError,
    InfeasibleBudgetError,
    JaxrematError,
    PlanMismatchError,
    TargetError,
)

EXIT_CODES: tuple[tuple[int, str, tuple[type[BaseException], ...]], ...] = (
    (0, "success: the step fits, the results agree", ()),
    (
        1,
        "the step does not fit the budget, the results differ, or a check failed",
        (InfeasibleBudgetError,),
    ),
    (2, "usage error: an option, a budget, a function", (ArgumentError, BudgetError)),
    (3, "the plan was made for another program, or the file is not a plan", (PlanMismatchError,)),
    (
        4,
        "a package, a compiler, a device or a file is missing",
        (TargetError, ImportError, OSError),
    ),
    (5, "the function itself, a solver or the compiler failed", (Exception,)),
    (130, "interrupted", (KeyboardInterrupt,)),
)
"""Code, meaning, and the errors that end with it; the first that matches counts."""


FILE_WIDTH = 120
"""Columns of what is written to a file or a pipe, which have no width of their own."""


@dataclass(frozen=True)
class Answer:
    """What a command found. **Fields:** `data` for `--json`; `text` for people; `code` to exit with."""

    data: Any
    text: RenderableType
    code: int = 0


class Commands(TyperGroup):
    """Commands whose every error, of usage too, is one line on standard error."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, and leave with the exit code."""
        standalone = options.pop("standalone_mode", True)
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except Exception as error:
            said = getattr(error, "format_message", None)  # of typer's own errors
            if said is None:
                raise
            where = getattr(getattr(error, "ctx", None), "command_path", "jaxremat")
            _say(f"{said()} (see `{where} --help`)")
            code = getattr(error, "exit_code", 2)
        if not standalone:
            return code
        sys.exit(code if isinstance(code, int) else 0)


_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_DEBUG = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register a function as a command; a parameter of type `Console` gets one to say things on meanwhile."""

    def register(fn: Callable[..., Answer]) -> Callable[..., Answer]:
        hints = get_type_hints(fn, include_extras=True)
        parts = {n: hint for n, hint in hints.items() if n != "return" and _is_group(hint)}
        talks = [n for n, hint in hints.items() if hint is Console]

        @functools.wraps(fn)
        def run(*, as_json: bool, debug: bool, **given: object) -> None:
            narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
            out = Console(soft_wrap=True, highlight=False, width=None if narrow else FILE_WIDTH)
            with_json = Console(stderr=True, highlight=False) if as_json else out
            try:
                for n, group in parts.items():
                    given[n] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
                answer = fn(**given, **dict.fromkeys(talks, with_json))
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, typer.Exit) or hasattr(error, "format_message"):
                    raise
                raise typer.Exit(_failed(error, as_json, debug)) from None
            if as_json:
                typer.echo(json.dumps(_plain(answer.data), indent=1))
            else:
                is_report = isinstance(answer.text, Report)  # whose notes are wrapped
                out.print(answer.text, soft_wrap=not is_report)
            raise typer.Exit(answer.code)

        signature = inspect.signature(fn)
        parameters = [*_flat(signature, hints, talks), *_own()]
        order = sorted(parameters, key=lambda p: p.default is not inspect.Parameter.empty)
        run.__signature__ = signature.replace(parameters=order, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in order}
        app.command(name)(run)
        return fn

    return register


def _is_group(hint: object) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _own() -> Iterator[inspect.Parameter]:
    for name, kind in (("as_json", _JSON), ("debug", _DEBUG)):
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)


def _flat(
    signature: inspect.Signature, hints: dict[str, Any], talks: list[str]
) -> Iterator[inspect.Parameter]:
    for name, parameter in signature.parameters.items():
        if name in talks:
            continue
        hint = hints[name]
        if not _is_group(hint):
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
            continue
        types = get_type_hints(hint, include_extras=True)
        for f in dataclasses.fields(hint):
            default = inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
            yield inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[f.name]
            )


def _failed(error: BaseException, as_json: bool, debug: bool) -> int:
    """Report an error in a line. Returns the exit code."""
    code = next(code for code, _, errors in EXIT_CODES if isinstance(error, errors))
    if isinstance(error, KeyboardInterrupt):
        said = "interrupted"
    elif isinstance(error, JaxrematError):
        said = str(error)
    elif isinstance(error, OSError) and error.filename:
        said = f"{error.strerror or type(error).__name__}: {error.filename}"
    else:
        said = f"{type(error).__name__}: {error}{_place(error)}"
    said = " ".join(said.split())
    if debug:
        traceback.print_exception(error)
    if as_json:
        sizes = {n: getattr(error, n) for n in ("budget_nbytes", "min_peak_nbytes") if hasattr(error, n)}
        typer.echo(json.dumps({"error": type(error).__name__, "message": said, "exit_code": code, **sizes}))
    _say(said)
    return code


def _say(line: str) -> None:
    typer.echo(f"jaxremat: {line}", err=True)


def _place(error: BaseException) -> str:
    """Return the user's line that an error comes from, as far as there is one."""
    paths = sysconfig.get_paths()
    libraries = (str(Path(__file__).parents[1]), paths["stdlib"], paths["purelib"], paths["platlib"])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*libraries, "<frozen")):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def _plain(value: object) -> Any:
    """JSON values; what is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
