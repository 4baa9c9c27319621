"""Numbers of parts that do not divide the rows, and sums that wait for all of them: the same results, and proved."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from chains import descent
from evaluation import evaluate, evaluated
from test_chunks import close
from test_microbatches import normal

from jaxremat._program._compat import shaped
from jaxremat._rewrite import _row_regions
from jaxremat._rewrite._flat_program import FlatProgram
from jaxremat._rewrite._halos import Halos
from jaxremat._rewrite._kernel_choice import equivalence
from jaxremat._rewrite._program_readers import Readers
from jaxremat._rewrite._region_loops import handed_on
from jaxremat._rewrite._regions import Region
from jaxremat._rewrite._row_chunks import chunked
from jaxremat._rewrite._row_regions import regions
from jaxremat._rewrite._trace import trace

WIDTH = 6


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of small arrays too."""
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)


def sites(step: Any, args: Any, *, whole: bool) -> tuple[FlatProgram, list[Region]]:
    traced = trace(jax.jit(step), args, {})
    return traced.merged.program, [region for region in traced.sites.regions if region.whole == whole]


def holds(program: FlatProgram, region: Region, chunks: int, args: Any) -> jex.ClosedJaxpr:
    """The program in chunks, which gives what it gave, and is proved to."""
    cut = chunked(program, [(region, chunks)]).closed
    assert equivalence(program.closed).difference(cut) is None
    flat = jax.tree.leaves(args)
    close(evaluated(jex.jaxpr_as_fun(program.closed))(*flat), evaluated(jex.jaxpr_as_fun(cut))(*flat), 1e-5)
    return cut


def tanh_net(params: Any, x: Any) -> Any:
    for w in params["layers"]:
        x = jnp.tanh(x @ w + params["bias"])
    return x


def mean_square(params: Any, x: Any, y: Any, *_: Any) -> Any:
    return ((tanh_net(params, x) - y) ** 2).mean()


def scattered(params: Any, x: Any, y: Any, words: Any) -> Any:
    """What a table's rows are read for is added to its gradient in place."""
    return mean_square(params, jnp.tanh(x + params["bias"][:3][words][:, None]), y)


def convolved(params: Any, x: Any, y: Any, _: Any) -> Any:
    kernel = params["layers"][0][:3, :2].reshape(3, 1, 2)
    image = jax.lax.conv_general_dilated(
        x[..., None], kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return mean_square(params, image.sum(2), y)


def arguments(batch: int) -> Any:
    params = {"layers": [normal(WIDTH, WIDTH, seed=i) for i in range(3)], "bias": normal(WIDTH, seed=5)}
    words = jnp.arange(batch, dtype=jnp.int32) * 2 % 3
    return params, normal(batch, WIDTH, seed=7), normal(batch, WIDTH, seed=8), words


@pytest.mark.parametrize("loss", [mean_square, scattered, convolved])
@pytest.mark.parametrize(("batch", "chunks"), [(31, 4), (31, 16), (7, 4), (13, 7)])
def test_a_last_part_that_ends_behind_the_rows_counts_each_once(loss: Any, batch: int, chunks: int) -> None:
    args = arguments(batch)
    program, (region,) = sites(descent(loss), args, whole=True)
    assert region.uneven and batch % chunks
    cut = holds(program, region, chunks, args)
    (loop,) = (eqn for eqn in cut.jaxpr.eqns if eqn.primitive.name == "scan")
    assert loop.params["length"] == chunks


@pytest.mark.parametrize("fill", [None, 1.0])
def test_without_zeros_for_rows_behind_all_nothing_is_proved(
    fill: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, (region,) = sites(descent(mean_square), arguments(31), whole=True)
    slab = Halos.slab

    def wrong(halos: Any, eqns: Any, env: Any, v: Any, halo: Any, zero: Any, *others: Any) -> Any:
        return slab(halos, eqns, env, v, halo, None if zero is None else fill, *others)

    monkeypatch.setattr(Halos, "slab", wrong)
    assert equivalence(program.closed).difference(chunked(program, [(region, 4)]).closed) is not None


def test_numbers_of_parts_are_near_the_wanted_ones_where_nothing_divides_the_rows() -> None:
    _, (prime,) = sites(descent(mean_square), arguments(31), whole=True)
    assert prime.choices == (2, 4, 8, 16, 31)
    _, (even,) = sites(descent(mean_square), arguments(48), whole=True)
    assert even.choices == (2, 4, 8, 16)


def test_rows_that_are_decided_about_are_in_one_part() -> None:
    """A position that one run finds, and another reads: no row that there is is done twice."""

    def loss(params: Any, x: Any, y: Any, _: Any) -> Any:
        made = tanh_net(params, x)
        return (jnp.take_along_axis(made, made.argmax(1)[:, None], 1) - y).sum() ** 2 + (made**2).sum()

    args = arguments(31)
    program, (region,) = sites(descent(loss), args, whole=True)
    holds(program, region, 4, args)


def weighted(params: Any, x: Any, y: Any, _: Any) -> Any:
    """Gradients of each example, weighted by what the norms of all say."""
    losses, gradients = jax.vmap(jax.value_and_grad(mean_square), (None, 0, 0))(params, x, y)
    norms = sum((g**2).reshape(len(x), -1).sum(1) for g in jax.tree.leaves(gradients)) ** 0.5
    weights = norms / norms.mean()
    mean = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), gradients)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, mean), losses @ weights


@pytest.mark.parametrize("batch", [12, 31])
def test_gradients_of_examples_that_wait_for_all_norms_are_made_again(batch: int) -> None:
    args = arguments(batch)
    program, found = sites(weighted, args, whole=True)
    (region,) = found
    assert len(region.loops) == 2
    largest = batch * WIDTH * WIDTH
    cut = holds(program, region, region.choices[-2], args)
    assert all(v.aval.size < largest for eqn in cut.jaxpr.eqns for v in eqn.outvars)
    assert any(shaped(v).size >= largest for eqn in program.eqns for v in eqn.outvars)
    assert regions(Readers(program))


def neighbours_far_away(params: Any, x: Any, y: Any, _: Any) -> Any:
    """The largest of what is made of a row's neighbours, a threshold, and a loss that waits for all rows."""
    made = jnp.tanh((x[:, :, None] * params["bias"]) @ params["layers"][0]).max(1)
    made = jnp.minimum(made, jax.nn.sigmoid(made @ params["layers"][1]))
    far = made - made.mean(0)
    return ((far - y) ** 2 * jnp.exp(far.T @ far / 40).mean()).mean()


def the_largest_of_all_rows(params: Any, x: Any, y: Any, _: Any) -> Any:
    """What is selected among all rows is known once all are made: what it is compared with is of the same run."""
    made = jnp.tanh((x[:, :, None] * params["bias"]) @ params["layers"][0]).reshape(len(x), -1)
    return ((made - made.max(0)) ** 2).mean() + (made.max(0) * made.shape[1]).sum() + y.mean()


@pytest.mark.parametrize("loss", [neighbours_far_away, the_largest_of_all_rows])
def test_a_loop_compares_what_it_computes_again_with_what_it_selects(loss: Any) -> None:
    args = arguments(24)
    traced = trace(jax.jit(descent(loss)), args, {})
    program = traced.merged.program
    found = [region for region in traced.sites.regions if len(region.loops) > 1]
    assert found
    flat = jax.tree.leaves(args)
    for region in found:
        cut = chunked(program, [(region, 4)]).closed
        rounded = evaluate(cut, flat, np.random.default_rng(0))
        close(evaluate(program.closed, flat), rounded, 1e-4)


def test_masks_of_what_is_computed_again_are_not_handed_on() -> None:
    traced = trace(jax.jit(descent(neighbours_far_away)), arguments(24), {})
    program = Readers(traced.merged.program)
    for region in traced.sites.regions:
        handed = [v for n in range(len(region.loops)) for v in handed_on(program, region.loops, n)]
        assert not any(shaped(v).dtype == bool and shaped(v).ndim > 2 for v in handed)


def sampled(params: Any, x: Any, y: Any, *_: Any) -> Any:
    """Positions are looked for in each row by halving, which is a scan within each part."""
    edges = jnp.cumsum(jax.nn.softplus(tanh_net(params, x)), -1)
    wanted = edges[:, -1:] * jnp.linspace(0.1, 0.9, 4)
    at = jax.vmap(jnp.searchsorted)(jax.lax.stop_gradient(edges), jax.lax.stop_gradient(wanted))
    return ((jnp.take_along_axis(edges, at.clip(0, WIDTH - 1), -1) - y[:, :4]) ** 2).mean()


def test_searches_in_parts_are_proved() -> None:
    args = arguments(8)
    program, found = sites(descent(sampled), args, whole=True)
    assert found
    holds(program, found[0], 2, args)
