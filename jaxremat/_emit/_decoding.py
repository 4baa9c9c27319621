"""Values with copies in fewer bits -> equations that decode them only where nothing but the copy is there.

In the forward pass a value is there when it is encoded: what is decoded is the value itself. So it is in a stage that
makes the value again, or reads it saved; what encodes it there is read by nothing and goes. Exact copies are read in
their value's place everywhere.
"""

from typing import Any

from .._program import _compat


class Decoding:
    """What becomes of such values in an emitter's program.

    **Fields:** `copies` the ids of the saved ones: what is decoded of them is made again where it is read.
    """

    def __init__(self, emitter: Any) -> None:
        self.emitter = emitter
        encoded = [each for each in emitter.traced.encoded if not each.exact]
        self.whole = {emitter.maker(each.decoded): each.whole for each in encoded}
        parts = {emitter.value_of[v] for each in encoded for v in each.parts}
        self.copies = parts & emitter.schedule.saved

    def as_made(self, n: int, eqn: Any) -> Any:
        """An equation in its own place, where the value itself is there to be decoded."""
        return eqn if (whole := self.whole.get(n)) is None else _same(whole, eqn)

    def again(self, n: int, eqn: Any) -> Any:
        """An equation that a stage runs again."""
        whole = self.whole.get(n)
        there = (
            whole in self.emitter.clones or self.emitter.value_of.get(whole) in self.emitter.schedule.saved
        )
        return _same(whole, eqn) if whole is not None and there else eqn


def _same(operand: Any, eqn: Any) -> Any:
    """An equation that gives its operand, under the name and in the place of another: the compiler drops it."""
    same = _compat.permuted(operand, range(operand.aval.ndim), eqn.source_info)
    return same.replace(outvars=eqn.outvars)
