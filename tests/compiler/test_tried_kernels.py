"""Attention's kernels are tried on the device at hand before a plan uses them. Here "kernels" are XLA's operations."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from attentions import FOUND, attending

from jaxremat import JaxrematWarning
from jaxremat._attention._finding import Site, attention
from jaxremat._compiler import _single_equation
from jaxremat._compiler._program import Program
from jaxremat._compiler._single_equation import kernels_work
from jaxremat._model._device_specs import DEVICES
from jaxremat._model._variant import ATTENTION
from jaxremat._plan._baseline import EstimatedGraphs
from jaxremat._plan._problem import Problem
from jaxremat._rewrite._trace import trace

HERE = jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The sizes of scores of what ran as kernels."""
    found: list[tuple[int, ...]] = []
    both = _single_equation._both_passes

    def counted(pattern: Any, kernels: bool, *of: Any) -> Any:
        found.extend([pattern.sizes] if kernels else [])
        return both(pattern, kernels, *of)

    monkeypatch.setattr(_single_equation, "_both_passes", counted)
    yield found


def sites(name: str, layers: int = 1) -> Sequence[Site]:
    case = attending(FOUND[name], layers=layers)
    traced = trace(jax.jit(case.step), case.args, {})
    return attention(traced.jaxpr, traced.program.scopes, traced.program.alive)


@pytest.mark.parametrize("name", FOUND)
def test_what_agrees_works(name: str, runs: list[tuple[int, ...]]) -> None:
    """Each distinct attention runs once, of two examples and two heads."""
    found = sites(name, layers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels_work(found, HERE)
        assert kernels_work(found, HERE)
    (sizes,) = runs
    assert sum(n > 2 for n in sizes) <= 3  # queries and keys, and queries of a group


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_what_differs_does_not(
    wrong: int, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[int, ...]]
) -> None:
    counted = _single_equation._both_passes

    def other(pattern: Any, kernels: bool, *of: Any) -> Any:
        made = counted(pattern, kernels, *of)
        return [1.5 * a if kernels and i == wrong else a for i, a in enumerate(made)]

    monkeypatch.setattr(_single_equation, "_both_passes", other)
    said = ("the result differs", "gradient of queries differs", "", "gradient of values differs")[wrong]
    for _ in range(2):  # the second time it is known
        with pytest.warns(JaxrematWarning, match=f"kernels do not work.*{said}.*planned without"):
            assert not kernels_work(sites("masked"), HERE)
    assert len(runs) == 1


def refused(pattern: Any, kernels: bool, *of: Any) -> Any:
    raise RuntimeError("no such\ninstruction")


def test_what_does_not_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_single_equation, "_both_passes", refused)
    with pytest.warns(JaxrematWarning, match="RuntimeError: no such instruction"):
        assert not kernels_work(sites("plain"), HERE)


@pytest.mark.parametrize("works", [True, False])
def test_forms_offer_kernels_where_they_work(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not works:
        monkeypatch.setattr(_single_equation, "_both_passes", refused)
    case = attending(FOUND["masked"])
    problem = Problem(Program(case.step), case.args, {}, DEVICES["h100"], "roofline", HERE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (variant, *_) = EstimatedGraphs(problem).variants.exact()
    assert variant.settings(ATTENTION) == {0: (2 if works else 1,)}
    assert any("kernels do not work" in str(w.message) for w in said) is not works
