"""Steps that the compiler does not compile as they are written are planned all the same, from a form that it does."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxremat
from jaxremat import CompilationError, MemoryStats, MinCut, Plan
from jaxremat._compiler import _target
from jaxremat._compiler._program import Program
from jaxremat._rewrite._trace import trace

GROUPS, SHARED, SIZE, LAYERS = 2, 4, 8, 2
WIDTH = GROUPS * SHARED * SIZE


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    tokens, narrow = len(x), GROUPS * SIZE
    query = (x @ w).reshape(tokens, GROUPS, SHARED, SIZE)
    key, value = ((x @ w[:, i * narrow : (i + 1) * narrow]).reshape(tokens, GROUPS, SIZE) for i in range(2))
    scores = jnp.einsum("sgnd,tgd->gnst", query, key, preferred_element_type=jnp.float32) / SIZE**0.5
    mixed = jnp.einsum("gnst,tgd->sgnd", jax.nn.softmax(scores).astype(x.dtype), value)
    return x + mixed.reshape(tokens, WIDTH), None


def train_step(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

    return w - jax.grad(loss)(w).astype(w.dtype)


def shapes(tokens: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), dtype), jax.ShapeDtypeStruct((tokens, WIDTH), dtype)


LONG = shapes(2**20, jnp.bfloat16)
"""Of so many tokens a transposition of all scores takes more blocks than a GPU has numbers for."""

PLANNING = jaxremat.Planning(solver=MinCut())


@pytest.mark.usefixtures("few_compilations")
def test_what_a_gpus_compiler_refuses_is_planned() -> None:
    plan = jaxremat.plan(train_step, *LONG, budget="4GiB", donate_argnums=0, target="h100", planning=PLANNING)
    scores = GROUPS * SHARED * LONG[1].shape[0] ** 2
    assert scores > 2**31
    assert plan.baseline_peak_nbytes > LAYERS * scores * 4
    assert plan.compiled_peak_nbytes is not None and plan.compiled_peak_nbytes <= plan.budget_nbytes
    assert plan.overhead < 0 and plan.compiled_overhead is not None
    assert "needs more blocks" in plan.baseline_modelled
    assert Plan.from_json(plan.to_json()) == plan
    for said in (" ".join(str(each).split()) for each in (plan, plan.report())):
        assert "(modelled)" in said and plan.baseline_modelled in said
    assert ">plain step, modelled<" in plan.report().html()
    stats = jaxremat.memory(train_step, *LONG, donate_argnums=0, target="h100")
    assert (stats.peak_nbytes, stats.modelled) == (plan.baseline_peak_nbytes, plan.baseline_modelled)


def test_bytes_beyond_32_bits_divide_into_regions() -> None:
    assert trace(jax.jit(train_step), LONG, {}, keeps_scores=True).sites.regions


Refused = list[str]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Refused]:
    """Make the compiler refuse programs with an array of more elements than this; returns those that it refused."""

    def beyond(most: float) -> Refused:
        own, refused = Program._compiled, []

        def compiled(self: Program, lowered: Any, *given: Any) -> Any:
            text = lowered.as_text()
            sizes = (
                math.prod(map(int, each[:-1].split("x"))) for each in re.findall(r"tensor<((?:\d+x)+)", text)
            )
            if max(sizes, default=0) > most:
                refused.append(text)
                raise CompilationError("XLA refuses the step: too large.", reason="refused")
            return own(self, lowered, *given)

        monkeypatch.setattr(Program, "_compiled", compiled)
        return refused

    return beyond


TOKENS = 128
SCORES = GROUPS * SHARED * TOKENS**2


@functools.cache
def written() -> MemoryStats:
    jitted = jax.jit(train_step, donate_argnums=0).lower(*shapes(TOKENS, jnp.float32))
    return MemoryStats.of(jitted.compile(compiler_options=jaxremat.compiler_options("cpu")))


@pytest.mark.parametrize("share", [0.5, 4.0])
def test_what_is_planned_from_another_form_computes_the_step(
    share: float, refuse: Callable[[float], Refused]
) -> None:
    """However much memory there is."""
    refused = refuse(SCORES)  # all layers' are more
    budget = written().base_nbytes + int(share * written().temporaries_nbytes)
    step = jaxremat.optimize(budget, donate_argnums=0, planning=PLANNING)(train_step)
    keys = jax.random.split(jax.random.key(0))
    w, x = (
        0.2 * jax.random.normal(key, s.shape)
        for key, s in zip(keys, shapes(TOKENS, jnp.float32), strict=True)
    )
    plan = step.plan(w, x)
    assert refused and plan.baseline_modelled == "XLA refuses the step: too large"
    assert plan.baseline_peak_nbytes == pytest.approx(written().peak_nbytes, rel=0.3)
    assert plan.form and plan.peak_nbytes <= budget
    want = jax.jit(train_step)(w, x)
    np.testing.assert_allclose(step(w, x), want, rtol=2e-5, atol=2e-6)


def test_shares_are_of_the_modelled_step(refuse: Callable[[float], Refused]) -> None:
    refuse(SCORES)
    plan = jaxremat.plan(train_step, *shapes(TOKENS, jnp.float32), budget="50%", planning=PLANNING)
    assert plan.budget_nbytes == plan.baseline_peak_nbytes // 2


def test_where_nothing_is_compiled_all_that_was_tried_is_said(refuse: Callable[[float], Refused]) -> None:
    refuse(0)
    with pytest.raises(CompilationError) as caught:
        jaxremat.plan(train_step, *shapes(TOKENS, jnp.float32), budget="1MiB", planning=PLANNING)
    assert caught.value.reason == "refused"
    said = str(caught.value)
    assert said.startswith(
        "No form of `train_step` could be compiled. Tried: as written: XLA refuses the step: "
    )
    assert "attention 0: 1: XLA" in said and said.endswith("Use a smaller batch, or shorter sequences.")


ENDS = {
    "refused": "raise ValueError('a shape')",
    "memory": "os.kill(os.getpid(), signal.SIGKILL)",
    "memory, as C++ says": "print('std::bad_alloc', file=sys.stderr, flush=True); os.abort()",
    "memory, as Python says": "raise MemoryError",
    "time": "time.sleep(3600)",
    "lost": "sys.exit(3)",
}


@pytest.mark.uncached
@pytest.mark.parametrize("end", ENDS)
def test_ends_of_a_compilation_are_told_apart(
    end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import os, signal, sys, time\ndef answer(request):\n    {ENDS[end]}\n")
    monkeypatch.setattr(_target, "WORKER", script)
    lowered = _target.Target("h100").lower(jax.jit(lambda x: x + len(end)), (jnp.ones(3),), {}, {})
    with pytest.raises(CompilationError) as caught:
        lowered.compile(1.0 if end == "time" else math.inf)
    assert caught.value.reason == end.split(",")[0]
    assert "target='h100'" in str(caught.value)
