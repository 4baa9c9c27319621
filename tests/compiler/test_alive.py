"""What fills the memory at the compiled peak, by the user's source line."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxremat
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._peak_contents import Alive, alive_at_peak

WIDTH, BATCH = 64, 4096


def step(weights: list[jax.Array], x: jax.Array) -> Any:
    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


ARGS = [jnp.eye(WIDTH)] * 12, jnp.ones((BATCH, WIDTH))


def test_what_is_alive_is_named_by_source_line() -> None:
    plain = jaxremat.memory(step, *ARGS)
    budget = plain.base_nbytes + int(0.6 * plain.temporaries_nbytes)
    plan = jaxremat.plan(step, *ARGS, budget=budget, allow=())
    layer = [a for a in plan.alive if a.shape == f"f32[{BATCH},{WIDTH}]"]
    assert {a.kind for a in layer} <= {"forward", "recomputed", "backward"}
    assert len(layer) >= 6
    assert all(a.nbytes == 4 * BATCH * WIDTH for a in layer)
    assert any(a.source.startswith("test_alive.py:") and "loss" in a.source for a in layer)
    # An upper estimate of the compiler's own figure, and not a wild one.
    assert plan.compiled_peak_nbytes is not None
    temporaries = plan.compiled_peak_nbytes - plain.base_nbytes
    assert 0.9 * temporaries <= sum(a.nbytes for a in plan.alive) <= 1.3 * temporaries
    text = plan.explain_peak()
    assert text.startswith("At the compiled peak of ")
    assert f" x f32[{BATCH},{WIDTH}]  test_alive.py:" in text
    assert len(plan.explain_peak(rows=1).splitlines()) <= 3
    assert jaxremat.Plan.from_json(plan.to_json()).explain_peak() == text


def test_the_plain_steps_peak_is_explained_too() -> None:
    plan = jaxremat.plan(step, *ARGS, budget="1GiB")
    assert plan.drops_nothing
    assert "test_alive.py:" in plan.explain_peak()


def test_a_plan_that_was_not_compiled_says_so() -> None:
    plan = jaxremat.plan(step, *ARGS, budget="1GiB")
    assert "verify=True" in replace(plan, alive=()).explain_peak()
    assert jaxremat.plan(step, *ARGS, budget="1GiB", planning=jaxremat.Planning(verify=False)).alive == ()


def test_lines_of_the_library_itself_are_nobodys() -> None:
    text = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/net.py"
2 "/somewhere/jaxremat/_verify.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

ENTRY %main (p: f32[8]) -> f32[] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} add(%p, %p), metadata={op_name="jit(f)/jvp()/add" stack_frame_id=1}
  %b = f32[8]{0} multiply(%a, %p), metadata={op_name="jit(f)/recompute_0/jvp()/mul" stack_frame_id=2}
  ROOT %c = f32[] dot(%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""
    assert set(alive_at_peak(parse(text), text)) == {
        Alive(32, "f32[8]", "forward", "jit(f)/jvp()/add", "net.py:3 (f)"),
        Alive(32, "f32[8]", "recomputed", "jit(f)/recompute_0/jvp()/mul", ""),
    }
