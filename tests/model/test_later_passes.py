"""Steps that differentiate several times one after the other: which nodes are a later forward pass, and the stages."""

from dataclasses import replace

import jax
import pytest
from graphs import UNIT, passes
from zoo import ZOO, Case
from zoo_kinds import KINDS
from zoo_loops import LOOPS

from jaxremat import Graph, Stage, close_over_dependencies, simulate
from jaxremat._compiler._devices import detect
from jaxremat._lower._lower import lower
from jaxremat._model._later_passes import LaterPass, divides, later_passes, passes_before
from jaxremat._model._schedule import check
from jaxremat._model._stages import coarser, cut_stages, uncut
from jaxremat._rewrite._trace import trace

SEVERAL = {"two_gradients", "several losses: layers, dense"}
CASES = {case.name: case for case in (*ZOO, *KINDS.values(), *LOOPS.values())}


def graph_of(case: Case) -> Graph:
    traced = trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})
    return lower(traced, detect(jax.devices()[0]), base_nbytes=0)


def starts(stages: tuple[Stage, ...]) -> list[int]:
    return [stage.start for stage in stages]


def test_a_pass_begins_behind_the_backward_pass_before_it() -> None:
    graph = passes(3, 4)
    # Four nodes forward, four back and an update each time; the passes begin and end with their contractions.
    assert later_passes(graph) == (LaterPass(9, 13), LaterPass(18, 22))
    assert [divides(later_passes(graph), cut) for cut in (9, 10, 12, 13, 19)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert [passes_before(later_passes(graph), n) for n in (0, 12, 13, 21, 22)] == [0, 0, 1, 1, 2]


def test_what_nothing_differentiates_is_no_pass() -> None:
    graph = passes(2, 4)
    nodes = (replace(n, scope="") if n.id >= 13 else n for n in graph.nodes)
    assert later_passes(replace(graph, nodes=tuple(nodes))) == ()


def test_contractions_that_other_kernels_absorb_are_no_pass() -> None:
    graph = passes(2, 4)

    def absorbing(absorbed: range) -> Graph:
        nodes = tuple(replace(n, fusion_root=n.fusion_root and n.id not in absorbed) for n in graph.nodes)
        values = (
            replace(v, materialised=v.materialised and v.producer not in absorbed) for v in graph.values
        )
        return replace(graph, nodes=nodes, values=tuple(values))

    assert later_passes(absorbing(range(12, 13))) == (LaterPass(9, 13),)
    assert later_passes(absorbing(range(9, 13))) == ()


@pytest.mark.parametrize("name", [name for name in CASES if name not in SEVERAL])
def test_steps_that_differentiate_once_have_none(name: str) -> None:
    assert later_passes(graph_of(CASES[name])) == ()


@pytest.mark.parametrize("name", sorted(SEVERAL))
def test_a_stage_begins_behind_each_pass_and_none_within(name: str) -> None:
    graph = graph_of(CASES[name])
    found = later_passes(graph)
    assert len(found) == 1
    ends = {n.id for n in graph.nodes[1:] if n.loop != graph.nodes[n.id - 1].loop}  # of loops
    for stages in (
        cut_stages(graph),
        cut_stages(graph, fine=True),
        uncut(graph),
        coarser(graph, graph.stages, 4),
    ):
        assert found[0].stop in starts(stages)
        assert not [cut for cut in starts(stages) if divides(found, cut) and cut not in ends]
    assert len(starts(cut_stages(graph))) > len(starts(uncut(graph)))


def test_each_backward_pass_is_cut_as_if_it_were_alone() -> None:
    one, two = passes(1, 40), passes(2, 40)
    alone = starts(cut_stages(one))
    shift = later_passes(two)[0].stop - one.forward_stop
    assert len(alone) > 10
    assert starts(cut_stages(two)) == [*alone, *(cut + shift for cut in alone)]


def test_what_a_later_pass_makes_is_saved_or_recomputed_from_its_stage_on() -> None:
    graph = passes(2, 4, size=3)
    born = graph.nodes[later_passes(graph)[0].start].outputs[0]
    stage = graph.stage_of[graph.values[born].producer]
    assert stage == 3
    assert born in graph.residuals
    nothing = check(graph, close_over_dependencies(graph, ()))
    assert all(graph.values[born].producer not in nodes for nodes in nothing.recomputed[: stage + 1])
    assert all(graph.values[born].producer in nodes for nodes in nothing.recomputed[stage + 1 :])
    everything = simulate(graph, close_over_dependencies(graph, graph.residuals))
    assert [
        (event.node, event.live_nbytes // UNIT) for event in everything.events if event.node in (4, 13)
    ] == [
        (4, 13),
        (13, 13),
    ]
    assert simulate(graph, nothing).peak_nbytes < everything.peak_nbytes
