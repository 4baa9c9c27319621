"""Step, graph, schedule -> the queries that emission repeats, each computed once and never changed.

Equations and stages are identified by their numbers; an equation's is its node id. A fused equation runs in the stage
of its first reader, because it is part of that reader's kernel.
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
    """A step, its graph and the schedule by which it is emitted.

    **Fields:** `combined` whether no partial sums may pass barriers (see `_emit.COMBINED`); `cotangents` the arguments
    of a backward pass that is a separate program, else none.
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
        """The value id of each equation's results."""
        pairs = zip(self.graph.nodes, self.source, strict=True)
        return {v: i for node, eqn in pairs for v, i in zip(eqn.outvars, node.outputs, strict=True)}

    @cached_property
    def variable(self) -> dict[int, Var]:
        """The variable of each value."""
        return {i: v for v, i in self.value_of.items()}

    @cached_property
    def readers(self) -> dict[Var, list[int]]:
        """The equations that read a variable, once for each operand; without copies that begin early."""
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
        """The copies in `puts`. They begin right behind the equation that computes their operand."""
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
        """The equations that the compiler would hoist."""
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
        # A loop's initial carries pass the barrier before it, except for zeros, which are allocated behind it.
        zeros = {n for n in makers if n >= 0 and is_zero(source[n])}
        settled |= makers - zeros
        for n in reversed(backward):
            readers = [place[m] for v in source[n].outvars for m in self.readers.get(v, ())]
            fused = not graph.kernel[n] and graph.nodes[n].repeatable
            if readers and (n in zeros or (fused and n not in settled)):
                place[n] = self._outside(min(readers), graph.nodes[n].loop)
        return place

    def _outside(self, k: int, loop: int) -> int:
        """Return the last stage up to `k` whose equations or barrier are in a loop, -1 for none."""
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
        """The fused equations of the backward pass from which only the step's results follow."""
        graph = self.graph
        found: set[int] = set()
        for n in reversed(range(graph.forward_stop, len(graph.nodes))):
            readers = (m for v in self.source[n].outvars for m in self.readers.get(v, ()))
            if not graph.nodes[n].fusion_root and graph.nodes[n].repeatable and found.issuperset(readers):
                found.add(n)
        return frozenset(found)

    @cached_property
    def copies(self) -> frozenset[int]:
        """The saved parts of values in fewer bits, which are decoded again where they are read."""
        parts = {
            self.value_of[v] for each in self.traced.program.encoded if not each.exact for v in each.parts
        }
        return self.schedule.saved & parts

    @cached_property
    def decoded(self) -> dict[int, Var]:
        """The original values by the last equation that decodes each of them, without exact copies."""
        return {
            self.maker(each.decoded): each.whole for each in self.traced.program.encoded if not each.exact
        }

    @cached_property
    def cloned(self) -> list[list[int]]:
        """The equations to clone for each stage: those of the schedule and the fused ones that they feed."""
        passed: set[int] = set()
        return [self._cloned(k, passed) for k in range(len(self.graph.stages))]

    @cached_property
    def handed_on(self) -> list[frozenset[Var]]:
        """The clones of earlier stages that each stage reads."""
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
        """Return the operands of an equation, and for one that decodes a value also the original value."""
        whole = self.decoded.get(n)
        return [*_compat.variables(self.source[n].invars), *([] if whole is None else [whole])]

    def maker(self, var: Var) -> int:
        """Return the equation that computes a variable."""
        return self.graph.values[self.value_of[var]].producer

    def home(self, var: Var) -> int:
        """Return the loop that contains a variable, -1 for none. A loop's results are in the loop around it."""
        node = self.graph.nodes[self.maker(var)]
        return self.graph.parents[node.loop] if node.primitive in ("scan_last", "scan_stack") else node.loop

    def root(self, var: Var) -> Var:
        """Return the variable of which this is a view or a transposition."""
        while var in self.value_of:
            eqn = self.source[self.maker(var)]
            operands = _compat.variables(eqn.invars)
            if not is_relabelling(eqn) or len(operands) != 1:
                break
            (var,) = operands
        return var

    def entered(self, n: int) -> tuple[int, ...]:
        """Return the operands of a loop's initial carry, else none. Their barrier delays the loop."""
        return self.graph.nodes[n].inputs if self.source[n].primitive.name == "scan_carry" else ()

    def waiting(self, k: int) -> dict[int, int]:
        """Return the deferred equations of earlier stages that have not run when stage `k` starts, each with the stage
        whose barrier releases it.
        """
        return self._waiting[k]

    @cached_property
    def _waiting(self) -> list[dict[int, int]]:
        found: list[dict[int, int]] = [{} for _ in range(len(self.graph.stages) + 1)]
        for j, (stage, end) in enumerate(zip(self.graph.stages, self.graph.released, strict=False)):
            for waiting in found[j + 1 : end + 1]:
                waiting.update(dict.fromkeys(stage.deferred, end))
        return found

    def waits(self, n: int, var: Var) -> bool:
        """Return whether an equation in its original place reads an operand behind the stage's barrier.

        It does for saved values on GPUs, which a kernel with a clone of the equation then reads once, and where the
        equation would otherwise run early.
        """
        saved = self.graph.backend.fuses_reductions and self.value_of.get(var) in self.schedule.saved
        fetched = self.graph.nodes[n].primitive == FETCH
        return saved or fetched or bool(self.entered(n)) or self.hazards.early(n, var)

    def _cloned(self, k: int, passed: set[int]) -> list[int]:
        """Return the equations to clone for a stage; `passed` collects the saved values read by clones so far."""
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
        # Fused operands are cloned too: otherwise they would be written to memory for the clone to read.
        stack.extend(v for n in wanted for v in graph.nodes[n].inputs)
        self._clone_fused(k, stack, wanted)
        if graph.backend.fuses_reductions:
            # A kernel that contains clones beside its own equations should read their common sources once.
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
        """Add to `wanted` the fused equations that the values in `stack` are computed by, and their operands'."""
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
        """Return whether an equation reads a value of another loop's iteration, or of another program."""
        values, nodes = self.graph.values, self.graph.nodes
        producer = values[v].producer
        other = values[v].length > 0 and nodes[producer].loop != nodes[n].loop
        return other or bool(self.cotangents and 0 <= producer < self.graph.forward_stop)
