"""Function, budget -> a decorated step: `optimize`."""

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
from .._runtime._budgets import Budget, parse_budget
from .._runtime._errors import ArgumentError
from ._jitted_functions import handed_over
from ._step import Step

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
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
    target: str | None = None,
    pins: Mapping[str | re.Pattern[str], str] | None = None,
    offload: Offload = False,
    allow: Collection[str] = EXACT,
    planning: Planning = DEFAULT,
    like: GivenPlan | Literal[False] = None,
) -> Callable[[Callable[..., Any]], "Step"]:
    """Return a drop-in for `jax.jit` on a whole train step that keeps its compiled peak within a budget.

    **Arguments:**

    - `budget`: the peak allowed on one device, arguments + outputs + temporaries - aliased bytes: an int of bytes,
      `"24GiB"`, `"24GB"`, `"500MiB"`; a float in (0, 1] as a share of the device's memory, None for all of it;
      `"50% of peak"` (or `"50%"`) of the plain step, `"50% of temporaries"` of it beside its arguments and outputs; or
      `"min"` for about the least reachable at no more than twice the step's time: the fastest found of what needs up to
      5 % more temporaries.
    - `plan`: a plan made before, or the file that it was saved to, in place of a budget; needs no solver.
    - `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`, `in_shardings`, `out_shardings`,
      `compiler_options`: as in `jax.jit`. What the backend needs for barriers to count is added to the options. A
      jitted function brings its own along.
    - `target`: plan for this device, one of `jaxremat.targets()`, or several, `"h100x8"`, `"h100:16x8"` on 16 hosts,
      on a machine that need not have them: the peak is that of XLA's compiler for it, on one device
      (`pip install ".[targets]"` in a checkout). Such a step can be planned, lowered and compiled anywhere, and called
      where the device is.
    - `pins`: what `jaxremat.hint` says in the model, from outside: `{"Block_*/Dense_0": "recompute"}`. A pattern is a
      path of globs within a name stack (`jaxremat.Node.scope`, ended by the primitive or a `checkpoint_name`), or
      within a source line, or a compiled regular expression; what it matches is `"save"`d, `"recompute"`d or
      `"offload"`ed, or a `"stage"` of the backward pass begins where the backward pass of what it matches does.
    - `offload`: let the planner keep saved values in host memory between their readers, where that costs less than
      computing them again. Plans without are looked for first, so that planning may take twice as long. Where nothing
      fits, or only what is expensive, it keeps donated arguments there that are read to be updated alone, as an
      optimizer's state: the step returns them there, and a warning says so (see `Plan.on_host`). A CPU has none: with
      True a warning says so. `"auto"` is True where there is one. Bytes or text such as `"64GiB"` are True, and limit
      what all devices of the process use there together: by default half of the machine's memory, without limit for a
      `target`.
    - `allow`: what the planner may do besides, where that is cheaper. `"attention"`: without its matrix of scores.
      `"rows"`: work on large values (logits), some rows after the others. `"microbatches"`: a part of the batch after
      the others, gradients added up, where no statistics cross it. All draw the same random numbers, and compute the
      same but for the order of sums; these are `jaxremat.EXACT`, the default. `"bf16_residuals"`, `"fp8_residuals"`,
      `"int8_residuals"`: keep values for the backward pass in bfloat16, or in 8 bits with a scale for each 128;
      `"reversible"`: undo blocks whose input follows from their output, as couplings' does. With any of these the
      forward pass stays as it is, gradients are rounded: `jaxremat.compare` says how much.
    - `planning`: how the plan is looked for and checked, a `jaxremat.Planning`.
    - `like`: a plan of the same step for other shapes (another batch size, another length of sequences), or its file.
      The plan for these shapes is made from it, with at most one solve and two compilations, and verified as any other.
      Where it does not fit, or would take 2 % of the step longer than that plan itself does, the step is planned as
      usual. By default the step's own plans for other shapes, and those in the plan cache within the same budget, are
      tried so, unless `Planning(effort="thorough")`; False plans afresh.

    **Returns:** a decorator that gives a `Step`.

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
            '`optimize` takes either a budget, as in `optimize("24GiB")`, or `plan=...`, and not both.'
        )
    device = None if target is None else Target(target)
    if device is not None and planning.profile == "measure":
        raise ArgumentError(
            f'`Planning(profile="measure")` runs operations on the device at hand, and `target={target!r}` plans '
            "for one that need not be there. Leave `profile` out, or plan on that device without `target`."
        )
    check_offload(offload)
    forms = parse_forms(allow)
    carried = {
        "workspace_margin": planning.workspace_margin, "respect_checkpoint": planning.respect_checkpoint,
        "pins": pins, "offload": offload, "like": like,
    }  # fmt: skip
    if plan is not None and any(carried.values()):
        raise ArgumentError(
            f"`{next(name for name, given in carried.items() if given)}` belongs to planning; a plan that is given "
            "carries what it was made with. Leave it out, or plan again."
        )
    if planning.workspace_margin and isinstance(budget, str) and budget.strip().lower() == "min":
        raise ArgumentError(
            '`workspace_margin` is kept free below a budget, and "min" asks for the least peak, whatever that is. '
            "Leave it out, or write the budget in bytes."
        )
    if plan is None and isinstance(budget, (str, int, float)):
        parse_budget(budget, 1 << 40, lambda: (0, 1))  # what can never be read is refused where it is written

    alike = None if like is False else tuple(filter(None, [given_plan(like)]))
    request = Request(
        None if budget is _UNSET else budget, planning, parse_pins(pins or {}), offload, forms, alike
    )
    jitting = {
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames, "static_argnums": static_argnums,
        "static_argnames": static_argnames, "in_shardings": in_shardings, "out_shardings": out_shardings,
        "compiler_options": compiler_options,
    }  # fmt: skip

    def decorate(fn: Callable[..., Any]) -> Step:
        if not callable(fn):
            raise ArgumentError(f"`optimize` decorates functions; it was given a {type(fn).__name__}.")
        fn, of_jit = handed_over(fn, jitting)
        program = Program(
            fn=fn,
            static_argnums=as_tuple(of_jit["static_argnums"]),
            static_argnames=as_tuple(of_jit["static_argnames"]),
            donate_argnums=as_tuple(of_jit["donate_argnums"]),
            donate_argnames=as_tuple(of_jit["donate_argnames"]),
            in_shardings=of_jit["in_shardings"],
            out_shardings=of_jit["out_shardings"],
            compiler_options=tuple(sorted((of_jit["compiler_options"] or {}).items())),
            target=device,
        )
        return Step(program, request, given_plan(plan))

    return decorate
