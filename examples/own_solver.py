"""Write your own planner: a class with one method, `solve(graph, budget_nbytes, *, time_limit) -> Solution`.

    python examples/own_solver.py --share 0.5

The graph is plain ints and strings, so a planner needs no JAX. The library checks, simulates, compiles and
measures its schedules like those of the built-in MILP: a bad planner costs time, never correctness. `check_solver`
first tries it on a zoo of small graphs, and names the first rule that it breaks, if any.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxremat
from jaxremat import Graph, Schedule, Solution


@dataclass(frozen=True)
class PeakShaver:
    """Drop what is cheapest to make again per byte among the values alive at the peak, until the peak fits."""

    def solve(self, graph: Graph, budget_nbytes: int | None, *, time_limit: float) -> Solution:
        def price(value: int) -> float:
            return graph.nodes[graph.values[value].producer].seconds / max(graph.values[value].nbytes, 1)

        deadline = time.monotonic() + time_limit
        saved = set(graph.residuals)
        best: tuple[int, Schedule] | None = None
        while True:
            schedule = jaxremat.close_over_dependencies(graph, saved)
            profile = jaxremat.simulate(graph, schedule)
            if best is None or profile.peak_nbytes < best[0]:
                best = (profile.peak_nbytes, schedule)
            fits = budget_nbytes is not None and profile.peak_nbytes <= budget_nbytes
            # A stage of -1 marks the original of a value, others its recomputed copies.
            droppable = [
                v for v, stage in profile.alive if stage < 0 and v in saved and graph.recomputable(v)
            ]
            if fits or not droppable or time.monotonic() > deadline:
                return Solution(schedule if fits else best[1], solver="peak shaver")
            saved.remove(min(droppable, key=lambda v: (price(v), v)))


class ConvNet(nn.Module):
    """Convolutions with group norm and shortcuts."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3))(x)
        for _ in range(self.layers):
            x = x + nn.Conv(16, (3, 3))(nn.relu(nn.GroupNorm(4)(x)))
        return nn.Dense(10)(x.mean((1, 2)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--share", type=float, default=0.5, help="budget, as a share of the plain step's temporaries"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="steps to run with each plan")
    args = parser.parse_args()

    print(str(jaxremat.testing.check_solver(PeakShaver())).splitlines()[0])

    net = ConvNet(args.layers)
    x, y = jax.random.normal(jax.random.key(0), (args.batch, 32, 32, 3)), jnp.arange(args.batch) % 10
    params = jax.jit(net.init)(jax.random.key(1), x)

    def train_step(params, x, y):
        def loss_fn(params):
            logits: Any = net.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    plain = jaxremat.memory(train_step, params, x, y)
    budget_nbytes = plain.base_nbytes + int(args.share * plain.temporaries_nbytes)
    print(
        f"plain {jaxremat.format_nbytes(plain.peak_nbytes)}, budget {jaxremat.format_nbytes(budget_nbytes)}"
    )
    for solver in (PeakShaver(), jaxremat.Milp()):
        name = type(solver).__name__
        step = jaxremat.optimize(budget_nbytes, planning=jaxremat.Planning(solver=solver))(train_step)
        try:
            plan = step.plan(params, x, y)
        except jaxremat.InfeasibleBudgetError as error:
            least = jaxremat.format_nbytes(error.min_peak_nbytes)
            print(f"{name:<11} found nothing within the budget; the least it reached is {least}")
            continue
        peak = jaxremat.format_nbytes(plan.compiled_peak_nbytes or 0)
        print(f"{name:<11} compiled peak {peak}, overhead {plan.overhead:.2%}, {plan.solve_seconds:.2f} s")
        state, loss = params, jnp.nan
        for _ in range(args.steps):
            state, loss = step(state, x, y)
        print(f"{'':<11} loss {loss:.4f} at step {args.steps}")


if __name__ == "__main__":
    main()
