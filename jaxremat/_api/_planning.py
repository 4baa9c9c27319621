"""Function, arguments -> its plan or its memory, without decorating the function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._compiler._devices import detect
from .._compiler._memory_stats import MemoryStats
from .._compiler._program import Program, device_of, placed
from .._compiler._target import Target
from .._plan._arguments import as_tuple
from .._plan._plan import Plan
from .._plan._problem import Problem
from .._plan._request import DEFAULT, Planning, takes_planning
from .._program import _compat
from .._program._compat import Args
from .._runtime._budgets import Budget
from .._runtime._errors import CompilationError
from .._solver import Sublinear
from ._argument_kinds import kind_of
from ._optimize import optimize
from ._step import Step


@takes_planning
def plan(fn: Callable[..., object], *args: object, budget: Budget, **options: Any) -> Plan:
    """Return the plan of a step for these arguments, without decorating it.

    **Arguments:** the step's own (arrays or `jax.ShapeDtypeStruct`s), `budget` and the options of `jaxremat.optimize`.
    Keyword arguments of the step itself are given by wrapping it in `functools.partial`.
    """
    return optimize(budget, **options)(fn).plan(*args)


@_compat.api_boundary
def memory(
    fn: Callable[..., object],
    *args: object,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, object] | None = None,
    target: str | None = None,
) -> MemoryStats:
    """Compile any function, and return the memory that it needs on one device. If the compiler does not compile it, the
    figures are the model's, and `modelled` says why.

    **Arguments:** the function (jitted or not, or a `Step`) and its arguments (arrays or `jax.ShapeDtypeStruct`s);
    `target` as in `optimize`; the rest as in `jax.jit`. On the CPU, XLA is told to keep the barriers of
    `jax.checkpoint`, as `optimize` does.
    """
    if isinstance(fn, Step):
        return MemoryStats.of(fn.compile(*args))
    program = Program(
        fn=fn,
        static_argnums=as_tuple(static_argnums, "static_argnums"),
        donate_argnums=as_tuple(donate_argnums, "donate_argnums"),
        compiler_options=tuple(sorted((compiler_options or {}).items())),
        target=None if target is None else Target(target),
    )
    program = placed(program, args, {})
    if (kind := kind_of(args, {})) is not None:
        return kind(program, lambda plain: plain).ask(lambda plain, *found: _memory(plain, found), args, {})
    return _memory(program, args)


def _memory(program: Program, args: Args) -> MemoryStats:
    """Return the memory of a program, by the model if it does not compile."""
    jitted: Any = program.fn if hasattr(program.fn, "lower") else program.plain
    try:
        return MemoryStats.of(program.compile(jitted, args, {}))
    except CompilationError as error:
        here = None if program.target else device_of(args, {})
        device = program.target.spec if program.target else detect(here)
        problem = Problem(program, args, {}, device, DEFAULT.profile, here)
        return problem.modelled_memory(error.why)


@takes_planning
def search_plan(
    fn: Callable[..., object], *args: object, planning: Planning = DEFAULT, **options: Any
) -> Plan:
    """Return the plan of least memory that costs at most one more forward pass. No budget is needed.

    For the least memory at up to twice the step's time, use `jaxremat.plan(fn, *args, budget="min")`.

    **Arguments:** the step's own (arrays or `jax.ShapeDtypeStruct`s), and the options of `jaxremat.optimize`. The
    solver of `planning` must know what each budget costs.

    **Returns:** a `Plan`, whose `overhead` is at most the forward pass's share of the step. Follow it with
    `jaxremat.optimize(plan=...)`.

    ```python
    step = jaxremat.optimize(plan=jaxremat.search_plan(train_step, *args))(train_step)
    ```
    """
    return plan(
        fn, *args, budget="min", planning=replace(planning, solver=Sublinear(planning.solver)), **options
    )


def cost(fn: Callable[..., object], *args: object, **options: Any) -> int:
    """Return the bytes that a step needs on one device: the peak of `jaxremat.memory`, whose arguments it takes."""
    return memory(fn, *args, **options).peak_nbytes
