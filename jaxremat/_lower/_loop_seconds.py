"""Compiled plain step, iterations compiled alone -> how much longer the loops of a form take than those of the step.

Counted is what they take where they stack nothing and find all saved: what a plan saves in them and recomputes has
prices of its own. An optimizer's updates that a form moves into its loops are no longer made outside of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._compiler._attribution import Values, purposes
from .._compiler._devices import DeviceSpec
from .._compiler._hlo import CONTROL, NAMES, Instruction, Module, maker
from .._compiler._roofline import kernels, roofline, seconds_of
from .._compiler._tags import TAG
from .._model._graph import Graph
from .._model._loop_levels import deep
from .._model._total_trips import total_trips
from .._model._variant import Variant
from .._rewrite._flat_program import ALONE, FORWARD, Loop
from .._rewrite._trace import Traced
from ._iteration import Iteration
from ._iteration_buffers import kernel_of
from ._kernel_prices import repriced

Alone = Mapping[int, tuple[Iteration, Module]]
"""Iterations by loop, and what becomes of each compiled alone."""


def known(loops: Sequence[Loop], form: Variant) -> bool:
    """Whether iterations alone say what a form's loops take: there are loops, and no others with loops in them than
    those that levels make.
    """
    inner = any(loop.role == ALONE or loop.parent >= 0 for loop in loops)
    return bool(loops) and (not inner or deep(form))


def looped_seconds(graph: Graph, traced: Traced, alone: Alone, device: DeviceSpec) -> float:
    """Seconds of all iterations of the form's loops, with a kernel each that counts them.

    Levels run a forward pass once more for each loop around its own, and in the forward pass.
    """
    trips, taken = _trips_of(traced), 0.0
    for i, (_, module) in alone.items():
        around, loop = -bool(traced.microbatches), traced.loops[i]
        while loop.parent >= 0:
            around, loop = around + 1, traced.loops[loop.parent]
        once = roofline(module, device).seconds + device.launch_seconds
        taken += trips[i] * once * (1 + around * (traced.loops[i].role == FORWARD))
    return taken - math.fsum(_copied(graph, traced, alone, device).values())


def with_seconds(graph: Graph, traced: Traced, alone: Alone, device: DeviceSpec) -> Graph:
    """The graph where running kernels of forward loops again costs what they take in an iteration, and saving values
    what copying them into another layout takes besides.
    """
    trips = _trips_of(traced)
    seconds: dict[int, float] = {}
    for i, (iteration, module) in alone.items():
        if traced.loops[i].role == FORWARD:
            near = kernel_of(graph, [node for node in graph.nodes if node.loop == i])
            for n, taken in spent(module, device).seconds.items():
                at = near[iteration.places[n]]
                seconds[at] = seconds.get(at, 0.0) + trips[i] * taken
    graph = repriced(graph, traced.jaxpr.jaxpr.eqns, seconds)
    more = _copied(graph, traced, alone, device)
    values = (replace(v, saved_seconds=v.saved_seconds + more.get(v.id, 0.0)) for v in graph.values)
    return replace(graph, values=tuple(values))


def _copied(graph: Graph, traced: Traced, alone: Alone, device: DeviceSpec) -> dict[int, float]:
    """What backward loops spend on copies of what may be saved for them, by value."""
    jaxpr, trips = traced.jaxpr.jaxpr, _trips_of(traced)
    made = (v for eqn in jaxpr.eqns for v in eqn.outvars)
    number = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars, *made))}
    found: dict[int, float] = {}
    for i, (iteration, module) in alone.items():
        for argument, taken in spent(module, device).copying.items():
            v = (
                number.get(iteration.arguments[argument - iteration.written])
                if argument >= iteration.written
                else None
            )
            if v is not None and graph.values[v].saved_seconds:
                found[v] = found.get(v, 0.0) + trips[i] * taken
    return found


@dataclass(frozen=True)
class Spent:
    """Where an iteration's time goes. **Fields:** `seconds` by the index in the equations' name stacks; `copying` by
    the number of the argument that is copied as it is, or in another layout, -1 for rows of arrays: whoever reads
    them again reads that copy.
    """

    seconds: Mapping[int, float]
    copying: Mapping[int, float]


def spent(module: Module, device: DeviceSpec) -> Spent:
    """What the kernels of an iteration are for: of several equations they are for each in equal parts."""
    entry = module.computations[module.entry]
    own = purposes(module, entry, Values({}, {}))
    copies: dict[int, int] = {}
    scope = entry.by_name()
    for life, _ in own.extras:
        made = life.buffer.instruction
        made_of = maker(module, TAG, scope, made, life.buffer.element)
        if isinstance(made_of, tuple):
            copies[life.born] = made_of[0]
        elif made_of is None and all(scope[name].opcode == "parameter" for name in made.operands):
            copies[life.born] = -1
    place = {each.name: position for position, each in enumerate(entry.instructions)}
    seconds: dict[int, float] = {}
    copying: dict[int, float] = {}
    for kernel in kernels(module):
        position = place.get(kernel.instruction.name, -1) if kernel.computation == module.entry else -1
        taken = kernel.total_trips * seconds_of(kernel, device)
        if position in copies:
            copying[copies[position]] = copying.get(copies[position], 0.0) + taken
            continue
        tags = (
            own.wanted[position] if position >= 0 else set(map(int, TAG.findall(kernel.instruction.op_name)))
        )
        for n in tags:
            seconds[n] = seconds.get(n, 0.0) + taken / len(tags)
    return Spent(seconds, copying)


def plain_seconds(module: Module, device: DeviceSpec) -> float:
    """Seconds of the plain program's pairs of loops, with what fills their stacks: those loops have no tag."""
    entry = module.computations[module.entry]
    scope = entry.by_name()
    bodies: set[str] = set()
    begun: set[str] = set()
    for instruction in entry.instructions:
        if instruction.opcode == "while" and not TAG.search(instruction.op_name):
            bodies.update(_within(module, instruction))
            begun.update(_read_by(scope, instruction))
    return math.fsum(
        kernel.total_trips * seconds_of(kernel, device)
        for kernel in kernels(module)
        if kernel.computation in bodies
        or (
            kernel.instruction.name in begun and kernel.computation == module.entry and not kernel.read_nbytes
        )
    )


def moved_seconds(
    module: Module, places: Mapping[int, int], device: DeviceSpec, *, most: bool = False
) -> float:
    """Seconds of the plain program's kernels outside of pairs of loops that only make what a form makes otherwise.

    **Arguments:** `places` for the equations that the form has too, by index, what they are there; `most` whether that
    makes most of the step within, and so what is of no equation.
    """
    entry = module.computations[module.entry]
    scope = entry.by_name()

    def gone(instruction: Instruction) -> bool:
        makers = [maker(module, TAG, scope, instruction, leaf) for leaf in range(len(instruction.shapes))]
        return all(int(tag) not in places if isinstance(tag, str) else most for tag in makers)

    bodies: set[str] = set()  # of loops that are gone as a whole
    for instruction in entry.instructions:
        tags = TAG.findall(instruction.op_name) if instruction.opcode == "while" else []
        if tags and all(int(tag) not in places for tag in tags):
            bodies.update(_within(module, instruction))
    return math.fsum(
        kernel.total_trips * seconds_of(kernel, device)
        for kernel in kernels(module)
        if kernel.computation in bodies
        or (kernel.computation == module.entry and kernel.instruction.shapes and gone(kernel.instruction))
    )


def _within(module: Module, instruction: Instruction) -> set[str]:
    """The computations that run as part of an instruction."""
    found: set[str] = set()
    for name in instruction.callees:
        inside = (each for each in module.computations[name].instructions if each.opcode in CONTROL)
        found.update({name}, *(_within(module, each) for each in inside))
    return found


def _read_by(scope: Mapping[str, Instruction], instruction: Instruction) -> set[str]:
    """Whose buffers an instruction reads, behind mere names."""
    found: set[str] = set()
    waiting = list(instruction.operands)
    while waiting:
        each = scope[waiting.pop()]
        if each.opcode in NAMES:
            waiting.extend(each.operands)
        else:
            found.add(each.name)
    return found


def _trips_of(traced: Traced) -> tuple[int, ...]:
    """How often the body of each loop runs in one step."""
    return total_trips([loop.length for loop in traced.loops], [loop.parent for loop in traced.loops])
