"""Program, arguments -> the key of a call, by which a step chooses its plan.

Invariant: calls with equal keys have equal plans. As in `jax.jit`'s cache, a key has the types and devices of
arguments, static arguments, and JAX's settings (`enable_x64`, precisions, meshes, ...), which affect tracing and
compiling.
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
    """Return the key of a call. **Raises:** `ArgumentError` if an argument can be neither traced nor static."""
    leaves, tree = jax.tree.flatten_with_path(program.dynamic(args, kwargs))
    # Uncommitted arrays need no place: they follow the default device, which is among the settings.
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
    """Return the sharding of an argument leaf, None if it is in this device's memory. Structs and NumPy arrays without
    a sharding will be in that memory too, so arrays use the plan for them.
    """
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, SingleDeviceSharding) and sharding.device_set == {device}:
        return None if sharding.memory_kind in (None, device.default_memory().kind) else sharding
    return sharding


def type_of(leaf: object) -> Any:
    """Return the array type of an argument leaf. **Raises:** TypeError if it is no array."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    return jax.typeof(leaf)  # works for structs too, and includes the mesh of their sharding


@contextmanager
def naming_static(
    program: Program, args: Args, kwargs: Kwargs, door: str = "optimize", *, by_number: bool = False
) -> Iterator[None]:
    """Add to JAX's error for a function that branches on a traced value: the arguments that may be meant as static,
    Python numbers that are not.

    **Arguments:** `door` the function of this library that the user called; `by_number` if it takes only
    `static_argnums`.
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
    """Add to XLA's error for a donated argument which one it is, and what to write."""
    leaves = jax.tree.leaves_with_path(program.dynamic(args, kwargs)) if "deleted" in str(error) else ()
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            error.add_note(
                f"The argument {program.name_of(path)} ({leaf.aval.str_short()}) is deleted: an earlier call donated "
                "it. Pass that call's results, or leave the argument out of `donate_argnums`."
            )
            return


class KeyLocks:
    """A lock for each key, so that several threads plan each key once."""

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
