"""Traced step -> the buffers that XLA writes to memory for each of its equations.

The plain step is compiled once with each equation's index in its name stack (`#12`). XLA carries name stacks through
its passes as `op_name`, so that each kernel of the compiled program names the equations whose results it writes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.extend.core as jex

from .._model._graph import Backend
from .._program import _compat
from .._program._primitives import is_loop_edge
from .._rewrite._flat_program import with_eqns
from .._rewrite._kernel_choice import inline, replaced
from .._rewrite._trace import Traced
from ._hlo import (
    CONTROL,
    FREE,
    Instruction,
    Module,
    executed,
    is_scatter_loop,
    maker,
    materialised,
    results,
    sent_nbytes,
)


class Kernel(NamedTuple):
    """A kernel of the compiled program: the equations whose buffers it writes, and those whose buffers it reads;
    `single` if it computes one result, and the compiler fuses no other computation into it.
    """

    writes: frozenset[int]
    reads: frozenset[int]
    single: bool = False

    def renumbered(self, place: Mapping[int, int]) -> "Kernel":
        """Return the same with other equation indices; equations without a new one are left out."""
        writes, reads = (frozenset(place[i] for i in each if i in place) for each in self[:2])
        return Kernel(writes, reads, self.single)


@dataclass(frozen=True, slots=True)
class Written:
    """The compiled program's use of memory, by equation index.

    **Fields:** `sizes` in bytes of the buffers that kernels write for each equation; `kernels` the kernels that read
    any such buffer; `loops` whose iterations are included; `summed` and `gathered`, by equation, the bytes that a
    device sends to others to add up parts of a sum, and for other purposes.
    """

    sizes: Mapping[int, tuple[int, ...]]
    kernels: tuple[Kernel, ...]
    loops: frozenset[int] = frozenset()
    summed: Mapping[int, int] = field(default_factory=dict)
    gathered: Mapping[int, int] = field(default_factory=dict)

    def renumbered(self, place: Mapping[int, int]) -> "Written":
        """Return the same with other equation indices; equations without a new one are left out."""
        sizes = {place[i]: sizes for i, sizes in self.sizes.items() if i in place}
        kernels = (kernel.renumbered(place) for kernel in self.kernels)
        kernels = tuple(kernel for kernel in kernels if kernel.reads)
        sent = ({place[i]: n for i, n in each.items() if i in place} for each in (self.summed, self.gathered))
        return Written(sizes, kernels, self.loops, *sent)

    def decoded(self, place: Mapping[int, int]) -> "Written":
        """Return the same with kernels that read results of other, equally large equations in place of these.

        **Arguments:** `place` the other equation of each.
        """
        sizes = {**self.sizes, **{j: self.sizes[i] for i, j in place.items() if i in self.sizes}}
        kernels = (k._replace(reads=frozenset(place.get(i, i) for i in k.reads)) for k in self.kernels)
        return replace(self, sizes=sizes, kernels=tuple(kernels))

    def also(self, loop: int, iteration: "Written") -> "Written":
        """Return the same with all kernels of a loop's iterations, by the same indices."""
        return replace(self.with_(iteration), loops=self.loops | {loop})

    def with_(self, iteration: "Written") -> "Written":
        """Return the same with some kernels of a loop's iterations, by the same indices."""
        sizes, kernels = {**self.sizes, **iteration.sizes}, (*self.kernels, *iteration.kernels)
        sent = {**self.summed, **iteration.summed}, {**self.gathered, **iteration.gathered}
        return Written(sizes, kernels, self.loops, *sent)


TAG = re.compile(r"#(\d+)(?:[/)]|$)")
SEVERAL = re.compile(
    r"#(\d+)(?=[/):]|$)"
)  # an operation that the compiler combines from several has the tags of all of them


def tagged(traced: Traced, backend: Backend) -> jex.ClosedJaxpr:
    """Return the plain step's flat jaxpr, with the index of each equation's counterpart in `traced.jaxpr` in its name
    stack. Equations that plans for this compiler replace are replaced here too.
    """
    flat, needs_replacement = traced.flat, replaced(backend)
    eqns = []
    for eqn, origin in zip(flat.jaxpr.eqns, traced.origin, strict=True):
        named = eqn if origin < 0 else _compat.in_scope(eqn, f"#{origin}")
        eqns.extend(inline(named) if needs_replacement(eqn) else [named])
    return _compat.new_jaxpr(flat.jaxpr.constvars, flat.consts, flat.jaxpr.invars, flat.jaxpr.outvars, eqns)


def numbered(traced: Traced) -> Traced:
    """Return a step with the index of each equation outside of its loops in its name stack."""
    eqns = [
        eqn if loop >= 0 or is_loop_edge(eqn) else _compat.in_scope(eqn, f"#{i}")
        for i, (eqn, loop) in enumerate(zip(traced.jaxpr.jaxpr.eqns, traced.loop_of, strict=True))
    ]
    return replace(traced, program=traced.program.with_same(with_eqns(traced.jaxpr, eqns)))


def written(module: Module) -> Written:
    """Return the buffers that kernels write for the tagged equations, and the kernels that read them."""
    kernels = []
    summed: Counter[int] = Counter()
    gathered: Counter[int] = Counter()
    for computation in executed(module):
        scope = computation.by_name()
        for instruction in computation.instructions:
            read = sum(scope[operand].nbytes for operand in instruction.operands)
            made = sum(shape.nbytes for shape in results(instruction))
            if nbytes := sent_nbytes(instruction.opcode, read, made):
                kind = summed if "reduce" in instruction.opcode else gathered
                own = {int(tag) for tag in SEVERAL.findall(instruction.op_name)}
                kind.update(dict.fromkeys(own, nbytes // max(len(own), 1)))
            if instruction.opcode in FREE | (CONTROL - {"while", "call"}):
                continue
            if instruction.opcode in CONTROL and not is_scatter_loop(instruction):
                continue
            if instruction.opcode.endswith("-done"):
                continue
            reads = _makers(module, scope, (scope[operand] for operand in instruction.operands))
            if reads:
                single = "kind=kCustom" in instruction.attributes
                kernels.append(Kernel(_makers(module, scope, [instruction]), reads, single))
    sizes = {int(tag): sizes for tag, sizes in materialised(module, TAG).items()}
    return Written(sizes, tuple(kernels), summed=summed, gathered=gathered)


def _makers(module: Module, scope: Mapping[str, Instruction], made: Iterable[Instruction]) -> frozenset[int]:
    """Return the tagged equations of these instructions' buffers."""
    found = (maker(module, TAG, scope, each, leaf) for each in made for leaf in range(len(each.shapes)))
    return frozenset(int(tag) for tag in found if isinstance(tag, str))
