"""`jaxremat doctor`: does what is installed work?

This installation -> findings: what works, what is not installed, what is broken, and what mends it.

Law: a check tries the thing itself, and raises nothing: whatever goes wrong is a finding that says what to do.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .. import __version__
from .._compiler._target import Target, compilers
from .._model._device_specs import find
from .._program._plugin_messages import has_gpu
from .._runtime._bytes import format_nbytes
from .._runtime._cache_folder import cache_dir, write_atomically
from .._runtime._errors import CompilationError, TargetError
from .._runtime._extras import version_of
from .._runtime._worker import WorkerLostError
from .._solver._integer_program import IntegerProgram
from ._command import Answer, command

State = Literal["ok", "absent", "broken"]

_SOLVERS = {"CBC": "mip", "HIGHS": "highsbox"}
"""As python-mip names them, and the packages that they come in."""

_SOLVER_SECONDS = 30.0

_JAX_PAGE = "see https://docs.jax.dev/en/latest/installation.html"

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(\[[^]]*])?\s*(?P<range>[^;]*?)\s*(;.*?(extra == ['\"](?P<extra>\w+)['\"].*)?)?"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. **Fields:** its `subject`; `state`, where "absent" is what one can do without; `found`, in
    words; `remedy`, what to do, empty where nothing is to be done.
    """

    subject: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that is needed: `name`, its versions as `range`, and the `extra` that needs it, if it is one."""

    name: str
    range: str
    extra: str


def findings() -> Iterator[Finding]:
    """Yield the outcome of every check in the order to read them in; expensive ones come as they are done."""
    needed = requirements()
    yield Finding("jaxremat", "ok", __version__ + ("" if needed else ", imported from a folder"))
    yield Finding("Python", "ok", platform.python_version())
    yield from (package(each) for each in needed if not each.extra)
    asked = "unset JAX_PLATFORMS, or " if os.environ.get("JAX_PLATFORMS") else ""
    yield from _checked("devices", devices, asked + _JAX_PAGE)
    for engine, name in _SOLVERS.items():
        yield from _checked(f"solver {engine}", lambda e=engine: solver(e), _again(name))
    yield from _checked("target compiler", target_compiler, _compiler_again())
    yield from _checked("cache", cache, "set JAXREMAT_CACHE to a writable folder")
    for extra in dict.fromkeys(each.extra for each in needed):
        if extra not in ("", "targets"):  # the target compiler has been tried
            yield packages_of(extra, [each for each in needed if each.extra == extra])


def requirements() -> list[Requirement]:
    """Return what the installed metadata ask for; nothing where the library is not installed but imported from a
    folder.
    """
    try:
        lines = importlib.metadata.requires("jaxremat") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = [match for line in lines if (match := _REQUIREMENT.fullmatch(line))]
    return [Requirement(match["name"], match["range"], match["extra"] or "") for match in matches]


def package(needed: Requirement) -> Finding:
    """Return whether it is installed, in a version that will do."""
    here = version_of(needed.name)
    install = f'pip install "{needed.name}{needed.range}"'
    if here is None:
        return Finding(needed.name, "broken", "not installed", install)
    if not within(here, needed.range):
        return Finding(needed.name, "broken", f"{here}, but must be {needed.range}", install)
    return Finding(needed.name, "ok", here)


def packages_of(extra: str, needed: list[Requirement]) -> Finding:
    """Return whether all that an extra asks for is installed."""
    install = f'pip install ".[{extra}]"'
    found = [package(each) for each in needed]
    if missing := [each.subject for each in found if each.found == "not installed"]:
        return Finding(f"extra {extra}", "absent", f"{', '.join(missing)} not installed", install)
    if wrong := [f"{each.subject} {each.found}" for each in found if each.state == "broken"]:
        return Finding(f"extra {extra}", "broken", "; ".join(wrong), install)
    return Finding(f"extra {extra}", "ok", ", ".join(f"{each.subject} {each.found}" for each in found))


def devices() -> Finding:
    """Return what JAX finds, and whether it finds the GPU that is there."""
    there = jax.local_devices()
    kinds = Counter(f"{each.platform} ({each.device_kind})" for each in there)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if all(each.platform == "cpu" for each in there):
        if has_gpu() and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
            remedy = 'pip install "jax[cuda12]", or jax[cuda13], of the same version as jax'
            return Finding("devices", "absent", f"{found}; this machine's NVIDIA GPU is not used", remedy)
        return Finding("devices", "ok", found)
    unknown = [each.device_kind for each in there if find(each.device_kind) is None]
    priced = f"; {unknown[0]} is unknown, so the planner assumes an H100's rates" if unknown else ""
    return Finding("devices", "ok", found + priced)


def solver(engine: str) -> Finding:
    """Return an integer program with a known answer, solved in the solvers' own process."""
    program = IntegerProgram(gap=0.0)
    a, b, c = (program.binary() for _ in range(3))
    program.at_most([(a, 2.0), (b, 3.0), (c, 1.0)], 5.0)
    program.objective = [(a, -5.0), (b, -4.0), (c, -3.0)]
    answer = program.attempt(engine, True, _SOLVER_SECONDS)
    if [round(value) for value in answer.values or ()] != [1, 1, 0]:
        said = f"returned {answer.values} ({answer.status}) instead of [1, 1, 0]"
        return Finding(f"solver {engine}", "broken", said, _again(_SOLVERS[engine]))
    return Finding(f"solver {engine}", "ok", f"solves, {_SOLVERS[engine]} {version_of(_SOLVERS[engine])}")


def target_compiler() -> Finding:
    """Return a product of matrices, compiled for a GPU that is not here."""
    subject = "target compiler"
    if not compilers():
        install = 'pip install ".[targets]"' if sys.platform == "linux" else ""
        where = "" if install else ", and not available for this system"
        return Finding(subject, "absent", f"not installed{where}: no `target=`", install)
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled = Target("h100").lower(jax.jit(lambda x: jnp.tanh(x @ x) @ x), (matrix,), {}, {}).compile()
    nbytes = compiled.memory_analysis().argument_size_in_bytes
    if nbytes != 256 * 256 * 4:
        said = f"reports {nbytes} bytes for an argument of {256 * 256 * 4}"
        return Finding(subject, "broken", said, _compiler_again())
    return Finding(subject, "ok", "compiles for h100, " + ", ".join(" ".join(each) for each in compilers()))


def cache() -> Finding:
    """Return the folder of what is found once: a file is written there, and removed."""
    folder = cache_dir()
    probe = folder / "doctor.txt"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(probe, "jaxremat doctor was here\n")
    probe.unlink()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    files = "file" if len(sizes) == 1 else "files"
    return Finding("cache", "ok", f"{folder}, {format_nbytes(sum(sizes))} in {len(sizes)} {files}")


def within(version: str, range_: str) -> bool:
    """Return whether a version is in a range of `>=` and `<`, the only ones that are asked for here."""
    here = _numbers(version)
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", range_)
    return all(
        (here >= _numbers(bound)) if sign == ">=" else (here < _numbers(bound)) for sign, bound in bounds
    )


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _checked(subject: str, check: Callable[[], Finding], remedy: str) -> Iterator[Finding]:
    """Yield what the check finds, or what went wrong with it, in a line."""
    try:
        yield check()
    except WorkerLostError as error:
        yield Finding(subject, "broken", str(error).splitlines()[-1], remedy)
    except (CompilationError, TargetError) as error:  # which may say itself what to install
        said = " ".join(str(error).split())
        yield Finding(subject, "broken", said, "" if "pip install" in said else remedy)
    except OSError as error:
        yield Finding(subject, "broken", f"{error.strerror or error}: {error.filename}", remedy)
    except Exception as error:
        yield Finding(subject, "broken", " ".join(f"{type(error).__name__}: {error}".split())[:200], remedy)


def _again(what: str) -> str:
    return f'pip install --force-reinstall "{what}"'


def _compiler_again() -> str:
    """Return what `jaxremat[targets]` asks for, in JAX's own version."""
    return f'pip install --force-reinstall "jax[cuda12-local]=={jax.__version__}" nvidia-cuda-nvcc-cu12'


_MARKS = {"ok": ("ok", "green"), "absent": ("-", "yellow"), "broken": ("BROKEN", "bold red")}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(app, "doctor")
    def doctor(console: Console) -> Answer:
        """Check packages, devices, solvers, compilers and the cache."""
        with console.status("checking devices, solvers and compilers"):
            found = list(findings())
        broken = sum(each.state == "broken" for each in found)
        data = {"ok": not broken, "findings": [asdict(each) for each in found]}
        return Answer(data, _table(found, broken), code=1 if broken else 0)


def _table(found: Sequence[Finding], broken: int) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for each in found:
        word, style = _MARKS[each.state]
        # As `Text`, for extras are written in brackets, which are rich's markup.
        table.add_row(each.subject, Text(word, style), Text(each.found), Text(each.remedy))
    if broken:
        return Group(table, f"{broken} of {len(found)} checks failed.")
    rest = " Parts marked - are optional." if any(each.state == "absent" for each in found) else ""
    return Group(table, f"Everything required works.{rest}")
