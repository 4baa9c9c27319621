"""Sections of a pair of loops -> an iteration of each, compiled alone: what it writes, and how long it takes.

The plain loop stacks all that its pair reads: a softmax's exponentials, sums and maxima, which one kernel would else
keep to itself, and copies all of it into stacks and out of them. What an iteration must write and takes without that
says one that is compiled alone, with its equations tagged.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex

from . import _compat
from ._backend import Backend
from ._devices import DeviceSpec
from ._emit import FENCES, Emitter
from ._graph import Graph
from ._hlo import CONTROL, NAMES, Instruction, Module, parse
from ._implementations import inline, replaced
from ._loops import BACKWARD, FORWARD, Loop
from ._merge import merged
from ._primitives import is_loop_edge
from ._program import Program
from ._roofline import kernels, seconds_of
from ._schedule import Schedule
from ._sunk import sink
from ._tags import TAG
from ._trace import Traced


@dataclass(frozen=True)
class Iteration:
    """A program of one iteration: from all that it reads to the carries and the results that it leaves.

    **Fields:** `closed`, where the equation of index `places[j]` of the whole step has `#j` in its name stack.
    """

    closed: jex.ClosedJaxpr
    places: tuple[int, ...]

    @property
    def key(self) -> str:
        """What iterations that compile to the same program have in common."""
        return str(self.closed.jaxpr)

    def compiled(self, program: Program) -> Module:
        """What becomes of it, compiled as a whole program would be."""
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.closed.jaxpr.invars]
        alone = Program(program.fn, compiler_options=program.compiler_options, target=program.target)
        jitted = alone.jit(jex.jaxpr_as_fun(self.closed))
        return parse(alone.lower(jitted, tuple(types), {}).compile().as_text() or "")


def forward(traced: Traced, backend: Backend) -> dict[int, Iteration]:
    """Iterations of the forward loops that stack nothing, by loop."""
    wanted = {loop.id for loop in traced.loops if loop.role == FORWARD}
    named, places = _tagged(traced, wanted)
    return _iterations(named.jaxpr.jaxpr.eqns, traced.loop_of, traced.loops, places, backend)


def backward(traced: Traced, graph: Graph, backend: Backend) -> dict[int, Iteration]:
    """Iterations of the backward loops that find all saved that the forward pass writes, by loop."""
    wanted = {loop.id for loop in traced.loops if loop.role == BACKWARD}
    named, places = _tagged(traced, wanted)
    everything = Schedule(frozenset(graph.residuals), ((),) * len(graph.stages))
    emitter = Emitter(named, *merged(graph, everything), FENCES[0])
    emitter.run()
    return _iterations(emitter.eqns, emitter.loop_of, traced.loops, places, backend)


def _tagged(traced: Traced, wanted: Set[int]) -> tuple[Traced, dict[int, tuple[int, ...]]]:
    """The step with the equations of these loops numbered in their name stacks, and those of each loop."""
    eqns = list(traced.jaxpr.jaxpr.eqns)
    places: dict[int, list[int]] = {loop: [] for loop in wanted}
    for i, loop in enumerate(traced.loop_of):
        if loop in places and not is_loop_edge(eqns[i]):
            eqns[i] = _compat.in_scope(eqns[i], f"#{len(places[loop])}")
            places[loop].append(i)
    jaxpr = traced.jaxpr.jaxpr
    named = _compat.new_jaxpr(jaxpr.constvars, traced.jaxpr.consts, jaxpr.invars, jaxpr.outvars, eqns)
    return replace(traced, jaxpr=named), {loop: tuple(found) for loop, found in places.items()}


def _iterations(
    eqns: Sequence[Any],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    places: dict[int, tuple[int, ...]],
    backend: Backend,
) -> dict[int, Iteration]:
    """One iteration of each of these loops as a program."""
    sections: dict[int, list[Any]] = {loop: [] for loop in places}
    for eqn, loop in zip(*sink(eqns, loop_of, loops), strict=True):
        if loop in sections:
            sections[loop].append(eqn)
    return {loop: Iteration(_alone(sections[loop], replaced(backend)), places[loop]) for loop in places}


def _alone(section: Sequence[Any], poor: Any) -> jex.ClosedJaxpr:
    """A section's equations as a program, from what they read to what leaves the iteration."""
    inner = [eqn for eqn in section if not is_loop_edge(eqn)]
    leaving = [e.invars[0] for e in section if e.primitive.name in ("scan_last", "scan_stack")]
    made = {v for eqn in inner for v in eqn.outvars}
    read = [a for a in (*(a for e in inner for a in e.invars), *leaving) if not _compat.is_literal(a)]
    invars = [a for a in dict.fromkeys(read) if a not in made]
    eqns = [each for eqn in inner for each in (inline(eqn) if poor(eqn) else [eqn])]
    return _compat.new_jaxpr((), (), invars, leaving, eqns)


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
        kernel.trips * seconds_of(kernel, device)
        for kernel in kernels(module)
        if kernel.computation in bodies
        or (
            kernel.instruction.name in begun and kernel.computation == module.entry and not kernel.read_nbytes
        )
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
