"""Mechanisms that are switched off by name, and the record of those that changed something."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import make_step

import jaxremat
from jaxremat._runtime import _mechanisms
from jaxremat._runtime._mechanisms import known, mechanism, recorded, switched_off


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_mechanisms, "_known", {*known()})

    @mechanism("doubling", off=lambda numbers: numbers)
    def double(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    return double


def test_it_does_nothing_while_it_is_switched_off(doubled) -> None:
    assert doubled([1, 2]) == [2, 4]
    with switched_off("doubling"):
        with switched_off("doubling"):
            assert doubled([1, 2]) == [1, 2]
        assert doubled([1, 2]) == [1, 2]
    assert doubled([1, 2]) == [2, 4]


def test_only_calls_that_change_something_are_recorded(doubled) -> None:
    with recorded() as acted:
        doubled([0])
        assert not acted
        doubled([1])
        with switched_off("doubling"):
            doubled([1])
    doubled([1])
    assert acted == {"doubling": 1}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="is called nothing; the mechanisms are"), switched_off("nothing"):
        pass


def test_a_plan_is_made_without_what_is_switched_off() -> None:
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    options: Any = {"donate_argnums": 0, "allow": (), "planning": jaxremat.Planning(cache=False)}

    def planned() -> set[str]:
        with recorded() as acted:
            plan = jaxremat.plan(make_step(), *args, budget="60% of temporaries", **options)
        assert not plan.drops_nothing
        return set(acted)

    names = {"memory order", "in-place results"}
    assert {*names, "barriers: triggers"} <= planned() <= known()
    with switched_off(*names):
        assert names.isdisjoint(planned())
