"""A jax.Device -> DeviceSpec: its memory, bandwidths and arithmetic rates, in bytes, bytes/s and flop/s.

Invariant: rates come from a table and nothing is timed, so that a busy machine gives the same plans.
"""

import os
from dataclasses import replace
from typing import Any

from .._model._device_specs import CPU, DEVICES, DeviceSpec, find
from .._model._host_copies import HostMemory


def detect(device: Any) -> DeviceSpec:
    """Return the spec of a `jax.Device` (anything with `platform`, `device_kind` and `memory_stats()`).

    Every CPU has the same rates. Other devices are looked up by the words of their kind. A device that the table does
    not know gets the H100's rates: plans depend only on ratios. Memory is the size that the device reports, if any.
    """
    if device.platform == "cpu":
        return replace(CPU, memory_nbytes=_host_nbytes())
    kind = str(device.device_kind)
    known = find(kind)
    spec = DEVICES[known] if known else replace(DEVICES["h100"], name=kind)
    limit = (device.memory_stats() or {}).get("bytes_limit", spec.memory_nbytes)
    return replace(spec, platform=str(device.platform), memory_nbytes=int(limit) or spec.memory_nbytes)


HOST_SHARE = 0.5
"""Default share of the machine's memory that may be pinned for offloaded values."""

AHEAD_SECONDS = 5e-3
"""XLA's estimate of the time of any copy (`GpuLatencyEstimator`: 5,000 units, of a microsecond)."""


def host_memory(spec: DeviceSpec, device: Any, nbytes: int | None) -> HostMemory | None:
    """Return the host memory that one device may use, None if the device has no separate memory.

    **Arguments:** `device` the `jax.Device`, None for a target; `nbytes` for all devices of the machine together, by
    default half of its memory.
    """
    if spec.platform == "cpu":
        return None
    if device is None:
        return HostMemory(spec.host_link, nbytes, AHEAD_SECONDS)
    if not any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        return None
    whole = int(HOST_SHARE * _host_nbytes()) if nbytes is None else nbytes
    return HostMemory(spec.host_link, whole // len(device.client.local_devices()), AHEAD_SECONDS)


def _host_nbytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 16 * 2**30  # the system does not report it
