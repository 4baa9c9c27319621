"""Values that may be in host memory meanwhile -> what their copies take of the link, in rows of an integer program.

`Graph.away` says by the clock of the plain step when a value has left and when its way back begins, if it is the only
one. Copies wait for one another:

- what is to leave is here for longer. At a node, of what was made since some value v and would be gone by itself, at
  most what the link carries in between has gone; the rest, `waiting`, counts as memory.
- what comes back is late. Of what begins its way back in stage j or later and is wanted in stage k or before, all must
  come within these stages; where they, with what they recompute, are too short, the step waits.

- of what a loop stacks, all copies of an iteration must be over with it, or the loop waits.

All are linear, and never more than what the simulator finds.
"""

from collections.abc import Iterator, Mapping

from .._model._graph import Graph
from .._model._host_copies import AT_ONCE, HostCopy
from .._model._schedule import Schedule
from ._integer_program import IntegerProgram, Term
from ._moments import MIB

CANDIDATES = 12
"""Of the values from which on copies may wait for one another so many are looked at, in even distances."""


class HostLink:
    """The copies of an integer program.

    **Arguments:** `start` a schedule: of what is pinned to be away, what is there is in all.

    **Fields:** `offload` the variables that say what is away.
    """

    def __init__(
        self,
        graph: Graph,
        program: IntegerProgram,
        away: Mapping[int, HostCopy],
        save: Mapping[int, int],
        start: Schedule,
    ) -> None:
        self.graph, self.program, self.away = graph, program, away
        self.stacks = graph.away.stacked
        self.offload = {v: program.binary() for v in (*away, *self.stacks)}
        self._queues: dict[int, int] = {}
        for v in save.keys() & self.offload:
            program.at_most([(self.offload[v], 1.0), (save[v], -1.0)], 0.0)
        for v in start.away & graph.pinned["offload"] & self.offload.keys():
            program.at_most([(self.offload[v], -1.0)], -1.0)
        if self.offload and graph.host is not None and graph.host.nbytes is not None:
            program.at_most(map(self._mib, self.offload), graph.host.nbytes / MIB)

    def _mib(self, v: int) -> Term:
        return self.offload[v], self.graph.values[v].saved_nbytes / MIB

    def waiting(self, at: int) -> int:
        """Return the variable of how many MiB wait at a node to leave, though they would be gone by themselves."""
        if at not in self._queues:
            self._queues[at] = queue = self.program.variable()
            self._fill(queue, at)
        return self._queues[at]

    def _fill(self, queue: int, at: int) -> None:
        graph = self.graph
        assert graph.host is not None
        gone = [v for v in self.away if self.away[v].gone <= at]
        gone.sort(key=lambda v: (graph.values[v].producer, v))
        step = max(len(gone) // CANDIDATES, 1)
        for i in range(0, len(gone), step):
            carried = graph.host.link * (graph.away.starts[at] - graph.away.made(gone[i])) / MIB
            terms = [self._mib(v) for v in gone[i:]]
            if sum(nbytes for _, nbytes in terms) > carried:
                self.program.at_most([*terms, (queue, -1.0)], carried)

    def waits(self, again: Mapping[tuple[int, int], int]) -> Iterator[int]:
        """Variables of the seconds for which stages wait, for the objective.

        **Arguments:** `again` the variables of what stages recompute.
        """
        graph = self.graph
        yield from self._loop_waits(again)
        if not self.away:
            return
        wanted = graph.away.first(self.away, ())
        begins = sorted({copy.begun for copy in self.away.values()})
        ends = sorted({reading.stage for reading in wanted.values()})
        late = {k: self.program.variable() for k in range(len(graph.stages))}
        yield from late.values()
        for j in begins:
            began = graph.away.starts[graph.stages[j].start]
            for k in ends:
                inside = [v for v in self.away if self.away[v].begun >= j and wanted[v].stage <= k]
                needs = [max(wanted[v].node, graph.stages[wanted[v].stage].start) for v in inside]
                if k < j or not inside:
                    continue
                time = graph.away.starts[max(needs)] - began
                if sum(map(graph.away.copy_seconds, inside)) <= time:
                    continue
                terms = [(self.offload[v], graph.away.copy_seconds(v)) for v in inside]
                terms += [(x, -graph.nodes[n].seconds) for (n, i), x in again.items() if j <= i <= k]
                terms += [(late[i], -1.0) for i in range(j, k + 1)]
                self.program.at_most(terms, time)

    def _loop_waits(self, again: Mapping[tuple[int, int], int]) -> Iterator[int]:
        """Yield the same of loops."""
        graph, stacks = self.graph, self.graph.away.stacks
        for pair, away in stacks.by_pair(self.stacks).items():
            copies = [(self.offload[v], stacks.copy_seconds(v)) for v in away]
            self.program.at_most([(x, 1.0) for x, _ in copies], AT_ONCE)
            leaving, first, coming = (self.program.variable() for _ in range(3))
            for i in range(0, len(away), max(len(away) // CANDIDATES, 1)):
                self.program.at_most([*copies[i:], (leaving, -1.0)], stacks.left(away[i]))
            begun = [(self.offload[v], stacks.first_seconds(v)) for v in away]
            self.program.at_most([*begun, (first, -1.0)], stacks.between_seconds(pair))
            more = [(x, -graph.nodes[n].seconds) for (n, k), x in again.items() if k in pair.stages]
            self.program.at_most([*copies, *more, (coming, -1.0)], stacks.own_seconds(pair))
            yield from (leaving, first, coming)
