"""Joint program + graph + schedule -> its forward and its backward pass as two jaxprs.

Invariant: the forward pass returns the values that the schedule saves, and no other intermediate value. The backward
pass recomputes its fused values, behind barriers of which the first waits for the cotangents.
"""

from dataclasses import dataclass

import jax.extend.core as jex

from .._model._graph import Graph
from .._model._schedule import Schedule
from .._program import _compat
from .._program._primitives import runs_once
from .._program._run_counts import check_runs
from .._rewrite._flat_program import within
from .._rewrite._kernel_choice import canonical_in_bodies
from .._rewrite._loop_closing import close_loops, without_unread
from ._analysis import Analysis
from ._emit import write
from ._joint import Joint


@dataclass(frozen=True)
class Halves:
    """A forward and a backward pass.

    **Fields:**

    - `forward` maps the primals to the results, then the saved values.
    - `backward` maps the saved values, the primals whose indices are in `read` and the cotangents to the cotangents of
      the primals.
    - `results` the number of the forward pass's outputs that are the function's.
    """

    forward: jex.ClosedJaxpr
    backward: jex.ClosedJaxpr
    read: tuple[int, ...]
    results: int


def emit_halves(joint: Joint, graph: Graph, schedule: Schedule) -> Halves:
    """Return the two passes, type-checked; node ids of `graph` are equation indices of the joint program."""
    traced = joint.traced
    jaxpr, consts = traced.jaxpr.jaxpr, traced.jaxpr.consts
    primals, cotangents = jaxpr.invars[: joint.primals], jaxpr.invars[joint.primals :]
    written = write(Analysis(traced, graph, schedule, cotangents=cotangents))
    results, gradients = written.outvars[: joint.results], written.outvars[joint.results :]
    eqns = close_loops(written.eqns, written.loop_of, traced.loops)
    forward_loops = written.loop_of[: written.forward_count]
    outermost = {loop for each in forward_loops for loop in within(each, traced.loops)[-1:]}
    single = sum(loop < 0 for loop in forward_loops)
    stop = single + len(outermost)
    early, late = eqns[:stop], without_unread(eqns[stop:], gradients)
    made = {v for eqn in early for v in eqn.outvars}
    needed = dict.fromkeys(_compat.variables([*(a for eqn in late for a in eqn.invars), *gradients]))
    bare = [eqn for eqn in early if not _compat.variables(eqn.invars) and not runs_once(eqn)]
    late = [*(eqn for eqn in bare if any(v in needed for v in eqn.outvars)), *late]  # zeros and the like
    made.difference_update(v for eqn in bare for v in eqn.outvars)
    kept = [a for a in needed if a in made]
    read = tuple(i for i, a in enumerate(primals) if a in needed)
    early = without_unread(early, [*results, *kept])
    forward = _compat.new_jaxpr(jaxpr.constvars, consts, primals, [*results, *kept], early)
    operands = [*kept, *(primals[i] for i in read), *cotangents]
    backward = _compat.new_jaxpr(jaxpr.constvars, consts, operands, gradients, late)
    if not graph.backend.fuses_reductions:
        forward, backward = canonical_in_bodies(forward), canonical_in_bodies(backward)
    _compat.check_jaxpr(forward)
    _compat.check_jaxpr(backward)
    check_runs(_compat.new_jaxpr((), (), (), [*results, *gradients], [*early, *late]), traced.flat)
    return Halves(forward, backward, read, joint.results)
