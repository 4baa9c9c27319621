"""Step, graph, schedule -> what their emission asks again and again, found once and never changed.

Equations are known by their numbers, which are those of the graph's nodes; stages by theirs. A fused equation runs in
the stage of its first reader, whose kernel it is part of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.extend.core import JaxprEqn, Var

from .._model._graph import Graph
from .._model._later_passes import LaterPass, later_passes
from .._model._primitive_names import FETCH, PUT
from .._model._schedule import Schedule
from .._program import _compat
from .._program._primitives import is_relabelling
from .._rewrite._trace import Traced
from ._hoisting import Hazards, is_zero


@dataclass(frozen=True, eq=False)
class Analysis:
    """A step that is emitted by a schedule of its graph.

    **Fields:** `combined` whether barriers let pass what devices add up (see `_emit.COMBINED`); `cotangents` the
    arguments of a backward pass that is a program of its own, else none.
    """

    traced: Traced
    graph: Graph
    schedule: Schedule
    combined: bool = False
    cotangents: Sequence[Var] = ()

    @cached_property
    def source(self) -> Sequence[JaxprEqn]:
        """The traced equations."""
        return self.traced.jaxpr.jaxpr.eqns

    @cached_property
    def value_of(self) -> dict[Var, int]:
        """The value that each result of an equation is."""
        pairs = zip(self.graph.nodes, self.source, strict=True)
        return {v: i for node, eqn in pairs for v, i in zip(eqn.outvars, node.outputs, strict=True)}

    @cached_property
    def variable(self) -> dict[int, Var]:
        """The variable of each value."""
        return {i: v for v, i in self.value_of.items()}

    @cached_property
    def readers(self) -> dict[Var, list[int]]:
        """The equations that read a variable, once for each time that they do; not copies that begin early."""
        found: dict[Var, list[int]] = {}
        for n, eqn in enumerate(self.source):
            for a in () if n in self.begun else _compat.variables(eqn.invars):
                found.setdefault(a, []).append(n)
        return found

    @cached_property
    def fetches(self) -> list[int]:
        """The user's own copies to the device that stand in the backward pass, outside of loops."""
        nodes = self.graph.nodes[self.graph.forward_stop :]
        return [n.id for n in nodes if n.loop < 0 and n.primitive == FETCH]

    @cached_property
    def puts(self) -> dict[int, list[int]]:
        """The user's own copies to the host of each equation's results."""
        graph = self.graph
        found: dict[int, list[int]] = {}
        for n in graph.nodes[graph.forward_stop :]:
            maker = graph.values[n.inputs[0]].producer if n.loop < 0 and n.primitive == PUT else -1
            if maker >= graph.forward_stop and graph.nodes[maker].loop < 0:
                found.setdefault(maker, []).append(n.id)
        return found

    @cached_property
    def begun(self) -> frozenset[int]:
        """Those copies to the host, which begin behind what makes their operand, not in their place."""
        return frozenset(n for puts in self.puts.values() for n in puts)

    @cached_property
    def returned(self) -> frozenset[Var]:
        """The values that the step returns, or copies to the host."""
        copied = {v for n in self.begun for v in _compat.variables(self.source[n].invars)}
        return frozenset(copied.union(_compat.variables(self.traced.jaxpr.jaxpr.outvars)))

    @cached_property
    def passes(self) -> Sequence[LaterPass]:
        """The passes of steps that differentiate several times."""
        return later_passes(self.graph)

    @cached_property
    def hazards(self) -> Hazards:
        """The work that the compiler would hoist."""
        return Hazards(self.graph, self.source, self.readers, self.value_of)

    @cached_property
    def place(self) -> Sequence[int]:
        """The stage of each equation."""
        graph, source = self.graph, self.source
        place = list(graph.stage_of)
        begins: dict[int, int] = {}  # loop -> its first stage, whose barrier stands before it
        backward = range(graph.forward_stop, len(source))
        for n in backward:
            begins.setdefault(graph.nodes[n].loop, place[n])
        for n in backward:
            if self.entered(n):
                place[n] = begins[graph.nodes[n].loop]
        settled = {n for stage in graph.stages for n in stage.deferred}
        settled |= {graph.values[v].producer for stage in graph.stages for v in stage.finished}
        makers = {graph.values[v].producer for n in backward for v in self.entered(n)}
        # What starts a loop off passes the barrier before it; if it is zeros, it is made behind that barrier.
        zeros = {n for n in makers if n >= 0 and is_zero(source[n])}
        settled |= makers - zeros
        for n in reversed(backward):
            readers = [place[m] for v in source[n].outvars for m in self.readers.get(v, ())]
            fused = not graph.kernel[n] and graph.nodes[n].repeatable
            if readers and (n in zeros or (fused and n not in settled)):
                place[n] = self._outside(min(readers), graph.nodes[n].loop)
        return place

    def _outside(self, k: int, loop: int) -> int:
        """Return the stage, or the last before it with whose equations or barrier those of this loop may stand."""
        graph = self.graph
        while k and loop not in (graph.nodes[n := graph.stages[k].start].loop, graph.around(n)):
            k -= 1
        return k

    @cached_property
    def own(self) -> list[list[int]]:
        """The equations of the backward pass in each stage."""
        found: list[list[int]] = [[] for _ in self.graph.stages]
        for n in range(self.graph.forward_stop, len(self.graph.nodes)):
            found[self.place[n]].append(n)
        return found

    @cached_property
    def updates(self) -> frozenset[int]:
        """The equations of the backward pass from which nothing follows but results, in no kernels of their own."""
        graph = self.graph
        found: set[int] = set()
        for n in reversed(range(graph.forward_stop, len(graph.nodes))):
            readers = (m for v in self.source[n].outvars for m in self.readers.get(v, ()))
            if not graph.nodes[n].fusion_root and graph.nodes[n].repeatable and found.issuperset(readers):
                found.add(n)
        return frozenset(found)

    @cached_property
    def copies(self) -> frozenset[int]:
        """The saved parts of values in fewer bits: what is decoded of them is made again where it is read."""
        parts = {
            self.value_of[v] for each in self.traced.program.encoded if not each.exact for v in each.parts
        }
        return self.schedule.saved & parts

    @cached_property
    def decoded(self) -> dict[int, Var]:
        """By equation the values that the last of those which decode them gives, but for exact copies."""
        return {
            self.maker(each.decoded): each.whole for each in self.traced.program.encoded if not each.exact
        }

    @cached_property
    def cloned(self) -> list[list[int]]:
        """The equations to clone for each stage: the schedule's, and the fused ones between them and its readers."""
        passed: set[int] = set()
        return [self._cloned(k, passed) for k in range(len(self.graph.stages))]

    @cached_property
    def handed_on(self) -> list[frozenset[Var]]:
        """The clones that earlier stages hand on to each stage."""
        held: set[Var] = set()
        found: list[frozenset[Var]] = []
        for k, nodes in enumerate(self.cloned):
            kept = {v for v, stage in self.schedule.kept if stage == k}
            held = {v for v in held if self.value_of[v] in kept}
            found.append(frozenset(held))
            made = (v for n in nodes for v in self.source[n].outvars)
            held.update(v for v in made if self.value_of[v] not in self.schedule.saved)
        return found

    def operands(self, n: int) -> list[Var]:
        """Return what an equation reads, or the value that it may give in place of what it decodes."""
        whole = self.decoded.get(n)
        return [*_compat.variables(self.source[n].invars), *([] if whole is None else [whole])]

    def maker(self, var: Var) -> int:
        """Return the equation that makes a variable."""
        return self.graph.values[self.value_of[var]].producer

    def home(self, var: Var) -> int:
        """Return the loop in whose body a variable is, -1 for none: a loop's results are in that around it."""
        node = self.graph.nodes[self.maker(var)]
        return self.graph.parents[node.loop] if node.primitive in ("scan_last", "scan_stack") else node.loop

    def root(self, var: Var) -> Var:
        """Return what a variable is a view of, or a transposition."""
        while var in self.value_of:
            eqn = self.source[self.maker(var)]
            operands = _compat.variables(eqn.invars)
            if not is_relabelling(eqn) or len(operands) != 1:
                break
            (var,) = operands
        return var

    def entered(self, n: int) -> tuple[int, ...]:
        """Return the values that start a loop off, which thereby waits for a barrier, if the equation is its carry."""
        return self.graph.nodes[n].inputs if self.source[n].primitive.name == "scan_carry" else ()

    def waiting(self, k: int) -> dict[int, int]:
        """Return the deferred equations of the stages before this one that have not run when it begins, each with the
        stage whose barrier it waits for.
        """
        released = map(self.graph.released, range(k))
        until = zip(self.graph.stages[:k], released, strict=True)
        return {n: end for stage, end in until if end >= k for n in stage.deferred}

    def waits(self, n: int, var: Var) -> bool:
        """Return whether an equation in its own place reads an operand behind the stage's barrier: so that kernels
        which make again what is made of it read it once, or since it would begin early.
        """
        saved = self.graph.backend.fuses_reductions and self.value_of.get(var) in self.schedule.saved
        fetched = self.graph.nodes[n].primitive == FETCH
        return saved or fetched or bool(self.entered(n)) or self.hazards.early(n, var)

    def _cloned(self, k: int, passed: set[int]) -> list[int]:
        """Return the equations to clone for a stage; `passed` gathers the saved values that clones have read so far."""
        graph = self.graph
        wanted = set(self.schedule.recomputed[k])
        gone = {v for n in wanted for v in graph.nodes[n].outputs}
        gone |= {v for v, s in self.schedule.kept if s == k} | self.schedule.away | self.copies
        stack = [
            v
            for n in self.own[k]
            for v in graph.nodes[n].inputs
            if not graph.values[v].materialised
            and (
                self._is_elsewhere(n, v)
                or self.hazards.early(n, self.variable[v])
                or not gone.isdisjoint(graph.sources[v])
            )
        ]
        # What a clone reads must not be written to memory for its sake: fused operands are cloned with it.
        stack.extend(v for n in wanted for v in graph.nodes[n].inputs)
        self._clone_fused(k, stack, wanted)
        if graph.backend.fuses_reductions:
            # A kernel that makes what is cloned besides its own result is to read the sources of both once.
            shared = {v for n in wanted for v in graph.reads[n]} & self.schedule.saved
            passed |= shared
            stack = [
                v
                for n in self.own[k]
                for v in graph.nodes[n].inputs
                if not shared.isdisjoint(graph.sources[v])
                or (v in self.variable and self.value_of.get(self.root(self.variable[v])) in passed)
            ]
            self._clone_fused(k, stack, wanted)
        return sorted(n for n in wanted if graph.nodes[n].repeatable)

    def _clone_fused(self, k: int, stack: list[int], wanted: set[int]) -> None:
        """Add to the equations to clone for a stage those that make these values and are fused, and theirs."""
        graph, waiting = self.graph, self.waiting(k)
        loop = graph.nodes[graph.stages[k].start].loop
        while stack:
            v = stack.pop()
            producer = graph.values[v].producer
            if (
                producer < 0
                or producer in wanted
                or graph.values[v].materialised
                or self.place[producer] >= k
                or producer in waiting
                or not graph.repeats(loop, graph.nodes[producer].loop)
            ):
                continue
            wanted.add(producer)
            stack.extend(graph.nodes[producer].inputs)

    def _is_elsewhere(self, n: int, v: int) -> bool:
        """Return whether what an equation reads was made in another loop's iteration, or in another program."""
        values, nodes = self.graph.values, self.graph.nodes
        producer = values[v].producer
        other = values[v].length > 0 and nodes[producer].loop != nodes[n].loop
        return other or bool(self.cotangents and 0 <= producer < self.graph.forward_stop)
