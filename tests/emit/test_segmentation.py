"""Where `jax.checkpoint`s begin and end: stages of equations in order, with few of them moved."""

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp

import jaxremat
from jaxremat._emit._segmentation import _rising


def test_stages_rise_and_differ_least_from_the_votes() -> None:
    draw = random.Random(3)
    for _ in range(200):
        votes = [(draw.randrange(4), draw.randint(1, 9)) for _ in range(draw.randint(0, 6))]

        def cost(stages: Any, votes: list[tuple[int, int]] = votes) -> int:
            return sum(
                weight * abs(stage - vote) for stage, (vote, weight) in zip(stages, votes, strict=True)
            )

        found = _rising(votes)
        rising = (s for s in itertools.product(range(4), repeat=len(votes)) if list(s) == sorted(s))
        assert found == sorted(found)
        assert cost(found) == min(map(cost, rising))


def test_a_small_value_with_a_late_derivative_moves_nobody() -> None:
    """That of a running mean's decay runs last of all, behind all stages."""
    x, ws = jnp.ones((256, 64)), [jnp.eye(64)] * 6

    def net(x: Any, ws: Any, means: Any, counted: bool) -> Any:
        kept = []
        for w, mean in zip(ws, means, strict=True):
            x = jnp.tanh(jnp.sin(x @ w) @ w)
            kept.append(0.9 * mean + 0.1 * x.mean(0) if counted else mean)
        return x, kept

    def checkpoints(counted: bool) -> int:
        planning = jaxremat.Planning(solver=jaxremat.MinCut())
        planned = jaxremat.checkpoint(net, "min", static_argnums=3, planning=planning)
        text = str(jax.make_jaxpr(planned, static_argnums=3)(x, ws, [jnp.zeros(64)] * 6, counted))
        return text.count("policy=")

    assert checkpoints(True) >= checkpoints(False) >= 3
