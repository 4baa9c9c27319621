"""Traced step + graph + schedule -> jaxpr of the planned step.

Each stage of the backward pass starts with a barrier (`lax.optimization_barrier`), followed by clones of the equations
that it recomputes; all else is the traced jaxpr. `_constraints` decides what passes the barriers, `_transfers` ties the
copies from and to host memory, `_analysis` answers both modules' queries about the step, and `_writer` writes.

- Fused values (never in memory) that a clone reads are cloned with it. The stage's own equations read the original of a
  fused value if they can read all of its sources in the original.
- In a loop of the backward pass, an iteration clones the equations of the forward loop's iteration. It clones every
  fused value that it reads, which would be stacked otherwise.
- Values that are saved in fewer bits are decoded only where just the encoded copy is in memory. The forward pass, and
  stages that recompute the value or read it saved, use the value itself. Exact copies replace their value.

Invariants: equations that run once (effects, random draws) run as often as in the traced step, in the same order.
Values that the schedule does not drop keep their names. A schedule that drops nothing still has barriers, for the
updates of donated arguments. A graph without stages gives the traced jaxpr.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax.extend.core as jex
from jax.extend.core import JaxprEqn, Var

from .._model._graph import Graph
from .._model._optimizer_updates import finishing_sums
from .._model._primitive_names import FETCH
from .._model._schedule import Schedule
from .._model._stages import merged
from .._program import _compat
from .._program._run_counts import check_runs
from .._rewrite._kernel_choice import canonical_in_bodies, replaced
from .._rewrite._loop_closing import close_loops, without_unread
from .._rewrite._trace import Traced
from .._runtime._garbage import uncollected
from ._analysis import Analysis
from ._constraints import Point
from ._detaching import Detached, detach
from ._transfers import Transfers
from ._validation import validated
from ._writer import Writer

FINISHED = "finished"
"""Barriers that wait for the small results of the previous stage. Other kinds in plan files of earlier versions are
read as this one.
"""

COMBINED = "combined"
"""Barriers of a step on several devices that no partial sums pass, so that the compiler adds up all gradients across
devices at once, as it does in the plain step. Barriers wait for cotangents instead, which may keep more in memory.
"""

FENCES = (FINISHED, COMBINED)


@uncollected
def emit(
    traced: Traced,
    graph: Graph,
    schedule: Schedule,
    fence: str = FINISHED,
    detached: Detached | None = None,
) -> jex.ClosedJaxpr:
    """Return the planned step as a jaxpr, or as the body of a loop if `traced` is one.

    Its types are checked, also in loops, and `_validation` has proved that it computes the step.

    **Arguments:** `graph` the step's graph, whose node ids are equation indices of `traced.jaxpr`; `fence` the kind of
    barriers, `FINISHED` or `COMBINED`; `detached` the arrays that get barriers of their own, see `_detaching`.
    """
    graph, schedule = _with_needed_stages(graph, schedule)
    jaxpr = traced.jaxpr.jaxpr
    if not graph.stages and not traced.loops and not any(map(replaced(graph.backend), jaxpr.eqns)):
        planned = traced.jaxpr
    else:
        written = write(Analysis(traced, graph, schedule, combined=fence == COMBINED))
        eqns, loop_of, outvars = written.eqns, written.loop_of, written.outvars
        if detached:
            eqns, loop_of, outvars = detach(eqns, loop_of, traced.loops, outvars, detached)
        eqns = close_loops(
            eqns, loop_of, traced.loops, materialises_eagerly=graph.backend.materialises_eagerly
        )
        eqns = without_unread(eqns, outvars)
        planned = _compat.new_jaxpr(jaxpr.constvars, traced.jaxpr.consts, jaxpr.invars, outvars, eqns)
    if not graph.backend.fuses_reductions:
        planned = canonical_in_bodies(planned)
    _compat.check_jaxpr(traced.step(planned))
    check_runs(planned, traced.flat)
    validated(traced, planned)
    return planned


def _with_needed_stages(graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
    """Return the graph and the schedule with the stages that need barriers.

    On a GPU, a schedule that drops nothing needs none, except for the ends of loops. Barriers between offloaded values'
    copies wait for sums, too. Stages without recomputation are merged if the user's program copies from host memory.
    """
    if not graph.backend.fuses_reductions or not graph.stages:
        return graph, schedule
    if schedule.drops_nothing and not graph.loop_stop:
        return replace(graph, stages=()), Schedule(schedule.saved, ())
    graph = replace(graph, stages=finishing_sums(graph)) if schedule.offloaded else graph
    fetches = any(node.primitive == FETCH for node in graph.nodes)
    return merged(graph, schedule) if fetches else (graph, schedule)


@dataclass(frozen=True)
class Written:
    """The planned step's equations. **Fields:** `loop_of` the loop that contains each equation, -1 for none; `outvars`
    the step's results; `forward_count` the number of equations of the forward pass.
    """

    eqns: Sequence[JaxprEqn]
    loop_of: Sequence[int]
    outvars: Sequence[Var | jex.Literal]
    forward_count: int


def write(step: Analysis) -> Written:
    """Return the planned step with its loops inlined."""
    writer = Writer(step)
    transfers = Transfers(step, writer)
    for n in range(step.graph.forward_stop):
        loop = step.traced.loop_of[n]
        transfers.wait(n)
        writer.constrain(Point("before", n), loop)
        writer.put(n, _in_place(step, n), loop)
        transfers.begin(n)
    forward_count = len(writer.eqns)
    for k in range(len(step.graph.stages)):
        _write_stage(step, writer, transfers, k)
    stop = len(step.graph.stages)
    writer.constrain(Point("stage", stop))
    _run(step, writer, transfers, step.waiting(stop))
    outvars = [writer.name(a) if isinstance(a, Var) else a for a in step.traced.jaxpr.jaxpr.outvars]
    return Written(writer.eqns, writer.loop_of, outvars, forward_count)


def _write_stage(step: Analysis, writer: Writer, transfers: Transfers, k: int) -> None:
    graph, stage = step.graph, step.graph.stages[k]
    loop, around = graph.nodes[stage.start].loop, graph.around(stage.start)
    inside = [n for n in step.own[k] if graph.nodes[n].loop == loop]
    waiting = step.waiting(k)
    resumed = [n for n, until in waiting.items() if until <= k]
    writer.begin_stage(k)
    # Copies outside of a loop end before the loop or behind it.
    over = transfers.finished(k) if around < 0 else []
    writer.constrain(Point("stage", k), around, transfers.through(k), over)
    transfers.arrive(k)
    if loop != around:
        outside = [n for n in step.own[k] if graph.nodes[n].loop != loop]
        _run(step, writer, transfers, [*resumed, *outside])
        transfers.arrive_in_loop(k, loop, around)
        writer.begin_loop(loop)
        if step.traced.loops[loop].length == 1:
            writer.constrain(Point("within", k), loop)
    for n in step.cloned[k]:
        writer.put(n, _again(step, writer, n), loop, clone_of=k)
    if loop == around:
        _run(step, writer, transfers, resumed)
    deferred = waiting.keys() | set(stage.deferred)
    now = (n for n in inside if n not in deferred)
    _run(step, writer, transfers, sorted(now, key=lambda n: (n in writer.last, n)))


def _run(step: Analysis, writer: Writer, transfers: Transfers, nodes: Iterable[int]) -> None:
    """Write equations of the backward pass in their original place."""
    for n in nodes:
        if n in step.begun:
            continue
        writer.constrain(Point("before", n))
        transfers.hold(n)
        writer.put(n, _in_place(step, n), step.graph.nodes[n].loop)
        writer.constrain(Point("behind", n))
        transfers.begin(n)


def _in_place(step: Analysis, n: int) -> JaxprEqn:
    """Return an equation as it is written in its original place.

    A value in fewer bits need not be decoded there: the value itself is in memory. A mask that the kernel of a result
    writes as well is computed from the result's operand.
    """
    eqn, graph = step.source[n], step.graph
    if (
        n in step.traced.program.masked
        and n < graph.forward_stop
        and graph.values[graph.nodes[n].outputs[0]].materialised
    ):
        operand = step.traced.program.masked[n]
        eqn = eqn.replace(invars=[operand if isinstance(a, Var) else a for a in eqn.invars])
    whole = step.decoded.get(n)
    return eqn if whole is None else _same(whole, eqn)


def _again(step: Analysis, writer: Writer, n: int) -> JaxprEqn:
    """Return an equation as a stage clones it: the value that it decodes may be recomputed or saved itself."""
    whole = step.decoded.get(n)
    if whole is None or not (whole in writer.clones or step.value_of.get(whole) in step.schedule.saved):
        return step.source[n]
    return _same(whole, step.source[n])


def _same(operand: Var, eqn: JaxprEqn) -> JaxprEqn:
    """Return a copy of the operand in place of an equation, under its name. The compiler drops the copy."""
    same = _compat.permuted(operand, range(len(_compat.shaped(operand).shape)), eqn.source_info)
    return same.replace(outvars=eqn.outvars)
