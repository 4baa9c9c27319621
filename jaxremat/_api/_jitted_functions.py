"""Jitted function, options of `optimize` -> the function itself, and the options with those that `jax.jit` was given.

Law: nothing that was said to `jax.jit` (donation, static arguments, shardings, compiler options) is lost: it is handed
over, or refused.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .._plan._arguments import as_tuple
from .._program import _compat
from .._runtime._errors import ArgumentError

_NUMBERED = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
_LOST = ("donate_argnums", "in_shardings", "out_shardings", "compiler_options")
"""What a call of a jitted function within another one does not do."""


def handed_over(
    fn: Callable[..., object], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function to trace and its options.

    **Arguments:** `options` that `optimize` was given, by their names in `jax.jit`.

    **Raises:** `ArgumentError` where the two contradict each other, or where a jitted function is within a partial
    application or a method, whose options are of other arguments.
    """
    own = _compat.jit_options(fn)
    if own is None:
        _check_inner(fn)
        return fn, dict(options)
    for name in ("device", "backend", "layouts"):
        if own.pop(name):
            raise ArgumentError(
                f"`optimize` cannot keep the option `{name}` of the jitted function that it was given. Pass the "
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
