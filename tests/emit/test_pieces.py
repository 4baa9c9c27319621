"""Of what the backward pass splits, no piece keeps the whole in memory where that is the peak."""

from examples.benchmarks.networks import program
from jaxremat import close_over_dependencies
from jaxremat._compiler._devices import DEVICES
from jaxremat._compiler._program import Program
from jaxremat._compiler._target import Target
from jaxremat._emit._analysis import Analysis
from jaxremat._emit._constraints import constraints
from jaxremat._plan._baseline import measure_baseline
from jaxremat._plan._problem import Problem
from jaxremat._runtime._mechanisms import switched_off


def test_what_a_skip_connection_hands_back_does_not_keep_a_concatenations_gradient() -> None:
    """Where all is made again in a UNet. Where nothing is, the peak is elsewhere, and no kernel is cut."""
    net = program("unet", scale="tiny")
    made = Program(net.step, donate_argnums=net.donate_argnums, target=Target("h100"))
    problem = Problem(made, net.abstract_args(), {}, DEVICES["h100"], "roofline")
    graph = measure_baseline(problem, plain=False, tagged=True).graphs.plain
    none, every = (close_over_dependencies(graph, saved) for saved in ((), graph.residuals))

    found = [each for each in constraints(Analysis(problem.traced, graph, none)) if each.why == "pieces"]
    for each in found:
        split = problem.traced.jaxpr.jaxpr.eqns[each.at.number]
        assert split.primitive.name == "split" and [*each.hold] == split.outvars
    assert not [each for each in constraints(Analysis(problem.traced, graph, every)) if each.why == "pieces"]

    peak = problem.compile(problem.jitted(graph, none)).peak_nbytes
    with switched_off("barriers: pieces"):
        assert peak < 0.95 * problem.compile(problem.jitted(graph, none)).peak_nbytes, [str(e) for e in found]
