"""Plans for GPUs that are not there: XLA's compiler for them is asked, on machines that have none."""

import functools
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chains import updating
from comparing import assert_close
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from zoo import BY_NAME

import jaxremat
from examples.benchmarks.networks import program
from jaxremat import InfeasibleBudgetError, MemoryStats, Plan, TargetError
from jaxremat._compiler import _target
from jaxremat._compiler._hlo import Module, executed, parse
from jaxremat._compiler._program import Program
from jaxremat._compiler._roofline import roofline
from jaxremat._emit._emit import emit
from jaxremat._lower._lower import lower
from jaxremat._model._device_specs import DEVICES
from jaxremat._rewrite._kernel_choice import inline, replaced
from jaxremat._rewrite._trace import trace
from jaxremat._runtime import _worker
from jaxremat._solver import SaveAll

MATRIX = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
STEPS = {
    "resnet50": {"batch": 32, "pixels": 64, "blocks": (1, 1)},
    "gpt": {"batch": 16, "length": 512, "layers": 2, "width": 128, "context": 512},
}


def square(x: jax.Array) -> jax.Array:
    return jnp.sum(x @ x)


def a_step(name: str) -> Any:
    """A train step of the benchmarks, large enough for cuBLAS's scratch memory not to be all there is."""
    return program(name, scale="tiny", **STEPS[name])  # type: ignore[arg-type]


@functools.cache
def plain(name: str) -> Any:
    """The step, compiled for an H100 as it is."""
    step = a_step(name)
    jitted = jax.jit(step.step, donate_argnums=0)
    return _target.Target("h100").lower(jitted, step.abstract_args(), {}, {}).compile()


@functools.cache
def planned(name: str) -> Any:
    """The step with seven tenths of its temporaries, planned and compiled for an H100; attention is not in kernels."""
    step = a_step(name)
    stats = jaxremat.MemoryStats.of(plain(name))
    budget = stats.base_nbytes + int(0.7 * stats.temporaries_nbytes)
    allow = ("microbatches", "rows")
    optimized = jaxremat.optimize(budget, donate_argnums=(0,), target="h100", allow=allow)(step.step)
    optimized.plan(*step.abstract_args())
    return optimized


def test_targets_have_names_and_memory() -> None:
    wanted = {"h100", "h200", "a100-40", "a100-80", "l4", "t4", "rtx4090", "b200"}
    assert wanted <= set(jaxremat.targets())
    for name in jaxremat.targets():
        spec = DEVICES[name]
        assert spec.chip is not None
        assert f"core_count: {spec.chip.cores}\n" in spec.chip.config(spec.name)
    assert _target.Target("H100x8") == _target.Target("h100x8")
    with pytest.raises(TargetError, match=r"`target='h1000'` is unknown. Write one of h100, "):
        jaxremat.optimize("1GiB", target="h1000")


@pytest.mark.parametrize("name", jaxremat.targets())
def test_each_target_compiles(name: str) -> None:
    stats = jaxremat.memory(square, MATRIX, target=name)
    assert stats.arguments_nbytes == 4 * 2**20
    assert stats.temporaries_nbytes >= 4 * 2**20  # the product


def test_donation_counts() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x + 1

    assert jaxremat.memory(step, MATRIX, target="h100").aliased_nbytes == 0
    assert jaxremat.memory(step, MATRIX, donate_argnums=0, target="h100").aliased_nbytes == 4 * 2**20


@pytest.mark.usefixtures("few_compilations")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "resnet50" else []) for name in STEPS]
)
def test_the_budget_holds_on_an_h100(name: str, tmp_path: Any) -> None:
    step = a_step(name)
    args = step.abstract_args()
    optimized = planned(name)
    plan = optimized.plan(*args)
    assert not plan.drops_nothing
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes <= plan.budget_nbytes < plan.baseline_peak_nbytes
    assert plan.baseline_peak_nbytes == jaxremat.MemoryStats.of(plain(name)).peak_nbytes
    compiled = optimized.compile(*args)
    assert jaxremat.MemoryStats.of(compiled).peak_nbytes == plan.compiled_peak_nbytes
    assert "is_scheduled=true" in compiled.as_text()
    assert optimized.lower(*args).compile().as_text() == compiled.as_text()
    with pytest.raises(TargetError, match=r'planned for `target="h100"` and cannot run on this machine'):
        optimized(*step.make_args())
    # The plan is the same program's on every machine; here it runs on the CPU, without a solver.
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    here = jaxremat.optimize(plan=loaded, donate_argnums=(0,), planning=jaxremat.Planning(verify=False))(
        step.step
    )
    want = jax.jit(step.step)(*step.make_args())
    assert_close(here(*step.make_args()), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_that_drops_nothing_is_the_plain_program(name: str) -> None:
    step = a_step(name)
    traced = trace(jax.jit(step.step, donate_argnums=0), step.abstract_args(), {})
    graph = lower(traced, DEVICES["h100"], base_nbytes=0)
    assert len(graph.stages) > 1
    emitted = emit(traced, graph, SaveAll().solve(graph, None, time_limit=1.0).schedule)
    needs_replacement = replaced(graph.backend)  # such as the gradient of a cross entropy
    eqns = (inline(eqn) if needs_replacement(eqn) else [eqn] for eqn in traced.jaxpr.jaxpr.eqns)
    kernels = [eqn.primitive for group in eqns for eqn in group]
    assert [eqn.primitive for eqn in emitted.jaxpr.eqns] == kernels


def test_the_step_that_drops_nothing_has_the_plain_kernels() -> None:
    """The normalised step, which such a plan emits, compiles to what the user's own does."""
    step = a_step("gpt")
    jitted = jax.jit(step.step, donate_argnums=0)
    program = Program(step.step, donate_argnums=(0,), target=_target.Target("h100"))
    traced = trace(jitted, step.abstract_args(), {})
    same = program.lower(program.evaluating(traced.jaxpr, traced), step.abstract_args(), {}).compile()
    found, wanted = (roofline(parse(str(c.as_text())), DEVICES["h100"]) for c in (same, plain("gpt")))
    assert found.kernels == wanted.kernels
    assert found.flops == wanted.flops
    assert found.nbytes == pytest.approx(wanted.nbytes, rel=1e-3)


def reductions_at_once(module: Module) -> dict[str, int]:
    """For each scope of the user's the most of its reductions that one kernel does: mean and variance, say."""
    most: dict[str, int] = {}
    for ops in bodies(module):
        scopes = Counter(re.sub(r"/?recompute_\d+", "", name.rpartition("/")[0]) for name in ops["reduce"])
        most.update((scope, n) for scope, n in scopes.items() if n > most.get(scope, 0))
    return most


def exponentials(module: Module) -> Counter[tuple[int, int, int]]:
    """The kernels with exponentials in them, by how many, how many reductions and how many divisions."""
    counts = (tuple(len(ops[o]) for o in ("exponential", "reduce", "divide")) for ops in bodies(module))
    return Counter((e, r, d) for e, r, d in counts if e)


def bodies(module: Module) -> list[dict[str, list[str]]]:
    """What is in each fused kernel: the names in JAX of its operations, by opcode."""
    found = []
    for computation in executed(module):
        for kernel in computation.instructions:
            if kernel.opcode == "fusion":
                ops: dict[str, list[str]] = defaultdict(list)
                for each in module.computations[kernel.callees[0]].instructions:
                    ops[each.opcode].append(each.op_name)
                found.append(ops)
    return found


@pytest.mark.usefixtures("few_compilations")
def test_no_plan_breaks_a_softmax_or_a_norm() -> None:
    """What one kernel of the plain program does, no two kernels do in the planned one."""
    args, recomputing = a_step("gpt").abstract_args(), planned("gpt")
    before, after = parse(plain("gpt").as_text()), parse(recomputing.compile(*args).as_text())
    was, now = reductions_at_once(before), reductions_at_once(after)
    norms = [scope for scope in was if "norm" in scope]
    assert len(norms) == 2 * (2 * STEPS["gpt"]["layers"] + 1)  # forward and backward
    assert all(was[scope] == 2 for scope in norms)
    assert {scope: n for scope, n in was.items() if now.get(scope, 0) < n} == {}
    was, now = exponentials(before), exponentials(after)
    assert was[1, 2, 0] == was[1, 1, 1] == STEPS["gpt"]["layers"]  # maximum and sum; their softmax
    assert set(now) == set(was)
    assert now >= was


def test_only_stages_that_recompute_have_fences_on_a_gpu() -> None:
    step = a_step("gpt")
    traced = trace(jax.jit(step.step, donate_argnums=0), step.abstract_args(), {})
    graph = lower(traced, DEVICES["h100"], base_nbytes=0)
    large = max(graph.residuals, key=lambda v: (graph.values[v].nbytes, v))
    schedule = jaxremat.close_over_dependencies(graph, set(graph.residuals) - {large})
    barriers = {
        fence
        for eqn in emit(traced, graph, schedule).jaxpr.eqns
        if eqn.primitive.name == "optimization_barrier"
        for fence in re.findall(r"barrier_\d+", str(eqn.source_info.name_stack))
    }
    assert len(graph.stages) > 3
    assert 1 <= len(barriers) <= 2 + sum(bool(nodes) for nodes in schedule.recomputed)


def test_a_plan_costs_what_it_recomputes() -> None:
    """Half of a chain's products are run again, and nothing else becomes slower."""

    def step(state: Any, x: jax.Array) -> Any:
        weights, moments = state

        def loss(weights: Any) -> jax.Array:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        updates, moments = optax.sgd(0.1, momentum=0.9).update(jax.grad(loss)(weights), moments)
        return optax.apply_updates(weights, updates), moments

    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 16
    state = jax.eval_shape(lambda w: (w, optax.sgd(0.1, momentum=0.9).init(w)), weights)
    args = state, jax.ShapeDtypeStruct((65536, 512), jnp.float32)
    plain = jaxremat.memory(step, *args, donate_argnums=0, target="h100")
    plan = jaxremat.plan(
        step, *args, budget=plain.base_nbytes + plain.temporaries_nbytes // 2, donate_argnums=0, target="h100"
    )
    assert plan.compiled_overhead is not None
    assert 0.05 < plan.overhead < 0.3
    assert plan.compiled_overhead == pytest.approx(plan.overhead, abs=0.03)


def test_shares_are_of_the_targets_memory() -> None:
    case = BY_NAME["mlp_adamw"]
    plan = jaxremat.plan(case.step, *case.make_args(), budget=0.5, target="t4")
    assert plan.budget_nbytes == 8_000_000_000
    assert plan.drops_nothing


@pytest.mark.jax_0_10("memory of a step on the CPU")
def test_on_the_target_itself_the_peak_is_compared_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own compiler has the last word; here the CPU stands in for the target."""

    @updating
    def step(weights: Any, x: jax.Array) -> Any:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    args = [jnp.ones((64, 64)) / 64] * 12, jnp.ones((8192, 64))
    peak = jaxremat.memory(step, *args, target="h100").peak_nbytes
    here = jaxremat.memory(jax.jit(step), *args).peak_nbytes
    monkeypatch.setattr("jaxremat._api._step.find", lambda kind: "h100")
    roomy = jaxremat.optimize(2 * max(peak, here), target="h100")(step)
    assert_close(roomy(*args), step(*args), rtol=1e-4, atol=1e-6)
    tight = jaxremat.optimize(int(0.7 * peak), target="h100")(step)
    assert not tight.plan(*args).drops_nothing
    own = MemoryStats.of

    def needs_more(made: Any) -> MemoryStats:
        found = own(made)
        return replace(found, temporaries_nbytes=10 * found.temporaries_nbytes)

    with monkeypatch.context() as otherwise:
        otherwise.setattr(MemoryStats, "of", needs_more)
        with pytest.raises(InfeasibleBudgetError, match=r"this machine's compiler needs .* without `target`"):
            tight(*args)
    # XLA:CPU without the options that plans have here strips barriers: that is another program
    assert_close(tight(*args), step(*args), rtol=1e-4, atol=1e-6)
    plan = tight.plan(*args)
    assert plan.peak_nbytes <= int(0.7 * peak) and "without the device" not in plan.compiler


@pytest.mark.jax_0_10("XLA has products without a tiling")
def test_a_product_that_triton_has_no_tiling_for(caplog: pytest.LogCaptureFixture) -> None:
    """XLA refuses attention over an odd length before it has tried anything else than Triton."""

    @updating
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", x, x))
        y = jnp.einsum("bhlm,bmhd->blhd", weights, x)
        return jnp.mean((y.reshape(2, 37, 32) @ w) ** 2)

    args = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((2, 37, 2, 16), jnp.float32)
    with caplog.at_level("INFO", logger="jaxremat"):
        found = jaxremat.memory(step, *args, target="h100")
    assert "without Triton's matrix products" in caplog.text
    assert found.peak_nbytes > 2 * 32 * 32 * 4


@pytest.mark.jax_0_10("XLA fails a check of its own")
def test_a_product_in_which_triton_s_tiling_fails_a_check(caplog: pytest.LogCaptureFixture) -> None:
    """XLA ends the process over the gradient of a product that reads every other row and column of images."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x[:, ::2, ::2] @ w)

    args = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((32, 28, 28, 64), jnp.float32)
    with caplog.at_level("INFO", logger="jaxremat"):
        found = jaxremat.memory(jax.grad(loss), *args, target="h100")
    assert "without Triton's matrix products" in caplog.text
    assert found.outputs_nbytes == 64 * 128 * 4


def test_what_cannot_be_compiled_is_said() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()

    with pytest.raises(TargetError, match=r"target='h100'.*Host callbacks"):
        jaxremat.memory(step, MATRIX, target="h100")
    assert jaxremat.memory(square, MATRIX, target="h100").peak_nbytes > 0


def worker() -> _worker.Worker:
    """The process that compiled last."""
    return _worker._idle[_target.WORKER][-1]


@pytest.mark.uncached
def test_a_dead_worker_is_replaced() -> None:
    _target._compile.cache_clear()
    jaxremat.memory(square, MATRIX, target="h100")
    dead = worker()
    os.kill(dead.process.pid, signal.SIGKILL)
    dead.process.wait()
    _target._compile.cache_clear()
    assert jaxremat.memory(square, MATRIX, target="h100").peak_nbytes > 0
    assert worker() is not dead


def test_where_a_worker_dies_while_it_compiles_the_model_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "crash.py"
    script.write_text(
        "import os, sys\n"
        "def answer(request):\n"
        "    print('Check failed: it is (0 vs. 1)', *range(50), sep='\\n', file=sys.stderr, flush=True)\n"
        "    os.abort()\n"
    )
    monkeypatch.setattr(_target, "WORKER", script)
    stats = jaxremat.memory(lambda x: jnp.cos(x).sum(), MATRIX, target="h100")
    assert "refuses the step: SIGABRT: Check failed: it is (0" in stats.modelled
    assert stats.arguments_nbytes == 4 * 2**20


@pytest.mark.uncached
def test_a_worker_that_is_asked_no_further_answers_nothing_to_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in a terminal reaches the worker too, which goes on; who asked it hears no answer."""
    _target._compile.cache_clear()
    want = jaxremat.memory(square, MATRIX, target="h100")
    first = worker()
    os.kill(first.process.pid, signal.SIGINT)
    _target._compile.cache_clear()
    assert jaxremat.memory(square, MATRIX, target="h100") == want
    assert worker() is first
    _target._compile.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(first, "_receive", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
        jaxremat.memory(lambda x: jnp.sin(x), MATRIX, target="h100")
    assert jaxremat.memory(square, MATRIX, target="h100") == want
    assert worker() is not first


def test_the_plain_step_is_compiled_once_for_several_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mlp_adamw"]
    args = jax.eval_shape(case.make_args)
    plain = jaxremat.memory(case.step, *args, donate_argnums=0, target="h100")
    asked: list[bytes] = []

    def counting(script: Path, request: Any, seconds: float = math.inf) -> Any:
        asked.append(request[2])
        return _worker.ask(script, request, seconds)

    monkeypatch.setattr(_target, "ask", counting)
    _target._compile.cache_clear()
    for share in (0.8, 0.7):
        budget = plain.base_nbytes + int(share * plain.temporaries_nbytes)
        before = len(asked)
        plan = jaxremat.plan(case.step, *args, budget=budget, donate_argnums=0, target="h100")
    assert len(asked) - before < plan.compile_count
    assert len(set(asked)) == len(asked)


def test_without_the_compiler_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_target, "version_of", lambda name: None)
    with pytest.raises(TargetError, match=r'pip install "\.\[targets\]"'):
        jaxremat.memory(square, MATRIX, target="h100")
    monkeypatch.setattr(_target, "version_of", lambda name: "0.1.0")
    with pytest.raises(TargetError, match=r'jax-cuda12-pjrt 0.1.0 .* pip install "jax-cuda12-pjrt=='):
        jaxremat.memory(square, MATRIX, target="h100")


LEFT_ALONE = """
import jax, jaxremat
from jaxremat._compiler._target import WORKER
from jaxremat._runtime import _worker
found = jaxremat.memory(lambda x: (x @ x).sum(), jax.ShapeDtypeStruct((64, 64), "float32"), target="h100")
print(found.peak_nbytes > 0, jax.default_backend(), _worker._idle[WORKER][0].process.pid)
"""


def test_the_users_own_process_is_left_alone() -> None:
    """The default back end is what it was, and the worker ends with the process."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, check=True, timeout=300
    )
    worked, backend, pid = done.stdout.split()
    assert (worked, backend) == ("True", "cpu")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_the_roofline_reads_gpu_programs() -> None:
    lowered = _target.Target("h100").lower(jax.jit(square), (MATRIX,), {}, {})
    work = roofline(parse(lowered.compile().as_text()), DEVICES["h100"])
    assert work.flops >= 2 * 1024**3
    assert work.seconds > 2 * 1024**3 / DEVICES["h100"].peak("f32")


def on_a_mesh(devices: int) -> tuple[Any, tuple[Any, ...]]:
    """A step whose weights and rows are divided over devices that are not here."""
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    divided = NamedSharding(mesh, PartitionSpec("data"))

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.mean(y * y)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=divided)
    return step, ([matrix] * 4, jax.ShapeDtypeStruct((65536, 1024), jnp.float32, sharding=divided))


@pytest.mark.parametrize(("target", "devices"), [("h100x8", 8), ("h100:2x8", 16)])
def test_a_step_is_compiled_for_several_devices(target: str, devices: int) -> None:
    step, args = on_a_mesh(devices)
    stats = jaxremat.memory(step, *args, target=target)
    assert stats.arguments_nbytes == (4 * 1024 * 1024 + 65536 * 1024) * 4 // devices


def test_a_step_for_several_devices_is_planned_by_one_of_them() -> None:
    step, args = on_a_mesh(8)
    stats = jaxremat.memory(step, *args, target="h100x8")
    budget = stats.base_nbytes + int(0.8 * stats.temporaries_nbytes)
    planned = jaxremat.optimize(budget, target="h100x8")(step)
    plan = planned.plan(*args)
    assert plan.devices == 8 and plan.peak_nbytes <= budget
    assert "per device (of 8)" in str(plan) and "per device (of 8)" in str(plan.report())
    assert "all-gather" in planned.compile(*args).as_text()


@pytest.mark.parametrize(
    ("target", "devices", "said"),
    [
        ("h100x4", 8, 'has 4 devices, but the step\'s mesh has 8. Write `target="h100x8"`'),
        ("h100", 8, "has one device, but the step's mesh has 8"),
        ("h100x8", 1, "no argument of the step is sharded"),
        ("h100x0", 8, "is unknown"),
        ("x8", 8, "is unknown"),
        (None, 8, "`AbstractMesh`, which has no devices"),
    ],
)
def test_meshes_that_are_not_the_targets_are_refused(target: str | None, devices: int, said: str) -> None:
    step, args = on_a_mesh(devices)
    if devices == 1:
        args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    with pytest.raises(TargetError, match=re.escape(said)):
        jaxremat.memory(step, *args, target=target)
