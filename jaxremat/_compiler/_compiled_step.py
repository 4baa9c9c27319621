"""Executable, device -> `CompiledStep`: its memory, kernels' seconds, peak and overwritten reads.

Invariant: an executable's text is printed and parsed at most once, when the first fact that needs it is read.

Module, device -> the time for which kernels wait for copies between device and host memory (`host_traffic`).

The model: copies run in parallel with kernels, one at a time in each direction, and start where the schedule starts
them. Kernels wait where the schedule waits for an unfinished copy. A loop's copies start and end within an iteration.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ._devices import DeviceSpec
from ._hlo import CONTROL, Computation, Module, parse, transfer
from ._memory_stats import MemoryStats
from ._overwritten_reads import OverwrittenRead, overwritten_reads
from ._peak_contents import Alive, alive_at_peak
from ._program import Compiled
from ._roofline import Kernel, kernels, loop_length, roofline, seconds_of


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """The copies of one run of a program.

    **Fields:** `sent_nbytes` to the host, `fetched_nbytes` from it; `wait_seconds` for which kernels wait for copies.
    """

    sent_nbytes: int = 0
    fetched_nbytes: int = 0
    wait_seconds: float = 0.0


def host_traffic(module: Module, device: DeviceSpec) -> HostTraffic:
    """Return the bytes that a program copies to and from host memory, and the seconds for which it waits."""
    instructions = (i for computation in module.computations.values() for i in computation.instructions)
    if all(transfer(module, i) is None for i in instructions):
        return HostTraffic()
    seconds = {(k.computation, k.instruction.name): seconds_of(k, device) for k in kernels(module)}
    return _run(module, module.computations[module.entry], seconds, device.host_link)[1]


def seconds_with_copies(module: Module, device: DeviceSpec, ran: Iterable[Kernel] | None = None) -> float:
    """Return the least time in which `device` can run the module: its kernels, and their waits for copies.

    **Arguments:** `ran` the module's kernels, if known already.
    """
    return roofline(module, device, ran).seconds + host_traffic(module, device).wait_seconds


def _run(
    module: Module, computation: Computation, kernel_seconds: Mapping[tuple[str, str], float], link: float
) -> tuple[float, HostTraffic]:
    """Return the seconds of a computation, and its copies."""
    now = waited = 0.0
    sent = fetched = 0
    free = [0.0, 0.0]  # times at which the link is free, to and from the host
    over: dict[str, float] = {}
    for instruction in computation.instructions:
        name = instruction.name
        now += kernel_seconds.get((computation.name, name), 0.0)
        if copy := transfer(module, instruction):
            free[copy.back] = over[name] = max(free[copy.back], now) + copy.nbytes / link
            sent, fetched = (sent, fetched + copy.nbytes) if copy.back else (sent + copy.nbytes, fetched)
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in over:
            late = max(over[instruction.operands[0]] - now, 0.0)
            now, waited = now + late, waited + late
        elif instruction.opcode in CONTROL:
            bodies = (module.computations[callee] for callee in instruction.callees)
            ran = [_run(module, body, kernel_seconds, link) for body in bodies]
            seconds, traffic = max(ran, key=lambda each: each[0], default=(0.0, HostTraffic()))
            length = loop_length(instruction)
            now += length * seconds
            waited += length * traffic.wait_seconds
            sent += length * traffic.sent_nbytes
            fetched += length * traffic.fetched_nbytes
    return now, HostTraffic(sent, fetched, waited)


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(ran: Iterable[Kernel]) -> Counter[str]:
    """Return the number of collectives of each kind, those in loops once per iteration.

    One collective may exchange many arrays.
    """
    found: Counter[str] = Counter()
    for kernel in ran:
        kind = kernel.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            found[kind] += kernel.total_trips
    return found


@dataclass(frozen=True, slots=True)
class _Contents:
    """The facts read from a parsed module."""

    seconds: float
    alive: tuple[Alive, ...]
    overwritten_reads: tuple[OverwrittenRead, ...]
    collectives: Counter[str]


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """A compiled program and the facts in its text.

    `memory` needs no text. The first access to another fact parses the text and reads all facts, which takes as long as
    the parsing. Then the module is dropped, since a search keeps dozens of candidates, and a module takes about half a
    kilobyte per instruction.

    **Fields:** `executable`; the `device` that it is compiled for; `keep_module` to keep `module` too;
    `compile_seconds` of its compilation, 0 if unknown.
    """

    executable: Compiled
    device: DeviceSpec
    keep_module: bool = False
    compile_seconds: float = 0.0

    @cached_property
    def memory(self) -> MemoryStats:
        """Its memory by XLA's buffer assignment."""
        return MemoryStats.of(self.executable)

    @property
    def peak_nbytes(self) -> int:
        """The whole step's peak by XLA's buffer assignment."""
        return self.memory.peak_nbytes

    @property
    def seconds(self) -> float:
        """The least time of a run on the device, by a roofline of its kernels, and their waits for copies."""
        return self._contents.seconds

    @property
    def alive(self) -> tuple[Alive, ...]:
        """The largest arrays in memory at the peak."""
        return self._contents.alive

    @property
    def overwritten_reads(self) -> tuple[OverwrittenRead, ...]:
        """The kernels that may overwrite arrays that they still read."""
        return self._contents.overwritten_reads

    @property
    def collectives(self) -> Counter[str]:
        """The number of collectives in a run, by kind."""
        return self._contents.collectives

    @property
    def module(self) -> Module:
        """The parsed module of a step that keeps it. **Raises:** ValueError for others."""
        if (module := self._parsed[0]) is None:
            raise ValueError("The module was not kept: make the step with `keep_module=True`.")
        return module

    @property
    def _contents(self) -> _Contents:
        return self._parsed[1]

    @cached_property
    def _parsed(self) -> tuple[Module | None, _Contents]:
        text = self.executable.as_text() or ""
        module = parse(text)
        ran = tuple(kernels(module))
        contents = _Contents(
            seconds_with_copies(module, self.device, ran),
            alive_at_peak(module, text),
            overwritten_reads(module),
            collectives(ran),
        )
        return (module if self.keep_module else None), contents
