"""Sections of a pair of loops -> one iteration of each, compiled separately: the values that it writes, and its time.

The plain loop stacks all values that the other loop of its pair reads: a softmax's exponentials, sums and maxima, which
one kernel would otherwise keep to itself. It also copies all of them into stacks and out of them. The values that an
iteration must write, and its time without the stacks, are read off an iteration that is compiled separately, with its
equations tagged. It reads and writes rows of arrays as the loop does, because they affect the program: rows are copied,
updates of several become one kernel, and values that wait for their turn stay in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import ShapedArray

from .._compiler._hlo import Module, parse
from .._compiler._program import Program
from .._emit._analysis import Analysis
from .._emit._emit import write
from .._model._graph import Backend, Graph
from .._model._schedule import save_all
from .._model._stages import uncut
from .._program import _compat
from .._program._compat import shaped
from .._program._host_arguments import to_host
from .._program._primitives import inner_jaxprs, is_loop_edge, is_loop_slice, on_host
from .._rewrite._flat_program import BACKWARD, FORWARD, UNPAIRED, Loop, with_eqns
from .._rewrite._kernel_choice import inline, replaced
from .._rewrite._loop_closing import before_barriers, closed_within, name_before, scan_of
from .._rewrite._loop_inlining import append, operands, row_at, row_written
from .._rewrite._trace import Traced


@dataclass(frozen=True)
class Iteration:
    """A program of one iteration: from all that it reads to its carries and results.

    It reads rows of the arrays over which the loop runs, and writes its results into rows of others. Values that the
    pair's other loop passes to it are in memory.

    **Fields:** `closed`, where the equation of index `places[j]` of the whole step has `#j` in its name stack;
    `written` the number of its first arguments that it writes to, whose memory its first results take over; `names` the
    variables of the whole step for its arguments, None for the index.
    """

    closed: jex.ClosedJaxpr
    places: tuple[int, ...]
    written: int
    names: tuple[jex.Var | jex.Literal | None, ...]

    @cached_property
    def key(self) -> str:
        """A key shared by iterations that compile to the same program: a long text, slow to write."""
        return str(self.closed.jaxpr)

    def compiled(
        self, program: Program, named: Callable[[Any], jax.sharding.NamedSharding | None], traced: Traced
    ) -> Module:
        """Return the compiled iteration, compiled as a whole program would be.

        **Arguments:** `named` returns the sharding of a variable of the whole step `traced`, None if not known.
        """
        variables = self.closed.jaxpr.invars
        types = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=named(name))
            for v, name in zip(variables, self.names, strict=True)
        ]
        types = [
            to_host(t, least_nbytes=0) if on_host(v.aval) else t
            for t, v in zip(types, variables, strict=True)
        ]
        alone = program.alone(program.fn, donate_argnums=tuple(range(self.written)))
        evaluate = jex.jaxpr_as_fun(traced.alone(self.closed))

        def iteration(*args: jax.Array) -> list[jax.Array]:
            """Return the results, those in host memory as explicit copies: JAX looks for them among these."""
            results = evaluate(*args)
            return [jax.device_put(a, jax.memory.Space.Host) if on_host(a.aval) else a for a in results]

        jitted = alone.jit(iteration)
        return parse(alone.compile(jitted, tuple(types), {}).as_text() or "")


def forward(traced: Traced, backend: Backend) -> dict[int, Iteration]:
    """Return iterations of the forward loops without stacks, by loop."""
    named, places = _tagged(traced, [loop.id for loop in _alive(traced) if loop.role == FORWARD])
    return _iterations(named.jaxpr.jaxpr.eqns, traced.loop_of, traced.loops, places, backend)


def backward(traced: Traced, graph: Graph, backend: Backend) -> dict[int, Iteration]:
    """Return iterations of the backward loops in a step that saves all written forward values, by loop."""
    named, places = _tagged(traced, [loop.id for loop in _alive(traced) if loop.role == BACKWARD])
    graph = replace(graph, stages=uncut(graph))
    written = write(Analysis(named, graph, save_all(graph)))
    return _iterations(written.eqns, written.loop_of, traced.loops, places, backend)


def repeated(traced: Traced, backend: Backend) -> dict[int, Iteration]:
    """Return iterations of the loops that contain both a forward and a backward pass, by loop."""
    found: dict[int, Iteration] = {}
    for loop in _alive(traced):
        if loop.role == UNPAIRED:
            named, places = _tagged(traced, [loop.id])
            eqns = named.jaxpr.jaxpr.eqns
            closed = closed_within(
                eqns, traced.loop_of, traced.loops, loop.id, materialises_eagerly=backend.materialises_eagerly
            )
            flat, loop_of = (list(each) for each in zip(*closed, strict=True))
            found |= _iterations(flat, loop_of, traced.loops, places, backend)
    return found


def _alive(traced: Traced) -> list[Loop]:
    """Return the loops that still have equations."""
    left = set(traced.loop_of)
    return [loop for loop in traced.loops if loop.id in left]


def _tagged(traced: Traced, wanted: Sequence[int]) -> tuple[Traced, dict[int, tuple[int, ...]]]:
    """Return the step with the equations of these loops numbered in their name stacks, and each loop's equations."""
    eqns = list(traced.jaxpr.jaxpr.eqns)
    places: dict[int, list[int]] = {loop: [] for loop in wanted}
    for i, loop in enumerate(traced.loop_of):
        if loop in places and not is_loop_edge(eqns[i]):
            eqns[i] = _compat.in_scope(eqns[i], f"#{len(places[loop])}")
            places[loop].append(i)
    program = traced.program.with_same(with_eqns(traced.jaxpr, eqns))
    return replace(traced, program=program), {loop: tuple(found) for loop, found in places.items()}


def _iterations(
    eqns: Sequence[jex.JaxprEqn],
    loop_of: Sequence[int],
    loops: Sequence[Loop],
    places: dict[int, tuple[int, ...]],
    backend: Backend,
) -> dict[int, Iteration]:
    """Return one iteration of each of these loops as a program."""
    sections: dict[int, list[jex.JaxprEqn]] = {loop: [] for loop in places}
    slices: dict[jex.Var, tuple[jex.JaxprEqn, int]] = {}
    for eqn, loop in zip(eqns, loop_of, strict=True):
        if loop in sections:
            sections[loop].append(eqn)
        if is_loop_slice(eqn):
            slices[eqn.outvars[0]] = eqn, loop
    before, found = before_barriers(eqns), {}
    for loop, section in sections.items():
        group = loops[loop].group
        whole = [*section]
        for eqn in whole:  # grows in the loop, by the rows that the pair's other loop also reads
            for a in _compat.variables(eqn.invars):
                row, of = slices.get(a, (None, -1))
                if row is not None and of != loop and loops[of].group == group and row not in whole:
                    whole.append(row)
        rows = whole[len(section) :]
        scan = scan_of(
            [*reversed(rows), *section],
            loops[loop],
            before,
            materialises_eagerly=backend.materialises_eagerly,
        )
        found[loop] = _once(scan, places[loop], replaced(backend), name_before(before))
    return found


def _once(
    scan: jex.JaxprEqn,
    places: tuple[int, ...],
    needs_replacement: Callable[[jex.JaxprEqn], bool],
    same: Callable[[jex.Var | jex.Literal], jex.Var | jex.Literal],
) -> Iteration:
    """Return the program of one iteration of a scan, at a given index.

    Loops with the same body that differ in their lengths, or in where their rows come from, should become the same
    program, which is compiled once. So a scanned index is used as the iteration's index, stacks have as many rows as
    the arrays that are read at it, rows are read just before their first reader, and arguments come in reading order.
    """
    closed = scan.params["jaxpr"]
    jaxpr = _compat.opened(closed)[0]
    consts, init, arrays = operands(scan)
    rows = jaxpr.invars[len(consts) + len(init) :]
    index = next(filter(_is_index, rows), None) or _compat.new_var(ShapedArray((), jnp.int32))
    length = _rows_at(index, jaxpr.eqns) or scan.params["length"]
    whole = [_compat.new_var(_with_rows(shaped(a), length)) for a in arrays]
    eqns: list[jex.JaxprEqn] = []
    for array, row in zip(whole, rows, strict=True):
        if row is not index:
            append(eqns, row_at, (array, index), scan, row)
    eqns.extend(each for eqn in jaxpr.eqns for each in (inline(eqn) if needs_replacement(eqn) else [eqn]))
    eqns = _late_reads(eqns, index)
    stacks = [_compat.new_var(_with_rows(shaped(v), length)) for v in scan.outvars[len(init) :]]
    filled = [
        append(eqns, row_written, (stack, row, index), scan)
        for stack, row in zip(stacks, jaxpr.outvars[len(init) :], strict=True)
    ]
    # A carry of which the iteration overwrites a part keeps its memory; any other is a new array.
    updated = {eqn.outvars[0]: eqn.invars[0] for eqn in eqns if _writes_part(eqn)}
    carried = list(zip(jaxpr.invars[len(consts) :], jaxpr.outvars[: len(init)], strict=False))
    over = [(a, v) for a, v in carried if not _compat.is_literal(v) and updated.get(v) is a]
    over += zip(stacks, filled, strict=True)
    fresh = [v for a, v in carried if (a, v) not in over]
    read = list(dict.fromkeys(_compat.variables(a for eqn in eqns for a in eqn.invars)))
    read += [v for v in _compat.variables(fresh) if v not in read]
    kept = {a for a, _ in over}
    over.sort(key=lambda both: read.index(both[0]))
    given = dict(
        zip(
            (*jaxpr.invars[: len(consts) + len(init)], *whole, index),
            (*consts, *init, *arrays, None),
            strict=True,
        )
    )
    others = {a: given[a] for a in read if a in given and a not in kept}
    invars, outvars = [*(a for a, _ in over), *others], [*(v for _, v in over), *fresh]
    closed = _compat.new_jaxpr((), (), invars, outvars, eqns)
    first = dict(zip((*(a for a, _ in carried), *stacks), (*init, *scan.outvars[len(init) :]), strict=True))
    names = [*(first[a] for a, _ in over), *others.values()]
    return Iteration(closed, places, len(over), tuple(None if a is None else same(a) for a in names))


def _with_rows(aval: ShapedArray, count: int) -> ShapedArray:
    """Return the type of a scanned or stacked array, with so many rows."""
    return aval.update(shape=(count, *aval.shape[1:]))


def _reads_row(eqn: jex.JaxprEqn, index: jex.Var) -> bool:
    """Return whether an equation is a `row_at` this index: in users' code, the call also asks whether the index is
    negative.
    """
    called = eqn.params.get("name") == "dynamic_index_in_dim" and len(eqn.invars) == 2
    return called and eqn.invars[1] is index and all(len(body.eqns) == 2 for body in inner_jaxprs(eqn))


def _rows_at(index: jex.Var, eqns: Sequence[jex.JaxprEqn]) -> int:
    """Return the number of rows of the arrays that equations read at an index, 0 without any."""
    return max((shaped(eqn.invars[0]).shape[0] for eqn in eqns if _reads_row(eqn, index)), default=0)


def _late_reads(eqns: Sequence[jex.JaxprEqn], index: jex.Var) -> list[jex.JaxprEqn]:
    """Return the equations, each read of a row moved to just before the row's first reader."""
    reads = [_reads_row(eqn, index) for eqn in eqns]
    waiting = {eqn.outvars[0]: eqn for eqn in compress(eqns, reads)}
    found: list[jex.JaxprEqn] = []
    for eqn in compress(eqns, map(not_, reads)):
        found.extend(waiting.pop(v) for v in dict.fromkeys(_compat.variables(eqn.invars)) if v in waiting)
        found.append(eqn)
    return [*found, *waiting.values()]


def _is_index(row: jex.Var) -> bool:
    """Return whether a row may be the iteration's index, as in loops that read rows of outside arrays by it."""
    return row.aval == ShapedArray((), jnp.int32)


def _writes_part(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation, or the last one of a call, overwrites a part of its operand."""
    inner = [each for jaxpr in inner_jaxprs(eqn) for each in jaxpr.eqns] or [eqn]
    return inner[-1].primitive.name == "dynamic_update_slice"
