"""Arguments in host memory: how they get there, and steps that know nothing of it.

A step computes with what is on the device. Where some of its arguments are in host memory, as an optimizer's
state may be that is read once, they are copied to the device in the step, and what it returns in their place is copied
back. The planner says when (see `_streamed_copies`).
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from .._model._host_copies import LEAST_NBYTES
from .._runtime._bytes import format_nbytes
from .._runtime._errors import HostMemoryError
from ._compat import Args, Kwargs
from ._flops import array_nbytes
from ._primitives import on_host

T = TypeVar("T")

_HOST = "pinned_host"


def to_host(tree: T, *, least_nbytes: int = LEAST_NBYTES) -> T:
    """Return the same arrays in host memory. A planned step takes them from there and returns them there.

    This is for an optimizer's state, which a step reads once: each part of it is on the device only around the update
    of its parameter. It is also for stacks of weights that a `lax.scan` over layers reads: rows of them are on the
    device, in the iterations that read them. The step needs no change. Other functions that compute with such arrays
    must first copy them to the device, with `jax.device_put(x, jax.memory.Space.Device)`.

    **Arguments:** a tree of arrays or `jax.ShapeDtypeStruct`s. Other leaves stay as they are, and so do arrays of less
    than `least_nbytes`, such as counters.

    **Raises:** `HostMemoryError` where the devices of an array have no such memory, or refuse it.

    ```python
    opt_state = jaxremat.to_host(optimizer.init(params))
    params, opt_state, loss = train_step(params, opt_state, batch)  # opt_state is in host memory again
    ```
    """
    return jax.tree.map(lambda leaf: leaf if array_nbytes(leaf) < least_nbytes else _moved(leaf), tree)


def _moved(leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        needs = "`jaxremat.to_host` puts arrays into"
        check_host_memory(leaf.sharding.addressable_devices, needs, "Leave the arrays on the device.")
        try:
            return jax.device_put(leaf, leaf.sharding.with_memory_kind(_HOST))
        except jax.errors.JaxRuntimeError as error:
            raise HostMemoryError(
                f"Host memory for {format_nbytes(leaf.nbytes)}, {leaf.dtype}{list(leaf.shape)}, was refused: {error}. "
                "Free some of this machine's memory, allow the process to pin more (`ulimit -l`), or move less."
            ) from error
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
        if not isinstance(sharding, jax.sharding.NamedSharding):  # of others JAX forgets the memory
            devices = [*sharding.device_set] if sharding is not None else jax.local_devices()[:1]
            auto = (jax.sharding.AxisType.Auto,)
            mesh = jax.make_mesh((1,), ("alone",), axis_types=auto, devices=devices[:1])
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.with_memory_kind(_HOST))
    return leaf


def check_host_memory(devices: Iterable[Any], needs: str, instead: str) -> None:
    """Check that devices have host memory. **Arguments:** `needs` who wants it, and `instead` what to do without it, in
    words.

    **Raises:** `HostMemoryError` where one has none.
    """
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if _HOST not in kinds:
            raise HostMemoryError(
                f"{needs} memory of the kind {_HOST!r}, but {device} has only {', '.join(map(repr, kinds))}. {instead}"
            )


def is_elsewhere(leaf: Any) -> bool:
    """Return whether an array, or what describes one, is neither in the memory that its devices compute in nor in host
    memory, as this library means it.
    """
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    if kind in (None, "device", _HOST) or isinstance(
        getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh
    ):
        return False
    return any(kind != device.default_memory().kind for device in leaf.sharding.device_set)


def from_host(fn: Callable[..., object]) -> Callable[..., Any]:
    """Return the function for arguments some of which are in host memory, though it computes with all.

    What it returns at the place of such an argument is put there: at the same place in the tree of results as in that
    of arguments, or as in the only argument's that has such a place; or so in the tree of one of several results.
    """

    @functools.wraps(fn)
    def step(*args: object, **kwargs: object) -> Any:
        came = jax.tree.leaves_with_path((args, kwargs))
        places = {path[1:]: leaf for path, leaf in came}
        within = Counter(path[2:] for path, _ in came)
        alone = {path[2:]: leaf for path, leaf in came if within[path[2:]] == 1}

        def returned(path: tuple[object, ...], leaf: object) -> Any:
            if not isinstance(leaf, jax.Array) or on_host(leaf.aval):
                return leaf
            inner = path[1:]
            before = (places.get(path), alone.get(path), places.get(inner), alone.get(inner))
            alike = (a for a in before if isinstance(a, jax.Array) and a.shape == leaf.shape)
            source = next((a for a in alike if a.dtype == leaf.dtype), None)
            return jax.device_put(leaf, jax.memory.Space.Host) if is_there(source) else leaf

        here, named = jax.tree.map(_fetched, (args, kwargs))
        return jax.tree.map_with_path(returned, fn(*here, **named))

    return step


def _fetched(leaf: object) -> Any:
    return jax.device_put(leaf, jax.memory.Space.Device) if is_there(leaf) else leaf


def is_there(leaf: object) -> bool:
    """Return whether an array, or what describes one, is in host memory."""
    if isinstance(leaf, jax.Array):
        return on_host(leaf.aval)
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == _HOST


def any_on_host(args: Args, kwargs: Kwargs) -> bool:
    """Return whether some argument is in host memory."""
    return any(map(is_there, jax.tree.leaves((args, kwargs))))
