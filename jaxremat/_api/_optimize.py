"""Function, budget -> a decorated step: `optimize`, and the `Step` that it gives."""

import functools
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from .._compiler._devices import detect
from .._compiler._program import Program, device_of, placed
from .._compiler._target import Target
from .._model._device_specs import find
from .._model._form_offers import EXACT
from .._model._pins import parse_pins
from .._plan._arguments import as_tuple, check_choice, check_host_memory, check_planning, parse_forms
from .._plan._baseline import Baseline
from .._plan._plan import Plan
from .._plan._planned import Planned, confirm
from .._plan._request import Offload, Options, Request
from .._report import Report
from .._runtime._bytes import Budget, parse_budget, parse_margin
from .._runtime._errors import ArgumentError, JaxrematWarning
from .._runtime._progress import timed
from .._runtime._progress_bars import shown
from .._solver import Milp, Solver
from ._argument_kinds import kind_of
from ._bound_step import Bound
from ._host_state import Arrangement, usable
from ._nnx_objects import OfObjects
from ._strict_trees import OfLeaves

_UNSET: Any = object()


def optimize(
    budget: Budget | Callable[..., Any] = _UNSET,
    *,
    plan: Plan | None = None,
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
    """A drop-in for `jax.jit` on a whole train step that keeps its compiled peak within a budget.

    **Arguments:**

    - `budget`: the peak allowed on one device, arguments + outputs + temporaries - aliased bytes: an int of bytes,
      `"24GiB"`, `"24GB"`, `"500MiB"`, a float in (0, 1] as a share of the device's memory, None for all of it, or
      `"min"` for about the least reachable at no more than twice the step's time: the fastest found of what needs up to
      5 % more temporaries.
    - `plan`: a plan made before, in place of a budget; needs no solver.
    - `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`, `in_shardings`, `out_shardings`,
      `compiler_options`: as in `jax.jit`. What the backend needs for fences to count is added to the options.
    - `solver`: a `jaxremat.Solver`; None for `jaxremat.Milp()`.
    - `time_limit`: the work of each solve, in seconds of a usual machine (nodes are counted, so that plans are the same
      on all); the incumbent and its honest gap are used when it ends. Ctrl-C ends planning at once.
    - `verify`: compile, compare with the budget, correct and plan again at most twice. False trusts the model.
    - `effort`: `"thorough"` allows more rounds, and tries other forms of fences.
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
    - `offload`: let the planner keep saved values in the host's memory between their readers, where that costs less
      than computing them again. Plans without are looked for first, so that planning may take twice as long.
      Where nothing fits, or only what is dear, it keeps donated arguments there that are read to be updated alone, as
      an optimizer's state: the step returns them there, and a warning says so (see `Plan.on_host`). A CPU has none:
      with True a warning says so. `"auto"` is True where there is one.
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

    def decorate(fn: Callable[..., Any]) -> Step:
        if not callable(fn):
            raise ArgumentError(f"`optimize` decorates functions; it was given a {type(fn).__name__}.")
        program = Program(
            fn=fn,
            static_argnums=as_tuple(static_argnums),
            static_argnames=as_tuple(static_argnames),
            donate_argnums=as_tuple(donate_argnums),
            donate_argnames=as_tuple(donate_argnames),
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            compiler_options=tuple(sorted((compiler_options or {}).items())),
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
        return Step(program, None if budget is _UNSET else budget, plan, options)

    return decorate


class _Recent(NamedTuple):
    """What the last call looked like, and the program that ran it."""

    types: list[Any]
    tree: Any
    static: tuple[Any, ...]
    key: Any
    run: jax.stages.Compiled


class Step:
    """A planned step: call it as the function it wraps. Made by `jaxremat.optimize`."""

    def __init__(
        self,
        program: Program,
        budget: Budget,
        plan: Plan | None,
        options: Options,
    ):
        functools.update_wrapper(self, program.fn)
        self._program = program
        self._budget = budget
        self._given = plan
        self._options = options
        self._planned: dict[Any, Planned] = {}
        self._recent: _Recent | None = None
        self._by_kind: dict[Any, OfObjects | OfLeaves] = {}
        self._arrangement = Arrangement(program, self._prepare)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recent = self._recent
        if recent is None:
            return self._slow_call(args, kwargs)
        dynamic = self._program.dynamic(args, kwargs) if self._program.has_static else (args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        try:
            types = [leaf.aval for leaf in leaves]
        except AttributeError:  # NumPy arrays and Python scalars
            try:
                types = [_type_of(leaf) for leaf in leaves]
            except TypeError:
                return self._slow_call(args, kwargs)
        if types != recent.types or tree != recent.tree:
            return self._slow_call(args, kwargs)
        if self._program.has_static and self._program.static(args, kwargs) != recent.static:
            return self._slow_call(args, kwargs)
        try:
            return recent.run(*dynamic[0], **dynamic[1])
        except (TypeError, ValueError):
            if not any(isinstance(leaf, Tracer) for leaf in leaves) and recent.key == self._key(args, kwargs):
                raise
            return self._slow_call(args, kwargs)  # the same types, traced or placed on other devices

    def _through(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OfObjects | OfLeaves | None:
        """This step by way of one of plain trees, where its arguments are no such; see `_argument_kinds`."""
        kind = kind_of(args, kwargs)
        if kind is not None and kind not in self._by_kind:
            self._by_kind[kind] = kind(
                self._program, lambda plain: Step(plain, self._budget, self._given, self._options)
            )
        return self._by_kind[kind] if kind is not None else None

    def _slow_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (through := self._through(args, kwargs)) is not None:
            return through.call(args, kwargs)
        dynamic = self._program.dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            warnings.warn(
                f"`{getattr(self, '__name__', 'step')}` is called inside another JAX transformation, which compiles "
                "it as part of a larger program: no budget can be kept there, so the plain step is used. "
                "Put `optimize` on the outermost function instead.",
                JaxrematWarning,
                stacklevel=3,
            )
            return self._program.plain(*args, **kwargs)
        key = self._key(args, kwargs)
        planned = self._plan_for(args, kwargs, key)
        given = args, kwargs
        if planned.plan.on_host:
            args, kwargs = self._arrangement.arranged(planned.plan, args, kwargs)
            dynamic = self._program.dynamic(args, kwargs)
            leaves, key = jax.tree.leaves(dynamic), self._key(args, kwargs)
            self._planned[key] = planned
        run = self._executable(planned, args, kwargs)
        self._arrangement.give_up(planned.plan, *given)  # only now: what fails before loses nothing
        static = self._program.static(args, kwargs)
        self._recent = _Recent([_type_of(leaf) for leaf in leaves], tree, static, key, run)
        return run(*dynamic[0], **dynamic[1])

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        if (through := self._through(args, kwargs)) is not None:
            return through.ask(Step.plan, args, kwargs)
        return self._plan_for(args, kwargs).plan

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """The report of the plan for these arguments, see `Plan.report`."""
        return self.plan(*args, **kwargs).report()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The planned step, lowered for these arguments: a `jax.stages.Lowered`, or its like for a target."""
        if (through := self._through(args, kwargs)) is not None:
            return through.ask(Step.lower, args, kwargs)
        planned = self._plan_for(args, kwargs)
        return self._program.lower(planned.jitted, *self._arrangement.arranged(planned.plan, args, kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The planned step, compiled for these arguments: a `jax.stages.Compiled`, or its like for a target."""
        if (through := self._through(args, kwargs)) is not None:
            return through.ask(Step.compile, args, kwargs)
        planned = self._plan_for(args, kwargs)
        return self._compiled(planned, *self._arrangement.arranged(planned.plan, args, kwargs))

    def _compiled(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return planned.executable() or self._program.lower(planned.jitted, args, kwargs).compile()

    def _executable(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled step to run here; of a step for a target, compiled anew by the device's own compiler.

        **Raises:** `InfeasibleBudgetError` where that compiler needs more than the budget.
        """
        target = self._program.target
        if target is not None and find(str(device_of(args, kwargs).device_kind)) == target.device:
            compiled = planned.jitted.lower(*args, **kwargs).compile()
            if self._options.verify:
                confirm(planned.plan, compiled)
            return compiled
        return self._compiled(planned, args, kwargs)  # of a target says, when called, that it cannot run here

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __repr__(self) -> str:
        what = f"plan={self._given.fingerprint[:12]}" if self._given is not None else repr(self._budget)
        return f"<jaxremat.optimize({what}) of {getattr(self, '__qualname__', self._program.fn)!s}>"

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any = None) -> Planned:
        key = self._key(args, kwargs) if key is None else key
        planned = self._planned.get(key)
        if planned is None:
            planned = self._make(args, kwargs)
            self._planned[key] = planned
        return planned

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        with shown(self._options.progress), timed():
            return self._arrangement.planned(self._given, args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Baseline, Request]:
        """What to plan for these arguments."""
        program = placed(self._program, args, kwargs)
        here: Any = None
        if program.target is not None:
            spec = program.target.spec
            reported = spec.memory_nbytes
        else:
            here = device_of(args, kwargs)
            spec, reported = detect(here), (here.memory_stats() or {}).get("bytes_limit")
        options = self._options
        kept = (self._given or options).respect_checkpoint
        host, allow = usable(options, spec, here), options.allow
        baseline = Baseline(
            program, args, kwargs, spec, options.profile, here, kept, options.pins, host, allow
        )
        return baseline, Request(self._budget, options, reported)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten_with_path(self._program.dynamic(args, kwargs))
        types = []
        for path, leaf in leaves:
            try:
                aval = _type_of(leaf)
            except TypeError:
                raise ArgumentError(
                    f"The argument {jax.tree_util.keystr(path)} is a {type(leaf).__name__} ({leaf!r:.60}), "
                    "which is no array. "
                    "Make it static with `static_argnums` or `static_argnames`, or close over it."
                ) from None
            types.append((aval, getattr(leaf, "sharding", None)))
        try:
            key = (tree, tuple(types), self._program.static(args, kwargs))
            hash(key)
        except TypeError as error:
            raise ArgumentError(
                f"A static argument cannot be hashed ({error}). Pass a hashable object, such as a tuple."
            ) from None
        return key


def _type_of(leaf: Any) -> Any:
    """The array type of an argument leaf. **Raises:** TypeError where it is no array."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    return jax.typeof(leaf)  # of a struct too, with the mesh of its sharding, as in an array's
