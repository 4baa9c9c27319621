"""Compiled module -> how often devices send each other something in one step, by kind."""

from collections import Counter

from ._hlo import Module
from ._roofline import kernels

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(module: Module) -> Counter[str]:
    """Return the number of operations of each kind, those of loops once for each iteration.

    One operation may be of many arrays.
    """
    found: Counter[str] = Counter()
    for kernel in kernels(module):
        kind = kernel.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            found[kind] += kernel.total_trips
    return found
