"""How often each way to a planned step has XLA compile it: once where the plan is known, and never what runs twice."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import make_step
from comparing import assert_close

import jaxremat
from jaxremat._compiler._devices import DEVICES
from jaxremat._compiler._program import Program
from jaxremat._compiler._single_equation import alone_seconds, workspaces
from jaxremat._lower._lower import lower
from jaxremat._model._variant import PLAIN
from jaxremat._rewrite import _flat_program, _passes
from jaxremat._rewrite._trace import trace

WEIGHTS = [jnp.full((64, 64), 0.01, jnp.float32)] * 8
X = jnp.ones((1024, 64))
STRUCTS = jax.eval_shape(lambda: (WEIGHTS, X))
STATS = jaxremat.memory(make_step(), WEIGHTS, X)
BUDGET = STATS.base_nbytes + int(0.8 * STATS.temporaries_nbytes)
BUDGETS = {
    "planned": BUDGET,
    "recomputed": BUDGET,
    "as written": 3 * STATS.peak_nbytes,
    "min": "min",
    "a share": "80% of temporaries",
}
OPTIONS: dict[str, Any] = {"recomputed": {"allow": ()}}


def train(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """The step, which can be pickled."""
    return make_step()(weights, x)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the plans for all budgets, and beside them files of plans and steps."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXREMAT_CACHE", str(folder))
        patch.delenv("JAXREMAT_PLAN_CACHE")
        for name, budget in BUDGETS.items():
            step = jaxremat.optimize(budget, **OPTIONS.get(name, {}))(train)
            step.plan(WEIGHTS, X).save(folder / f"{name}.plan")
            (folder / f"{name}.step").write_bytes(pickle.dumps(step))
    return folder


@pytest.fixture(autouse=True)
def _plans(kept: Path, folder: Path) -> None:
    """Each test has a copy of them, to change."""
    shutil.copytree(kept, folder.parent, dirs_exist_ok=True)


COMPILATION = "/jax/core/compile/backend_compile_duration"
_names: list[str] = []


def _heard(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == COMPILATION:
        _names.append(str(kwargs.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_heard)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of the programs that JAX has had its backend compile since the list was cleared."""
    _names.clear()
    yield _names


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every compilation."""
    found: list[Any] = []
    own = jax.stages.Lowered.compile

    def noted(self: Any, compiler_options: Any = None, **more: Any) -> Any:
        found.append(compiler_options)
        return own(self, compiler_options, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    return found


def step(budget: Any = BUDGET, **options: Any) -> Any:
    return jaxremat.optimize(budget, **options)(make_step())


ASKED: dict[str, Callable[[Any], Any]] = {
    "called": lambda step: step(WEIGHTS, X),
    "plan": lambda step: step.plan(WEIGHTS, X),
    "plan of shapes": lambda step: step.plan(*STRUCTS),
    "report": lambda step: step.report(WEIGHTS, X),
    "memory": lambda step: jaxremat.memory(step, WEIGHTS, X),
    "compile": lambda step: step.compile(WEIGHTS, X),
    "lower": lambda step: step.lower(WEIGHTS, X),
}
"""What users ask of a step first."""

KNOWN: dict[str, Callable[[str, Path], Any]] = {
    "the cache": lambda name, folder: step(BUDGETS[name], **OPTIONS.get(name, {})),
    "a plan": lambda name, folder: jaxremat.optimize(plan=jaxremat.Plan.load(folder / f"{name}.plan"))(
        make_step()
    ),
    "a file": lambda name, folder: jaxremat.optimize(plan=folder / f"{name}.plan")(make_step()),
    "a pickled step": lambda name, folder: pickle.loads((folder / f"{name}.step").read_bytes()),
}
"""Where the plan comes from."""

WAYS = [("planned", "the cache", asked) for asked in ASKED]
WAYS += [("planned", known, asked) for known in [*KNOWN][1:] for asked in ("called", "plan of shapes")]
WAYS += [(name, known, "plan") for name in ("min", "a share") for known in KNOWN]
WAYS += [
    ("as written", known, "plan") for known in ("the cache", "a plan", "a file")
]  # `jit` has a pickled one's


@pytest.mark.parametrize(("name", "known", "asked"), WAYS)
def test_a_step_whose_plan_is_known_is_compiled_once(
    name: str, known: str, asked: str, kept: Path, compiled: list[str], options: list[Any]
) -> None:
    """What is verified is what runs: nothing is compiled to be read besides, not the plain step either."""
    again = KNOWN[known](name, kept)
    ASKED[asked](again)
    assert compiled == ["jit(train)"]
    found = again(WEIGHTS, X)
    plan = jaxremat.Plan.load(kept / f"{name}.plan")
    assert again.plan(WEIGHTS, X).compiled_peak_nbytes == plan.compiled_peak_nbytes
    again(WEIGHTS, X)
    again.compile(WEIGHTS, X)
    assert compiled == ["jit(train)"], "what was compiled before the call does not run"
    assert not any("xla_backend_optimization_level" in (each or {}) for each in options), "a draft runs"
    assert_close(found, jax.jit(make_step())(WEIGHTS, X), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("known", ["the cache", "a file"])
def test_a_step_whose_plan_is_known_is_not_searched_for_regions(
    known: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    find = _passes.find_regions
    monkeypatch.setattr(_passes, "find_regions", lambda *a, **k: looked.append(a) or find(*a, **k))
    plan = KNOWN[known]("recomputed", kept).plan(WEIGHTS, X)
    assert plan.form == PLAIN and not plan.drops_nothing
    assert not looked
    step(BUDGET - 1, allow=()).plan(WEIGHTS, X)
    assert len(looked) == 1


def test_a_program_is_looked_through_for_decisions_once_for_all_of_its_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = trace(jax.jit(make_step()), (WEIGHTS, X), {})
    looked: list[Any] = []
    find = _flat_program.decisions
    monkeypatch.setattr(_flat_program, "decisions", lambda eqns: looked.append(eqns) or find(eqns))
    one, other = (lower(found, DEVICES["h100"], base_nbytes=n) for n in (0, 1))
    assert one == replace(other, base_nbytes=0)
    assert len(looked) == 1


def test_an_equation_is_compiled_once_for_its_memory_and_for_its_time(
    folder: Path, options: list[Any]
) -> None:
    found = trace(jax.jit(lambda x: x @ x.T), (X,), {})
    program, device = Program(train), DEVICES["h100"]
    (product,) = [eqn for eqn in found.jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(workspaces(found, program, "cpu", 0)) == 1 and alone_seconds([product], program, device)[0] > 0
    assert len(options) == 1


def test_a_copy_is_compiled_once(compiled: list[str]) -> None:
    made = step()
    made.plan(WEIGHTS, X)
    copied = copy.deepcopy(made)
    compiled.clear()
    copied(WEIGHTS, X)
    made(WEIGHTS, X)
    assert len(compiled) <= 1


@pytest.mark.parametrize("asked", ASKED)
def test_a_new_plan_is_compiled_once_more_to_run(asked: str, compiled: list[str], options: list[Any]) -> None:
    """Candidates are drafts, which nobody optimises: what runs is compiled when it is wanted first, and once."""
    made = step(planning=jaxremat.Planning(cache=False))
    ASKED[asked](made)
    count = made.plan(*STRUCTS).compile_count
    drafts = [each for each in options if "xla_backend_optimization_level" in (each or {})]
    assert len(drafts) >= count
    before = len(compiled)
    made(WEIGHTS, X)
    assert len(compiled) == before + (asked not in ("called", "memory", "compile"))
    made(WEIGHTS, X)
    assert len(options) == len(drafts) + 1
    assert "xla_backend_optimization_level" not in (options[-1] or {})


@pytest.mark.parametrize("asked", ASKED)
def test_a_step_that_surely_fits_is_compiled_once_in_all(asked: str, compiled: list[str]) -> None:
    """It costs no more than `jax.jit`."""
    made = step(BUDGETS["as written"], planning=jaxremat.Planning(cache=False))
    ASKED[asked](made)
    made(WEIGHTS, X)
    made(WEIGHTS, X)
    assert compiled == ["jit(train)"]
    assert made.plan(WEIGHTS, X).drops_nothing


def test_a_plan_that_is_trusted_is_compiled_when_it_is_called(compiled: list[str]) -> None:
    made = step(planning=jaxremat.Planning(verify=False, cache=False))
    plan = made.plan(WEIGHTS, X)
    assert compiled == []
    made(WEIGHTS, X)
    made(WEIGHTS, X)
    made.compile(WEIGHTS, X)
    jaxremat.optimize(plan=plan, planning=jaxremat.Planning(verify=False))(make_step())(WEIGHTS, X)
    assert compiled == ["jit(train)"] * 2


def test_a_comparison_compiles_the_two_steps(compiled: list[str]) -> None:
    jaxremat.compare(step(), WEIGHTS, X)  # with copies of the arguments, which compile once
    compiled.clear()
    assert jaxremat.compare(step(), WEIGHTS, X).agrees
    assert compiled == ["jit(train)"] * 2


def test_a_function_that_is_differentiated_later_is_compiled_by_its_user(compiled: list[str]) -> None:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    planned = jaxremat.checkpoint(loss, budget="min")
    planned.plan(WEIGHTS, X)
    assert compiled == []
    gradient = jax.jit(jax.grad(planned), compiler_options=jaxremat.compiler_options())
    gradient(WEIGHTS, X)
    gradient(WEIGHTS, X)
    assert compiled == ["jit(loss)"]


def arguments() -> tuple[Any, Any]:
    """For the command line."""
    return STRUCTS


def test_the_command_line_compiles_what_is_known_once(compiled: list[str]) -> None:
    """`check` compiles the plain step besides, which it runs."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from jaxremat._cli import application

    def compilations(command: str) -> int:
        compiled.clear()
        subject = ("test_compilations:train", "--args", "test_compilations:arguments")
        said = CliRunner().invoke(application(), [command, *subject, "--budget", str(BUDGET), "--json"])
        assert said.exit_code == 0, said.output
        return compiled.count("jit(train)")

    assert compilations("plan") == 1
    assert compilations("check") == 2


PROCESS = """
import json, sys
import jax
found = {"compiled": 0, "read": 0}
def heard(event, *_, **__):
    found["compiled"] += event == "/jax/core/compile/backend_compile_duration"
    found["read"] += event == "/jax/compilation_cache/cache_hits"
jax.monitoring.register_event_duration_secs_listener(heard)
jax.monitoring.register_event_listener(heard)
import jax.numpy as jnp
import jaxremat
from chains import make_step
args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((1024, 64), jnp.float32)
jaxremat.optimize(int(sys.argv[1]))(make_step()).compile(*args)
print(json.dumps(found))
"""


def test_nothing_is_compiled_that_jax_has_kept(tmp_path: Path) -> None:
    """A second process follows the plan of the first and reads what runs from JAX's persistent cache."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
        "JAX_ENABLE_COMPILATION_CACHE": "True",
    }
    found = []
    for seed in "12":  # of the order of sets
        said = subprocess.run(
            [sys.executable, "-c", PROCESS, str(BUDGET + 1)],
            env=env | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(json.loads(said.stdout))
    first, second = found
    assert first["compiled"] > 1 and first["read"] == 0
    assert second == {"compiled": 1, "read": 1}


def test_shares_of_the_plain_step_take_one_compilation_at_most(
    options: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans start from the plain step that says what the share comes to; without compiling, the model says it."""
    monkeypatch.setenv("JAXREMAT_PLAN_CACHE", "0")
    assert step(BUDGET).plan(WEIGHTS, X).budget_nbytes == BUDGET
    in_bytes = len(options)
    options.clear()
    assert step("80% of temporaries").plan(WEIGHTS, X).budget_nbytes == BUDGET
    assert len(options) <= in_bytes + 1
    most = int(0.9 * STATS.peak_nbytes)
    assert (
        step("90%").plan(WEIGHTS, X).budget_nbytes
        == step("90% of peak").plan(WEIGHTS, X).budget_nbytes
        == most
    )
    options.clear()
    guess = step("90%", planning=jaxremat.Planning(verify=False)).plan(WEIGHTS, X)
    assert not options
    assert guess.budget_nbytes == int(0.9 * guess.baseline_peak_nbytes)
