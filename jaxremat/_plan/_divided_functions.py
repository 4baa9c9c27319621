"""Function that is differentiated later, budget of held bytes -> the function itself, or part after part, whichever is
planned better.

As parts are loops of the function's, a plan of it in parts is made as any other, see `_residuals`. For each set of
regions two numbers of parts are tried at most: one that is enough in any case, and the fewest that are by what was
found for that, since what is made again of a part is as large as the part.

Law: a function in parts is proved to be the function, or is not taken.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from .._emit._joint import Function, Joint, NotReversibleError, in_parts
from .._model._device_specs import DeviceSpec
from .._program._primitives import inner_eqns
from .._program._value_numbers import UndecidedError
from .._report._loop_forms import LoopForm
from .._rewrite._function_parts import Division, divisions
from .._rewrite._kernel_choice import equivalence
from .._runtime._errors import InfeasibleBudgetError
from ._plan import HeldPlan
from ._residuals import LEAST_SLACK, Found, as_plan, of_two, saved_nbytes

logger = logging.getLogger("jaxremat")

FEW = 0.02
"""A plan that recomputes for no more than this share of the seconds of both passes is good enough without parts."""

MOST_OVERHEAD = 1.0
"""Parts that take longer by more than this share of both passes, as kernels of few rows do, are not wanted where the
function can be planned without."""

BESIDE = 1 / 4
"""Parts are small enough where one of them keeps no more than this share of what regions hand on."""


@dataclass(frozen=True)
class Way:
    """**Fields:** the `function` that is followed, itself or in parts; its `joint` program; what was `found` for it;
    the `division`, None where it is the function itself; `plain_nbytes` what plain JAX keeps of that, and
    `plain_seconds` what both of its passes take.
    """

    function: Function
    joint: Joint
    found: Found
    division: Division | None
    plain_nbytes: int
    plain_seconds: float

    @property
    def plan(self) -> HeldPlan:
        """What is told of it."""
        return as_plan(self.joint, self.found, self.forms, self.plain_nbytes, self.plain_seconds)

    @property
    def seconds(self) -> float:
        """What both passes take by the model."""
        return self.found.graph.step_seconds + self.found.profile.extra_seconds

    @property
    def forms(self) -> tuple[LoopForm, ...]:
        """The regions in parts, for people."""
        if self.division is None:
            return ()
        both = zip(self.division.regions, self.division.parts, strict=True)
        return tuple(LoopForm(region.rows, (count,), region.source, rows=True) for region, count in both)


Choice = tuple[int, int] | None
"""The ladder and the rung of a division among a function's `divisions`."""


def chosen(function: Function, choice: Choice) -> Division | None:
    """Return the division that was chosen for an equal function."""
    return None if choice is None else divisions(function.closed)[choice[0]][choice[1]]


def best_way(
    function: Function, planned: Callable[[Division | None], Way], device: DeviceSpec, *, least: bool
) -> tuple[Choice, Way]:
    """Return the best way of a function, and its division's place.

    **Arguments:** `planned` makes a way; `device` that runs it; `least` whether the least memory is asked for, rather
    than bytes.

    **Raises:** what `planned` does of the function itself, where no way fits.
    """
    ways: list[tuple[Choice, Way]] = []
    most = math.inf
    refused: list[InfeasibleBudgetError] = []
    try:
        ways.append((None, whole := planned(None)))
        if not least and whole.found.profile.extra_seconds <= FEW * whole.found.graph.step_seconds:
            return ways[0]
        plain_nbytes, budget = whole.plain_nbytes, whole.found.budget_nbytes or 0
        most = MOST_OVERHEAD * whole.found.graph.step_seconds
    except InfeasibleBudgetError as error:
        refused.append(error)
        plain_nbytes, budget = 0, error.budget_nbytes

    def tried(number: int, rung: int) -> Way | None:
        try:
            if is_proved(function, ladder[rung]):
                ways.append(((number, rung), way := planned(ladder[rung])))
                return way
        except NotReversibleError:
            pass
        except InfeasibleBudgetError as error:
            refused.append(error)
        return None

    for number, ladder in enumerate(divisions(function.closed)):
        able = sum(division.more_seconds(device) <= most for division in ladder)
        ladder = ladder[: max(able, 1)]
        rung = _enough(ladder, plain_nbytes, None if least else budget)
        way = tried(number, rung)
        if way is None and rung < len(ladder) - 1:
            rung = len(ladder) - 1
            way = tried(number, rung)
        if way is None:
            continue
        within = of_two(way.found) + LEAST_SLACK * plain_nbytes if least else budget
        if (fewer := _fewest(ladder, rung, way.found, within, least)) < rung:
            tried(number, fewer)
    if not ways:
        raise min(refused, key=lambda error: error.min_peak_nbytes)
    if least:
        enough = min(of_two(way.found) for _, way in ways) + LEAST_SLACK * plain_nbytes
        ways = [each for each in ways if of_two(each[1].found) <= enough]
    return min(ways, key=lambda each: each[1].seconds)


def _fewest(ladder: Sequence[Division], rung: int, found: Found, within: float, least: bool) -> int:
    """Return the rung of the fewest parts that need no more than this, by what was found for a rung."""
    saved = saved_nbytes(found)
    part = found.profile.peak_nbytes - saved
    kept = 2 * saved if least else saved
    grown = (max(b / a for a, b in zip(each.parts, ladder[rung].parts, strict=True)) for each in ladder)
    return next((i for i, times in enumerate(grown) if kept + part * times <= within), rung)


def _enough(ladder: Sequence[Division], plain_nbytes: int, budget: int | None) -> int:
    """Return the first of these divisions of which a part is small beside what is kept in any case, or fits."""

    def is_enough(division: Division) -> bool:
        if budget is not None:
            return division.handed_nbytes + division.inner_nbytes <= budget
        return division.inner_nbytes <= max(LEAST_SLACK * plain_nbytes, BESIDE * division.handed_nbytes)

    return next((i for i, division in enumerate(ladder) if is_enough(division)), len(ladder) - 1)


def is_proved(function: Function, division: Division) -> bool:
    """Return whether the function in parts is proved to have its values and tangents.

    Functions that have no tangents, but a backward pass of their own somewhere, are compared by their values, where
    nothing that is in parts has a derivative of its own: JAX differentiates the same operations then.
    """
    other = in_parts(function, division)
    differs = _difference(function, other, _with_tangents)
    eqns = [function.closed.jaxpr.eqns[i] for region in division.regions for i in region.rules]
    if differs is not None and not any(_has_derivatives(eqn) for eqn in eqns):
        differs = _difference(function, other, lambda each: each.closed)
    if differs is not None:
        logger.info("not taken, because it is not proved: a function in parts (%s)", differs)
    return differs is None


def _difference(
    function: Function, other: Function, program: Callable[[Function], jex.ClosedJaxpr]
) -> str | None:
    """Return where a program of one function is not seen to be that of the other."""
    try:
        return equivalence(program(function)).difference(program(other))
    except (UndecidedError, TypeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _has_derivatives(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation, or one within, is a function with derivatives of its own."""
    return any(each.primitive.name.startswith("custom_") for each in (eqn, *inner_eqns(eqn)))


def _with_tangents(function: Function) -> Any:
    """Return the program of values and tangents -> those of the results."""
    avals, smooth = [v.aval for v in function.closed.jaxpr.invars], function.inexact

    def both(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Any:
        known = iter(tangents)
        every = [
            next(known) if is_smooth else np.zeros(aval.shape, jax.dtypes.float0)
            for aval, is_smooth in zip(avals, smooth, strict=True)
        ]
        results, changes = jax.jvp(jex.jaxpr_as_fun(function.closed), primals, every)
        return results, [change for change, d in zip(changes, function.differentiable, strict=True) if d]

    return jax.make_jaxpr(both)(avals, [a for a, is_smooth in zip(avals, smooth, strict=True) if is_smooth])
