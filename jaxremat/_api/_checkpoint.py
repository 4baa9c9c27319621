"""`checkpoint`: function that other code differentiates, budget -> the function with a planned backward pass."""

import functools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import checkpoint as plain_checkpoint
from jax.custom_derivatives import SymbolicZero

from .._compiler._devices import detect
from .._compiler._program import Program, compiler_options
from .._emit._halves import Halves, emit_halves
from .._emit._joint import Function, Joint, NotReversibleError, called, differentiated, in_parts
from .._emit._policy import checkpointed
from .._emit._segmentation import names_to_save, restricted, segmentation
from .._lower._lower import lower
from .._model._graph import Graph
from .._plan._agreement import found_first
from .._plan._arguments import as_tuple, parse_forms
from .._plan._request import DEFAULT, Planning, takes_planning
from .._plan._residuals import Choice, Found, Held, HeldPlan, Way, best_way, chosen, parse_held, plan_held
from .._program import _compat
from .._program._compat import Args, Kwargs, varying_axes
from .._rewrite._fingerprint import fingerprint
from .._rewrite._function_parts import Division
from .._runtime._errors import ArgumentError, warn
from ._call_keys import naming_static

_UNSET: Any = object()

ROWS_ALONE = ("rows",)
"""The form that a function which is differentiated later may take."""


@takes_planning
def checkpoint(
    fn: Callable[..., object] = _UNSET,
    budget: Held = "dots",
    *,
    emit: str = "policy",
    allow: Collection[str] = ROWS_ALONE,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: Any = True,
    planning: Planning = DEFAULT,
) -> Any:
    """Return a drop-in for `jax.checkpoint` on a loss, a block or a layer that plans what to save and what to
    recompute.

    The plan is made for the types of the arguments, when the function is called or traced. A plan for a whole train
    step (`jaxremat.optimize`) sees more and does better; this one is for functions that other code differentiates.

    **Arguments:**

    - `fn`: any function that JAX can differentiate in reverse mode. Without it, a decorator is returned.
    - `budget`: the most bytes of the forward pass's values that the backward pass may hold at any time: values that
      were saved and still have a reader, and recomputed values in use. Before the backward pass begins, that is all
      that is saved. Arguments, closed-over values, cotangents and gradients do not count, because the surrounding
      program has them in any case. Temporary values of the forward pass do not count either. A value of a `lax.scan`
      counts once for each iteration where it is saved, and once where it is recomputed. The budget is an int of bytes;
      text such as "2GiB"; "40% of residuals", a share of what plain JAX would keep between the passes; "dots" for the
      fewest bytes with which no contraction (or loop, sort, opaque call) runs twice; "free" for the fewest with which
      no reduction or scatter does either; or "min" for the fastest plan within 2 % (of what plain JAX would keep) of
      the least memory, counted while another such block keeps what it saves.
    - `emit`: `"policy"` makes the function a sequence of `jax.checkpoint`s with policies. It works under every
      transformation, forward mode and second derivatives included. Values that one part hands on to the next are always
      saved, and values that only derivative rules make never are. `"custom_vjp"` gives the function its own backward
      pass with barriers. It can apply any plan, but supports only reverse mode.
    - `allow`: other forms that the plan may use for `"min"` and for budgets in bytes. `"rows"`: work that is
      independent along an axis (tokens, rays, rows of logits, queries of attention) runs in chunks of rows, in both
      passes, by a `lax.scan` within the function. Sums over the rows are added up, and random numbers do not change.
      `()` allows saving and recomputation only.
    - `static_argnums`, `static_argnames`: as in `jax.jit`.
    - `prevent_cse`: as in `jax.checkpoint`, for `"policy"`: False where nothing would merge recomputation with the
      original, or a tuple with a bool for each argument or for each of its parts.
    - `planning`: a `jaxremat.Planning`. Only `solver` and `time_limit` apply, because nothing is compiled here.

    **Returns:** a `Checkpointed`: call it as `fn`; `.plan(*args)` returns its plan.

    **Raises:** `ArgumentError`, and, when it is called, `BudgetError`, `InfeasibleBudgetError` (`InfeasibleHintError`
    if only hints prevent a plan), `HintError`, `SolverError`.

    On the CPU, XLA merges the recomputation with the original unless it is told not to: jit the function around this
    one with `compiler_options=jaxremat.compiler_options()`. A warning says if they are missing, where it can tell.

    ```python
    block = jaxremat.checkpoint(transformer_block, budget="30% of residuals")
    grads = jax.jit(jax.grad(loss_with(block)), compiler_options=jaxremat.compiler_options())(params)
    ```
    """
    if fn is _UNSET:
        return functools.partial(
            checkpoint,
            budget=budget,
            emit=emit,
            allow=allow,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            prevent_cse=prevent_cse,
            planning=planning,
        )
    if not callable(fn):
        raise ArgumentError(
            f"`checkpoint` takes a function as its first argument; it was given a {type(fn).__name__} "
            f"({fn!r:.60}). Write `checkpoint(fn, budget=...)`, or `@checkpoint(budget=...)` above it."
        )
    if emit not in ("policy", "custom_vjp"):
        raise ArgumentError(f'`emit={emit!r}` is unknown. Write "policy" or "custom_vjp".')
    if isinstance(prevent_cse, list):
        prevent_cse = tuple(prevent_cse)
    said = [prevent_cse] if not isinstance(prevent_cse, tuple) else jax.tree.leaves(prevent_cse)
    if not all(isinstance(each, bool) for each in said):
        raise ArgumentError(
            f"`prevent_cse={prevent_cse!r}` is not valid. Write True, False, or a tuple with a bool for each "
            "argument."
        )
    forms = parse_forms(allow, ROWS_ALONE)
    parse_held(budget, 1 << 40)  # a budget that can never be read is refused where it is written
    program = Program(
        fn, as_tuple(static_argnums, "static_argnums"), as_tuple(static_argnames, "static_argnames")
    )
    return Checkpointed(program, _Options(budget, emit, forms, prevent_cse, planning))


@dataclass(frozen=True)
class _Options:
    """**Fields** as the arguments of `checkpoint`."""

    budget: Held
    emit: str
    allow: tuple[str, ...]
    prevent_cse: bool | tuple[Any, ...]
    planning: Planning


@dataclass(frozen=True)
class _Planned:
    """A plan for one kind of arguments, and the function or `Halves` that follow it. If JAX has no backward pass, the
    plan is None, and `why` says so.
    """

    plan: HeldPlan | None
    follow: Any
    why: str = ""


class Checkpointed:
    """A function with a plan for its backward pass: call and differentiate it as the function it wraps.

    Made by `jaxremat.checkpoint`.
    """

    def __init__(self, program: Program, options: _Options):
        functools.update_wrapper(self, program.fn)
        self._program = program
        self._options = options
        self._called: dict[Any, Function] = {}
        self._planned: dict[Any, _Planned] = {}

    @_compat.api_boundary
    def __call__(self, *args: object, **kwargs: object) -> Any:
        _warn_of_options()
        function, leaves, key = self._function(args, kwargs)
        primals = [*function.consts, *leaves]
        return jax.tree.unflatten(function.out_tree, self._following(function, key)(*primals))

    def _function(self, args: Args, kwargs: Kwargs) -> tuple[Function, list[Any], Any]:
        with naming_static(self._program, args, kwargs, "checkpoint"):
            return called(self._program, args, kwargs, self._called)

    def _following(self, function: Function, key: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function of flat primals, with its plan."""
        if not (any(function.inexact) and any(function.differentiable)):
            return jex.jaxpr_as_fun(function.closed)
        if self._options.emit == "custom_vjp":
            return self._halved(function, key)
        return self._segmented(function, key).follow

    def plan(self, *args: object, **kwargs: object) -> HeldPlan:
        """Return the plan for these arguments (arrays or `jax.ShapeDtypeStruct`s), all of them differentiated."""
        function, _, key = self._function(args, kwargs)
        halves = self._options.emit == "custom_vjp"
        planned = self._halves(function, key, function.inexact) if halves else self._segmented(function, key)
        if planned.plan is None:
            raise NotReversibleError(planned.why)
        return planned.plan

    def __get__(self, instance: object, owner: object = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        options = self._options
        return f"<jaxremat.checkpoint({options.budget!r}, {options.emit}) of {self._program.fn!r}>"

    def _segmented(self, function: Function, key: tuple[Any, ...]) -> _Planned:
        """Return the function of flat primals as a sequence of `jax.checkpoint`s."""
        if key not in self._planned:
            self._planned[key] = self._in_segments(function, key[0])
        return self._planned[key]

    def _prevented(self, function: Function, arguments: Any) -> bool | tuple[bool, ...]:
        """Return `prevent_cse`, for each primal if it is a tuple: False for closed-over values, as in JAX."""
        given = self._options.prevent_cse
        if isinstance(given, bool):
            return given
        args, kwargs = jax.tree.unflatten(arguments, range(arguments.num_leaves))
        flags = jax.tree.broadcast(given, (args, kwargs) if kwargs else args)
        return (*(False for _ in function.consts), *jax.tree.leaves(flags))

    def _in_segments(self, function: Function, arguments: Any) -> _Planned:
        prevent_cse = self._prevented(function, arguments)
        try:
            joint = differentiated(function, function.inexact)
        except NotReversibleError as error:  # calls and forward mode still work
            whole = plain_checkpoint(jex.jaxpr_as_fun(function.closed), prevent_cse=prevent_cse)
            return _Planned(None, whole, str(error))
        way = self._way(function, joint, function.inexact)
        body, joint, found = way.function.body, way.joint, way.found
        cut = segmentation(joint, found.graph)
        names = names_to_save(body, cut, found.graph, found.solution.schedule)
        return _Planned(way.plan, checkpointed(body, cut, names, prevent_cse))

    def _halved(self, function: Function, key: object) -> Callable[..., Any]:
        """Return the function of flat primals, with the planned backward pass as its own derivative."""
        evaluate = jex.jaxpr_as_fun(function.closed)

        @jax.custom_vjp
        def run(*primals: jax.Array) -> list[Any]:
            return evaluate(*primals)

        def forward(*primals: Any) -> tuple[list[Any], Any]:
            smooth = function.inexact
            wanted = tuple(p.perturbed and is_smooth for p, is_smooth in zip(primals, smooth, strict=True))
            halves = self._halves(function, key, wanted).follow
            values = [p.value for p in primals]
            made = jex.jaxpr_as_fun(halves.forward)(*values)
            saved = (*made[halves.results :], *(values[i] for i in halves.read))
            pull = functools.partial(_backward, halves, wanted, function.differentiable)
            return made[: halves.results], jax.tree_util.Partial(pull, *saved)

        def backward(pull: Any, cotangents: list[jax.Array]) -> tuple[Any, ...]:
            return pull(cotangents)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _halves(self, function: Function, key: object, wanted: tuple[bool, ...]) -> _Planned:
        """Return the `Halves` for the cotangents of the wanted primals."""
        if (key, wanted) not in self._planned:
            way = self._way(function, differentiated(function, wanted), wanted)
            halves = emit_halves(way.joint, way.found.graph, way.found.solution.schedule)
            self._planned[key, wanted] = _Planned(way.plan, halves)
        return self._planned[key, wanted]

    def _way(self, function: Function, joint: Joint, wanted: tuple[bool, ...]) -> Way:
        """Return the best way to run the function, whole or in parts. Equal functions, such as those of other layers,
        share the choice.
        """
        device = detect(jax.devices()[0])

        @functools.cache
        def plain_seconds() -> float:
            return lower(joint.traced, device, base_nbytes=0).step_seconds

        def planned(division: Division | None) -> Way:
            own = function if division is None else in_parts(function, division)
            both = joint if division is None else differentiated(own, wanted)
            policy = self._options.emit == "policy"
            restrict = (lambda graph: restricted(graph, segmentation(both, graph))) if policy else None
            found = self._found(both, restrict, joint.plain_nbytes)
            seconds = found.graph.step_seconds if division is None else plain_seconds()
            return Way(own, both, found, division, joint.plain_nbytes, seconds)

        budget = parse_held(self._options.budget, joint.plain_nbytes)
        # Chunks of rows that the compiler shards would run on one device after the other.
        divided = len(jax.devices()) > 1 and not any(map(varying_axes, function.closed.jaxpr.invars))
        if budget in ("dots", "free") or not self._options.allow or divided:
            return planned(None)
        key = self._key(joint)
        if key not in _CHOSEN:
            _CHOSEN[key], way = best_way(function, planned, device, least=budget == "min")
            _forget_first(_CHOSEN)
            return way
        return planned(chosen(function, _CHOSEN[key]))

    def _key(self, joint: Joint) -> tuple[Any, ...]:
        options, device = self._options, detect(jax.devices()[0])
        solver = repr(options.planning.solver)
        return fingerprint(joint.traced), options.budget, options.emit, solver, options.allow, device

    def _found(self, joint: Joint, restrict: Callable[[Graph], Graph] | None, plain_nbytes: int) -> Found:
        """Return the schedule for a joint program. Equal programs, such as those of other layers, share it.

        **Arguments:** `restrict` and `plain_nbytes` as in `plan_held`.
        """
        options, key = self._options, (plain_nbytes, *self._key(joint))
        if key not in _FOUND:
            *wanted, device = key
            graph = lower(joint.traced, device, base_nbytes=0)
            solver, time_limit = options.planning.solver, options.planning.time_limit
            found = plan_held(joint, graph, options.budget, solver, time_limit, restrict, plain_nbytes)
            _FOUND[key] = found_first(repr(wanted), graph, found, restrict)
            _forget_first(_FOUND)
        return _FOUND[key]


_FOUND: dict[Any, Found] = {}
_CHOSEN: dict[Any, Choice] = {}
_MOST_FOUND = 64


def _forget_first(found: dict[Any, Any]) -> None:
    while len(found) > _MOST_FOUND:
        found.pop(next(iter(found)))


def _warn_of_options() -> None:
    """Warn, once, if the options of the enclosing `jit` let the compiler undo the plan."""
    global _warned
    options = _compat.enclosing_options()
    needed = compiler_options()
    if _warned or options is None or not needed:
        return
    told = (*map(str, options.values()), os.environ.get("XLA_FLAGS", ""))
    if not all(any(str(value) in text for text in told) for value in needed.values()):
        _warned = True
        warn(
            "The `jax.jit` around a `jaxremat.checkpoint` lacks the compiler options that it needs: on this "
            "backend, XLA merges the recomputation with the original, which saves no memory. Write "
            "`jax.jit(..., compiler_options=jaxremat.compiler_options())` on the outermost `jit`."
        )


_warned = False


def _backward(
    halves: Halves, wanted: tuple[bool, ...], differentiable: tuple[bool, ...], *operands: jax.Array
) -> tuple[Any, ...]:
    """Return the cotangents of all primals, None for primals that are not `wanted`."""
    *saved, cotangents = operands
    known = [
        jnp.zeros(*_shape_and_type(c)) if isinstance(c, SymbolicZero) else c
        for c, smooth in zip(cotangents, differentiable, strict=True)
        if smooth
    ]
    gradients = iter(jex.jaxpr_as_fun(halves.backward)(*saved, *known))
    return tuple(next(gradients) if w else None for w in wanted)


def _shape_and_type(zero: SymbolicZero) -> tuple[Any, Any]:
    aval: Any = zero.aval
    return aval.shape, aval.dtype
