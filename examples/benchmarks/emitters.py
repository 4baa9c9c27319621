"""Measure what a plan costs in JAX's own currency: the same plan, followed by each emitter.

    python -m examples.benchmarks.emitters gpt vit --scale small --budgets dots 0.5 min --save

The program is the gradient of a network's loss. `jaxremat.checkpoint` plans the loss, as a sequence of
`jax.checkpoint`s with policies or as a `custom_vjp`, and `jax.value_and_grad` differentiates it. Beside each stands the
program that the *joint* emitter, that of `optimize`, makes of the very same plan: it sees both passes at once, and puts
fences and recomputation where it likes. Peaks are by XLA's buffer assignment, work is counted in the compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp

import jaxremat
from examples.benchmarks import records, runner
from examples.benchmarks.bench import Bench
from examples.benchmarks.networks import NAMES, Program
from jaxremat._emit._emit import emit
from jaxremat._emit._joint import called, differentiated
from jaxremat._emit._segmentation import restricted, segmentation

EMITTERS = ("policy", "custom_vjp")
BUDGETS = ("dots", "0.5", "min")


@dataclass
class Emitters(Bench):
    """The measurements of one network: rows `EMITTER BUDGET`, where a number is a share of what plain JAX keeps."""

    kind: ClassVar[str] = "emitters"

    def program(self, remat: Any = "none") -> Program:
        """The gradient of the network's loss, in place of its whole step."""
        whole = super().program(remat)
        return replace(whole, step=gradient_of(whole.loss), donate_argnums=())

    def _jitted(self, step: Program) -> Any:
        """Without LLVM's optimizations: buffers are assigned and kernels are made before them, and nothing is run."""
        jitted = super()._jitted(step)
        return replace(
            jitted, compiler_options=(*jitted.compiler_options, ("xla_backend_optimization_level", 0))
        )

    def place(self, name: str) -> tuple[float, ...]:
        """What rows are sorted by."""
        if name == "plain":
            return (-1.0, 0.0)
        emitter, budget = name.split()
        share = {"dots": 2.0, "free": 1.5, "min": 0.0}.get(budget)
        return (float(EMITTERS.index(emitter)), -(float(budget) if share is None else share))

    def _step(self, name: str) -> Any:
        emitter, budget = name.split()
        whole = super().program()
        held = float(budget) if budget[0].isdigit() else budget
        planned = jaxremat.checkpoint(whole.loss, held, emit=emitter, time_limit=self.time_limit)
        step = gradient_of(planned)
        own, _ = self._compile(replace(whole, step=step, donate_argnums=()))
        other = replace(whole, step=jointly(planned, whole.abstract_args()), donate_argnums=())
        joint, _ = self._compile(other)
        plan = planned.plan(*arguments_of(*whole.abstract_args()))
        row = self._compare(self._of_compiled(own))
        beside = self._compare(self._of_compiled(joint))
        row |= {f"joint_{key}": beside[key] for key in ("peak_nbytes", "temporaries_nbytes", "extra_flops")}
        row |= {"held_nbytes": plan.held_nbytes, "plain_held_nbytes": plan.plain_nbytes}
        self._report(name, self._store(name, row))
        self.say(f"          by the joint emitter {jaxremat.format_nbytes(row['joint_peak_nbytes'])}")
        return own


def arguments_of(state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """The arguments of the loss."""
    return state["params"], {k: v for k, v in state.items() if k in ("batch_stats", "step")}, batch


def gradient_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """`(state, batch) -> ((loss, what is updated), gradients)`."""

    def gradient(state: Any, batch: Any) -> Any:
        return jax.value_and_grad(loss, has_aux=True)(*arguments_of(state, batch))

    return gradient


def jointly(planned: jaxremat.Checkpointed, args: tuple[Any, Any]) -> Callable[..., Any]:
    """`gradient_of` the planned loss, as the joint emitter writes it for the same plan."""
    function, _, _ = called(planned._program, arguments_of(*args), {})
    count = len(jax.tree.leaves(args[0]["params"]))
    before = len(function.consts)
    parameters = [before <= i < before + count for i in range(len(function.inexact))]
    if planned._options.emit == "policy":
        wanted = function.inexact
        joint = differentiated(function, wanted)
        found = planned._found(joint, lambda graph: restricted(graph, segmentation(joint, graph)))
    else:
        wanted = tuple(w and p for w, p in zip(function.inexact, parameters, strict=True))
        joint = differentiated(function, wanted)
        found = planned._found(joint)
    closed = emit(joint.traced, found.graph, found.solution.schedule)
    cotangents = [v.aval for v in closed.jaxpr.invars[joint.primals :]]
    of_parameters = [p for p, w in zip(parameters, wanted, strict=True) if w]

    def gradient(state: Any, batch: Any) -> Any:
        leaves = jax.tree.leaves(arguments_of(state, batch))
        # The loss is the first of its results; what is updated is not differentiated.
        seeds = [jnp.full(a.shape, not i, a.dtype) for i, a in enumerate(cotangents)]
        outs = jex.jaxpr_as_fun(closed)(*function.consts, *leaves, *seeds)
        results, grads = outs[: joint.results], outs[joint.results :]
        chosen = [g for g, p in zip(grads, of_parameters, strict=True) if p]
        tree = jax.tree.structure(state["params"])
        return jax.tree.unflatten(function.out_tree, results), jax.tree.unflatten(tree, chosen)

    return gradient


def markdown(found: Sequence[records.Record]) -> str:
    """The table of all networks, empty without results."""
    if not found:
        return ""
    size = jaxremat.format_nbytes
    plans = [row for record in found for name, row in record["rows"].items() if name != "plain"]
    worst = max(row["peak_nbytes"] / row["joint_peak_nbytes"] - 1 for row in plans)
    lines = []
    for record in found:
        title = f"{record['network']}, {record['scale']} size"
        for name, row in record["rows"].items():
            if name == "plain":
                lines.append((title, "plain", "", size(row["peak_nbytes"]), "", "", "", ""))
                continue
            more = row["peak_nbytes"] / row["joint_peak_nbytes"] - 1
            held = f"{size(row['held_nbytes'])} of {size(row['plain_held_nbytes'])}"
            sizes = (held, size(row["peak_nbytes"]), size(row["joint_peak_nbytes"]), f"{more:+.1%}")
            work = (f"{row[key]:.1%}" for key in ("extra_flops", "joint_extra_flops"))
            lines.append(("", name, *sizes, *work))
    said = f"of what plain JAX keeps; peaks are XLA's. The largest is {worst:+.1%} off the joint emitter's."
    return "\n\n".join([f"{LEGEND} {said}", runner.grid(HEADER, lines, 2)])


HEADER = (
    *("gradient of", "emitter, budget", "held", "peak", "joint emitter"),
    *("difference", "extra FLOPs", "joint emitter"),
)
LEGEND = """\
### One plan by each emitter

The gradient of a network's loss, planned by `jaxremat.checkpoint`, and beside it the program that the emitter of \
`optimize`, which sees both passes at once, writes for the same plan (`examples/benchmarks/emitters.py`). *Held* is \
what the plan has of the forward pass's values at most,\
"""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; without networks a tiny GPT, into ``out/``."""
    parser = runner.parser_of(__doc__, NAMES)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="B", help=", ".join(BUDGETS))
    parser.add_argument("--emitters", nargs="+", choices=EMITTERS, default=list(EMITTERS))
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve (default: 10)")
    asked = runner.parse(parser, argv, NAMES, quick=("gpt",))
    rows = ["plain", *(f"{emitter} {budget}" for emitter in asked.emitters for budget in asked.budgets)]
    for network in asked.names:
        name = f"{network}-{asked.scale}"
        print(f"{name}:")
        path = asked.folder / "emitters" / f"{name}-{records.platform()}.json"
        bench = Emitters(network, asked.scale, path, time_limit=asked.time_limit)
        bench.run(rows, fresh=asked.fresh or asked.quick)
        print(f"  in {bench.path}")


if __name__ == "__main__":
    main()
