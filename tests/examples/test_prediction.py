"""Steps of kinds that the nine networks lack: that they train, and what their table says."""

import jax
import pytest

from examples.benchmarks import prediction
from examples.benchmarks.networks import program


@pytest.mark.parametrize("name", prediction.NAMES)
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


def test_the_table() -> None:
    fits = {
        "budget_nbytes": 60,
        "temporaries_nbytes": 100,
        "peak_nbytes": 58,
        "overhead": 0.02,
        "compiled_overhead": 0.05,
        "first_prediction": -0.01,
        "planning_seconds": 7.4,
    }
    none = {"budget_nbytes": 40, "temporaries_nbytes": 100, "least_nbytes": 55}
    text = prediction.markdown(
        [{"environment": {"platform": "h100"}, "rows": {"highway | 0.6": fits, "highway | 0.4": none}}]
    )
    assert "| highway | 60% | +2.0% | +5.0% | -1.0 | 2.0% | 7 s |" in text
    assert "| highway | 40% | none: +15% |  |  |  |  |" in text
    assert text.endswith("3.0 in the median, 3.0 at worst.")
