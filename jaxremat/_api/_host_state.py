"""Arguments, plan -> the arguments with an optimizer's state, or stacks that loops read row by row, in host memory.

If the planner may use host memory, it moves arguments there if no plan fits otherwise, if all plans are slow, and for
the least memory. Donated arguments are deleted when they are moved, as by the step itself.
"""

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import jax

from .._compiler._devices import DeviceSpec, host_memory
from .._compiler._program import Program
from .._model._host_copies import HostMemory
from .._plan._agreement import agreed
from .._plan._plan import Plan
from .._plan._planned import Planned
from .._plan._problem import Problem
from .._plan._request import Offload, Request
from .._plan._state_on_host import beside, best, certainly_missing, is_dear, missing_nbytes, movable
from .._program._compat import Args, Kwargs
from .._program._host_arguments import any_on_host, check_host_memory, is_there, to_host
from .._runtime._budgets import Share, read_budget
from .._runtime._bytes import format_nbytes, parse_nbytes
from .._runtime._errors import HostMemoryError, InfeasibleBudgetError, warn


def usable(offload: Offload, spec: DeviceSpec, here: object) -> HostMemory | None:
    """Return host memory if the planner may use it. **Arguments:** `here` the device, None for a target."""
    if not offload:
        return None
    allowed = None if offload is True or offload == "auto" else parse_nbytes(offload)
    host = host_memory(spec, here, allowed)
    if host is not None and offload == "auto":
        return host._replace(sparing=True)
    if host is None and offload != "auto":
        warn(
            f"`offload={offload!r}`: {spec.name} has no memory besides the host's. The step is planned without "
            "offloading."
        )
    return host


_ABOUT_HOST = re.compile("pinned|host.?(memory|alloc|bfc|offload)|memory.?(space|kind)", re.IGNORECASE)
"""Texts of XLA's errors about host memory, not the device's."""


def saying_refusals(run: Callable[..., Any], plan: Plan, args: Args, kwargs: Kwargs) -> Callable[..., Any]:
    """Return a compiled step that raises `HostMemoryError` if an allocation of host memory fails when it runs. A step
    that uses none is returned unchanged.
    """
    if not (plan.offloaded or plan.on_host or any_on_host(args, kwargs)):
        return run

    @functools.wraps(run)
    def running(*args: object, **kwargs: object) -> Any:
        try:
            return run(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if not _ABOUT_HOST.search(str(error)):
                raise
            raise HostMemoryError(
                f"`{plan.step}` could not allocate host memory (it offloads {format_nbytes(plan.offloaded_nbytes)}): "
                f"{error}. Free some of this machine's memory, allow the process to pin more (`ulimit -l`), or offload "
                'less: `optimize(..., offload="8GiB")`.'
            ) from error

    return running


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Arrangement:
    """The placement of a program's arguments.

    **Fields:** `program`; `prepare` returns the problem and the request for arguments.
    """

    program: Program
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Problem, Request]]

    def arranged(self, plan: Plan, args: Args, kwargs: Kwargs) -> Arguments:
        """Return the arguments in the memories that a plan requires."""
        if not plan.on_host:
            return args, kwargs
        leaves = jax.tree.leaves(self.program.dynamic(args, kwargs))
        arrays = (leaves[place] for place in plan.on_host if isinstance(leaves[place], jax.Array))
        devices = {device for array in arrays for device in array.sharding.addressable_devices}
        needs = f"The plan of `{plan.step}` keeps {format_nbytes(plan.on_host_nbytes)} of the arguments in"
        check_host_memory(devices, needs, "Plan for this device without `offload`.")
        return self._moved(plan.on_host, args, kwargs)

    def give_up(self, plan: Plan, args: Args, kwargs: Kwargs) -> None:
        """Delete the device arrays of arguments that the step reads from host memory."""
        leaves = jax.tree.leaves(self.program.dynamic(args, kwargs))
        for place in plan.on_host:
            if not is_there(leaves[place]):
                leaves[place].delete()

    def planned(self, given: Plan | None, args: Args, kwargs: Kwargs) -> Planned:
        """Return the plan for these arguments. **Raises:** as `agreed`."""
        if given is not None:
            return agreed(*self.prepare(*self.arranged(given, args, kwargs)), given)
        problem, request = self.prepare(args, kwargs)
        might, refused = movable(problem), None
        least = read_budget(request.budget) == "min"
        sparing = problem.host is not None and problem.host.sparing
        briefly = sparing and not least and bool(might.sizes)
        found: list[Planned] = []
        if might.sizes and (missing := certainly_missing(problem, request)):
            # Arguments and outputs alone exceed the budget, so no plan without host memory is tried.
            tries, step_seconds = might.tries(missing), problem.estimated.step_seconds
            budget = problem.estimated.base_nbytes - missing
        else:
            try:
                found.append(agreed(problem, replace(request, briefly=briefly), None))
                plan = found[0].plan
                faster = is_dear(plan) and not sparing
                tries = might.everything() if least else might.all_of_each() if faster else []
                step_seconds, budget = plan.account.step_seconds, plan.budget_nbytes
            except InfeasibleBudgetError as error:
                refused, tries = error, might.tries(missing_nbytes(error, request))
                step_seconds, budget = error.step_seconds, error.budget_nbytes
        for places in tries:
            try:
                within = replace(
                    request, nbytes=_fixed(request, budget), briefly=briefly and places != tries[-1]
                )
                found.append(self._without(might.sizes, places, step_seconds, within, args, kwargs))
            except InfeasibleBudgetError as error:
                refused = error
            else:
                if not least and (sparing or not is_dear(found[-1].plan)):
                    break
        if not found:
            assert refused is not None
            raise refused
        return _said(best(found, least=least))

    def _without(
        self,
        sizes: dict[int, int],
        places: tuple[int, ...],
        step_seconds: float,
        within: Request,
        args: Args,
        kwargs: Kwargs,
    ) -> Planned:
        """Return the plan of the step with these arguments in host memory, its overhead relative to the step without.

        **Arguments:** `within` has the budget in bytes if it is a share of the step without.
        """
        problem, request = self.prepare(*self._moved(places, args, kwargs))
        request = replace(request, nbytes=within.nbytes, briefly=within.briefly)
        on_host_nbytes = sum(sizes[place] for place in places)
        planned = agreed(beside(problem, on_host_nbytes), request, None)
        plan = planned.plan
        longer = plan.account.step_seconds / step_seconds if step_seconds else 1.0
        return replace(
            planned,
            plan=replace(
                plan,
                on_host=places,
                on_host_nbytes=on_host_nbytes,
                overhead=longer * (1.0 + plan.overhead) - 1.0,
                compiled_overhead=None
                if plan.compiled_overhead is None
                else longer * (1.0 + plan.compiled_overhead) - 1.0,
                account=replace(plan.account, step_seconds=plan.account.step_seconds / longer),
            ),
        )

    def _moved(self, places: Collection[int], args: Args, kwargs: Kwargs) -> Arguments:
        leaves, tree = jax.tree.flatten(self.program.dynamic(args, kwargs))
        for place in places:
            leaves[place] = to_host(leaves[place], least_nbytes=0)
        return self.program.refilled(tree.unflatten(leaves), args, kwargs)


def _fixed(request: Request, nbytes: int) -> int | None:
    """Return the budget in bytes if it is a share of a step, since moved arguments must not change it; else None."""
    return nbytes if isinstance(read_budget(request.budget), Share) else None


def _said(planned: Planned) -> Planned:
    """Return the plan, with a warning if its step returns some arguments in another memory than they came from."""
    if nbytes := planned.plan.on_host_nbytes:
        warn(
            f"The plan keeps {format_nbytes(nbytes)} of the donated arguments in host memory, and the step returns "
            "them there. Other code that computes with them must first copy them to the device: "
            "`jax.device_put(x, jax.memory.Space.Device)`."
        )
    return planned
