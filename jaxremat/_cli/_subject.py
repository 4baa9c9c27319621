"""`module:function`, `module:make_args` and options -> a function, its arguments, and a `Step` of it."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from .._api._optimize import optimize
from .._api._step import Step
from .._compiler._program import Program
from .._compiler._target import Target, targets
from .._model._sites import EXACT
from .._plan._arguments import ALLOWED
from .._plan._request import Planning
from .._runtime._errors import ArgumentError, TargetError
from .._solver import Chen, Greedy, Milp, MinCut, RecomputeAll

SOLVERS = {"milp": Milp, "mincut": MinCut, "greedy": Greedy, "chen": Chen, "recompute-all": RecomputeAll}
"""By name."""


def known_target(name: str | None) -> str | None:
    """Return a target's name as it is. **Raises:** an error of usage for others."""
    if name is not None:
        try:
            Target(name)
        except TargetError as error:
            raise typer.BadParameter(str(error)) from None
    return name


def writable(path: Path | None) -> Path | None:
    """Return a path in a folder that is there: known before minutes are spent on what shall be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        callback=known_target,
        autocompletion=lambda: list(targets()),
        help="Compile for this device (`jaxremat devices` lists them), or for several: h100x8, h100:16x8. "
        "This machine need not have it.",
    ),
]


class Call(NamedTuple):
    """A function and what to call it with."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def by_position(self) -> "Call":
        """Return the same with all arguments in a row, those of the function's signature in its order."""
        if not self.kwargs:
            return self
        bound = inspect.signature(self.fn).bind(*self.args, **self.kwargs)
        count, names = len(bound.args), tuple(bound.kwargs)
        if not names:
            return Call(self.fn, bound.args, {})
        if isinstance(self.fn, Step):
            raise ArgumentError(
                f"This command cannot pass arguments by name to a decorated step ({', '.join(names)})."
            )

        def fn(*args: object) -> Any:
            return self.fn(*args[:count], **dict(zip(names, args[count:], strict=True)))

        return Call(fn, (*bound.args, *bound.kwargs.values()), {})


@dataclass(frozen=True)
class Subject:
    """The options that say which function is meant, and how it is jitted."""

    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="The train step: `train:step`, `train.py:step`.")
    ]
    make_args: Annotated[
        str,
        typer.Option(
            "--args",
            metavar="FUNCTION",
            help="Function that returns the step's arguments (arrays or `jax.ShapeDtypeStruct`s): a tuple, or "
            "a tuple and a dict of keyword arguments. A name without a module is looked up in the step's module.",
        ),
    ]
    donate: Annotated[str, typer.Option(metavar="0,1", help="Donated arguments, by number or name.")] = ""
    static: Annotated[str, typer.Option(metavar="2", help="Static arguments, by number or name.")] = ""
    target: TargetName = None

    def load(self) -> Call:
        """Import both. **Raises:** `ArgumentError`."""
        fn = resolve(self.function)
        module = self.function.rpartition(":")[0]
        source = self.make_args if ":" in self.make_args else f"{module}:{self.make_args}"
        made = resolve(source)
        return Call(fn, *split(fn, made() if callable(made) else made, source))

    def jit_options(self, fn: Callable[..., object]) -> dict[str, Any]:
        """Return keyword arguments of `optimize` for the function, without those that were not given."""
        found: dict[str, Any] = {}
        for option, text in (("donate", self.donate), ("static", self.static)):
            if numbers := tuple(
                _number(fn, option, word.strip()) for word in text.split(",") if word.strip()
            ):
                found[f"{option}_argnums"] = numbers
        return found | ({"target": self.target} if self.target else {})


def _number(fn: Callable[..., object], option: str, word: str) -> int:
    """Return an argument's position. **Raises:** an error of usage where there is no such argument."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if word in names:
        return names.index(word)
    number = int(word) if word.removeprefix("-").isdigit() else None
    if number is None or not (many or -len(names) <= number < len(names)):
        raise typer.BadParameter(f"--{option} {word}: the function takes {', '.join(names)}")
    return number


@dataclass(frozen=True)
class PlanningOptions:
    """The options that say how to plan; what is None was not given."""

    solver: Annotated[
        Literal["milp", "mincut", "greedy", "chen", "recompute-all"] | None, typer.Option(help="The planner.")
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="S", help="Work limit of each solve, in seconds on a typical machine."),
    ] = None
    planning_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Time limit of the search, which runs on until a first plan fits."),
    ] = None
    effort: Annotated[
        Literal["normal", "thorough"] | None, typer.Option(help="How far to search: thorough has no limits.")
    ] = None
    profile: Annotated[
        Literal["roofline", "measure"] | None, typer.Option(help="Estimate or measure operations' times.")
    ] = None
    margin: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to leave free below the budget, such as 500MiB."),
    ] = None
    offload: Annotated[bool | None, typer.Option(help="Allow offloading to host memory.")] = None
    host_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Allow offloading to this much host memory, such as 64GiB."),
    ] = None
    allow: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Transformations besides recomputation, separated by commas: {', '.join(ALLOWED)}; exact (the "
            f"default) stands for {', '.join(EXACT)}; none allows recomputation alone.",
        ),
    ] = None
    verify: Annotated[bool | None, typer.Option(help="Compile the plan to confirm its peak.")] = None
    cache: Annotated[bool | None, typer.Option(help="Read and write the plan cache.")] = None

    def fields(self) -> dict[str, Any]:
        """Return fields of `jaxremat.Planning`, without those that were not given."""
        found = {
            "solver": SOLVERS[self.solver]() if self.solver else None,
            "time_limit": self.time_limit,
            "planning_seconds": self.planning_seconds,
            "effort": self.effort,
            "profile": self.profile,
            "workspace_margin": self.margin,
            "verify": self.verify,
            "cache": self.cache,
        }
        return _given(found)

    def question(self) -> dict[str, Any]:
        """Return keyword arguments of `optimize` besides, without those that were not given."""
        if self.host_budget is not None and self.offload is False:
            raise typer.BadParameter(
                "--host-budget allows offloading, but --no-offload forbids it. Leave one of them out."
            )
        offload = self.offload if self.host_budget is None else self.host_budget
        return _given({"offload": offload, "allow": self._allowed()})

    def _allowed(self) -> tuple[str, ...] | None:
        """Return `allow` of `optimize`, None where it was not given."""
        if self.allow is None:
            return None
        words = [word.strip() for word in self.allow.split(",")]
        groups = {"exact": EXACT, "none": ()} | {name: (name,) for name in ALLOWED}
        if unknown := [word for word in words if word not in groups]:
            raise typer.BadParameter(f"--allow {unknown[0]}: write some of {', '.join(groups)}")
        return tuple(dict.fromkeys(name for word in words for name in groups[word]))


def _given(options: dict[str, object]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="24GiB, 500MB, a number of bytes, a share of the device's memory such as 0.9, '50% of peak' or "
        "'50% of temporaries' of the plain step, or min; by default the device's memory, or the budget of "
        "a decorated step.",
    ),
]


def step_of(
    subject: Subject, fn: Callable[..., object], budget: str | None, options: PlanningOptions
) -> Step:
    """Return the function, decorated; one that already is gets the options that were given in place of its own."""
    jit, question, fields = subject.jit_options(fn), options.question(), options.fields()
    if not isinstance(fn, Step):
        return optimize(budget, **jit, **question, planning=Planning(**fields))(fn)
    if budget is None and not (jit or question or fields):
        return fn
    own, follow = fn._request, fn._given if budget is None else None
    asked = {"plan": follow} if follow else {"budget": own.budget if budget is None else budget}
    planning = replace(own.planning, **fields)
    fresh = optimize(**asked, **jit, **question, planning=planning)(
        fn._program.fn
    )  # which checks the options
    given = {name: getattr(fresh._request, name) for name in ("budget", "planning", *question)}
    return Step(_rejitted(fn._program, fresh._program, jit), replace(own, **given), follow)


def _rejitted(old: Program, new: Program, given: dict[str, object]) -> Program:
    changed = {name: getattr(new, name) for name in given if name != "target"}
    return replace(old, **changed, target=new.target if "target" in given else old.target)


def resolve(path: str) -> Any:
    """Return what `module:name` means, with the current directory in front. **Raises:** `ArgumentError`."""
    module, colon, names = path.rpartition(":")
    if not (colon and module and names):
        raise ArgumentError(
            f"{path!r} is not of the form module:function, as in train:step or train.py:step."
        )
    found = _imported(module)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            known = f"; it has {', '.join(near[:12])}" if near else ""
            raise ArgumentError(f"{path!r}: {module} has no {name!r}{known}.") from None
    return found


def _imported(module: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if module.endswith(".py"):
        file = Path(module).resolve()
        if not file.is_file():
            raise ArgumentError(f"There is no file {module!r} in {here}.")
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        module = file.stem
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and what it imports is not
        raise ArgumentError(f"There is no module {module!r}, neither in {here} nor installed.") from None


def split(fn: Callable[..., object], made: object, source: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and those by name, from what `make_args` returned.

    A tuple and a dict are both where the dict's keys are names of the function's parameters; else they are its first
    two arguments. **Raises:** `ArgumentError`.
    """
    if isinstance(made, dict):
        return (), made
    if not isinstance(made, (tuple, list)):
        raise ArgumentError(
            f"{source!r} returned a {type(made).__name__}. It must return a tuple of the function's "
            "arguments, such as (params, batch), or (args, kwargs)."
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return tuple(made), {}
    if len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict):
        with contextlib.suppress(TypeError):
            signature.bind(*made[0], **made[1])
            return made[0], made[1]
    try:
        signature.bind(*made)
    except TypeError as error:
        raise ArgumentError(
            f"{source!r} returned {len(made)} arguments, but the function takes {signature}: {error}."
        ) from None
    return tuple(made), {}
