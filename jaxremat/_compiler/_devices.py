"""A jax.Device -> DeviceSpec: what its memory and its arithmetic can do, in bytes, bytes/s and flop/s.

Law: the same machine gives the same figures every time, so that plans are deterministic. GPUs come from a
table; a CPU is measured once, rounded to two significant digits, and read from a cache file from then on.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from .._model._device_specs import DEVICES, DeviceSpec, find
from .._model._host_copies import HostMemory
from .._runtime._cache_folder import cache_dir, read, settle


def detect(device: Any) -> DeviceSpec:
    """Return the spec of a `jax.Device` (anything with `platform`, `device_kind` and `memory_stats()`).

    A CPU is measured (`measure_cpu`). Other devices are looked up by the words of their kind; one that the
    table does not know gets the H100's rates: plans depend on ratios. Memory is what the device reports, if
    it does.
    """
    if device.platform == "cpu":
        return measure_cpu()
    kind = str(device.device_kind)
    known = find(kind)
    spec = DEVICES[known] if known else replace(DEVICES["h100"], name=kind)
    limit = (device.memory_stats() or {}).get("bytes_limit", spec.memory_nbytes)
    return replace(spec, platform=str(device.platform), memory_nbytes=int(limit) or spec.memory_nbytes)


HOST_SHARE = 0.5
"""Of the machine's memory so much may be pinned for copies of values, if nobody says how much."""

AHEAD_SECONDS = 5e-3
"""XLA takes any copy to last so long (`GpuLatencyEstimator`: 5,000 units, of a microsecond)."""


def host_memory(spec: DeviceSpec, device: Any, nbytes: int | None) -> HostMemory | None:
    """Return host memory as one device may use it, None where the device has no memory but that.

    **Arguments:** `device` the `jax.Device`, None where it is not there; `nbytes` of all its devices together, by
    default half of what the machine has.
    """
    if spec.platform == "cpu":
        return None
    if device is None:
        return HostMemory(spec.host_link, nbytes, AHEAD_SECONDS)
    if not any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        return None
    whole = int(HOST_SHARE * _host_nbytes()) if nbytes is None else nbytes
    return HostMemory(spec.host_link, whole // len(device.client.local_devices()), AHEAD_SECONDS)


_REVISION = ", 2"
"""Of what is measured: files of another are not read."""


@functools.cache
def measure_cpu() -> DeviceSpec:
    """Return the spec of this processor: the cached measurement, or a fresh one (about a second), which it caches.
    Processes that measure at the same time all get the first one's.

    The cache is one JSON file per processor model, core count and jax version, in `$JAXREMAT_CACHE` or
    `~/.cache/jaxremat`. See `_cache_folder` for files that cannot be read or written.
    """
    key, path = cpu_file()

    def parse(text: str) -> DeviceSpec:
        stored = json.loads(text)
        if stored["key"] != key:
            raise ValueError("it is another machine's")
        return DeviceSpec.from_json(stored["spec"])

    if (known := read(path, parse)) is not None:
        return known
    # that of another process that measured at the same time, if it was first
    return settle(path, cpu_text(key, _measure(key)), parse)


def cpu_file() -> tuple[str, Path]:
    """Return what this processor's file in the cache says it is of, and where it is."""

    key = f"{_processor()}, {_cores()} cores, jax {jax.__version__}"
    return key, cache_dir() / f"cpu-{hashlib.sha256((key + _REVISION).encode()).hexdigest()[:16]}.json"


def cpu_text(key: str, spec: DeviceSpec) -> str:
    """Return what the file holds."""
    return json.dumps({"key": key, "spec": spec.to_json()}, indent=1)


_SIDE = 512  # of the measured products: milliseconds each, large enough for the rate to have levelled off
_STREAM_ELEMENTS = 1 << 24  # of f32, 64 MiB: beyond the caches of most processors


def _measure(name: str) -> DeviceSpec:
    """Return the best rates of matrix products and of a streaming kernel, rounded: noise only ever makes them
    slower.
    """
    import numpy as np

    def seconds(fn: Callable[..., object], start: object, repeats: int = 15) -> float:
        # Compiled ahead of time and fed its own result: works inside somebody's trace too, and the donated
        # buffer is written in place, so that no page faults of fresh memory are in the time.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            compiled = jax.jit(fn, donate_argnums=0).lower(start).compile()
        value = jax.block_until_ready(compiled(start))
        times = []
        for _ in range(repeats):
            before = time.perf_counter()
            value = jax.block_until_ready(compiled(value))
            times.append(time.perf_counter() - before)
        return min(times)

    rates = []
    with jax.enable_x64(True):
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"), ("f64", "float64")):
            # The averaging matrix is its own square: values neither grow nor vanish.
            averaging = np.full((_SIDE, _SIDE), 1 / _SIDE, dtype=jax.numpy.dtype(dtype))
            rates.append((short, _rounded(2 * _SIDE**3 / seconds(lambda a: a @ a, averaging))))
        stream = np.zeros(_STREAM_ELEMENTS, np.float32)
        bandwidth = _rounded(2 * stream.nbytes / seconds(lambda a: a + 1, stream))
    # Measured on the CPU back end: a small kernel in a loop takes 0.4 us; host memory is the device's own.
    return DeviceSpec(name, "cpu", _host_nbytes(), bandwidth, tuple(rates), 5e-7, bandwidth)


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _host_nbytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 16 * 2**30  # a system that does not say
