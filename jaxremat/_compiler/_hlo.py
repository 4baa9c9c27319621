"""Text of a scheduled HLO module (`compiled.as_text()`) -> Module: its instructions, and the equation of each buffer.

Invariant: all facts come from the compiler's text, of XLA:CPU or XLA:GPU, none from a model. `_liveness` computes live
ranges from it, `_roofline` the time of kernels.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

# Their results have no new buffers: they name their operands' buffers, leaf by leaf.
NAMES = frozenset({"tuple", "get-tuple-element", "bitcast", "opt-barrier", "domain", "add-dependency"})
# No kernel runs for these.
FREE = NAMES | {"parameter", "constant", "after-all", "partition-id", "replica-id"}
# These run the computations that they name; other opcodes that name one (reduce, sort) apply it per element.
CONTROL = frozenset({"while", "conditional", "call", "async-start"})
# These write part of their first operand, in that operand's memory if possible.
UPDATES = frozenset({"dynamic-update-slice", "scatter"})
# These do not change a value: XLA inserts them, untagged, to change its layout, round it, or pad it for a library.
_KEEPS = frozenset({"bitcast", "copy", "transpose", "reshape", "convert", "pad", "opt-barrier", "copy-start"})
# A loop that XLA makes of a scatter, by its name, and the leaf of its result that it updates: the one after the count.
_SCATTER, _SCATTERED = re.compile(r"/(?:select_and_)?scatter[\w-]*$"), 1
# Operations that exchange data between devices.
COLLECTIVES = frozenset(
    {
        "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
        "collective-broadcast",
    }
)  # fmt: skip
HOST_SPACE = 5  # memory space of pinned host memory in a layout, S(5)


@dataclass(frozen=True, slots=True)
class Shape:
    """An array type: HLO's name of the element type, dimensions, memory space (0: the device's), layout as printed."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    layout: str = field(default="", compare=False)

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Size in bytes; tokens and opaque handles have none."""
        return -(-self.elements * _bits(self.dtype) // 8)


@cache
def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    bits = re.search(r"\d+", dtype)  # s4, bf16, f8e4m3fn, c64: the first number is the width
    return int(bits[0]) if bits else 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    **Arguments:**

    - `shapes`: leaves of the result's type, nested tuples flattened.
    - `operands`: names of instructions of the same computation.
    - `op_name`: JAX's name stack and primitive, "" if the compiler gives none.
    - `attributes`: everything printed after the operands.
    - `index`: a parameter's number; the first leaf that a get-tuple-element takes; else -1.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    op_name: str
    attributes: str
    index: int
    is_root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves of the result."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def callees(self) -> tuple[str, ...]:
        """Computations that run as part of this instruction: a while's body, branches, a fusion's computation."""
        found = _CALLEES.findall(self.attributes)
        return tuple(name for names in found for name in re.findall(r"[^\s,%{}]+", names))


@dataclass(frozen=True)
class Computation:
    """A named sequence of instructions; in a scheduled module they run in this order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.is_root), self.instructions[-1])

    def by_name(self) -> Mapping[str, Instruction]:
        return self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """All computations of a module by name, and the name of the entry computation."""

    computations: Mapping[str, Computation]
    entry: str


_CALLEES = re.compile(
    r"\b(?:body|calls|to_apply|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[^\s,{}]+)"
)
_HEADER = re.compile(r"(ENTRY\s+)?%?([^\s(={]+)")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([^\s=]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TYPE = re.compile(r"[()]|\b([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_BRACKET = re.compile(r'[()]|"[^"\\]*(?:\\.[^"\\]*)*"')
_OP_NAME = re.compile(r'\bop_name="([^"\\]*(?:\\.[^"\\]*)*)"')
_OPERAND = re.compile(r"%([^\s,)]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_Type = tuple[tuple[Shape, ...], tuple[int, ...]]  # leaves; where among them each element of the tuple starts
_Starts = dict[str, tuple[int, ...]]


def parse(text: str) -> Module:
    """Return the module that `text` prints.

    **Raises:** ValueError if there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    types: dict[str, _Type] = {}  # a cache: modules repeat the same few types
    entry = name = None
    body: list[Instruction] = []
    starts: _Starts = {}
    for line in text.split("\n"):
        if line[:1] in (" ", "\t"):
            if name is not None and (instruction := _instruction(line, types, starts)):
                body.append(instruction)
        elif name is not None and line.startswith("}") and not line.startswith("})"):  # "})" ends a constant
            computations[name] = Computation(name, tuple(body))
            name = None
        elif line.rstrip().endswith("{") and (header := _HEADER.match(line)) and header[2] != "HloModule":
            name, body, starts = header[2], [], {}
            entry = name if header[1] else entry
    if entry is None:
        raise ValueError(
            f"The text is not an HLO module with an ENTRY computation; it begins {text[:60]!r}. Pass what "
            "`jax.jit(f).lower(...).compile().as_text()` returns."
        )
    return Module(computations, entry)


def _instruction(line: str, types: dict[str, _Type], starts: _Starts) -> Instruction | None:
    """Return the instruction on a line, or None. Adds to `starts`, those of the computation's instructions so far."""
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    stop = _closing(line, head.end()) + 1 if line.startswith("(", head.end()) else line.find(" ", head.end())
    opcode = _OPCODE.match(line, stop)
    if opcode is None:
        return None
    printed = line[head.end() : stop]
    if printed not in types:
        types[printed] = _type(printed)
    shapes, starts[head[2]] = types[printed]
    close = _closing(line, opcode.end() - 1)
    inside, attributes = line[opcode.end() : close], line[close + 1 :].lstrip(", ")
    operands = _operands("" if opcode[1] in ("parameter", "constant") else inside)
    index = int(inside) if opcode[1] == "parameter" else -1
    if opcode[1] == "get-tuple-element" and (found := _INDEX.search(attributes)):
        index = starts[operands[0]][int(found[1])]
    op_name = _OP_NAME.search(attributes) if "op_name=" in attributes else None
    label = op_name[1] if op_name else ""
    if "\\" in label:
        label = re.sub(r"\\(.)", r"\1", label)
    return Instruction(head[2], opcode[1], shapes, operands, label, attributes, index, bool(head[1]))


def _closing(line: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`; the line's end if none does."""
    first = line.find(")", start)
    if first > 0 and line.find("(", start + 1, first) < 0 and line.find('"', start, first) < 0:
        return first
    depth = 0
    for bracket in _BRACKET.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(bracket[0], 0)
        if depth == 0:
            return bracket.start()
    return len(line)


def _type(printed: str) -> _Type:
    shapes: list[Shape] = []
    starts: list[int] = []
    depth = 0
    for token in _TYPE.finditer(printed):
        if depth == 1 and token[0] != ")":
            starts.append(len(shapes))
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token[1]:
            space = _SPACE.search(token[3] or "")
            dims = tuple(int(size.lstrip("<=")) for size in token[2].split(",") if size)  # <=8: a bound
            shapes.append(Shape(token[1], dims, int(space[1]) if space else 0, token[3] or ""))
    return tuple(shapes), tuple(starts)


def _operands(inside: str) -> tuple[str, ...]:
    """Return the names in an operand list, printed with or without types and percent signs."""
    if "%" in inside:
        return tuple(_OPERAND.findall(inside))
    plain = re.sub(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}", "", inside)
    while plain != (plain := re.sub(r"\([^()]*\)", "", plain)):
        pass
    return tuple(words[-1] for part in plain.split(",") if (words := part.split()))


def results(instruction: Instruction) -> tuple[Shape, ...]:
    """Return the shapes of an instruction's results, without the operands that the start of a copy or a collective
    also names.
    """
    shapes, read = instruction.shapes, len(instruction.operands)
    if not instruction.opcode.endswith("-start") or len(shapes) <= read:
        return shapes
    return shapes[:1] if instruction.opcode == "copy-start" else shapes[read:]


def sent_nbytes(opcode: str, read_nbytes: int, written_nbytes: int) -> int:
    """Return the bytes that a device sends to others: in a ring, each part of a result once, or twice for an
    all-reduce, which adds it up first.
    """
    opcode = opcode.removesuffix("-start")
    if opcode not in COLLECTIVES:
        return 0
    if opcode in ("all-gather", "reduce-scatter"):
        return abs(written_nbytes - read_nbytes)
    return written_nbytes * (2 if opcode == "all-reduce" else 1)


def updated_in_place(module: Module, instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Return pairs (element, operand) for elements that a kernel writes only in part, into the operand's memory."""
    if instruction.opcode in UPDATES:
        return ((0, 0),)
    if instruction.opcode != "fusion":
        return ()
    inside = module.computations[instruction.callees[0]]
    names = inside.by_name()
    roots = [names[o] for o in inside.root.operands] if inside.root.opcode == "tuple" else [inside.root]
    pairs = []
    for element, update in enumerate(roots):
        while update.opcode == "bitcast":
            update = names[update.operands[0]]
        if update.opcode in UPDATES:
            target = names[update.operands[0]]
            while target.opcode == "bitcast":
                target = names[target.operands[0]]
            if target.opcode == "parameter":
                pairs.append((element, target.index))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between device and host memory. **Fields:** `back` whether from the host; `nbytes` copied."""

    back: bool
    nbytes: int


def transfer(module: Module, instruction: Instruction) -> Transfer | None:
    """Return the copy to or from host memory that an instruction starts, or None: of an array (`copy-start`), or of a
    row of a stack in host memory that it reads or writes (`fusion-start` of a slice).
    """
    if instruction.opcode == "copy-start":
        copy, original = (shape.space for shape in instruction.shapes[:2])
        if (copy == HOST_SPACE) != (original == HOST_SPACE):
            return Transfer(original == HOST_SPACE, instruction.shapes[0].nbytes)
    if instruction.opcode != "fusion-start":
        return None
    body = module.computations[instruction.callees[0]]
    inside, (to, *_), source = body.by_name(), body.root.shapes, body.root
    while source.opcode in ("bitcast", "copy"):
        source = inside[source.operands[0]]
    if source.opcode == "dynamic-update-slice" and to.space == HOST_SPACE:
        return Transfer(False, inside[source.operands[1]].nbytes)
    if source.opcode == "dynamic-slice" and to.space != HOST_SPACE:
        stack = inside[source.operands[0]]
        while stack.opcode == "bitcast":
            stack = inside[stack.operands[0]]
        if stack.shapes[0].space == HOST_SPACE:
            return Transfer(True, source.nbytes)
    return None


def materialised(module: Module, tag: re.Pattern[str]) -> dict[str, tuple[int, ...]]:
    """Return the tagged equations whose values are kernel outputs, in the entry computation and all that it runs.

    The equation of a buffer is the first tagged instruction on the path back from it: into the fused computation
    (element by element), through layout changes and XLA's own rounding, and through a kernel that only copies to the
    previous kernel. Parameters, and buffers without a tag on that path, are left out.

    **Arguments:**

    - `tag`: searched in each `op_name`; group 1 is the tag; the last match (the innermost scope) counts.

    **Returns:** for each tag the bytes of each of its buffers, in schedule order: `{'12': (4096,)}`.
    """
    found: dict[str, list[int]] = {}
    for computation in executed(module):
        scope = computation.by_name()
        for instruction in computation.instructions:
            if is_scatter_loop(instruction):
                for name in tag.findall(instruction.op_name)[-1:]:
                    found.setdefault(name, []).append(instruction.shapes[_SCATTERED].nbytes)
                continue
            if instruction.opcode in FREE | (CONTROL - {"call"}) or instruction.opcode.endswith("-done"):
                continue
            for element, shape in enumerate(instruction.shapes):
                scratch = element and shape.dtype == "u8" and instruction.opcode == "custom-call"
                made_by = maker(module, tag, scope, instruction, element)
                if instruction.opcode == "call":  # the callee's own tags count too
                    made_by = None if made_by else next(iter(tag.findall(instruction.op_name)), None)
                if isinstance(made_by, str) and shape.nbytes and not scratch:
                    found.setdefault(made_by, []).append(shape.nbytes)
    return {name: tuple(sizes) for name, sizes in found.items()}


def is_scatter_loop(instruction: Instruction) -> bool:
    """Return whether an instruction is a loop over updates, into which XLA turns a scatter that has no kernel."""
    loop = instruction.opcode in ("while", "call") and len(instruction.shapes) > _SCATTERED
    return loop and _SCATTER.search(instruction.op_name) is not None


def executed(module: Module) -> Iterator[Computation]:
    """Yield the entry computation and every one that it runs as a loop body, branch or call, each once."""
    waiting, seen = [module.entry], {module.entry}
    while waiting:
        computation = module.computations[waiting.pop(0)]
        yield computation
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL:
                fresh = [name for name in instruction.callees if name not in seen]
                seen.update(fresh)
                waiting += fresh


def maker(
    module: Module, tag: re.Pattern[str], scope: Mapping[str, Instruction], made: Instruction, leaf: int
) -> str | tuple[int, int] | None:
    """Return the tag of the equation that computes a leaf; (number, leaf) if it is a parameter; None if untagged."""
    while True:
        if made.opcode == "parameter":
            return made.index, leaf
        if made.opcode in ("fusion", "call"):
            callee = module.computations[made.callees[0]]
            inside = maker(module, tag, callee.by_name(), callee.root, leaf)
            if not isinstance(inside, tuple):
                return inside
            made, leaf = scope[made.operands[inside[0]]], inside[1]
        elif made.opcode == "tuple":
            for operand in made.operands:
                width = len(scope[operand].shapes)
                if leaf < width:
                    made = scope[operand]
                    break
                leaf -= width
        elif made.opcode == "get-tuple-element":
            made, leaf = scope[made.operands[0]], made.index + leaf
        elif matches := tag.findall(made.op_name):
            return matches[-1] if isinstance(matches[-1], str) else matches[-1][0]
        elif made.opcode in _KEEPS or made.opcode == "copy-done":
            made = scope[made.operands[0]]
        else:
            return None
