"""Stacks of loops that may be in host memory -> what of them does not count at a moment, for `_moments`."""

from collections.abc import Collection, Iterator, Mapping

from .._model._graph import Graph

Key = tuple[str, *tuple[int, ...]]
Part = tuple[tuple[Key, ...], int]


class StackTerms:
    """The stacks of a graph.

    **Arguments:** `free` the values that need not be saved.
    """

    def __init__(self, graph: Graph, free: Collection[int]) -> None:
        self.graph = graph
        self.away = graph.away.stacked
        self._fixed = [v for v in self.away if v not in free]

    def here_nbytes(self, v: int, at: int, k: int, nbytes: int) -> int:
        """What of a value of so many bytes is here at a node of a stage, if its stack is in host memory meanwhile."""
        if v not in self.away or at < self.away[v].gone:
            return nbytes
        return self.graph.away.stacks.here_nbytes(v, k)

    def elsewhere(self, v: int, at: int, k: int) -> Iterator[Part]:
        """What is then not here of a value that is saved and counted."""
        whole = self.graph.values[v].saved_nbytes
        if (less := self.here_nbytes(v, at, k, whole) - whole) < 0:
            yield (("o", v),), less

    def fixed(self, at: int, k: int, last: Mapping[int, int]) -> Iterator[Part]:
        """The same of values that are always saved; `last` is the last reader of each value."""
        for v in self._fixed:
            if at <= last.get(v, -1):
                yield from self.elsewhere(v, at, k)
