"""Exception in one form of a step -> a file that reproduces it, and one line in the log; another form is tried.

Invariant: a defect of this library costs the form in which it occurs, not the user's process. The same holds for a form
that does not compile, which is no defect. Other deliberate errors, errors of the user's code and interrupts propagate:
only rewriting, emitting and compiling run within `attempted`. A rewritten form is checked before it is compiled.
"""

import hashlib
import logging
import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
from jaxlib import version as jaxlib

from .._compiler._program import Program
from .._model._graph import Graph
from .._model._variant import PLAIN, Variant
from .._runtime._budgets import Budget
from .._runtime._bytes import format_nbytes, least_budget
from .._runtime._cache_folder import cache_dir, store, trim
from .._runtime._errors import CompilationError, InfeasibleBudgetError, JaxrematError, Reason, warn
from .._solver import Solution

T = TypeVar("T")
logger = logging.getLogger("jaxremat")

MOST_NBYTES = 64 * 2**20
"""Most bytes of all files together."""

MOST_EQUATIONS = 20_000
"""A larger program is not written out: that takes minutes."""

_PASSED_ON = (JaxrematError, Warning, MemoryError)
"""Errors that are meant for the user."""

_ADVICE = {
    "refused": "use a smaller batch, or shorter sequences",
    "memory": "plan on a machine with more memory",
    "time": "use a larger planning_seconds",
    "lost": "try again",
}
"""Advice if no form compiles, by the reasons of `CompilationError`."""

_reported: set[Path] = set()


def reproducers() -> Path:
    """Return the folder of the defects' files."""
    return cache_dir() / "defects"


@dataclass(frozen=True)
class Defects:
    """The defects of one step. **Fields:** `program` with `args` and `kwargs`; `compiler` its name, as text;
    `uncompiled` the last error of each form that did not compile.
    """

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compiler: str
    uncompiled: dict[Variant, CompilationError] = field(default_factory=dict, init=False)

    def attempted(
        self,
        what: str,
        make: Callable[[], T],
        form: Variant = PLAIN,
        graph: Graph | None = None,
        solution: Solution | None = None,
    ) -> T | None:
        """Return the result of `make`; None if it does not compile, or fails by a defect, which is reported.

        **Arguments:** `what` names the attempt, as text; `form` of the step; `graph` and `solution` if a schedule is
        emitted.
        """
        try:
            return make()
        except CompilationError as error:
            self.note(form, error)
            return None
        except _PASSED_ON:
            raise
        except Exception as error:
            self._report(error, what, [f"{what}, {form}", *_emitted(graph, solution)])
            return None

    def note(self, form: Variant, error: CompilationError) -> None:
        """Record that a form does not compile."""
        if form not in self.uncompiled:
            logger.warning("not compiled, so another form is tried: %s: %s", form, error.why)
        self.uncompiled[form] = error

    def no_form(self, step: str) -> CompilationError:
        """Return the error that no form of a step compiles, with the reason for each."""
        tried = "; ".join(f"{form}: {error.why}" for form, error in self.uncompiled.items())
        reasons: dict[Reason, None] = dict.fromkeys(each.reason for each in self.uncompiled.values())
        return CompilationError(
            f"No form of `{step}` could be compiled. Tried: {tried}. "
            f"{', or '.join(_ADVICE[reason] for reason in reasons).capitalize()}.",
            reason=next(iter(reasons)),
        )

    def _report(self, error: Exception, what: str, lines: Sequence[str]) -> None:
        """Write the file of a defect and log its path, once in a process."""
        closed = self.program.plain.trace(*self.args, **self.kwargs).jaxpr  # from JAX's cache of traces
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}:{frame.lineno}" for frame in frames]
        key = "\n".join([type(error).__name__, *places, *map(str, closed.in_avals)])
        path = reproducers() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.txt"
        if path in _reported:
            return
        _reported.add(path)
        count = len(closed.jaxpr.eqns)
        versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python {platform.python_version()}"
        sections = {
            "versions": f"{versions}, {self.compiler}",
            "attempt": "\n".join(lines),
            "traceback": "".join(traceback.format_exception(error)),
            "program": str(closed) if count <= MOST_EQUATIONS else f"{count} equations",
        }
        store(path, "\n".join(f"# {name}\n{text.rstrip()}\n" for name, text in sections.items()))
        trim(path.parent, MOST_NBYTES)
        said = (str(error).strip().splitlines() or [""])[0]
        logger.error(
            "a defect in jaxremat: %s failed (%s: %s), so another form of the step is tried. Please report it "
            "with the file %s, which holds the step's equations but no data.",
            what, type(error).__name__, said[:200], path,
        )  # fmt: skip


def run_as_written(asked: Budget, peak_nbytes: int, budget_nbytes: int, margin_nbytes: int) -> None:
    """Warn that a step runs as written, because no form of it could be built.

    **Raises:** `InfeasibleBudgetError` if its peak exceeds the budget less the margin.
    """
    said = (
        f"No form of the step could be built for the budget {asked!r}, because of a defect in jaxremat (see "
        f"{reproducers()});"
    )
    if peak_nbytes > budget_nbytes:
        least = peak_nbytes + margin_nbytes
        raise InfeasibleBudgetError(
            f"{said} as written it needs {format_nbytes(peak_nbytes)}. Use a budget of at least "
            f"{least_budget(least)}, or a smaller batch.",
            budget_nbytes=budget_nbytes + margin_nbytes,
            min_peak_nbytes=peak_nbytes,
        )
    warn(f"{said} it runs as written. Please report the file.")


def _emitted(graph: Graph | None, solution: Solution | None) -> list[str]:
    lines: list[Any] = []
    if graph is not None:
        lines += [f"platform = {graph.platform!r}", f"stages = {[(s.start, s.stop) for s in graph.stages]}"]
        lines += [f"materialised = {[v.id for v in graph.values if v.materialised]}"]
    if solution is not None:
        schedule = solution.schedule
        lines += [f"saved = {sorted(schedule.saved)}", f"kept = {sorted(schedule.kept)}"]
        lines += [f"recomputed = {schedule.recomputed}"]
    return lines
