"""Host memory that is not there, or refused: what is said then, and that the process goes on."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from jaxremat import ArgumentError, CompilationError, HostMemoryError, PlanMismatchError, TargetError
from jaxremat._model._host_copies import HostCopy

WEIGHTS, MOMENTS, X = jnp.ones((512, 512)), jnp.zeros((512, 512)), jnp.ones((8, 512))


def step(weights: Any, moments: Any, x: Any) -> Any:
    gradient = jax.grad(lambda weights: jnp.mean(jnp.tanh(x @ weights) ** 2))(weights)
    moments = 0.9 * moments + gradient
    return weights - 0.1 * moments, moments


def optimized(target: str | None = None) -> jaxremat.Step:
    return jaxremat.optimize("64MiB", donate_argnums=(0, 1), target=target)(step)


def elsewhere(array: jax.Array) -> jax.Array:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "unpinned_host" not in kinds:
        pytest.skip("There is no memory of a third kind.")
    return jax.device_put(array, array.sharding.with_memory_kind("unpinned_host"))


def without_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxremat._program._host_arguments._HOST", "elsewhere")


def test_what_is_donated_from_a_memory_of_a_third_kind_is_refused() -> None:
    """XLA ends the process there."""
    follow = optimized()
    with pytest.raises(
        ArgumentError, match=r"`moments`.*is donated, but its memory kind is 'unpinned_host'.*to_host"
    ):
        follow(WEIGHTS + 0, elsewhere(MOMENTS), X)
    found = follow(WEIGHTS + 0, MOMENTS + 0, X)
    with pytest.raises(ArgumentError, match="unpinned_host"):  # once the step was compiled too
        follow(found[0], elsewhere(MOMENTS), X)
    assert (
        optimized()(WEIGHTS + 0, MOMENTS + 0, elsewhere(X))[0].shape == WEIGHTS.shape
    )  # nothing is written over it


def test_a_plan_for_arguments_in_host_memory_says_so_to_others() -> None:
    there = optimized().plan(WEIGHTS, jaxremat.to_host(MOMENTS, least_nbytes=0), X)
    with pytest.raises(
        PlanMismatchError, match=r"argument 1 was float32\[512,512\] in host memory .* and is float32"
    ):
        jaxremat.optimize(plan=there, donate_argnums=(0, 1))(step)(WEIGHTS + 0, MOMENTS + 0, X)
    here = optimized().plan(WEIGHTS, MOMENTS, X)
    with pytest.raises(
        PlanMismatchError, match=r"argument 1 was float32\[512,512\] and is .* in host memory"
    ):
        jaxremat.optimize(plan=here, donate_argnums=(0, 1))(step)(
            WEIGHTS + 0, jaxremat.to_host(MOMENTS, least_nbytes=0), X
        )


def test_a_plan_that_moves_arguments_is_refused_where_there_is_no_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = optimized().plan(WEIGHTS, jaxremat.to_host(MOMENTS, least_nbytes=0), X)
    moving = replace(there, on_host=(1,), on_host_nbytes=MOMENTS.nbytes)
    follow = jaxremat.optimize(plan=moving, donate_argnums=(0, 1))(step)
    without_host_memory(monkeypatch)
    moments = MOMENTS + 0
    with pytest.raises(
        HostMemoryError, match=r"plan of `step` keeps 1.00 MiB of the arguments in memory"
    ) as caught:
        follow(WEIGHTS + 0, moments, X)
    assert isinstance(caught.value, TargetError) and "without `offload`" in str(caught.value)
    assert not moments.is_deleted()


def refusing(message: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    return refuse


REFUSED = "RESOURCE_EXHAUSTED: gpu_host_bfc: could not allocate pinned host memory of size 1048576"


def test_host_memory_that_is_refused_when_arrays_move_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_put", refusing(REFUSED))
    with pytest.raises(
        HostMemoryError, match=r"Host memory for 1.00 MiB, float32\[512, 512\], was refused: RESOURCE.*ulimit"
    ):
        jaxremat.to_host(MOMENTS)


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize(
    ("message", "kind"), [(REFUSED, HostMemoryError), ("INTERNAL: no", jax.errors.JaxRuntimeError)]
)
def test_host_memory_that_is_refused_when_the_step_runs(
    calls: int, message: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first call, and in those that look up nothing; other errors stay what they are."""
    weights, moments = WEIGHTS, jaxremat.to_host(MOMENTS, least_nbytes=0)
    follow, compiled = optimized(), jaxremat.Step._executable

    def failing(self: Any, *given: Any) -> Any:
        run, count = compiled(self, *given), iter(range(10))
        return lambda *args: refusing(message)() if next(count) == calls else run(*args)

    monkeypatch.setattr(jaxremat.Step, "_executable", failing)
    for _ in range(calls):
        weights, moments = follow(weights + 0, moments, X)
    with pytest.raises(
        kind, match="`step` could not allocate host memory" if message == REFUSED else "no"
    ) as caught:
        follow(weights + 0, moments, X)
    assert type(caught.value) is kind


def on_the_target(monkeypatch: pytest.MonkeyPatch) -> jaxremat.Step:
    """Return a step that was planned for a target, in whose place the CPU stands from now on."""
    follow = optimized(target="h100")
    follow.plan(WEIGHTS, MOMENTS, X)
    monkeypatch.setattr("jaxremat._api._step.find", lambda _: "h100")
    return follow


def test_a_device_whose_compiler_refuses_what_was_planned_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = on_the_target(monkeypatch)
    monkeypatch.setattr("jax.stages.Lowered.compile", refusing("UNIMPLEMENTED: memory space 5"))
    with pytest.raises(CompilationError, match="XLA refuses the step: UNIMPLEMENTED"):
        follow(WEIGHTS + 0, MOMENTS + 0, X)


def test_a_device_without_the_memory_that_was_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = on_the_target(monkeypatch)
    (planned,) = follow._planned.values()
    planned.plan = replace(planned.plan, offloaded=(HostCopy(0, 0, 1, 0),))
    without_host_memory(monkeypatch)
    with pytest.raises(HostMemoryError, match="offloads 1 values to memory of the kind"):
        follow(WEIGHTS + 0, MOMENTS + 0, X)
