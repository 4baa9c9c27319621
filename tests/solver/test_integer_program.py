"""The integer program's solver in its worker: it may crash, hang or be killed, and plans still come."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from graphs import blocks, peak_of

from jaxremat import Chen, Graph, Greedy, JaxrematWarning, Milp, MinCut, simulate
from jaxremat._model._schedule import check
from jaxremat._model._simulate import rank
from jaxremat._runtime import _worker
from jaxremat._solver import _integer_program
from jaxremat._solver._integer_program import ATTEMPTS, WORKER, IntegerProgram

pytestmark = pytest.mark.uncached

TIME_LIMIT = 60.0


@pytest.fixture(autouse=True)
def _nothing_answered() -> None:
    _integer_program._answers.clear()


STAND_IN = """
import os, signal, sys, time
sys.path.append({folder!r})
import _mip_worker

def answer(request):
    if (request["engine"], request["heuristics"]) in {bad!r}:
        {deed}
    return _mip_worker.answer(request)
"""
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "time.sleep(1000)"


def knapsack() -> IntegerProgram:
    """Least of 3 a + 2 b + 4 c with a + b + c >= 2: a and b, 5."""
    program = IntegerProgram()
    x = [program.binary() for _ in range(3)]
    program.at_least([(v, 1.0) for v in x], 2.0)
    program.objective = list(zip(x, (3.0, 2.0, 4.0), strict=True))
    return program


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    """Another process that finds this library as this one does."""
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE, text=True, cwd=WORKER.parents[2], env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def budget(graph: Graph) -> int:
    high, low = (peak_of(graph, s) for s in (graph.residuals, ()))
    return low + (high - low) // 3


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the worker do something bad in some attempts."""

    def put(deed: str, bad: tuple[tuple[str, bool], ...]) -> None:
        path = tmp_path / "worker.py"
        path.write_text(STAND_IN.format(folder=str(WORKER.parent), bad=bad, deed=deed))
        monkeypatch.setattr(_integer_program, "WORKER", path)

    return put


@pytest.mark.parametrize(("engine", "heuristics"), ATTEMPTS)
def test_every_attempt_solves(engine: str, heuristics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_integer_program, "ATTEMPTS", ((engine, heuristics),))
    answer = knapsack().optimize(TIME_LIMIT)
    assert answer.status == "OPTIMAL"
    assert answer.values == pytest.approx([1.0, 1.0, 0.0])
    assert answer.bound == pytest.approx(5.0)
    program = knapsack()
    program.at_most([(0, 1.0), (1, 1.0), (2, 1.0)], 1.0)
    assert program.optimize(TIME_LIMIT).infeasible


def test_a_worker_is_used_again_and_nothing_of_it_is_here() -> None:
    knapsack().optimize(TIME_LIMIT)
    (worker, *_) = _worker._idle[WORKER]
    before = {worker.process.pid for worker in _worker._alive}
    knapsack().optimize(TIME_LIMIT)
    assert worker.process.poll() is None
    assert {worker.process.pid for worker in _worker._alive} == before
    maps = Path("/proc/self/maps")
    if maps.exists() and "mip" not in sys.modules:
        assert "libCbc" not in maps.read_text()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_crash_leads_to_the_next_attempt(lost: int, stand_in: Any) -> None:
    stand_in(CRASH, ATTEMPTS[:lost])
    program = knapsack()
    assert program.optimize(TIME_LIMIT).values == pytest.approx([1.0, 1.0, 0.0])
    assert len(program.failures) == lost
    assert all("SIGSEGV" in failure for failure in program.failures)
    graph = blocks(4)
    want = simulate(graph, Milp(gap=0.0).solve(graph, budget(graph), time_limit=TIME_LIMIT).schedule)
    assert want.peak_nbytes <= budget(graph)


def test_equal_programs_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one that the clock ended, which says nothing of another try."""
    asked: list[float] = []

    def late(script: Path, request: Any, seconds: float) -> Any:
        asked.append(request["objective"][1][0])
        return ("FEASIBLE", None, None, True) if len(asked) == 1 else _worker.ask(script, request, seconds)

    monkeypatch.setattr(_integer_program, "ask", late)
    answers = [knapsack().optimize(TIME_LIMIT) for _ in range(3)]
    assert [answer.status for answer in answers] == ["FEASIBLE", "OPTIMAL", "OPTIMAL"]
    other = knapsack()
    other.objective[0] = 0, 2.5
    assert other.optimize(TIME_LIMIT).bound == pytest.approx(4.5)
    assert asked == [3.0, 3.0, 2.5]
    monkeypatch.setattr(_integer_program, "MOST_VALUES", 6)  # of two programs
    knapsack().optimize(seconds=TIME_LIMIT, nodes=7)
    assert len(_integer_program._answers) == 2


def test_where_every_attempt_is_lost_the_best_known_is_taken_and_said(stand_in: Any) -> None:
    stand_in(CRASH, ATTEMPTS)
    graph = blocks(4)
    with pytest.warns(JaxrematWarning, match="found no solution.*CBC: SIGSEGV.*HIGHS: SIGSEGV"):
        found = Milp().solve(graph, budget(graph), time_limit=TIME_LIMIT)
    known = [s.solve(graph, budget(graph), time_limit=TIME_LIMIT) for s in (Chen(), MinCut(), Greedy())]
    best = min(rank(graph, solution.schedule, budget(graph)) for solution in known)
    assert rank(graph, check(graph, found.schedule), budget(graph)) <= best
    assert not found.proven


def test_a_worker_that_hangs_is_ended(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would sleep for a quarter of an hour in each attempt."""
    stand_in(HANG, ATTEMPTS)
    monkeypatch.setattr(_integer_program, "GRACE_SECONDS", 0.2)
    alive = set(_worker._alive)
    program = knapsack()
    assert program.optimize(0.5).lost
    assert program.failures == ["CBC: no answer in time"]
    assert _worker._alive == alive
    stand_in(HANG, ATTEMPTS[:1])
    assert program.optimize(TIME_LIMIT).status == "OPTIMAL"


@pytest.fixture
def ctrl_c() -> Any:
    """Ctrl-C is heard, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_waiting_and_the_worker(stand_in: Any) -> None:
    stand_in(HANG, ATTEMPTS)
    alive = set(_worker._alive)
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        knapsack().optimize(1000.0)
    timer.join()
    assert _worker._alive == alive


@pytest.mark.slow
def test_workers_killed_at_any_moment_leave_plans() -> None:
    graph, draw = blocks(5), random.Random(0)
    known = [s.solve(graph, budget(graph), time_limit=TIME_LIMIT) for s in (Chen(), MinCut(), Greedy())]
    best = min(rank(graph, solution.schedule, budget(graph)) for solution in known)
    over, killed = threading.Event(), 0

    def kill() -> None:
        nonlocal killed
        while not over.wait(draw.uniform(0.0, 0.6)):
            for worker in tuple(_worker._alive):
                if worker.process.returncode is None:
                    os.kill(worker.process.pid, signal.SIGKILL)
                    killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for _ in range(5):
            _integer_program._answers.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", JaxrematWarning)
                found = Milp(gap=0.0).solve(graph, budget(graph), time_limit=TIME_LIMIT)
            assert rank(graph, check(graph, found.schedule), budget(graph)) <= best
    finally:
        over.set()
        killer.join()
    assert killed


def test_threads_solve_at_once() -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(knapsack().optimize(TIME_LIMIT))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == ["OPTIMAL"] * 4
    assert len(_worker._idle[WORKER]) <= _worker._MOST_IDLE


FORK = """
import os
from jaxremat._runtime import _worker
from jaxremat._solver._integer_program import IntegerProgram

def status(bound):
    program = IntegerProgram()
    program.at_least([(program.binary(), 1.0)], bound)
    return program.optimize(60.0).status

assert status(1.0) == "OPTIMAL"
child = os.fork()
if not child:
    alone = not _worker._alive and not _worker._idle
    os._exit(0 if alone and status(0.9) == "OPTIMAL" else 1)
assert os.waitpid(child, 0)[1] == 0
assert status(0.8) == "OPTIMAL"
"""


def test_a_forked_process_starts_its_own() -> None:
    """In a process without JAX's threads, which a fork could find in the middle of something."""
    assert run_python("-c", FORK).returncode == 0


PARENT = """
import os, signal, sys
from pathlib import Path
from jaxremat._runtime import _worker
worker = _worker.Worker(Path(sys.argv[1]))
print(worker.process.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_workers_end_with_their_parent(how: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("def answer(request):\n    return request\n")
    run = run_python("-c", PARENT, str(script), how)
    assert run.returncode == (-signal.SIGKILL if how == "killed" else 0)
    path = Path(f"/proc/{int(run.stdout)}/stat")
    for _ in range(600):
        if not path.exists() or path.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived whoever started it")


def test_cbc_preprocesses_nothing(stand_in: Any) -> None:
    """Its preprocessing has ended processes where the time limit ended a search that was given a start."""
    stand_in(
        "seen, model = [], _mip_worker.mip.Model; optimize = model.optimize\n"
        "        model.optimize = lambda self, **o: seen.append(self.preprocess) or optimize(self, **o)\n"
        "        _mip_worker.answer(request)\n"
        "        return str(seen), None, None",
        ATTEMPTS[:1],
    )
    assert knapsack().optimize(TIME_LIMIT).status == "[0]"
