"""Traced step on several devices -> the sharding of each value, and the step's part on one device.

Invariants: a replicated value counts whole, a sharded one counts its largest part. An equation's arithmetic is divided
among the devices over which an operand or result of it is sharded.

The step is lowered with closed loops and with each equation's index in its name stack. XLA's propagation of shardings
(Shardy) then gives the layout of each result, without compiling. It uses the shardings of arguments, constraints within
the program, types of meshes with explicit axes, and results of `shard_map`s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._attention._finding import Site, attention
from .._attention._operations import is_attention, of_one_device
from .._attention._pattern import Pattern
from .._attention._places import Places
from .._model._variant import Variant
from .._program import _compat
from .._program._compat import Args, Atom, Kwargs, shaped
from .._program._flops import aval_nbytes, eqn_flops
from .._program._sharding_propagation import Layout, propagated
from .._rewrite._loop_closing import close_loops
from .._rewrite._trace import Traced
from .._runtime._progress import phase
from ._program import Program, device_count
from ._tags import TAG


@dataclass(frozen=True)
class Shardings:
    """The shardings of a traced step's values.

    **Fields:** `devices` their number; `mesh` of the step, None if its arguments and constraints name none or several;
    `layouts` of the variables, where known.
    """

    devices: int
    mesh: Mesh | AbstractMesh | None
    layouts: Mapping[Any, Layout]

    def part(self, var: jex.Var) -> tuple[int, ...]:
        """Return the shape of the largest part that a device has of a variable."""
        shape = tuple(shaped(var).shape)
        layout = self.layouts.get(var, ())
        return tuple(
            -(-size // math.prod(axis[2] for axis in axes))
            for size, axes in zip(shape, layout or ((),) * len(shape), strict=True)
        )

    @property
    def inferred(self) -> bool:
        """Whether the compiler propagates shardings: the mesh has no explicit axes."""
        kinds = self.mesh.axis_types if self.mesh is not None else ()
        return bool(kinds) and all(kind == jax.sharding.AxisType.Auto for kind in kinds)

    def row_parts(self, traced: Traced, rows: Sequence[tuple[int, int, int]]) -> int:
        """Return the number of parts into which most bytes of results are sharded, along one dimension of each.

        **Arguments:** `rows` equation, result and dimension.
        """
        nbytes: dict[int, int] = {1: 0}
        for i, k, d in rows:
            var = traced.jaxpr.jaxpr.eqns[i].outvars[k]
            axes = self.layouts.get(var) or ((),) * len(var.aval.shape)
            count = math.prod(axis[2] for axis in axes[d])
            nbytes[count] = nbytes.get(count, 0) + aval_nbytes(var.aval)
        return max(nbytes, key=lambda count: nbytes[count])

    def ways(self, eqn: jex.JaxprEqn) -> int:
        """Return the number of devices among which an equation's arithmetic is divided."""
        atoms = _compat.variables((*eqn.invars, *eqn.outvars))
        axes = {axis for a in atoms for each in self.layouts.get(a, ()) for axis in each}
        return math.prod(size for _, _, size in axes)

    def of_attention(self, site: Site) -> Places | None:
        """Return the places of an attention, by the sharding of its scores; None if it stays as written."""
        scores = self.named(site.scores) if self.inferred else None
        if scores is None:
            return None
        return Places.of(scores, site.pattern, [self.named(a) for a in _compat.variables(site.operands)])

    def named(self, var: jex.Var) -> NamedSharding | None:
        """Return the layout of a variable as a `NamedSharding`, None if that cannot express it."""
        layout = self.layouts.get(var)
        if self.mesh is None or layout is None:
            return None
        names = dict(self.mesh.shape)
        if any(names.get(name) != size for axes in layout for name, _, size in axes):
            return None
        return NamedSharding(self.mesh, PartitionSpec(*(tuple(axis[0] for axis in axes) for axes in layout)))


@dataclass
class Division:
    """The shardings of a step's values, in each of its forms, computed on demand."""

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _known: dict[Variant, tuple[Shardings, Traced, tuple[float, ...]]] = field(default_factory=dict)

    @cached_property
    def devices(self) -> int:
        """The number of devices of the step."""
        return device_count(self.program, self.args, self.kwargs)

    def shardings(self, traced: Traced) -> Shardings | None:
        """Return the shardings of a form; None if the compiler does not divide its program."""
        return self._found(traced)[0] if self._divided(traced) else None

    def local(self, traced: Traced) -> tuple[Traced, tuple[float, ...] | None]:
        """Return a form's part on one device, and the arithmetic of its equations there, None if undivided."""
        return self._found(traced)[1:] if self._divided(traced) else (traced, None)

    def _divided(self, traced: Traced) -> bool:
        """Return whether the compiler divides the program among devices."""
        return self.devices > 1 and traced.around is None

    def with_parts(self, traced: Traced) -> Traced:
        """Return the form with the number of parts into which each region's rows are sharded, by most of their bytes.
        Only regions of most of the step have parts, and only if the compiler propagates shardings.
        """
        places = self.shardings(traced)
        if places is None or not traced.sites.regions:
            return traced
        parts = [
            places.row_parts(traced, rows) if region.whole and places.inferred else 0
            for region, rows in zip(traced.sites.regions, traced.row_places, strict=True)
        ]
        arguments = traced.jaxpr.jaxpr.invars
        nbytes = sum(aval_nbytes(v.aval) for v in arguments)
        own = sum(math.prod(places.part(v)) * v.aval.dtype.itemsize for v in arguments)
        return traced.with_regions_on_devices(parts, own / nbytes if nbytes else 1.0)

    def with_attention(self, traced: Traced, before: Traced) -> Traced:
        """Return the form with the places of attention that may run without its scores; equal patterns need equal
        places.

        **Arguments:** `before` the step before operands of products are gathered in separate equations.
        """
        here = self.shardings(traced)
        if here is None:
            return traced
        found = _places(traced, here)
        if found and before is not traced:  # there, keys are not gathered for the products yet
            there = _places(before, shardings(before, self.program, self.args, self.kwargs))
            passing = {pattern: own for pattern, own in there.items() if own.turns > 1}
            found |= {pattern: passing[pattern] for pattern in found if pattern in passing}
        return traced.attending(found)

    def named(self, var: jex.Var) -> NamedSharding | None:
        """Return the sharding of a variable of any form, None if unknown."""
        if var is None or _compat.is_literal(var):
            return None
        return next((s.named(var) for s, _, _ in self._known.values() if var in s.layouts), None)

    def _found(self, traced: Traced) -> tuple[Shardings, Traced, tuple[float, ...]]:
        if traced.form not in self._known:
            with phase("propagating shardings"):
                found = shardings(traced, self.program, self.args, self.kwargs)
            self._known[traced.form] = found, *local(traced, found)
        return self._known[traced.form]


def _places(traced: Traced, places: Shardings) -> dict[Pattern, Places]:
    """Return the places of attention without its scores, see `Division.with_attention`."""
    found: dict[Pattern, Places | None] = {}
    for site in attention(traced.jaxpr, traced.program.scopes, traced.program.alive):
        own = places.of_attention(site)
        found[site.pattern] = own if found.setdefault(site.pattern, own) == own else None
    return {pattern: own for pattern, own in found.items() if own is not None}


def shardings(traced: Traced, program: Program, args: Args, kwargs: Kwargs) -> Shardings:
    """Return the compiler's shardings of a step on several devices."""
    lowered = program.lower(program.evaluating(_numbered(traced), traced, keep_unused=True), args, kwargs)
    found, arguments = propagated(lowered)
    results: dict[int, list[list[tuple[tuple[int, ...], Layout]]]] = {}
    for stack, _, made in found:
        if tags := TAG.findall(stack.partition('"(')[0] + "/"):
            results.setdefault(int(tags[-1]), []).append(made)
    jaxpr = traced.jaxpr.jaxpr
    given = zip(jaxpr.invars, arguments[-len(jaxpr.invars) :], strict=True)
    layouts: dict[Any, Layout] = {v: layout[: len(v.aval.shape)] for v, layout in given}  # keys end in words
    for var, const in zip(jaxpr.constvars, traced.jaxpr.consts, strict=True):
        layouts[var] = _layout_of(getattr(const, "sharding", None), len(getattr(const, "shape", ())))
    for i, eqn in enumerate(jaxpr.eqns):
        for k, var in enumerate(eqn.outvars):
            if hasattr(var.aval, "shape"):
                layouts[var] = _result(eqn, k, results.get(i, []), layouts)
    named = dict.fromkeys(meshes(jaxpr.eqns, jax.tree.leaves((args, kwargs, program.in_shardings))))
    return Shardings(
        device_count(program, args, kwargs), next(iter(named)) if len(named) == 1 else None, layouts
    )


def local(traced: Traced, places: Shardings) -> tuple[Traced, tuple[float, ...]]:
    """Return the step with the types of one device's parts, and the arithmetic of its equations there. The result is
    for pricing only; it cannot run.
    """
    renamed: dict[Any, Any] = {}

    def of(var: Atom) -> Any:
        if _compat.is_literal(var) or not hasattr(var.aval, "dtype"):
            return var
        if var not in renamed:
            weak = getattr(var.aval, "weak_type", False)
            renamed[var] = _compat.new_var(ShapedArray(places.part(var), shaped(var).dtype, weak_type=weak))
        return renamed[var]

    def each(variables: Iterable[Atom]) -> list[Any]:
        return [of(v) for v in variables]

    jaxpr = traced.jaxpr.jaxpr
    flops = tuple(eqn_flops(eqn) / places.ways(eqn) for eqn in jaxpr.eqns)
    here = (of_one_device(eqn) if is_attention(eqn) else eqn for eqn in jaxpr.eqns)
    eqns = [eqn.replace(invars=each(eqn.invars), outvars=each(eqn.outvars)) for eqn in here]
    closed = _compat.new_jaxpr(
        each(jaxpr.constvars), traced.jaxpr.consts, each(jaxpr.invars), each(jaxpr.outvars), eqns
    )
    there = replace(
        traced,
        program=traced.program.anew(
            closed=closed,
            over={result: of(argument) for result, argument in traced.program.over.items()},
            encoded=tuple(e.renamed(of) for e in traced.program.encoded),
        ),
        labels={of(v): name for v, name in traced.labels.items()},
        hints=tuple(replace(hint, variable=of(hint.variable)) for hint in traced.hints),
    )
    return there, flops


def _numbered(traced: Traced) -> jex.ClosedJaxpr:
    """Return the step with its loops closed, and each equation's index in its name stack."""
    jaxpr = traced.jaxpr.jaxpr
    named = [_compat.in_scope(eqn, f"#{i}") for i, eqn in enumerate(jaxpr.eqns)]
    eqns = close_loops(named, traced.loop_of, traced.loops)
    return _compat.new_jaxpr(jaxpr.constvars, traced.jaxpr.consts, jaxpr.invars, jaxpr.outvars, eqns)


def _result(
    eqn: jex.JaxprEqn,
    k: int,
    made: Sequence[Sequence[tuple[tuple[int, ...], Layout]]],
    layouts: Mapping[Atom, Layout],
) -> Layout:
    """Return the layout of an equation's result, by the results of its lowered operations, else by its operands."""
    shape, name = tuple(shaped(eqn.outvars[k]).shape), eqn.primitive.name
    operand = next((layouts[a] for a in _compat.variables(eqn.invars) if a in layouts), ())
    if name == "scan_slice":
        return operand[1:]
    if name == "scan_stack":
        row = eqn.invars[-1] if len(eqn.invars) == 2 else eqn.invars[0]
        inner = layouts.get(row, ()) if len(eqn.invars) == 1 else operand
        return ((), *inner) if len(inner) + 1 == len(shape) else ((),) * len(shape)
    alike = [each for each in made if len(each) == len(eqn.outvars)]
    for results in reversed(alike):
        if results[k][0] == shape:
            return results[k][1]
    for results in reversed(made):
        for size, layout in results:
            if size == shape:
                return layout
    same = (a for a in _compat.variables(eqn.invars) if getattr(a.aval, "shape", None) == shape)
    return next((layouts[a] for a in same if a in layouts), ((),) * len(shape))


def _layout_of(sharding: object, rank: int) -> Layout:
    """Return the layout of a sharding; dimensions without axes are whole."""
    if not isinstance(sharding, NamedSharding):
        return ((),) * rank
    spec = [*sharding.spec, *(None,) * (rank - len(sharding.spec))]
    named = [(each,) if isinstance(each, str) else each or () for each in spec]
    return tuple(tuple((name, 1, sharding.mesh.shape[name]) for name in each) for each in named)


def meshes(eqns: Sequence[jex.JaxprEqn], leaves: Sequence[object]) -> Iterable[Mesh | AbstractMesh]:
    """Yield the meshes of arguments and of the program's constraints."""
    given = [leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None) for leaf in leaves]
    given += [eqn.params["sharding"] for eqn in eqns if eqn.primitive.name == "sharding_constraint"]
    for sharding in given:
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            yield sharding.mesh
