"""Steps on eight devices of the host, in a process of their own that says in JSON what became of each.

    echo CASE | python sharded.py

The number of the host's devices is fixed when JAX starts, so that tests start this, once for all the cases they ask.
"""

import argparse
import atexit
import functools
import json
import logging
import os
import re
import select
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import IO, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import recorded
from attentions import FOUND
from flax import linen as nn
from flax import nnx
from flax.linen import spmd
from forms import of_chunks
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxremat
from examples import llama_70b
from jaxremat._compiler._devices import detect
from jaxremat._compiler._gathers import gathers
from jaxremat._compiler._program import Program, placed
from jaxremat._compiler._shardings import Division
from jaxremat._model._variant import ATTENTION, PLAIN, Choice, Variant
from jaxremat._plan import _ledger
from jaxremat._plan._problem import Problem
from jaxremat._program import _compat
from jaxremat._rewrite._loop_closing import close_loops
from jaxremat._rewrite._trace import trace
from jaxremat._solver import _milp

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def ask(case: str) -> dict[str, Any]:
    """What a case says."""
    process, printed = _started()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    line = process.stdout.readline() if select.select([process.stdout], [], [], 400)[0] else ""
    if not line:
        process.kill()
        _started.cache_clear()
        printed.seek(0)
        raise AssertionError(f"no answer to {case!r}: {printed.read()[-4000:]}")
    found = json.loads(line)
    assert "failed" not in found, found["failed"]
    return found


@functools.cache
def _started() -> tuple[subprocess.Popen[str], IO[str]]:
    """The process, and where it prints what is no answer."""
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
    process = subprocess.Popen(
        [sys.executable, __file__],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed,
        text=True,
    )
    atexit.register(process.kill)
    return process, printed


def collectives(text: str) -> dict[str, int]:
    """How many arrays devices send each other, by kind."""
    counts: Counter[str] = Counter()
    for found in re.finditer(rf"= .*? ({KINDS})(?:-start)?\(([^)]*)\)", text):
        counts[found[1]] += found[2].count("%")
    return dict(counts)


def operations(text: str) -> dict[str, int]:
    """How many operations send something, by kind; a combined one is of many arrays."""
    return dict(Counter(found[1] for found in re.finditer(rf"= .*? ({KINDS})(?:-start)?\(", text)))


def said(case: str) -> dict[str, Any]:
    """What becomes of the case."""
    for name, found in (
        ("nnx", of_objects),
        ("in shards", in_shards),
        ("pooled", pooled),
        ("dropout", dropout),
        ("logical", logical),
        ("microbatches", microbatches),
        ("attention", attention),
        ("llama", llama),
        ("pipeline", pipeline),
        ("perceptron", perceptron),
    ):
        if case.startswith(name):
            return found(case)
    kind = AxisType.Explicit if case in ("explicit", "typed") else AxisType.Auto
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(kind,))
    width, rows, layers = 128, 1000 if case == "uneven" else 1024, 3

    def on(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    def layer(x: Any, weights: Any) -> Any:
        a, b = weights
        if case == "explicit":
            a, b = jax.sharding.reshard(a, on()), jax.sharding.reshard(b, on())
        return jax.nn.gelu(x @ a) @ b + x

    def loss(weights: Any, x: Any) -> Any:
        if case == "uneven":  # 1001 rows on 8 devices
            x = jax.lax.with_sharding_constraint(jnp.concatenate([x, x[:1]]), on("data"))
        if case == "scan":
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        elif case == "shard_map":
            x = layer(x, weights[0])
            x = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
        else:
            for w in weights:
                x = layer(x, w)
        return (x**2).mean()

    def step(weights: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    def array(seed: int, shape: tuple[int, ...], *axes: Any) -> Any:
        values = np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 8
        return jax.device_put(values, on(*axes))

    stack = (layers,) if case == "scan" else ()
    divided = (None, "data") if case == "scan" else ("data",)
    shapes = ((*stack, width, 4 * width), (*stack, 4 * width, width))
    pairs = [tuple(array(2 * i + j, s, *divided) for j, s in enumerate(shapes)) for i in range(layers)]
    args = (pairs[0] if case == "scan" else pairs, array(99, (rows, width), "data"))
    program = placed(Program(step), args, {})
    found = trace(program.plain, args, {})
    found = found.gathered(gathers(found, program, args, {}), 8)
    division = Division(program, args, {})
    local, flops = division.local(found)
    assert flops is not None
    parts = [
        (eqn.primitive.name, list(eqn.outvars[0].aval.shape), list(there.outvars[0].aval.shape), work)
        for eqn, there, work in zip(found.jaxpr.jaxpr.eqns, local.jaxpr.jaxpr.eqns, flops, strict=True)
        if hasattr(eqn.outvars[0].aval, "shape")
    ]
    plain = program.plain.lower(*args).compile()
    stats = jaxremat.memory(step, *args)
    budgets = {
        "all": 2 * stats.peak_nbytes,
        "most": stats.peak_nbytes * 9 // 10,
        "some": stats.base_nbytes + stats.temporaries_nbytes * 7 // 10,
    }
    plans = {}
    bare = Problem(program, args, {}, detect(jax.devices()[0]), "roofline").bare(PLAIN)
    for name, budget in budgets.items():
        planned = jaxremat.optimize(budget, planning=jaxremat.Planning(solver=jaxremat.Greedy()))(step)
        plan = planned.plan(*args)
        read = jaxremat.Plan.from_json(plan.to_json())
        followed = jaxremat.optimize(plan=read)(step)
        laid = read.layout(bare)
        expected, got = jax.tree.leaves(program.plain(*args)), jax.tree.leaves(planned(*args))
        same = all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(expected, got, strict=True))
        placed_alike = all(a.sharding == b.sharding for a, b in zip(expected, got, strict=True))
        plans[name] = {
            "text": str(plan),
            "budget": budget,
            "peak": plan.peak_nbytes,
            "predicted": plan.rounds[0].predicted_peak_nbytes if plan.rounds else plan.predicted_peak_nbytes,
            "compiled": plan.rounds[0].compiled_peak_nbytes if plan.rounds else plan.peak_nbytes,
            "again": plan.gathered_again,
            "counted": [list(each) for each in plan.collectives],
            "operations": operations(planned.compile(*args).as_text()),
            "same": same and placed_alike,
            "sent": collectives(planned.compile(*args).as_text()),
            "once": [n.id for n in laid.nodes if not n.repeatable],
            "unrepeated": plan.unrepeated,
            "followed": followed.lower(*args).as_text() == planned.lower(*args).as_text(),
        }
    return {
        "parts": parts,
        "sent": collectives(plain.as_text()),
        "operations": operations(plain.as_text()),
        "plans": plans,
    }


def of_objects(case: str) -> dict[str, Any]:
    """An NNX model with its optimizer, its weights divided by what the step says of its arguments, or by the model."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, width = 1024, 128
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    own = case == "nnx with_partitioning"

    def init(*axes: Any) -> Any:
        drawn = nnx.initializers.lecun_normal()
        return nnx.with_partitioning(drawn, axes, mesh=mesh) if own else drawn

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.List(
                [nnx.Linear(width, 4 * width, kernel_init=init("data"), rngs=rngs) for _ in range(2)]
            )
            self.down = nnx.List(
                [nnx.Linear(4 * width, width, kernel_init=init("data"), rngs=rngs) for _ in range(2)]
            )

        def __call__(self, x: Any) -> Any:
            for up, down in zip(self.up, self.down, strict=True):
                x = x + down(jax.nn.gelu(up(x)))
            return x

    def made() -> Any:
        net = Net(nnx.Rngs(0))
        return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    def step(net: Any, optimizer: Any, x: Any, power: int) -> Any:
        loss, gradients = nnx.value_and_grad(lambda net: (net(x) ** power).mean())(net)
        optimizer.update(net, gradients)
        return loss

    options: dict[str, Any] = {"static_argnums": 3}
    if not own:
        kernels = nnx.StateSharding({nnx.PathContains("kernel"): spread, ...: whole})
        options |= {"in_shardings": (kernels, kernels, spread), "out_shardings": whole}
    x = jax.device_put(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32), spread)
    plain: Any = nnx.jit(step, graph=True, graph_updates=True, **options)
    with mesh:
        planned = jaxremat.optimize("1GiB", **options)(step)
        most = planned.plan(*made(), x, 2)
        assert most.memory is not None
        budget = most.peak_nbytes - int(0.3 * most.memory.temporaries_nbytes)
        planned = jaxremat.optimize(budget, **options)(step)
        one, other = made(), made()
        losses = [
            [float(run(*objects, x, 2)) for _ in range(3)]
            for run, objects in ((plain, one), (planned, other))
        ]
    plan = planned.plan(*other, x, 2)
    weights = [jax.tree.leaves(nnx.state(objects)) for objects in (one, other)]
    return {
        "losses": losses,
        "same": all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*weights, strict=True)),
        "placed_alike": [str(a.sharding) for a in weights[0]] == [str(b.sharding) for b in weights[1]],
        "divided": sum(not a.is_fully_replicated for a in weights[1]),
        "text": str(plan),
        "peak": plan.peak_nbytes,
        "budget": budget,
        "drops_nothing": plan.drops_nothing,
    }


def microbatches(case: str) -> dict[str, Any]:
    """A step whose batch is divided over devices, in microbatches: as the words behind the first say, of layers in a
    loop, of weights that are divided too, of hidden units that are.
    """
    words = set(case.split()[1:])
    shape = (4, 2) if "tp" in words else (8, 1)
    axes = (AxisType.Auto,) * 2
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"), axis_types=axes)

    def on(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    width, rows, layers = 64, 4096, 4

    def layer(x: Any, pair: Any) -> Any:
        a, b = pair
        h = jax.nn.gelu(x @ a)
        if "tp" in words:
            h = jax.lax.with_sharding_constraint(h, on("data", "model"))
        return x + h @ b

    def loss(weights: Any, x: Any) -> Any:
        if "scan" in words:
            x, _ = jax.lax.scan(lambda x, pair: (layer(x, pair), None), x, weights)
        else:
            for pair in weights:
                x = layer(x, pair)
        return (x**2).mean(), (x**2).mean(1)

    def step(weights: Any, x: Any) -> Any:
        (value, each), gradients = jax.value_and_grad(loss, has_aux=True)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value, each

    divided = "data" if "fsdp" in words else None
    specs = [(divided, "model"), ("model", divided)]
    stack = (layers,) if "scan" in words else ()
    more = (None,) * len(stack)

    def pair(seed: int) -> Any:
        rng, shapes = np.random.default_rng(seed), ((width, 4 * width), (4 * width, width))
        made = (rng.normal(size=(*stack, *shape)).astype(np.float32) / 12 for shape in shapes)
        return tuple(jax.device_put(a, on(*more, *spec)) for a, spec in zip(made, specs, strict=True))

    x = np.random.default_rng(9).normal(size=(rows, width)).astype(np.float32)
    args = (pair(0) if stack else [pair(i) for i in range(layers)]), jax.device_put(x, on("data"))
    program = placed(Program(step, donate_argnums=(0,)), args, {})
    found = trace(program.plain, args, {})
    found = found.gathered(gathers(found, program, args, {}), 8)
    found = Division(program, args, {}).with_parts(found)
    plain = program.plain.lower(*args).compile()
    wanted = plain(*jax.tree.map(jnp.copy, args))
    forms = []
    for region in found.sites.regions:
        for count in region.choices[:2]:
            form = found.in_form(of_chunks(*(count * (each is region) for each in found.sites.regions)))
            run = program.evaluating(form.jaxpr if not form.loops else closed(form), form)
            made = run.lower(*args).compile()
            got = made(*jax.tree.map(jnp.copy, args))
            both = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True))
            forms.append(
                {
                    "count": count,
                    "parts": region.parts,
                    "same": all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in both),
                    "sent": collectives(made.as_text()),
                }
            )
    stats = jaxremat.memory(step, *args, donate_argnums=0)
    budget = stats.base_nbytes + stats.temporaries_nbytes // 3
    planned = jaxremat.optimize(budget, donate_argnums=0)(step)
    plan = planned.plan(*args)
    got = planned(*jax.tree.map(jnp.copy, args))
    both = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True))
    return {
        "sent": collectives(plain.as_text()),
        "forms": forms,
        "budget": budget,
        "peak": plan.peak_nbytes,
        "text": str(plan),
        "same": all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in both),
        "placed_alike": all(a.sharding == b.sharding for a, b in both),
    }


def llama(case: str) -> dict[str, Any]:
    """A small twin of the step of 405 billion weights on 64 devices (`examples/llama_70b.py`), in float32: FSDP and TP,
    and moments in host memory.
    """
    del case
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("hosts", "devices"), axis_types=(AxisType.Auto,) * 2)
    sizes = argparse.Namespace(layers=4, width=64, hidden=192, heads=8, groups=4, words=512)
    rng = np.random.default_rng(0)

    def array(like: jax.ShapeDtypeStruct) -> jax.Array:
        made = rng.normal(size=like.shape).astype(np.float32) / like.shape[-1] ** 0.5
        return jax.device_put(made, like.sharding)

    weights = jax.tree.map(array, llama_70b.shapes(sizes, cast("Any", mesh)))
    moments = optax.adamw(1e-4).init(weights)
    copies = jax.tree.map(jnp.copy, weights)
    tokens = rng.integers(0, sizes.words, (4, 256)).astype(np.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("hosts", None)))
    step = functools.partial(llama_70b.train_step, False, NamedSharding(mesh, P("hosts", None, None)))
    there = jaxremat.to_host(moments, least_nbytes=1000)
    args = (weights, copies, there), tokens
    wanted = jax.jit(step)((weights, copies, moments), tokens)
    stats = jaxremat.memory(step, *args, donate_argnums=0)
    budget = stats.base_nbytes + stats.temporaries_nbytes // 3
    planned = jaxremat.optimize(budget, donate_argnums=0)(step)
    plan = planned.plan(*args)
    kinds = [a.sharding.memory_kind for a in jax.tree.leaves(there)]
    got = planned(*args)
    both = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True))
    return {
        "budget": budget,
        "peak": plan.peak_nbytes,
        "same": all(np.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in both),
        "on_host": kinds.count("pinned_host"),
        "kinds": kinds == [a.sharding.memory_kind for a in jax.tree.leaves(got[0][2])],
        "placed_alike": all(a.sharding.spec == b.sharding.spec for a, b in both if a.ndim),
    }


def attention(case: str) -> dict[str, Any]:
    """A decoder with its heads (*tp*), weights (*fsdp*), *queries* (and all keys *gathered*) or the *sequence* divided
    too, its layers in a loop (*scan*): the plan of the first attention of `attentions.FOUND` that the words behind
    name, within less than its scores need; and what devices send and compute where the others are done without their
    scores. Or only whether they are (*found*).
    """
    how, _, kinds = case.removeprefix("attention ").partition(": ")
    words = set(how.split())
    shape = (8, 1) if words <= {"fsdp", "scan"} else (2, 4)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    batch, length, heads, width, layers = 8, 256, 4, 8, 3 if "scan" in words else 2
    inner, data = heads * width, "data" if "fsdp" in words else None
    model = "model" if "tp" in words else None
    stack = (layers,) if "scan" in words else ()
    rng = np.random.default_rng(0)

    def array(shape: tuple[int, ...], *axes: Any) -> jax.Array:
        values = (rng.normal(size=(*stack, *shape)) / inner**0.5).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, P(*(None,) * len(stack), *axes)))

    def layer_weights() -> Any:
        read = {name: array((inner, heads, width), data, model, None) for name in ("q", "k", "v")}
        return read | {"o": array((heads, width, inner), model, None, data)}

    def trained(kind: str) -> Any:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            q, k, v = (jnp.einsum("bti,ihd->bthd", x, w[name]) for name in ("q", "k", "v"))
            there = NamedSharding(mesh, P("data", "model"))
            if "queries" in words:
                q = jax.lax.with_sharding_constraint(q, there)
            if "gathered" in words:
                k, v = (jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P("data"))) for a in (k, v))
            if "sequence" in words:
                q, k, v = (jax.lax.with_sharding_constraint(a, there) for a in (q, k, v))
            return x + jnp.tanh(jnp.einsum("bthd,hdi->bti", FOUND[kind](2 * q, k, v), w["o"])), None

        def loss_of(weights: Any, x: jax.Array) -> jax.Array:
            if stack:
                return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()
            for w in weights:
                x, _ = layer(x, w)
            return (x**2).mean()

        def step(weights: Any, x: jax.Array) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

        return step

    x = rng.normal(size=(batch, length, inner)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    args = layer_weights() if stack else [layer_weights() for _ in range(layers)], x

    def alike(wanted: Any, got: Any) -> bool:
        both = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True))
        close = all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in both)
        return close and all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in both)

    forms = {}
    first, *others = kinds.split(", ")
    for kind in [first, *others] if "found" in words else others:
        program = placed(Program(trained(kind)), args, {})
        traced = Problem(program, args, {}, detect(jax.devices()[0]), "roofline").traced
        form = traced.in_form(Variant.of(Choice(ATTENTION, 0, (1,))))
        done = sum(eqn.primitive.name == "attention" for eqn in form.jaxpr.jaxpr.eqns)
        if "found" in words:
            forms[kind] = done
            continue
        run = program.evaluating(form.jaxpr if not form.loops else closed(form), form)
        plain, made = (f.lower(*args).compile() for f in (program.plain, run))
        forms[kind] = {
            "done": done,
            "same": alike(plain(*args), made(*args)),
            "sent": [collectives(f.as_text() or "") for f in (plain, made)],
        }
    if "found" in words:
        return forms
    step = trained(first)
    scores = 4 * batch * heads * length * length // 8
    budget = jaxremat.memory(step, *args).base_nbytes + 2 * scores
    planned = jaxremat.optimize(budget, allow=("attention",))(step)
    plan = planned.plan(*args)
    read = jaxremat.optimize(plan=jaxremat.Plan.from_json(plan.to_json()))(step)
    plain = jax.jit(step)
    return {
        "forms": forms,
        "budget": budget,
        "peak": plan.peak_nbytes,
        "plain": jaxremat.memory(step, *args).peak_nbytes,
        "form": [choice.rule for choice in plan.form.choices],
        "again": {"all-gather": plan.gathered_again, "all-reduce": plan.summed_again},
        "same": alike(plain(*args), planned(*args)),
        "sent": [
            collectives(text or "")
            for text in (plain.lower(*args).compile().as_text(), planned.compile(*args).as_text())
        ],
        "followed": read.lower(*args).as_text() == planned.lower(*args).as_text(),
        "text": str(plan),
    }


def closed(form: Any) -> Any:
    """The program of a form, with its loops closed."""
    jaxpr = form.jaxpr.jaxpr
    eqns = close_loops(jaxpr.eqns, form.loop_of, form.loops)
    return _compat.new_jaxpr(jaxpr.constvars, form.jaxpr.consts, jaxpr.invars, jaxpr.outvars, eqns)


def in_shards(case: str) -> dict[str, Any]:
    """A step in a `shard_map`, as data-parallel training is written by hand: *checked* for what differs between devices
    or not, its layers in a *scan*, and its *update* outside; or the whole *gradient* outside, so that each pass is a
    `shard_map` of its own, on a mesh of two axes.
    """
    across = "gradient" in case
    axes = ("host", "data") if across else ("data",)
    mesh = Mesh(np.array(jax.devices()).reshape((2, 4) if across else (8,)), axes)
    rows, width, layers = 4096, 128, 4
    checked, scanned, outside = ("checked" in case, "scan" in case, "update" in case)
    tx = optax.adam(1e-2)
    table = np.linspace(0.9, 1.1, width, dtype=np.float32)  # a constant of the body

    def loss_of(weights: Any, x: Any) -> jax.Array:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jax.nn.gelu(x @ w["up"]) @ w["down"] * table + x, None

        if scanned:
            x, _ = jax.lax.scan(layer, x, weights)
        else:
            for i in range(layers):
                x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
        return (x**2).mean()

    def differing(weights: Any) -> Any:
        """The weights as each device's own, so that their gradients are added up once, when all are there."""
        return jax.tree.map(lambda w: jax.lax.pcast(w, axes, to="varying"), weights) if checked else weights

    def gradient(weights: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(differing(weights), x)
        return jax.lax.pmean(loss, "data"), jax.lax.pmean(gradients, "data")

    def updated(weights: Any, moments: Any, gradients: Any) -> Any:
        updates, moments = tx.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments

    def local(weights: Any, moments: Any, x: Any) -> Any:
        loss, gradients = gradient(weights, x)
        return *updated(weights, moments, gradients), loss

    def step(weights: Any, moments: Any, x: Any) -> Any:
        if across:
            mapped = jax.shard_map(
                lambda weights, x: jax.lax.pmean(loss_of(differing(weights), x), axes),
                mesh=mesh,
                in_specs=(P(), P(axes)),
                out_specs=P(),
                check_vma=checked,
            )
            loss, gradients = jax.value_and_grad(mapped)(weights, x)
            return *updated(weights, moments, gradients), loss
        if not outside:
            ins, outs = (P(), P(), P("data")), (P(), P(), P())
            mapped = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=checked)
            return mapped(weights, moments, x)
        mapped = jax.shard_map(
            gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=checked
        )
        loss, gradients = mapped(weights, 2.0 * x)
        return *updated(weights, moments, gradients), loss

    rng = np.random.default_rng(0)

    def array(shape: tuple[int, ...], *axes: Any) -> Any:
        return jax.device_put(rng.normal(0, 0.05, shape).astype(np.float32), NamedSharding(mesh, P(*axes)))

    weights = {"up": array((layers, width, 2 * width)), "down": array((layers, 2 * width, width))}
    moments = jax.device_put(tx.init(weights), NamedSharding(mesh, P()))
    return within(0.7, step, weights, moments, array((rows, width), axes))


def pipeline(case: str) -> dict[str, Any]:
    """Layers on devices of their own, which microbatches pass one after the other: a scan with a `ppermute`, in a
    `shard_map` that is *checked* for what differs between devices or not.
    """
    checked, stages, batches, rows, width, layers = "checked" in case, 8, 8, 32, 64, 2
    mesh = Mesh(np.array(jax.devices()), ("stage",))

    def stage(weights: Any, x: jax.Array) -> jax.Array:
        for i in range(layers):
            x = x + jnp.tanh(jax.nn.gelu(x @ weights["up"][0, i]) @ weights["down"][0, i])
        return x

    def loss_of(weights: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        place = jax.lax.axis_index("stage")

        def tick(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = stage(weights, jnp.where(place == 0, inputs[jnp.minimum(t, batches - 1)], state))
            ring = [(i, (i + 1) % stages) for i in range(stages)]
            return jax.lax.ppermute(made, "stage", ring), jnp.where(place == stages - 1, made, 0)

        state = jnp.zeros_like(inputs[0])
        state = jax.lax.pcast(state, "stage", to="varying") if checked else state
        _, made = jax.lax.scan(tick, state, jnp.arange(batches + stages - 1))
        return ((jax.lax.psum(made[stages - 1 :], "stage") - targets) ** 2).mean()

    def step(weights: Any, data: Any) -> Any:
        mapped = jax.shard_map(
            loss_of, mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=P(), check_vma=checked
        )
        loss, gradients = jax.value_and_grad(mapped)(weights, *data)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    rng = np.random.default_rng(0)

    def array(shape: tuple[int, ...], *axes: Any) -> jax.Array:
        values = (rng.normal(size=shape) / width**0.5).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, P(*axes)))

    shapes = {"up": (stages, layers, width, 4 * width), "down": (stages, layers, 4 * width, width)}
    weights = {name: array(shape, "stage") for name, shape in shapes.items()}
    data = array((batches, rows, width)), array((batches, rows, width))
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jaxremat").addHandler(listener)
    least = jaxremat.plan(step, weights, data, budget="min", donate_argnums=0)
    return within(0.5, step, weights, data) | {"least": least.peak_nbytes, "said": said}


def perceptron(_: str) -> dict[str, Any]:
    """Layers whose weights and batch are on all devices, by axes in types: their products have the weights gathered."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
    rng, tx = np.random.default_rng(0), optax.adamw(1e-3)

    def array(*shape: int) -> jax.Array:
        values = (rng.normal(size=shape) / 16).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, P("data", None)))

    weights = [(array(128, 512), array(512, 128)) for _ in range(5)]

    def step(weights: Any, moments: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            h = x
            for up, down in weights:
                h = h + jax.nn.gelu(h @ up) @ down
            return jnp.mean(h**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, moments = tx.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, loss

    return within(0.5, step, weights, tx.init(weights), array(16384, 128))


def pooled(_: str) -> dict[str, Any]:
    """Convolutions around a max-pooling, with the batch on all devices."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for width in (16, 16):
                x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for width in (16, 16, 16, 16):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3))(x)))
            return nn.Dense(10)(x.mean((1, 2)))

    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    net, rng = Net(), np.random.default_rng(0)
    images = rng.normal(0, 1, (128, 32, 32, 8)).astype(np.float32)
    weights = jax.device_put(net.init(jax.random.key(0), images[:2]), NamedSharding(mesh, P()))

    def step(weights: Any, images: Any) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            made: Any = net.apply(weights, images, mutable=["batch_stats"])[0]
            return (jax.nn.softmax(made)[:, 0] ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    return within(0.65, step, weights, jax.device_put(images, NamedSharding(mesh, P("data"))))


def dropout(case: str) -> dict[str, Any]:
    """Layers with dropout, of which the key is an argument: weights divided along layers' inputs, or hidden values."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    up, down = (P(None, "model"), P("model")) if "tp" in case else (P("data"), P("data"))
    rng = np.random.default_rng(0)

    def array(spec: P, *shape: int) -> jax.Array:
        values = (rng.normal(size=shape) / 16).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, spec))

    weights = [(array(up, 256, 1024), array(down, 1024, 256)) for _ in range(3)]
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))

    def step(weights: Any, drawn: Any) -> Any:
        h, key = drawn

        def loss(weights: Any, h: Any = h) -> jax.Array:
            for (up, down), own in zip(weights, jax.random.split(key, len(weights)), strict=True):
                hidden = jax.nn.gelu(h @ up)
                h = h + jnp.where(jax.random.bernoulli(own, 0.9, hidden.shape), hidden / 0.9, 0) @ down
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return within(0.7, step, weights, (array(P("data"), 2048, 256), key))


def logical(_: str) -> dict[str, Any]:
    """A linen module whose parameters and values have logical axes, which rules put on a mesh of two axes."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            def dense(width: int, *axes: str) -> nn.Dense:
                return nn.Dense(
                    width, kernel_init=spmd.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
                )

            for _ in range(3):
                h = nn.gelu(dense(512, "embed", "mlp")(nn.LayerNorm()(x)))
                h = spmd.with_logical_constraint(h, ("batch", None, "mlp"))
                x = spmd.with_logical_constraint(x + dense(128, "mlp", "embed")(h), ("batch", None, "embed"))
            return x

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rules = (("batch", "data"), ("embed", None), ("mlp", "model"))
    net, tx = Net(), optax.adam(1e-3)
    x = np.random.default_rng(0).normal(0, 1, (32, 64, 128)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def init(key: jax.Array) -> Any:
        weights = net.init(key, x)
        return weights, tx.init(weights)

    def step(state: Any, x: Any) -> Any:
        weights, moments = state

        def loss_of(weights: Any) -> jax.Array:
            made: Any = net.apply(weights, x)
            return jnp.mean(made**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, moments = tx.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
        places = spmd.logical_to_mesh_sharding(specs, mesh, rules)
        state = jax.jit(init, out_shardings=places)(jax.random.key(0))
        return within(0.6, step, state, x, out_shardings=(places, NamedSharding(mesh, P())))


def within(share: float, step: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """What becomes of a step within so much of its temporaries, and what three in a row give, planned and plain. The
    last of its arguments is data, the others are a state, which is given back before the loss.
    """
    *state, x = args
    donated = tuple(range(len(state)))
    stats = jaxremat.memory(step, *args, donate_argnums=donated)
    budget = stats.base_nbytes + int(share * stats.temporaries_nbytes)
    planned: Any = jaxremat.optimize(budget, donate_argnums=donated, **options)(step)
    plain: Any = jax.jit(step, **options)
    plan = planned.plan(*args)
    texts = [f.as_text() for f in (plain.lower(*args).compile(), planned.compile(*args))]
    losses = []
    want, got = state, jax.tree.map(jnp.copy, state)
    for _ in range(3):
        (*want, loss), (*got, again) = plain(*want, x), planned(*got, x)
        losses.append((float(loss), float(again)))
    pairs = list(zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True))
    return {
        "budget": budget,
        "peak": plan.peak_nbytes,
        "predicted": plan.rounds[0].predicted_peak_nbytes,
        "compiled": plan.rounds[0].compiled_peak_nbytes,
        "overhead": plan.compiled_overhead,
        "copies": [copied.kind for copied in plan.copies],
        "losses": losses,
        "same": all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs),
        "placed_alike": all(a.sharding == b.sharding for a, b in pairs),
        "sent": [collectives(text) for text in texts],
        "operations": [operations(text) for text in texts],
        "counted": [list(each) for each in plan.collectives],
        "loops": any("while(" in text for text in texts),
        "drops_nothing": plan.drops_nothing,
        "text": str(plan),
    }


def serve() -> None:
    """Answer each case on a line of the input with a line of the output."""
    recorded.begin()
    _milp.RATE //= 4  # as in `conftest`
    more = _ledger.MORE_COMPILATIONS
    answers, sys.stdout = sys.stdout, sys.stderr  # what else is printed is no answer
    for line in sys.stdin:
        case = line.rstrip("\n")
        # As many as of a large step: cases are about what is planned, but one about what a longer search finds.
        _ledger.MORE_COMPILATIONS = more if case == "perceptron" else 0
        try:
            found = said(case)
        except Exception:
            found = {"failed": traceback.format_exc()}
        print(json.dumps(found), file=answers, flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    serve()
