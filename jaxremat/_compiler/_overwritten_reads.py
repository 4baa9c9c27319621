"""Module -> kernels whose result XLA may write over an array that they still read under another name.

XLA writes a kernel's result into the buffer of an operand that is read for the last time there, if the kernel reads
that operand element by element. It checks only the operand that names the array's producer (`HeapSimulator`,
`CanShareOperandBufferWithUser`). The kernel may read the same array a second time, through an optimization barrier, at
other positions than it writes: the previous row, a slice, a transposed index. These entries may be overwritten already.
XLA:CPU and XLA:GPU of jax 0.10 and 0.11 both do this, with results that are wrong by any factor. To reproduce it (on
XLA:CPU with the pass `cse_barrier_expander` disabled):

    def f(x):
        v = jnp.exp(lax.sort(x, dimension=0))
        other = lax.sort(v, dimension=1)
        behind, _ = lax.optimization_barrier((v, other))
        before = jnp.pad(behind, ((1, 0), (0, 0)))[:-1]
        return (lax.sort(jnp.tanh(v - before), dimension=1)[:, ::3] ** 2).sum(), other.sum()

Invariant: a module without reported kernels has no such kernel. A reported one may still be correct: XLA decides.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ._hlo import FREE, NAMES, Computation, Instruction, Module, executed

_ELEMENTWISE = frozenset(
    {
        "abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "complex", "convert",
        "copy", "cosine", "divide", "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log",
        "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real",
        "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select",
        "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan",
        "tanh", "tuple", "xor",
    }
)  # fmt: skip
"""Operations in which each entry of the result reads the same entry of every operand."""


@dataclass(frozen=True, slots=True)
class OverwrittenRead:
    """A kernel that may overwrite an array that it still reads.

    **Fields:** `kernel` its name in the module; `barrier` the name stack of the barrier through which it reads the
    array a second time, "" without one; `position` of the array among the barrier's operands.
    """

    kernel: str
    barrier: str
    position: int


def overwritten_reads(module: Module) -> tuple[OverwrittenRead, ...]:
    """Return the kernels of a scheduled module that may overwrite arrays that they still read, in execution order."""
    return tuple(found for computation in executed(module) for found in _within(module, computation))


@dataclass(frozen=True, slots=True)
class _Origin:
    """The instruction that writes an array, and the last barrier between it and one of the array's names."""

    maker: str
    barrier: str
    position: int


def _within(module: Module, computation: Computation) -> Iterator[OverwrittenRead]:
    instructions = computation.instructions
    names = computation.by_name()
    origins = _origins(computation)
    last_read: dict[str, int] = {}
    for at, instruction in enumerate(instructions):
        if instruction.opcode not in NAMES or instruction.is_root:
            for operand in instruction.operands:
                last_read.update((origin.maker, at) for origin in origins[operand])
    for at, instruction in enumerate(instructions):
        if instruction.opcode in (*NAMES, "conditional") or len(set(instruction.operands)) < 2:
            continue  # each branch of a conditional reads its own operand, and only one branch runs
        sizes = {shape.nbytes for shape in instruction.shapes}
        direct = {
            operand
            for operand in instruction.operands
            if names[operand].opcode not in FREE
            and last_read[operand] == at
            and names[operand].nbytes in sizes
        }
        if not direct:
            continue
        for number, operand in enumerate(instruction.operands):
            for origin in origins[operand] if operand not in direct else ():
                if origin.maker in direct and not _elementwise(module, instruction, number):
                    yield OverwrittenRead(instruction.name, origin.barrier, origin.position)


def _origins(computation: Computation) -> Mapping[str, tuple[_Origin, ...]]:
    """Return the origin of every leaf of each instruction's result."""
    found: dict[str, tuple[_Origin, ...]] = {}
    for instruction in computation.instructions:
        read = [origin for operand in instruction.operands for origin in found[operand]]
        if instruction.opcode == "get-tuple-element":
            read = read[instruction.index : instruction.index + len(instruction.shapes)]
        elif instruction.opcode == "tuple" and instruction.op_name.endswith("optimization_barrier"):
            # XLA may have removed the barrier by then, but keeps the tuple that was its operand.
            scope = instruction.op_name.rpartition("/")[0]
            read = [_Origin(origin.maker, scope, position) for position, origin in enumerate(read)]
        elif instruction.opcode not in NAMES:
            read = [_Origin(instruction.name, "", -1)] * len(instruction.shapes)
        found[instruction.name] = tuple(read)
    return found


def _elementwise(module: Module, kernel: Instruction, number: int) -> bool:
    """Return whether each entry of a kernel's results reads only the same entry of its operand `number`."""
    if kernel.opcode != "fusion":
        return kernel.opcode in _ELEMENTWISE
    body = module.computations[kernel.callees[0]]
    (parameter,) = (i for i in body.instructions if i.opcode == "parameter" and i.index == number)
    reached = {parameter.name}
    for instruction in body.instructions:
        if not reached.isdisjoint(instruction.operands):
            same = all(shape.dims == parameter.shapes[0].dims for shape in instruction.shapes)
            if not same or instruction.opcode not in _ELEMENTWISE:
                return False
            reached.add(instruction.name)
    return True
