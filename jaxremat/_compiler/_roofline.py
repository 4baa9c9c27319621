"""Module, DeviceSpec -> Roofline: seconds of the compiled program, from its kernels, without running it.

The model: kernels run one after the other, each for

    max(flops / peak, bytes / bandwidth, bytes sent to other devices / link) + launch (or the latency of a collective).

A loop's kernels count once per trip, and only the more expensive branch of a conditional counts. The bytes are those
that the kernel must touch: a slice reads its window, an update in place writes its window, and values inside a fusion
cost none.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .._model._device_specs import KERNEL_RATES
from ._devices import DeviceSpec
from ._hlo import (
    CONTROL,
    FREE,
    UPDATES,
    Computation,
    Instruction,
    Module,
    Shape,
    results,
    sent_nbytes,
    transfer,
    updated_in_place,
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of the compiled program.

    **Arguments:**

    - `instruction`, in the computation named `computation`.
    - `total_trips`: the number of times that it runs in one run of the program.
    - `flops`: pairs (HLO type name, operations), per trip.
    - `read_nbytes`, `written_nbytes`: of device memory, per trip.
    - `rate`: the share of the device's peak arithmetic rate that it reaches.
    """

    instruction: Instruction
    computation: str
    total_trips: int
    flops: tuple[tuple[str, int], ...]
    read_nbytes: int
    written_nbytes: int
    rate: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes

    @property
    def sent_nbytes(self) -> int:
        """The bytes that a device sends to others in one trip."""
        return sent_nbytes(self.instruction.opcode, self.read_nbytes, self.written_nbytes)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Totals of one run of the program: time, arithmetic, traffic, kernels; seconds per opcode."""

    seconds: float
    flops: int
    nbytes: int
    kernels: int
    by_opcode: tuple[tuple[str, float], ...]


def roofline(module: Module, device: DeviceSpec, ran: Iterable[Kernel] | None = None) -> Roofline:
    """Return the least time in which `device` can run the module's kernels one after the other.

    **Arguments:** `ran` the module's kernels, if known already.
    """
    flops = nbytes = count = 0
    spent: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels(module) if ran is None else ran:
        spent[kernel.instruction.opcode] += kernel.total_trips * seconds_of(kernel, device)
        flops += kernel.total_trips * sum(operations for _, operations in kernel.flops)
        nbytes += kernel.total_trips * kernel.nbytes
        count += kernel.total_trips
    by_opcode = tuple(sorted(spent.items(), key=lambda item: (-item[1], item[0])))
    return Roofline(math.fsum(spent.values()), flops, nbytes, count, by_opcode)


def seconds_of(kernel: Kernel, device: DeviceSpec) -> float:
    """Return the seconds of one trip."""
    arithmetic = sum(operations / device.peak(dtype) for dtype, operations in kernel.flops) / kernel.rate
    moving = max(kernel.nbytes / device.bandwidth, kernel.sent_nbytes / device.link)
    started = device.collective_seconds if kernel.sent_nbytes else device.launch_seconds
    return max(arithmetic, moving) + started


def kernels(module: Module) -> Iterator[Kernel]:
    """Yield the kernels that the module runs, in schedule order, loops and calls flattened.

    Loops without a known trip count (`while_loop`) count one trip; loop conditions are not counted.
    """
    yield from _kernels(module, module.computations[module.entry])


# Flops per byte of memory traffic of a typical device, roughly: to compare the branches of a conditional.
_FLOPS_PER_BYTE = 50


def _kernels(module: Module, computation: Computation) -> Iterator[Kernel]:
    scope = computation.by_name()
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-done", "-update")):
            continue
        if transfer(module, instruction) or _ALLOCATED in instruction.attributes:
            continue  # host copies run next to the kernels, see `host_traffic`; an allocation runs no kernel
        if opcode not in CONTROL:
            yield _kernel(module, computation, scope, instruction)
            continue
        bodies = [list(_kernels(module, module.computations[callee])) for callee in instruction.callees]
        for kernel in max(bodies, key=_weight, default=[]):
            yield replace(kernel, total_trips=loop_length(instruction) * kernel.total_trips)


_ALLOCATED = 'custom_call_target="AllocateBuffer"'


def loop_length(instruction: Instruction) -> int:
    """Return the number of times that a loop's body runs; 1 for other instructions and for unknown counts."""
    known = _TRIPS.search(instruction.attributes) if instruction.opcode == "while" else None
    return int(known[1]) if known else 1


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def _weight(body: list[Kernel]) -> int:
    return sum(k.total_trips * (sum(n for _, n in k.flops) + _FLOPS_PER_BYTE * k.nbytes) for k in body)


def _kernel(
    module: Module, computation: Computation, scope: Mapping[str, Instruction], instruction: Instruction
) -> Kernel:
    operands = [scope[operand] for operand in instruction.operands]
    flops: Counter[str] = Counter()
    in_place = dict(updated_in_place(module, instruction))
    if instruction.opcode == "fusion":
        body = module.computations[instruction.callees[0]]
        inside = body.by_name()
        wanted = _wanted(body, inside)
        for each in body.instructions:
            _count(module, each, [inside[o] for o in each.operands], wanted[each.name], flops)
        roots = [inside[o] for o in body.root.operands] if body.root.opcode == "tuple" else [body.root]
        read = sum(
            _share(each, wanted[each.name]) for each in body.instructions if each.opcode == "parameter"
        )
        written = 0
        for element, root in enumerate(roots):
            while element in in_place and root.opcode not in UPDATES:
                root = inside[root.operands[0]]  # the bitcasts that `updated_in_place` looked through
            written += _window(root, inside) if element in in_place else root.nbytes
    else:
        elements = sum(shape.elements for shape in instruction.shapes)
        _count(module, instruction, operands, elements, flops)
        reads = _reads(instruction, operands, elements, in_place=True)
        read = sum(_share(operand, n) for operand, n in zip(operands, reads, strict=True))
        made = sum(shape.nbytes for shape in results(instruction))
        written = _window(instruction, scope) if in_place else made
    rate = (
        min(KERNEL_RATES.get(dtype, 1.0) for dtype in flops) if _OWN.search(instruction.attributes) else 1.0
    )
    return Kernel(instruction, computation.name, 1, tuple(sorted(flops.items())), read, written, rate)


def _share(value: Instruction, elements: int) -> int:
    """Return the bytes of a number of elements of a value."""
    whole = sum(shape.elements for shape in value.shapes)
    return value.nbytes * min(elements, whole) // whole if whole else 0


def _window(update: Instruction, scope: Mapping[str, Instruction]) -> int:
    """Return the bytes that a dynamic-update-slice or scatter writes."""
    return scope[update.operands[_update_operand(update)]].nbytes


def _update_operand(update: Instruction) -> int:
    return 1 if update.opcode == "dynamic-update-slice" else len(update.operands) // 2 + 1


_PRODUCTS = frozenset({"dot", "scaled-dot", "ragged-dot", "convolution", "custom-call"})
_REDUCTIONS = frozenset({"reduce", "sort", "scatter", "select-and-scatter"})
_WINDOWS = frozenset({"slice", "dynamic-slice", "gather"})
# These read their operands whole, even for a few elements of the result; others read element by element.
_WHOLE = _PRODUCTS | _REDUCTIONS | {"reduce-window", "fft", "cholesky", "triangular-solve", "fusion", "tuple"}
# These only move data.
_MOVES = {"broadcast", "iota", "copy", "transpose", "reshape", "concatenate", "pad", "reverse", "convert"}
_SENDS = {"all-gather", "all-to-all", "collective-permute", "send", "recv"}
_SILENT = FREE | UPDATES | _WINDOWS | _MOVES | _SENDS


def _wanted(body: Computation, inside: Mapping[str, Instruction]) -> dict[str, int]:
    """Return the number of elements of each value inside a fusion that its readers use: fusions compute on demand."""
    wanted = dict.fromkeys(inside, 0)
    wanted[body.root.name] = sum(shape.elements for shape in body.root.shapes)
    roots = set(body.root.operands) if body.root.opcode == "tuple" else {body.root.name}
    for each in reversed(body.instructions):
        whole = sum(shape.elements for shape in each.shapes)
        wanted[each.name] = n = min(wanted[each.name], whole)
        if each.opcode == "bitcast" and each.name in roots:
            roots.add(each.operands[0])
        operands = [inside[operand] for operand in each.operands]
        if n:
            reads = _reads(each, operands, n, in_place=each.name in roots)
            for operand, elements in zip(operands, reads, strict=True):
                wanted[operand.name] += elements
    return wanted


def _reads(instruction: Instruction, operands: list[Instruction], wanted: int, in_place: bool) -> list[int]:
    """Return the number of elements of each operand that are read for `wanted` elements of the result."""
    sizes = [sum(shape.elements for shape in operand.shapes) for operand in operands]
    opcode = instruction.opcode
    if opcode in UPDATES and in_place:
        window = sizes[_update_operand(instruction)]
        return [0 if opcode == "dynamic-update-slice" else window, *sizes[1:]]
    if opcode in _WHOLE or not instruction.shapes:
        return sizes
    if opcode in _WINDOWS:
        return [min(wanted, sizes[0]), *sizes[1:]]
    return [min(wanted, size) for size in sizes]


def _count(
    module: Module, instruction: Instruction, operands: list[Instruction], wanted: int, flops: Counter[str]
) -> None:
    """Add the operations of an instruction that computes `wanted` elements of its result."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "fusion":
        body = module.computations[instruction.callees[0]]
        inside = body.by_name()
        for each in body.instructions:
            size = sum(shape.elements for shape in each.shapes)
            _count(module, each, [inside[o] for o in each.operands], size, flops)
    elif opcode in _PRODUCTS:
        dtype = operands[0].shapes[0].dtype if operands and operands[0].shapes else "f32"
        if operations := _product(instruction, [shape for o in operands for shape in o.shapes]):
            flops[dtype] += operations
    elif opcode in _REDUCTIONS:
        read = operands[_update_operand(instruction) if opcode == "scatter" else 0].shapes[0]
        flops[read.dtype] += read.elements
    elif opcode == "reduce-window":
        flops[instruction.shapes[0].dtype] += wanted * math.prod(_window_field(instruction, "size"))
    elif opcode not in _SILENT and instruction.shapes:
        flops[instruction.shapes[0].dtype] += wanted


def _product(instruction: Instruction, operands: list[Shape]) -> int:
    """Return the multiplications and additions of a product, convolution or library call; 0 for an unknown call."""
    attributes = instruction.attributes
    if not operands or not instruction.shapes:
        return 0
    if "dim_labels=" in attributes and len(operands) > 1:
        return _convolution(instruction, operands[0], operands[1])
    target = _TARGET.search(attributes)
    if target and "fmha" in target[1] and (scores := _SCORES.search(attributes)):
        # Attention: two products over the scores, in the backward pass five.
        products = 5 if "Backward" in target[1] else 2
        return 2 * products * math.prod(map(int, re.findall(r"\d+", scores[1]))) * operands[0].dims[-1]
    if own := _OWN.search(attributes):
        return int(own[1])
    if contracted := _CONTRACTED.search(attributes):
        axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
        return 2 * instruction.shapes[0].elements * math.prod(operands[0].dims[axis] for axis in axes)
    if instruction.opcode == "dot":
        return 2 * instruction.shapes[0].elements
    if target and re.search(r"matmul|gemm", target[1]) and len(operands) > 1:
        # m x n from m x k and k x n, whatever the layouts: (mk kn / mn) is k squared.
        k = math.isqrt(operands[0].elements * operands[1].elements // max(1, instruction.shapes[0].elements))
        return 2 * instruction.shapes[0].elements * k
    if target and re.search(r"lapack|cusolver|triangular", target[1], re.I):
        return max(shape.elements for shape in operands) * max(1, *instruction.shapes[0].dims[-1:])
    return 0


_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OWN = re.compile(r'name = "attention_(\d+)_flops"')
"""A kernel of ours, see `_attention._kernels`."""

_SCORES = re.compile(r'"intermediate_tensor_shape":\{"element_type":"\w+","dimensions":\[([^\]]*)\]')


def _convolution(instruction: Instruction, lhs: Shape, rhs: Shape) -> int:
    """2 x (output elements) x (kernel features) x (taps on data): padding and dilation holes are not counted.

    cuDNN's backward calls describe the forward convolution with its input or kernel as the result.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    result = instruction.shapes[0]
    if "convBackwardInput" in instruction.attributes:
        image, kernel, output = result, rhs, lhs
    elif "convBackwardFilter" in instruction.attributes:
        image, kernel, output = lhs, result, rhs
    else:
        image, kernel, output = lhs, rhs, result
    image_labels, kernel_labels, output_labels = labels.groups()
    operations = 2 * kernel.dims[kernel_labels.index("i")]
    operations *= output.dims[output_labels.index("b")] * output.dims[output_labels.index("f")]
    spatial = [label for label in output_labels if label.isdigit()]
    stride, base, dilation = (
        _window_field(instruction, field, len(spatial)) for field in ("stride", "lhs_dilate", "rhs_dilate")
    )
    low = _window_field(instruction, "pad", len(spatial), default=0)
    for axis, label in enumerate(spatial):
        operations *= _taps(
            kernel.dims[kernel_labels.index(label)],
            output.dims[output_labels.index(label)],
            image.dims[image_labels.index(label)],
            (stride[axis], low[axis], base[axis], dilation[axis]),
        )
    return operations


def _window_field(instruction: Instruction, field: str, count: int = 0, default: int = 1) -> list[int]:
    """Return a field of `window={size=3x3 pad=1_1x1_1}`, one number per axis (of a padding the low side)."""
    found = re.search(rf"window=\{{[^}}]*\b{field}=([\d_x\-]+)", instruction.attributes)
    return [int(part.split("_")[0]) for part in found[1].split("x")] if found else [default] * count


@functools.cache
def _taps(kernel: int, output: int, image: int, window: tuple[int, int, int, int]) -> int:
    """Return pairs (output position o, tap t) on data: o stride + t dilation - low is k base with 0 <= k < image."""
    stride, low, base, dilation = window
    period = base // math.gcd(stride, base)
    pairs = 0
    for tap in range(kernel):
        offset = tap * dilation - low
        first = max(0, -(offset // stride))
        last = min(output - 1, ((image - 1) * base - offset) // stride)
        on_grid = (o for o in range(first, first + period) if (o * stride + offset) % base == 0)
        start = next(on_grid, last + 1)
        pairs += max(0, (last - start) // period + 1)
    return pairs
