"""Module, device -> what its copies between device and host memory take beside its kernels.

Law: copies run beside the kernels, those there and those back one after the other, each begun where the schedule begins
it; the kernels wait where the schedule waits for a copy that is not over. A loop's copies are begun and over within
each of its iterations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ._devices import DeviceSpec
from ._hlo import CONTROL, Computation, Module, transfer
from ._roofline import Kernel, kernels, loop_length, roofline, seconds_of


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """What one run of a program copies.

    **Fields:** `sent_nbytes` to the host, `fetched_nbytes` from it; `wait_seconds` for which kernels wait for copies.
    """

    sent_nbytes: int = 0
    fetched_nbytes: int = 0
    wait_seconds: float = 0.0


def host_traffic(module: Module, device: DeviceSpec) -> HostTraffic:
    """Return what a program copies, and how long it waits for that."""
    instructions = (i for computation in module.computations.values() for i in computation.instructions)
    if all(transfer(module, i) is None for i in instructions):
        return HostTraffic()
    seconds = {(k.computation, k.instruction.name): seconds_of(k, device) for k in kernels(module)}
    return _run(module, module.computations[module.entry], seconds, device.host_link)[1]


def seconds_with_copies(module: Module, device: DeviceSpec, ran: Iterable[Kernel] | None = None) -> float:
    """Return the least time in which `device` can run the module, by its kernels and the copies that these wait for.

    **Arguments:** `ran` the module's kernels, where they are known.
    """
    return roofline(module, device, ran).seconds + host_traffic(module, device).wait_seconds


def _run(
    module: Module, computation: Computation, kernel_seconds: Mapping[tuple[str, str], float], link: float
) -> tuple[float, HostTraffic]:
    """Return seconds of a computation, and what it copies."""
    now = waited = 0.0
    sent = fetched = 0
    free = [0.0, 0.0]  # when the link is, there and back
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
