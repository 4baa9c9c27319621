"""Kernels of a compiled module -> how often devices send each other something in one step, by kind."""

from collections import Counter
from collections.abc import Iterable

from ._roofline import Kernel

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(ran: Iterable[Kernel]) -> Counter[str]:
    """Return the number of operations of each kind, those of loops once for each iteration.

    One operation may be of many arrays.
    """
    found: Counter[str] = Counter()
    for kernel in ran:
        kind = kernel.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            found[kind] += kernel.total_trips
    return found
