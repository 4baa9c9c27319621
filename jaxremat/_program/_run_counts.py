"""Jaxpr -> the equations that may run only once (effects, random draws, host calls) in order, with the trip counts of
their loops.

Invariant: a program derived from another runs them as often, in the same order.
"""

import jax.extend.core as jex

from . import _compat
from ._primitives import inner_jaxprs, runs_once

Runs = list[tuple[str, int]]
"""Primitives, each with the number of iterations of the loops around it."""


def run_counts(closed: jex.ClosedJaxpr) -> Runs:
    """Return the run-once equations that a result or an effect needs."""
    if not any(map(runs_once, closed.jaxpr.eqns)):
        return []
    return _counted(_compat.pruned(closed).eqns, 1)


def check_runs(closed: jex.ClosedJaxpr, original: jex.ClosedJaxpr) -> None:
    """Compare a program with the one from which it was derived. **Raises:** RuntimeError if it merges, repeats, drops
    or moves an equation that may run only once.
    """
    found, expected = run_counts(closed), run_counts(original)
    if found != expected:
        raise RuntimeError(f"operations that must run once run as {found}, but are written as {expected}")


def _counted(eqns: list[jex.JaxprEqn], trips: int) -> Runs:
    found: Runs = []
    for eqn in filter(runs_once, eqns):
        more = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        within = _counted([e for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns], trips * more)
        found.extend(within or [(eqn.primitive.name, trips)])
    return found
