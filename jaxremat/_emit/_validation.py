"""Traced step, emitted program -> that they compute the same, or what of that is not proved, by name.

A program is compared with the step as JAX traced it. For some forms `_program._equivalence` has no rules, or not for
all of them: that such a program computes the step, tests show that compare numbers.

Law: whatever is emitted is proved, or named, or an error.
"""

import logging
import threading
from weakref import WeakKeyDictionary

import jax.extend.core as jex

from .._model._variant import ATTENTION, COPIES, INNER, INSIDE, LOOP, REVERSED, ROWS, Variant
from .._program._equivalence import Equivalence
from .._program._value_numbers import UndecidedError
from .._rewrite._kernel_choice import equivalence
from .._rewrite._trace import Traced

logger = logging.getLogger("jaxremat")

UNPROVED = {
    ATTENTION: "attention without its matrix of scores",
    COPIES: "values in fewer bits",
    INNER: "loops within loops inlined",
    INSIDE: "work in chunks of rows or in microbatches",
    LOOP: "loops with nested checkpointing",
    REVERSED: "reversible blocks",
    ROWS: "work in chunks of rows or in microbatches",
}
"""Kinds of forms that are compared with the traced step, and may be more than the rules know of. Most are proved:
`ROWS` and `INSIDE` are not where `_chunk_loops` has no rule for an operation of the chunks.
"""


TOO_MANY = "too many different loops within loops"
"""The reason for a comparison that takes too long."""


class EmittedOtherwiseError(Exception):
    """A program was emitted that does not compute what it should; not for the user to see."""


_unproved: WeakKeyDictionary[jex.ClosedJaxpr, tuple[str, ...]] = WeakKeyDictionary()
_steps: WeakKeyDictionary[jex.ClosedJaxpr, Equivalence] = WeakKeyDictionary()
_comparing = threading.Lock()  # JAX gives threads that trace the same function the same jaxpr


def unproved(planned: jex.ClosedJaxpr) -> tuple[str, ...]:
    """Return what of an emitted program was not proved when it was compared with its step."""
    return _unproved.get(planned, ())


def validated(traced: Traced, planned: jex.ClosedJaxpr) -> tuple[str, ...]:
    """Compare an emitted program, without what is around it, with its step; returns what is not proved.

    **Raises:** `EmittedOtherwiseError`.
    """
    _unproved[planned] = found = _compared(traced, planned)
    return found


def _compared(traced: Traced, planned: jex.ClosedJaxpr) -> tuple[str, ...]:
    try:
        with _comparing:
            differs = _of(traced.closed).difference(planned)
    except UndecidedError:
        logger.info("not proved: %s", TOO_MANY)
        return (TOO_MANY,)
    if differs is None:
        return ()
    kinds = names(traced.form)
    if not kinds:
        raise EmittedOtherwiseError(f"the emitted program does not provably compute the step: {differs}")
    logger.info("not proved: %s (%s)", ", ".join(kinds), differs)
    return kinds


def names(form: Variant) -> tuple[str, ...]:
    """Return what of a form may not be proved."""
    return tuple(dict.fromkeys(UNPROVED[choice.rule] for choice in form.choices))


def _of(closed: jex.ClosedJaxpr) -> Equivalence:
    if closed not in _steps:
        _steps[closed] = equivalence(closed)
    return _steps[closed]
