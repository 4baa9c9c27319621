"""`jaxremat check` and `time`: the plain step and the planned one run, beside each other.

Variants of a step and its arguments -> arguments to run it with, and seconds of each run.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich import box
from rich.console import Group
from rich.table import Table

from .._api._comparison import Leaf, Run, copied, differences, follows_signs
from .._api._step import Step
from .._compiler._program import placed
from .._compiler._target import Target
from .._model._device_specs import find
from .._plan._plan import Plan
from .._program._compat import Args, Kwargs
from .._runtime._bytes import format_nbytes
from .._runtime._errors import TargetError
from ._command import Answer, command
from ._subject import BudgetText, PlanningOptions, Subject, step_of

_ROWS = 12


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @command(app, "check")
    def check(
        *,
        subject: Subject,
        budget: BudgetText = None,
        planning: PlanningOptions,
        rtol: Annotated[
            float, typer.Option(min=0.0, help="Tolerance, relative to a result's largest entry or change.")
        ] = 1e-3,
    ) -> Answer:
        """Compare the results of the plain and the planned step.

        Each step runs once, and every array of the results is compared.

        A result at the place of an argument (new parameters, new optimizer state) is compared by how it changed.
        Results may also differ by up to 8 times as much as the plain step's change when the arguments' last bits do.
        """
        plan, plain, planned, args, kwargs, made_up = _both(subject, planning, budget)
        leaves = differences(plain, planned, args, kwargs, rtol)
        wrong = [leaf for leaf in leaves if not leaf.agrees]
        data = {
            "agree": not wrong,
            "differing": len(wrong),
            "drops_nothing": plan.drops_nothing,
            "peak_nbytes": plan.compiled_peak_nbytes,
            "made_up_arguments": made_up,
            "leaves": [asdict(leaf) | {"agrees": leaf.agrees, "relative": leaf.relative} for leaf in leaves],
        }
        return Answer(data, _compared(plan, leaves, made_up), code=1 if wrong else 0)

    @command(app, "time")
    def time(
        *,
        subject: Subject,
        budget: BudgetText = None,
        planning: PlanningOptions,
        runs: Annotated[int, typer.Option(min=1, help="Timed runs of each step.")] = 10,
    ) -> Answer:
        """Time the plain and the planned step, in turn."""
        plan, plain, planned, args, kwargs, made_up = _both(subject, planning, budget)
        seconds = time_in_turn({"plain": plain, "planned": planned}, args, kwargs, runs)
        found = medians(seconds)
        ratio = found["planned"]["median"] / found["plain"]["median"]
        data = {
            "ratio": ratio,
            "runs": runs,
            "seconds": seconds,
            **found,
            "predicted_overhead": plan.overhead,
            "compiled_overhead": plan.compiled_overhead,
            "made_up_arguments": made_up,
        }
        return Answer(data, _timed(plan, found, ratio))


def _both(
    subject: Subject, planning: PlanningOptions, budget: str | None
) -> tuple[Plan, Callable[..., Any], Step, Any, Any, bool]:
    """Return the plan; the plain step and the planned one; arguments, and whether they were made up from shapes."""
    _here(subject.target)
    call = subject.load()
    args, kwargs, made_up = concrete(call.args, call.kwargs)
    step = step_of(subject, call.fn, budget, planning)
    plan = step.plan(*args, **kwargs)
    plain = placed(step._program, args, kwargs).plain  # with the same compiler options
    return plan, plain, step, args, kwargs, made_up


def _here(target: str | None) -> None:
    """**Raises:** `TargetError` where the steps could not be run."""
    if target is not None and Target(target).device not in {
        find(str(d.device_kind)) for d in jax.local_devices()
    }:
        raise TargetError(
            f"`--target {target}`: this machine has no such device, and this command runs both steps. Leave it out to "
            f"run them here, or use `jaxremat plan --target {target}`, which only compiles."
        )


def _compared(plan: Plan, leaves: list[Leaf], made_up: bool) -> Group:
    wrong = sum(not leaf.agrees for leaf in leaves)
    verdict = f"{wrong} of {len(leaves)} results differ" if wrong else f"all {len(leaves)} results agree"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column("result")
    table.add_column("type")
    for name in ("difference", "of largest", "by rounding"):
        table.add_column(name, justify="right")
    table.add_column()

    def order(leaf: Leaf) -> tuple[bool, float]:
        return leaf.agrees, -leaf.relative

    for leaf in sorted(leaves, key=order)[:_ROWS]:
        mark = "" if leaf.agrees else "differs"
        mark = mark if leaf.finite else f"{mark} not finite".strip()
        table.add_row(
            leaf.path, leaf.shape, f"{leaf.apart:.1e}", f"{leaf.relative:.1e}", f"{leaf.rounding:.1e}", mark
        )
    rest = [f"... and {len(leaves) - _ROWS} more that differ less"] if len(leaves) > _ROWS else []
    notes = ["The arguments are shapes; they were filled with random floats and zeros."] * made_up
    if plan.drops_nothing:
        forms = [str(form) for form in (*plan.loops, *plan.copies)]
        notes.append(f"Nothing is recomputed: {'; '.join(forms) or 'the plain step fits'}.")
    return Group(_peak(plan), table, *rest, *notes, *follows_signs(leaves), verdict)


def _timed(plan: Plan, found: dict[str, dict[str, float]], ratio: float) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    for name in ("", "median", "fastest", "slowest"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in found.items():
        table.add_row(name, *(f"{1e3 * figures[key]:.2f} ms" for key in ("median", "fastest", "slowest")))
    priced = "" if plan.compiled_overhead is None else f", a roofline {1 + plan.compiled_overhead:.3f}"
    return Group(
        _peak(plan),
        table,
        f"{ratio:.3f} times the plain step's time; the planner's model says {1 + plan.overhead:.3f}{priced}",
    )


def _peak(plan: Plan) -> str:
    peak = plan.compiled_peak_nbytes or plan.predicted_peak_nbytes
    return f"peak {format_nbytes(peak)}; the plain step needs {plan.plain_needs}"


def concrete(args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments with arrays in place of shapes, and whether there were any.

    Floats are random in [0, 0.1), which suits weights and second moments alike; integers are 0.
    """
    shapes = 0

    def fill(leaf: object) -> Any:
        nonlocal shapes
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        shapes += 1
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        key = jax.random.fold_in(jax.random.key(0), shapes)
        return jax.random.uniform(key, leaf.shape, jnp.float32, maxval=0.1).astype(leaf.dtype)

    args, kwargs = jax.tree.map(fill, (args, kwargs))
    return args, kwargs, shapes > 0


def time_in_turn(runs: Mapping[str, Run], args: object, kwargs: object, count: int) -> dict[str, list[float]]:
    """Return seconds of each run of each, in turn, so that whatever else the machine does meets all of them.

    Each starts from a copy of the arguments, made outside of the time, as a step may overwrite them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, count):  # run -1 warms up
        for name, run in runs.items():
            own, named = jax.block_until_ready(copied((args, kwargs)))
            began = time.perf_counter()
            jax.block_until_ready(run(*own, **named))
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, fastest and slowest of each."""
    return {
        name: {"median": statistics.median(each), "fastest": min(each), "slowest": max(each)}
        for name, each in seconds.items()
    }
