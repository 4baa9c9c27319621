"""Storage of measurements: one JSON file for each network and scale, with a description of the machine.

Files under ``results/`` are published: `table` prints them into the README. Those under ``out/`` are your own: git
ignores them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform as machine
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxremat._model._device_specs import DEVICES, find

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
OUT = HERE / "out"
LIBRARY = HERE.parents[1] / "jaxremat"

Record = dict[str, Any]
"""The content of one file: plain JSON values."""


def environment(target: str | None = None) -> Record:
    """What measurements depend on besides the program: versions and machine, or the target compiled for."""
    import jax
    from jaxlib import version as jaxlib

    device = jax.devices()[0]
    if target is not None:
        kind = re.sub(r"[x:]\d.*", "", target)  # of which a target like h100x8 has several
        return {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "platform": target,
            "device": f"XLA's compiler for {DEVICES[kind].name}, without the device",
        }
    return {
        **(
            {}
            if device.platform == "cpu"
            else {"driver": driver(), "runtime": device.client.platform_version}
        ),
        "python": machine.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def platform(target: str | None = None) -> str:
    """What rows are compiled for: a target's name, also for the device at hand if it is one, else JAX's own name."""
    import jax

    return target or find(str(jax.devices()[0].device_kind)) or jax.default_backend()


def today() -> str:
    """The date in UTC."""
    return datetime.now(UTC).date().isoformat()


def library_version() -> str:
    """Eight hexadecimal digits that change with any source file of jaxremat."""
    digest = hashlib.sha256()
    for path in sorted(LIBRARY.rglob("*.py")):
        digest.update(path.relative_to(LIBRARY).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def read(path: Path) -> Record:
    """The record in a file; empty where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_all(folder: Path, kind: str) -> Iterator[Record]:
    """Every record of a kind below a folder, by path."""
    for path in sorted(folder.glob("*/*.json")):
        record = read(path)
        if record["kind"] == kind:
            yield record


def write(path: Path, record: Record) -> None:
    """Put a record into a file, whole or not at all; floats keep six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(_rounded(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)


def prediction_error(row: Record) -> float:
    """Predicted / compiled peak - 1 of the first schedule that was compiled, before any correction."""
    return row["first_predicted_nbytes"] / row["first_compiled_nbytes"] - 1


def peak_process_nbytes() -> int:
    """The most memory that this process has had so far."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def driver() -> str | None:
    """The version of NVIDIA's driver, as its own tool says; None without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.split("\n")[0].strip() or None


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else machine.processor() or machine.machine() or "unknown processor"
