"""Phases of planning: who is told of them, what a terminal shows, and that Ctrl-C ends a solve."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
from zoo import BY_NAME

import jaxremat
from jaxremat._runtime._progress import is_watched, note, phase, watched
from jaxremat._runtime._progress_bars import wanted

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"CI", "PYTEST_CURRENT_TEST", "JAXREMAT_PROGRESS"}


class Log:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.parts: dict[str, int] = {}
        self.totals: dict[str, int | None] = {}
        self.notes: list[tuple[str, str]] = []

    def begin(self, name: str, total: int | None) -> str:
        self.begun.append(name)
        if total or name not in self.totals:  # phases of one name are counted together
            self.totals[name] = (self.totals.get(name) or 0) + total if total else None
        return name

    def update(self, task: str, parts: int, note: str | None) -> None:
        self.parts[task] = self.parts.get(task, 0) + parts
        if note is not None:
            self.notes.append((task, note))

    def end(self, task: str) -> None:
        self.ended.append(task)


def plan() -> jaxremat.Plan:
    case = BY_NAME["mlp_adamw"]
    args = jax.eval_shape(case.make_args)
    return jaxremat.plan(case.step, *args, budget=1_500_000, donate_argnums=0)


def test_planning_tells_its_phases_and_is_not_changed_by_that() -> None:
    log = Log()
    alone = plan()
    with watched(log):
        seen = plan()
    for found, want in zip(seen.rounds, alone.rounds, strict=True):
        assert (found.compiled_peak_nbytes, found.overhead) == (want.compiled_peak_nbytes, want.overhead)
    assert (seen.saved, seen.kept, seen.overhead) == (alone.saved, alone.kept, alone.overhead)
    assert log.begun[0] == "tracing the step"
    order = ["compiling the plain step", "compiling single operations", "solving within", "compiling plan 1"]
    places = [next(i for i, name in enumerate(log.begun) if name.startswith(start)) for start in order]
    assert places == sorted(places)
    assert sorted(log.begun) == sorted(log.ended)
    counted = [name for name, total in log.totals.items() if total]
    assert counted and all(log.parts[name] == log.totals[name] for name in counted)
    incumbents = [text for name, text in log.notes if name.startswith("solving")]
    assert any(re.fullmatch(r"\d+\.\d\d% extra time, gap \d+\.\d\d%", text) for text in incumbents)


def test_a_sweep_counts_its_points() -> None:
    case, log = BY_NAME["mlp_adamw"], Log()
    args = jax.eval_shape(case.make_args)
    with watched(log):
        jaxremat.sweep(
            case.step,
            *args,
            points=4,
            planning=jaxremat.Planning(verify=False, cache=False),
            donate_argnums=0,
        )
    assert log.begun[0] == "sweeping" and log.ended[-1] == "sweeping"
    assert log.totals["sweeping"] == log.parts["sweeping"] == 4 + 3  # and three rules


def test_phases_end_when_they_are_interrupted() -> None:
    log = Log()
    with watched(log), pytest.raises(KeyboardInterrupt), phase("outer"), phase("inner", 3) as inner:
        inner.advance()
        note("something")
        raise KeyboardInterrupt
    assert log.ended == ["inner", "outer"]
    assert log.notes == [("inner", "something")]
    assert not is_watched()
    note("nobody listens")
    with phase("nobody listens either") as silent:
        silent.advance()


# ---- on a terminal


@pytest.mark.parametrize(
    ("progress", "terminal", "environment", "want"),
    [
        (None, True, {}, True),
        (None, False, {}, False),
        (None, True, {"CI": "true"}, False),
        (None, True, {"PYTEST_CURRENT_TEST": "x"}, False),
        (True, True, {"CI": "true"}, True),
        (True, False, {}, False),
        (True, True, {"JAXREMAT_PROGRESS": "0"}, False),
        (None, True, {"JAXREMAT_PROGRESS": "1"}, True),
        (False, True, {}, False),
    ],
)
def test_when_bars_are_shown(
    progress: bool | None,
    terminal: bool,
    environment: dict[str, str],
    want: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wanted(progress) is want


SHOW = """
import time
from jaxremat._runtime._progress import note, phase
from jaxremat._runtime._progress_bars import shown
with shown(None), phase("solving the riddle", 4) as progress:
    for _ in range(3):
        progress.advance()
    note("gap of three")
    time.sleep(0.5)  # bars are drawn ten times a second
    print("the answer")
"""


def run(code: str, stderr: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    env |= {"TERM": "xterm-256color", "COLUMNS": "120", "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=300,
    )


def on_a_terminal(code: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """What a program does whose standard error is a terminal, and what that shows."""
    ours, theirs = pty.openpty()
    shown_there: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                shown_there.append(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = run(code, theirs, **environment)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done, b"".join(shown_there).decode(errors="replace")


def test_bars_on_a_terminal_and_nowhere_else() -> None:
    done, terminal = on_a_terminal(SHOW)
    assert (done.returncode, done.stdout) == (0, "the answer\n")
    assert "solving the riddle" in terminal and "3/4" in terminal and "gap of three" in terminal
    done, terminal = on_a_terminal(SHOW, JAXREMAT_PROGRESS="0")
    assert (done.returncode, done.stdout) == (0, "the answer\n") and "riddle" not in terminal
    done = run(SHOW, subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, "the answer\n") and "riddle" not in done.stderr


def test_lines_that_stay_where_there_is_no_terminal() -> None:
    """As in notebooks and batch jobs, if that is asked for."""
    asked = SHOW.replace("shown(None)", "shown(True)")
    done = run(asked, subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, "the answer\n")
    assert re.search(r"^jaxremat: solving the riddle: \d+\.\d s \(gap of three\)$", done.stderr, re.M)
    assert "riddle" not in run(asked, subprocess.PIPE, JAXREMAT_PROGRESS="0").stderr
    assert "riddle" not in run(SHOW.replace("shown(None)", "shown(False)"), subprocess.PIPE).stderr


def test_every_phase_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="jaxremat"), phase("outer"), phase("inner"):
        pass
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["inner", "outer"]


# ---- Ctrl-C


HARD = """
import random, sys
sys.path.insert(0, "tests")
from graphs import Builder
from jaxremat import Milp, close_over_dependencies, simulate
from jaxremat._runtime import _worker

def a_graph(count, draw=random.Random(0)):
    builder = Builder()
    x, values = builder.argument(), []
    for _ in range(count):
        read = [x, *(draw.choice(values) for _ in values[:2])]
        (x,) = builder.node(read, [draw.randint(3, 40)], seconds=draw.uniform(1, 30))
        values.append(x)
    for v in reversed(values):
        builder.stage()
        (x,) = builder.node([x, v, draw.choice(values)], [3])
    return builder.graph()

def solve(graph, time_limit):
    high, low = (simulate(graph, close_over_dependencies(graph, s)).peak_nbytes for s in (graph.residuals, ()))
    return Milp(gap=0.0, variables=20000).solve(graph, low + (high - low) // 3, time_limit=time_limit)

def in_c():
    return bool(_worker._alive)

solve(a_graph(5), 60)
print("solving", flush=True)
try:
    solve(a_graph(150), 3000)
    print("solved")
except KeyboardInterrupt:
    print("interrupted, CBC", "runs" if in_c() else "is over", flush=True)
    if sys.argv[1:] == ["again"]:
        print("then", solve(a_graph(6), 60).proven)
    else:
        raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["again", "out"])
def test_a_signal_ends_a_solve_and_leaves_nothing_broken(then: str) -> None:
    """CBC would take a quarter of an hour; the process neither waits for it nor crashes on its way out."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-c", HARD, then],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "solving\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(10.0)  # by then the program is written
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120.0)
    finally:
        child.kill()
    assert out.splitlines() == ["interrupted, CBC is over", *(["then True"] if then == "again" else [])]
    assert child.returncode == (0 if then == "again" else -signal.SIGINT)
    assert "Signal SIG" not in err  # what CBC prints when it crashes
    if then == "out":
        assert err.rstrip().endswith("KeyboardInterrupt")
