"""What the compiled plain step says of its equations: the buffers that it writes and reads for them."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxremat._compiler._hlo import parse
from jaxremat._compiler._tags import tagged, written
from jaxremat._model._graph import backend
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
