"""A step, a budget and options -> one plan, and what it and its compiled program say: the row of most benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jaxremat
from examples.benchmarks.networks import Program
from examples.benchmarks.records import Record
from jaxremat import InfeasibleBudgetError, Plan

NO_CACHE = jaxremat.Planning(cache=False)
"""Nothing is remembered: what is measured is planning."""

PLANNING = replace(NO_CACHE, planning_seconds=300.0)
"""So long that no search is cut short by a busy machine."""


def measure(step: Program, budget: float | str, target: str | None = None, **options: Any) -> Record:
    """Plan a step, and return what became of it; where nothing fits, the least that was found.

    **Arguments:** `budget` a share of the plain step's temporaries (a float), bytes (an int), or "min"; `options` of
    `jaxremat.plan`.
    """
    options = {"donate_argnums": step.donate_argnums, "planning": PLANNING, **options}
    return measure_of(step.step, step.abstract_args(), budget, target, **options)


def measure_of(
    step: Any, args: Sequence[Any], budget: float | str, target: str | None = None, **options: Any
) -> Record:
    """Plan a function with these arguments; all else is as for `measure`."""
    needs = jaxremat.memory(step, *args, donate_argnums=options.get("donate_argnums", ()), target=target)
    if isinstance(budget, float):
        budget = needs.base_nbytes + int(budget * needs.temporaries_nbytes)
    row = {
        "plain_nbytes": needs.peak_nbytes,
        "arguments_nbytes": needs.arguments_nbytes,
        "temporaries_nbytes": needs.temporaries_nbytes,
        "budget_nbytes": budget,
    }
    try:
        # A new function each time, of which nothing is remembered.
        made = jaxremat.plan(
            lambda *args: step(*args),
            *args,
            budget=budget,
            target=target,
            **{"planning": NO_CACHE, **options},
        )
    except InfeasibleBudgetError as error:
        return row | {"least_nbytes": error.min_peak_nbytes}
    return row | of_plan(made, needs.temporaries_nbytes)


def of_plan(made: Plan, temporaries_nbytes: int) -> Record:
    """Return what a plan says of itself. `first_prediction` is how far the first peak was off, of the temporaries."""
    first = made.rounds[0] if made.rounds else None
    missed = first and first.predicted_peak_nbytes - first.compiled_peak_nbytes
    return {
        "form": made.form.choices,
        "peak_nbytes": made.compiled_peak_nbytes,
        "overhead": made.overhead,
        "compiled_overhead": made.compiled_overhead,
        "seconds": made.account.step_seconds * (1 + (made.compiled_overhead or 0.0)),
        "first_prediction": missed and missed / max(temporaries_nbytes, 1),
        "rounds": len(made.rounds),
        "planning_seconds": made.planning.seconds,
        "offloaded_nbytes": made.offloaded_nbytes,
        "whole_nbytes": sum(copied.whole_nbytes for copied in made.copies),
        "copied_nbytes": sum(copied.nbytes for copied in made.copies),
        "loops": [str(form) for form in made.loops],
    }
