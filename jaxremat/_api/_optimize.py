"""Function, budget -> a decorated step: `optimize`."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .._compiler._program import Program
from .._compiler._target import Target
from .._model._pins import parse_pins
from .._model._sites import EXACT
from .._plan._arguments import as_tuple, check_choice, check_host_memory, check_planning, parse_forms
from .._plan._plan import GivenPlan, given_plan
from .._plan._request import Offload, Options
from .._runtime._bytes import Budget, parse_budget, parse_margin
from .._runtime._errors import ArgumentError
from .._solver import Milp, Solver
from ._jitted_functions import handed_over
from ._step import Step

_UNSET: Any = object()


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
    solver: Solver | None = None,
    time_limit: float = 10.0,
    verify: bool = True,
    effort: str = "normal",
    target: str | None = None,
    profile: str = "roofline",
    workspace_margin: int | float | str = 0,
    cache: bool = True,
    respect_checkpoint: bool = False,
    progress: bool | None = None,
    pins: Mapping[str | re.Pattern[str], str] | None = None,
    planning_seconds: float | None = None,
    offload: Offload = False,
    host_budget: Budget = None,
    allow: Collection[str] = EXACT,
) -> Callable[[Callable[..., Any]], "Step"]:
    """Return a drop-in for `jax.jit` on a whole train step that keeps its compiled peak within a budget.

    **Arguments:**

    - `budget`: the peak allowed on one device, arguments + outputs + temporaries - aliased bytes: an int of bytes,
      `"24GiB"`, `"24GB"`, `"500MiB"`, a float in (0, 1] as a share of the device's memory, None for all of it, or
      `"min"` for about the least reachable at no more than twice the step's time: the fastest found of what needs up to
      5 % more temporaries.
    - `plan`: a plan made before, or the file that it was saved to, in place of a budget; needs no solver.
    - `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`, `in_shardings`, `out_shardings`,
      `compiler_options`: as in `jax.jit`. What the backend needs for barriers to count is added to the options. A
      jitted function brings its own along.
    - `solver`: a `jaxremat.Solver`; None for `jaxremat.Milp()`.
    - `time_limit`: the work of each solve, in seconds of a usual machine (nodes are counted, so that plans are the same
      on all); the incumbent and its honest gap are used when it ends. Ctrl-C ends planning at once.
    - `verify`: compile, compare with the budget, correct and plan again at most twice. False trusts the model.
    - `effort`: `"thorough"` allows more rounds.
    - `target`: plan for this device, one of `jaxremat.targets()`, or several, `"h100x8"`, `"h100:16x8"` on 16 hosts,
      on a machine that need not have them: the peak is that of XLA's compiler for it, on one device
      (`pip install "jaxremat[targets]"`). Such a step can be planned, lowered and compiled anywhere, and called where
      the device is.
    - `profile`: where the planner's times come from: `"roofline"` from the device's figures, `"measure"` from running
      each distinct operation alone on the device at hand, once (kept in the cache folder).
    - `workspace_margin`: what the compiled peak leaves free below the budget, for memory that the compiler does not
      count (workspaces that libraries allocate while they run): bytes, text, or a float below 1 as a share of the
      budget. A plan carries its own.
    - `cache`: keep the plan on disk (`$JAXREMAT_CACHE`, else `~/.cache/jaxremat`) and follow it the next time that the
      same step is planned within the same budget for the same device; it is compiled and verified then as any other.
      Plans of solvers of your own are not kept. The environment variable `JAXREMAT_PLAN_CACHE=0` is False everywhere.
    - `respect_checkpoint`: leave your own `jax.checkpoint`s and `nn.remat`s as they are: what they compute again, they
      do, as one piece, and the planner plans around them. By default they are undone, and all is planned afresh. A
      plan carries its own.
    - `progress`: show bars for tracing, compiling and solving. By default on a terminal where rich is installed
      (`pip install "jaxremat[tools]"`), but not in tests and continuous integration; True there too, False never. The
      environment variable `JAXREMAT_PROGRESS=0` is False everywhere.
    - `pins`: what `jaxremat.hint` says in the model, from outside: `{"Block_*/Dense_0": "recompute"}`. A pattern is a
      path of globs within a name stack (`jaxremat.Node.scope`, ended by the primitive or a `checkpoint_name`), or
      within a source line, or a compiled regular expression; what it matches is `"save"`d, `"recompute"`d or
      `"offload"`ed, or a `"stage"` of the backward pass begins where the backward pass of what it matches does.
    - `planning_seconds`: when a clock stops the search, counted from the first call; what is begun is finished, what it
      cut short is improved when asked for again. By default work is counted: once a plan fits, 2 compilations and one
      for each time that the step goes into 6,000 equations, 8 at most; twice as many while none does, as many again
      for inexact forms or host memory; no limit where `effort="thorough"`. See `Plan.planning`.
    - `offload`: let the planner keep saved values in host memory between their readers, where that costs less than
      computing them again. Plans without are looked for first, so that planning may take twice as long. Where nothing
      fits, or only what is expensive, it keeps donated arguments there that are read to be updated alone, as an
      optimizer's state: the step returns them there, and a warning says so (see `Plan.on_host`). A CPU has none: with
      True a warning says so. `"auto"` is True where there is one.
    - `host_budget`: what these may take there, all devices of the process together: bytes or text, by default half of
      the machine's memory, without limit for a `target`.
    - `allow`: what the planner may do besides, where that is cheaper. `"attention"`: without its matrix of scores.
      `"rows"`: work on large values (logits), some rows after the others. `"microbatches"`: a part of the batch after
      the others, gradients added up, where no statistics cross it. All draw the same random numbers, and compute the
      same but for the order of sums; these are `jaxremat.EXACT`, the default. `"bf16_residuals"`, `"fp8_residuals"`,
      `"int8_residuals"`: keep values for the backward pass in bfloat16, or in 8 bits with a scale for each 128;
      `"reversible"`: undo blocks whose input follows from their output, as couplings' does. With any of these the
      forward pass stays as it is, gradients are rounded: `jaxremat.compare` says how much.

    **Returns:** a decorator that gives a `Step`.

    **Raises:** on the first call with new shapes: `BudgetError`, `InfeasibleBudgetError`, `PlanMismatchError`,
    `SolverError`, `ArgumentError`, `TargetError`, `HintError`.

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
    check_choice("effort", effort, "normal", "thorough")
    check_planning(solver, time_limit, planning_seconds)
    check_choice("profile", profile, "roofline", "measure")
    device = None if target is None else Target(target)
    if device is not None and profile == "measure":
        raise ArgumentError(
            f'`profile="measure"` runs operations on the device at hand, and `target={target!r}` plans for one '
            "that need not be there. Leave `profile` out, or plan on that device without `target`."
        )
    parse_margin(workspace_margin, None)
    check_host_memory(offload, host_budget)
    forms = parse_forms(allow)
    planning = {
        "workspace_margin": workspace_margin, "respect_checkpoint": respect_checkpoint, "pins": pins,
        "offload": offload,
    }  # fmt: skip
    if plan is not None and any(planning.values()):
        raise ArgumentError(
            f"`{next(name for name, given in planning.items() if given)}` belongs to planning; a plan that is given "
            "carries what it was made with. Leave it out, or plan again."
        )
    if workspace_margin and isinstance(budget, str) and budget.strip().lower() == "min":
        raise ArgumentError(
            '`workspace_margin` is kept free below a budget, and "min" asks for the least peak, whatever that is. '
            "Leave it out, or write the budget in bytes."
        )
    if plan is None and isinstance(budget, (str, int, float)):
        parse_budget(budget, 1 << 40)  # a budget that can never be read is refused where it is written

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
        options = Options(
            solver or Milp(),
            time_limit,
            verify,
            effort,
            profile,
            workspace_margin,
            cache,
            respect_checkpoint,
            progress,
            parse_pins(pins or {}),
            planning_seconds,
            offload,
            host_budget,
            forms,
        )
        return Step(program, None if budget is _UNSET else budget, given_plan(plan), options)

    return decorate
