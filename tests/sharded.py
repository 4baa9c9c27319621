"""A step on eight devices of the host, run by itself with what it says as JSON: `python sharded.py CASE`.

The number of the host's devices is fixed when JAX starts, so that tests start this in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def ask(case: str) -> dict[str, Any]:
    """What a case says."""
    found = subprocess.run(
        [sys.executable, __file__, case],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.splitlines()[-1])


def collectives(text: str) -> dict[str, int]:
    """How many arrays devices send each other, by kind."""
    counts: Counter[str] = Counter()
    for found in re.finditer(rf"= .*? ({KINDS})(?:-start)?\(([^)]*)\)", text):
        counts[found[1]] += found[2].count("%")
    return dict(counts)


def main(case: str) -> None:
    """Print what the case says."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxremat
    from jaxremat._compiler._devices import detect
    from jaxremat._compiler._gathers import gathers
    from jaxremat._compiler._program import Program, placed
    from jaxremat._compiler._shardings import Division
    from jaxremat._plan._baseline import Baseline
    from jaxremat._rewrite._trace import trace

    kind = AxisType.Explicit if case == "explicit" else AxisType.Auto
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
    budgets = {"all": 2 * stats.peak_nbytes, "some": stats.base_nbytes + stats.temporaries_nbytes * 7 // 10}
    plans = {}
    bare = Baseline(program, args, {}, detect(jax.devices()[0]), "roofline").bare(())
    for name, budget in budgets.items():
        planned = jaxremat.optimize(budget, cache=False, solver=jaxremat.Greedy())(step)
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
            "same": same and placed_alike,
            "sent": collectives(planned.compile(*args).as_text()),
            "once": [n.id for n in laid.nodes if not n.repeatable],
            "unrepeated": plan.unrepeated,
            "followed": followed.lower(*args).as_text() == planned.lower(*args).as_text(),
        }
    print(json.dumps({"parts": parts, "sent": collectives(plain.as_text()), "plans": plans}))


if __name__ == "__main__":
    main(sys.argv[1])
