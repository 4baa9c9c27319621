"""Traced step, emitted program -> proof that they compute the same, or the names of the parts that are not proved.

A program is compared with the step as JAX traced it. For some forms `_program._equivalence` has no rules, or not for
all of them; tests compare their results numerically.

Invariant: every emitted program is proved, or its unproved parts are named, or an error is raised.
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
"""Kinds of forms that may exceed the rules of the comparison. Most are proved: `ROWS` and `INSIDE` fail only if
`_chunk_loops` has no rule for an operation of the chunks.
"""


TOO_MANY = "too many different loops within loops"
"""The reason given if a comparison takes too long."""


class EmittedOtherwiseError(Exception):
    """An emitted program does not compute the step. Users do not see this error."""


_unproved: WeakKeyDictionary[jex.ClosedJaxpr, tuple[str, ...]] = WeakKeyDictionary()
_steps: WeakKeyDictionary[jex.ClosedJaxpr, Equivalence] = WeakKeyDictionary()
_comparing = threading.Lock()  # JAX gives threads that trace the same function the same jaxpr


def unproved(planned: jex.ClosedJaxpr) -> tuple[str, ...]:
    """Return the parts of an emitted program that were not proved when it was compared with its step."""
    return _unproved.get(planned, ())


def validated(traced: Traced, planned: jex.ClosedJaxpr) -> tuple[str, ...]:
    """Compare an emitted program with its step, and return the parts that are not proved. **Raises:**
    `EmittedOtherwiseError`.
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
    """Return the kinds of a form that may not be proved."""
    return tuple(dict.fromkeys(UNPROVED[choice.rule] for choice in form.choices))


def _of(closed: jex.ClosedJaxpr) -> Equivalence:
    if closed not in _steps:
        _steps[closed] = equivalence(closed)
    return _steps[closed]
