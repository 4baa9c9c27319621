"""Function, budget -> a decorated step: `optimize`.

Invariant: no option of a jitted function (donation, static arguments, shardings, compiler options) is lost: it is taken
over, or an error says that it cannot be.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from .._compiler._program import Program
from .._compiler._target import Target
from .._model._pins import parse_pins
from .._model._sites import EXACT
from .._plan._arguments import as_tuple, check_offload, parse_forms
from .._plan._plan import GivenPlan, given_plan
from .._plan._request import DEFAULT, Offload, Planning, Request, takes_planning
from .._program import _compat
from .._runtime._budgets import Budget, parse_budget
from .._runtime._errors import ArgumentError
from ._step import Step

_NUMBERED = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
_LOST = ("donate_argnums", "in_shardings", "out_shardings", "compiler_options")
"""Options of a jitted function that have no effect when another jitted function calls it."""


def handed_over(
    fn: Callable[..., object], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function to trace and its options.

    **Arguments:** `options` of `optimize`, by their names in `jax.jit`.

    **Raises:** `ArgumentError` if the two contradict each other, or if a jitted function is inside a partial
    application or a method, so that its options refer to other arguments.
    """
    own = _compat.jit_options(fn)
    if own is None:
        _check_inner(fn)
        return fn, dict(options)
    for name in ("device", "backend", "layouts"):
        if own.pop(name):
            raise ArgumentError(
                f"`optimize` was given a jitted function, and cannot keep its option `{name}`. Pass the "
                "function without `jax.jit`, and place its arguments with `jax.device_put`."
            )
    merged = dict(options)
    for name, value in own.items():
        given = as_tuple(options[name], name) if name in _NUMBERED else options[name]
        if value and given and given != value:
            raise ArgumentError(
                f"`optimize` was given `{name}={options[name]!r}`, and its function is jitted with "
                f"`{name}={value!r}`. Write it once, as `optimize(..., {name}=...)`, and pass the function "
                "without `jax.jit`."
            )
        merged[name] = given or value
    return fn.__wrapped__, merged  # type: ignore[attr-defined]


def _check_inner(fn: Callable[..., object]) -> None:
    inner = fn
    while isinstance(inner, functools.partial) or hasattr(inner, "__func__"):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__  # type: ignore[attr-defined]
    lost = [name for name in _LOST if (_compat.jit_options(inner) or {}).get(name)] if inner is not fn else []
    if lost:
        raise ArgumentError(
            f"`optimize` was given a {type(fn).__name__} of a function that is jitted with `{lost[0]}`, which "
            f"has no effect within another program. Write `optimize(..., {lost[0]}=...)`, and leave out "
            "`jax.jit`."
        )


_UNSET: Any = object()


@takes_planning
def optimize(
    budget: Budget | Callable[..., Any] = _UNSET,
    *,
    plan: GivenPlan = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    in_shardings: object = None,
    out_shardings: object = None,
    compiler_options: Mapping[str, object] | None = None,
    target: str | None = None,
    pins: Mapping[str | re.Pattern[str], str] | None = None,
    offload: Offload = False,
    allow: Collection[str] = EXACT,
    planning: Planning = DEFAULT,
    like: GivenPlan | Literal[False] = None,
) -> Callable[[Callable[..., Any]], "Step"]:
    """Return a drop-in for `jax.jit` on a whole train step that keeps its compiled peak within a budget.

    **Arguments:**

    - `budget`: the peak allowed on one device (arguments + outputs + temporaries - aliased bytes): an int of bytes,
      `"24GiB"`, `"24GB"`, `"500MiB"`; a float in (0, 1] as a share of the device's memory, None for all of it; `"50% of
      peak"` (or `"50%"`) of the plain step; `"50% of temporaries"` on top of its arguments and outputs; or `"min"` for
      about the least memory at no more than twice the step's time: the fastest plan found within 5 % of the least
      temporaries.
    - `plan`: an existing plan, or the file that it was saved to, instead of a budget. It needs no solver.
    - `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`, `in_shardings`, `out_shardings`,
      `compiler_options`: as in `jax.jit`. Options that keep XLA from removing barriers are added. A jitted function
      passes its own options on.
    - `target`: plan for this device, one of `jaxremat.targets()`, or for several, `"h100x8"`, or `"h100:16x8"` on 16
      hosts. This machine need not have them: the peak is that of XLA's compiler for one of the devices (`pip install
      ".[targets]"` in a checkout). Such a step can be planned, lowered and compiled anywhere, and called only on the
      device.
    - `pins`: decisions about values, as with `jaxremat.hint`, but from outside the model: `{"Block_*/Dense_0":
      "recompute"}`. A pattern is a path of globs within a name stack (`jaxremat.Node.scope`, ended by the primitive or
      a `checkpoint_name`) or within a source line, or a compiled regular expression. Matching values are saved
      (`"save"`), recomputed (`"recompute"`) or offloaded (`"offload"`); with `"stage"`, a stage of the backward pass
      begins where the backward pass of the matching operations does.
    - `offload`: allow the planner to keep saved values in host memory between their readers, if that costs less than
      recomputing them. The planner first searches for plans without host memory, so planning may take twice as long. If
      no plan fits, or only expensive ones, it also keeps donated arguments in host memory: those that only the update
      reads, such as an optimizer's state, and then stacks that loops read one row at a time, such as layers' weights.
      The step returns them there, and a warning says so (see `Plan.on_host`). On a CPU, True only causes a warning;
      `"auto"` uses host memory only if the best plan without it makes the step 2 % longer, and for arguments only if
      nothing fits; planning takes at most about a third longer. Bytes or text such as `"64GiB"` mean True, and
      limit the host memory that all devices of the process use together. The default limit is half of the machine's
      memory; for a `target` there is none.
    - `allow`: transformations that the planner may use besides recomputation, where they are cheaper. `"attention"`:
      attention without its matrix of scores. `"rows"`: work on large values (logits) in chunks of rows.
      `"microbatches"`: most of the step on one part of the batch at a time, with accumulated gradients. These are
      `jaxremat.EXACT`, the default: they draw the same random numbers, and change only the order of sums.
      `"bf16_residuals"`, `"fp8_residuals"`, `"int8_residuals"`: save values in bfloat16, or in 8 bits with a scale for
      each 128 numbers. `"reversible"`: undo blocks whose input follows from their output, such as couplings. These
      round gradients (`jaxremat.compare` reports by how much), and leave the forward pass as it is.
    - `planning`: how to search for a plan and check it, a `jaxremat.Planning`.
    - `like`: a plan of the same step for other shapes (another batch size or sequence length), or its file. The new
      plan is adapted from it, with at most one solve and two compilations, and verified like any other. If it does not
      fit, or is slower than that plan by 2 % of the step, the step is planned as usual. By default this is tried with
      the step's own plans for other shapes, and with those in the plan cache within the same budget, unless
      `Planning(effort="thorough")`. False searches for each shape from scratch.

    **Returns:** a decorator that returns a `Step`.

    **Raises:** on the first call with new shapes: `BudgetError`, `InfeasibleBudgetError`, `PlanMismatchError`,
    `SolverError`, `ArgumentError`, `TargetError`, `CompilationError`, `HintError`.

    ```python
    @jaxremat.optimize("3GiB", donate_argnums=(0, 1))
    def train_step(params, opt_state, batch): ...
    ```
    """
    if callable(budget):
        raise ArgumentError(
            '`optimize` was used as `@jaxremat.optimize` without a budget. Write `@jaxremat.optimize("24GiB")`, or '
            "`@jaxremat.optimize(None)` to fit this device."
        )
    if (budget is _UNSET) == (plan is None):
        raise ArgumentError(
            '`optimize` takes a budget, as in `optimize("24GiB")`, or `plan=...`, but not both.'
        )
    device = None if target is None else Target(target)
    if device is not None and planning.profile == "measure":
        raise ArgumentError(
            f'`Planning(profile="measure")` times operations on this machine\'s device, but `target={target!r}` '
            "plans for another device. Leave out `profile`, or plan on that device without `target`."
        )
    check_offload(offload)
    forms = parse_forms(allow)
    carried = {
        "workspace_margin": planning.workspace_margin, "respect_checkpoint": planning.respect_checkpoint,
        "pins": pins, "offload": offload, "like": like,
    }  # fmt: skip
    if plan is not None and any(carried.values()):
        raise ArgumentError(
            f"`{next(name for name, given in carried.items() if given)}` is an option of planning, but "
            "`plan=...` is already planned. Leave it out, or plan again."
        )
    if planning.workspace_margin and isinstance(budget, str) and budget.strip().lower() == "min":
        raise ArgumentError(
            '`workspace_margin` leaves memory free below a budget, but "min" is no such limit. Leave out the '
            "margin, or write the budget in bytes."
        )
    if plan is None and isinstance(budget, (str, int, float)):
        parse_budget(budget, 1 << 40, lambda: (0, 1))  # an invalid budget raises where it is written

    given = given_plan(plan)
    alike = None if like is False else tuple(filter(None, [given_plan(like)]))
    request = Request(
        None if budget is _UNSET else budget, planning, parse_pins(pins or {}), offload, forms, alike
    )
    jitting = {
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames, "static_argnums": static_argnums,
        "static_argnames": static_argnames, "in_shardings": in_shardings, "out_shardings": out_shardings,
        "compiler_options": compiler_options,
    }  # fmt: skip

    def decorate(fn: Callable[..., object]) -> Step:
        if not callable(fn):
            raise ArgumentError(f"`optimize` decorates functions; it was given a {type(fn).__name__}.")
        fn, of_jit = handed_over(fn, jitting)
        program = Program(
            fn=fn,
            static_argnums=as_tuple(of_jit["static_argnums"], "static_argnums"),
            static_argnames=as_tuple(of_jit["static_argnames"], "static_argnames"),
            donate_argnums=as_tuple(of_jit["donate_argnums"], "donate_argnums"),
            donate_argnames=as_tuple(of_jit["donate_argnames"], "donate_argnames"),
            in_shardings=of_jit["in_shardings"],
            out_shardings=of_jit["out_shardings"],
            compiler_options=tuple(sorted((of_jit["compiler_options"] or {}).items())),
            target=device,
        )
        return Step(program, request, given)

    return decorate
