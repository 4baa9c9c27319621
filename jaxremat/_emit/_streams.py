"""The user's own copies from and to host memory -> each where the graph has it.

Copies run beside the kernels, and the compiler begins each as early and waits for it as late as it can. So what is
copied to the device passes the barrier of the stage in which its copy stands. A copy to the host begins as soon as
there is what it copies, and passes the barrier of the stage in which it stands in the graph: there it is over.

Updates may follow one another within a stage, as they do where the norm of all gradients scales each. What an update
has copied therefore passes a barrier of its own besides, with what the one before the last returns, to which memory
ever.
"""

from collections.abc import Mapping
from typing import Any

from .._model._primitive_names import FETCH, PUT
from .._program import _compat
from .._rewrite._streamed_copies import UPDATES, updates
from ._layouts import append_barrier


class Streams:
    """The copies of an emitter's program that stand in its backward pass, outside of loops."""

    def __init__(self, emitter: Any) -> None:
        self.emitter = emitter
        source, graph = emitter.source, emitter.graph
        alone = [n for n in graph.nodes[graph.forward_stop :] if n.loop < 0]
        self.fetches = [n.id for n in alone if n.primitive == FETCH]
        self.puts: dict[int, list[int]] = {}  # node -> the copies to the host of what it makes
        for n in alone:
            maker = graph.values[n.inputs[0]].producer if n.primitive == PUT else -1
            if maker >= graph.forward_stop and graph.nodes[maker].loop < 0:
                self.puts.setdefault(maker, []).append(n.id)
        # these begin behind another equation, and not in their place
        self.begun = {n for puts in self.puts.values() for n in puts}
        self.returning = {source[n].invars[0] for n in self.begun}
        self.under_way: dict[int, Any] = {}  # copy to the host that has begun -> its result
        self.names: dict[Any, Any] = {}  # argument in host memory -> its name behind a barrier of its own
        of = updates(source, self.fetches)
        made = {n: source[n].outvars[0] for n in self.fetches}
        self.update = {n: of[var] for n, var in made.items() if var in of}
        self.turns = list(dict.fromkeys(self.update.values()))
        self.results: dict[int, list[Any]] = {}  # of each update
        for var in dict.fromkeys(_compat.variables(emitter.traced.jaxpr.jaxpr.outvars)):
            if (update := of.get(var)) is not None:
                self.results.setdefault(update, []).append(var)

    def through(self, k: int) -> list[Any]:
        """What is copied to the device in a stage."""
        emitter = self.emitter
        return [emitter.source[n].invars[0] for n in self.fetches if emitter.place[n] == k]

    def over(self, k: int) -> list[Any]:
        """The copies to the host that have to be over before a stage."""
        return [self.under_way.pop(n) for n in [*self.under_way] if self.emitter.place[n] <= k]

    def hold(self, n: int, renamed: Mapping[Any, Any]) -> None:
        """Append the barrier of the update that a node is the first to copy for."""
        emitter = self.emitter
        if (update := self.update.get(n)) is None or (turn := self.turns.index(update) - UPDATES - 1) < 0:
            return
        arguments = [emitter.source[m].invars[0] for m in self.fetches if self.update.get(m) == update]
        results = [v for v in self.results.get(self.turns[turn], ()) if v in emitter.home]
        if not results or any(a in self.names for a in arguments):
            return
        through = [*arguments, *results]
        operands = [renamed.get(a) or emitter.passed.get(a, a) for a in through]
        info = emitter.source[n].source_info
        names = append_barrier(emitter, through, operands, "barrier_fetch", -1, info, emitter.barrier)
        self.names.update(zip(arguments, names, strict=False))
        emitter.passed.update(zip(results, names[len(arguments) :], strict=True))
        self.under_way = {m: var for m, var in self.under_way.items() if var not in set(results)}

    def leave(self, n: int) -> None:
        """Append the copies to the host of what a node has made."""
        emitter = self.emitter
        for m in self.puts.get(n, ()):
            eqn = emitter.source[m]
            emitter.append([eqn], [-1])
            self.under_way[m] = eqn.outvars[0]
