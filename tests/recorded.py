"""What compilers made of a program and solvers found, kept from run to run in folders of the tests' own, git-ignored.

XLA for the host: JAX's persistent compilation cache, by environment variables, so that processes which tests start have
it too. XLA for GPUs, and integer programs: answers of the worker by a hash of all that it is asked. Law: an answer is
what the compiler or solver of the same version made of the same program. `@pytest.mark.uncached` and slow tests compile
and solve anew.

XLA for the host makes machine code as it comes, and without its MLIR emitters of fusions, which takes a third of the
time: fusions, schedule and buffers, and so every peak, are those of optimised code, but that a scatter is a loop. Tests
of kernels that round differently, of scatters, or of the very bytes compile `AS_USERS` do.
"""

import gzip
import hashlib
import json
import marshal
import math
import os
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxremat._compiler import _target
from jaxremat._runtime import _worker
from jaxremat._solver import _integer_program

ROOT = Path(__file__).parents[1]
HOST, TARGETS, SOLVED = (ROOT / ".cache" / name for name in ("xla", "targets", "solved"))
MIP = _integer_program.WORKER
MOST_NBYTES = 3 << 30
"""What a folder may hold before a run."""

# Tags are read from metadata, which must be the same. Only the innermost source line is kept, relative to the project:
# neither an edit elsewhere nor another caller or folder makes another program.
SETTINGS: dict[str, str | float] = {
    "jax_compilation_cache_dir": str(HOST),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_compilation_cache_include_metadata_in_key": True,
    "jax_traceback_in_locations_limit": 1,
    "jax_hlo_source_file_canonicalization_regex": f"^{ROOT}",
}

LEVEL, EMITTERS = "xla_backend_optimization_level", "xla_cpu_use_fusion_emitters"
EMITTED: dict[str, Any] = {EMITTERS: True} if jax.__version_info__ < (0, 11) else {}
"""As users' kernels are written. Newer versions, which `make test-newest` has, know no other writers."""

AS_USERS: dict[str, Any] = {LEVEL: 3, **EMITTED}


def begin() -> None:
    """Keep compiled programs, of machine code as it comes, where the environment does not say otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    for name, value in {LEVEL: "0", **dict.fromkeys(EMITTED, "false")}.items():
        if name not in flags:
            flags = f"{flags} --{name}={value}".strip()
    os.environ["XLA_FLAGS"] = flags
    for name, value in SETTINGS.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)
    _target.ask = _integer_program.ask = ask


def suspend(suspended: bool) -> None:
    """Compile anew, or again what is not kept."""
    global _suspended
    suspended = suspended or not _WANTED
    if _suspended != suspended:
        _suspended = suspended
        jax.config.update("jax_enable_compilation_cache", not suspended)
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(not suspended)
        compilation_cache.reset_cache()  # else JAX goes on with what it found at first


_WANTED: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
_suspended = not _WANTED


def ask(script: Path, request: Any, seconds: float = math.inf) -> Any:
    """What `_worker.ask` answers, or has answered to the same request."""
    if script == _target.WORKER:
        config, topology, module, options = request
        options = {LEVEL: 3, **options}  # what a kernel needs of a GPU is said of optimised code
        request = config, topology, module, options
        asked = repr((_target.compilers(), config, topology, sorted(options.items()))).encode() + module
        folder = TARGETS
    elif script == MIP:  # whose answer is the same whatever the time, where that did not end it
        asked = marshal.dumps((version("mip"), {**request, "seconds": 0}), 2)
        folder = SOLVED
    else:
        return _worker.ask(script, request, seconds)
    if _suspended:
        return _worker.ask(script, request, seconds)
    path = folder / f"{hashlib.sha256(asked).hexdigest()}.json.gz"
    if path.exists():
        answer = json.loads(gzip.decompress(path.read_bytes()))
        if answer[0] is None:
            raise _worker.WorkerRefusedError(answer[1])
        return answer
    refused = None
    try:
        answer = _worker.ask(script, request, seconds)
    except _worker.WorkerRefusedError as error:
        answer, refused = (None, str(error)), error
    if folder != SOLVED or not answer[-1]:
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        draft.write_bytes(gzip.compress(json.dumps(answer).encode(), 6))
        draft.replace(path)
    if refused is not None:
        raise refused
    return answer


def prune() -> None:
    """Remove what is oldest, down to half of what a folder may hold, from one that holds more."""
    for folder in (HOST, TARGETS, SOLVED):
        files = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in folder.glob("*"))
        held = sum(nbytes for _, nbytes, _ in files)
        if held > MOST_NBYTES:
            for _, nbytes, file in files:
                file.unlink(missing_ok=True)
                held -= nbytes
                if held <= MOST_NBYTES // 2:
                    break
