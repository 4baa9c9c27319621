"""A job of several processes of two devices each, run by themselves: `python processes.py CASES INDEX COUNT PORT`.

Each process prints a line of JSON for each case: what it got, or what was raised there.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEVICES = 2
BUDGET = 1_050_000
SMALLEST = 2_200_000


def ask(cases: str, count: int = 2, ended: tuple[int, ...] = ()) -> list[list[dict[str, Any]]]:
    """What each process says of each case; those that have `ended` say what they said until then."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i in range(count):
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}",
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "JAXREMAT_CACHE": f"{folder}/{i}",
                "JAXREMAT_PLAN_CACHE": "1",
            }
            command = [sys.executable, __file__, cases, str(i), str(count), str(port)]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        try:
            printed = [process.communicate(timeout=400) for process in started]
        finally:
            for process in started:
                process.kill()
    for i, process in enumerate(started):
        assert i in ended or process.returncode == 0, printed[i][1][-4000:]
    return [
        [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # JAX's own lines between
        for out, _ in printed
    ]


def main(cases: str, index: int, count: int, port: int) -> None:
    """Print what each case says."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import recorded
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxremat
    from jaxremat._plan._problem import Problem
    from jaxremat._runtime import _meeting
    from jaxremat._solver import _milp

    recorded.begin()
    _milp.RATE //= 4  # as in `conftest`

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, index)
    _meeting.SILENT_SECONDS = _meeting.ARRIVING_SECONDS = 8.0
    width, rows, layers = 64, 2048, 6

    def make(devices: Any, rows: int) -> tuple[Any, Any]:
        mesh = Mesh(np.array(devices), ("data",))
        spread, same = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

        def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])

        rng = np.random.default_rng(0)
        weights = [put(rng.normal(0, 0.2, (width, width)).astype(np.float32), same) for _ in range(layers)]
        return weights, put(rng.normal(0, 1, (rows, width)).astype(np.float32), spread)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jnp.mean(y**2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return [w - 0.5 * g for w, g in zip(weights, gradient, strict=True)], value

    def other(weights: Any, x: Any) -> Any:
        return step(weights, jnp.sin(x) if index == 1 else x)

    def failing(weights: Any, x: Any) -> Any:
        if index == 1:
            raise ZeroDivisionError("the user's own")
        return step(weights, x)

    def trained(planned: Any, rows: int) -> dict[str, Any]:
        weights, x = make(jax.devices(), rows)
        plan, losses = planned.plan(weights, x), []
        for _ in range(3):
            weights, loss = planned(weights, x)
            losses.append(float(loss))
        return {
            "saved": plan.saved,
            "kept": plan.kept,
            "stages": plan.stages,
            "budget": plan.budget_nbytes,
            "peak": plan.peak_nbytes,
            "form": str(plan.form),
            "left_alone": plan.drops_nothing and not plan.form,
            "losses": losses,
        }

    def run(case: str) -> dict[str, Any]:
        everywhere = make(jax.devices(), rows)
        if case == "plan":
            plain, found = jax.jit(step), trained(jaxremat.optimize(BUDGET)(step), rows)
            weights, x = everywhere
            found["plain"] = []
            for _ in range(3):
                weights, loss = plain(weights, x)
                found["plain"].append(float(loss))
            found["cached"] = len(list(Path(os.environ["JAXREMAT_CACHE"]).glob("plans/*.json")))
            return found
        if case == "shapes":
            planned = jaxremat.optimize(BUDGET)(step)
            return {"first": trained(planned, rows), "second": trained(planned, rows // 2)}
        if case == "given":
            plan = jaxremat.plan(step, *everywhere, budget=BUDGET)
            return trained(jaxremat.optimize(plan=plan)(step), rows)
        if case == "memories":
            prepare = jaxremat.Step._prepare

            def reporting(self: Any, args: Any, kwargs: Any) -> Any:
                problem, request = prepare(self, args, kwargs)
                object.__setattr__(request, "device_nbytes", (5_000_000, SMALLEST)[index == 1])
                return problem, request

            jaxremat.Step._prepare = reporting
            try:
                return trained(jaxremat.optimize(0.5)(step), rows)
            finally:
                jaxremat.Step._prepare = prepare
        if case == "alone":  # on this process's devices: no other need take part
            if index == 1:
                return {}
            weights, x = make(jax.local_devices(), rows)
            return {"peak": jaxremat.plan(step, weights, x, budget=2 * BUDGET).peak_nbytes}
        if case == "checkpoint":  # each has a solver that would do something else
            solve = (jaxremat.SaveAll, jaxremat.RecomputeAll)[index == 1].solve
            chosen: Any = type("Chosen", (), {"solve": solve})()
            weights, x = everywhere

            @jax.jit
            def run(weights: Any, x: Any) -> Any:
                def layers(weights: Any, x: Any) -> Any:
                    for weight in weights:
                        x = jnp.tanh(x @ weight)
                    return jnp.mean(x**2)

                return jax.value_and_grad(
                    jaxremat.checkpoint(layers, 2**30, planning=jaxremat.Planning(solver=chosen))
                )(weights, x)

            return {
                "loss": float(run(weights, x)[0]),
                "dots": run.lower(weights, x).as_text().count("dot_general"),
            }
        if case == "infeasible":
            return trained(jaxremat.optimize(2**18)(step), rows)
        if case == "other program":
            return trained(jaxremat.optimize(BUDGET)(other), rows)
        if case == "other budget":
            return trained(jaxremat.optimize(BUDGET + index)(step), rows)
        if case == "failing":
            return trained(jaxremat.optimize(BUDGET)(failing), rows)
        if case == "compiler":
            finished = Problem.finished

            def broken(self: Any, jitted: Any) -> Any:
                if index == 1:
                    raise RuntimeError("out of luck")
                return finished(self, jitted)

            Problem.finished = broken
            try:
                return trained(jaxremat.optimize(BUDGET, planning=jaxremat.Planning(cache=False))(step), rows)
            finally:
                Problem.finished = finished
        if case == "absent":
            return {} if index == 1 else trained(jaxremat.optimize(BUDGET)(step), rows)
        if case.startswith("killed"):
            victim = int(case.rpartition(" ")[2])
            hear = _meeting.Meeting.hear

            def killed(self: Any, topic: str, process: int) -> Any:
                if index == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                return hear(self, topic, process)

            _meeting.Meeting.hear = killed
            return trained(jaxremat.optimize(BUDGET, planning=jaxremat.Planning(cache=False))(step), rows)
        raise ValueError(case)

    for case in cases.split(","):
        try:
            found = run(case)
        except Exception as error:
            public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
            found = {"type": type(error).__name__, "message": str(error), **public}
        print(json.dumps({"case": case, **found}, default=str), flush=True)
    if "killed" in cases:
        os._exit(0)  # JAX would wait for those that are no more


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
