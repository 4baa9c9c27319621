"""Compiled plain step, iterations compiled alone -> how much longer the loops of a form take than those of the step.

Counted is what they take where they stack nothing and find all saved: what a plan saves in them and recomputes has
prices of its own. An optimizer's updates that a form moves into its loops are no longer made outside of them.
"""

import math
from collections.abc import Mapping, Sequence

from .._compiler._devices import DeviceSpec
from .._compiler._hlo import CONTROL, NAMES, Instruction, Module, maker
from .._compiler._roofline import kernels, roofline, seconds_of
from .._compiler._tags import TAG
from .._model._graph import Graph
from .._model._loop_levels import deep
from .._model._variant import Variant
from .._rewrite._flat_program import ALONE, FORWARD, Loop
from .._rewrite._trace import Traced


def known(loops: Sequence[Loop], form: Variant) -> bool:
    """Whether iterations alone say what a form's loops take: there are loops, and no others with loops in them than
    those that levels make.
    """
    inner = any(loop.role == ALONE or loop.parent >= 0 for loop in loops)
    return bool(loops) and (not inner or deep(form))


def looped_seconds(graph: Graph, traced: Traced, alone: Mapping[int, Module], device: DeviceSpec) -> float:
    """Seconds of all iterations of the form's loops, with a kernel each that counts them.

    Levels run a forward pass once more for each loop around its own, and in the forward pass.
    """
    taken = 0.0
    for i, module in alone.items():
        around, loop = len(graph.within(i)) - 1 - bool(traced.microbatches), traced.loops[i]
        once = roofline(module, device).seconds + device.launch_seconds
        taken += graph.total_trips[i] * once * (1 + around * (loop.role == FORWARD))
    return taken


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
