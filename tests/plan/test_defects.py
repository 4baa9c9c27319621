"""What goes wrong within planning and should not: a file, one line in the log, and another form of the step."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from comparing import assert_same, compile_plain
from zoo import BY_NAME
from zoo_loops import LOOPS

import jaxremat
from jaxremat import InfeasibleBudgetError, JaxrematWarning, MemoryStats, MinCut
from jaxremat._plan import _defects, _problem

CASE = LOOPS["layers"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    _defects._reported.clear()
    yield tmp_path / "defects"


def failing(monkeypatch: pytest.MonkeyPatch, where: str, fails: Callable[..., bool]) -> list[Any]:
    """Make a function of `_problem` raise for some of its arguments; returns those for which it was asked."""
    own, asked = getattr(_problem, where), []

    def called(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if fails(*args):
            raise ZeroDivisionError("a wrong rule\nwith more lines")
        return own(*args, **kwargs)

    monkeypatch.setattr(_problem, where, called)
    return asked


def planned(budget: Any, *, verify: bool = True) -> Any:
    planning = jaxremat.Planning(solver=MinCut(), verify=verify)
    return jaxremat.optimize(budget, donate_argnums=0, planning=planning)(CASE.step)


def part(share: float) -> int:
    stats = MemoryStats.of(compile_plain(CASE, CASE.make_args()))
    return stats.base_nbytes + int(share * stats.temporaries_nbytes)


def test_the_next_form_is_tried_and_the_defect_reported_once(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first: list[Any] = []

    def of_first(traced: Any, graph: Any, *_: Any) -> bool:
        first.append(graph.stages)
        return graph.stages == first[0]

    asked = failing(monkeypatch, "emit", of_first)
    step, args = planned(part(0.6)), CASE.make_args()
    with caplog.at_level(logging.ERROR, "jaxremat"):
        plan = step.plan(*args)
    assert plan.compiled_peak_nbytes <= plan.budget_nbytes and len(asked) > 1
    assert_same(jax.jit(CASE.step)(*args), step(*args))
    (record,) = caplog.records
    (path,) = folder.iterdir()
    assert record.levelname == "ERROR" and str(path) in record.message
    assert "ZeroDivisionError: a wrong rule)" in record.message
    text = path.read_text()
    sections = [line for line in text.splitlines() if line.startswith("# ")]
    assert sections == ["# versions", "# attempt", "# traceback", "# program"]
    assert f"jax {jax.__version__}" in text and "saved = [" in text and "recomputed = (" in text
    assert "in called" in text and "scan[" in text


def test_a_program_that_jax_refuses_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from jaxremat._emit import _emit
    from jaxremat._program import _compat

    def refuse(closed: Any) -> None:
        raise TypeError("variable not defined")

    monkeypatch.setattr(_emit._compat, "check_jaxpr", refuse)
    compiled: list[Any] = []
    own = _problem.Problem.compile
    monkeypatch.setattr(_problem.Problem, "compile", lambda *a: compiled.append(a) or own(*a))
    assert _emit._compat is _compat
    with pytest.raises(InfeasibleBudgetError, match="as written it needs"), caplog.at_level(logging.ERROR):
        planned(part(0.6)).plan(*CASE.make_args())
    assert len(compiled) <= 2  # the step as it is, and with tags
    assert (
        len(list(folder.iterdir())) == len({r.message for r in caplog.records if r.name == "jaxremat"}) >= 1
    )


def test_a_program_that_computes_something_else_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the first cutting into stages every program reads a wrong operand; another cutting is planned."""
    from jaxremat._emit import _emit

    own, first = _emit.validated, []

    def mistaken(traced: Any, wanted: Any) -> Any:
        first.append(len(wanted.jaxpr.eqns))
        if len(wanted.jaxpr.eqns) != first[0]:
            return own(traced, wanted)
        jaxpr = wanted.jaxpr
        i = next(i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "sub")
        eqns = [e.replace(invars=e.invars[::-1]) if j == i else e for j, e in enumerate(jaxpr.eqns)]
        return own(traced, wanted.replace(jaxpr=jaxpr.replace(eqns=eqns)))

    monkeypatch.setattr(_emit, "validated", mistaken)
    step, args = planned(part(0.6)), CASE.make_args()
    with caplog.at_level(logging.ERROR, "jaxremat"):
        assert step.plan(*args).compiled_peak_nbytes
    assert_same(jax.jit(CASE.step)(*args), step(*args))
    (record,) = (r for r in caplog.records if r.name == "jaxremat")
    assert "does not provably compute the step: result" in record.message
    assert len(list(folder.iterdir())) == 1


def test_where_no_form_works_the_step_runs_as_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    failing(monkeypatch, "emit", lambda *_: True)
    step, args = planned("min"), CASE.make_args()
    with pytest.warns(JaxrematWarning, match="runs as written"):
        plan = step.plan(*args)
    assert plan.compiled_peak_nbytes == MemoryStats.of(compile_plain(CASE, args)).peak_nbytes
    assert_same(jax.jit(CASE.step)(*args), step(*args))


def test_a_step_with_checkpoints_that_cannot_be_priced_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """What is compiled beside it does not take it along."""
    case = BY_NAME["own_checkpoint"]
    asked = failing(monkeypatch, "tagged", lambda *_: True)
    step, args = jaxremat.optimize("1GiB", donate_argnums=0)(case.step), case.make_args()
    with pytest.warns(JaxrematWarning, match="runs as written"):
        assert step.plan(*args).drops_nothing
    assert asked and len(list(folder.iterdir())) == 1
    assert_same(compile_plain(case, case.make_args())(*case.make_args()), step(*args))


def test_without_verification_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "emit", lambda *_: True)
    step, args = planned("min", verify=False), CASE.make_args()
    with pytest.warns(JaxrematWarning, match="runs as written"):
        assert_same(jax.jit(CASE.step)(*args), step(*args))
    with pytest.raises(InfeasibleBudgetError, match="as written it needs"):
        planned(part(0.6), verify=False).plan(*args)


def test_a_step_that_cannot_be_rewritten_is_merely_inlined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = _problem.trace

    def broken(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("inlined"):
            raise AssertionError("the equations of loop 0 do not stand together")
        return own(*args, **kwargs)

    monkeypatch.setattr(_problem, "trace", broken)
    args = CASE.make_args()
    step = planned(part(1.0))
    assert_same(jax.jit(CASE.step)(*args), step(*args))
    assert [r.levelname for r in caplog.records if r.name == "jaxremat"] == ["ERROR"]


def test_other_forms_of_loops_are_left_out_where_they_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, form: Any) -> Any:
        raise IndexError(f"no levels {form}")

    monkeypatch.setattr("jaxremat._rewrite._trace.Traced.in_form", broken)
    args = CASE.make_args()
    plan = planned("min").plan(*args)
    assert not plan.form and plan.compiled_peak_nbytes < part(1.0)
    assert any("no levels" in r.message for r in caplog.records)


def test_what_is_raised_on_purpose_goes_on_its_way() -> None:
    class Wrong:
        def solve(self, graph: Any, budget_nbytes: Any, *, time_limit: float) -> Any:
            raise KeyError("my own solver")

    with pytest.raises(KeyError, match="my own solver"):
        jaxremat.optimize(part(0.6), donate_argnums=0, planning=jaxremat.Planning(solver=Wrong()))(
            CASE.step
        ).plan(*CASE.make_args())
