"""StableHLO -> memory figures and HLO text: a worker process that compiles for GPUs that are not present.

Run by `_runtime._worker`; imports nothing of this library. Its JAX platform is the CPU: with the CUDA plugin on a
machine without a GPU nothing else works, and the setting must not affect the user's process.
"""

import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
with suppress(OSError):
    # If a compilation exhausts memory, Linux kills this process instead of the user's, which then tries another form.
    Path("/proc/self/oom_score_adj").write_text("1000")

from collections.abc import Sequence

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # type: ignore[attr-defined]  # as jax imports it
from jax.experimental import topologies
from jaxlib.mlir import ir

_FIGURES = ("argument", "output", "alias", "temp", "host_temp")


def answer(request: tuple[str, str, bytes, dict[str, str]]) -> tuple[dict[str, int], str]:
    """Compile a module: chip description, topology, bytecode and options -> memory figures and HLO text."""
    config, topology, module, options = request
    return _compile(_devices(config, topology), module, options)


@functools.cache
def _devices(config: str, topology: str) -> Any:
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=topology
    )
    return found.devices


def _compile(devices: Sequence[Any], module: bytes, options: dict[str, str]) -> tuple[dict[str, int], str]:
    """Return memory figures of one device in bytes by name, and the scheduled HLO module as text."""
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        compile_options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.arange(len(devices)).reshape(1, -1),
            env_options_overrides=options,
        )
        executable = devices[0].client.compile(
            parsed, _jax.DeviceList(tuple(devices)), compile_options=compile_options
        )
    stats = executable.get_compiled_memory_stats()
    figures = {f"{name}_size_in_bytes": getattr(stats, f"{name}_size_in_bytes") for name in _FIGURES}
    return figures, executable.hlo_modules()[0].to_string()
