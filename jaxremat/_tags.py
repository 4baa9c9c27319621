"""Traced step -> what XLA writes to memory for each of its equations.

The plain step is compiled once with each equation's index in its name stack (`#12`). XLA carries name stacks through
its passes as `op_name`, so that the kernels of the compiled program say whose results they write.
"""

import re

import jax.extend.core as jex

from . import _compat
from ._hlo import Module, materialised
from ._trace import Traced

_TAG = re.compile(r"#(\d+)(?:[/)]|$)")


def tagged(traced: Traced) -> jex.ClosedJaxpr:
    """The plain step's flat jaxpr with the index of each equation's counterpart in `traced.jaxpr` in its name stack."""
    flat = traced.flat
    eqns = [
        eqn if origin < 0 else _compat.in_scope(eqn, f"#{origin}")
        for eqn, origin in zip(flat.jaxpr.eqns, traced.origin, strict=True)
    ]
    return _compat.new_jaxpr(flat.jaxpr.constvars, flat.consts, flat.jaxpr.invars, flat.jaxpr.outvars, eqns)


def written(module: Module) -> dict[int, tuple[int, ...]]:
    """For each tagged equation the sizes in bytes of the buffers that kernels write for it."""
    return {int(tag): sizes for tag, sizes in materialised(module, _TAG).items()}
