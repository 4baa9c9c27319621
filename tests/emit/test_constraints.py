"""What must be finished before what is data: it holds in the emitted program, and rules can be left out."""

import jax
import pytest
from zoo import BY_NAME

from jaxremat import close_over_dependencies
from jaxremat._emit._analysis import Analysis
from jaxremat._emit._constraints import RULES, ZERO, constraints
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._device_specs import DEVICES
from jaxremat._rewrite._trace import Traced, trace
from jaxremat._runtime._mechanisms import recorded, switched_off

NAMES = ("mlp_adamw", "resnet", "scan", "two_gradients")


def traced(name: str) -> Traced:
    case = BY_NAME[name]
    return trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})


def barriers(step: Analysis) -> int:
    closed = emit(step.traced, step.graph, step.schedule)
    return str(closed).count("optimization_barrier")


def analysis(name: str, device: str = "h100") -> Analysis:
    """A step of which everything is made again."""
    found = traced(name)
    graph = lower(found, DEVICES[device], base_nbytes=0)
    return Analysis(found, graph, close_over_dependencies(graph, ()))


@pytest.mark.parametrize("name", NAMES)
def test_what_must_be_finished_is_made_before_and_read_behind(name: str) -> None:
    step = analysis(name)
    with recorded() as acted:
        found = constraints(step)
    assert {each.why for each in found} == {rule for rule in RULES if acted[f"barriers: {rule}"]}
    assert not acted["barriers: fetches"]  # nothing is in host memory
    starts = [*(stage.start for stage in step.graph.stages), len(step.graph.nodes)]
    held = [each for each in found if each.hold]
    assert held
    for each in found:
        at, number = each.at
        behind = starts[number] if at in ("stage", "within") else number
        for v in each.until:
            assert v in step.traced.jaxpr.jaxpr.invars or step.maker(v) <= behind
            assert v in step.returned or step.readers.get(v)
        for n, read in (each.readers or {}).items():
            assert set(read) <= {*each.hold}
            assert all(v is ZERO or v in step.operands(n) for v in read)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_the_same_without_a_rule(name: str, rule: str) -> None:
    """What is emitted is compared with the step."""
    step = analysis(name)
    whole = barriers(step)
    with switched_off(f"barriers: {rule}"):
        assert all(each.why != rule for each in constraints(step))
        assert barriers(step) <= whole


def test_without_triggers_a_stage_waits_for_nothing() -> None:
    step = analysis("mlp_adamw")
    stages = [("stage", k) for k in range(len(step.graph.stages))]
    assert any(each.until for each in constraints(step) if each.at in stages)
    with switched_off("barriers: triggers"):
        assert not any(each.until for each in constraints(step) if each.at in stages)
