"""The graphs of `jaxremat.testing` and their builder, under the names that the tests use; and the solvers for them."""

from collections.abc import Iterable

from jaxremat import (
    Chen,
    Graph,
    Greedy,
    Milp,
    MinCut,
    RecomputeAll,
    SaveAll,
    Solver,
    close_over_dependencies,
    simulate,
)  # fmt: skip
from jaxremat._model._example_graphs import UNIT as UNIT
from jaxremat._model._example_graphs import Builder as Builder
from jaxremat._model._example_graphs import blocks as blocks
from jaxremat._model._example_graphs import chain as chain
from jaxremat._model._example_graphs import diamond as diamond
from jaxremat._model._example_graphs import forward_only as forward_only
from jaxremat._model._example_graphs import in_loops as in_loops
from jaxremat._model._example_graphs import passes as passes
from jaxremat._model._example_graphs import unrepeatable as unrepeatable

SOLVERS: dict[str, Solver] = {
    "save all": SaveAll(),
    "recompute all": RecomputeAll(),
    "chen": Chen(),
    "chen of 3": Chen(segments=3),
    "greedy": Greedy(),
    "mincut": MinCut(),
    "milp": Milp(gap=0.0),
}
"""Those that every graph is given to, the exact one exactly."""


def peak_of(graph: Graph, saved: Iterable[int] = ()) -> int:
    """The peak by the model where these values are saved."""
    return simulate(graph, close_over_dependencies(graph, saved)).peak_nbytes
