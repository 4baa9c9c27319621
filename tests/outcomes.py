"""Plans of small graphs, with a compiler's figures that nobody measured."""

from forms import of_levels

from jaxremat import Alive, Graph, MemoryStats, Plan, Round, Schedule, close_over_dependencies, simulate
from jaxremat._report._account import account
from jaxremat._report._actions import actions

ROUND = Round(
    predicted_peak_nbytes=4096,
    compiled_peak_nbytes=4100,
    overhead=0.25,
    compiled_overhead=0.125,
    gap=0.0625,
    solver="milp",
    stages=3,
    form=of_levels((), (2, 4)),
    fence="finished",
    solve_seconds=0.5,
    compile_seconds=2.0,
)


def plan_of(graph: Graph, schedule: Schedule) -> Plan:
    """A plan as the planner makes it."""
    profile = simulate(graph, schedule)
    return Plan(
        step="train_step",
        budget_nbytes=profile.peak_nbytes,
        baseline_peak_nbytes=simulate(graph, close_over_dependencies(graph, graph.residuals)).peak_nbytes,
        predicted_peak_nbytes=profile.peak_nbytes,
        compiled_peak_nbytes=profile.peak_nbytes + 17,
        memory=MemoryStats(7, 5, 3, profile.peak_nbytes + 8),
        compiler="XLA of jax 0.10.2 for the CPU",
        overhead=profile.extra_seconds / graph.step_seconds,
        compiled_overhead=0.015625,
        lower_bound=0.0,
        gap=profile.extra_seconds / graph.step_seconds,
        solver="mincut",
        solve_seconds=0.25,
        compile_count=3,
        rounds=(ROUND,),
        account=account(graph, graph, schedule),
        actions=actions(graph, schedule),
        alive=(Alive(2048, "f32[512]", "forward", "jit(step)/jvp(Net)/mul", "net.py:7 (Net.__call__)"),),
        fingerprint="0123456789abcdef",
        saved=tuple(sorted(schedule.saved)),
        kept=tuple(sorted(schedule.kept)),
        stages=tuple((s.start, s.stop) for s in graph.stages),
        materialised=tuple(v.id for v in graph.values if v.materialised and v.producer >= 0),
        small_nbytes=graph.small_nbytes,
        fence="finished",
        form=of_levels((), (2, 4)),
    )
