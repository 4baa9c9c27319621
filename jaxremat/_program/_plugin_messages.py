"""The command line on a machine without an NVIDIA GPU -> JAX imported, less what its CUDA plugin says of that.

The plugin is there for its compiler (`jaxremat[targets]`). It says at JAX's import, once for each of its libraries and
before any log level can be set, that there are no CUDA drivers, and when JAX looks for devices, in a traceback, that it
cannot be loaded. Law: nothing else is kept back, and nothing at all in programs that import the library, on machines
with a GPU, or where `JAX_PLATFORMS` asks for one. Imported before everything else that imports JAX.
"""

import glob
import logging
import os
import re
import sys
from pathlib import Path

from .._runtime._native_messages import without

NO_DRIVERS = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|[IW]\d{4} .*Could not find cuda drivers on your machine"
)
"""How the lines begin. The first is absl's introduction to the second."""


def quiet() -> bool:
    """Return whether the plugin's messages are to be kept back in this process."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    return _is_command_line() and not has_gpu() and "cuda" not in asked and "gpu" not in asked


def has_gpu() -> bool:
    """Return whether there is one of the NVIDIA driver's device files, or WSL's."""
    return bool(glob.glob("/dev/nvidia*")) or os.path.exists("/dev/dxg")


def about_missing_gpu(record: logging.LogRecord) -> bool:
    """Return whether JAX logs here that it could not set up its CUDA plugin."""
    about_cuda = any("cuda" in str(each) for each in record.args or ())
    return about_cuda and str(record.msg).startswith("Jax plugin configuration error: Exception when calling")


def _is_command_line() -> bool:
    """While `python -m jaxremat` imports this package, the name of the script is still "-m"."""
    name = sys.argv[0] if sys.argv else ""
    return Path(name).stem == "jaxremat" or (name == "-m" and "jaxremat" in sys.orig_argv)


def _start() -> None:
    with without(NO_DRIVERS):
        from . import _compat  # which imports JAX
    _compat.load_plugins_in(lambda: without(NO_DRIVERS))
    logging.getLogger("jax._src.xla_bridge").addFilter(lambda record: not about_missing_gpu(record))


if quiet():
    _start()
