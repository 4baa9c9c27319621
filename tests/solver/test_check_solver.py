"""`jaxremat.testing.check_solver`: the built-in solvers break no rule, and each rule is broken by one made for that."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from graphs import SOLVERS as EXACTLY

import jaxremat
from jaxremat import (
    Graph,
    Greedy,
    Schedule,
    Solution,
    close_over_dependencies,
)
from jaxremat._model._example_graphs import chain
from jaxremat._solver._milp import Milp
from jaxremat.testing import SolverReport, check_solver, graphs

SOLVERS = {**EXACTLY, "milp": Milp()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "milp" else []) for name in SOLVERS]
)
def test_built_in_solvers_break_no_rule(name: str) -> None:
    report = check_solver(SOLVERS[name])
    assert {row.graph for row in report.rows} == set(graphs())
    assert any(row.fits for row in report.rows)
    assert any(row.best_overhead == math.inf for row in report.rows)  # budgets that nothing meets are tried
    if name == "milp":
        assert not report.missed
        excess = [
            row.overhead - row.best_overhead
            for row in report.rows
            if row.fits and row.best_overhead is not None
        ]
        assert max(excess) <= Milp().gap
    if name == "save all":
        assert report.missed


def test_the_zoo_holds_what_it_promises() -> None:
    zoo = graphs()
    assert any(not node.repeatable for graph in zoo.values() for node in graph.nodes)
    assert any(graph.loop_stop for graph in zoo.values())
    assert any(not graph.stages for graph in zoo.values())
    assert any(len({n.seconds for n in graph.nodes}) > 4 for graph in zoo.values())
    assert any(
        len([v for v in graph.residuals if graph.values[v].materialised]) > 3
        and graph.backend.materialises_eagerly
        for graph in zoo.values()
    )
    assert graphs() == zoo
    assert all(graphs()[name] is not graph for name, graph in zoo.items())


# ---- solvers that break one rule each


class Wrong:
    """MinCut's answer, spoilt."""

    def __init__(self, spoil: Callable[[Graph, int | None, Solution], Any]):
        self.spoil = spoil

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Any:
        return self.spoil(graph, budget_nbytes, Greedy().solve(graph, budget_nbytes, time_limit=time_limit))


def gives_up(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    if budget_nbytes is not None and jaxremat.simulate(graph, solution.schedule).peak_nbytes > budget_nbytes:
        raise ValueError("no solution")
    return solution


def forgets_a_stage(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return replace(solution, schedule=replace(solution.schedule, recomputed=((),) * len(graph.stages)))


def repeats_a_callback(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    once = [n.id for n in graph.nodes if not n.repeatable]
    if not once:
        return solution
    saved = solution.schedule.saved - set(graph.nodes[once[0]].outputs)
    again = tuple(tuple(sorted({*nodes, once[0]})) for nodes in solution.schedule.recomputed)
    return replace(solution, schedule=Schedule(saved, again))


def ignores_pins(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    free = replace(graph, pins=())
    return Greedy().solve(free, budget_nbytes, time_limit=1.0)


def names_nothing(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return replace(solution, schedule=replace(solution.schedule, saved=solution.schedule.saved | {10**6}))


def ignores_the_budget(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return solution if budget_nbytes is None else Solution(close_over_dependencies(graph, graph.residuals))


def always_recomputes(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    """Though everything is saved."""
    plain = close_over_dependencies(graph, graph.residuals)
    again = tuple(n.id for n in graph.nodes if n.forward and n.repeatable and graph.kernel[n.id])
    return Solution(replace(plain, recomputed=(again, *plain.recomputed[1:]))) if graph.stages else solution


def tampers(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    object.__setattr__(graph.values[0], "nbytes", 1)
    return solution


def tampers_with_what_is_remembered(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    graph.lingering[0] = 1
    return solution


def overstates(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return replace(solution, lower_bound=0.5)


def overstates_what_it_missed(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    """A bound that its own schedule, which does not fit, keeps; and the best one does not."""
    return (
        Solution(close_over_dependencies(graph, graph.residuals), lower_bound=1.0)
        if budget_nbytes
        else solution
    )


def not_a_number(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return replace(solution, lower_bound=float("nan"))


def says_that_nothing_fits(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return Solution(close_over_dependencies(graph, graph.residuals), proven=True)


TOSSES = itertools.count()


def coin(graph: Graph, budget_nbytes: int | None, solution: Solution) -> Solution:
    return solution if next(TOSSES) % 2 else Solution(close_over_dependencies(graph, graph.residuals[::2]))


BROKEN: dict[str, tuple[Callable[..., Any], str, str]] = {
    "none": (lambda *_: None, "answers", "returned a NoneType"),
    "raises": (gives_up, "answers", r"raised ValueError: no solution. If nothing fits.*lowest peak"),
    "schedule": (lambda g, b, s: s.schedule, "answers", r"returned a Schedule.*Solution\(close_over_dependencies"),
    "stage": (forgets_a_stage, "emittable", "neither saved nor recomputed"),
    "callback": (repeats_a_callback, "emittable", r"node 1 \(pure_callback\), which may run only once"),
    "pins": (ignores_pins, "emittable", "A schedule does not save value 4, which contradicts pin of 4"),
    "nothing": (names_nothing, "emittable", "names value 1000000, but the graph has values 0 to"),
    "ignores": (ignores_the_budget, "budget", "what it answers for the least memory .* needs"),
    "recomputes": (always_recomputes, "budget", "saving everything needs"),
    "tampers": (tampers, "leaves the graph alone", "not what it was"),
    "remembers": (tampers_with_what_is_remembered, "leaves the graph alone", "not what it was"),
    "bound": (overstates, "bound", r"50.0000% of the step, and its own schedule costs 0.0000%"),
    "missed bound": (overstates_what_it_missed, "bound", r"100.0000% of the step, and"),
    "nan": (not_a_number, "bound", "nan, which is not finite"),
    "proven": (says_that_nothing_fits, "proven", "it says that nothing fits .* but saving the right values does"),
    "coin": (coin, "deterministic", r"it saves \[.*\], then \["),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule_is_broken_by_someone(name: str) -> None:
    spoil, rule, text = BROKEN[name]
    with pytest.raises(jaxremat.SolverRuleError, match=text) as caught:
        check_solver(Wrong(spoil))
    assert caught.value.rule == rule
    assert caught.value.graph in graphs()
    assert f'Wrong breaks the rule "{rule}" on the graph "{caught.value.graph}"' in str(caught.value)
    asked = caught.value.budget_nbytes
    assert ("the least memory" if asked is None else f"{asked} bytes") in str(caught.value)


def test_the_docstring_names_every_rule() -> None:
    for _, rule, _ in BROKEN.values():
        assert f"*{rule}*" in (check_solver.__doc__ or "")


def test_a_hurried_solver_still_answers() -> None:
    class Slow:
        def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Any:
            return Greedy().solve(graph, budget_nbytes, time_limit=1.0) if time_limit > 0.1 else None

    with pytest.raises(jaxremat.SolverRuleError, match="returned a NoneType"):
        check_solver(Slow())


def test_the_report_reads_well() -> None:
    report = check_solver(Greedy())
    assert isinstance(report, SolverReport)
    first, header, *rows = str(report).splitlines()
    assert first.startswith("Greedy: no rule broken on 14 graphs with ")
    assert header.split() == ["graph", "budget", "peak", "overhead", "bound", "best"]
    assert len(rows) == len(report.rows)
    assert sum(row.endswith("missed") for row in rows) == len(report.missed) > 0
    assert all(len(row) <= 100 for row in rows)


def test_a_graph_that_is_shown_is_not_the_one_that_judges() -> None:
    seen: list[Graph] = []

    class Keeps:
        def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
            seen.append(graph)
            return Solution(close_over_dependencies(graph, graph.residuals))

    check_solver(Keeps())
    assert len({id(graph) for graph in seen}) == len(seen)
    assert seen[0] == chain(6)
