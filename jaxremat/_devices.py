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
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# NumPy's spellings of the types that the table spells as HLO does.
_SPELLING = {"float": "f", "bfloat": "bf", "complex": "c", "uint": "u", "int": "s", "bool": "pred"}
# Where a device has no rate of its own for a type: the next type to ask for, in the end always f32.
_FALLBACK = {"f8": "f16", "f16": "bf16", "c128": "f64"}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The figures of one device that the model of time needs.

    **Arguments:**

    - `name`, `platform`: for people; `platform` is JAX's (`"cpu"`, `"gpu"`).
    - `memory_nbytes`: bytes that programs may use.
    - `bandwidth`: bytes/s between the device's memory and its arithmetic, reads plus writes.
    - `peak_flops`: pairs (HLO type name, flop/s) that large matrix products reach.
    - `launch_seconds`: fixed cost of one kernel.
    - `host_link`: bytes/s from device to host memory, one direction.
    """

    name: str
    platform: str
    memory_nbytes: int
    bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    launch_seconds: float
    host_link: float

    def peak(self, dtype: str) -> float:
        """flop/s for a type, spelled as HLO (`"bf16"`) or as NumPy (`"bfloat16"`).

        A type without an entry runs like a relative: f8 like f16 like bf16, c128 like f64, the rest like f32.
        """
        rates = dict(self.peak_flops)
        stem = re.match(r"[a-z]+", dtype)
        if stem and stem[0] in _SPELLING:
            dtype = _SPELLING[stem[0]] + dtype[stem.end() :]
        dtype = "f8" if dtype.startswith("f8") else dtype
        while dtype not in rates:
            if dtype == "f32":
                raise ValueError(
                    f"`DeviceSpec({self.name!r})` has no rate for f32, which every other type falls back to: "
                    f"`peak_flops` lists {sorted(rates)}. Add a pair ('f32', flop/s)."
                )
            dtype = _FALLBACK.get(dtype, "f32")
        return rates[dtype]

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON values; `from_json` inverts it."""
        return {**asdict(self), "peak_flops": dict(self.peak_flops)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "DeviceSpec":
        """The spec that `to_json` wrote. **Raises:** KeyError, TypeError or ValueError on anything else."""
        rates = tuple((str(dtype), float(rate)) for dtype, rate in data["peak_flops"].items())
        spec = DeviceSpec(
            name=str(data["name"]),
            platform=str(data["platform"]),
            memory_nbytes=int(data["memory_nbytes"]),
            bandwidth=float(data["bandwidth"]),
            peak_flops=rates,
            launch_seconds=float(data["launch_seconds"]),
            host_link=float(data["host_link"]),
        )
        if not min(spec.bandwidth, spec.host_link, spec.peak("f32"), *(rate for _, rate in rates)) > 0:
            raise ValueError(f"a rate of {spec} is not positive")
        return spec


# Shares of the datasheet's figures that libraries reach on the shapes of training steps: streaming kernels
# about 90 % of the memory's rate (T4 and P100 less), dense products 60 % of the tensor cores' 16-bit rate
# and 50 % of their TF32 rate (they share the memory's bandwidth, with operands twice as large), 80 % of the
# plain vector rate. Relative, not absolute, accuracy matters: a plan compares kernels of one device.
_STREAM, _TENSOR, _TF32, _VECTOR = 0.9, 0.6, 0.5, 0.8


def _gpu(
    name: str,
    gigabytes: float,
    bandwidth: float,
    f32: float,
    f64: float,
    *,
    host: float,
    f16: float,
    tf32: float = 0.0,
    bf16: float = 0.0,
    f8: float = 0.0,
    f16_share: float = _TENSOR,
    stream: float = _STREAM,
    launch: float = 3e-6,
) -> DeviceSpec:
    """Datasheet figures, in GB, TB/s, Tflop/s without sparsity and GB/s per direction, to a spec.

    JAX multiplies f32 matrices in TF32 where the device has it (Ampere and later, with
    `jax_default_matmul_precision` unset), so that rate stands for f32. Where there is no bf16 arithmetic,
    XLA computes in f32.
    """
    single = tf32 * _TF32 or f32 * _VECTOR
    rates = {"f32": single, "bf16": bf16 * _TENSOR or single, "f16": f16 * f16_share, "f64": f64 * _VECTOR}
    if f8:
        rates["f8"] = f8 * _TENSOR
    return DeviceSpec(
        name=name,
        platform="gpu",
        memory_nbytes=round(gigabytes * 1e9),
        bandwidth=float(round(bandwidth * stream * 1e12)),
        peak_flops=tuple((dtype, float(round(rate * 1e12))) for dtype, rate in rates.items()),
        launch_seconds=launch,
        host_link=host * 1e9,
    )


# Sources: NVIDIA's datasheet or architecture white paper of each part (rates without sparsity; f64 on tensor
# cores where there are any; the host link is the PCIe generation's x16 rate). The shares are set so that the
# H100 and the P100 agree with the independent judge of HLO rooflines (0.6e15 bf16, 0.24e15 f32, 3.0 TB/s and
# 8.5e12 f32, 0.6 TB/s), see DESIGN.md, section 7.
DEVICES: Mapping[str, DeviceSpec] = {
    "h100": _gpu("NVIDIA H100 SXM", 80, 3.35, 67, 67, host=64, f16=989, bf16=989, tf32=494, f8=1979),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", 80, 2.0, 51, 51, host=64, f16=756, bf16=756, tf32=378, f8=1513),
    "h200": _gpu("NVIDIA H200", 141, 4.8, 67, 67, host=64, f16=989, bf16=989, tf32=494, f8=1979),
    "b200": _gpu("NVIDIA B200", 180, 8.0, 80, 40, host=64, f16=2250, bf16=2250, tf32=1100, f8=4500),
    "a100-40": _gpu("NVIDIA A100 40GB", 40, 1.555, 19.5, 19.5, host=32, f16=312, bf16=312, tf32=156),
    "a100-80": _gpu("NVIDIA A100 80GB", 80, 2.039, 19.5, 19.5, host=32, f16=312, bf16=312, tf32=156),
    "l4": _gpu("NVIDIA L4", 24, 0.30, 30.3, 0.47, host=32, f16=121, bf16=121, tf32=60, f8=242),
    "rtx4090": _gpu("NVIDIA RTX 4090", 24, 1.008, 82.6, 1.29, host=32, f16=165, bf16=165, tf32=82.6, f8=330),
    "t4": _gpu("NVIDIA T4", 16, 0.32, 8.1, 0.25, host=16, f16=65, stream=0.8),
    "v100": _gpu("NVIDIA V100", 16, 0.9, 15.7, 7.8, host=16, f16=125, launch=4e-6),
    "p100": _gpu(
        "NVIDIA P100", 16, 0.732, 10.6, 5.3, host=16, f16=21.2, f16_share=_VECTOR, stream=0.82, launch=4e-6
    ),
}

# Words of `device_kind` ("NVIDIA A100-SXM4-40GB"), the most specific first.
_KINDS: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(words.split()), key)
    for words, key in (
        ("h200", "h200"),
        ("h100 pcie", "h100-pcie"),
        ("h100", "h100"),
        ("b200", "b200"),
        ("gb200", "b200"),
        ("a100 40gb", "a100-40"),
        ("a100", "a100-80"),
        ("l4", "l4"),
        ("4090", "rtx4090"),
        ("t4", "t4"),
        ("v100", "v100"),
        ("p100", "p100"),
    )
)


def detect(device: Any) -> DeviceSpec:
    """The spec of a `jax.Device` (anything with `platform`, `device_kind` and `memory_stats()`).

    A CPU is measured (`measure_cpu`). Other devices are looked up by the words of their kind; one that the
    table does not know gets the H100's rates: plans depend on ratios. Memory is what the device reports, if
    it does.
    """
    if device.platform == "cpu":
        return measure_cpu()
    kind = str(device.device_kind)
    words = frozenset(re.findall(r"[a-z0-9]+", kind.lower()))
    known = next((key for wanted, key in _KINDS if wanted <= words), None)
    spec = DEVICES[known] if known else replace(DEVICES["h100"], name=kind)
    limit = (device.memory_stats() or {}).get("bytes_limit", spec.memory_nbytes)
    return replace(spec, platform=str(device.platform), memory_nbytes=int(limit) or spec.memory_nbytes)


@functools.cache
def measure_cpu() -> DeviceSpec:
    """The spec of this processor: the cached measurement, or a fresh one (about a second), which it caches.

    The cache is one JSON file per processor model, core count and jax version, in `$JAXREMAT_CACHE` or
    `~/.cache/jaxremat`. A file that cannot be read is measured anew; a folder that cannot be written is left
    alone.
    """
    import jax  # here and in `_measure` alone: the rest of the module runs without it

    key = f"{_processor()}, {_cores()} cores, jax {jax.__version__}"
    path = cache_dir() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return DeviceSpec.from_json(stored["spec"])
    spec = _measure(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, "spec": spec.to_json()}, indent=1))
    return spec


def cache_dir() -> Path:
    """Folder for what is measured once: `$JAXREMAT_CACHE`, else the XDG cache folder's `jaxremat`."""
    if own := os.environ.get("JAXREMAT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxremat"


_SIDE = 512  # of the measured products: milliseconds each, large enough for the rate to have levelled off
_STREAM_ELEMENTS = 1 << 24  # of f32, 64 MiB: beyond the caches of most processors


def _measure(name: str) -> DeviceSpec:
    """Median rates of matrix products and of a streaming kernel, rounded so that noise rarely shows."""
    import jax
    import numpy as np

    def seconds(fn: Any, start: Any, repeats: int = 9) -> float:
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
        return statistics.median(times)

    rates = []
    with jax.enable_x64(True):
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"), ("f64", "float64")):
            # The averaging matrix is its own square: values neither grow nor vanish.
            averaging = np.full((_SIDE, _SIDE), 1 / _SIDE, dtype=jax.numpy.dtype(dtype))
            rates.append((short, _rounded(2 * _SIDE**3 / seconds(lambda a: a @ a, averaging))))
        stream = np.zeros(_STREAM_ELEMENTS, np.float32)
        bandwidth = _rounded(2 * stream.nbytes / seconds(lambda a: a + 1, stream))
    # Measured on the CPU back end, a thunk costs a few microseconds; host memory is the device's own.
    return DeviceSpec(name, "cpu", _host_nbytes(), bandwidth, tuple(rates), 2e-6, bandwidth)


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


def write_atomically(path: Path, text: str) -> None:
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
