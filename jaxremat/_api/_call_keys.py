"""Program, arguments -> what tells calls of a step apart that need plans of their own.

Law: equal keys have equal plans. As in `jax.jit`'s cache a key has the types and the places of arguments, what is
static, and JAX's settings (`enable_x64`, precisions, meshes, ...), which decide what is traced and how it is compiled.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from .._compiler._program import Program, device_of
from .._program import _compat
from .._program._compat import Args, Kwargs
from .._runtime._errors import ArgumentError


def key_of(program: Program, args: Args, kwargs: Kwargs) -> Any:
    """Return the key of a call. **Raises:** `ArgumentError` where an argument can be neither traced nor static."""
    leaves, tree = jax.tree.flatten_with_path(program.dynamic(args, kwargs))
    # Of arrays that are free to be anywhere the default device decides, and it is among the settings.
    device = None if program.target else device_of(args, kwargs)
    types = []
    for path, leaf in leaves:
        try:
            aval = type_of(leaf)
        except TypeError:
            raise ArgumentError(
                f"The argument {program.name_of(path)} is a {type(leaf).__name__} ({leaf!r:.60}), which is "
                "not an array. Make it static with `static_argnums` or `static_argnames`, or close over it."
            ) from None
        types.append((aval, _place(leaf, device)))
    try:
        key = (tree, tuple(types), device, program.static(args, kwargs), _compat.settings())
        hash(key)
    except TypeError as error:
        raise ArgumentError(
            f"A static argument cannot be hashed ({error}). Pass a hashable object, such as a tuple."
        ) from None
    return key


def _place(leaf: object, device: Any) -> Any:
    """Return the sharding of an argument leaf, None of one that is in the memory of this device, as a struct or a NumPy
    array without a sharding will be: the plan for those is followed by arrays.
    """
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, SingleDeviceSharding) and sharding.device_set == {device}:
        return None if sharding.memory_kind in (None, device.default_memory().kind) else sharding
    return sharding


def type_of(leaf: object) -> Any:
    """Return the array type of an argument leaf. **Raises:** TypeError where it is no array."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    return jax.typeof(leaf)  # of a struct too, with the mesh of its sharding, as in an array's


@contextmanager
def naming_static(
    program: Program, args: Args, kwargs: Kwargs, door: str = "optimize", *, by_number: bool = False
) -> Iterator[None]:
    """Add to what JAX says of a function that decides by a traced value which arguments might be static: Python numbers
    that are not.

    **Arguments:** `door` the function of this library that the user called; `by_number` where it takes `static_argnums`
    alone.
    """
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        with suppress(TypeError, ValueError):  # a signature that cannot be read
            given = inspect.signature(program.fn).bind(*args, **kwargs).arguments
            static = {name for name, _ in program.static(args, kwargs)}
            places = {
                n: i for i, n in enumerate(given) if isinstance(given[n], int) and static.isdisjoint({i, n})
            }
            if places:
                said = " and ".join(f"`{name}` is {given[name]!r}" for name in places)
                written: list[Any] = list(places.values() if by_number else places)
                error.add_note(
                    f"{said}: an argument that Python code branches on must be static. Write "
                    f"`{door}(..., static_arg{'nums' if by_number else 'names'}="
                    f"{tuple(written) if len(written) > 1 else written[0]!r})`."
                )
        raise


def naming_deleted(error: Exception, program: Program, args: Args, kwargs: Kwargs) -> None:
    """Add to what XLA says of an argument that an earlier call has taken which one it is, and what to write."""
    leaves = jax.tree.leaves_with_path(program.dynamic(args, kwargs)) if "deleted" in str(error) else ()
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            error.add_note(
                f"The argument {program.name_of(path)} ({leaf.aval.str_short()}) is deleted: an earlier call donated "
                "it. Pass that call's results, or leave the argument out of `donate_argnums`."
            )
            return


class KeyLocks:
    """A lock for each key: what several threads ask for at a time is made once."""

    def __init__(self) -> None:
        self._own = threading.Lock()
        self._locks: dict[Any, threading.RLock] = {}  # type: ignore[valid-type]

    @contextmanager
    def held(self, key: object) -> Iterator[None]:
        """Hold the key's lock."""
        with self._own:
            lock = self._locks.setdefault(key, threading.RLock())
        with lock:
            yield
