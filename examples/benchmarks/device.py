"""Measure on the device at hand what the other benchmarks model: the allocator's peaks, step times, equal results.

    python -m examples.benchmarks.device resnet50 gpt-small-unrolled-bf16 --save
    python -m examples.benchmarks.device all --runs 30
    python -m examples.benchmarks.device resnet50 --kernels plain 1/2     # each kernel beside its roofline
    python -m examples.benchmarks.device resnet50 --plans FOLDER     # plans made elsewhere: no solver is needed

Per step: seconds (medians of many runs in turn), the largest difference of all results from the plain step's, and the
most memory that the device's allocator had in use, in a process of its own.
What the allocator shows beyond the compiler's number is what `workspace_margin` is to keep free. A device that
reports no memory (the CPU) has no such figures: they stay empty.

FOLDER is where `monet` keeps its plans (``out/plans/monet``): a folder per subject and target with a file per row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax

import jaxremat
from examples.benchmarks import kernels, monet, records, runner
from examples.benchmarks.bench import BY_HAND
from examples.benchmarks.monet import AT_BLOCK, SUBJECTS, Monet
from jaxremat._compiler._devices import detect

NEARLY_FREE = ("19/20", "9/10")
"""Budgets that cost nothing by prediction: what their plans take longer is the price of the barriers."""

ROWS = ("plain", *BY_HAND, *NEARLY_FREE, "2/3", "1/2", "1/3", AT_BLOCK)


@dataclass
class Device(Monet):
    """The measurements of one subject on the device at hand.

    **Arguments:** those of `Monet`; `given` a folder of plans made elsewhere, one file per row; `profile` as in
    `jaxremat.optimize`.
    """

    kind: ClassVar[str] = "device"
    given: Path | None = None
    profile: str = "roofline"

    def _optimize(self, plain: Any, *budget: Any, **options: Any) -> jaxremat.Step:
        planning = options.pop("planning", self.planning)
        if "plan" not in options:  # a plan that is given needs no times
            planning = replace(planning, profile=self.profile)
        return super()._optimize(plain, *budget, planning=planning, **options)

    def _planned(self, name: str) -> Any:
        if self.given is None:
            return super()._planned(name)
        path = self.given / self.plan_path(name).name
        if not path.exists():
            self.say(f"  {name:>6}: no plan in {path}")
            return None
        plan = jaxremat.Plan.load(path)
        plain = self.program()
        try:
            compiled = self._optimize(
                plain, plan=plan, planning=replace(self.planning, verify=False)
            ).compile(*plain.abstract_args())
        except jaxremat.PlanMismatchError as error:
            self.say(f"  {name:>6}: {error}")
            return None
        return self._keep(name, plan, compiled)

    def peaks(self, names: Sequence[str]) -> None:
        """Run each row's step once and add to the row what the allocator had in use at most; in a fresh process.

        The allocator's figure is never reset, so that steps with smaller peaks run first.
        """
        self._open(())
        rows = {name: row for name in names if "peak_nbytes" in (row := self.record["rows"].get(name, {}))}
        for name, row in sorted(rows.items(), key=lambda item: item[1]["peak_nbytes"]):
            step = self._follow(name)
            args = jax.block_until_ready(self.program().make_args())
            before = in_use()
            jax.block_until_ready(step(*args))
            del args
            found = of_allocator(row["peak_nbytes"], self._without_device(name), before, in_use())
            self._store(name, {**row, **found})
            if found["device_peak_nbytes"] is not None:
                size = jaxremat.format_nbytes
                self.say(
                    f"  {name:>6}: {size(found['device_peak_nbytes'])} in use at most, the compiler says "
                    f"{size(row['peak_nbytes'])}"
                )

    def kernels(self, names: Sequence[str], path: Path) -> None:
        """Add to these rows what the kernels of their steps take, by kind; each kernel goes into a file of its own."""
        self._open(())
        spec = detect(jax.devices()[0])
        for name in names:
            if "peak_nbytes" not in self.record["rows"].get(name, {}):
                continue
            step = self._follow(name)
            measured = kernels.profiled(step, jax.block_until_ready(self.program().make_args()))
            rows = kernels.beside_roofline(step.as_text(), measured, spec)
            records.write(path, {**records.read(path), name: rows})
            self._store(name, {**self.record["rows"][name], "kernel_kinds": kernels.by_kind(rows)})
            taken, priced = (
                sum(row.get(key, 0.0) for row in rows) for key in ("seconds", "roofline_seconds")
            )
            self.say(f"  {name:>6}: kernels take {taken:.4f} s, by the roofline {priced:.4f} s")

    def _by_hand(self, name: str) -> bool:
        return name in ("plain", *BY_HAND)

    def _follow(self, name: str) -> Any:
        """A row's step, compiled; a plan's from the file that was kept."""
        if self._by_hand(name):
            return self._compile(self.program(name if name in BY_HAND else "none"))[0]
        plain, plan = self.program(), jaxremat.Plan.load(self.plan_path(name))
        return self._optimize(plain, plan=plan, planning=replace(self.planning, verify=False)).compile(
            *plain.abstract_args()
        )

    def _without_device(self, name: str) -> int | None:
        """The peak of a row's step by XLA's compiler for this device without it; None where there is none."""
        if self.given is not None:
            return (
                None if self._by_hand(name) else jaxremat.Plan.load(self.plan_path(name)).compiled_peak_nbytes
            )
        if records.platform() not in jaxremat.targets():
            return None
        try:
            return jaxremat.MemoryStats.of(replace(self, target=records.platform())._follow(name)).peak_nbytes
        except jaxremat.TargetError as error:
            self.say(f"  {name:>6}: {error}")
            return None


def of_allocator(
    compiled_nbytes: int, deviceless_nbytes: int | None, before: int | None, after: int | None
) -> records.Record:
    """What the allocator's highest figures before and after a step say of the step's peak.

    Nothing where the device reports none, nor where something before the step (autotuning, the initial state) needed
    as much: then the step's own peak does not show. `beyond_nbytes` is what it is above the device-less number, or
    where there is none above that of the device's own compiler.
    """
    shown = after if after is not None and before is not None and after > before else None
    expected = compiled_nbytes if deviceless_nbytes is None else deviceless_nbytes
    return {
        "deviceless_nbytes": deviceless_nbytes,
        "device_before_nbytes": before,
        "device_peak_nbytes": shown,
        "beyond_nbytes": None if shown is None else shown - expected,
    }


def in_use() -> int | None:
    """The most bytes that the device's allocator has had in use in this process; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def bench(subject: str, *, scale: str, folder: Path, plans: Path | None, profile: str) -> Device:
    """The measurements of a subject on the device at hand, kept below a folder."""
    what = SUBJECTS[subject]
    suffix = ("" if scale == "full" else f"-{scale}") + ("" if profile == "roofline" else f"-{profile}")
    name = f"{subject}-{records.platform()}{suffix}"
    return Device(
        what.network,
        scale,
        folder / "device" / f"{name}.json",
        sizes={**(what.sizes if scale == "full" else {}), **what.variant},
        plans=records.OUT / "plans" / "device" / name,
        rates=monet.RATES,
        subject=subject,
        given=None if plans is None else plans / name,
        profile=profile,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without subjects a tiny GPT, into ``out/``.

    It starts a process for each phase of a subject, and holds no device itself.
    """
    parser = runner.parser_of(__doc__, SUBJECTS)

    def rows_option(name: str, default: Sequence[str], words: str) -> None:
        rows = {"nargs": "+", "type": monet.a_row, "default": list(default), "metavar": "ROW"}
        parser.add_argument(name, help=words, **rows)

    rows_option("--rows", ROWS, f"of {', '.join(ROWS)}")
    rows_option("--kernels", (), "also profile the kernels of these rows' steps")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each step (default: 20)")
    parser.add_argument("--plans", type=Path, help="folder of plans made elsewhere: no solver is needed here")
    parser.add_argument(
        "--profile", choices=("roofline", "measure"), default="roofline", help="of the plans made here"
    )
    parser.add_argument("--phase", choices=PHASES, help="what a process of its own is to do")
    asked = runner.parse(parser, argv, SUBJECTS, quick=(monet.QUICK,))
    if asked.phase:
        for subject in asked.names:
            _phase(asked, subject)
        return
    options = ["--scale", asked.scale, "--results", str(asked.folder), "--profile", asked.profile]
    options += ["--runs", str(asked.runs)]
    if asked.plans:
        options += ["--plans", str(asked.plans.resolve())]
    with tempfile.TemporaryDirectory() as compiled:  # once each: the peaks' process must not try out kernels
        environment = {**os.environ, **CACHED, "JAX_COMPILATION_CACHE_DIR": compiled}
        for subject in asked.names:
            print(f"{subject}:", flush=True)
            for phase, rows, other in (
                ("steps", asked.rows, {}),
                ("peaks", asked.rows, {}),
                ("kernels", asked.kernels, NO_GRAPHS),
            ):
                if rows:
                    _child([subject, *options, "--phase", phase, "--rows", *rows], {**environment, **other})


PHASES = ("steps", "peaks", "kernels")
CACHED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
"""Kernels that a CUDA graph starts are not told apart by the profiler."""


def _phase(asked: runner.Asked, subject: str) -> None:
    of = bench(subject, scale=asked.scale, folder=asked.folder, plans=asked.plans, profile=asked.profile)
    if asked.phase == "peaks":
        of.peaks(asked.rows)
    elif asked.phase == "kernels":
        of.kernels(asked.rows, records.OUT / "device" / f"{of.path.stem}-kernels.json")
    else:
        of.run(asked.rows, runs=asked.runs, check=True)
        print(f"  in {of.path}")


def _child(command: list[str], environment: Mapping[str, str]) -> None:
    """Run this script in a process of its own; what fails there is told, and the rest goes on."""
    whole = [sys.executable, "-m", "examples.benchmarks.device", *command]
    done = subprocess.run(whole, check=False, env=environment)
    if done.returncode:
        print(f"  {' '.join(command)}: failed with status {done.returncode}", flush=True)


if __name__ == "__main__":
    main()
