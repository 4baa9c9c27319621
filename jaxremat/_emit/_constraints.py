"""Step, graph, schedule -> the orderings that the planned step enforces with barriers, as data.

The compiler starts an operation as soon as its operands are ready, and delays operations whose results nobody waits
for. Each rule in `RULES` finds where that would keep more in memory than the schedule allows, and returns constraints.
`_writer` writes the constraints of one point as one barrier.

A barrier stands at the start of each stage of the backward pass and delays the stage's recomputation:

- *operands* are the values that pass it to be read later: saved and kept values that clones read, and the saved values
  and arguments that the stage's own contractions read, which the compiler would otherwise copy into another layout long
  before. Other readers keep the original names, so that no other kernel is cut in two. A clone's arguments pass only if
  it reads nothing else. On a GPU, small values do not pass: kernels compute them, or read their row of a stack, in
  place.
- *triggers* are the values that must be computed first: small results of the previous stage, such as weight gradients
  and reductions. They pass on their way to the optimizer, whose updates wait for the barrier (*updates*). Only if none
  of them is late enough does a cotangent pass, because the barrier cuts it off from the kernels that read it.
- In a loop of the backward pass everything happens within an iteration. An iteration starts without a barrier, because
  it waits for the previous one; the first waits for a barrier through which the loop's carries pass.

Other rules place barriers beside single equations: *blocks*, *last reads*, *masks*, *pieces*.
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
"""A constant zero that passes a barrier, so that arrays filled with it are allocated behind the barrier."""


class Point(NamedTuple):
    """The place of a barrier: before or behind an equation, at the start of a stage (the one past the last is the end
    of the step), or inside the loop with which a stage starts.
    """

    where: Literal["before", "behind", "stage", "within"]
    number: int


@dataclass(frozen=True)
class Constraint:
    """An ordering: some equations may read some values only after other values have been computed.

    Points whose constraints are all empty have no barrier.

    **Fields:**

    - `at`: the barrier's place.
    - `hold`: the values that pass the barrier to delay their readers. `readers`: for each delayed equation, the values
      that it reads by their names behind the barrier; None delays every later reader.
    - `until`: the values that must have been computed. Every later equation reads them by their names behind the
      barrier, because the compiler drops a barrier's operand if nothing reads the result.
    - `why`: the rule's name.
    """

    at: Point
    hold: Sequence[Var] = ()
    until: Sequence[Var] = ()
    readers: Mapping[int, Sequence[Var]] | None = field(default_factory=dict)
    why: str = ""


Rule = Callable[[Analysis], list[Constraint]]


def constraints(step: Analysis) -> list[Constraint]:
    """Return the constraints of all rules that are not switched off."""
    return [each for rule in RULES.values() for each in rule(step)]


def operands(step: Analysis) -> Iterator[Constraint]:
    """Delay each stage's recomputation, and the loops that it starts, until the previous stage has finished."""
    graph = step.graph
    for k, stage in enumerate(graph.stages):
        loop, around = graph.nodes[stage.start].loop, graph.around(stage.start)
        inside = [n for n in step.own[k] if graph.nodes[n].loop == loop]
        outside = [n for n in step.own[k] if graph.nodes[n].loop != loop]
        waiting, deferred = step.waiting(k), set(stage.deferred)
        outer = [*(n for n, until in waiting.items() if until <= k), *outside]
        inner = [n for n in inside if n not in deferred and n not in waiting]
        # The barrier before a loop's first stage delays the whole loop, not the recomputation in its iterations.
        begins = loop != around
        hold = _held(step, k, [] if begins else step.cloned[k], around, waiting, _arriving(step, k))
        # The compiler unrolls a loop of one iteration. Its carries then delay only what depends on them, and the
        # recomputation would merge with the forward pass. So the iteration needs a barrier of its own.
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
    """Delay the user's own copies to the device until the stage that contains them.

    Without this rule the optimizer state of unrolled layers is on the device all at once, and budgets that were met are
    refused. For scanned layers it saves little and costs time: 6 points of a small GPT's step.
    """
    for k in range(len(step.graph.stages)):
        readers = {n: step.operands(n) for n in step.fetches if step.place[n] == k}
        yield Constraint(
            Point("stage", k), [a for read in readers.values() for a in read], (), readers, "fetches"
        )


def triggers(step: Analysis) -> Iterator[Constraint]:
    """Name the results of the previous stage for which each stage's barrier waits."""
    for k in range(len(step.graph.stages)):
        yield Constraint(Point("stage", k), until=_triggers(step, k), why="triggers")


def updates(step: Analysis) -> Iterator[Constraint]:
    """Delay deferred updates until the barrier that releases them; the last ones until the end of all stages."""
    stop = len(step.graph.stages)
    for k in range(stop):
        resumed: dict[int, Sequence[Var]] = {n: () for n, until in step.waiting(k).items() if until <= k}
        yield Constraint(Point("stage", k), readers=resumed, why="updates")
    left: dict[int, Sequence[Var]] = dict.fromkeys(step.waiting(stop), ())
    yield Constraint(
        Point("stage", stop), until=_finished(step, stop) if left else (), readers=left, why="updates"
    )


def blocks(step: Analysis) -> Iterator[Constraint]:
    """Delay the inversion of a reversible block until the last cotangent before it has been computed.

    The inversion reads no cotangent, so the compiler could run it long before its results are needed.
    """
    graph, source = step.graph, step.source
    members: dict[int, list[int]] = {}
    for n in range(graph.forward_stop, len(source)):
        if (block := block_of(source[n])) is not None:
            members.setdefault(block, []).append(n)
    undoing = {n for own in members.values() for n in own}

    def is_there(var: Var, before: int) -> bool:
        """Return whether a variable, not an argument, is in memory before an equation."""
        if var not in step.value_of:
            return False
        value = graph.values[step.value_of[var]]
        return 0 <= value.producer < before and value.materialised and not graph.is_small(value.id)

    def cotangent(before: int) -> Var | None:
        """Return the last value that the backward pass computes before an equation and reads behind it."""
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
    """Delay the update of a donated argument until the last matrix product of its stage has read the argument.

    A stage reads a weight for the gradient of its input, and overwrites it with the update, in no given order. XLA:GPU
    then copies the weight before the step, or the updated weight at its end, and keeps the copy for most of the step.
    So the weight passes a barrier together with that product's result: the weight on its way to its update, the result
    on its way to its readers. Both are in memory anyway.

    On several devices a product may be a partial sum that XLA adds up across devices. XLA adds up the total of several
    products only once, so there the total passes the barrier.

    Convolutions are excluded: libraries copy their weights into another layout in any case.
    """
    last = _last_products(step)
    found: dict[int, list[Var]] = {}
    for a, n in last.items():
        found.setdefault(_added_up(step, n), []).append(a)
    waiting, held = set(last), list[int]()
    for n in sorted(step.updates):  # an update's equations, from the first that reads such an argument
        if not waiting.isdisjoint(_compat.variables(step.source[n].invars)):
            held.append(n)
            waiting.update(step.source[n].outvars)
    for n, arguments in found.items():
        readers = {m: [a for a in step.operands(m) if a in arguments] for m in held}
        yield Constraint(Point("behind", n), arguments, step.source[n].outvars, readers, why="last reads")


def masks(step: Analysis) -> Iterator[Constraint]:
    """Keep XLA from computing a mask from the operand of a saved result (see `_masks`).

    XLA recognises `max(x, 0) > 0`, computes it from `x` in the kernels that read the mask, and keeps `x` in memory for
    them. Behind a barrier it must use the saved result. That costs nothing: the result is in memory, and all other
    readers read it before the barrier. The rule covers masks that the backward pass's kernels compute from a result
    saved on the device. Loops of the backward pass need no barrier: they read the result from a stack.
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
    """Delay the readers of a split value's pieces until all pieces have been written.

    The compiler computes a piece inside the kernel that reads it, and keeps the whole value until then. The half of a
    gradient that follows a skip connection is read late: a UNet at minimum memory needed 0.92 GB of temporaries instead
    of 0.75. Writing the pieces takes time, so the rule applies only where the whole value would raise the schedule's
    peak.
    """
    graph, schedule = step.graph, step.schedule
    found = [n for n in range(graph.forward_stop, len(graph.nodes)) if _outlived(step, n)]
    if not found:
        return
    profile = simulate(graph, schedule)
    lives = {life.value: life for life in profile.lives if life.stage < 0}
    live = np.array(profile.runs[2])  # live bytes with each whole value in place of its pieces
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
    """Return whether an equation is a split that reads its operand last, with pieces read in different stages."""
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
    """Return the rule as a mechanism that can be switched off; it drops empty constraints."""

    def found(step: Analysis) -> list[Constraint]:
        return [each for each in find(step) if each.hold or each.until or each.readers]

    return mechanism(f"barriers: {name}", off=lambda _: [])(found)


RULES: Mapping[str, Rule] = {
    (name := find.__name__.replace("_", " ")): _rule(name, find)
    for find in (operands, fetches, triggers, updates, blocks, last_reads, masks, pieces)
}
"""The rules by name, in the order of their operands in a barrier."""


def _can_pass(var: Var) -> bool:
    """Return whether a variable is an array."""
    return hasattr(var.aval, "dtype")


def _readers(
    step: Analysis,
    hold: Collection[Var],
    clones: Sequence[int],
    own: Sequence[int],
    filling: Sequence[int] | None = None,
) -> dict[int, Sequence[Var]]:
    """Return for each delayed equation the values that it reads behind a barrier.

    **Arguments:** `hold` the values that pass; `clones` the equations that are cloned, `own` those that run in their
    original place; `filling` those that may fill arrays with the zero that passes, by default all.
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
    """Return the values that pass the barrier of stage `k` in a loop, -1 for none, to delay their readers.

    With them, no large clone can be computed before the barrier, and no operand of the stage's own contractions be
    copied into another layout. Small clones may be computed before it where the compiler fuses reductions.

    **Arguments:** `cloned` the equations that the stage clones; `waiting` the equations that wait for this or another
    barrier; `arriving` the values that are copied back from host memory behind it.
    """
    source, graph = step.source, step.graph
    made = {v for n in cloned for v in source[n].outvars}
    found: list[Var] = []
    waits: set[Var] = set()

    def is_small(var: Var) -> bool:
        # XLA:CPU launches no kernels, and early work costs memory: without this a UNet at a third has no plan.
        return graph.backend.fuses_reductions and aval_nbytes(var.aval) <= graph.small_nbytes

    def hold_back(n: int) -> None:
        """Let a clone's operands pass, however small; for an operand that is a small clone, its operands."""
        operands = _compat.variables(source[n].invars)
        inner = [a for a in operands if a in step.value_of and a not in made]
        cloned_too = [a for a in operands if a in made]
        if inner or not cloned_too:
            found.extend(inner or operands)
        else:
            hold_back(step.maker(cloned_too[0]))
        waits.update(source[n].outvars)

    # Small values may be computed early: behind a barrier each, or each row of a stack, would need its own kernel.
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
        """Return whether a variable is saved, handed on or an argument: the compiler could copy it to another layout
        long before.
        """
        v = step.value_of.get(var)
        held = var in step.handed_on[k] or v in step.schedule.saved
        return v is None or (held and graph.stage_of[step.maker(var)] < k)

    def is_due(var: Var) -> bool:
        """Return whether the equation that computes a variable waits for a barrier itself."""
        return var in step.value_of and step.maker(var) in waiting

    here = [n for n in step.own[k] if graph.nodes[n].loop == loop]
    for n in here:
        operands = _compat.variables(source[n].invars)
        found.extend(a for a in operands if step.hazards.early(n, a) and there_before(a))
    made.update(arriving)
    hold = [a for a in dict.fromkeys(found) if a not in made and _can_pass(a) and not is_due(a)]
    filled = any(step.hazards.fills(n) for n in (*here, *cloned))
    if entering or (filled and graph.backend.materialises_eagerly):
        hold.append(ZERO)  # every compiler allocates the arrays that loops fill early
    return hold


def _arriving(step: Analysis, k: int) -> set[Var]:
    """Return the values that are copied back from host memory behind the barrier of a stage."""
    copies = (copy for copy in step.schedule.offloaded if not step.graph.values[copy.value].length)
    return {step.variable[copy.value] for copy in copies if copy.begun == k}


def _is_written_over(step: Analysis, var: Var) -> bool:
    """Return whether an equation overwrites a part of a variable: behind a barrier that would need a copy."""
    return any(is_write(step.source[n]) for n in step.readers.get(var, ()))


def _triggers(step: Analysis, k: int) -> list[Var]:
    """Return the values that must have been computed before stage `k` starts.

    The compiler drops a barrier's operand if nothing reads the result, so each of them has a reader behind the barrier:
    an update that waits for it, or the step's result. If no small result has one, a cotangent passes.
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
    """Return the values that follow from the last contraction of a forward pass and cross the barrier right behind it,
    the smallest first.
    """
    reached: set[Var] = set()
    for eqn in step.source[last : step.maker(crossing[-1]) + 1] if crossing else ():
        if not reached or not reached.isdisjoint(_compat.variables(eqn.invars)):
            reached.update(eqn.outvars)
    return sorted((v for v in crossing if v in reached), key=lambda v: aval_nbytes(v.aval))


def _finished(step: Analysis, k: int) -> list[Var]:
    """Return the results that earlier stages leave for readers behind the barrier of stage `k`.

    A value passes the barrier behind its stage, and all barriers up to the one that releases its deferred readers.
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
    """Return whether a value may be a partial sum that devices add up, which must not pass (see `_emit.COMBINED`)."""
    eqn = step.source[step.maker(var)] if step.combined and step.maker(var) >= 0 else None
    if eqn is not None and is_relabelling(eqn):
        operands = [a for a in _compat.variables(eqn.invars) if a in step.value_of]
        return bool(operands) and _is_added_up(step, operands[0])
    return eqn is not None and (is_product(eqn) or eqn.primitive.name == "reduce_sum")


def _last_products(step: Analysis) -> dict[Var, int]:
    """Return for each donated argument the last product in the stage of its update that reads it."""
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
    """Return the last equation of the sum in the same stage that is the only reader of a product."""
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
