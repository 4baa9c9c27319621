"""Function, request -> `Step`, which plans when called with new arguments, and runs the planned step.

`Bound` is a step as a method of an object. Pickles and copies of a step have its function, options and plans, but no
compiled programs.

Invariant: a copy applies the plans of the step, and plans again for other arguments. A step that is found under its
function's name, as a decorated one is, is pickled by that name, like a function.
"""

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from .._compiler._devices import detect
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Program, device_of, placed
from .._compiler._target import Target, elsewhere
from .._model._device_specs import find
from .._plan._plan import Plan
from .._plan._planned import Planned, confirm
from .._plan._problem import Problem
from .._plan._request import Request
from .._program import _compat
from .._program._compat import Args, Kwargs
from .._program._host_arguments import check_host_memory
from .._report import Report
from .._runtime._errors import InfeasibleBudgetError, PlanMismatchError, warn
from .._runtime._progress import timed
from .._runtime._progress_bars import shown
from ._argument_kinds import kind_of
from ._call_keys import KeyLocks, key_of, naming_deleted, naming_static, type_of
from ._host_state import Arrangement, saying_refusals, usable
from ._nnx_objects import OfObjects
from ._strict_trees import OfLeaves


def reduced(
    step: object, plans: tuple[Plan, ...], make: Callable[..., object], state: tuple[object, ...]
) -> Any:
    """Return the result of a step's `__reduce__`. **Arguments:** `make` builds a step from its `state` and plans."""
    names = str(getattr(step, "__module__", "")), str(getattr(step, "__qualname__", ""))
    if _found(*names) is step:
        return _with_plans, (*names, plans)
    return make, (*state, plans)


def _found(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _with_plans(module: str, name: str, plans: tuple[Plan, ...]) -> Any:
    step = attrgetter(name)(importlib.import_module(module))
    step.carry(plans)
    return step


class Bound:
    """`step` as a method of `instance`, which becomes its first argument."""

    def __init__(self, step: Any, instance: object):
        functools.update_wrapper(self, step)
        self.__self__ = instance
        self.__func__ = step

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: object, **kwargs: object) -> Plan:
        """`Step.plan` for this object."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def report(self, *args: object, **kwargs: object) -> Report:
        """`Step.report` for this object."""
        return self.__func__.report(self.__self__, *args, **kwargs)

    def lower(self, *args: object, **kwargs: object) -> Any:
        """`Step.lower` for this object."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def compile(self, *args: object, **kwargs: object) -> Any:
        """`Step.compile` for this object."""
        return self.__func__.compile(self.__self__, *args, **kwargs)


class _Recent(NamedTuple):
    """The types of the last call's arguments, and the program that ran it."""

    types: list[Any]
    tree: Any
    static: tuple[Any, ...]
    key: Any
    settings: Any
    run: Callable[..., Any]


class Step:
    """A planned step: call it as the function it wraps. Made by `jaxremat.optimize`."""

    def __init__(self, program: Program, request: Request, plan: Plan | None, carried: tuple[Plan, ...] = ()):
        functools.update_wrapper(self, program.fn)
        self._carried = carried  # plans of the step from which this one was copied
        self._program = program
        self._request = request
        self._given = plan
        self._planned: dict[Any, Planned] = {}
        self._locks = KeyLocks()
        self._recent: _Recent | None = None
        self._by_kind: dict[Any, OfObjects | OfLeaves] = {}
        self._arrangement = Arrangement(program, self._prepare)

    @_compat.api_boundary
    def __call__(self, *args: object, **kwargs: object) -> Any:
        recent = self._recent
        if recent is None or recent.settings != _compat.settings():
            return self._slow_call(args, kwargs)
        dynamic = self._program.dynamic(args, kwargs) if self._program.has_static else (args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        try:
            types = [leaf.aval for leaf in leaves]
        except AttributeError:  # NumPy arrays and Python scalars
            try:
                types = [type_of(leaf) for leaf in leaves]
            except TypeError:
                return self._slow_call(args, kwargs)
        if types != recent.types or tree != recent.tree:
            return self._slow_call(args, kwargs)
        if self._program.has_static and self._program.static(args, kwargs) != recent.static:
            return self._slow_call(args, kwargs)
        try:
            return recent.run(*dynamic[0], **dynamic[1])
        except _compat.SpecialValueError as error:
            _compat.explain_special_value(error, self._program.fn, args, kwargs)
        except (TypeError, ValueError) as error:
            if not any(isinstance(leaf, Tracer) for leaf in leaves) and recent.key == self._key(args, kwargs):
                naming_deleted(error, self._program, args, kwargs)
                raise
            return self._slow_call(args, kwargs)  # the same types, traced or placed on other devices
        except RuntimeError as error:  # from jax 0.11 on
            naming_deleted(error, self._program, args, kwargs)
            raise

    def _through(self, args: Args, kwargs: Kwargs) -> OfObjects | OfLeaves | None:
        """Return the wrapper of this step for arguments that are no plain trees, see `_argument_kinds`; else None."""
        kind = kind_of(args, kwargs)
        if kind is not None and kind not in self._by_kind:
            self._by_kind[kind] = kind(self._program, lambda plain: Step(plain, self._request, self._given))
        return self._by_kind[kind] if kind is not None else None

    def _slow_call(self, args: Args, kwargs: Kwargs) -> Any:
        if _compat.is_jit_disabled():
            return self._program.fn(*args, **kwargs)
        if (through := self._through(args, kwargs)) is not None:
            return through.call(args, kwargs)
        dynamic = self._program.dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            warn(
                f"`{getattr(self, '__name__', 'step')}` is called inside another JAX transformation, so it runs "
                "without a plan: a budget is for a whole program. Put `optimize` on the outermost function instead."
            )
            return self._program.plain(*args, **kwargs)
        if (target := self._program.target) is not None and not self._is_here(target, args, kwargs):
            raise elsewhere(target)  # before it is planned
        key = self._key(args, kwargs)
        planned = self._plan_for(args, kwargs, key)
        given = args, kwargs
        if planned.plan.on_host:
            args, kwargs = self._arrangement.arranged(planned.plan, args, kwargs)
            dynamic = self._program.dynamic(args, kwargs)
            leaves, key = jax.tree.leaves(dynamic), self._key(args, kwargs)
            self._planned[key] = planned
        with self._locks.held(key):
            run = saying_refusals(self._executable(planned, args, kwargs), planned.plan, args, kwargs)
        self._arrangement.give_up(planned.plan, *given)  # last, so that an earlier error keeps the arguments
        static = self._program.static(args, kwargs)
        types = [type_of(leaf) for leaf in leaves]
        self._recent = _Recent(types, tree, static, key, _compat.settings(), run)
        try:
            return run(*dynamic[0], **dynamic[1])
        except _compat.SpecialValueError as error:
            _compat.explain_special_value(error, self._program.fn, args, kwargs)
        except (ValueError, RuntimeError) as error:
            naming_deleted(error, self._program, args, kwargs)
            raise

    @_compat.api_boundary
    def plan(self, *args: object, **kwargs: object) -> Plan:
        """Return the plan for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        if (through := self._through(args, kwargs)) is not None:
            return through.ask(Step.plan, args, kwargs)
        return self._plan_for(args, kwargs).plan

    def report(self, *args: object, **kwargs: object) -> Report:
        """Return the report of the plan for these arguments, see `Plan.report`."""
        return self.plan(*args, **kwargs).report()

    @_compat.api_boundary
    def lower(self, *args: object, **kwargs: object) -> Any:
        """Return the planned step, lowered: a `jax.stages.Lowered`, or its equivalent for a target."""
        if (through := self._through(args, kwargs)) is not None:
            return through.ask(Step.lower, args, kwargs)
        planned = self._plan_for(args, kwargs)
        return self._program.lower(planned.jitted, *self._arrangement.arranged(planned.plan, args, kwargs))

    @_compat.api_boundary
    def compile(self, *args: object, **kwargs: object) -> Any:
        """Return the planned step, compiled for these arguments: a `jax.stages.Compiled`, or its equivalent for a
        target.
        """
        if (through := self._through(args, kwargs)) is not None:
            return through.ask(Step.compile, args, kwargs)
        planned = self._plan_for(args, kwargs)
        return self._compiled(planned, *self._arrangement.arranged(planned.plan, args, kwargs))

    def _compiled(self, planned: Planned, args: Args, kwargs: Kwargs) -> Any:
        return planned.executable() or self._program.lower(planned.jitted, args, kwargs).compile()

    def _is_here(self, target: Target, args: Args, kwargs: Kwargs) -> bool:
        return find(str(device_of(args, kwargs).device_kind)) == target.device

    def _executable(self, planned: Planned, args: Args, kwargs: Kwargs) -> Any:
        """Return the compiled step to run. A step for a target is compiled again by the device's compiler.

        **Raises:** `InfeasibleBudgetError` if that compiler needs more than the budget; `CompilationError` if it fails;
        `HostMemoryError` if the device has no host memory for the plan.
        """
        if (target := self._program.target) is not None and self._is_here(target, args, kwargs):
            if planned.plan.offloaded:
                needs = f"The plan of `{planned.plan.step}` offloads {len(planned.plan.offloaded)} values to"
                check_host_memory([device_of(args, kwargs)], needs, "Plan for this device without `offload`.")
            compiled = replace(self._program, target=None).compile(planned.jitted, args, kwargs)
            if self._request.planning.verify:
                try:
                    confirm(planned.plan, MemoryStats.of(compiled))
                except InfeasibleBudgetError as refusal:
                    return self._corrected(planned, args, kwargs, refusal)
            return compiled
        return self._compiled(planned, args, kwargs)

    def _corrected(self, planned: Planned, args: Args, kwargs: Kwargs, refusal: InfeasibleBudgetError) -> Any:
        """Return the step compiled with a corrected plan that fits this device, for a plan that was made without it and
        does not.
        """
        here = Step(replace(self._program, target=None), self._request, planned.plan)
        try:
            compiled = here.compile(*args, **kwargs)
        except PlanMismatchError:
            raise refusal from None
        planned.plan = here.plan(*args, **kwargs)
        return compiled

    def __get__(self, instance: object, owner: object = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __repr__(self) -> str:
        what = (
            f"plan={self._given.fingerprint[:12]}" if self._given is not None else repr(self._request.budget)
        )
        return f"<jaxremat.optimize({what}) of {getattr(self, '__qualname__', self._program.fn)!s}>"

    def carry(self, plans: tuple[Plan, ...]) -> None:
        """Apply these plans to calls with the arguments that they were made for."""
        known = {plan.fingerprint for plan in self._carried}
        self._carried += tuple(plan for plan in plans if plan.fingerprint not in known)

    def _plans(self) -> tuple[Plan, ...]:
        made = (planned.plan for planned in self._planned.values())
        plans = {plan.fingerprint: plan for plan in (*self._carried, *made) if not plan.on_host}
        return tuple(plans.values())

    def __reduce__(self) -> Any:
        state = replace(self._program), self._request, self._given
        return reduced(self, self._plans(), Step, state)

    def __deepcopy__(self, memo: dict[int, object]) -> "Step":
        program = replace(self._program, fn=copy.deepcopy(self._program.fn, memo))
        made = Step(program, self._request, self._given, self._plans())
        if program.fn is self._program.fn:
            made._planned = dict(self._planned)
        return made

    def _plan_for(self, args: Args, kwargs: Kwargs, key: object = None) -> Planned:
        key = self._key(args, kwargs) if key is None else key
        with self._locks.held(key):
            if key not in self._planned:
                self._planned[key] = self._make(args, kwargs)
            return self._planned[key]

    def _make(self, args: Args, kwargs: Kwargs) -> Planned:
        with shown(self._request.planning.progress), timed(), naming_static(self._program, args, kwargs):
            for plan in () if self._given else self._carried:
                with suppress(PlanMismatchError, InfeasibleBudgetError):
                    return self._arrangement.planned(plan, args, kwargs)
            return self._arrangement.planned(self._given, args, kwargs)

    def _prepare(self, args: Args, kwargs: Kwargs) -> tuple[Problem, Request]:
        """Return the problem and the request for these arguments."""
        program = placed(self._program, args, kwargs)
        here: Any = None
        if program.target is not None:
            spec = program.target.spec
            reported = spec.memory_nbytes
        else:
            here = device_of(args, kwargs)
            spec, reported = detect(here), (here.memory_stats() or {}).get("bytes_limit")
        asked, planning = self._request, self._request.planning
        kept = (self._given or planning).respect_checkpoint
        host = usable(asked.offload, spec, here)
        problem = Problem(
            program,
            args,
            kwargs,
            spec,
            planning.profile,
            here,
            kept,
            asked.pins,
            host,
            asked.allow,
            written_seconds=planning.written_seconds,
        )
        return problem, replace(asked, device_nbytes=reported, neighbours=self._neighbours())

    def _neighbours(self) -> tuple[Plan, ...] | None:
        """Return the plans from which plans for other shapes may be adapted, None if `like=False`."""
        if (like := self._request.like) is None:
            return None
        return (*like, *reversed(self._plans())) if self._request.planning.effort == "normal" else like

    def _key(self, args: Args, kwargs: Kwargs) -> Any:
        return key_of(self._program, args, kwargs)
