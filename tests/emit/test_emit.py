"""Emitted programs are not no-ops: operations are really repeated, memory really falls, and what must run once does."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from jax.core import ShapedArray
from zoo import BY_NAME

import jaxremat
from jaxremat import Graph, MemoryStats, RecomputeAll, SaveAll, Schedule, close_over_dependencies
from jaxremat._compiler._devices import detect
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._liveness import live_at_peak
from jaxremat._emit._emit import FENCES, emit
from jaxremat._lower._lower import lower
from jaxremat._model._schedule import check
from jaxremat._program import _compat
from jaxremat._rewrite._trace import Traced, trace

LAYERS, BATCH, WIDTH = 8, 512, 64
SCALAR = ShapedArray((), jnp.float32)


def mlp(params: Any, batch: Any) -> Any:
    """An unrolled MLP's loss and gradients: one contraction per layer forward, two backward but one in the first."""

    def loss(params: Any) -> jax.Array:
        x, y = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    return jax.value_and_grad(loss)(params)


def conv_net(params: Any, batch: Any) -> Any:
    """The same with 3x3 convolutions."""

    def loss(params: Any) -> jax.Array:
        x, y = batch
        for w in params:
            x = jnp.tanh(
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return jnp.mean((x - y) ** 2)

    return jax.value_and_grad(loss)(params)


def mlp_args() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in keys[:LAYERS]]
    return weights, tuple(jax.random.normal(k, (BATCH, WIDTH)) for k in keys[LAYERS:])


def conv_args(layers: int = 5) -> Any:
    keys = jax.random.split(jax.random.key(0), layers + 2)
    weights = [jax.random.normal(k, (3, 3, 4, 4)) * 0.3 for k in keys[:layers]]
    return weights, tuple(jax.random.normal(k, (4, 8, 8, 4)) for k in keys[layers:])


def lowered(fn: Any, args: Any) -> tuple[Traced, Graph]:
    """The planner's view of a function, by fusion rules: nothing is compiled."""
    traced = trace(jax.jit(fn), args, {})
    return traced, lower(traced, detect(jax.devices()[0]), base_nbytes=0)


def count(closed: jex.ClosedJaxpr, primitive: str) -> int:
    """Equations of this primitive at the top level of a flat jaxpr."""
    return sum(eqn.primitive.name == primitive for eqn in closed.jaxpr.eqns)


def recomputed_layers(traced: Traced, graph: Graph, primitive: str) -> list[int]:
    """For each stage, the layers that recomputing everything from the arguments runs again.

    A chain leaves no choice: a stage that reads what layer `i` made runs layers 1 to `i` again.
    """
    depth: dict[Any, int] = {}
    forward = set()
    deepest = [0] * len(graph.stages)
    for i, eqn in enumerate(traced.jaxpr.jaxpr.eqns):
        operands = [a for a in eqn.invars if isinstance(a, jex.Var)]
        if graph.nodes[i].forward:
            below = max((depth.get(a, 0) for a in operands), default=0)
            depth.update(dict.fromkeys(eqn.outvars, below + (eqn.primitive.name == primitive)))
            forward.update(eqn.outvars)
        else:
            k = graph.stage_of[i]
            # The loss's own value is a scalar, which is always saved.
            deepest[k] = max([deepest[k], *(depth[a] for a in operands if a in forward and a.aval != SCALAR)])
    return deepest


def compiled(closed: jex.ClosedJaxpr, args: Any) -> jax.stages.Compiled:
    """A flat jaxpr, compiled so that barriers count."""
    leaves = jax.tree.leaves(args)
    options = jaxremat.compiler_options("cpu")
    return jax.jit(jex.jaxpr_as_fun(closed)).lower(*leaves).compile(compiler_options=options)


def operations(executable: jax.stages.Compiled, opcode: str) -> int:
    """Instructions with this opcode in all computations of a compiled module."""
    module = parse(str(executable.as_text()))
    return sum(i.opcode == opcode for c in module.computations.values() for i in c.instructions)


def all_saved(graph: Graph) -> Schedule:
    """The schedule that drops nothing."""
    return SaveAll().solve(graph, None, time_limit=1.0).schedule


def all_dropped(graph: Graph) -> Schedule:
    """The schedule that saves only what it must."""
    return RecomputeAll().solve(graph, None, time_limit=1.0).schedule


def test_barriers_of_earlier_versions_are_those_of_today() -> None:
    """Plans of before may name kinds that there are no more."""
    traced, graph = lowered(mlp, mlp_args())
    today = str(emit(traced, graph, all_dropped(graph)))
    assert all(
        str(emit(traced, graph, all_dropped(graph), kind)) == today for kind in ("cotangents", "ordered")
    )


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("fn", [mlp, conv_net], ids=lambda fn: fn.__name__)
def test_contractions_are_repeated(fn: Any, fence: str) -> None:
    args, primitive, opcode = (
        (mlp_args(), "dot_general", "dot")
        if fn is mlp
        else (conv_args(), "conv_general_dilated", "convolution")
    )
    layers = len(args[0])
    traced, graph = lowered(fn, args)
    plain = emit(traced, graph, all_saved(graph))
    planned = emit(traced, graph, all_dropped(graph), fence)
    assert emit(traced, replace(graph, stages=()), all_saved(replace(graph, stages=()))) is traced.jaxpr
    assert count(plain, primitive) == 3 * layers - 1
    again = recomputed_layers(traced, graph, primitive)
    assert max(again) >= layers - 1
    assert count(planned, primitive) == 3 * layers - 1 + sum(again)
    before, after = compiled(plain, args), compiled(planned, args)
    assert operations(before, opcode) == count(plain, primitive)
    assert operations(after, opcode) == count(planned, primitive)
    if fn is mlp:
        # One activation per layer is gone; what is left is the recomputation's own and the loss's.
        nbytes = BATCH * WIDTH * 4
        saved = MemoryStats.of(before).temporaries_nbytes - MemoryStats.of(after).temporaries_nbytes
        assert saved >= (layers - 5) * nbytes
    assert_same(before(*jax.tree.leaves(args)), after(*jax.tree.leaves(args)))


@pytest.mark.jax_0_10("XLA for the CPU merges across barriers")
def test_without_their_fences_recomputations_are_merged_again() -> None:
    """What the barriers and the compiler options are there for."""
    args = mlp_args()
    traced, graph = lowered(mlp, args)
    planned = emit(traced, graph, all_dropped(graph))
    leaves = jax.tree.leaves(args)
    without = jax.jit(jex.jaxpr_as_fun(planned)).lower(*leaves).compile()
    assert (
        operations(without, "dot")
        < count(planned, "dot_general")
        == operations(compiled(planned, args), "dot")
    )


def test_one_barrier_per_recomputing_stage() -> None:
    traced, graph = lowered(mlp, mlp_args())
    schedule = all_dropped(graph)
    planned = emit(traced, graph, schedule)
    assert count(traced.jaxpr, "optimization_barrier") == 0
    assert len(graph.stages) > 1
    barriers = [
        str(e.source_info.name_stack)
        for e in planned.jaxpr.eqns
        if e.primitive.name == "optimization_barrier"
    ]
    stages = [int(found[1]) for stack in barriers if (found := re.search(r"barrier_(\d+)", stack))]
    assert stages == [k for k, nodes in enumerate(schedule.recomputed) if nodes]
    assert len(barriers) == len(stages) + 1
    assert "barrier_updates" in barriers[-1]


def test_clones_keep_their_source_and_say_their_stage() -> None:
    traced, graph = lowered(mlp, mlp_args())
    planned = emit(traced, graph, all_dropped(graph))
    originals = Counter(e.primitive.name for e in traced.jaxpr.jaxpr.eqns)
    clones = [e for e in planned.jaxpr.eqns if "recompute_" in str(e.source_info.name_stack)]
    assert clones
    assert sum(originals.values()) + len(clones) + count(planned, "optimization_barrier") == len(
        planned.jaxpr.eqns
    )
    for eqn in clones:
        assert "jvp(" in str(eqn.source_info.name_stack)
        assert eqn.source_info.traceback is not None


def test_the_forward_pass_is_left_alone() -> None:
    traced, graph = lowered(mlp, mlp_args())
    planned = emit(traced, graph, all_dropped(graph))
    stop = graph.forward_stop
    assert all(a is b for a, b in zip(planned.jaxpr.eqns[:stop], traced.jaxpr.jaxpr.eqns[:stop], strict=True))
    assert planned.jaxpr.invars == traced.jaxpr.jaxpr.invars


def test_effects_and_callbacks_run_once() -> None:
    calls: Counter[str] = Counter()

    def lookup(x: np.ndarray) -> np.ndarray:
        calls["pure"] += 1
        return np.sign(np.asarray(x))

    def note(x: Any) -> None:
        calls["debug"] += 1

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x, y = batch
            for i, w in enumerate(params):
                x = jnp.tanh(x @ w)
                if i == 2:
                    sign = jax.pure_callback(
                        lookup, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)
                    )
                    x = x * sign
                    jax.debug.callback(note, x.sum())
            return jnp.mean((x - y) ** 2)

        return jax.value_and_grad(loss)(params)

    args = mlp_args()
    traced, graph = lowered(step, args)
    planned = emit(traced, graph, all_dropped(graph))
    for primitive in ("pure_callback", "debug_callback"):
        assert count(traced.jaxpr, primitive) == count(planned, primitive) == 1
    assert planned.jaxpr.effects == traced.jaxpr.jaxpr.effects
    assert count(planned, "dot_general") > count(traced.jaxpr, "dot_general")
    executable = compiled(planned, args)
    for runs in (1, 2):
        jax.block_until_ready(executable(*jax.tree.leaves(args)))
        jax.effects_barrier()
        assert calls == {"pure": runs, "debug": runs}


def test_random_bits_are_made_again_from_their_keys() -> None:
    case = BY_NAME["masks"]
    args = case.make_args()
    traced, graph = lowered(case.step, args)
    planned = emit(traced, graph, all_dropped(graph))
    bits = sum(count(planned, p) - count(traced.jaxpr, p) for p in ("random_bits", "threefry2x32"))
    assert bits > 0
    want, got = jax.jit(case.step)(*args), compiled(planned, args)(*jax.tree.leaves(args))
    assert_same(jax.tree.leaves(want), got)


@pytest.mark.parametrize(("name", "share"), [("mlp_adamw", 0.6), ("masks", 0.7), ("custom_jvp", 0.6)])
def test_no_unplanned_forward_value_at_the_peak(name: str, share: float) -> None:
    """Every large forward value alive at the compiled program's peak is one that the plan saves."""
    case = BY_NAME[name]
    args = case.make_args()
    step = jaxremat.optimize(f"{share:.0%} of temporaries", donate_argnums=case.donate_argnums, allow=())(
        case.step
    )
    plan = step.plan(*args)
    assert not plan.drops_nothing
    peak = live_at_peak(parse(str(step.compile(*args).as_text())))
    forward = Counter(
        buffer.nbytes
        for buffer in peak.buffers
        if buffer.nbytes > peak.nbytes / 20
        and "jvp(" in (stack := buffer.instruction.op_name)
        and "transpose(" not in stack
        and "recompute_" not in stack
    )
    saved = Counter(action.nbytes for action in plan.actions if action.action == "save")
    assert not forward - saved


def test_what_is_kept_passes_the_barrier_before_it_is_recomputed_from() -> None:
    """Else what two stages recompute from it is the same, and the compiler makes it once and keeps it."""
    traced, graph = lowered(mlp, mlp_args())
    whole = close_over_dependencies(graph, ())
    k = next(k for k, nodes in enumerate(whole.recomputed) if len(nodes) > 3)
    last, *_ = reversed(whole.recomputed[k + 1])
    held = {v for v in graph.reads[last] if not graph.values[v].is_output}
    recomputed = [*whole.recomputed]
    recomputed[k + 1] = (last,)
    schedule = check(graph, Schedule(whole.saved, tuple(recomputed), frozenset((v, k + 1) for v in held)))
    maker: dict[Any, str] = {}
    clones = 0
    for eqn in emit(traced, graph, schedule).jaxpr.eqns:
        stage = re.search(r"recompute_\d+", str(eqn.source_info.name_stack))
        if stage:
            clones += 1
            read = {maker[a] for a in _compat.variables(eqn.invars) if a in maker}
            assert read <= {stage[0]}
            maker.update(dict.fromkeys(eqn.outvars, stage[0]))
    assert clones
