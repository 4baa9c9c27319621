"""An optimizer's state that the planner keeps in host memory, because nothing fits otherwise."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_close

import jaxremat
from jaxremat import InfeasibleBudgetError, JaxrematWarning, Plan
from jaxremat._compiler._compiled_step import host_traffic
from jaxremat._compiler._devices import detect
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._program import Program
from jaxremat._compiler._target import Target
from jaxremat._lower._lower import lower
from jaxremat._model._optimizer_updates import updated_alone
from jaxremat._model._primitive_names import FETCH
from jaxremat._plan._problem import Problem
from jaxremat._plan._search import Search
from jaxremat._plan._state_on_host import Movable
from jaxremat._program._host_arguments import from_host
from jaxremat._rewrite._trace import trace

ADAM = optax.adamw(1e-3)
WIDTH, LAYERS, ROWS = 1024, 2, 512


def step(weights: Any, state: Any, x: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        h = x
        for up, down in weights:
            h = h + jax.nn.gelu(h @ up) @ down
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    steps, state = ADAM.update(gradients, state, weights)
    return optax.apply_updates(weights, steps), state, value


def scanned(weights: Any, state: Any, x: Any) -> Any:
    """The same with the layers in a scan."""

    def loss(weights: Any) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w[0]) @ w[1], None), x, weights)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    steps, state = ADAM.update(gradients, state, weights)
    return optax.apply_updates(weights, steps), state, value


def scaled(scale: Any, weights: Any, x: Any) -> Any:
    """The gradient of one number; the weights of the layers are frozen."""

    def loss(scale: Any) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (h + scale * jax.nn.gelu(h @ w[0]) @ w[1], None), x, weights)
        return jnp.mean(h**2)

    return jax.grad(loss)(scale)


def shapes(width: int = WIDTH, layers: int = LAYERS, rows: int = ROWS) -> tuple[Any, Any, Any]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = [(shape(width, 4 * width), shape(4 * width, width))] * layers
    return weights, jax.eval_shape(ADAM.init, weights), shape(rows, width)


def arrays(tree: Any) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype) * 0.1, tree)


def kinds(tree: Any) -> set[Any]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


class TestForAGpu:
    """What is planned, by its compiler."""

    args = shapes()
    state_nbytes = sum(a.size * 4 for a in jax.tree.leaves(args[1]))
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((16, *a.shape), a.dtype), args[0][0])
    """The weights of sixteen layers in a scan."""
    stacked_nbytes = sum(a.size * 4 for a in stacked)

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, few_compilations: None) -> None:
        monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
        monkeypatch.delenv("JAXREMAT_PLAN_CACHE")

    def plan(self, budget: Any, **options: Any) -> Plan:
        common: dict[str, Any] = {"donate_argnums": (0, 1), "target": "h100"}
        return jaxremat.plan(step, *self.args, budget=budget, **common | options)

    def test_it_goes_where_nothing_fits_otherwise(self) -> None:
        weights_nbytes = self.state_nbytes // 2
        budget = weights_nbytes + self.state_nbytes // 2 + 60 * 2**20
        with pytest.raises(InfeasibleBudgetError, match=r"optimize\(\.\.\., offload=True\)") as refused:
            self.plan(budget)
        assert refused.value.step_seconds > 0
        with pytest.warns(
            JaxrematWarning, match="of the donated arguments in host memory, and the step returns"
        ):
            plan = self.plan(budget, offload=True)
        assert plan.peak_nbytes <= budget
        missing = refused.value.min_peak_nbytes - budget
        assert missing <= plan.on_host_nbytes <= self.state_nbytes
        leaves = jax.tree.leaves(self.args)
        assert sum(leaves[place].size * 4 for place in plan.on_host) == plan.on_host_nbytes
        weights = len(jax.tree.leaves(self.args[0]))
        assert all(weights <= place < len(leaves) - 1 for place in plan.on_host)
        assert "of the arguments stay in host memory between steps" in str(plan)
        assert Plan.from_json(plan.to_json()) == plan
        # its time is counted from the step as it is, which copies nothing
        moved = jaxremat.plan(
            step,
            *self.moved(plan),
            budget=budget,
            donate_argnums=(0, 1),
            target="h100",
            offload=True,
        )
        assert plan.compiled_overhead is not None and moved.compiled_overhead is not None
        # where arguments and results alone exceed the budget, by the model: nothing was compiled to know that
        assert plan.account.step_seconds == pytest.approx(refused.value.step_seconds, rel=0.1)
        assert plan.account.step_seconds * (1 + plan.compiled_overhead) == pytest.approx(
            moved.account.step_seconds * (1 + moved.compiled_overhead)
        )
        # the same again takes no search
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = self.plan(budget, offload=True)
        assert (again.on_host, again.saved, again.stages) == (plan.on_host, plan.saved, plan.stages)
        assert again.planning == plan.planning
        # and so does following the plan
        followed = jaxremat.optimize(plan=plan, donate_argnums=(0, 1), target="h100")(step)
        assert followed.plan(*self.args).compiled_peak_nbytes == plan.compiled_peak_nbytes

    def test_of_a_step_that_does_not_fit_auto_does_not_look_for_the_least_on_the_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InfeasibleBudgetError) as refused:
            self.plan(3 * self.state_nbytes // 2 + 2**20)
        budget = (refused.value.min_peak_nbytes + 3 * self.state_nbytes // 2 + 2**20) // 2
        looked: list[int] = []
        least = Search._least

        def looking(search: Search, budget: int | None) -> None:
            looked.append(search.graph.base_nbytes)
            least(search, budget)

        monkeypatch.setattr(Search, "_least", looking)
        with pytest.warns(JaxrematWarning, match="in host memory"):
            plan = self.plan(budget, offload="auto")
        assert plan.peak_nbytes <= budget and plan.on_host
        assert all(nbytes < 3 * self.state_nbytes // 2 for nbytes in looked)  # with some of it on the host
        with pytest.raises(InfeasibleBudgetError) as refused:
            self.plan(2**20, offload="auto")
        assert refused.value.min_peak_nbytes < 3 * self.state_nbytes // 2

    def moved(self, plan: Plan) -> Any:
        leaves, tree = jax.tree.flatten(self.args)
        places = set(plan.on_host)
        return tree.unflatten(
            [jaxremat.to_host(leaf) if i in places else leaf for i, leaf in enumerate(leaves)]
        )

    def test_it_stays_where_the_step_fits_as_it_is(self) -> None:
        needs = jaxremat.memory(step, *self.args, donate_argnums=(0, 1), target="h100")
        assert not self.plan(needs.peak_nbytes, offload=True).on_host

    def test_no_more_goes_than_the_host_may_hold(self) -> None:
        budget = self.state_nbytes + 60 * 2**20
        with pytest.raises(InfeasibleBudgetError):
            self.plan(budget, offload=2**20)
        with pytest.warns(JaxrematWarning, match="The plan keeps"):
            plan = self.plan(budget, offload=self.state_nbytes)
        assert 0 < plan.on_host_nbytes + plan.offloaded_nbytes <= self.state_nbytes

    def test_what_is_not_donated_stays(self) -> None:
        with pytest.raises(InfeasibleBudgetError):
            self.plan(3 * self.state_nbytes // 2, offload=True, donate_argnums=0)

    def test_stacks_come_and_go_row_by_row(self) -> None:
        """With the layers in a scan neither the state of all layers is on the device, nor their gradients."""
        stacked, nbytes, x = self.stacked, self.stacked_nbytes, self.args[2]
        there = jaxremat.to_host(jax.eval_shape(ADAM.init, stacked))
        options: dict[str, Any] = {"donate_argnums": (0, 1), "target": "h100"}
        plain = jaxremat.memory(scanned, stacked, there, x, **options)
        plan = jaxremat.plan(scanned, stacked, there, x, budget="min", **options)
        assert plain.peak_nbytes > 3 * nbytes
        assert plan.peak_nbytes < 1.6 * nbytes
        assert plan.compiled_overhead is not None and plan.compiled_overhead < 0.1

    def test_weights_of_layers_go_where_the_state_is_not_enough(self) -> None:
        """Weights, state and gradients of all layers exceed the budget several times."""
        stacked, nbytes, x = self.stacked, self.stacked_nbytes, self.args[2]
        args = stacked, jax.eval_shape(ADAM.init, stacked), x
        options: dict[str, Any] = {"budget": nbytes // 2, "donate_argnums": (0, 1), "target": "h100"}
        with pytest.warns(JaxrematWarning, match="of the donated arguments in host memory"):
            plan = jaxremat.plan(scanned, *args, offload=True, **options)
        assert plan.peak_nbytes <= nbytes // 2
        assert plan.on_host_nbytes == 3 * nbytes
        assert "1.50 GiB of the arguments stay in host memory between steps" in str(plan)
        assert Plan.from_json(plan.to_json()) == plan
        there = jaxremat.to_host(args[0]), jaxremat.to_host(args[1]), x
        followed = jaxremat.optimize(plan=plan, donate_argnums=(0, 1), target="h100")(scanned)
        traffic = host_traffic(parse(followed.compile(*there).as_text()), Target("h100").spec)
        # weights in both passes, moments once, and few activations
        assert 4 * nbytes <= traffic.fetched_nbytes < 4.1 * nbytes
        assert 3 * nbytes <= traffic.sent_nbytes < 3.1 * nbytes
        with pytest.raises(
            InfeasibleBudgetError,
            match=r"in host memory\. `offload` leaves [0-9.]+ MiB for them: write a larger",
        ):
            jaxremat.plan(scanned, *args, offload="600MiB", **options)

    def test_the_least_memory_is_no_more_than_a_budget_reaches(self) -> None:
        """Weights and state are three times as much."""
        stacked, nbytes = self.stacked, self.stacked_nbytes
        args = stacked, jax.eval_shape(ADAM.init, stacked), self.args[2]
        options: dict[str, Any] = {"budget": "min", "donate_argnums": (0, 1), "target": "h100"}
        with pytest.warns(JaxrematWarning, match="of the donated arguments in host memory"):
            plan = jaxremat.plan(scanned, *args, offload=True, **options)
        assert plan.on_host_nbytes == 3 * nbytes
        assert plan.peak_nbytes <= nbytes // 2

    def test_frozen_weights_that_could_stream_are_named(self) -> None:
        stacked, nbytes, x = self.stacked, self.stacked_nbytes, self.args[2]
        options: dict[str, Any] = {"budget": nbytes // 2, "target": "h100", "offload": True}
        with pytest.raises(InfeasibleBudgetError, match=r"Write `weights = jaxremat\.to_host\(weights\)`"):
            jaxremat.plan(scaled, jax.ShapeDtypeStruct((), jnp.float32), stacked, x, **options)
        there = jaxremat.to_host(stacked)
        plan = jaxremat.plan(scaled, jax.ShapeDtypeStruct((), jnp.float32), there, x, **options)
        assert plan.peak_nbytes <= nbytes // 2

    def test_the_link_s_seconds_count_where_kernels_do_not_hide_them(self) -> None:
        """Of few rows kernels take less time than copies: what came once is saved on the device, if that has room."""
        stacked, nbytes, spec = self.stacked, self.stacked_nbytes, Target("h100").spec
        scale, there = jax.ShapeDtypeStruct((), jnp.float32), jaxremat.to_host(stacked)
        shares: list[float] = []
        for rows in (128, 65536):
            args = scale, there, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
            graph = lower(trace(jax.jit(from_host(scaled)), args, {}), spec, base_nbytes=0)
            shares.append(
                sum(n.seconds for n in graph.nodes if n.primitive == FETCH) / (nbytes / spec.host_link)
            )
        assert shares[0] > 0.9 and shares[1] < 0.05
        args = scale, there, jax.ShapeDtypeStruct((128, WIDTH), jnp.float32)
        fetched = []
        for budget in (4 * nbytes, nbytes // 4):
            step = jaxremat.optimize(budget, target="h100")(scaled)
            assert step.plan(*args).peak_nbytes <= budget
            module = parse(step.compile(*args).as_text())
            fetched.append(host_traffic(module, spec).fetched_nbytes)
        assert fetched[0] == nbytes < fetched[1] <= 2 * nbytes

    @pytest.mark.slow
    def test_too_little_for_all_of_it_is_refused_with_what_is_needed_then(self) -> None:
        with pytest.raises(InfeasibleBudgetError) as refused:
            self.plan(self.state_nbytes // 2, offload=True)
        assert refused.value.min_peak_nbytes < 3 * self.state_nbytes // 2  # weights and state


def placed_plan(*args: Any) -> tuple[Plan, tuple[int, ...]]:
    """A plan of the step for a CPU that has matrices of its state in host memory."""
    weights, state, x = args
    there = jaxremat.to_host(state, least_nbytes=1000)
    needs = jaxremat.memory(step, weights, there, x)
    budget = needs.peak_nbytes - needs.temporaries_nbytes // 4
    leaves = jax.tree.leaves((weights, there, x))
    places = tuple(i for i, leaf in enumerate(leaves) if kinds([leaf]) == {"pinned_host"})
    plan = jaxremat.plan(
        step, weights, there, x, budget=budget, donate_argnums=(0, 1), planning=jaxremat.Planning(cache=False)
    )
    return replace(plan, on_host=places, on_host_nbytes=sum(leaves[i].nbytes for i in places)), places


def test_a_call_gives_up_what_is_donated_and_gets_it_back_from_the_host() -> None:
    weights, state, x = shapes(32, 4, 256)
    weights, x = arrays(weights), arrays(x)
    state = ADAM.init(weights)
    plan, places = placed_plan(weights, state, x)
    expected = jax.jit(step)(weights, state, x)
    follow = jaxremat.optimize(plan=plan, donate_argnums=(0, 1))(step)
    follow.plan(weights, state, x)
    follow.lower(weights, state, x)
    follow.compile(weights, state, x)
    leaves = jax.tree.leaves((weights, state, x))
    assert not any(leaf.is_deleted() for leaf in leaves)  # who asks gives nothing up
    found = follow(weights, state, x)
    assert all(leaves[place].is_deleted() for place in places)
    assert "pinned_host" in kinds(found[1]) and kinds(found[0]) == {"device"}
    assert_close(found, expected, rtol=2e-5, atol=1e-6)
    expected = jax.jit(step)(*expected[:2], x)
    found = follow(*found[:2], x)
    np.testing.assert_allclose(found[2], expected[2], rtol=2e-5)
    assert len(follow._planned) == 2 and len({id(p) for p in follow._planned.values()}) == 1
    # a state that was read from a file is on the device again
    found = follow(found[0], jax.device_put(found[1], jax.memory.Space.Device), x)
    expected = jax.jit(step)(*expected[:2], x)
    np.testing.assert_allclose(found[2], expected[2], rtol=2e-5)


def test_a_plan_in_a_file_moves_them_too(tmp_path: Any) -> None:
    weights, x = (arrays(shapes(32, 4, 256)[i]) for i in (0, 2))
    plan, _ = placed_plan(weights, ADAM.init(weights), x)
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    found = jaxremat.optimize(plan=plan, donate_argnums=(0, 1))(step)(weights, ADAM.init(weights), x)
    assert "pinned_host" in kinds(found[1])


def test_what_is_tried_in_turn() -> None:
    state = {7: 10, 3: 10, 5: 10, **{10 + i: 10 for i in range(20)}}
    least, everything = Movable(state, {}).tries(missing=5)
    assert least == (3, 5, 7, 10, 11, 12, 13)  # 5 and six arrays that are under way
    assert everything == tuple(sorted(state))
    assert Movable(state, {}).tries(missing=1000) == [everything]
    assert Movable({}, {}).tries(missing=5) == []
    # stacks of weights come where the state is not enough
    both = Movable({5: 10}, {1: 20, 2: 10, 3: 10})
    assert both.tries(missing=5) == [(1, 2, 3, 5), (5,)]
    assert both.tries(missing=20) == [(1, 2, 3, 5)]
    assert Movable({}, {1: 20, 2: 10, 3: 10}).tries(missing=5) == [(1,), (1, 2, 3)]
    assert both.all_of_each() == [(5,), (1, 2, 3, 5)]


def test_what_is_read_to_be_updated_alone() -> None:
    args = shapes(32, 3, 64)
    program = Program(step, donate_argnums=(0, 1))
    problem = Problem(program, args, {}, detect(jax.devices()[0]), "roofline")
    leaves, first = jax.tree.leaves(args), len(problem.traced.jaxpr.jaxpr.constvars)
    found = [v - first for v in updated_alone(problem.estimated) if leaves[v - first].ndim]
    assert sorted(found) == [i for i in range(6, len(leaves) - 1) if leaves[i].ndim]  # both moments
    last = {jax.tree.leaves(args[:2])[i].shape for i in found[:1]}
    assert last == {(128, 32)}  # of the last layer's last product


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_a_step_with_everything_in_host_memory_runs(budget: str) -> None:
    """Weights of all layers, their gradients and moments: rows of them are used, and all return there."""
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((6, *s.shape), s.dtype), shapes(64)[0][0])
    weights, x = arrays(stacked), arrays(jax.ShapeDtypeStruct((128, 64), jnp.float32))
    state = ADAM.init(weights)
    follow = jaxremat.optimize(budget, donate_argnums=(0, 1), planning=jaxremat.Planning(cache=False))(
        scanned
    )
    there = jaxremat.to_host((weights, state), least_nbytes=1000)
    expected = jax.jit(scanned)(weights, state, x)
    for _ in range(2):
        old = [leaf for leaf in jax.tree.leaves(there) if leaf.ndim]
        found = follow(*there, x)
        assert all(leaf.is_deleted() for leaf in old)
        assert kinds(found[:2]) == {"pinned_host"}
        assert_close(found, expected, rtol=2e-5, atol=1e-6)
        there, expected = found[:2], jax.jit(scanned)(*expected[:2], x)
