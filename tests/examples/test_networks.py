"""The networks of the benchmarks: those of uncommon kinds train, and two levels of loops by hand change nothing."""

from typing import Any

import jax
import numpy as np
import pytest

from examples.benchmarks.networks import KINDS, program

pytestmark = pytest.mark.usefixtures("few_compilations")


@pytest.mark.parametrize("name", (*KINDS, "loops in loops"))
def test_each_learns(name: str) -> None:
    made = program(name, scale="tiny")
    state, batch = made.make_args()
    step = jax.jit(made.step)
    losses = []
    for _ in range(4):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_sharpness_is_what_tells_two_apart() -> None:
    """The same network from the same start: the first loss is not that of the same parameters."""
    losses = []
    for name in ("highway", "sharpness"):
        made = program(name, scale="tiny")
        losses.append(float(jax.jit(made.step)(*made.make_args())[1]))
    assert losses[1] > losses[0]  # uphill


def nested(**sizes: Any) -> tuple[Any, Any]:
    """A scanned network, plain and in two levels by hand."""
    plain, scan = (program("gpt_scanned", remat=remat, scale="tiny", **sizes) for remat in ("none", "scan"))
    return plain, scan


def test_two_levels_by_hand_stack_the_weights_once_more() -> None:
    before, after = (each.abstract_args()[0]["params"] for each in nested(layers=6))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert {a.shape[0] for a in jax.tree.leaves(before["blocks"])} == {6}
    assert {a.shape[:2] for a in jax.tree.leaves(after["blocks"])} == {(2, 3)}


@pytest.mark.slow
def test_two_levels_by_hand_are_the_same_network() -> None:
    plain, scan = nested(layers=4)
    state, batch = plain.make_args()
    again = jax.tree.map(lambda a, b: a.reshape(b.shape), state, scan.abstract_args()[0])
    (_, value), (_, other) = jax.jit(plain.step)(state, batch), jax.jit(scan.step)(again, batch)
    np.testing.assert_allclose(value, other, rtol=1e-5)
