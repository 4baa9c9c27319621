"""Search, allowance -> the best solution by the model alone, for a user who wants nothing compiled."""

from .._model._graph import Graph
from .._solver import Solution
from ._search import Search


def predict(search: Search, allowance: int | None) -> tuple[Graph, Solution]:
    """Return the solution that is best by the model alone, with the graph that it is of."""
    found: list[tuple[tuple[float, ...], Graph, Solution]] = []
    if allowance is None:
        search.cuttings.make_lowest(search.most_seconds())
    while True:
        for cut in search.cuttings.made[len(found) :]:
            solution = search.solving.within(cut, allowance)
            found.append((search.rank(cut, solution, allowance), cut, solution))
            if found[-1][0][:2] <= (0.0, search.cuttings.cheap_seconds):
                return cut, solution
        order, cut, solution = min(found, key=lambda each: each[0])
        fits = order[0] == 0.0
        alike = [(g, s) for o, g, s in found if o[0] == 0.0 and g.form == cut.form]
        seconds = order[1] if fits else None
        if allowance is None or not (
            any(search.cuttings.deepen(seconds, allowance, turn) for turn in search.turns)
            or (fits and search.cuttings.divide(alike, allowance))
        ):
            return cut, solution
