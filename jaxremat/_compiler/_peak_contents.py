"""Scheduled HLO module and its text -> the live arrays at its peak, by kind and by the user's source line.

XLA prints the call stack of each instruction as a number (`stack_frame_id`) and the stacks once, before the module.
"""

import re
from dataclasses import dataclass

from ._hlo import Module
from ._liveness import LiveBuffer, live_at_peak


@dataclass(frozen=True, slots=True)
class Alive:
    """One array in the memory of the compiled step at its peak.

    **Fields:** `nbytes`; `shape` as text (`f32[32,56,56,64]`); `kind` whether it was computed by the forward pass
    (`"forward"`), a plan's recomputation (`"recomputed"`), the backward pass (`"backward"`) or later (`"other"`);
    `scope` the compiler's name for the operation; `source` the user's line, `file.py:12 (function)`, or "".
    """

    nbytes: int
    shape: str
    kind: str
    scope: str
    source: str


MOST = 100
"""The number of live arrays that are reported, largest first."""


def alive_at_peak(module: Module, text: str) -> tuple[Alive, ...]:
    """Return the largest live arrays at the peak, without arguments and outputs; see `_liveness.live_at_peak`.

    **Arguments:** `text` that the module was parsed from, which has the user's lines.
    """
    lines = _sources(text)
    return tuple(_alive(buffer, lines) for buffer in live_at_peak(module).buffers[:MOST])


def _alive(buffer: LiveBuffer, lines: dict[int, str]) -> Alive:
    instruction = buffer.instruction
    shape, name = instruction.shapes[buffer.element], instruction.op_name
    frame = _FRAME.search(instruction.attributes)
    return Alive(
        nbytes=buffer.nbytes,
        shape=f"{shape.dtype}[{','.join(map(str, shape.dims))}]",
        kind=next((kind for mark, kind in _KINDS if mark in name), "other"),
        scope=name or instruction.opcode,
        source=lines.get(int(frame[1]), "") if frame else "",
    )


_KINDS = (("recompute_", "recomputed"), ("transpose(", "backward"), ("jvp(", "forward"))
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_NAMED = re.compile(r'^(\d+) "(.*)"$')
_NUMBERED = re.compile(r"^(\d+) \{(.*)\}$")


def _sources(text: str) -> dict[int, str]:
    """Return the innermost line of each stack frame, `file.py:12 (function)`."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in text.split("\n"):
        if line.startswith(("%", "ENTRY")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif found := _NAMED.match(line) or _NUMBERED.match(line):
            table[int(found[1])] = found[2]
    lines: dict[int, str] = {}
    for frame, fields in tables.get("StackFrames", {}).items():
        place = dict(re.findall(r"(\w+)=(\d+)", fields))
        at = dict(re.findall(r"(\w+)=(\d+)", tables["FileLocations"].get(int(place["file_location_id"]), "")))
        if at:
            path = tables["FileNames"][int(at["file_name_id"])]
            if "/jaxremat/_" not in path:  # where equations without a line of their own were compiled
                function = tables["FunctionNames"][int(at["function_name_id"])]
                lines[frame] = f"{path.rsplit('/', 1)[-1]}:{at['line']} ({function})"
    return lines
