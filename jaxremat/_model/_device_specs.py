"""Devices: memory and arithmetic for the model of time, hardware details for the compiler.

Sources: NVIDIA's datasheets, architecture white papers and tuning guides of each part (rates without sparsity; f64 on
tensor cores where there are any; the host link is the PCIe generation's x16 rate, links between GPUs are NVLink's
where the part has it).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .._runtime._files import read

# NumPy's spellings of the types that the table spells as HLO does.
_SPELLING = {"float": "f", "bfloat": "bf", "complex": "c", "uint": "u", "int": "s", "bool": "pred"}
# If a device has no rate for a type, the type whose rate applies instead; the last resort is f32.
_FALLBACK = {"f8": "f16", "f16": "bf16", "c128": "f64"}


KERNEL_RATES = {"bf16": 0.5, "f16": 0.5, "f32": 0.25}
"""The share of a device's rate for large matrix products that attention kernels reach, by HLO type.

Measured on an H200 (`examples/benchmarks/results/attention`): with 2-byte numbers 0.40 to 0.54 at width 64 and 0.52 to
0.69 at width 128, forward and backward; with f32 at width 64 0.32 forward and 0.21 backward.
"""

_THREADS_SECONDS = 1.3e-4
"""Time for eight devices of one CPU process to gather or sum 32 bytes each: measured on 2 cores, with jax 0.10."""

_RING_SECONDS, _NVLINK_STEP_SECONDS, _PCIE_STEP_SECONDS, _RING_STEPS = 8.4e-6, 3.4e-6, 5.7e-6, 7
"""Latencies in NCCL's own model of time (`src/graph/tuning.cc`: a ring, protocol Simple): of a collective, and of each
of the steps in which eight devices gather, or sum and scatter.
"""


@dataclass(frozen=True, slots=True)
class Chip:
    """The hardware figures of a GPU, as XLA's GPU compiler asks for them.

    **Arguments:** `capability` CUDA's compute capability (major, minor); `cores` streaming multiprocessors, each with
    `lanes` f32 units, `threads` resident threads and `shared_nbytes` of shared memory, of which one block may use
    `block_shared_nbytes`; `l2_nbytes` of cache; `clock_ghz` at boost; `bandwidth` of the memory in bytes/s, by
    datasheet; `accelerated` whether the compiler may use architecture-specific instructions (Hopper and later); `link`
    to other GPUs of the host in bytes/s of one direction (NVLink, half of the datasheet's rate), 0 for PCIe.
    """

    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    shared_nbytes: int
    block_shared_nbytes: int
    l2_nbytes: int
    clock_ghz: float
    bandwidth: int
    accelerated: bool = False
    link: float = 0.0

    def channels_last(self, dtype: str) -> bool:
        """Return whether XLA convolves images of a type (`"float32"`) with the channels innermost; otherwise they come
        before the pixels. Read off the programs that it compiles for each of these devices.
        """
        since = {"float16": (7, 0), "bfloat16": (8, 0)}.get(dtype, (9, 0))
        return self.capability >= since

    def config(self, name: str) -> str:
        """Return XLA's target configuration (`GpuTargetConfigProto` as text).

        The memory is given as 1 TiB: XLA's own rematerialisation acts near the limit, and must not change the program,
        because budgets are the planner's responsibility.
        """
        major, minor = self.capability
        extension = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        return f'''
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  threads_per_core_limit: {self.threads}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_core: {self.shared_nbytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.block_shared_nbytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  l2_cache_size: {self.l2_nbytes}
  memory_bandwidth: {self.bandwidth}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {2**40}
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
'''


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The figures of one device that the model of time needs.

    **Arguments:**

    - `name`, `platform`: `name` is for people; `platform` is JAX's (`"cpu"`, `"gpu"`).
    - `memory_nbytes`: bytes that programs may use.
    - `bandwidth`: bytes/s between the device's memory and its arithmetic, reads plus writes.
    - `peak_flops`: pairs (HLO type name, flop/s) that large matrix products reach.
    - `launch_seconds`: fixed cost of one kernel.
    - `host_link`: bytes/s from device to host memory, one direction.
    - `chip`: the hardware figures of a GPU, None for other devices.
    """

    name: str
    platform: str
    memory_nbytes: int
    bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    launch_seconds: float
    host_link: float
    chip: Chip | None = None

    @property
    def link(self) -> float:
        """Bytes/s to other devices of the host, one direction."""
        return self.chip.link if self.chip is not None and self.chip.link else self.host_link

    @property
    def collective_seconds(self) -> float:
        """The least seconds of a collective of a host's devices, however few bytes they send."""
        if self.platform == "cpu":
            return _THREADS_SECONDS
        nvlink = self.chip is not None and self.chip.link
        return _RING_SECONDS + _RING_STEPS * (_NVLINK_STEP_SECONDS if nvlink else _PCIE_STEP_SECONDS)

    def peak(self, dtype: str) -> float:
        """Return the flop/s of a type, spelled as in HLO (`"bf16"`) or in NumPy (`"bfloat16"`).

        A type without an entry has the rate of a related one: f8 of f16, f16 of bf16, c128 of f64, the rest of f32.
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
        """Return the spec as plain JSON values; `from_json` inverts it."""
        return {**asdict(self), "peak_flops": dict(self.peak_flops)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "DeviceSpec":
        """Return the spec that `to_json` wrote. **Raises:** KeyError, TypeError or ValueError on anything else."""
        rates = [[*pair] for pair in data["peak_flops"].items()]
        spec: DeviceSpec = read(DeviceSpec, {**data, "peak_flops": rates})
        if not min(spec.bandwidth, spec.host_link, spec.peak("f32"), *dict(spec.peak_flops).values()) > 0:
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
    chip: Chip | None = None,
) -> DeviceSpec:
    """Convert datasheet figures, in GB, TB/s, Tflop/s without sparsity and GB/s per direction, to a spec.

    JAX multiplies f32 matrices in TF32 on devices that have it (Ampere and later, with `jax_default_matmul_precision`
    unset), so that rate stands for f32. Without bf16 arithmetic, XLA computes in f32.
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
        chip=chip,
    )


_HOPPER = {
    "lanes": 128,
    "threads": 2048,
    "shared_nbytes": 233472,
    "block_shared_nbytes": 232448,
    "accelerated": True,
}
_AMPERE = {"lanes": 64, "threads": 2048, "shared_nbytes": 167936, "block_shared_nbytes": 166912}
_ADA = {"lanes": 128, "threads": 1536, "shared_nbytes": 102400, "block_shared_nbytes": 101376}
_MIB = 2**20


def _chip(
    capability: tuple[int, int], cores: int, l2_mib: int, clock_ghz: float, bandwidth: float, **build: Any
) -> Chip:
    """Return a chip from its datasheet (L2 cache in MiB, clock in GHz, bandwidth in GB/s) and its family's figures."""
    return Chip(
        capability=capability,
        cores=cores,
        l2_nbytes=l2_mib * _MIB,
        clock_ghz=clock_ghz,
        bandwidth=round(bandwidth * 1e9),
        **build,
    )


# The shares are set so that the H100 and the P100 agree with the independent judge of HLO rooflines (0.6e15 bf16,
# 0.24e15 f32, 3.0 TB/s and 8.5e12 f32, 0.6 TB/s), see DESIGN.md, section 7.
DEVICES: Mapping[str, DeviceSpec] = {
    "h100": _gpu(
        "NVIDIA H100 SXM", 80, 3.35, 67, 67, host=64, f16=989, bf16=989, tf32=494, f8=1979,
        chip=_chip((9, 0), 132, 50, 1.98, 3352.32, link=450e9, **_HOPPER),
    ),
    "h100-pcie": _gpu(
        "NVIDIA H100 PCIe", 80, 2.0, 51, 51, host=64, f16=756, bf16=756, tf32=378, f8=1513,
        chip=_chip((9, 0), 114, 50, 1.755, 2039.04, **_HOPPER),
    ),
    "h200": _gpu(
        "NVIDIA H200", 141, 4.8, 67, 67, host=64, f16=989, bf16=989, tf32=494, f8=1979,
        chip=_chip((9, 0), 132, 50, 1.98, 4800, link=450e9, **_HOPPER),
    ),
    "gh200": _gpu(
        "NVIDIA GH200", 96, 4.0, 67, 67, host=384, f16=989, bf16=989, tf32=494, f8=1979,
        chip=_chip((9, 0), 132, 50, 1.98, 4022.784, link=450e9, **_HOPPER),
    ),
    "b200": _gpu(
        "NVIDIA B200", 180, 8.0, 80, 40, host=64, f16=2250, bf16=2250, tf32=1100, f8=4500,
        chip=_chip((10, 0), 148, 126, 1.965, 7672.32, link=900e9, **_HOPPER),
    ),
    "gb200": _gpu(
        "NVIDIA GB200", 186, 8.0, 90, 45, host=225, f16=2500, bf16=2500, tf32=1250, f8=5000,
        chip=_chip((10, 0), 148, 126, 1.965, 7672.32, link=900e9, **_HOPPER),
    ),
    "a100-40": _gpu(
        "NVIDIA A100 40GB", 40, 1.555, 19.5, 19.5, host=32, f16=312, bf16=312, tf32=156,
        chip=_chip((8, 0), 108, 40, 1.41, 1555.2, link=300e9, **_AMPERE),
    ),
    "a100-80": _gpu(
        "NVIDIA A100 80GB", 80, 2.039, 19.5, 19.5, host=32, f16=312, bf16=312, tf32=156,
        chip=_chip((8, 0), 108, 40, 1.41, 2039.04, link=300e9, **_AMPERE),
    ),
    "l4": _gpu(
        "NVIDIA L4", 24, 0.30, 30.3, 0.47, host=32, f16=121, bf16=121, tf32=60, f8=242,
        chip=_chip((8, 9), 58, 48, 2.04, 300, **_ADA),
    ),
    "rtx4090": _gpu(
        "NVIDIA RTX 4090", 24, 1.008, 82.6, 1.29, host=32, f16=165, bf16=165, tf32=82.6, f8=330,
        chip=_chip((8, 9), 128, 72, 2.52, 1008, **_ADA),
    ),
    "t4": _gpu(
        "NVIDIA T4", 16, 0.32, 8.1, 0.25, host=16, f16=65, stream=0.8,
        chip=_chip(
            (7, 5), 40, 4, 1.59, 320, lanes=64, threads=1024, shared_nbytes=65536, block_shared_nbytes=65536
        ),
    ),
    "v100": _gpu(
        "NVIDIA V100", 16, 0.9, 15.7, 7.8, host=16, f16=125, launch=4e-6,
        chip=_chip(
            (7, 0), 80, 6, 1.53, 898.048, lanes=64, threads=2048, shared_nbytes=98304, block_shared_nbytes=98304,
            link=150e9,
        ),
    ),
    "p100": _gpu(
        "NVIDIA P100", 16, 0.732, 10.6, 5.3, host=16, f16=21.2, f16_share=_VECTOR, stream=0.82, launch=4e-6,
        chip=_chip(
            (6, 0), 56, 4, 1.4805, 732.16, lanes=64, threads=2048, shared_nbytes=65536, block_shared_nbytes=49152,
            link=80e9,
        ),
    ),
}  # fmt: skip

CPU = DeviceSpec(
    "CPU", "cpu", 24 << 30, 4.5e10, (("f32", 1.6e11), ("bf16", 1.6e11), ("f64", 8.7e10)), 5e-7, 4.5e10
)
"""The row for every processor: two cores of a server with 512-bit vectors, in large products, streams and small kernels
in loops.

One row suffices, because plans depend on ratios: f32 operations per byte are 3.6 here, and 3 to 8 where few cores share
a memory. A measurement depends on what else runs: one machine gave 44 to 120 GB/s, and plans that differed.
`profile="measure"` times single operations.
"""

# Words of `device_kind` ("NVIDIA A100-SXM4-40GB"), the most specific first.
_KINDS: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(words.split()), key)
    for words, key in (
        ("gh200", "gh200"),
        ("h200", "h200"),
        ("h100 pcie", "h100-pcie"),
        ("h100", "h100"),
        ("b200", "b200"),
        ("gb200", "gb200"),
        ("a100 40gb", "a100-40"),
        ("a100", "a100-80"),
        ("l4", "l4"),
        ("4090", "rtx4090"),
        ("t4", "t4"),
        ("v100", "v100"),
        ("p100", "p100"),
    )
)


def find(kind: str) -> str | None:
    """Return the key in `DEVICES` for the `device_kind` of a `jax.Device`."""
    words = frozenset(re.findall(r"[a-z0-9]+", kind.lower()))
    return next((key for wanted, key in _KINDS if wanted <= words), None)
