"""Lengths of loops, the loops around them -> how often the body of each runs in one step."""

from collections.abc import Sequence


def total_trips(lengths: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Return for each loop its own iterations times those of all loops around it.

    **Arguments:** `parents` for each loop the loop around it, which stands before it, -1 for none.
    """
    found: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        found.append(length * (found[parent] if parent >= 0 else 1))
    return tuple(found)
