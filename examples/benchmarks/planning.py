"""How long planning takes against compiling the step as it is written: seconds in parts, peak against budget.

    python -m examples.benchmarks.planning resnet50 gpt --scale tiny --save
    python -m examples.benchmarks.planning my_steps:make --share 0.5

A program is one of `networks` or ``module:make``, where ``make()`` returns a step and its arguments; what is donated is
the first. Each is compiled as written, then planned with nothing found before (an empty cache folder). Parts that
overlap (compilations at the same time, a trace inside of another phase) count once: seconds are those of the innermost
part that runs in the planning thread, *rest* is what belongs to none.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import get_ident
from typing import Any
from unittest.mock import patch

import jax

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.networks import NAMES, program
from jaxremat import InfeasibleBudgetError, MemoryStats, Milp, compiler_options, format_nbytes
from jaxremat._compiler._target import TargetLowered
from jaxremat._model import _simulate
from jaxremat._rewrite import _trace

PARTS = ("trace", "compile", "solve", "simulate")
WATCHED: tuple[tuple[str, Any, str], ...] = (
    ("trace", _trace, "normalise"),
    ("compile", jax.stages.Lowered, "compile"),
    ("compile", TargetLowered, "compile"),
    ("simulate", _simulate, "_simulated"),
    ("solve", Milp, "solve"),
)
"""What belongs to a part: functions by where they are looked up."""

SHARE = 0.5
"""Of the temporaries of the step as it is written."""


class Parts:
    """Seconds and calls of each part, of calls within others the innermost."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.calls: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._thread = get_ident()
        self._within: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is that part."""
        if get_ident() != self._thread:
            yield
            return
        self._pass()
        self.calls[name] += name not in self._within
        self._within.append(name)
        try:
            yield
        finally:
            self._pass()
            self._within.pop()

    def watched(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are that part."""

        @wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return fn(*args, **kwargs)

        return run

    def _pass(self) -> None:
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now


@contextmanager
def parts() -> Iterator[Parts]:
    """The parts of what is planned inside."""
    found = Parts()
    with ExitStack() as stack:
        for name, owner, attribute in WATCHED:
            watched = found.watched(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, watched))
        yield found


def subject(name: str, scale: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step by name, and its arguments."""
    if ":" not in name:
        own = program(name, scale=scale)  # type: ignore[arg-type]
        return own.step, own.abstract_args()
    module, make = name.split(":", 1)
    step, args = getattr(importlib.import_module(module), make)()
    return step, tuple(args)


def measure(name: str, *, scale: str = "tiny", share: float = SHARE) -> records.Record:
    """Compile a step as it is written, then plan it for that share of its temporaries."""
    step, args = subject(name, scale)
    equations = len(jax.make_jaxpr(step)(*args).eqns)
    began = time.perf_counter()
    plain = jax.jit(step, donate_argnums=0).lower(*args).compile(compiler_options=compiler_options())
    plain_seconds = time.perf_counter() - began
    memory = MemoryStats.of(plain)
    budget = memory.peak_nbytes - int((1 - share) * memory.temporaries_nbytes)
    jax.clear_caches()
    planned = jaxremat.optimize(budget, donate_argnums=0)(step)
    peak, first = None, None
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, JAXREMAT_CACHE=folder),
        parts() as found,
    ):
        began = time.perf_counter()
        with suppress(InfeasibleBudgetError):
            plan = planned.plan(*args)
            peak, first = plan.compiled_peak_nbytes, plan.planning.first_seconds
        seconds = time.perf_counter() - began
    return {
        "kind": "planning",
        "date": records.today(),
        "library": records.library_version(),
        "environment": records.environment(),
        "program": name,
        "scale": scale,
        "share": share,
        "equations": equations,
        "plain_compile_seconds": plain_seconds,
        "planning_seconds": seconds,
        "first_seconds": first,
        "parts": {**found.seconds, "rest": seconds - sum(found.seconds.values())},
        "calls": found.calls,
        "ratio": seconds / plain_seconds,
        "budget_nbytes": budget,
        "plain_peak_nbytes": memory.peak_nbytes,
        "peak_nbytes": peak,
    }


def line(record: records.Record) -> str:
    """A measurement in a line."""
    seconds = ", ".join(
        f"{part} {record['parts'][part]:.1f}"
        + (f" ({count}x)" if (count := record["calls"].get(part)) else "")
        for part in (*PARTS, "rest")
    )
    first = record["first_seconds"]
    fits = "" if first is None else f", the first that fits after {first:.1f} s"
    budget, peak = format_nbytes(record["budget_nbytes"]), record["peak_nbytes"]
    return (
        f"{record['program']} {record['scale']}: {record['equations']:,} equations, compiled in "
        f"{record['plain_compile_seconds']:.1f} s, planned in {record['planning_seconds']:.1f} s "
        f"({record['ratio']:.1f}x){fits}: {seconds}; "
        + (f"infeasible at {budget}" if peak is None else f"peak {format_nbytes(peak)} of {budget}")
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without arguments ResNet-50, ViT and GPT at sizes for tests, into ``out/``."""
    parser = argparse.ArgumentParser(description="Seconds to plan against seconds to compile.")
    parser.add_argument(
        "programs", nargs="*", default=["resnet50", "vit", "gpt"], help=f"{NAMES} or module:make"
    )
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="tiny")
    parser.add_argument("--share", type=float, default=SHARE, help="of the temporaries (default: 0.5)")
    parser.add_argument("--save", action="store_true", help="write into results/ rather than out/")
    given = parser.parse_args(argv)
    folder: Path = records.RESULTS if given.save else records.OUT
    for name in given.programs:
        record = measure(name, scale=given.scale, share=given.share)
        file = f"planning-{name.replace(':', '.')}-{given.scale}.json"
        records.write(folder / jax.default_backend() / file, record)
        print(line(record), flush=True)


if __name__ == "__main__":
    main()
