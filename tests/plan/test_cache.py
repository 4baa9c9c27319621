"""The plan cache: what is found again, what is not, and what several processes do to it."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import make_step
from comparing import stripped

import jaxremat
from jaxremat import InfeasibleBudgetError, JaxrematWarning, MinCut, Plan, Solution
from jaxremat._compiler._memory_stats import MemoryStats
from jaxremat._plan import _plan_cache as _cache
from jaxremat._runtime import _cache_folder as _disk

WIDTH, LAYERS, BATCH = 32, 6, 512


def make_args(batch: int = BATCH) -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) * 0.3 for k in keys[1:]]
    return weights, jax.random.normal(keys[0], (batch, WIDTH))


def structs(batch: int = BATCH) -> Any:
    return jax.eval_shape(lambda: make_args(batch))


STATS = jaxremat.memory(make_step(), *structs(), donate_argnums=0)
BUDGET = STATS.base_nbytes + int(0.8 * STATS.temporaries_nbytes)


def plan(*args: Any, budget: Any = BUDGET, donate_argnums: Any = 0, **options: Any) -> Plan:
    return jaxremat.plan(
        make_step(), *(args or structs()), budget=budget, donate_argnums=donate_argnums, **options
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Any]:
    """The budgets for which something was planned, rather than found."""
    asked: list[Any] = []
    make_plan = _cache.make_plan

    def counting(problem: Any, request: Any, baseline: Any) -> Any:
        asked.append(request.budget)
        return make_plan(problem, request, baseline)

    monkeypatch.setattr(_cache, "make_plan", counting)
    return asked


def test_a_second_start_plans_nothing(planned: list[Any], folder: Path) -> None:
    args = make_args()
    first = jaxremat.optimize(BUDGET, donate_argnums=0)(make_step())
    want, text = first(*make_args()), stripped(first.compile(*args))
    assert planned == [BUDGET]
    assert not first.plan(*args).drops_nothing
    second = jaxremat.optimize(BUDGET, donate_argnums=0)(make_step())
    got = second(*make_args())
    assert planned == [BUDGET]
    assert second.plan(*args) == first.plan(*args)
    assert stripped(second.compile(*args)) == text
    assert MemoryStats.of(second.compile(*args)).peak_nbytes <= BUDGET
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    # Shapes alone are planned as arrays are.
    assert plan() == first.plan(*args)
    assert planned == [BUDGET]
    (file,) = folder.iterdir()
    assert file.suffix == ".json"


def test_another_process_plans_nothing(folder: Path) -> None:
    code = (
        "import sys, logging, test_cache\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "print(test_cache.plan().to_json())"
    )
    want = plan()
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONHASHSEED": "1",
    }  # of the order of sets
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
    )
    assert Plan.from_json(said.stdout) == want
    assert "followed the plan" in said.stderr
    assert len(list(folder.iterdir())) == 1


def test_the_least_memory_and_the_plain_step_are_found_too(planned: list[Any]) -> None:
    for budget in ("min", "1GiB"):
        assert plan(budget=budget) == plan(budget=budget)
    assert plan(planning=jaxremat.Planning(verify=False)) == plan(planning=jaxremat.Planning(verify=False))
    assert planned == ["min", "1GiB", BUDGET]


OTHERS: dict[str, dict[str, Any]] = {
    "budget": {"budget": BUDGET + 1},
    "margin": {"planning": jaxremat.Planning(workspace_margin=1)},
    "donation": {"donate_argnums": ()},
    "effort": {"planning": jaxremat.Planning(effort="thorough")},
    "time limit": {"planning": jaxremat.Planning(time_limit=9.0)},
    "solver": {"planning": jaxremat.Planning(solver=MinCut())},
    "solver's settings": {"planning": jaxremat.Planning(solver=jaxremat.Milp(gap=0.01))},
    "unverified": {"planning": jaxremat.Planning(verify=False)},
    "compiler": {"compiler_options": {"xla_embed_ir_in_executable": True}},
    "target": {"target": "h100"},
}


def test_whatever_planning_depends_on_is_in_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned here: the paths are looked at."""
    asked: list[Path] = []

    def read(path: Path, parse: Any) -> None:
        asked.append(path)
        raise InterruptedError

    monkeypatch.setattr(_cache, "read", read)

    def path(*args: Any, **options: Any) -> Path:
        with pytest.raises(InterruptedError):
            plan(*args, **options)
        return asked[-1]

    known = path()
    assert (
        path()
        == path(*make_args())
        == path(budget=f"{BUDGET}B")
        == path(planning=jaxremat.Planning(solver=jaxremat.Milp()))
        == known
    )
    paths = {name: path(**options) for name, options in OTHERS.items()}
    paths["shapes"] = path(*structs(2 * BATCH))
    with jax.default_matmul_precision("highest"):
        paths["precision"] = path()
    monkeypatch.setattr(_cache, "sources", lambda: "another planner")
    paths["code"] = path()
    assert len({known, *paths.values()}) == 1 + len(paths)


def test_code_that_moved_is_shown_where_it_is_now(planned: list[Any]) -> None:
    source = (
        "def make(jnp, jax):\n{}    def train(w, x):\n        return w - jax.grad({})(w)\n    return train\n"
    )
    loss = "lambda w: jnp.mean(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w) ** 2)"
    found = []
    for empty in ("", "\n" * 30):
        scope: dict[str, Any] = {}
        exec(compile(source.format(empty, loss), "net.py", "exec"), scope)
        weights, x = structs()
        found.append(jaxremat.plan(scope["make"](jnp, jax), weights[0], x, budget="min"))
    assert len(planned) == 1
    assert all("net.py:3 " in a.source for a in found[0].actions if a.source)
    assert all("net.py:33 " in a.source for a in found[1].actions if a.source)
    assert any("net.py:33 " in a.source for a in found[1].alive)
    assert found[0].saved == found[1].saved


class Mine:
    """A solver of the user's."""

    def solve(self, graph: jaxremat.Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        return MinCut().solve(graph, budget_nbytes, time_limit=time_limit)


def test_what_is_not_kept(planned: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(planning=jaxremat.Planning(solver=Mine()))
    plan(planning=jaxremat.Planning(cache=False))
    for value in ("0", "off"):
        monkeypatch.setenv("JAXREMAT_PLAN_CACHE", value)
        plan()
    with pytest.raises(jaxremat.InfeasibleBudgetError):
        plan(budget=1)
    assert not folder.exists()
    assert len(planned) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"sha256": "0", "text": "{}"}', "TAMPERED"])
def test_a_corrupt_file_is_a_warning_and_written_anew(planned: list[Any], folder: Path, text: str) -> None:
    first = plan(planning=jaxremat.Planning(solver=MinCut()))
    (file,) = folder.iterdir()
    good = file.read_text()
    file.write_text(text.replace("TAMPERED", good.replace('\\"saved\\": [', '\\"saved\\": [0, ')))
    assert file.read_text() != good
    with pytest.warns(
        JaxrematWarning, match=rf"The cache file .*{file.name} cannot be read .*; it is ignored"
    ):
        assert plan(planning=jaxremat.Planning(solver=MinCut())).saved == first.saved
    assert len(planned) == 2
    plan(planning=jaxremat.Planning(solver=MinCut()))
    assert len(planned) == 2


def put(file: Path, plan: Plan) -> None:
    text = plan.to_json()
    file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}))


def test_a_plan_that_does_not_hold_here_is_made_anew(
    planned: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = plan()
    (file,) = folder.iterdir()
    for wrong, why in (
        (replace(first, budget_nbytes=BUDGET // 2), "this machine's compiler needs"),
        (replace(first, fingerprint="another"), "was made for the program another"),
    ):
        put(file, wrong)
        with caplog.at_level(logging.INFO, "jaxremat"):
            again = plan()
        assert again.saved == first.saved and again.budget_nbytes == BUDGET
        assert f"no longer holds: The plan {why}" in caplog.text or why in caplog.text
    assert len(planned) == 3
    plan()
    assert len(planned) == 3


def test_a_folder_that_cannot_be_written_is_no_cache(
    planned: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(JaxrematWarning, match="cannot be written"):
        plan(planning=jaxremat.Planning(solver=MinCut()))
    plan(planning=jaxremat.Planning(solver=MinCut()))  # of which nothing is said again
    assert len(planned) == 2


def test_what_was_of_use_longest_ago_goes_first(
    planned: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def age() -> None:
        """Another hour has passed."""
        for path in folder.iterdir():
            status = path.stat()
            os.utime(path, (status.st_mtime - 3600, status.st_mtime - 3600))

    shares = [BUDGET, BUDGET + 1000, BUDGET + 2000]
    for budget in shares[:2]:
        plan(budget=budget, planning=jaxremat.Planning(solver=MinCut()))
        age()
    plan(
        budget=shares[0], planning=jaxremat.Planning(solver=MinCut())
    )  # found, so the second is now the oldest
    age()
    assert planned == shares[:2]
    sizes = [path.stat().st_size for path in folder.iterdir()]
    monkeypatch.setattr(_cache, "MOST_NBYTES", int(2.5 * max(sizes)))
    plan(budget=shares[2], planning=jaxremat.Planning(solver=MinCut()))
    assert len(list(folder.iterdir())) == 2
    plan(budget=shares[0], planning=jaxremat.Planning(solver=MinCut()))
    assert planned == shares
    plan(budget=shares[1], planning=jaxremat.Planning(solver=MinCut()))
    assert planned == [*shares, shares[1]]


def test_drafts_of_processes_that_were_killed_go(tmp_path: Path) -> None:
    old, new, file = tmp_path / "a.tmp", tmp_path / "b.tmp", tmp_path / "c.json"
    for path in (old, new, file):
        path.write_text("x")
    os.utime(old, (1, 1))
    os.utime(file, (1, 1))
    _disk.trim(tmp_path, 10)
    assert sorted(tmp_path.iterdir()) == [new, file]
    _disk.trim(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [new]
    _disk.trim(tmp_path / "nothing", 0)


@pytest.mark.slow
def test_several_processes_never_see_half_a_file(tmp_path: Path) -> None:
    """Each writes texts of its own length to the same file, reads it and trims the folder."""
    code = f"""if True:
        import json, sys, warnings
        from pathlib import Path
        from jaxremat._runtime import _cache_folder as _disk
        warnings.simplefilter("error")
        folder = Path({str(tmp_path / "plans")!r})
        seen = 0
        for i in range(100):
            _disk.store(folder / "one.json", json.dumps([sys.argv[1]] * (5000 * int(sys.argv[1]) + i)))
            found = _disk.read(folder / "one.json", json.loads)
            seen += found is not None and len(set(found)) == 1
            if i % 20 == 0:
                _disk.trim(folder, 10_000 * (i % 40))
        print(seen)
    """
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, n], cwd=root, stdout=subprocess.PIPE) for n in "12"
    ]
    seen = [int(process.communicate()[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(n > 80 for n in seen)  # but for what another process has just trimmed
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["one.json"]


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAXREMAT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _disk.cache_dir() == tmp_path / "jaxremat"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _disk.cache_dir() == tmp_path / ".cache" / "jaxremat"


def refused(problem: Any, request: Any, *more: Any) -> Any:
    raise InfeasibleBudgetError("nothing was found", budget_nbytes=0, min_peak_nbytes=1 << 40)


def test_a_budget_that_was_met_before_is_not_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is more named as the least than a plan needs that was made before."""
    least = plan(budget="min")
    monkeypatch.setattr(_cache, "make_plan", refused)
    again = plan(budget=least.peak_nbytes + 1)
    assert (again.peak_nbytes, again.saved) == (least.peak_nbytes, least.saved)
    assert again.budget_nbytes == least.peak_nbytes + 1
    with pytest.raises(
        InfeasibleBudgetError, match=f"An earlier plan needs {least.peak_nbytes} bytes"
    ) as caught:
        plan(budget=least.peak_nbytes - 1)
    assert caught.value.min_peak_nbytes == least.peak_nbytes


def test_the_least_that_a_refusal_names_is_kept(planned: list[Any], folder: Path) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(budget=STATS.base_nbytes + STATS.temporaries_nbytes // 100)
    least = caught.value.least_plan
    assert isinstance(least, Plan)
    assert least.peak_nbytes == caught.value.min_peak_nbytes
    count = len(planned)
    again = plan(budget=caught.value.min_peak_nbytes)
    assert (len(planned), again.peak_nbytes, again.saved) == (count, least.peak_nbytes, least.saved)
    assert jaxremat.plan(make_step(), *structs(), budget=least.peak_nbytes + 1, donate_argnums=0).peak_nbytes
    step = jaxremat.optimize(plan=least, donate_argnums=0)(make_step())
    assert step.plan(*structs()).peak_nbytes == least.peak_nbytes


def test_a_plan_that_takes_longer_than_one_made_before_gives_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = plan()
    make_plan = _cache.make_plan

    def needs_replacement(problem: Any, request: Any, *more: Any) -> Any:
        planned = make_plan(problem, request, *more)
        planned.plan = replace(planned.plan, overhead=good.overhead + 0.1)
        return planned

    monkeypatch.setattr(_cache, "make_plan", needs_replacement)
    again = plan(budget=BUDGET + 1)
    assert (again.overhead, again.budget_nbytes) == (good.overhead, BUDGET + 1)
    assert (
        plan(budget=BUDGET + 2, planning=jaxremat.Planning(respect_checkpoint=True)).overhead
        > good.overhead + 0.09
    ), "another request"
