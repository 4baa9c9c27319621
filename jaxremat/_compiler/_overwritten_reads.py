"""Module -> kernels whose result XLA may write over an array that they still read under another name.

XLA writes a kernel's result into the buffer of an operand that is read for the last time there, if the kernel reads
that operand element by element. It asks this of the operand that names the array's maker, and of that one alone
(`HeapSimulator`, `CanShareOperandBufferWithUser`). The same array may come in a second time through an optimization
barrier, and be read elsewhere than where the kernel is writing: a row before, a slice, a transposed index. What is read
then has been overwritten. XLA:CPU and XLA:GPU of jax 0.10 and 0.11 both do this, with results that are wrong by any
factor. Seven lines that show it (on XLA:CPU with the pass `cse_barrier_expander` disabled):

    def f(x):
        v = jnp.exp(lax.sort(x, dimension=0))
        other = lax.sort(v, dimension=1)
        behind, _ = lax.optimization_barrier((v, other))
        before = jnp.pad(behind, ((1, 0), (0, 0)))[:-1]
        return (lax.sort(jnp.tanh(v - before), dimension=1)[:, ::3] ** 2).sum(), other.sum()

Invariant: a module for which nothing is found has no such kernel. What is found need not be overwritten: the decision
is XLA's.
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
"""Each entry of the result reads the same entry of every operand."""


@dataclass(frozen=True, slots=True)
class OverwrittenRead:
    """A kernel that may overwrite what it still reads.

    **Fields:** `kernel` its name in the module; `barrier` the name stack of the barrier through which the array comes
    in the second time, "" where that is none; `position` of the array among the barrier's operands.
    """

    kernel: str
    barrier: str
    position: int


def overwritten_reads(module: Module) -> tuple[OverwrittenRead, ...]:
    """Return the kernels of a scheduled module that may overwrite what they still read, in the order they run."""
    return tuple(found for computation in executed(module) for found in _within(module, computation))


@dataclass(frozen=True, slots=True)
class _Origin:
    """The instruction that makes an array, and the last barrier on the way from there to one of its names."""

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
            continue  # a conditional's branches each have an operand of their own, and one of them runs
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
    """Return for each instruction where every leaf of its result was made."""
    found: dict[str, tuple[_Origin, ...]] = {}
    for instruction in computation.instructions:
        read = [origin for operand in instruction.operands for origin in found[operand]]
        if instruction.opcode == "get-tuple-element":
            read = read[instruction.index : instruction.index + len(instruction.shapes)]
        elif instruction.opcode == "tuple" and instruction.op_name.endswith("optimization_barrier"):
            # The barrier itself may be gone by then; the tuple that was its operand stays.
            scope = instruction.op_name.rpartition("/")[0]
            read = [_Origin(origin.maker, scope, position) for position, origin in enumerate(read)]
        elif instruction.opcode not in NAMES:
            read = [_Origin(instruction.name, "", -1)] * len(instruction.shapes)
        found[instruction.name] = tuple(read)
    return found


def _elementwise(module: Module, kernel: Instruction, number: int) -> bool:
    """Return whether each entry of a kernel's results reads of its operand `number` the same entry alone."""
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
