"""The command line: what each command finds, its JSON, its exit code, and one line for every error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import jaxremat
from jaxremat import Plan
from jaxremat._api._comparison import differences
from jaxremat._cli import application
from jaxremat._cli._check import concrete, time_in_turn
from jaxremat._cli._subject import Call, PlanningOptions, split

ROOT = Path(__file__).parents[2]
STEPS = '''
import jax, jax.numpy as jnp, jaxremat

def step(weights, x, scale=0.1):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)
    value, grads = jax.value_and_grad(loss)(weights)
    return [w - scale * g for w, g in zip(weights, grads)], value

def powers(weights, x, power):
    return [w ** power for w in weights]

def broken(weights, x):
    return x @ x

def make_args():
    keys = jax.random.split(jax.random.key(0), 7)
    return [jax.random.normal(k, (32, 32)) * 0.3 for k in keys[1:]], jax.random.normal(keys[0], (512, 32))

def by_name():
    weights, x = make_args()
    return (weights,), {"x": x, "scale": 0.2}

def shapes():
    return jax.eval_shape(make_args)

def static():
    return *make_args(), 2

def three():
    return 1, 2, 3, 4

def lone():
    return jnp.ones(3)

class Nested:
    step = staticmethod(step)

not_callable = shapes()
decorated = jaxremat.optimize(PLANNED, donate_argnums=0, planning=jaxremat.Planning(solver=jaxremat.MinCut()))(step)

class Wrong(jaxremat.Step):
    """A planned step with one weight's gradient 2 % too large."""
    def __call__(self, weights, x):
        first = jnp.copy(weights[0])
        (new, *others), value = super().__call__(weights, x)
        return [new + 0.02 * (new - first), *others], value

wrong = Wrong(decorated._program, decorated._request, None)
'''
BUDGET = 456_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of train steps, found from it alone."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_steps.py").write_text(STEPS.replace("PLANNED", str(BUDGET)))
    (folder / "cli_bad.py").write_text("import not_installed_anywhere\n")
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line in that folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])

    def run(*words: str, **options: Any) -> Any:
        return CliRunner().invoke(application(), list(words), prog_name="jaxremat", **options)

    return run


STEP = ("cli_steps:step", "--args", "make_args", "--donate", "0")
WITHIN = ("--budget", str(BUDGET), "--solver", "mincut", "--allow", "none")


def test_a_plan_is_printed_saved_and_the_same_in_json(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = run("plan", *STEP, *WITHIN, "--save", str(path))
    assert found.exit_code == 0, found.stderr
    plan = Plan.load(path)
    assert plan.budget_nbytes == BUDGET and not plan.drops_nothing
    assert plan.compiled_peak_nbytes is not None and plan.compiled_peak_nbytes <= BUDGET
    assert found.stdout == f"{plan}\n"
    # By file, by number of bytes as text, donated by name, shapes alone: the same program.
    words = ("cli_steps.py:Nested.step", "--args", "cli_steps:shapes", "--donate", "weights")
    found = run("plan", *words, "--budget", f"{BUDGET}B", *WITHIN[2:], "--json")
    again = Plan.from_json(found.stdout)
    assert (again.fingerprint, again.saved, again.stages) == (plan.fingerprint, plan.saved, plan.stages)


def test_what_does_not_fit_ends_with_1(run: Any) -> None:
    found = run("plan", *STEP, "--budget", "1KiB", "--solver", "mincut", "--json")
    assert found.exit_code == 1
    said = json.loads(found.stdout)
    assert said["error"] == "InfeasibleBudgetError" and said["exit_code"] == 1
    assert said["budget_nbytes"] == 1024 < said["min_peak_nbytes"]
    assert found.stderr.startswith("jaxremat: The budget '1KiB' cannot be met")
    assert found.stderr.count("\n") == 1


def test_memory(run: Any) -> None:
    found = run("memory", *STEP, "--json")
    said = json.loads(found.stdout)
    want = jaxremat.memory(
        sys.modules["cli_steps"].step, *sys.modules["cli_steps"].shapes(), donate_argnums=0
    )
    assert said["peak_nbytes"] == want.peak_nbytes and said["aliased_nbytes"] == want.aliased_nbytes > 0
    assert said["fits"] is None
    for budget, code, word in (("1KiB", 1, "over the budget"), ("1GiB", 0, "to spare")):
        found = run("memory", *STEP, "--budget", budget)
        assert found.exit_code == code
        assert word in found.stdout and f"{want.peak_nbytes:,} bytes" in found.stdout


def test_memory_of_a_target(run: Any) -> None:
    found = run("memory", *STEP, "--target", "h100", "--budget", "0.5", "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["budget_nbytes"] == 40 * 10**9


def test_a_decorated_step_brings_its_options_which_can_be_replaced(run: Any) -> None:
    own = Plan.from_json(run("plan", "cli_steps:decorated", "--args", "shapes", "--json").stdout)
    assert own.budget_nbytes == BUDGET and own.solver == "mincut"
    assert own.fingerprint == Plan.from_json(run("plan", *STEP, *WITHIN, "--json").stdout).fingerprint
    other = run("plan", "cli_steps:decorated", "--args", "shapes", "--budget", "1GiB", "--json")
    assert Plan.from_json(other.stdout).budget_nbytes == 2**30
    other = run("plan", "cli_steps:decorated", "--args", "shapes", "--no-verify", "--json")
    assert Plan.from_json(other.stdout).compiled_peak_nbytes is None


def test_results_are_compared_leaf_by_leaf(run: Any) -> None:
    found = run("check", *STEP, *WITHIN, "--json")
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["agree"] and not said["drops_nothing"] and not said["made_up_arguments"]
    assert said["peak_nbytes"] <= BUDGET
    assert [leaf["path"] for leaf in said["leaves"]] == [*(f"[0][{i}]" for i in range(6)), "[1]"]
    weight = max(float(jnp.abs(w).max()) for w in sys.modules["cli_steps"].make_args()[0])
    for leaf in said["leaves"][:6]:
        assert leaf["rounding"] > 0 and 0 < leaf["scale"] < weight / 10  # the change, not the weight
    text = run("check", "cli_steps:step", "--args", "shapes", "--budget", "1GiB")
    assert text.exit_code == 0
    for part in ("all 7 results agree", "filled with random floats", "the plain step fits", "float32[32,32]"):
        assert part in text.stdout


def test_results_that_differ_end_with_1(run: Any) -> None:
    found = run("check", "cli_steps:wrong", "--args", "make_args")
    assert found.exit_code == 1, found.output
    assert "1 of 7 results differ" in found.stdout
    (line,) = [line for line in found.stdout.splitlines() if line.rstrip().endswith("differs")]
    assert line.split()[0] == "[0][0]" and " 2.0e-02 " in line


def test_arguments_by_name_and_static_ones(run: Any) -> None:
    found = run("check", "cli_steps:step", "--args", "by_name", "--budget", "1GiB", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["agree"], found.output
    assert run("memory", "cli_steps:step", "--args", "by_name", "--donate", "weights").exit_code == 0
    for static in ("2", "power"):
        words = ("cli_steps:powers", "--args", "static", "--static", static)
        assert run("memory", *words).exit_code == 0


def test_time(run: Any) -> None:
    found = run("time", *STEP, *WITHIN, "--runs", "3", "--json")
    said = json.loads(found.stdout)
    assert [len(said["seconds"][name]) for name in ("plain", "planned")] == [3, 3]
    assert said["plain"]["fastest"] <= said["plain"]["median"] <= said["plain"]["slowest"]
    assert said["ratio"] == pytest.approx(said["planned"]["median"] / said["plain"]["median"])
    assert said["predicted_overhead"] > 0
    text = run("time", "cli_steps:step", "--args", "make_args", "--budget", "1GiB", "--runs", "1")
    assert "times the plain step's time" in text.stdout


def test_sweep(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, saved = tmp_path / "frontier.png", tmp_path / "frontier.json"
    words = ("--points", "2", "--solver", "mincut", "--no-verify")
    found = run("sweep", *STEP, *words, "--plot", str(plot), "--save", str(saved))
    assert found.exit_code == 0, found.output
    frontier = jaxremat.Frontier.load(saved)
    assert found.stdout == f"{frontier}\n"
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = json.loads(run("sweep", "cli_steps:decorated", "--args", "by_name", *words, "--json").stdout)
    assert [point["kind"] for point in said["points"]] == ["plain", "least"]
    found = run("sweep", *STEP, "--points", "1")
    assert found.exit_code == 2 and found.stderr.count("\n") == 1


def test_report(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    run("plan", *STEP, *WITHIN, "--save", str(file))
    found = run("report", str(file), "--html", str(page))
    assert found.exit_code == 0, found.output
    assert "peak" in found.stdout and "tanh" in found.stdout
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert json.loads(run("report", str(file), "--json").stdout) == json.loads(file.read_text())
    for name, code in (("nowhere.json", 4), (__file__, 3)):
        found = run("report", name)
        assert found.exit_code == code and found.stderr.count("\n") == 1
    assert "No such file or directory: nowhere.json" in run("report", "nowhere.json").stderr
    # A pipe has no width: no column is cut short, nor in a terminal of 80.
    for width in (None, "80"):
        text = run("report", str(file), env={"COLUMNS": width}).stdout
        assert all(f" {name} " in text for name in ("predicted", "compiled", "roofline", "solving"))
        assert "stays within the budget." in " ".join(text.split())  # nor a note
    assert (file.stat().st_mode & 0o777) == (page.stat().st_mode & 0o777)


def test_devices(run: Any) -> None:
    said = json.loads(run("devices", "--json").stdout)
    assert [each["name"] for each in said if not each["here"]] == list(jaxremat.targets())
    assert said[0]["here"] and said[0]["memory_nbytes"] > 0
    text = run("devices").stdout
    assert all(name in text for name in jaxremat.targets())


MISTAKES: dict[str, tuple[int, str]] = {
    "fly": (2, "No such command 'fly'"),
    "plan": (2, "Missing argument 'MODULE:FUNCTION'"),
    "plan cli_steps:step": (2, "Missing option '--args'"),
    "plan cli_steps --args make_args": (2, "'cli_steps' is not of the form module:function"),
    "plan cli_steps:nope --args make_args": (2, "cli_steps has no 'nope'; it has jax,"),
    "plan nothing.at.all:step --args a": (2, "There is no module 'nothing.at.all', neither in"),
    "plan nothing.py:step --args a": (2, "There is no file 'nothing.py' in"),
    "plan cli_steps:step --args lone": (2, "'cli_steps:lone' returned a ArrayImpl. It must return a tuple"),
    "plan cli_steps:step --args three": (2, "returned 4 arguments, but the function takes (weights, x, scale=0.1)"),
    "plan cli_steps:not_callable --args shapes": (2, "`optimize` decorates functions; it was given a tuple"),
    "plan cli_steps:step --args shapes --donate 9 --budget 1GiB": (2, "--donate 9: the function takes weights, x"),
    "memory cli_steps:step --args shapes --static w": (2, "--static w: the function takes weights, x, scale"),
    "plan cli_steps:step --args shapes --budget much": (2, "The budget 'much' is not a number of bytes"),
    "plan cli_steps:step --args shapes --target h1000": (2, "`target='h1000'` is unknown. Write one of h100, "),
    "plan cli_steps:step --args shapes --solver best": (2, "'best' is not one of 'milp', 'mincut'"),
    "plan cli_steps:step --args shapes --save nowhere/plan.json": (2, "there is no folder 'nowhere'"),
    "plan cli_steps:step --args shapes --budget min --margin 1MiB": (2, '`workspace_margin` leaves memory free'),
    "memory cli_steps:step --args shapes --budget min": (2, "'min' needs a plan"),
    "plan cli_bad:step --args a": (4, "No module named 'not_installed_anywhere' (cli_bad.py:1)"),
    "check cli_steps:step --args shapes --target h100": (4, "`--target h100`: this machine has no such device"),
    "plan cli_steps:broken --args shapes --budget 1GiB": (5, "TypeError: dot_general requires contracting"),
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, run: Any) -> None:
    code, said = MISTAKES[words]
    found = run(*words.split())
    assert found.exit_code == code, found.output
    assert found.stdout == ""
    assert found.stderr.startswith("jaxremat: ") and said in found.stderr
    assert found.stderr.count("\n") == 1


def test_the_users_line_is_named_and_a_traceback_is_to_be_had(run: Any) -> None:
    words = ("memory", "cli_steps:broken", "--args", "shapes")
    found = run(*words)
    line = 1 + STEPS[: STEPS.index("x @ x")].count("\n")
    assert found.exit_code == 5 and f"(cli_steps.py:{line})" in found.stderr
    assert "Traceback" not in found.stderr
    found = run(*words, "--debug")
    assert found.exit_code == 5 and "Traceback (most recent call last)" in found.stderr


def test_a_plan_of_another_program_ends_with_3(run: Any, folder: Path) -> None:
    run("plan", *STEP, *WITHIN, "--save", "plan.json")
    text = "from cli_steps import *\nfollowing = jaxremat.optimize(plan=jaxremat.Plan.load('plan.json'){})(step)\n"
    (folder / "cli_other.py").write_text(text.format(""))
    (folder / "cli_same.py").write_text(text.format(", donate_argnums=0"))
    found = run("plan", "cli_other:following", "--args", "shapes")
    assert found.exit_code == 3 and found.stderr.startswith("jaxremat: The plan was made for the program")
    assert run("check", "cli_same:following", "--args", "make_args").exit_code == 0
    (folder / "plan.json").write_text("{}")
    (folder / "cli_third.py").write_text(text.format(""))
    found = run("plan", "cli_third:following", "--args", "shapes")
    assert found.exit_code == 3 and "is not a jaxremat plan" in found.stderr


def test_transformations_are_allowed_by_name() -> None:
    def allowed(text: str | None) -> Any:
        return PlanningOptions(allow=text).question().get("allow", "as by default")

    assert allowed(None) == "as by default"
    assert allowed("none") == ()
    assert allowed("attention, rows") == ("attention", "rows")
    assert allowed("exact,bf16_residuals,rows") == (*jaxremat.EXACT, "bf16_residuals")
    with pytest.raises(typer.BadParameter, match="--allow row: write some of exact, none, attention"):
        allowed("row")


def test_an_interrupt_ends_with_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxremat._cli._plans.memory_of", interrupted)
    found = run("memory", *STEP)
    assert found.exit_code == 130 and found.stderr == "jaxremat: interrupted\n"


def test_every_command_is_explained_and_has_json(run: Any) -> None:
    for name in ("plan", "memory", "sweep", "report", "check", "time", "devices", "demo"):
        found = run(name, "--help", env={"COLUMNS": "200"})
        assert found.exit_code == 0
        assert "--json" in found.stdout and "--debug" in found.stdout
    found = run("--help")
    assert "Exit codes" in found.stdout
    for words in ((), ("plan",), ("sweep",), ("time",), ("zoo",), ("zoo", "show")):
        page = run(*words, "--help", env={"COLUMNS": "80"}).stdout
        assert "\N{HORIZONTAL ELLIPSIS}" not in page and "..." not in page.replace(
            "[ARGS]...", ""
        )  # nothing is cut
        assert max(map(len, page.splitlines())) <= 80
    assert run("--version").stdout.startswith("jaxremat ")


def test_shells_complete_commands_and_targets(run: Any) -> None:
    for words, want in (("jaxremat me", "memory"), ("jaxremat plan --target a100", "a100-40")):
        env = {
            "_JAXREMAT_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        assert want in run(env=env).stdout.split()


def process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "jaxremat", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_a_real_process_ends_with_the_code(folder: Path) -> None:
    words = ["memory", "cli_steps:step", "--args", "make_args", "--budget", "1KiB", "--json"]
    done = process(folder, *words)
    assert done.returncode == 1 and json.loads(done.stdout)["fits"] is False


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [("plan cli_bad:x --args y", 4), ("plan", 2), ("devices", 0)])
def test_real_processes_say_one_line(words: str, code: int, folder: Path) -> None:
    done = process(folder, *words.split())
    assert done.returncode == code
    assert sum(line.startswith("jaxremat: ") for line in done.stderr.splitlines()) == (code != 0)
    assert "Traceback" not in done.stderr


def test_what_make_args_returns() -> None:
    def step(state: Any, batch: Any) -> None: ...

    def free(*args: Any, **kwargs: Any) -> None: ...

    pair = ((1,), {"batch": 2})
    assert split(step, pair, "m:f") == ((1,), {"batch": 2})
    assert split(free, pair, "m:f") == ((1,), {"batch": 2})
    assert split(step, ((1,), {"inputs": 2}), "m:f") == (((1,), {"inputs": 2}), {})  # no parameter's name
    assert split(step, ((1, 2), {}), "m:f") == ((1, 2), {})
    assert split(lambda state, *, batch: None, pair, "m:f") == ((1,), {"batch": 2})
    assert split(step, {"state": 1, "batch": 2}, "m:f") == ((), {"state": 1, "batch": 2})
    assert split(step, [1, 2], "m:f") == ((1, 2), {})


def sgd(rate: float) -> Any:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - rate * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), jnp.sum(x)

    return step


ARGS = (1e3 * jnp.eye(8) + 1e-3, jnp.ones((4, 8)) * 1e-3)


def test_a_wrong_gradient_is_found_where_the_weights_hide_it() -> None:
    """The update is a small part of the weights; 5 % more of it is 1e-7 of them."""
    small = (ARGS[0] / 1e3, ARGS[1] * 1e2)
    (good, _), (bad, total) = (differences(sgd(1e-2), sgd(rate), small, {}, 1e-3) for rate in (1e-2, 1.05e-2))
    assert good.agrees and not bad.agrees and total.agrees
    assert bad.relative == pytest.approx(0.05, rel=0.05)


def test_what_rounding_alone_does_is_no_difference() -> None:
    def noise(sign: float) -> Any:
        """Nothing but the rounding of x + 1 - 1, as AdamW's first step makes of a gradient of zero."""
        return lambda x: sign * jnp.sign((x + 1) - 1 - x)

    x = jnp.linspace(0.1, 0.2, 100)
    leaf = differences(noise(1.0), noise(-1.0), (x,), {}, 1e-3)[0]
    assert leaf.apart == 2.0 and leaf.rounding >= 1.0 and leaf.agrees


def test_numbers_that_are_none_and_integers_have_to_agree() -> None:
    def results(nan: float, count: int) -> Any:
        return lambda x: {"a": x * nan, "count": jnp.int32(count), "key": jax.random.key(count)}

    x = (jnp.ones(3),)
    for planned, wrong in (
        (results(jnp.nan, 1), set()),
        (results(1.0, 1), {"['a']"}),
        (results(jnp.nan, 2), {"['count']", "['key']"}),
    ):
        leaves = differences(results(jnp.nan, 1), planned, x, {}, 1e-3)
        assert {leaf.path for leaf in leaves if not leaf.agrees} == wrong
        assert not leaves[0].finite


def test_arguments_in_a_row_keep_their_places() -> None:
    def step(state: Any, batch: Any, *, rate: Any) -> Any:
        return state, batch, rate

    row = Call(step, (), {"rate": 3, "batch": 2, "state": 1}).by_position()
    assert row.args == (1, 2, 3) and row.fn(*row.args) == (1, 2, 3) and not row.kwargs


def test_shapes_become_arrays() -> None:
    shapes = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),
        "there": np.ones(2),
    }
    (filled,), named, made_up = concrete((shapes,), {"x": 1})
    assert made_up and named == {"x": 1} and filled["there"] is shapes["there"]
    for name in ("w", "n", "key", "keys"):
        assert (filled[name].shape, filled[name].dtype) == (shapes[name].shape, shapes[name].dtype)
    assert (filled["w"] >= 0).all() and filled["w"].max() > 0
    assert not concrete((np.ones(2),), {})[2]


def test_steps_take_turns_on_arguments_of_their_own() -> None:
    seen = []

    def step(name: str) -> Any:
        jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
        return lambda x: (seen.append((name, float(x))), jitted(x))[1]

    x = jnp.zeros(())
    seconds = time_in_turn({"a": step("a"), "b": step("b")}, (x,), {}, 2)
    assert seen == [("a", 0.0), ("b", 0.0)] * 3  # once to warm up
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}
    assert float(x) == 0.0
