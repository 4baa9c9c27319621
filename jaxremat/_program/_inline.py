"""Jaxpr -> flat equations: bodies in place of calls, of loops with one iteration and of branches that are certain to be
taken; operands in place of identities.

Invariant: evaluating the flat equations gives the jaxpr's results. Each keeps its source line; its name stack is that
of the surrounding calls with its own below.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import numpy as np

from . import _compat
from ._compat import AbstractValue, Atom, SourceInfo, shaped
from ._hints import Hint, is_hint, read_hint
from ._operation_keys import UNCHANGED
from ._primitives import is_backward, is_barrier, is_in_chunks
from ._splice import inlined, needed

T = TypeVar("T")

_CHECKPOINTS = frozenset({"checkpoint", "remat2"})
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
_DERIVATIVES = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
}
_PLATFORMS = frozenset({"cpu", "gpu", "cuda", "rocm", "tpu"})
"""The platforms of whole programs. Kernels inside them may be for others, such as Pallas kernels for a TPU."""

_IDENTITIES = frozenset({"name", "copy", "copy_p"})
CALLS = frozenset({*_CALLS, *_DERIVATIVES})
"""Equations that evaluate one jaxpr with their operands."""

_MARKS = frozenset({"stop_gradient", "jaxremat_hint"})  # identities that mean something to differentiation


class Inliner:
    """Inlines one program; constants of all bodies become constants of the whole.

    **Arguments:** `respect_checkpoint` keeps the regions that the user's own checkpoints recompute in the backward pass
    as they are; `derivatives`: the program will be differentiated later, so functions with derivatives of their own
    stay calls, and hints stay where they are.

    **Fields:** `constvars` and `consts` met so far; `labels` the user's `checkpoint_name`s by variable; `rematted`
    whether a checkpoint of the user's own was inlined; `hints` the marks of `jaxremat.hint`.
    """

    def __init__(self, *, respect_checkpoint: bool = False, derivatives: bool = False) -> None:
        self.respect_checkpoint = respect_checkpoint
        self.derivatives = derivatives
        self.calls = _CALLS if derivatives else _CALLS | _DERIVATIVES
        self.constvars: list[Any] = []
        self.consts: list[Any] = []
        self.labels: dict[Any, str] = {}
        self.hints: dict[Hint, None] = {}
        self.rematted = False
        self._const_of: dict[int, Any] = {}
        self._row_of: dict[Any, Any] = {}  # a stack of one -> what was stacked
        self._numbers: dict[Any, jex.Literal] = {}  # what literals were converted to

    def branch(self) -> "Inliner":
        """Return an inliner that continues from this state without changing it."""
        found = Inliner(respect_checkpoint=self.respect_checkpoint, derivatives=self.derivatives)
        for name, value in vars(self).items():
            setattr(found, name, value.copy() if isinstance(value, (list, dict)) else value)
        return found

    def forget_rows(self) -> None:
        """Read the rows of stacks again from now on: other passes may have removed or moved the equations that computed
        them.
        """
        self._row_of.clear()

    def program(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """Return the whole program, flat."""
        eqns: list[Any] = []
        invars = [_compat.new_var(v.aval) for v in closed.jaxpr.invars]
        outvars = self.body(closed, invars, None, eqns)
        return _compat.new_jaxpr(self.constvars, self.consts, invars, outvars, eqns)

    def body(
        self,
        closed: jex.ClosedJaxpr,
        operands: Sequence[Atom],
        info: SourceInfo | None,
        into: list[jex.JaxprEqn],
        *,
        marks: bool = False,
    ) -> list[Atom]:
        """Append a body's flat equations for these operands below a call's source info; return its results.

        **Arguments:** `marks` keeps names and hints, for bodies that are inlined for good.
        """
        jaxpr, consts = _compat.opened(closed)
        known = [self.constant(c, v.aval) for c, v in zip(consts, jaxpr.constvars, strict=True)]
        return self._walk(jaxpr, [*known, *operands], info, into, marks)

    def constant(self, const: object, aval: AbstractValue) -> Atom:
        """Return the program's variable for a constant of one of its bodies."""
        if id(const) not in self._const_of:
            self._const_of[id(const)] = _compat.new_var(aval)
            self.constvars.append(self._const_of[id(const)])
            self.consts.append(const)
        return self._const_of[id(const)]

    def _walk(
        self,
        jaxpr: jex.Jaxpr,
        operands: Sequence[Atom],
        outer: SourceInfo | None,
        into: list[jex.JaxprEqn],
        marks: bool,
    ) -> list[Atom]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

        def read(atom: Atom) -> Atom:
            return atom if _compat.is_literal(atom) else env[atom]

        barriers = frozenset() if self.respect_checkpoint else _of_checkpoints(jaxpr.eqns, outer)
        for i, written in enumerate(jaxpr.eqns):
            eqn = _compat.without_hijax(written, derivatives=self.derivatives)
            invars = [read(a) for a in eqn.invars]
            if i in barriers:
                self.rematted = True
                env.update(zip(eqn.outvars, invars, strict=True))
                continue
            info = eqn.source_info if outer is None else _compat.under(outer, eqn)
            name = eqn.primitive.name
            if (
                not (self.respect_checkpoint and _computes_again(eqn, info))
                and (inner := self._call(eqn)) is not None
            ):
                self.rematted = self.rematted or name in _CHECKPOINTS
                env.update(zip(eqn.outvars, self.body(inner, invars, info, into, marks=marks), strict=True))
                continue
            if name == "platform_index" and (index := index_on_every_platform(eqn)) is not None:
                env[eqn.outvars[0]] = _compat.literal(np.int32(index))
                continue
            if name == "cond" and _compat.is_literal(invars[0]) and not eqn.effects:
                taken = eqn.params["branches"][int(invars[0].val)]
                made = self.body(taken, invars[1:], info, into, marks=marks)
                env.update(zip(eqn.outvars, made, strict=True))
                continue
            if name == "scan" and eqn.params["length"] == 1 and not eqn.effects:
                moved = eqn.replace(invars=invars, source_info=info)
                env.update(zip(eqn.outvars, self._iteration(moved, into, marks), strict=True))
                continue
            identity = is_identity(eqn, invars) or (name in _MARKS and not self.derivatives)
            if identity and not (marks and (name == "name" or is_hint(eqn))):
                if is_hint(eqn) and (found := read_hint(eqn, invars[0])) is not None:
                    self.hints.setdefault(found)
                if name == "name" and not _compat.is_literal(invars[0]):
                    self.labels.setdefault(invars[0], eqn.params["name"])
                env[eqn.outvars[0]] = invars[0]
                continue
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            if (number := _converted(eqn, invars)) is not None:
                self._numbers[outvars[0]] = number
            if name == "pad" and not _compat.is_literal(invars[1]):  # `jnp.pad` converts what it pads with
                invars = [invars[0], self._numbers.get(invars[1], invars[1])]
            moved = eqn.replace(invars=invars, outvars=outvars, source_info=info)
            if name in ("scan", "cond") and outvars and not self.respect_checkpoint:
                # without what its bodies never read
                moved = _compat.with_results(moved, [True] * len(outvars))
            into.extend(_each_placed(moved) if name == "device_put" else [moved])
        return [read(a) for a in jaxpr.outvars]

    def _iteration(self, eqn: jex.JaxprEqn, into: list[jex.JaxprEqn], marks: bool) -> list[Atom]:
        """Append the one iteration of a scan; return the scan's results."""
        consts, init, scanned = _compat.scan_operands(eqn)
        rows = [self._row(a, eqn.source_info, into) for a in scanned]
        operands = [*consts, *init, *rows]
        found = self.body(eqn.params["jaxpr"], operands, eqn.source_info, into, marks=marks)
        results = found[: len(init)]
        for row, stack in zip(found[len(init) :], eqn.outvars[len(init) :], strict=True):
            shape = shaped(stack).shape
            made = _compat.new_var(stack.aval)
            _append(lambda x, shape=shape: jax.lax.reshape(x, shape), row, made, eqn.source_info, into)
            self._row_of[made] = row
            results.append(made)
        return results

    def _row(self, stack: Atom, info: SourceInfo, into: list[jex.JaxprEqn]) -> jex.Var:
        """Return the only row of a stack."""
        if stack not in self._row_of:
            self._row_of[stack] = _compat.new_var(jex.mapped_aval(1, 0, stack.aval))
            _append(lambda x: jax.lax.squeeze(x, (0,)), stack, self._row_of[stack], info, into)
        return self._row_of[stack]

    def _call(self, eqn: jex.JaxprEqn) -> Any | None:
        """Return the body of a call that may be inlined."""
        name = eqn.primitive.name
        if is_in_chunks(eqn):
            return None
        if name not in self.calls or (name in ("jit", "pjit") and not _compat.is_plain_call(eqn.params)):
            return None
        return body_of(eqn)


def body_of(eqn: jex.JaxprEqn) -> Any | None:
    """Return the jaxpr that an equation evaluates with its operands, None for other equations."""
    body = eqn.params.get((_CALLS | _DERIVATIVES).get(eqn.primitive.name, ""))
    if body is None:
        return None
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    if len(jaxpr.constvars) != len(consts) or len(jaxpr.invars) != len(eqn.invars):
        return None
    return body


def _append(
    fn: Callable[[jax.Array], jax.Array],
    atom: Atom,
    result: jex.Var | None,
    info: SourceInfo,
    into: list[jex.JaxprEqn],
) -> None:
    """Append the one equation of a function of an atom, under the name of its result."""
    of = jax.ShapeDtypeStruct(shaped(atom).shape, shaped(atom).dtype)
    into.extend(inlined(jax.make_jaxpr(fn)(of), [atom], info, [result])[0])


def _of_checkpoints(eqns: Sequence[jex.JaxprEqn], outer: SourceInfo | None) -> frozenset[int]:
    """Return the barriers, by position, behind which checkpoints start to recompute.

    Under `jax_remat3`, no equation of the backward pass contains a checkpoint's region. The region's operands pass a
    barrier with a name stack of its own; the recomputed equations and their transposes are below that name.

    **Arguments:** `outer` the source info of the call or loop that contains the equations.
    """
    readers: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for a in _compat.variables(eqn.invars):
            readers.setdefault(a, []).append(eqn)
    found = set()
    for i, eqn in enumerate(eqns):
        if not is_barrier(eqn):
            continue
        below = {_compat.scope_below(r, eqn) for v in eqn.outvars for r in readers.get(v, ())}
        info = eqn.source_info if outer is None else _compat.under(outer, eqn)
        in_backward = below == {"transpose"} and is_backward(eqn.replace(source_info=info))
        if in_backward or _compat.REMATTED in below:
            found.add(i)
    return frozenset(found)


def _computes_again(eqn: jex.JaxprEqn, info: SourceInfo) -> bool:
    """Return whether a checkpoint stands in the backward pass, where it recomputes values that it did not save."""
    in_backward = is_backward(eqn.replace(source_info=info))
    return in_backward and eqn.primitive.name in _CHECKPOINTS and eqn.params["differentiated"]


def index_on_every_platform(eqn: jex.JaxprEqn) -> int | None:
    """Return the branch that a choice by platform takes on every platform of whole programs, None if they differ."""
    *named, otherwise = eqn.params["platforms"]
    if otherwise is not None or not _PLATFORMS.isdisjoint(name for names in named for name in names or ()):
        return None
    return len(named)


def _converted(eqn: jex.JaxprEqn, invars: Sequence[Atom]) -> jex.Literal | None:
    """Return a literal converted to another type, if it is the same number; None for other equations."""
    if eqn.primitive.name != "convert_element_type" or not _compat.is_literal(invars[0]):
        return None
    value = np.asarray(invars[0].val)
    number = _compat.literal(value.astype(eqn.params["new_dtype"]))
    return number if number.aval == eqn.outvars[0].aval and number.val == value else None


def is_identity(eqn: jex.JaxprEqn, invars: Sequence[Atom]) -> bool:
    """Return whether the only result is the only operand, with the same type."""
    if len(invars) != 1 or len(eqn.outvars) != 1 or invars[0].aval != eqn.outvars[0].aval:
        return False
    if eqn.primitive.name == "reduce_precision":
        info = jax.numpy.finfo(shaped(invars[0]).dtype)
        return eqn.params["exponent_bits"] == info.nexp and eqn.params["mantissa_bits"] == info.nmant
    return eqn.primitive.name in _IDENTITIES


def _each_placed(eqn: jex.JaxprEqn) -> list[Any]:
    """Return a `jax.device_put` of several arrays as one for each."""
    several = ("devices", "srcs", "copy_semantics")
    found = []
    for i, (a, v) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        own = {name: eqn.params[name][i : i + 1] for name in several}
        found.append(eqn.replace(invars=[a], outvars=[v], params={**eqn.params, **own}))
    return found


def followed(
    jaxpr: jex.Jaxpr,
    known: dict[jex.Var, T],
    literal: Callable[[jex.Literal], T],
    body: Callable[[_compat.AnyJaxpr, list[T]], Sequence[T]],
    results: Callable[[jex.JaxprEqn, list[T]], Sequence[T]],
) -> list[T]:
    """Propagate facts through a body, for the equations that these results or effects need, and return the facts about
    the results.

    **Arguments:** `results` the rule for an equation; `known` the facts about variables, to which more are added;
    `literal` the rule for literals, `body` for the results of a call's body.
    """

    def read(atom: Atom) -> T:
        return literal(atom) if _compat.is_literal(atom) else known[atom]

    for eqn in (jaxpr.eqns[i] for i in needed(jaxpr.eqns, jaxpr.outvars)):
        eqn, operands = _compat.without_hijax(eqn, derivatives=False), list(map(read, eqn.invars))
        if eqn.primitive.name in UNCHANGED or is_identity(eqn, eqn.invars):
            made = operands
        elif (inner := body_of(eqn)) is not None:
            made = body(inner, operands)
        else:
            made = results(eqn, operands)
        known.update(zip(eqn.outvars, made, strict=True))
    return [read(a) for a in jaxpr.outvars]
