"""`profile="measure"`: what is timed, once, what the planner makes of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import train
from jax.experimental import io_callback

import jaxremat
from jaxremat import ArgumentError, JaxrematWarning
from jaxremat._compiler import _measured_times as _measured
from jaxremat._compiler._measured_times import measure
from jaxremat._compiler._single_equation import Figures
from jaxremat._lower._lower import lower
from jaxremat._model._device_specs import DEVICES
from jaxremat._program._flops import alone_seconds
from jaxremat._rewrite._trace import Traced, trace

H100 = DEVICES["h100"]
WIDTH, LAYERS = 32, 6


ARGS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((512, WIDTH), jnp.float32),
)


def traced() -> Traced:
    return trace(jax.jit(train), ARGS, {})


def indices(of: Traced, primitive: str) -> list[int]:
    return [i for i, eqn in enumerate(of.jaxpr.jaxpr.eqns) if eqn.primitive.name == primitive]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A cache folder of its own, and a clock that says 1 ms and counts what it is asked for."""
    asked: list[str] = []

    def seconds(closed: Any, device: Any, options: Any) -> float | None:
        asked.append(closed.jaxpr.eqns[0].primitive.name)
        return None if asked[-1] == "tanh" else 1e-3

    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_measured, "_run_seconds", seconds)
    return asked


def test_seconds_of_the_roofline_change_nothing() -> None:
    of = traced()
    same = {i: alone_seconds(H100, eqn) for i, eqn in enumerate(of.jaxpr.jaxpr.eqns)}
    assert lower(of, H100, base_nbytes=0, seconds=same) == lower(of, H100, base_nbytes=0)


def test_measured_seconds_reach_the_graph() -> None:
    of = traced()
    plain = lower(of, H100, base_nbytes=0)
    products = indices(of, "dot_general")
    alone = {i: alone_seconds(H100, of.jaxpr.jaxpr.eqns[i]) for i in products}
    slow = lower(of, H100, base_nbytes=0, seconds={i: 10 * seconds for i, seconds in alone.items()})
    forward = products[0]
    assert slow.nodes[forward].seconds == pytest.approx(10 * alone[forward])
    assert plain.nodes[forward].seconds == pytest.approx(alone[forward])
    for node in plain.nodes:
        times = 10 if node.id in products else 1
        assert slow.nodes[node.id].seconds == pytest.approx(times * node.seconds)
    more = sum(9 * plain.nodes[i].seconds for i in products)
    assert slow.step_seconds == pytest.approx(plain.step_seconds + more)


def test_each_distinct_equation_is_measured_once(counted: list[str]) -> None:
    of, device = traced(), jax.devices()[0]
    found = measure(of, device, (), 0)
    assert set(indices(of, "dot_general")) <= found.keys()
    assert not set(indices(of, "tanh")) & found.keys()  # what cannot run alone is left to the roofline
    assert set(found.values()) == {1e-3}
    # Forward, gradient by input, gradient by weights: three kinds of product, and all the layers' are alike.
    assert counted.count("dot_general") == 3 < LAYERS
    assert counted.count("tanh") == 1
    asked = list(counted)
    assert measure(of, device, (), 0) == found  # from the file
    assert counted == asked
    assert measure(of, device, (("xla_embed_ir_in_executable", True),), 0) == found  # other programs
    assert len(counted) == 2 * len(asked)


def test_figures_that_cannot_be_read_are_measured_anew(counted: list[str], tmp_path: Path) -> None:
    of, device = traced(), jax.devices()[0]
    found = measure(of, device, (), 0)
    (file,) = (tmp_path / "cache").iterdir()
    assert set(json.loads(file.read_text()).values()) == {1e-3, None}
    once = len(counted)
    for text in ("", "[]", '{"a": "fast"}'):
        file.write_text(text)
        with pytest.warns(JaxrematWarning, match=f"{file.name} cannot be read"):
            assert measure(of, device, (), 0) == found
    assert len(counted) == 4 * once


def test_figures_of_several_processes_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    one, other = (Figures("figures.json", float) for _ in range(2))
    assert one.get("a", lambda: 1.0) == 1.0 and other.get("b", lambda: None) is None
    assert one.get("c", lambda: 3.0) == 3.0 and other.get("c", lambda: 4.0) == 4.0
    one.store()
    other.store()
    assert Figures("figures.json", float).known == {"a": 1.0, "b": None, "c": 3.0}


def test_small_equations_are_left_to_the_roofline(counted: list[str]) -> None:
    of = traced()
    assert measure(of, jax.devices()[0], (), 4 * 512 * WIDTH) == {}
    assert counted == []


def test_equations_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    of = traced()
    found = measure(of, jax.devices()[0], tuple(jaxremat.compiler_options("cpu").items()), 0)
    products = indices(of, "dot_general")
    assert set(products) <= found.keys()
    for seconds in found.values():
        assert seconds > 0 and seconds == float(f"{seconds:.1e}")


def test_what_has_effects_is_not_run(counted: list[str]) -> None:
    def step(x: jax.Array) -> jax.Array:
        return io_callback(lambda y: y, jax.ShapeDtypeStruct((64,), jnp.float32), x) + 1

    of = trace(jax.jit(step), (jax.ShapeDtypeStruct((64,), jnp.float32),), {})
    assert measure(of, jax.devices()[0], (), 0).keys() == set(indices(of, "add"))
    assert counted == ["add"]


def test_optimize_plans_with_measured_seconds(counted: list[str]) -> None:
    stats = jaxremat.memory(train, *ARGS)
    budget = stats.base_nbytes + int(0.7 * stats.temporaries_nbytes)
    jaxremat.plan(train, *ARGS, budget=budget)
    assert counted == []
    plan = jaxremat.plan(train, *ARGS, budget=budget, planning=jaxremat.Planning(profile="measure"))
    assert "dot_general" in counted
    assert plan.compiled_peak_nbytes is not None and plan.compiled_peak_nbytes <= budget
    # By this clock every kernel takes as long as any other, however little it does.
    assert plan.overhead > 0
    asked = len(counted)
    assert (
        jaxremat.plan(train, *ARGS, budget=budget, planning=jaxremat.Planning(profile="measure")).saved
        == plan.saved
    )
    assert len(counted) == asked
    assert jaxremat.plan(
        train, *ARGS, budget="1GiB", planning=jaxremat.Planning(profile="measure")
    ).drops_nothing


def test_refused() -> None:
    with pytest.raises(ArgumentError, match=r'`profile=.fast.` is unknown. Write "roofline" or "measure"'):
        jaxremat.optimize("1GiB", planning=jaxremat.Planning(profile="fast"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="`target='h100'` plans for another device"):
        jaxremat.optimize("1GiB", planning=jaxremat.Planning(profile="measure"), target="h100")
