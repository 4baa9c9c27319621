"""Which of several compiled plans is taken."""

from dataclasses import replace
from typing import Any

import pytest
from graphs import chain

from jaxremat import Graph, Milp, Solution, complete, simulate
from jaxremat._search import Search, Trial


def a_trial(graph: Graph, saved: set[int], compiled_overhead: float) -> Trial:
    schedule = complete(graph, saved)
    profile = simulate(graph, schedule)
    compiled: Any = None
    return Trial(
        graph,
        Solution(schedule),
        "finished",
        profile,
        None,
        compiled,
        profile.peak_nbytes,
        compiled_overhead,
        0.0,
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_the_compiled_kernels_decide(platform: str) -> None:
    """The plan that the model takes for the cheaper one has the dearer kernels."""
    graph = replace(chain(6), platform=platform)
    search = Search(graph, Milp(), 1.0, a_trial, 0)  # type: ignore[arg-type]  # nothing is compiled here
    by_model = a_trial(graph, set(graph.residuals[:4]), 0.3)
    by_kernels = a_trial(graph, set(graph.residuals[:2]), 0.1)
    assert by_model.profile.extra_seconds < by_kernels.profile.extra_seconds
    search.trials += [by_model, by_kernels]
    assert search.best(10**12) is (by_kernels if platform == "gpu" else by_model)
