"""Flax modules, planned: `remat` in place of `flax.linen.remat` and `flax.nnx.remat`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ._api._call_keys import naming_static
from ._api._checkpoint import checkpoint
from ._compiler._program import Program
from ._plan._request import takes_planning
from ._plan._residuals import Held
from ._runtime._errors import ArgumentError


@takes_planning
def remat(
    target: object,
    budget: Held = "dots",
    *,
    variables: Any = True,
    rngs: Any = True,
    methods: object = None,
    static_argnums: int | tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """Return a Flax module, or a method, whose backward pass is planned.

    **Arguments:**

    - `target`: a `flax.linen.Module` class; a function or method whose first argument is such a module; a function or
      method of `flax.nnx` objects; or an `nnx.Module` class, for its `__call__`.
    - `budget`: as in `jaxremat.checkpoint`, for one call of the module.
    - `variables`, `rngs`, `methods`: as in `flax.linen.remat`; for linen alone.
    - `static_argnums`: the static arguments; the module itself is number 0.
    - `options`: as in `jaxremat.checkpoint`.

    **Returns:** the same kind of object. Parameters keep their names, so checkpoints on disk stay readable. (`nn.remat`
    renames those of unnamed modules: `CheckpointBlock_0` is `Block_0` here.)

    **Raises:** `ArgumentError` for other targets; else as `jaxremat.checkpoint`.

    ```python
    Block = jaxremat.flax.remat(TransformerBlock, budget="30% of residuals")
    ```
    """
    from flax import linen, nnx

    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if isinstance(target, type) and issubclass(target, linen.Module):
        return _linen(target, budget, variables, rngs, methods, static, options)
    if isinstance(target, type) and issubclass(target, nnx.Module):
        call = _of_either(target.__call__, budget, variables, rngs, static, options)
        return type(target.__name__, (target,), {"__call__": call, "__module__": target.__module__})
    module = isinstance(target, (linen.Module, nnx.Module))
    if module or isinstance(target, type) or not callable(target):
        given = f"a {type(target).__name__}, which is already a module" if module else f"{target!r:.80}"
        raise ArgumentError(
            f"`jaxremat.flax.remat` takes a Flax module class, or a function of one; it was given {given}. For "
            "other functions, use `jaxremat.checkpoint`."
        )
    return _of_either(target, budget, variables, rngs, static, options)


def _of_either(
    fn: Callable[..., object],
    budget: Held,
    variables: Any,
    rngs: Any,
    static: tuple[int, ...],
    options: dict[str, Any],
) -> Callable[..., Any]:
    """Return a function of a linen module or of NNX objects: which of them it is shows when it is called."""
    from flax import linen

    of_linen = _linen(fn, budget, variables, rngs, None, static, options)
    of_nnx = _nnx(fn, budget, static, options)

    @functools.wraps(fn)
    def planned(*args: object, **kwargs: object) -> Any:
        return (of_linen if isinstance(args[0], linen.Module) else of_nnx)(*args, **kwargs)

    return planned


def _linen(
    target: Any,
    budget: Held,
    variables: Any,
    rngs: Any,
    methods: object,
    static: tuple[int, ...],
    options: dict[str, Any],
) -> Any:
    from flax.core import lift
    from flax.linen.transforms import lift_transform

    # What is lifted takes two groups of arrays first, in the module's place.
    numbers = tuple(n + 1 for n in static)
    # What is lifted has names of arguments no more.
    signed = (None if methods else target.__call__) if isinstance(target, type) else target

    def lifted(fn: Callable[..., object]) -> Callable[..., Any]:
        def inner(
            scope_of: Callable[..., object],
            repack: Callable[..., object],
            groups: object,
            keys: object,
            *args: object,
            **kwargs: object,
        ) -> Any:
            def run(groups: object, keys: object, *args: object, **kwargs: object) -> Any:
                scope = scope_of(groups, keys)
                return fn(scope, *args, **kwargs), repack(scope)

            if not jax.tree.leaves(groups):  # the module is being initialised
                return run(groups, keys, *args, **kwargs)
            with naming_static(
                Program(signed or fn, static), (None, *args), kwargs, "flax.remat", by_number=True
            ):
                return checkpoint(run, budget, static_argnums=numbers, **options)(
                    groups, keys, *args, **kwargs
                )

        return lift.pack(inner, (variables,), (variables,), (rngs,), name="remat", enable_kwargs=True)

    planned: Any = lift_transform(lifted, target, methods=methods)
    if isinstance(target, type):  # by which unnamed modules, and so their parameters, are called
        planned.__name__, planned.__qualname__ = target.__name__, target.__qualname__
    return planned


def _nnx(
    fn: Callable[..., object], budget: Held, static: tuple[int, ...], options: dict[str, Any]
) -> Callable[..., Any]:
    from flax import nnx

    @functools.wraps(fn)
    def planned(*args: object, **kwargs: object) -> Any:
        fixed = {i: args[i] for i in static}
        moving = tuple(a for i, a in enumerate(args) if i not in fixed)
        shape, variables, arrays = nnx.split((moving, kwargs), nnx.Variable, ...)
        shapes: list[Any] = []

        def run(variables: Any, arrays: object) -> Any:
            moved, named = nnx.merge(shape, variables, arrays)
            taken = iter(moved)
            result = fn(*(fixed[i] if i in fixed else next(taken) for i in range(len(args))), **named)
            made, state = nnx.split((result,))
            shapes.append(made)
            return state, nnx.state((moved, named), nnx.Variable)

        state, updated = checkpoint(run, budget, **options)(variables, arrays)
        nnx.update((moving, kwargs), updated)
        return nnx.merge(shapes[0], state)[0]

    return planned
