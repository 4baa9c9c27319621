"""Step, graph, schedule -> what must be finished before what: the barriers of the planned step, as data.

The compiler begins work as soon as its operands are there, and puts off what nobody waits for. Each rule of `RULES`
finds where that would keep more in memory than the plan says. `_writer` writes the constraints of one point as one
barrier.

At the start of each stage of the backward pass stands a barrier that holds back what the stage makes again:

- *operands* are what is held: saved and kept values that clones read, and saved values and arguments that the stage's
  own contractions read, which the compiler would else copy into another layout long before. Other readers keep the
  originals, so that nothing else is cut. Arguments are held for a clone only where it reads nothing else. Small values
  are not held on a GPU: kernels make them, or read their row of a stack, as they want them.
- *triggers* are what must be finished: the small results (weight gradients, reductions) that the stage before leaves
  behind. They pass the barrier on their way to the optimizer, whose updates wait for it (*updates*). Only where there
  is none that is late enough, a cotangent passes, which cuts it off from kernels that would read it.
- in a loop of the backward pass all happens within an iteration. At its start there is no barrier: an iteration is held
  back by the one before, and the first by a barrier through which the loop's carries pass.

Other barriers stand beside single equations: *blocks*, *last reads*, *masks*, *pieces*.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Var

from .._model._later_passes import made_later
from .._model._simulate import simulate
from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import SUMS, is_loop_edge, is_product, is_relabelling, is_write
from .._rewrite._reversed_chains import block_of
from .._runtime._mechanisms import mechanism
from ._analysis import Analysis

ZERO = _compat.new_var(ShapedArray((), np.dtype(np.float32)))
"""A constant that is held, so that what is made of it waits for the barrier."""


class Point(NamedTuple):
    """Where a barrier stands: before or behind an equation, at the start of a stage (that behind the last is the end of
    the step), or within the loop that a stage begins.
    """

    where: Literal["before", "behind", "stage", "within"]
    number: int


@dataclass(frozen=True)
class Constraint:
    """Some equations read values that are there only when others are finished.

    A point without anything that is held back, and that nobody waits for, has no barrier.

    **Fields:**

    - `at` the point where the barrier stands.
    - `hold` the values that are held back; `readers` for each equation those that it reads by their names behind the
      barrier, or every later equation where None.
    - `until` the values that must be finished. Every later equation reads them by their names behind the barrier: the
      compiler drops operands of barriers whose results nobody reads.
    - `why` the rule's name.
    """

    at: Point
    hold: Sequence[Var] = ()
    until: Sequence[Var] = ()
    readers: Mapping[int, Sequence[Var]] | None = field(default_factory=dict)
    why: str = ""


Rule = Callable[[Analysis], list[Constraint]]


def constraints(step: Analysis) -> list[Constraint]:
    """Return what must be finished before what, by the rules that are not switched off."""
    return [each for rule in RULES.values() for each in rule(step)]


def operands(step: Analysis) -> Iterator[Constraint]:
    """Hold back what each stage makes again, and what it begins, until the stage before is finished."""
    graph = step.graph
    for k, stage in enumerate(graph.stages):
        loop, around = graph.nodes[stage.start].loop, graph.around(stage.start)
        inside = [n for n in step.own[k] if graph.nodes[n].loop == loop]
        outside = [n for n in step.own[k] if graph.nodes[n].loop != loop]
        waiting, deferred = step.waiting(k), set(stage.deferred)
        outer = [*(n for n, until in waiting.items() if until <= k), *outside]
        inner = [n for n in inside if n not in deferred and n not in waiting]
        # The barrier of a loop's first stage holds the whole loop back, not what its iterations make again.
        begins = loop != around
        hold = _held(step, k, [] if begins else step.cloned[k], around, waiting, _arriving(step, k))
        # The compiler makes no loop of one iteration, so that the loop's carries hold back only what is made of them:
        # what the stage makes again it would make in the forward pass, once, and keep.
        single = begins and step.traced.loops[loop].length == 1
        nodes = ([], outer) if single else (step.cloned[k], [*outer, *inner])
        readers = _readers(step, hold, *nodes, filling=outer if begins else None)
        yield Constraint(Point("stage", k), hold, readers=readers, why="operands")
        if single:
            later = [n for n, until in waiting.items() if until > k]
            hold = _held(step, k, step.cloned[k], loop, later, frozenset())
            carries = (step.source[n].outvars[0] for n in inside if step.entered(n))
            carried = [v for v in carries if _can_pass(v) and not _is_written_over(step, v)] if hold else []
            readers = _readers(step, hold, step.cloned[k], inner)
            yield Constraint(Point("within", k), hold, carried, readers, why="operands")


def fetches(step: Analysis) -> Iterator[Constraint]:
    """Hold back what the user's program copies to the device, until the stage in which the copy stands.

    Without it the optimizer's state of unrolled layers is there at once, and budgets that were met are refused. Where
    layers are scanned it saves little, and costs time: 6 points of a small GPT's step.
    """
    for k in range(len(step.graph.stages)):
        readers = {n: step.operands(n) for n in step.fetches if step.place[n] == k}
        yield Constraint(
            Point("stage", k), [a for read in readers.values() for a in read], (), readers, "fetches"
        )


def triggers(step: Analysis) -> Iterator[Constraint]:
    """Let what each stage makes again wait until the stage before is done."""
    for k in range(len(step.graph.stages)):
        yield Constraint(Point("stage", k), until=_triggers(step, k), why="triggers")


def updates(step: Analysis) -> Iterator[Constraint]:
    """Let deferred equations wait for the barrier of a later stage, or at the end for what all stages have finished."""
    stop = len(step.graph.stages)
    for k in range(stop):
        resumed: dict[int, Sequence[Var]] = {n: () for n, until in step.waiting(k).items() if until <= k}
        yield Constraint(Point("stage", k), readers=resumed, why="updates")
    left: dict[int, Sequence[Var]] = dict.fromkeys(step.waiting(stop), ())
    yield Constraint(
        Point("stage", stop), until=_finished(step, stop) if left else (), readers=left, why="updates"
    )


def blocks(step: Analysis) -> Iterator[Constraint]:
    """Let what undoes a block wait for a cotangent that is made last before.

    It reads no cotangent, so that the compiler might do it long before it is wanted.
    """
    graph, source = step.graph, step.source
    members: dict[int, list[int]] = {}
    for n in range(graph.forward_stop, len(source)):
        if (block := block_of(source[n])) is not None:
            members.setdefault(block, []).append(n)
    undoing = {n for own in members.values() for n in own}

    def is_there(var: Var, before: int) -> bool:
        """Return whether it is in memory before that equation, and no argument."""
        if var not in step.value_of:
            return False
        value = graph.values[step.value_of[var]]
        return 0 <= value.producer < before and value.materialised and not graph.is_small(value.id)

    def cotangent(before: int) -> Var | None:
        """Return what the backward pass made last before that equation, and reads behind it."""
        for n in range(before - 1, graph.forward_stop - 1, -1):
            for v in () if n in undoing else source[n].outvars:
                later = any(m >= before and m not in undoing for m in step.readers.get(v, ()))
                if later and graph.nodes[n].loop < 0 and is_there(v, before):
                    return v
        return None

    for own in members.values():
        made = {v for n in own for v in source[n].outvars}
        read = dict.fromkeys(a for n in own for a in _compat.variables(source[n].invars) if a not in made)
        starts = [a for a in read if is_there(a, own[0])]
        if starts and (last := cotangent(own[0])) is not None:
            yield Constraint(Point("before", own[0]), starts, (last,), readers=None, why="blocks")


def last_reads(step: Analysis) -> Iterator[Constraint]:
    """Let updates of donated arguments wait for the last matrix product of the stage that reads the argument.

    A weight is read for the gradient of what it was multiplied with, and overwritten when its own gradient is there, in
    the same stage, and nothing says in which order. XLA:GPU then copies the weight before the step begins, or the
    updated one at its end, and either copy is there for most of the step. So the weight passes a barrier with that
    product's result, on its way to its update, and the result on its way to its readers: both are in memory in any
    case.

    On several devices each may have a part of a product's sum over what is divided among them. Where several products
    are added up, XLA sends only what they come to, so there it is their sum that passes.

    Convolutions are left alone: libraries want their kernels in a layout of their own, so that they are copied anyway.
    """
    last = _last_products(step)
    found: dict[int, list[Var]] = {}
    for a, n in last.items():
        found.setdefault(_added_up(step, n), []).append(a)
    waiting, held = set(last), list[int]()
    for n in sorted(step.updates):  # from the first that reads such an argument on
        if not waiting.isdisjoint(_compat.variables(step.source[n].invars)):
            held.append(n)
            waiting.update(step.source[n].outvars)
    for n, arguments in found.items():
        readers = {m: [a for a in step.operands(m) if a in arguments] for m in held}
        yield Constraint(Point("behind", n), arguments, step.source[n].outvars, readers, why="last reads")


def masks(step: Analysis) -> Iterator[Constraint]:
    """Hide from masks that are made of a result in place of its operand (see `_masks`) what the result is made of.

    What XLA sees to be `max(x, 0) > 0` it computes of `x` within the kernels that read the mask, and keeps `x` for
    them. A barrier costs nothing: the result is in memory when it passes, where the backward pass wants it, and all
    others read it in front. It stands only before masks that kernels of the backward pass make themselves, of a result
    that is saved on the device. Loops of the backward pass read results from a stack, of which nothing else is known.
    """
    graph, schedule = step.graph, step.schedule
    found: dict[int, list[int]] = {}
    for n in sorted(n for n in step.traced.program.masked if n < graph.forward_stop):
        (mask,), (result,) = graph.nodes[n].outputs, graph.nodes[n].inputs
        stays = result in schedule.saved and result not in schedule.away and not graph.is_small(result)
        if stays and not graph.values[mask].materialised and not graph.values[result].length:
            found.setdefault(result, []).append(n)
    for result, nodes in found.items():
        hold = (step.variable[result],)
        yield Constraint(Point("before", nodes[0]), hold, readers=dict.fromkeys(nodes, hold), why="masks")


def pieces(step: Analysis) -> Iterator[Constraint]:
    """Let what reads one piece of a value that is split wait until all pieces are written.

    The compiler makes a piece within the kernel that reads it. Where that comes late, as for the half of a gradient
    that goes back along a skip connection, the whole stays in memory until then: a UNet at its least memory needed 0.92
    GB of temporaries in place of 0.75. Writing the pieces takes time, so that they are only written where the whole
    would raise the schedule's peak.
    """
    graph, schedule = step.graph, step.schedule
    found = [n for n in range(graph.forward_stop, len(graph.nodes)) if _outlived(step, n)]
    if not found:
        return
    profile = simulate(graph, schedule)
    lives = {life.value: life for life in profile.lives if life.stage < 0}
    live = np.array(profile.runs[2])  # with each whole in place of its pieces
    spans: dict[int, slice] = {}
    for n in found:
        own = [lives[v] for v in graph.nodes[n].outputs]
        spans[n] = slice(own[0].begin + 1, max(life.end for life in own) + 1)
        live[spans[n]] += sum(life.nbytes for life in own)
        for life in own:
            live[life.begin + 1 : life.end + 1] -= life.nbytes
    for n, span in spans.items():
        if live[span].max(initial=0) > profile.peak_nbytes - graph.base_nbytes:
            yield Constraint(Point("behind", n), step.source[n].outvars, readers=None, why="pieces")


def _outlived(step: Analysis, n: int) -> bool:
    """Return whether an equation splits a value that is read for the last time, and whose pieces are read in different
    stages.
    """
    graph, node = step.graph, step.graph.nodes[n]
    made = [graph.values[v] for v in node.outputs]
    if (
        node.primitive != "split"
        or node.loop >= 0
        or not all(v.materialised and not v.is_output for v in made)
    ):
        return False
    read = (map(step.place.__getitem__, step.readers.get(v, ())) for v in step.source[n].outvars)
    last = {max(places, default=-1) for places in read}
    return len(last) > 1 and all(graph.last_reader[v] == n for v in graph.reads[n])


def _rule(name: str, find: Callable[[Analysis], Iterator[Constraint]]) -> Rule:
    """Return the rule as a mechanism that can be switched off, without constraints that constrain nothing."""

    def found(step: Analysis) -> list[Constraint]:
        return [each for each in find(step) if each.hold or each.until or each.readers]

    return mechanism(f"barriers: {name}", off=lambda _: [])(found)


RULES: Mapping[str, Rule] = {
    (name := find.__name__.replace("_", " ")): _rule(name, find)
    for find in (operands, fetches, triggers, updates, blocks, last_reads, masks, pieces)
}
"""In the order in which a barrier's operands stand."""


def _can_pass(var: Var) -> bool:
    """Return whether it is an array."""
    return hasattr(var.aval, "dtype")


def _readers(
    step: Analysis,
    hold: Collection[Var],
    clones: Sequence[int],
    own: Sequence[int],
    filling: Sequence[int] | None = None,
) -> dict[int, Sequence[Var]]:
    """Return what clones of these equations, and which of these equations in their own place, read behind a barrier.

    **Arguments:** `filling` those that may fill arrays with the zero that is held, by default all.
    """
    read = {n: [a for a in step.operands(n) if a in hold] for n in (*clones, *own)}
    for n in own:
        read[n] = [a for a in read[n] if step.waits(n, a)]
    if ZERO in hold:
        filled = (*clones, *own) if filling is None else filling
        read |= {n: [*read[n], ZERO] for n in filled if step.hazards.fills(n)}
    return {n: found for n, found in read.items() if found}


def _held(
    step: Analysis,
    k: int,
    cloned: Sequence[int],
    loop: int,
    waiting: Collection[int],
    arriving: Collection[Var],
) -> list[Var]:
    """Return what the barrier of stage `k` in a loop, -1 for none, holds back.

    Nothing large that the stage clones, nor what its own contractions read in another layout, can be made before the
    barrier. Small clones may be, where the compiler fuses reductions.

    **Arguments:** `waiting` the equations that wait for this or another barrier; `arriving` what comes back from the
    host's memory behind it.
    """
    source, graph = step.source, step.graph
    made = {v for n in cloned for v in source[n].outvars}
    found: list[Var] = []
    waits: set[Var] = set()

    def is_small(var: Var) -> bool:
        # XLA:CPU launches nothing, and what it does early costs memory: a UNet at a third has no plan.
        return graph.backend.fuses_reductions and aval_nbytes(var.aval) <= graph.small_nbytes

    def hold_back(n: int) -> None:
        """Hold what a clone reads, however small, or what the small clone that it reads is made of."""
        operands = _compat.variables(source[n].invars)
        inner = [a for a in operands if a in step.value_of and a not in made]
        cloned_too = [a for a in operands if a in made]
        if inner or not cloned_too:
            found.extend(inner or operands)
        else:
            hold_back(step.maker(cloned_too[0]))
        waits.update(source[n].outvars)

    # What is small may be made early, and behind a barrier it, or its row, would have a kernel of its own.
    for n in cloned:
        if is_loop_edge(source[n]):
            waits.update(source[n].outvars)
            continue
        operands = _compat.variables(source[n].invars)
        large = [a for a in operands if a in step.value_of and a not in made and not is_small(a)]
        if large or not waits.isdisjoint(operands):
            found.extend(large)
            waits.update(source[n].outvars)
        elif not all(map(is_small, source[n].outvars)):
            hold_back(n)
    entering = [n for n in step.own[k] if graph.nodes[n].loop != loop and step.entered(n)]
    starts = (a for n in entering for a in _compat.variables(source[n].invars) if a in step.value_of)
    found.extend(a for a in starts if step.place[step.maker(a)] < k)

    def there_before(var: Var) -> bool:
        """Return whether it is saved, held or an argument: the compiler could copy it to another layout long
        before.
        """
        v = step.value_of.get(var)
        held = var in step.handed_on[k] or v in step.schedule.saved
        return v is None or (held and graph.stage_of[step.maker(var)] < k)

    def is_due(var: Var) -> bool:
        """Return whether what makes it waits for a barrier, behind which it is made then."""
        return var in step.value_of and step.maker(var) in waiting

    here = [n for n in step.own[k] if graph.nodes[n].loop == loop]
    for n in here:
        operands = _compat.variables(source[n].invars)
        found.extend(a for a in operands if step.hazards.early(n, a) and there_before(a))
    made.update(arriving)
    hold = [a for a in dict.fromkeys(found) if a not in made and _can_pass(a) and not is_due(a)]
    filled = any(step.hazards.fills(n) for n in (*here, *cloned))
    if entering or (filled and graph.backend.materialises_eagerly):
        hold.append(ZERO)  # what loops fill, any compiler begins early
    return hold


def _arriving(step: Analysis, k: int) -> set[Var]:
    """Return what comes back from host memory behind the barrier of a stage."""
    copies = (copy for copy in step.schedule.offloaded if not step.graph.values[copy.value].length)
    return {step.variable[copy.value] for copy in copies if copy.begun == k}


def _is_written_over(step: Analysis, var: Var) -> bool:
    """Return whether a part of it is written over: behind a barrier it would be copied for that."""
    return any(is_write(step.source[n]) for n in step.readers.get(var, ()))


def _triggers(step: Analysis, k: int) -> list[Var]:
    """Return what must be finished before stage `k` may begin.

    The compiler drops a barrier's operands whose results nobody reads, so each has readers behind the barrier: the
    updates that wait for it, or the step's result. Where no small result has any, a cotangent passes.
    """
    graph, start = step.graph, step.graph.stages[k].start
    if k == 0:
        before = range(max(start - 1, 0), start)
        loss = [v for n in before for v in step.source[n].outvars if v in step.returned]
        return [v for v in step.cotangents or loss if _can_pass(v)]
    before = graph.stages[k - 1].start
    found = _finished(step, k)

    def counts(n: int) -> bool:
        return not graph.nodes[n].forward or made_later(step.passes, n) is not None

    contractions = [n for n in range(before, start) if graph.nodes[n].contraction and counts(n)]
    last = contractions[-1] if contractions else before
    if any(step.maker(v) >= last for v in found):
        return found
    behind_pass = bool(contractions) and graph.nodes[last].forward
    place = step.place if graph.backend.fuses_reductions or behind_pass else graph.stage_of
    waiting = step.waiting(k)
    crossing = [
        v
        for n in range(last, start)
        if counts(n) and n not in waiting and step.place[n] < k
        for v in step.source[n].outvars
        if _can_pass(v)
        and step.home(v) == graph.around(start)
        and (v in step.returned or any(place[m] >= k for m in step.readers.get(v, ())))
        and graph.values[step.value_of[v]].materialised
    ]
    if behind_pass:
        crossing = _end_of_pass(step, last, crossing)
    return [*found, *crossing[:1]]


def _end_of_pass(step: Analysis, last: int, crossing: Sequence[Var]) -> list[Var]:
    """Return of what crosses a barrier right behind a forward pass what its last contraction leads to, the smallest
    first.
    """
    reached: set[Var] = set()
    for eqn in step.source[last : step.maker(crossing[-1]) + 1] if crossing else ():
        if not reached or not reached.isdisjoint(_compat.variables(eqn.invars)):
            reached.update(eqn.outvars)
    return sorted((v for v in crossing if v in reached), key=lambda v: aval_nbytes(v.aval))


def _finished(step: Analysis, k: int) -> list[Var]:
    """Return what earlier stages have finished and readers behind the barrier of stage `k` wait for.

    A value passes the barrier after its stage, and those up to the one that its deferred readers wait for.
    """
    stages = step.graph.stages
    around = step.graph.around(stages[k].start) if k < len(stages) else -1
    waiting = step.waiting(k)
    return [
        var
        for var, j in ((step.variable[v], j) for j in range(k) for v in stages[j].finished)
        for readers in (step.readers.get(var, ()),)
        if step.home(var) == around
        and not _is_added_up(step, var)
        and (
            any(n in waiting for n in readers)
            or (j == k - 1 and (var in step.returned or any(step.place[n] >= k for n in readers)))
        )
    ]


def _is_added_up(step: Analysis, var: Var) -> bool:
    """Return whether a value is let pass because devices may add it up, as products and sums (see `_emit.COMBINED`)."""
    eqn = step.source[step.maker(var)] if step.combined and step.maker(var) >= 0 else None
    if eqn is not None and is_relabelling(eqn):
        operands = [a for a in _compat.variables(eqn.invars) if a in step.value_of]
        return bool(operands) and _is_added_up(step, operands[0])
    return eqn is not None and (is_product(eqn) or eqn.primitive.name == "reduce_sum")


def _last_products(step: Analysis) -> dict[Var, int]:
    """Return by donated argument the last product that reads it before it is updated, in the same stage."""
    jaxpr, graph = step.traced.jaxpr.jaxpr, step.graph
    donated = {v for v, d in zip(jaxpr.invars, step.traced.donated, strict=True) if d}
    if not donated or not graph.backend.fuses_reductions or graph.loop_stop:
        return {}
    updated = {a: n for n in step.updates for a in _compat.variables(step.source[n].invars) if a in donated}
    last: dict[Var, int] = {}
    for n in range(graph.forward_stop, len(graph.nodes)):
        if graph.nodes[n].primitive == "dot_general":
            read = map(step.root, _compat.variables(step.source[n].invars))
            last.update((a, n) for a in read if a in updated and step.place[updated[a]] == step.place[n])
    return last


def _added_up(step: Analysis, n: int) -> int:
    """Return the last sum in the same stage that a product goes into, and nothing else reads the product."""
    while step.traced.source.devices > 1:
        (made,) = step.source[n].outvars
        readers = step.readers.get(made, ())
        if len(readers) != 1 or readers[0] in step.updates or step.place[readers[0]] != step.place[n]:
            break
        eqn = step.source[readers[0]]
        if eqn.primitive.name not in SUMS and not is_relabelling(eqn):
            break
        (n,) = readers
    return n
