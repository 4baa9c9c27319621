"""What runs once does: draws, effects and calls of the host, wherever they stand, in every form that a step takes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from forms import of_chunks
from jax import lax
from jax.experimental import io_callback
from test_emit import all_dropped, compiled

import jaxremat
from jaxremat._compiler._devices import detect
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._variant import ATTENTION, COPIES, INNER, LOOP, Choice, Variant
from jaxremat._program._run_counts import check_runs, run_counts
from jaxremat._rewrite._trace import Traced, trace

LAYERS = 4
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
OPTIONS = jaxremat.compiler_options("cpu")


@dataclass(eq=False)
class Host:
    """A generator of numbers in the host, each of which is another; `drawn` how many."""

    drawn: int = field(default=0)

    def __call__(self, _: Any) -> np.floating:
        self.drawn += 1
        return np.float32(1 + 0.37 * self.drawn % 1)


Draw = Callable[[jax.Array], Any]
"""A factor for a layer whose input it is given."""

KINDS: dict[str, Callable[[Host], Draw]] = {
    "rng_uniform": lambda _: lambda h: lax.rng_uniform(lax.stop_gradient(h[0, 0]), 1.0, h.shape),
    "ordered": lambda host: lambda h: io_callback(host, SCALAR, lax.stop_gradient(h[0, 0]), ordered=True),
    "unordered": lambda host: lambda h: io_callback(host, SCALAR, lax.stop_gradient(h[0, 0])),
    "pure": lambda host: lambda h: jax.pure_callback(host, SCALAR, lax.stop_gradient(h[0, 0])),
}


def layer(h: jax.Array, w: jax.Array, factor: Any) -> jax.Array:
    return factor * jnp.tanh(h @ w) + 0.1 * jnp.sin(h)


def at_the_top(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    for w in ws:
        h = layer(h, w, draw(h))
    return h


def in_a_loop(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    return lax.scan(lambda h, w: (layer(h, w, draw(h)), None), h, ws)[0]


def in_a_loop_in_a_loop(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    return lax.scan(lambda h, pair: (in_a_loop(h, pair, draw), None), h, ws.reshape(2, 2, *ws.shape[1:]))[0]


def in_a_branch(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    for w in ws:
        h = lax.cond(h[0, 0] > -9, lambda h, w: layer(h, w, draw(h)), lambda h, _: h * draw(h), h, w)
    return h


def in_a_checkpoint(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    for w in ws:
        h = jax.checkpoint(lambda h, w: layer(h, w, draw(h)))(h, w)
    return h


def in_a_loop_with_checkpoints(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    return lax.scan(jax.checkpoint(lambda h, w: (layer(h, w, draw(h)), None)), h, ws)[0]


def in_a_rule(h: jax.Array, ws: jax.Array, draw: Draw) -> jax.Array:
    @jax.custom_vjp
    def ruled(h: jax.Array, w: jax.Array) -> jax.Array:
        return layer(h, w, draw(h))

    def forward(h: jax.Array, w: jax.Array) -> Any:
        factor = draw(h)
        return layer(h, w, factor), (h, w, factor)

    def backward(kept: Any, g: jax.Array) -> Any:
        h, w, factor = kept
        return jax.vjp(lambda h, w: layer(h, w, factor), h, w)[1](g * draw(g))

    ruled.defvjp(forward, backward)
    for w in ws:
        h = ruled(h, w)
    return h


PLACES = (
    at_the_top, in_a_loop, in_a_loop_in_a_loop, in_a_branch, in_a_checkpoint, in_a_loop_with_checkpoints,
    in_a_rule,
)  # fmt: skip
REFUSED_BY_JAX = {
    (place, kind)
    for place in ("in_a_checkpoint", "in_a_loop_with_checkpoints")
    for kind in ("ordered", "unordered")
}
CASES = [
    pytest.param(place, kind, id=f"{place.__name__}-{kind}")
    for place in PLACES
    for kind in KINDS
    if (place.__name__, kind) not in REFUSED_BY_JAX
]


def make_step(place: Callable[..., jax.Array], draw: Draw) -> Callable[..., Any]:
    def step(ws: jax.Array, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda ws: jnp.mean(place(x, ws, draw) ** 2))(ws)
        return ws - 0.1 * draw(gradients[0]).mean() * gradients, loss

    return step


def make_args() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (LAYERS, 32, 32)) / 6, jax.random.normal(keys[1], (64, 32))


def forms(traced: Traced) -> list[Variant]:
    """Each form that sites of the step may take, alone."""
    pairs = [
        Variant.of(Choice(LOOP, pair, (2, 2))) for pair, able in enumerate(traced.sites.cuttable) if able
    ]
    rows = [
        of_chunks(*(region.choices[0] * (each == site) for each in range(len(traced.sites.regions))))
        for site, region in enumerate(traced.sites.regions)
    ]
    return [
        Variant(),
        *pairs,
        *rows,
        *(Variant.of(Choice(kind, 0, (1,))) for kind in (INNER, ATTENTION, COPIES)),
    ]


@pytest.mark.parametrize(("place", "kind"), CASES)
def test_every_form_runs_as_often_as_the_step(place: Callable[..., jax.Array], kind: str) -> None:
    """All that may be dropped is dropped: JAX's own dead-code removal finds as many in the step as it was traced."""
    step, args = make_step(place, KINDS[kind](Host())), make_args()
    plain = trace(jax.jit(step), args, {})
    assert sum(trips for _, trips in run_counts(plain.closed)) > LAYERS
    for form in forms(plain):
        traced = plain.in_form(form)
        graph = lower(traced, detect(jax.devices()[0]), base_nbytes=0)
        planned = emit(traced, graph, all_dropped(graph))
        assert run_counts(planned) == run_counts(plain.flat)
        assert sorted(run_counts(planned)) == sorted(run_counts(plain.closed))


@pytest.mark.parametrize("place", [p for p in PLACES if (p.__name__, "ordered") not in REFUSED_BY_JAX])
def test_ordered_draws_are_the_plain_ones(place: Callable[..., jax.Array]) -> None:
    """Each draw is of the order in which it is drawn, so that results are equal only if that is."""
    plain_host, host = Host(), Host()
    args = make_args()
    want = jax.jit(make_step(place, KINDS["ordered"](plain_host)), compiler_options=OPTIONS)(*args)
    traced = trace(jax.jit(make_step(place, KINDS["ordered"](host))), args, {})
    graph = lower(traced, detect(jax.devices()[0]), base_nbytes=0)
    run = compiled(emit(traced, graph, all_dropped(graph)), args)
    got = run(*args)
    jax.effects_barrier()
    assert host.drawn == plain_host.drawn > LAYERS
    assert_same(jax.tree.leaves(want), got)


@pytest.mark.parametrize("kind", ["rng_uniform", "pure"])
@pytest.mark.parametrize("emitter", ["policy", "custom_vjp"])
@pytest.mark.parametrize(
    "place", [p for p in PLACES if not p.__name__.endswith(("checkpoint", "checkpoints"))]
)
def test_planned_functions_run_as_often_as_their_own(
    place: Callable[..., jax.Array], emitter: str, kind: str
) -> None:
    draw = KINDS[kind](Host())

    def gradient(wrap: Callable[..., Any]) -> Any:
        loss = wrap(lambda ws, x: jnp.mean(place(x, ws, draw) ** 2))
        return jax.make_jaxpr(jax.grad(loss))(*make_args())

    def planned(loss: Callable[..., Any]) -> Any:
        return jaxremat.checkpoint(
            loss, "min", emit=emitter, planning=jaxremat.Planning(solver=jaxremat.MinCut())
        )

    plain = gradient(lambda loss: loss)
    assert sum(trips for _, trips in run_counts(plain)) >= LAYERS
    assert run_counts(gradient(planned)) == run_counts(plain)


def test_what_runs_more_often_is_no_program_of_this_one() -> None:
    def drawn(count: int) -> Any:
        return jax.make_jaxpr(lambda: [lax.rng_uniform(0.0, 1.0, (2,)) for _ in range(count)])()

    check_runs(drawn(2), drawn(2))
    with pytest.raises(RuntimeError, match="must run once"):
        check_runs(drawn(1), drawn(2))


def test_what_nothing_reads_is_not_drawn() -> None:
    closed = jax.make_jaxpr(lambda x: (lax.rng_uniform(0.0, 1.0, (2,)), x)[1])(1.0)
    assert run_counts(closed) == []
