"""What the compiled plain step says of its equations: the buffers that it writes and reads for them."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxremat._compiler._hlo import parse
from jaxremat._compiler._tags import constants, implicitly_read, tagged, written
from jaxremat._model._backend import backend
from jaxremat._rewrite._trace import trace


def test_kernels_read_what_kernels_write() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = jnp.sin(x @ x)
        return (y @ y) + 1.0

    x = jnp.ones((64, 64))
    traced = trace(jax.jit(f), (x,), {})
    names = [eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns]
    assert names == ["dot_general", "sin", "dot_general", "add"]
    program = jax.jit(jex.jaxpr_as_fun(tagged(traced, backend("cpu"))))
    found = written(parse(str(program.lower(x).compile().as_text())))
    assert found.sizes[1] == (64 * 64 * 4,)
    assert [k.reads for k in found.kernels if 2 in k.writes] == [{1}]
    assert all(k.reads <= found.sizes.keys() for k in found.kernels)


HLO = """HloModule step

wrapped (p: f32[]) -> f32[8,4] {
  p = f32[] parameter(0)
  ROOT b = f32[8,4] broadcast(p), dimensions={}
}

scaled (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
  p = f32[8,4] parameter(0)
  q = f32[8,4] parameter(1)
  ROOT m = f32[8,4] multiply(p, q), metadata={op_name="jit(f)/#7/mul"}
}

bell (p: f32[8,4]) -> f32[8,4] {
  p = f32[8,4] parameter(0)
  ROOT e = f32[8,4] exponential(p), metadata={op_name="jit(f)/#5/exp"}
}

tail (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
  p = f32[8,4] parameter(0)
  q = f32[8,4] parameter(1)
  again = f32[8,4] bitcast(q), metadata={op_name="jit(f)/#5/exp"}
  series = f32[8,4] multiply(p, again), metadata={op_name="jit(f)/#4/erfc"}
  ROOT m = f32[8,4] multiply(series, p), metadata={op_name="jit(f)/#6/mul"}
}

ENTRY main (x: f32[8,4]) -> f32[8,4] {
  x = f32[8,4] parameter(0)
  half = f32[] constant(0.5)
  halves = f32[8,4] fusion(half), kind=kLoop, calls=wrapped
  named = f32[8,4] broadcast(half), dimensions={}, metadata={op_name="jit(f)/#3/broadcast_in_dim"}
  gauss = f32[8,4] fusion(x), kind=kLoop, calls=bell
  upper = f32[8,4] fusion(x, gauss), kind=kLoop, calls=tail
  first = f32[8,4] fusion(upper, named), kind=kCustom, calls=scaled
  ROOT second = f32[8,4] fusion(first, halves), kind=kCustom, calls=scaled
}
"""


def test_constants_that_kernels_want_as_arrays() -> None:
    """Counted for the equation that reads one, unless an equation of the program's own makes it."""
    assert constants(parse(HLO)) == {7: 8 * 4 * 4}


def test_an_expansion_borrows_what_another_equation_makes() -> None:
    """A part of `erfc` reads what stands in memory for `exp`, which is no operand of it; others read their operands."""
    assert implicitly_read(parse(HLO)) == {(4, 5), (7, 6), (7, 3)}
