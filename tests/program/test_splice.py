"""Equations of a jaxpr as a stretch of another."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxremat._program import _compat
from jaxremat._program._splice import inlined


def test_results_have_the_names_that_are_given_also_where_they_are_handed_on() -> None:
    """An operand, a literal, and a result that is returned twice."""
    closed = jax.make_jaxpr(lambda x, y: (y, 2.0, z := x + y, z, x * z))(1.0, 2.0)
    operands = [_compat.new_var(v.aval) for v in closed.jaxpr.invars]
    names = [_compat.new_var(jnp.asarray(0.0).aval) for _ in closed.jaxpr.outvars]
    eqns, results = inlined(closed, operands, closed.jaxpr.eqns[0].source_info, names)
    assert results == names
    spliced = _compat.new_jaxpr((), (), operands, names, eqns)
    _compat.check_jaxpr(spliced)
    assert [float(v) for v in jex.jaxpr_as_fun(spliced)(np.float32(3), np.float32(4))] == [4, 2, 7, 7, 21]
    *_, last = inlined(closed, operands, closed.jaxpr.eqns[0].source_info)[1]
    assert last not in names
