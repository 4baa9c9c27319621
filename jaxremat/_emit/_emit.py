"""Traced step + graph + schedule -> jaxpr of the planned step.

The jaxpr is the traced one with, at the start of each stage, a barrier (`lax.optimization_barrier`) and clones of the
dropped equations behind it. What the barriers are for is data, see `_constraints`; copies from and to host memory are
tied by barriers too, see `_transfers`. `_analysis` has what both ask of the step, `_writer` writes.

- fused values (never in memory) that a clone reads are cloned with it; the stage's own equations read the original
  of a fused value whose sources are all originals.
- in a loop of the backward pass clones of what an iteration of the forward loop made are within an iteration, fused
  values always among them, lest they be stacked.
- of values with copies in fewer bits, equations decode only where nothing but the copy is there. In the forward pass a
  value is there when it is encoded: what is decoded is the value itself. So it is in a stage that makes the value
  again, or reads it saved; what encodes it there is read by nothing and goes. Exact copies are read in their value's
  place.

Laws: what runs once (effects, draws) does so as often as in the traced step, in the same order; what the schedule does
not drop is read in the original. A schedule that drops nothing still has barriers, behind
which updates wait until they may overwrite their argument; a graph without stages gives the traced jaxpr.
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
"""Barriers that the small results of the stage before hold back. Plans of earlier versions may name other kinds, which
are followed as this one.
"""

COMBINED = "combined"
"""Barriers of a step on several devices through which nothing passes that these add up: the compiler then adds up all
gradients at once, as it does in the plain step. What finishes a stage is a cotangent, so that more may be in memory.
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
    """Return the planned step as a jaxpr whose types are checked, those of its loops too, and which `_validation`
    has seen to compute the step; node ids of `graph` are equation indices of `traced.jaxpr`. Where that is a body,
    so is this.

    **Arguments:** `fence` the kind of barriers, `FINISHED` or `COMBINED`; `detached` the arrays that are put
    behind barriers of their own, see `_detaching`.
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
    """Return the graph with the stages that are written: on GPUs none for a schedule that drops nothing, unless there
    are loops, whose ends stay; stages between which copies run finish sums too, and fewer where copies are the user's.
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
    """The planned step's equations. **Fields:** `loop_of` for each the loop in whose iterations it is, -1 for none;
    `outvars` the step's results; `forward_count` how many equations are of the forward pass.
    """

    eqns: Sequence[JaxprEqn]
    loop_of: Sequence[int]
    outvars: Sequence[Var | jex.Literal]
    forward_count: int


def write(step: Analysis) -> Written:
    """Write the planned step, whose loops are inlined still."""
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
    # What is outside of a loop is over before the loop, or behind it.
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
    """Write equations of the backward pass in their own place."""
    for n in nodes:
        if n in step.begun:
            continue
        writer.constrain(Point("before", n))
        transfers.hold(n)
        writer.put(n, _in_place(step, n), step.graph.nodes[n].loop)
        writer.constrain(Point("behind", n))
        transfers.begin(n)


def _in_place(step: Analysis, n: int) -> JaxprEqn:
    """Return an equation as it is in its own place: a value in fewer bits is there itself to be decoded, and a mask
    that the kernel of a result makes beside it is made of the result's operand.
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
    """Return an equation as a stage runs it again: what it decodes may be there, made again or saved."""
    whole = step.decoded.get(n)
    if whole is None or not (whole in writer.clones or step.value_of.get(whole) in step.schedule.saved):
        return step.source[n]
    return _same(whole, step.source[n])


def _same(operand: Var, eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation that gives its operand, under the name and in the place of another: the compiler drops it."""
    same = _compat.permuted(operand, range(len(_compat.shaped(operand).shape)), eqn.source_info)
    return same.replace(outvars=eqn.outvars)
