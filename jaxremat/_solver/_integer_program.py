"""Variables, rows and an objective as plain data -> the answer of an integer programming solver in another process.

The solver runs in a worker (`_mip_worker`), so a crash or a hang costs only one attempt. Invariants: a limit on nodes
ends the search, so equal programs have equal answers, and a process solves each only once; `optimize` answers at most
`GRACE_SECONDS` after its time limit, which is only a safeguard.
"""

import hashlib
import logging
import marshal
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .._runtime._progress import interrupt
from .._runtime._worker import WorkerLateError, WorkerLostError, ask

logger = logging.getLogger("jaxremat")

WORKER = Path(__file__).with_name("_mip_worker.py")

ATTEMPTS = (("CBC", True), ("CBC", False), ("HIGHS", True))
"""Solvers in the order of attempts, and whether with heuristics. CBC was seen to crash in its diving heuristic, and in
its preprocessing, which is off.
"""

GRACE_SECONDS = 10.0
"""Seconds beyond the time limit, for reading the program and for terminating."""

MOST_NODES = 2**31 - 1

LIMITED = ("FEASIBLE", "NO_SOLUTION_FOUND")
"""Statuses of a search that a limit ended."""

Row = tuple[list[int], list[float], str, float]
Term = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result within the limits.

    **Attributes:** `status` as python-mip names it, or `LOST`; `bound` on the objective; `values` of the variables;
    `late` whether the clock ended the search.
    """

    status: str
    bound: float | None = None
    values: list[float] | None = None
    late: bool = False

    @property
    def lost(self) -> bool:
        """Whether the solver crashed or hung."""
        return self.status == "LOST"

    @property
    def limited(self) -> bool:
        """Whether a limit ended the search."""
        return self.status in LIMITED

    @property
    def infeasible(self) -> bool:
        """Whether the rows are proven infeasible."""
        return self.status in ("INFEASIBLE", "INT_INFEASIBLE")


_answers: dict[bytes, Answer] = {}
"""Answers by a hash of the program: a search for a plan returns to the same graph and budget."""

MOST_VALUES = 1_000_000
"""Variables whose values are kept in `_answers`, about 30 MB."""


@dataclass
class IntegerProgram:
    """A program to be minimised; variables are at least 0, and identified by number."""

    threads: int = 1
    columns: list[tuple[float, bool]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    objective: list[Term] = field(default_factory=list)
    start: list[Term] = field(default_factory=list)
    gap_abs: float = 1e-10
    gap: float = 1e-4
    failures: list[str] = field(default_factory=list)

    def variable(self, upper: float = math.inf, *, integer: bool = False) -> int:
        """Return a new variable's number."""
        self.columns.append((upper, integer))
        return len(self.columns) - 1

    def binary(self) -> int:
        """Return a new variable that is 0 or 1."""
        return self.variable(1.0, integer=True)

    def at_most(self, terms: Iterable[Term], bound: float) -> None:
        """Add the row `sum factor x <= bound`."""
        self.rows.append((*_sums(terms), "<", bound))

    def at_least(self, terms: Iterable[Term], bound: float) -> None:
        """Add the row `sum factor x >= bound`."""
        self.rows.append((*_sums(terms), ">", bound))

    @property
    def nonzeros(self) -> int:
        """The number of nonzero factors in all rows."""
        return sum(len(columns) for columns, *_ in self.rows)

    @property
    def given_up(self) -> bool:
        """Whether no attempt is left."""
        return len(self.failures) >= len(ATTEMPTS)

    def optimize(self, seconds: float, nodes: int = MOST_NODES) -> Answer:
        """Return the best answer within these limits, from the first attempt that has not been lost yet.

        **Arguments:** `nodes` of branch and bound; `seconds` after which the clock ends an attempt, which is recorded.
        """
        # A solver that failed is not tried again for this program, not even by a later call.
        late = False
        while not (self.given_up or late):
            engine, heuristics = ATTEMPTS[len(self.failures)]
            try:
                answer = self.attempt(engine, heuristics, seconds, nodes)
                if answer.limited and answer.late:
                    interrupt()
                if answer.status not in ("ERROR", "UNBOUNDED"):
                    return answer
                why = f"status {answer.status}"
            except WorkerLostError as error:
                why, late = str(error), isinstance(error, WorkerLateError)
            if late:
                interrupt()
            self.failures.append(f"{engine}{'' if heuristics else ' without heuristics'}: {why}")
            logger.info("a solver failed: %s", self.failures[-1])
        return Answer("LOST", late=late)

    def attempt(self, engine: str, heuristics: bool, seconds: float, nodes: int = MOST_NODES) -> Answer:
        """Return the best answer of one solver within these limits. **Raises:** `WorkerLostError`."""
        request = {
            "engine": engine, "heuristics": heuristics, "threads": self.threads, "nodes": nodes,
            "columns": self.columns, "rows": self.rows, "objective": _sums(self.objective),
            "start": self.start, "gap_abs": self.gap_abs, "gap": self.gap,
        }  # fmt: skip
        # Version 2 serialises equal objects alike, whether or not they are identical.
        key = hashlib.sha256(marshal.dumps((str(WORKER), request), 2)).digest()
        if key in _answers:
            return _answers[key]
        answer = Answer(*ask(WORKER, {**request, "seconds": seconds}, seconds + GRACE_SECONDS))
        if not answer.late and answer.status != "ERROR":
            _answers[key] = answer
            while sum(len(each.values or ()) for each in tuple(_answers.values())) > MOST_VALUES:
                _answers.pop(next(iter(_answers)), None)
        return answer


def _sums(terms: Iterable[Term]) -> tuple[list[int], list[float]]:
    """Return the numbers of variables and their factors, each variable once."""
    total: dict[int, float] = {}
    for x, factor in terms:
        total[x] = total.get(x, 0.0) + factor
    return list(total), list(total.values())
