"""A network and rows -> their measurements, in one JSON file: what the scripts that measure train steps share.

Every step is compiled with the options that `jaxremat.optimize` uses: by default XLA:CPU would merge what is recomputed
by hand with the original. The file is written after every row: a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import jaxremat
from examples.benchmarks import records
from examples.benchmarks.networks import Program, program
from jaxremat._compiler._devices import detect
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._program import Program as Jitted
from jaxremat._compiler._roofline import roofline
from jaxremat._compiler._target import Target
from jaxremat._model._device_specs import DEVICES
from jaxremat._rewrite._trace import trace

Args = tuple[Any, Any]
"""The state, which steps consume, and the batch."""

BY_HAND = ("block", "dots")
SCAN = "scan"
"""By hand too, of networks whose blocks are one loop: `nn.remat_scan`."""

AT = "at "
"""What the name of a row begins with whose budget is the peak of a step by hand."""

SHARES = ("0.75", "0.5", "0.4", "0.33", "0.25", "min")


def is_plan(name: str) -> bool:
    """Whether a row is a plan's."""
    return name not in ("plain", *BY_HAND, SCAN)


def on_cpu(record: records.Record) -> bool:
    """Whether a record is of steps that were compiled for the CPU."""
    return record["environment"]["platform"] == "cpu"


def by_hand(network: str) -> tuple[str, ...]:
    """The steps by hand that there are of a network."""
    return (*BY_HAND, SCAN) if network.endswith("_scanned") else BY_HAND


@dataclass
class Bench:
    """The measurements of one network at one scale.

    **Arguments:** `path` of the JSON file; `sizes` override the network's, as in `program`; `time_limit` of
    each solve in seconds; `plans` the folder where plans are kept, to time them later without planning again;
    `target` a device to compile for that need not be there; `rates` names of devices at whose rates the compiled
    programs are priced besides; `say` takes each line of progress.
    """

    kind: ClassVar[str] = "step"
    """What the records of these measurements are called."""

    network: str
    scale: str
    path: Path
    sizes: Mapping[str, Any] = field(default_factory=dict)
    time_limit: float = 10.0
    plans: Path | None = None
    target: str | None = None
    rates: Sequence[str] = ()
    say: Callable[[str], None] = print

    def run(
        self, rows: Sequence[str], *, runs: int = 0, check: bool = False, fresh: bool = False
    ) -> records.Record:
        """Measure the rows that the file lacks, and return what is in it then.

        **Arguments:** `runs` timed runs of each step, 0 for none; `check` compare all results with the plain
        step's; `fresh` measure rows again that are there.
        """
        self._open(rows if fresh else ())
        timed, checked = ["step_seconds"] * (runs > 0), ["difference"] * check
        wanted = {"plain": timed, SCAN: []}  # whose parameters are stacked twice: it takes other arguments
        missing = [n for n in rows if not self._has(n, wanted.get(n, [*timed, *checked]))]
        if not missing:
            return self.record
        steps = {"plain": self._plain()}
        for name in missing:
            if name != "plain" and (step := self._step(name)) is not None:
                steps[name] = step
        steps.pop(SCAN, None)
        if check or runs:
            args = self.program().make_args()
            if check:
                self._check(steps, args)
            if runs:
                self._time(steps, args, runs)
        return self.record

    def program(self, remat: Any = "none") -> Program:
        """The network's step, a new function on each call, so that nothing traced before is found again."""
        by_hand = {} if remat == "none" else {"remat": remat}  # which a variant may say itself
        return program(self.network, scale=self.scale, **self.sizes, **by_hand)  # type: ignore[arg-type]

    def _open(self, forget: Sequence[str]) -> None:
        self.record = records.read(self.path)
        now = records.environment(self.target)
        old = self.record.get("environment", now)
        if old != now and not set(self.record["rows"]) <= set(forget):
            differ = ", ".join(
                f"{key} {old.get(key)!r}, now {now[key]!r}" for key in now if old.get(key) != now[key]
            )
            raise SystemExit(
                f"{self.path} was measured elsewhere ({differ}). Remove it, or run all its rows with --fresh."
            )
        kept = {name: row for name, row in self.record.get("rows", {}).items() if name not in forget}
        self.record = {**self._describe(), "environment": now, "rows": kept}

    def _describe(self) -> records.Record:
        plain = self.program()
        state, batch = plain.abstract_args()
        inputs = batch["inputs"]
        return {
            "kind": self.kind,
            "network": self.network,
            "scale": self.scale,
            "parameters": plain.parameter_count(),
            "inputs": f"{inputs.dtype}[{','.join(map(str, inputs.shape))}]",
            "state_nbytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        }

    def _has(self, name: str, keys: Sequence[str]) -> bool:
        row = self.record["rows"].get(name)
        return row is not None and (row.get("infeasible", False) or all(key in row for key in keys))

    def _store(self, name: str, values: records.Record) -> records.Record:
        """Write a row, which replaces what was known of it."""
        row = {"date": records.today(), "library": records.library_version(), **values}
        rows = {**self.record["rows"], name: row}
        self.record["rows"] = {key: rows[key] for key in sorted(rows, key=self.place)}
        records.write(self.path, self.record)
        return row

    def _plain(self) -> jax.stages.Compiled:
        """The plain step, compiled in any case: everything is compared with it."""
        plain = self.program()
        jitted = self._jitted(plain)
        began = time.perf_counter()
        traced = trace(jitted.plain, plain.abstract_args(), {})
        trace_seconds = time.perf_counter() - began
        step, seconds = self._compile(plain)
        row = self._of_compiled(step)
        self.plain = {**row, "compile_seconds": seconds, "trace_seconds": trace_seconds}
        self.plain["equations"] = len(traced.jaxpr.jaxpr.eqns)
        known = self.record["rows"].get("plain", row)
        if known["peak_nbytes"] != row["peak_nbytes"]:
            raise SystemExit(
                f"{self.path} has {known['peak_nbytes']} bytes for the plain step, now the compiler says "
                f"{row['peak_nbytes']}: the network or the compiler has changed. Run all rows with --fresh."
            )
        if not self._has("plain", ()):
            self._report("plain", self._store("plain", self.plain))
        return step

    def _step(self, name: str) -> jax.stages.Compiled | None:
        """One row's compiled step, with the row measured if it is not yet there; None where no plan fits."""
        if name in (*BY_HAND, SCAN):
            step, seconds = self._compile(self.program(name))
            if not self._has(name, ()):
                row = {**self._compare(self._of_compiled(step)), "compile_seconds": seconds}
                self._report(name, self._store(name, row))
            return step
        if self._has(name, ()) and (step := self._again(name)) is not None:
            return step
        return self._planned(name)

    def budget(self, name: str) -> int | str:
        """The budget of the plan that a row is about: here a share of the plain step's temporaries."""
        if name == "min":
            return name
        if name.startswith(AT):
            return self.record["rows"][name.removeprefix(AT)]["peak_nbytes"]
        return int(self.plain["base_nbytes"] + float(name) * self.plain["temporaries_nbytes"])

    def options(self, name: str) -> dict[str, Any]:
        """What else is asked of that plan, as `jaxremat.optimize` takes it; here its own choices."""
        del name
        return {}

    def place(self, name: str) -> tuple[float, ...]:
        """What rows are sorted by."""
        first = ("plain", *BY_HAND, SCAN)
        last = ("min", *(AT + hand for hand in first[1:]))
        if name in first:
            return (first.index(name), 0.0)
        return (9 + last.index(name), 0.0) if name in last else (8, -float(name))

    def _planned(self, name: str) -> jax.stages.Compiled | None:
        plain = self.program()
        args = plain.abstract_args()
        budget = self.budget(name)
        began = time.perf_counter()
        with compile_stopwatch() as compiling:
            try:
                step = self._optimize(plain, budget, **self.options(name))
                plan, compiled = step.plan(*args), step.compile(*args)
            except jaxremat.InfeasibleBudgetError as error:
                self._store_infeasible(name, budget, error.min_peak_nbytes, time.perf_counter() - began)
                return None
        total = time.perf_counter() - began
        if self.refused(name, plan):
            self._store_infeasible(name, budget, None, total)
            return None
        planning = total - sum(compiling) if self.target is None else None
        return self._keep(name, plan, compiled, planning_seconds=planning, total_seconds=total)

    def _keep(self, name: str, plan: jaxremat.Plan, compiled: Any, **times: float | None) -> Any:
        """Write the row of a plan, and the plan beside."""
        if self.plans is not None:
            self.plans.mkdir(parents=True, exist_ok=True)
            plan.save(self.plan_path(name))
        row = self._compare(self._of_compiled(compiled))
        row |= _of_plan(plan)
        row |= {"fits": row["peak_nbytes"] <= plan.budget_nbytes, **times}
        self._report(name, self._store(name, row))
        return compiled

    def refused(self, name: str, plan: jaxremat.Plan) -> bool:
        """Whether a plan that fits is not what the row is about."""
        del name, plan
        return False

    def _store_infeasible(self, name: str, budget: int | str, least: int | None, seconds: float) -> None:
        row = {"budget_nbytes": budget, "min_peak_nbytes": least, "total_seconds": seconds}
        self._report(name, self._store(name, {"infeasible": True, **row}))

    def _again(self, name: str) -> jax.stages.Compiled | None:
        """The step of a plan that was kept; None where it no longer is the one that was measured."""
        path = self.plan_path(name)
        if self.plans is None or not path.exists():
            return None
        plain = self.program()
        try:
            step = self._optimize(plain, plan=jaxremat.Plan.load(path)).compile(*plain.abstract_args())
        except (jaxremat.PlanMismatchError, jaxremat.InfeasibleBudgetError):
            return None
        peak = jaxremat.MemoryStats.of(step).peak_nbytes
        return step if peak == self.record["rows"][name]["peak_nbytes"] else None

    def plan_path(self, name: str) -> Path:
        """The file that a row's plan is kept in, if any are kept."""
        return (self.plans or self.path.parent) / f"{name.replace('/', ' of ')}.json"

    @property
    def planning(self) -> jaxremat.Planning:
        """How all rows are planned. Nothing is remembered: what is measured is planning."""
        return jaxremat.Planning(time_limit=self.time_limit, cache=False)

    def _optimize(self, plain: Program, *budget: Any, **options: Any) -> jaxremat.Step:
        options = {"planning": self.planning, **options}
        decorate = jaxremat.optimize(
            *budget, **options, donate_argnums=plain.donate_argnums, target=self.target
        )
        return decorate(plain.step)

    def _jitted(self, step: Program) -> Jitted:
        """A step as the planner is given it."""
        options = jaxremat.compiler_options(jax.default_backend() if self.target is None else "gpu")
        return Jitted(
            step.step,
            donate_argnums=step.donate_argnums,
            compiler_options=tuple(sorted(options.items())),
            target=None if self.target is None else Target(self.target),
        )

    def _compile(self, step: Program) -> tuple[Any, float]:
        """A step compiled as `optimize` would compile it, and the seconds that took."""
        jitted = self._jitted(step)
        began = time.perf_counter()
        compiled = jitted.lower(jitted.plain, step.abstract_args(), {}).compile()
        return compiled, time.perf_counter() - began

    def _of_compiled(self, compiled: Any) -> records.Record:
        """What the compiled program says: bytes by XLA's buffer assignment, work by its kernels."""
        stats = jaxremat.MemoryStats.of(compiled)
        spec = detect(jax.devices()[0]) if self.target is None else DEVICES[self.target]
        module = parse(compiled.as_text())
        work = roofline(module, spec)
        return {
            "peak_nbytes": stats.peak_nbytes,
            "base_nbytes": stats.base_nbytes,
            "temporaries_nbytes": stats.temporaries_nbytes,
            "flops": work.flops,
            "traffic_nbytes": work.nbytes,
            "kernels": work.kernels,
            "roofline_seconds": work.seconds,
            "seconds_at": {name: roofline(module, DEVICES[name]).seconds for name in self.rates},
        }

    def _compare(self, row: records.Record) -> records.Record:
        """Work relative to the plain step's."""
        return {
            **row,
            "extra_flops": row["flops"] / self.plain["flops"] - 1,
            "extra_traffic": row["traffic_nbytes"] / self.plain["traffic_nbytes"] - 1,
            "roofline_overhead": row["roofline_seconds"] / self.plain["roofline_seconds"] - 1,
            "overhead_at": {
                name: seconds / self.plain["seconds_at"][name] - 1
                for name, seconds in row["seconds_at"].items()
            },
        }

    def _time(self, steps: Mapping[str, jax.stages.Compiled], args: Args, runs: int) -> None:
        seconds = time_in_turn(steps, args, runs)
        plain = statistics.median(seconds["plain"])
        for name, taken in seconds.items():
            median = statistics.median(taken)
            times = {"runs": runs, "step_seconds": median, "fastest_seconds": min(taken)}
            row = self.record["rows"][name]
            self._store(name, {**row, **times, "plain_seconds": plain, "time_ratio": median / plain})
            self.say(f"  {name:>6}: {median:.3f} s a step, {median / plain:.3f} of the plain step's")

    def _check(self, steps: Mapping[str, jax.stages.Compiled], args: Args) -> None:
        for name, (difference, where) in largest_differences(steps, args).items():
            row = self.record["rows"][name]
            self._store(name, {**row, "difference": difference, "difference_at": where})
            self.say(f"  {name:>6}: results differ by at most {difference:.2g} {where}")

    def _report(self, name: str, row: records.Record) -> None:
        size = jaxremat.format_nbytes
        if row.get("infeasible"):
            least = row["min_peak_nbytes"]
            found = "" if least is None else f", the least found is {size(least)}"
            self.say(f"  {name:>6}: {size(row['budget_nbytes'])} is infeasible{found}")
            return
        text = f"peak {size(row['peak_nbytes'])}"
        if "budget_nbytes" in row:
            text += f" of {size(row['budget_nbytes'])}"
        if "extra_flops" in row:
            text += f", extra flops {row['extra_flops']:.2%}, roofline {row['roofline_overhead']:+.2%}"
        self.say(f"  {name:>6}: {text}")


def _of_plan(plan: jaxremat.Plan) -> records.Record:
    """What the plan says of itself."""
    rounds = [(each.predicted_peak_nbytes, each.compiled_peak_nbytes) for each in plan.rounds]
    first = rounds[0] if rounds else (None, None)
    return {
        "budget_nbytes": plan.budget_nbytes,
        "first_predicted_nbytes": first[0],
        "first_compiled_nbytes": first[1],
        "rounds": rounds,
        "predicted_nbytes": plan.predicted_peak_nbytes,
        "predicted_overhead": plan.overhead,
        "compiled_overhead": plan.compiled_overhead,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "solver": plan.solver,
        "solve_seconds": plan.solve_seconds,
        "compile_count": plan.compile_count,
        "residuals": len(plan.actions),
        "recomputed": sum(action.action == "recompute" for action in plan.actions),
        "stages": len(plan.stages),
    }


@contextmanager
def compile_stopwatch() -> Iterator[list[float]]:
    """A list that grows by the seconds of each compilation, from jaxpr to executable, inside the block."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith(("/backend_compile_duration", "/jaxpr_to_mlir_module_duration")):
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def time_in_turn(steps: Mapping[str, jax.stages.Compiled], args: Args, runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each step; the steps take turns, each going on where the last one stopped.

    Steps consume the state that they are given, the first one that of `args`.
    """
    state, batch = args
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(-1, runs):  # run -1 warms up
        for name, step in steps.items():
            began = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            if run >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def largest_differences(steps: Mapping[str, jax.stages.Compiled], args: Args) -> dict[str, tuple[float, str]]:
    """For each step but the plain one, how far its results from `args` are from the plain one's.

    That is the largest over all leaves of max |difference| / max |plain|, with the path of the leaf.
    """
    state, batch = args

    def results(step: jax.stages.Compiled) -> list[tuple[str, Any]]:
        leaves = jax.tree.leaves_with_path(step(jax.tree.map(jnp.copy, state), batch))
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]

    plain = results(steps["plain"])
    found = {}
    for name, step in steps.items():
        if name != "plain":
            pairs = zip(plain, results(step), strict=True)
            found[name] = max((_difference(a, b), path) for (path, a), (_, b) in pairs)
    return found


def _difference(a: Any, b: Any) -> float:
    finite, apart, largest = _compared(a, b)
    if not finite:
        raise FloatingPointError("A step's results are not finite; compare steps on other data.")
    return float(apart) / max(float(largest), float(jnp.finfo(jnp.float32).tiny)) if apart else 0.0


@jax.jit  # on the device: results are gigabytes
def _compared(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether both are finite, how far they are apart at most, and the largest of the first."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    finite = jnp.isfinite(a).all() & jnp.isfinite(b).all()
    return finite, jnp.abs(a - b).max(initial=0.0), jnp.abs(a).max(initial=0.0)
