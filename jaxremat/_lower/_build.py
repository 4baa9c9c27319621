"""Variant of a step, facts on the plain step -> `Graph`, by the values that XLA writes to memory.

It includes the extra time of the variant's loops: compiled plain step, separately compiled iterations -> seconds by
which they take longer than the plain step's. This compares loops that stack nothing and find all values saved, because
the graph prices a plan's saving and recomputation separately. Optimizer updates that a variant moves into its loops no
longer count outside of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from .._attention._operations import attends
from .._compiler._devices import DeviceSpec
from .._compiler._hlo import CONTROL, NAMES, Instruction, Module, maker
from .._compiler._roofline import kernels, roofline, seconds_of
from .._compiler._tags import TAG
from .._model._graph import Graph
from .._model._loop_levels import deep
from .._model._variant import REVERSED, Variant
from .._program._primitives import is_in_chunks
from .._rewrite._flat_program import FORWARD, UNPAIRED, Loop
from .._rewrite._trace import Traced
from ._facts import BaselineFacts
from ._iteration import Iteration, backward, forward, repeated
from ._kernel_prices import always_stacked_seconds
from ._lower import lower


def build_graph(traced: Traced, facts: BaselineFacts, otherwise: float | None = None) -> Graph:
    """Build the graph of a variant, in seconds of the tagged plain step.

    The values that backward loops write are read off an iteration of a step that saves everything; the saved values are
    determined by a graph that knows only the forward loops' iterations.

    **Arguments:** `otherwise` the seconds by which the variant takes longer than the tagged plain step, if its loops do
    not determine them; None to use the prices of stacks.
    """
    there, flops = facts.division.local(traced)
    workspace, seconds = facts.workspace(traced), facts.seconds(traced)
    both = repeated(traced, facts.backend)  # iterations that contain both passes
    written = facts.written(traced)
    for loop, iteration in both.items():
        written = written.also(loop, facts.written_in(iteration))

    def graph_with(iterations: Mapping[int, Iteration]) -> Graph:
        """Lower the step with the facts from these iterations of pairs of loops, and from earlier ones."""
        nonlocal written, workspace
        for loop, iteration in iterations.items():
            # A compiler that does not fuse reductions writes the values that the rules predict in pairs, and some more.
            add = partial(written.also, loop) if facts.backend.fuses_reductions else written.with_
            written = add(facts.written_in(iteration))
        workspace = workspace | facts.workspace_in(traced, iterations.values())
        return lower(
            there,
            facts.device,
            base_nbytes=facts.base_nbytes,
            written=written,
            workspace=workspace,
            seconds=seconds,
            flops=flops,
            patterns=facts.pins,
        )

    pairs = forward(traced, facts.backend)
    graph = graph_with(pairs)
    if traced.loops:
        behind = backward(traced, graph, facts.backend)
        graph = graph_with(behind)
        pairs |= behind
    if not facts.by_kernels:
        return graph
    more = longer_seconds(graph, traced, facts, pairs, both)
    more = otherwise if more is None else more
    return graph if more is None else replace(graph, extra_seconds=more)


def longer_seconds(
    graph: Graph,
    traced: Traced,
    facts: BaselineFacts,
    iterations: Mapping[int, Iteration],
    both: Mapping[int, Iteration],
) -> float | None:
    """Compute the extra seconds of a variant's loops over the tagged plain step's, if both stack nothing and find all
    values saved; None if not known.

    **Arguments:** `iterations` of pairs of loops; `both` iterations of loops that contain both passes.
    """
    variant, device = traced.form, facts.device
    if variant.settings(REVERSED):
        return None
    eqns = zip(facts.division.local(traced)[0].jaxpr.jaxpr.eqns, traced.loop_of, strict=True)
    apart = [eqn for eqn, loop in eqns if is_in_chunks(eqn) or (attends(eqn) and loop < 0)]
    if deep(variant):  # their forward passes are counted by their iterations
        apart = [eqn for eqn in apart if eqn.primitive.name != "scan" or is_in_chunks(eqn)]
    in_chunks = math.fsum(facts.alone_seconds(apart))
    looped = _known(traced.loops, variant) and _known(facts.plain.loops, facts.plain.form)
    if not (in_chunks or looped or traced.microbatches):
        return None
    moved = _moved_seconds(facts, facts.plain.places(traced), most=traced.microbatches > 0)
    if traced.microbatches:
        modules = {i: facts.compiled(iteration) for i, iteration in both.items()}
        in_chunks += traced.microbatches * math.fsum(_microbatch_seconds(traced, modules, device))
        looped = bool(facts.plain.loops)
    if not looped:
        return in_chunks - moved
    modules = {i: facts.compiled(iteration) for i, iteration in iterations.items()}
    taken = _looped_seconds(graph, traced, modules, device) + always_stacked_seconds(graph, device)
    return in_chunks + taken - moved - _plain_seconds(facts.module, device)


def _known(loops: Sequence[Loop], variant: Variant) -> bool:
    """Return whether iterations determine the time of a variant's loops: there are loops, and none is nested except by
    levels.
    """
    inner = any(loop.role == UNPAIRED or loop.parent >= 0 for loop in loops)
    return bool(loops) and (not inner or deep(variant))


def _microbatch_seconds(traced: Traced, both: Mapping[int, Module], device: DeviceSpec) -> Iterator[float]:
    """Yield the seconds of a microbatch in each of the loops over microbatches, without the pairs of loops in it."""
    for i, module in both.items():
        loop = traced.loops[i]
        if loop.parent < 0 and loop.length == traced.microbatches:
            yield roofline(module, device).seconds + device.launch_seconds - _plain_seconds(module, device)


def _looped_seconds(graph: Graph, traced: Traced, alone: Mapping[int, Module], device: DeviceSpec) -> float:
    """Return the seconds of all iterations of the variant's loops, each with one kernel that counts iterations.

    Each loop around a forward loop runs its forward pass once more, in the forward pass.
    """
    taken = 0.0
    for i, module in alone.items():
        around, loop = len(graph.within(i)) - 1 - bool(traced.microbatches), traced.loops[i]
        once = roofline(module, device).seconds + device.launch_seconds
        taken += graph.total_trips[i] * once * (1 + around * (loop.role == FORWARD))
    return taken


def _plain_seconds(module: Module, device: DeviceSpec) -> float:
    """Return the seconds of the plain program's pairs of loops, which have no tag, and of the kernels that fill their
    stacks.
    """
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


def _moved_seconds(facts: BaselineFacts, places: Mapping[int, int], *, most: bool) -> float:
    """Return the seconds of the plain program's kernels outside of pairs of loops that only compute values which the
    variant computes differently.

    **Arguments:** `places` the variant's index of each equation that it shares with the plain step; `most` whether the
    variant replaces most of the step, and so also kernels that belong to no equation.
    """
    module, device = facts.module, facts.device
    entry = module.computations[module.entry]
    scope = entry.by_name()

    def gone(instruction: Instruction) -> bool:
        makers = [maker(module, TAG, scope, instruction, leaf) for leaf in range(len(instruction.shapes))]
        return all(int(tag) not in places if isinstance(tag, str) else most for tag in makers)

    bodies: set[str] = set()  # of loops that the variant replaces entirely
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
    """Return the computations that run as part of an instruction."""
    found: set[str] = set()
    for name in instruction.callees:
        inside = (each for each in module.computations[name].instructions if each.opcode in CONTROL)
        found.update({name}, *(_within(module, each) for each in inside))
    return found


def _read_by(scope: Mapping[str, Instruction], instruction: Instruction) -> set[str]:
    """Return the instructions whose buffers an instruction reads, through renamings."""
    found: set[str] = set()
    waiting = list(instruction.operands)
    while waiting:
        each = scope[waiting.pop()]
        if each.opcode in NAMES:
            waiting.extend(each.operands)
        else:
            found.add(each.name)
    return found
