"""Form, graph, schedule -> which values are kept in fewer bits."""

from .._model._graph import Graph
from .._model._schedule import Schedule
from .._report._copies import Copied
from .._rewrite._encodings import BY_CODE
from .._rewrite._trace import Traced


def copies(traced: Traced, graph: Graph, schedule: Schedule) -> tuple[Copied, ...]:
    """The saved values of which only a copy is kept, by kind. **Arguments:** `graph` of the form."""
    both = zip(traced.jaxpr.jaxpr.eqns, graph.nodes, strict=True)
    value_of = {v: i for eqn, node in both for v, i in zip(eqn.outvars, node.outputs, strict=True)}
    found: dict[int, list[tuple[int, int]]] = {}
    for each in traced.encoded:
        parts = [value_of[v] for v in each.parts]
        if schedule.saved.issuperset(parts):
            whole = graph.values[value_of[each.whole]].saved_nbytes
            nbytes = sum(graph.values[v].saved_nbytes for v in parts)
            found.setdefault(each.encoding, []).append((whole, nbytes))
    return tuple(
        Copied(
            kind=BY_CODE[code].label,
            count=len(sizes),
            whole_nbytes=sum(whole for whole, _ in sizes),
            nbytes=sum(nbytes for _, nbytes in sizes),
            exact=BY_CODE[code].exact,
        )
        for code, sizes in sorted(found.items())
    )
