"""Traced + graph + schedule -> jaxpr of the planned step.

The jaxpr is the traced one with, at the start of each stage that recomputes something, a fence
(`lax.optimization_barrier`) and clones of the dropped equations behind it. Tied as follows:

- through the fence pass only saved values that the clones read; their readers elsewhere keep the originals, so that
  nothing else is cut. Arguments and constants pass only where a clone reads nothing else.
- the trigger, operands whose results nobody reads, holds the fence back until the stage before is done: its last
  contraction, and the small results (weight gradients, reductions) that it leaves behind. A value that a trigger
  merely names is not copied and still fuses with its readers.
- fused values (never in memory) that a clone reads are cloned with it; the stage's own equations read the original
  of a fused value whose sources are all originals.

Law: what the schedule does not drop is read in the original; a schedule that drops nothing gives the traced jaxpr.
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from . import _compat
from ._graph import Graph
from ._schedule import Schedule
from ._trace import Traced


def emit(traced: Traced, graph: Graph, schedule: Schedule) -> jex.ClosedJaxpr:
    """The planned step as a type-checked jaxpr; node ids of `graph` are equation indices of `traced.jaxpr`."""
    if schedule.drops_nothing:
        return traced.jaxpr
    jaxpr = traced.jaxpr.jaxpr
    emitter = _Emitter(traced, graph, schedule)
    emitter.eqns.extend(jaxpr.eqns[: graph.forward_stop])
    for k in range(len(graph.stages)):
        emitter.stage(k)
    planned = _compat.new_jaxpr(jaxpr.constvars, traced.jaxpr.consts, jaxpr.invars, jaxpr.outvars, emitter.eqns)
    _compat.check_jaxpr(planned)
    return planned


class _Emitter:
    def __init__(self, traced: Traced, graph: Graph, schedule: Schedule):
        self.graph = graph
        self.schedule = schedule
        self.source = traced.jaxpr.jaxpr.eqns
        self.eqns: list[Any] = []
        self.clones: dict[Any, Any] = {}  # variable -> its clone that the present stage reads
        self.kept: dict[Any, Any] = {}
        self.value_of: dict[Any, int] = {}
        for node, eqn in zip(graph.nodes, self.source, strict=True):
            self.value_of.update(zip(eqn.outvars, node.outputs, strict=True))

    def stage(self, k: int) -> None:
        graph, stage = self.graph, self.graph.stages[k]
        kept_here = {v for v, s in self.schedule.kept if s == k}
        self.clones = {var: clone for var, clone in self.clones.items() if self.value_of[var] in kept_here}
        wanted = self._wanted(k)
        if wanted:
            renamed = self._fence(k, wanted)
            for n in wanted:
                eqn = self.source[n]
                invars = [a if _compat.is_literal(a) else renamed.get(a, self.clones.get(a, a)) for a in eqn.invars]
                outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
                clone = eqn.replace(invars=invars, outvars=outvars)
                self.eqns.append(_compat.in_scope(clone, f"recompute_{k}"))
                self.clones.update(zip(eqn.outvars, outvars, strict=True))
        for eqn in self.source[stage.start : stage.stop]:
            invars = [a if _compat.is_literal(a) else self.clones.get(a, a) for a in eqn.invars]
            self.eqns.append(eqn.replace(invars=invars) if invars != list(eqn.invars) else eqn)

    def _wanted(self, k: int) -> list[int]:
        """The equations to clone: the schedule's nodes, and the fused ones between them and the stage's readers."""
        graph = self.graph
        wanted = set(self.schedule.recomputed[k])
        gone = {v for n in wanted for v in graph.nodes[n].outputs}
        gone |= {v for v, s in self.schedule.kept if s == k}
        stage = graph.stages[k]
        stack = [
            v
            for n in range(stage.start, stage.stop)
            for v in graph.nodes[n].inputs
            if not graph.values[v].materialised and not gone.isdisjoint(graph.sources[v])
        ]
        # What a clone reads must not be written to memory for its sake: fused operands are cloned with it.
        stack.extend(v for n in wanted for v in graph.nodes[n].inputs)
        while stack:
            v = stack.pop()
            producer = graph.values[v].producer
            if producer < 0 or producer in wanted or graph.values[v].materialised or graph.stage_of[producer] >= k:
                continue
            wanted.add(producer)
            stack.extend(graph.nodes[producer].inputs)
        return sorted(wanted)

    def _fence(self, k: int, wanted: list[int]) -> dict[Any, Any]:
        """Append the stage's fence; returns the fenced names of what passes through."""
        made = {v for n in wanted for v in self.source[n].outvars} | set(self.clones)
        through: list[Any] = []
        for n in wanted:
            operands = [a for a in self.source[n].invars if not _compat.is_literal(a) and a not in made]
            inner = [a for a in operands if a in self.value_of]
            if inner:
                through.extend(inner)
            elif operands and not any(not _compat.is_literal(a) and a in made for a in self.source[n].invars):
                through.extend(operands)
        through = [a for a in dict.fromkeys(through) if _can_pass(a)]
        if not through:
            return {}
        trigger = [a for a in self._trigger(k) if a not in set(through)]
        operands = [*through, *trigger]
        outvars = [_compat.new_var(a.aval) for a in operands]
        template = self.source[self.graph.stages[k].start]
        with jax.named_scope(f"fence_{k}"):
            self.eqns.append(
                jex.new_jaxpr_eqn(operands, outvars, lax.optimization_barrier_p, {}, jex.no_effects, template.source_info)
            )
        return dict(zip(through, outvars, strict=False))

    def _trigger(self, k: int) -> list[Any]:
        """What must be finished before the stage's recomputation may begin."""
        graph = self.graph
        start = graph.stages[k - 1].start if k else 0
        stop = graph.stages[k].start
        made = range(start, stop) if k else range(max(stop - 1, 0), stop)
        small = max(graph.small_nbytes, 1)
        done: list[Any] = []
        last_heavy: Any = None
        for n in made:
            eqn = self.source[n]
            if not graph.nodes[n].heavy or not eqn.outvars or graph.nodes[n].forward and k:
                continue
            last_heavy = eqn.outvars[0]
            if graph.values[graph.nodes[n].outputs[0]].nbytes <= small * 64:
                done.append(eqn.outvars[0])
        if last_heavy is None and len(made):
            last_heavy = next((v for n in reversed(made) for v in self.source[n].outvars), None)
        if last_heavy is not None and last_heavy not in done:
            done.append(last_heavy)
        return [v for v in dict.fromkeys(done) if _can_pass(v)]


def _can_pass(var: Any) -> bool:
    return hasattr(var.aval, "dtype")
