"""What is said of JAX's own tests of `jax.checkpoint` is what became of them, with a reason for each failure."""

import json
from typing import Any

from examples.benchmarks import jax_remat_tests
from examples.benchmarks.jax_remat_tests import BOTH, REASONS, RESULTS, failures, markdown, unexplained

RECORD: dict[str, Any] = json.loads(RESULTS.read_text())


def test_each_failure_has_a_reason_and_each_reason_a_failure() -> None:
    found = RECORD["outcomes"]
    assert unexplained(found) == []
    for each in REASONS:
        assert all(test in failures(found, way) for way in each["emitters"] for test in each["tests"])


def test_a_failure_without_a_reason_is_seen() -> None:
    outcomes = {
        "test_a": "passed",
        "test_remat_eval_counter": "passed",
        "test_b": "skipped",
        "test_c": "failed",
    }
    lost = {
        "test_a": "TypeError: no",
        "test_remat_eval_counter": "3",
        "test_b": "skipped",
        "test_c": "failed",
    }
    found = {"jax": outcomes, "policy": lost, "custom_vjp": outcomes}
    assert unexplained(found) == [("policy", "test_a")]
    text = markdown({"jax": "9.9", "outcomes": found})
    assert "**unexplained**: TypeError: no" in text
    assert '| `emit="policy"` | 0 | 1 | 1 | 1 |' in text
    assert all(f'With `emit="{way}"`' in text for way in BOTH)
    assert jax_remat_tests.reason("custom_vjp", "test_remat_vmap") and not jax_remat_tests.reason(
        "policy", "x"
    )
