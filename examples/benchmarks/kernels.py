"""A compiled step and its arguments -> what each of its kernels took, by JAX's profiler, beside what the roofline says.

Law: times are device times of whole kernels, means over runs of the step; kernels that the profiler attributes to no
instruction of the program stand under their own names, with no price.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from examples.benchmarks import records
from examples.benchmarks.bench import Args
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._roofline import kernels, seconds_of
from jaxremat._model._device_specs import DeviceSpec

DEVICE = "/device:"
"""What the names of the profiler's planes begin with that hold what ran on devices."""


def profiled(step: Any, args: Args, runs: int = 3) -> dict[str, tuple[float, int]]:
    """Seconds and launches in one run of the step, by HLO instruction.

    **Arguments:** `step` compiled; it consumes the state that it is given, the first run that of `args`.
    """
    state, batch = args
    state, _ = jax.block_until_ready(step(state, batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                state, _ = jax.block_until_ready(step(state, batch))
        (path,) = Path(folder).glob("**/*.xplane.pb")
        found = ProfileData.from_file(str(path))
        planes = list(found.planes)
        on_device = [plane for plane in planes if plane.name.startswith(DEVICE)]
        spent: defaultdict[str, list[float]] = defaultdict(list)
        for plane in on_device or planes:
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" in stats or on_device:
                        spent[str(stats.get("hlo_op", event.name))].append(event.duration_ns / 1e9)
    return {name: (sum(seconds) / runs, round(len(seconds) / runs)) for name, seconds in spent.items()}


def beside_roofline(
    text: str, measured: dict[str, tuple[float, int]], device: DeviceSpec
) -> list[records.Record]:
    """One record per kernel of a compiled program, the most expensive first; kernels without an instruction last."""
    left = dict(measured)
    rows = []
    for kernel in kernels(parse(text)):
        seconds, launches = left.pop(kernel.instruction.name, (0.0, 0))
        rows.append(
            {
                "instruction": kernel.instruction.name,
                "opcode": kernel.instruction.opcode,
                "total_trips": kernel.total_trips,
                "flops": dict(kernel.flops),
                "nbytes": kernel.nbytes,
                "roofline_seconds": kernel.total_trips * seconds_of(kernel, device),
                "seconds": seconds,
                "launches": launches,
            }
        )
    rows.sort(key=lambda row: -row["seconds"])
    return rows + [
        {"instruction": name, "seconds": seconds, "launches": launches}
        for name, (seconds, launches) in sorted(left.items(), key=lambda item: -item[1][0])
    ]


KINDS = {
    "gradients of convolutions' weights": r"cudnn-conv-bw-filter",
    "other convolutions": r"cudnn-conv",
    "matrix products": r"cublas|gemm_fusion|dot|custom-call",
    "softmax and normalisation (Triton)": r"fusion(\.\d+)?$",
    "scatters and pooling": r"\w*(scatter|reduce_window)",
    "sums over axes": r"input_\w*reduce",
    "pointwise work and copies": r"",
}
"""Kinds of kernels, each by what the names begin with that XLA:GPU gives to its instructions; the first that fits."""


def by_kind(rows: Sequence[records.Record]) -> dict[str, records.Record]:
    """Sums of what was measured and of what the roofline says, by kind of kernel."""
    found: dict[str, records.Record] = {}
    for row in rows:
        kind = next(kind for kind, names in KINDS.items() if re.match(names, row["instruction"]))
        total = found.setdefault(kind, {"kernels": 0, "seconds": 0.0, "roofline_seconds": 0.0})
        total["kernels"] += row["launches"]
        total["seconds"] += row["seconds"]
        total["roofline_seconds"] += row.get("roofline_seconds", 0.0)
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))
