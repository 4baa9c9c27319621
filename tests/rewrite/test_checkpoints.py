"""Checkpoints of the user's own: undone and planned afresh, or kept as they are."""

import functools
from collections import Counter
from typing import Any

import jax
import pytest
from comparing import assert_computes, assert_same, compile_plain
from test_loops import CPU, often
from test_trace import assert_well_formed, runnable
from zoo_checkpoints import CHECKPOINTS

import jaxremat
from jaxremat import ArgumentError, MemoryStats, Plan, close_over_dependencies
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._program import _compat
from jaxremat._program._primitives import inner_jaxprs
from jaxremat._rewrite._trace import Traced, trace

REGIONS = ("checkpoint", "remat2")
VARIANTS = {"nn.remat_scan, dots", "nn.remat_scan, three levels"}
"""Programs that take long to trace; others have what they have."""

UNROLLED = {"blocks", "blocks, dots", "blocks, names", "nn.remat", "accumulation, unrolled"}
CONTRACTIONS = {"loops": 12, "nn.remat_scan, three levels": 8, "two levels by hand": 8}
"""Of programs that have loops: two layers' worth, forward and twice backward. What a checkpoint within a loop within
another computes again stays.
"""


def traced(name: str, respect_checkpoint: bool = False) -> Traced:
    case = CHECKPOINTS[name]
    jitted = jax.jit(case.step, donate_argnums=case.donate_argnums)
    return trace(jitted, case.make_args(), {}, respect_checkpoint=respect_checkpoint)


def counts(jaxpr: Any) -> Counter[str]:
    """How often each primitive stands in a jaxpr and in those inside."""
    found = Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            found += counts(inner)
    return found


def computed_again(jaxpr: Any, within: bool = False) -> int:
    """How many contractions checkpoints compute again; `within` whether the jaxpr is of what they do."""
    found = 0
    for written in jaxpr.eqns:
        eqn = _compat.without_hijax(written, derivatives=False)
        again = within or _compat.has_scope(eqn, _compat.REMATTED)
        found += again and eqn.primitive.name == "dot_general"
        found += sum(computed_again(inner, again) for inner in inner_jaxprs(eqn))
    return found


def regions(jaxpr: Any, late: bool = False) -> list[Counter[str]]:
    """What stands in each checkpoint's region of the backward pass; `late` whether the jaxpr is of it."""
    found = []
    for eqn in jaxpr.eqns:
        backward = late or "transpose(" in _compat.name_stack_text(eqn)
        if backward and eqn.primitive.name in REGIONS and eqn.params["differentiated"]:
            found.append(counts(eqn.params["jaxpr"]))
        else:
            found.extend(region for inner in inner_jaxprs(eqn) for region in regions(inner, backward))
    return found


def least(name: str, **options: Any) -> Plan:
    """The plan of least memory, its step run against the plain one."""
    return _least(name, jax.config.jax_remat3, **options)  # type: ignore[attr-defined]


@functools.cache
def _least(name: str, remat3: bool, **options: Any) -> Plan:
    case = CHECKPOINTS[name]
    args = case.make_args()
    plain = compile_plain(case, args)
    planning = jaxremat.Planning(**options)
    step = jaxremat.optimize("min", donate_argnums=case.donate_argnums, planning=planning)(case.step)
    plan = step.plan(*args)
    assert MemoryStats.of(step.compile(*args)).peak_nbytes == plan.compiled_peak_nbytes
    assert (plan.compiled_peak_nbytes or 0) <= 1.01 * MemoryStats.of(plain).peak_nbytes
    want = plain(*jax.tree.map(lambda a: a.copy(), args))
    assert_same(want, step(*args))
    return plan


@pytest.mark.parametrize("name", often(CHECKPOINTS, CHECKPOINTS.keys() - VARIANTS))
def test_kept_regions_are_those_of_the_step(name: str) -> None:
    """As many as in the user's program, holding what they hold there, whatever the plan drops around them."""
    found = traced(name, respect_checkpoint=True)
    assert_well_formed(found, calls=False)
    own = regions(found.closed.jaxpr)
    assert own
    assert regions(found.flat.jaxpr) == own
    assert regions(runnable(found).jaxpr) == own
    graph = lower(found, CPU, base_nbytes=0)
    assert regions(emit(found, graph, close_over_dependencies(graph, ())).jaxpr) == own


@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("name", often(CHECKPOINTS, {"blocks, names", "loop", "two levels by hand"}))
def test_what_kept_checkpoints_compute_again_they_still_do(name: str) -> None:
    """Also where no equation holds their regions, as under `jax_remat3`."""
    found = traced(name, respect_checkpoint=True)
    again = computed_again(found.closed.jaxpr)
    assert again
    assert computed_again(found.flat.jaxpr) == again
    assert computed_again(runnable(found).jaxpr) == again
    graph = lower(found, CPU, base_nbytes=0)
    assert computed_again(emit(found, graph, close_over_dependencies(graph, ())).jaxpr) >= again


@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("name", often(CHECKPOINTS, {"loops"}))
def test_undone_regions_compute_the_same(name: str) -> None:
    case, found = CHECKPOINTS[name], traced(name)
    assert_well_formed(found)
    assert_computes(runnable(found), case.step, case.make_args())


@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("name", often(sorted(CHECKPOINTS.keys() - UNROLLED), CHECKPOINTS.keys() - VARIANTS))
def test_what_loops_compute_again_is_merged_back(name: str) -> None:
    assert counts(traced(name).jaxpr.jaxpr)["dot_general"] == CONTRACTIONS.get(name, 6)


@pytest.mark.parametrize("name", often(["blocks, names", "loop"], {"loop"}))
def test_least_memory_with_regions_kept(name: str) -> None:
    plan = least(name, respect_checkpoint=True)
    assert plan.respect_checkpoint
    assert "checkpoints are kept" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", often(["loop", "nn.remat_scan"], {"loop"}))
def test_least_memory_with_regions_undone(name: str) -> None:
    least(name)


@pytest.mark.usefixtures("remat3")
@pytest.mark.slow
@pytest.mark.parametrize("respect_checkpoint", [True, False])
@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_least_memory_of_all(name: str, respect_checkpoint: bool) -> None:
    least(name, respect_checkpoint=respect_checkpoint)


def test_a_plan_knows_whether_it_keeps_regions() -> None:
    case, plan = CHECKPOINTS["loop"], least("loop", respect_checkpoint=True)
    step = jaxremat.optimize(plan=plan, donate_argnums=0)(case.step)
    assert step.plan(*case.make_args()).compiled_peak_nbytes == plan.compiled_peak_nbytes
    with pytest.raises(ArgumentError, match="is an option of planning"):
        jaxremat.optimize(plan=plan, planning=jaxremat.Planning(respect_checkpoint=True))
