"""The only module that uses private or versioned parts of JAX; all others import JAX's public names."""

import enum
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax._src import ad_checkpoint as _checkpoint
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import hijax as _hijax
from jax._src import sharding_impls as _shardings
from jax._src import source_info_util as _source
from jax._src import traceback_util as _tracebacks
from jax._src import xla_bridge as _bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.state import discharge as _discharge
from jax._src.state import types as _state

try:  # from jax 0.11 on, where scans say with it how their operands are grouped
    _flattree: Any = importlib.import_module("jax._src.flattree")
except ImportError:
    _flattree = None

_UNSPECIFIED: type = _shardings.UnspecifiedValue  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Atom: TypeAlias = jex.Var | jex.Literal
"""An operand of an equation."""

MemorySpace: TypeAlias = _core.MemorySpace
"""One of a device's memories."""

AbstractValue: TypeAlias = jax.core.AbstractValue
"""The type of a variable, of an array or not."""

Aval: TypeAlias = jax.core.ShapedArray
"""The shape and the type of an array."""

DType: TypeAlias = np.dtype
"""The type of an array's entries."""

SourceInfo: TypeAlias = _source.SourceInfo
"""The user's line and the name stack of an equation."""

AnyJaxpr: TypeAlias = jex.Jaxpr | jex.ClosedJaxpr
"""A body of an equation."""

Args: TypeAlias = tuple[object, ...]
"""A call's positional arguments, trees of arrays and whatever else a user hands over."""

Kwargs: TypeAlias = dict[str, object]
"""A call's arguments by name."""

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:2])


def new_var(aval: AbstractValue) -> jex.Var:
    """Return a fresh variable of this type."""
    return jex.Var(aval)


def new_jaxpr(
    constvars: Sequence[jex.Var],
    consts: Sequence[object],
    invars: Sequence[jex.Var],
    outvars: Sequence[Atom],
    eqns: Sequence[jex.JaxprEqn],
) -> jex.ClosedJaxpr:
    """Return a closed jaxpr whose effects are the union of its equations' effects."""
    effects = _core.join_effects(*(eqn.effects for eqn in eqns)) if eqns else jex.no_effects
    debug_info = _core.DebugInfo("planned", "jaxremat", tuple(f"x{i}" for i in range(len(invars))), None)
    # JAX lowers primitives such as a name under `jax_remat3` only where the jaxpr says that it has some.
    is_high = any(eqn.primitive.is_high(*(a.aval for a in eqn.invars), **eqn.params) for eqn in eqns)
    jaxpr = jex.Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info, is_high)
    return jex.ClosedJaxpr(jaxpr, list(consts))


def has_effects(eqn: jex.JaxprEqn) -> bool:
    """Return whether running the equation has effects besides its results. For JAX, naming a mesh axis, as a collective
    does, is an effect too.
    """
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def is_reference(var: jex.Var) -> bool:
    """Return whether a variable is a reference of `jax.new_ref`."""
    return isinstance(var.aval, _state.AbstractRef)


def has_references(closed: jex.ClosedJaxpr) -> bool:
    """Return whether a program reads or writes references: arguments, closed over, or of its own."""
    jaxpr = closed.jaxpr
    inside = _core.internal_mutable_array_effect in jaxpr.effects
    return inside or any(map(is_reference, (*jaxpr.constvars, *jaxpr.invars)))


def is_key(atom: Atom) -> bool:
    """Return whether a variable holds keys of a random generator, for which there are no zeros."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def discharged(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the program with values in place of references, whose final values follow its results. **Raises:**
    NotImplementedError for primitives that JAX cannot convert.
    """
    return _discharge.discharge_state(closed)


def load_plugins_in(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let JAX load its devices' plugins, once it looks for any, within a context."""
    load = _bridge.discover_pjrt_plugins

    def within() -> None:
        with context():
            load()

    _bridge.discover_pjrt_plugins = within


def process_store() -> Any:
    """Return the key-value store that all processes of this job share, None if `jax.distributed` is not initialised."""
    return _distributed.global_state.client


def check_jaxpr(closed: jex.ClosedJaxpr) -> None:
    """Run JAX's own type checker over the jaxpr."""
    try:
        jex.check_jaxpr(closed.jaxpr)
    except AssertionError as error:  # of a primitive's own rule for types
        raise TypeError(*error.args) from error


def name_stack_text(eqn: jex.JaxprEqn) -> str:
    """Return the equation's name stack, as profilers show it."""
    return str(eqn.source_info.name_stack)


def under(outer: SourceInfo, eqn: jex.JaxprEqn) -> SourceInfo:
    """Return the source info of an inlined equation: its own line, its name stack below that of the call."""
    info = eqn.source_info
    stack = outer.name_stack + info.name_stack
    return info.replace(name_stack=stack)


def in_scope(eqn: jex.JaxprEqn, scope: str) -> jex.JaxprEqn:
    """Return the equation with one more name at the end of its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


def has_scope(eqn: jex.JaxprEqn, scope: str) -> bool:
    """Return whether this name is in the equation's name stack."""
    return any(part.name == scope for part in eqn.source_info.name_stack.stack)


def scope_below(eqn: jex.JaxprEqn, outer: jex.JaxprEqn) -> str:
    """Return the first name in the equation's name stack below that of another equation, "" if it is not below it."""
    own, above = eqn.source_info.name_stack.stack, outer.source_info.name_stack.stack
    return own[len(above)].name if len(own) > len(above) and own[: len(above)] == above else ""


def last_scope(eqn: jex.JaxprEqn) -> str:
    """Return the last name in the equation's name stack, "" if it has none."""
    parts = eqn.source_info.name_stack.stack
    return parts[-1].name if parts else ""


REMATTED = "rematted_computation"
"""How JAX names the forward pass that a checkpoint runs again in the backward pass."""


def as_forward(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """Return an equation that a checkpoint recomputes, with the name that it has without the checkpoint."""
    info = eqn.source_info
    own = (part for part in info.name_stack.stack if part.name not in ("transpose", REMATTED))
    return eqn.replace(source_info=info.replace(name_stack=_source.NameStack(tuple(own))))


def as_backward(eqn: jex.JaxprEqn, like: jex.JaxprEqn, scope: str) -> jex.JaxprEqn:
    """Return an equation that the backward pass runs for another, with that one's names, one more, and its own line."""
    stack = like.source_info.name_stack.extend(scope)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def root_source(eqn: jex.JaxprEqn) -> SourceInfo:
    """Return an empty source info to start inlining from."""
    return eqn.source_info.replace(name_stack=_source.new_name_stack())


def user_line(eqn: jex.JaxprEqn) -> str:
    """Return `file.py:12 (function)` of the user's code that created the equation, or "".

    For equations that the library creates, it is the line of the user's call of the library, unless the library is
    tracing the user's code there.
    """
    frame, traceback = _user_frame(eqn)
    if frame is None:
        return ""
    files = [each.file_name for each in traceback.frames]
    at = files.index(frame.file_name)
    if any(map(_is_room, files[:at])) and not any(map(_is_room, files[at:])):
        return ""
    return _as_line(frame)


def calling_line(eqn: jex.JaxprEqn) -> str:
    """Return the line of the user's code, as `user_line` does, for an equation that a call of the library inside the
    user's step created (a hint). It is the call's line, whether the user or the library traces the step.
    """
    frame, _ = _user_frame(eqn)
    return _as_line(frame) if frame is not None else ""


def _user_frame(eqn: jex.JaxprEqn) -> tuple[Any, Any]:
    """Return the innermost frame outside of JAX and the library, None if there is none, and the traceback."""
    traceback = eqn.source_info.traceback
    return (None if traceback is None else _source.user_frame(traceback)), traceback


def _as_line(frame: _source.Frame) -> str:
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"


def _is_room(file: str) -> bool:
    """Return whether frames of a file are hidden."""
    return file.startswith(_ROOMS)


_ROOMS = tuple(
    f"{room}{os.sep}"
    for room in Path(__file__).parents[1].glob("_[a-z]*")
    if room.is_dir() and room.name != "_cli"
)
"""Folders of the library whose lines are never reported as the user's, and whose frames tracebacks hide, as JAX does
with its own. The demonstration's train step is the exception.
"""

for _room in _ROOMS:
    _source.register_exclusion(_room)
    _tracebacks.register_exclusion(_room)
_tracebacks.register_exclusion(functools.__file__)  # cached properties between two frames of the library

api_boundary = _tracebacks.api_boundary
"""Decorates functions that users call: their errors show the user's frames (`JAX_TRACEBACK_FILTERING=off` for all)."""


def is_plain_call(params: dict[str, Any]) -> bool:
    """Return whether a nested `jit` has no shardings, layouts or options, which inlining would lose."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        all(isinstance(s, _UNSPECIFIED) for s in shardings)
        and all(layout is None for layout in layouts)
        and not params.get("compiler_options_kvs")
    )


_JITTED: type = type(jax.jit(lambda: None))


def jit_options(fn: object) -> dict[str, Any] | None:
    """Return the options that `jax.jit` was given with a function, by name, with None or () for the others; None for a
    function that is not jitted. If either numbers or names of arguments were given, both are returned.
    """
    if not isinstance(fn, _JITTED):
        return None
    info: Any = fn._jit_info  # type: ignore[attr-defined]
    options = {name: getattr(info, name) for name in (
        "donate_argnums", "donate_argnames", "static_argnums", "static_argnames", "device", "backend"
    )}  # fmt: skip
    for name in ("in_shardings", "out_shardings"):
        leaves = [None if isinstance(s, _UNSPECIFIED) else s for s in getattr(info, f"{name}_leaves")]
        given = any(leaf is not None for leaf in leaves)
        options[name] = jax.tree.unflatten(getattr(info, f"{name}_treedef"), leaves) if given else None
    options["layouts"] = any(leaf is not None for leaf in (*info.in_layouts_leaves, *info.out_layouts_leaves))
    options["compiler_options"] = dict(info.compiler_options_kvs) or None
    return options


def varying_axes(var: Atom) -> frozenset[Any]:
    """Return the axes of a `shard_map`'s mesh over which a variable's values differ."""
    kind = getattr(var.aval, "manual_axis_type", None)
    return frozenset(getattr(kind or var.aval, "varying", getattr(var.aval, "vma", ())))


def varied(array: jax.Array, like: Atom) -> jax.Array:
    """Return values that are equal on all devices as values that may differ over the mesh axes of a variable."""
    axes = tuple(varying_axes(like))
    return jax.lax.pcast(array, axes, to="varying") if axes else array


def unvaried(aval: AbstractValue) -> AbstractValue:
    """Return the type of a value that is equal on all devices."""
    if not varying_axes(new_var(aval)):
        return aval
    array = cast(Aval, aval)
    return _core.ShapedArray(array.shape, array.dtype, weak_type=array.weak_type)


def is_literal(atom: Atom) -> "TypeIs[jex.Literal]":
    """Return whether a jaxpr's operand is an inline constant."""
    return isinstance(atom, jex.Literal)


def variables(atoms: Iterable[Atom]) -> list[jex.Var]:
    """Return the atoms that are not literals."""
    return [a for a in atoms if not isinstance(a, jex.Literal)]


def renamed(eqn: jex.JaxprEqn, names: Mapping[jex.Var, Atom]) -> jex.JaxprEqn:
    """Return the equation with its operands renamed where names are given."""
    invars = [a if is_literal(a) else names.get(a, a) for a in eqn.invars]
    return eqn if invars == list(eqn.invars) else eqn.replace(invars=invars)


def shaped(atom: Atom) -> Aval:
    """Return the shape and the type of an array."""
    return cast(Aval, atom.aval)


def opened(jaxpr: AnyJaxpr) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Return a body's jaxpr and its constants, none if it is not closed."""
    # What `jax_remat3` traces has a jaxpr and constants as a closed jaxpr does, and is none.
    return cast(jex.Jaxpr, getattr(jaxpr, "jaxpr", jaxpr)), getattr(jaxpr, "consts", ())


def literal(value: object) -> jex.Literal:
    """Return an inline constant."""
    return jex.Literal(value, jax.typeof(value))


def new_eqn(
    invars: Sequence[Atom],
    outvars: Sequence[jex.Var],
    primitive: jex.Primitive,
    params: Mapping[str, object],
    source_info: SourceInfo,
) -> jex.JaxprEqn:
    """Return an equation without effects."""
    return jex.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, jex.no_effects, source_info)


def scan_counts(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Return a scan's numbers of constants and of carries."""
    params = eqn.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)


def scan_operands(eqn: jex.JaxprEqn) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return a scan's constants, initial carries and scanned-over arrays."""
    consts, carries = scan_counts(eqn)
    return eqn.invars[:consts], eqn.invars[consts : consts + carries], eqn.invars[consts + carries :]


def cond_like(
    eqn: jex.JaxprEqn, branches: Sequence[AnyJaxpr], invars: Sequence[Atom], outvars: Sequence[jex.Var]
) -> jex.JaxprEqn:
    """Return a `cond` with other branches, without constants, and the same choice."""
    return eqn.replace(
        invars=list(invars), outvars=list(outvars), params={**eqn.params, "branches": tuple(branches)}
    )


def with_results(eqn: jex.JaxprEqn, wanted: Sequence[bool]) -> jex.JaxprEqn:
    """Return an equation without some of its results, and its bodies without the equations that only those need."""
    operands = list(dict.fromkeys(a for a in eqn.invars if not is_literal(a)))
    jaxpr = new_jaxpr((), (), operands, eqn.outvars, [eqn]).jaxpr
    (fewer,) = _partial_eval.dce_jaxpr(jaxpr, list(wanted))[0].eqns
    return fewer


def pruned(closed: jex.ClosedJaxpr) -> jex.Jaxpr:
    """Return the open jaxpr without the equations that no result and no effect needs, also in its bodies."""
    return _partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]


def scan_like(
    eqn: jex.JaxprEqn,
    body: jex.ClosedJaxpr,
    length: int,
    operands: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    results: tuple[Sequence[jex.Var], Sequence[jex.Var]],
) -> jex.JaxprEqn:
    """Return a scan with another body and the same settings.

    **Arguments:** `operands` constants, initial carries and scanned-over arrays; `results` final carries and stacks.
    """
    consts, init, scanned = operands
    invars, outvars = [*consts, *init, *scanned], [*results[0], *results[1]]
    params = {**eqn.params, "jaxpr": body, "length": length}
    if "num_carry" in params:
        params |= {"num_consts": len(consts), "num_carry": len(init)}
        if "linear" in params:
            params["linear"] = (False,) * len(invars)
    else:

        def groups(*sequences: Sequence[object]) -> Any:
            return _flattree.pack(tuple(_flattree.nones(len(each)) for each in sequences))

        params |= {"ft_in": groups(consts, init, scanned), "ft_out": groups(*results)}
    return eqn.replace(invars=invars, outvars=outvars, params=params)


def staging_checkpoints() -> AbstractContextManager[Any]:
    """While this context is open, stage `jax.checkpoint` and names in a form that works under every transformation.

    With jax 0.10 that is the older form even under `jax_remat3`, whose names cannot be batched there.
    """
    return nullcontext() if JAX_VERSION >= (0, 11) else _config.remat3(False)


def name_eqn(operand: Atom, outvar: jex.Var, name: str, source_info: SourceInfo) -> jex.JaxprEqn:
    """Return the equation of `jax.ad_checkpoint.checkpoint_name`: its operand under a name that policies see."""
    if not _config.remat3.value:
        return new_eqn([operand], [outvar], _checkpoint.name_p, {"name": name}, source_info)
    params = {"_prim": _checkpoint.CheckpointName(name, operand.aval)}
    return new_eqn([operand], [outvar], _hijax.call_hi_primitive_p, params, source_info)


def without_hijax(eqn: jex.JaxprEqn, *, derivatives: bool) -> jex.JaxprEqn:
    """Return an equation of one of JAX's "high" primitives, such as those of `jax_remat3`, in its older form.

    A checkpoint becomes a `remat2`, a name a `name`. Other primitives with differentiation rules become a call of their
    computation. With `derivatives` (the program will be differentiated later) they stay, except for those that only
    have rules for rematerialisation (`jax.custom_remat`), which get a checkpoint around themselves.
    """
    if eqn.primitive is not _hijax.call_hi_primitive_p:
        return eqn
    kind = eqn.params["_prim"]
    if isinstance(kind, _NAMES):
        return eqn.replace(primitive=_checkpoint.name_p, params={"name": kind.name})
    if isinstance(kind, _checkpoint.RematTraced):
        params = {
            "jaxpr": kind.jaxpr,
            "prevent_cse": getattr(kind, "prevent_cse", True),
            "differentiated": has_scope(eqn, REMATTED),
            "policy": kind.policy,
        }
        return eqn.replace(primitive=_checkpoint.remat_p, params=params)
    if derivatives and _config.remat3.value and isinstance(kind, _checkpoint.CustomRemat):
        alone = single(eqn, cast(list[jex.Var], eqn.invars))
        params = {"_prim": _checkpoint.RematTraced(alone.jaxpr if JAX_VERSION >= (0, 11) else alone, None)}
        return eqn.replace(params=params)
    if derivatives or eqn.effects:
        return eqn
    return eqn.replace(primitive=_core.closed_call_p, params={"call_jaxpr": _expanded(eqn)})


_NAMES = tuple(
    getattr(_checkpoint, kind)
    for kind in ("CheckpointName", "CheckpointNameFwd")
    if hasattr(_checkpoint, kind)
)


def _expanded(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Return the computation of an equation of a "high" primitive."""
    kind = eqn.params["_prim"]
    if hasattr(kind, "jaxpr"):
        return kind.jaxpr
    return jax.make_jaxpr(lambda *args: _hijax.call_hi_primitive_p.to_lojax(*args, _prim=kind))(
        *(a.aval for a in eqn.invars)
    )


def trace_context() -> Any:
    """Return the settings besides arguments on which tracing depends: axis names, meshes, flags; hashable."""
    return _config.trace_context()


def settings() -> Any:
    """Return the settings besides functions and arguments by which `jax.jit` looks up programs: those of tracing, and
    the compiler's effort; hashable.
    """
    return (_config.trace_context(), _config.optimization_level.value, _config.memory_fitting_level.value)


def is_jit_disabled() -> bool:
    """Return whether jitted functions run operation by operation."""
    return _config.disable_jit.value


def default_device() -> Any:
    """Return the device of a step whose arguments are not committed to any."""
    chosen = _config.default_device.value
    return jax.local_devices(backend=chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def settings_in_words() -> list[str]:
    """Return those of the settings that are the same in every process: flags, numbers and names."""
    context, *more = settings()
    kinds = (bool, int, float, str, enum.Enum, type(None))
    return [str(each) for each in (*context, *more) if isinstance(each, kinds)]


SpecialValueError = _api_util.InternalFloatingPointError
"""The error of a compiled program under `jax.debug_nans` and `jax.debug_infs`, which users do not see."""


def explain_special_value(
    error: Exception, fn: Callable[..., object], args: Sequence[object], kwargs: Kwargs
) -> NoReturn:
    """Run the function operation by operation to name the culprit. **Raises:** FloatingPointError."""
    _api_util.maybe_recursive_nan_check(error, fn, args, kwargs)


def enclosing_options() -> dict[str, Any] | None:
    """Return the compiler options of the outermost `jax.jit` that is being traced, None if there is none. Programs that
    `make_jaxpr` traces are not compiled.
    """
    found = None
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "make_jaxpr_f":
            return None
        info = frame.f_locals.get("ji") if frame.f_globals.get("__name__") == "jax._src.pjit" else None
        options = getattr(info, "compiler_options_kvs", None)
        found = found if options is None else dict(options)
        frame = frame.f_back
    return found


def barrier(operands: Sequence[Atom], outvars: Sequence[jex.Var], source_info: SourceInfo) -> jex.JaxprEqn:
    """Return an optimization barrier: no reader of its results starts before all of its operands are computed."""
    return new_eqn(operands, outvars, _lax.optimization_barrier_p, {}, source_info)


@functools.cache
def _placing(space: MemorySpace) -> jex.JaxprEqn:
    """Return the equation that moves a number to a memory."""
    return jax.make_jaxpr(lambda x: jax.device_put(x, space))(0.0).eqns[0]


def placed(operand: Atom, space: MemorySpace, source_info: SourceInfo) -> jex.JaxprEqn:
    """Return a variable copied to another memory, `jax.memory.Space.Host` or `Device`."""
    eqn = _placing(space)
    outvar = new_var(operand.aval.update(memory_space=space))
    return new_eqn([operand], [outvar], eqn.primitive, eqn.params, source_info)


def permuted(operand: Atom, axes: Sequence[int], source_info: SourceInfo) -> jex.JaxprEqn:
    """Return a transposition of a variable."""
    params = {"permutation": tuple(axes)}
    aval, _ = _lax.transpose_p.abstract_eval(operand.aval, **params)
    return new_eqn([operand], [new_var(aval)], _lax.transpose_p, params, source_info)


def single(eqn: jex.JaxprEqn, invars: Sequence[jex.Var]) -> jex.ClosedJaxpr:
    """Return one equation as a closed jaxpr whose arguments `invars` replace the equation's operands."""
    outvars = [new_var(v.aval) for v in eqn.outvars]
    return new_jaxpr((), (), invars, outvars, [eqn.replace(invars=list(invars), outvars=outvars)])


def registered_primitives() -> dict[str, Any]:
    """Return the primitives that can be compiled by name, of JAX and of all other imported libraries."""
    by_platform = _mlir._platform_specific_lowerings.values()
    return {p.name: p for rules in (_mlir._lowerings, *by_platform) for p in rules}
