"""A process of its own that compiles for GPUs that are not there: StableHLO in, memory figures and HLO text out.

Run as a script by `_target`, which sets `JAX_PLATFORMS=cpu`: with the CUDA plugin on a machine without a GPU nothing
else works, and the user's own process must not be told so. Imports nothing of this library, so that it starts quickly.
Messages are pickles on what was standard input and output; what libraries print goes to standard error.
"""

import os
import pickle
import signal
import sys
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # type: ignore[attr-defined]  # as jax imports it
from jax.experimental import topologies
from jaxlib.mlir import ir

_FIGURES = ("argument", "output", "alias", "temp")


def serve() -> None:
    """Answer requests until the input ends. The first message out says that the worker is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asking process's affair
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    devices: dict[tuple[str, str], Any] = {}
    reply: Any = ("ready", jax.__version__)
    while True:
        pickle.dump(reply, replies)
        replies.flush()
        try:
            config, topology, module, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if (config, topology) not in devices:
                devices[config, topology] = topologies.get_topology_desc(
                    platform="cuda", topology_name="", target_config=config, topology=topology
                ).devices
            reply = ("compiled", *_compile(devices[config, topology], module, options))
        except Exception as error:  # whatever it is, it is the caller's to report
            reply = ("failed", f"{type(error).__name__}: {error}")


def _compile(devices: Any, module: bytes, options: dict[str, Any]) -> tuple[dict[str, int], str]:
    """Memory figures of one device in bytes by name, and the scheduled HLO module as text."""
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


if __name__ == "__main__":
    serve()
