"""Equations and constraints -> the planned step's equations, one after the other.

The writer keeps the name by which each value is read at present. No other module changes equations once written.

Images pass barriers with their axes in memory order, see `_layouts`, and are transposed back behind them.

Backward passes that are separate programs may themselves be differentiated, and need barriers that can be. JAX's rule
for `lax.optimization_barrier` gives every result a tangent, also integers, and `cond` rejects an index with a tangent.
So a barrier that integers pass is a `custom_jvp` function, whose tangents do not pass it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import JaxprEqn, Var

from .._program import _compat
from .._program._compat import Atom, SourceInfo
from .._program._splice import inlined
from .._rewrite._kernel_choice import inline, replaced
from .._rewrite._loop_closing import begun_late, stacked_nbytes
from .._rewrite._loop_inlining import CARRY, LAST, SLICE, STACK
from ._analysis import Analysis
from ._constraints import ZERO, Constraint, Point, constraints
from ._hoisting import ZERO as ZERO_LITERAL
from ._hoisting import is_zero_literal
from ._joint import is_inexact


def differentiable_barrier(
    operands: Sequence[Atom], outvars: Sequence[jex.Var], source_info: SourceInfo
) -> Any:
    """Return the equation of `_compat.barrier` in a form that can be differentiated."""
    if all(is_inexact(a.aval) for a in operands) or any(map(_compat.varying_axes, operands)):
        return _compat.barrier(operands, outvars, source_info)

    @jax.custom_jvp
    def passing(*primals: jax.Array) -> Any:
        return jax.lax.optimization_barrier(primals)

    @passing.defjvp
    def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        return passing(*primals), tangents

    closed = jax.make_jaxpr(passing)(*(a.aval for a in operands))
    return inlined(closed, operands, source_info, outvars)[0][0]


SCOPES = {
    "blocks": "barrier_block",
    "last reads": "last_read",
    "masks": "barrier_mask",
    "pieces": "barrier_pieces",
}
"""The scope of a barrier in name stacks, by its rule."""


class Writer:
    """The equations written so far, and the present names of values.

    **Fields:** `eqns` the equations; `loop_of` the loop that contains each of them, -1 for none; `clones` the present
    stage's clones by variable; `held` the names, behind the present stage's barrier, of the values that pass it to
    delay their readers; `made` the loop that contains each variable; `last` the equations that come last in their
    stage, because they wait for others in it.
    """

    def __init__(self, step: Analysis) -> None:
        self.step = step
        self.eqns: list[JaxprEqn] = []
        self.loop_of: list[int] = []
        self.clones: dict[Var, Var] = {}
        self.held: dict[Var, Var] = {}
        self.made: dict[Var, int] = {}
        self._names: dict[Var, Var] = {}  # variable -> the name by which all later equations read it
        self._behind: dict[int, dict[Var, Var]] = {}  # equation -> the names of what was held back for it
        self._zeros: dict[int, Var] = {}  # loop -> a zero behind the barrier before it
        self._is_late = False  # whether the forward pass is written
        self._needs_replacement = replaced(step.graph.backend)
        self._constraints: dict[Point, list[Constraint]] = {}
        self.last: set[int] = set()
        for each in constraints(step):
            self._constraints.setdefault(each.at, []).append(each)
            if each.at.where == "behind" and each.readers:
                self.last.update(each.readers)

    def append(self, eqns: Iterable[JaxprEqn], loop: int) -> None:
        """Write equations unchanged, in a loop, -1 for none."""
        graph = self.step.graph
        for eqn in eqns:
            placed = inline(eqn) if self._needs_replacement(eqn) else [eqn]
            if (
                graph.backend.materialises_eagerly
                and self._is_late
                and loop < 0
                and stacked_nbytes(eqn) > graph.small_nbytes
            ):
                placed = begun_late(eqn)
            self.eqns.extend(placed)
            self.loop_of.extend([loop] * len(placed))
            around = self.step.traced.loops[loop].parent if eqn.primitive in (LAST, STACK) else loop
            self.made.update((v, around) for each in placed for v in each.outvars)

    def rename(self, names: Iterable[tuple[Var, Var]]) -> None:
        """Let all later equations read variables by these names."""
        self._names.update(names)

    def name(self, var: Var) -> Var:
        """Return the present name of a variable outside of loops, if it is not cloned."""
        return self._names.get(var, var)

    def put(self, n: int, eqn: JaxprEqn, loop: int, clone_of: int | None = None) -> None:
        """Write an equation with the present names of its operands.

        **Arguments:** `n` the number of the equation, or of the one that it replaces; `loop` the loop that contains it,
        -1 for none; `clone_of` the stage for which it is cloned.
        """
        behind, step = self._behind.get(n, {}), self.step
        operands = _compat.variables(eqn.invars)
        names = {a: self.seen(eqn, loop, a, behind.get(a), self.clones.get(a)) for a in operands}
        made = _compat.renamed(eqn, names)
        if clone_of is not None:
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            made = _compat.in_scope(made.replace(outvars=outvars), f"recompute_{clone_of}")
        if ZERO in behind and step.graph.backend.materialises_eagerly:
            made = made.replace(invars=[behind[ZERO] if is_zero_literal(a) else a for a in made.invars])
        elif eqn.primitive is STACK and len(eqn.invars) == 1 and eqn.params["loop"] in self._zeros:
            made = made.replace(invars=[*made.invars, self._zeros[eqn.params["loop"]]])
        self.append([made], loop)
        if clone_of is not None:
            cloned = zip(eqn.outvars, made.outvars, strict=True)
            self.clones.update((v, name) for v, name in cloned if step.value_of[v] not in step.schedule.saved)

    def seen(self, eqn: JaxprEqn, loop: int, var: Var, *names: Var | None) -> Var:
        """Return the name by which an equation in a loop reads an operand.

        It is the first name in scope, of `names` and the common one; else the operand itself. A loop's initial carries
        and slices are read outside of the loop, where names from its iterations are not in scope.
        """
        parents = self.step.graph.parents
        if eqn.primitive in (CARRY, SLICE) and loop >= 0:
            loop = parents[loop]
        around = {-1}
        while loop >= 0:
            around.add(loop)
            loop = parents[loop]
        known = (name for name in (*names, self._names.get(var)) if name is not None)
        return next((name for name in known if self.made.get(name, -1) in around), var)

    def begin_stage(self, k: int) -> None:
        """Drop clones that the stage does not read, and the names that its own clones had behind earlier barriers."""
        self.clones = {var: clone for var, clone in self.clones.items() if var in self.step.handed_on[k]}
        self.held, self._is_late = {}, True
        for n in self.step.cloned[k]:
            self._behind.pop(n, None)

    def begin_loop(self, loop: int) -> None:
        """Allocate a loop's stacks from the zero behind the barrier before it, which is a stage's last."""
        if ZERO in self.held:
            self._zeros[loop] = self.held[ZERO]

    def read_behind(self, names: Mapping[int, Mapping[Var, Var]]) -> None:
        """Let these equations read variables by these names."""
        for n, read in names.items():
            self._behind.setdefault(n, {}).update(read)

    def constrain(
        self, at: Point, loop: int = -1, hold: Sequence[Var] = (), until: Sequence[Var] = ()
    ) -> dict[Var, Var]:
        """Write the barrier of a point in a loop, -1 for none, if anything passes it to delay readers; return the names
        of those values behind it.

        **Arguments:** `hold`, `until` further values as in `Constraint`, of copies from and to host memory.
        """
        found, inner = self._constraints.get(at, []), at.where in ("stage", "within")
        if inner:
            self.held = {}
        if not (hold or until or any(each.hold or each.readers != {} for each in found)):
            return {}
        held = dict.fromkeys([*(v for each in found for v in each.hold), *hold])
        until = [
            v for v in dict.fromkeys([*(v for each in found for v in each.until), *until]) if v not in held
        ]
        both = [*held, *until]
        held, until = _alike(held, both), _alike(until, both)
        source = self.step.source[self.step.graph.forward_stop if inner else at.number].source_info
        if inner:
            scope = f"barrier_{at.number}" if at.number < len(self.step.graph.stages) else "barrier_updates"
        else:
            scope = SCOPES[found[0].why]
        operands = [self.clones.get(v) or self._names.get(v, v) for v in (*held, *until)]
        results = self.barrier((*held, *until), operands, scope, loop, source)
        names = dict(zip((*held, *until), results, strict=True))
        self.rename((v, names[v]) for v in until)
        if loop < 0 and self.step.graph.backend.fuses_reductions:
            # With two names, a saved value may be in memory in two layouts: 4 % of a ViT's peak.
            self.rename((v, names[v]) for v in held if self.step.value_of.get(v) in self.step.schedule.saved)
        for each in found:
            if each.readers is None:
                self.rename((v, names[v]) for v in each.hold if v in names)
            readers = each.readers or {}
            self.read_behind({n: {v: names[v] for v in read if v in names} for n, read in readers.items()})
        behind = {v: names[v] for v in held}
        if inner:
            self.held = behind
        return behind

    def barrier(
        self,
        variables: Sequence[Var],
        operands: Sequence[Var],
        scope: str,
        loop: int,
        source_info: _compat.SourceInfo,
    ) -> list[Var]:
        """Write a barrier in a loop, -1 for none; return the operands' names behind it.

        **Arguments:** `variables` the traced step's variables with the operands' values; `scope` the barrier's name in
        name stacks.
        """
        if not operands:
            return []
        values, value_of = self.step.graph.values, self.step.value_of
        axes = [values[value_of[v]].axes if v in value_of else () for v in variables]
        turned = [
            _compat.permuted(a, order, source_info) if order else None
            for a, order in zip(operands, axes, strict=True)
        ]
        passing = [eqn.outvars[0] if eqn else a for a, eqn in zip(operands, turned, strict=True)]
        passed = [_compat.new_var(a.aval) for a in passing]
        back = [
            _compat.permuted(a, [order.index(axis) for axis in range(len(order))], source_info)
            if order
            else None
            for a, order in zip(passed, axes, strict=True)
        ]
        make = differentiable_barrier if self.step.cotangents else _compat.barrier
        passing = [ZERO_LITERAL if a is ZERO else a for a in passing]
        eqns = [*filter(None, turned), make(passing, passed, source_info), *filter(None, back)]
        self.append([_compat.in_scope(eqn, scope) for eqn in eqns], loop)
        return [eqn.outvars[0] if eqn else a for a, eqn in zip(passed, back, strict=True)]


def _alike(chosen: Iterable[Var], variables: Collection[Var]) -> list[Var]:
    """Return the chosen variables that may pass one barrier.

    In a `shard_map`, all its operands must vary over the same mesh axes: those of the variable that varies over most.
    """
    axes = max(map(_compat.varying_axes, variables), key=len, default=frozenset())
    return [v for v in chosen if _compat.varying_axes(v) == axes]
