"""What XLA:CPU's options keep: barriers in loops of any size, and the caller's own options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxremat


@pytest.mark.parametrize("width", [1, 6, 100], ids="{} numbers".format)
def test_a_loop_of_few_bytes_may_hold_a_barrier(width: int) -> None:
    """XLA:CPU makes one kernel of a loop over less than a kilobyte, and ends the process where that has a barrier."""

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        def one(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            y, again = lax.optimization_barrier((jnp.sin(carry), w))
            return y * again, None

        return lax.scan(one, x, None, length=3)[0]

    args = jnp.full(width, 0.5), jnp.full(width, 2.0)
    got = jax.jit(looped, compiler_options=jaxremat.compiler_options("cpu"))(*args)
    want = 0.5
    for _ in range(3):
        want = 2 * np.sin(want)
    np.testing.assert_allclose(got, np.full(width, want), rtol=1e-6)


def test_options_of_the_caller_are_kept() -> None:
    name = "xla_disable_hlo_passes"
    own = jaxremat.compiler_options("cpu")[name].split(",")
    merged = jaxremat.compiler_options("cpu", {name: f"algsimp,{own[0]}", "xla_cpu_copy_insertion": 1})
    assert merged == {name: ",".join(["algsimp", *own]), "xla_cpu_copy_insertion": 1}
    assert jaxremat.compiler_options("gpu", {name: "algsimp"}) == {name: "algsimp"}
