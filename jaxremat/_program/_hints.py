"""Array -> the same array, with a mark that the planner honours; and the marks of a traced program.

The mark is a primitive of its own, so that no policy of `jax.checkpoint` sees a name that the user did not give. It
lowers to nothing. A mark for a stage is put on the tangent too, whose transpose puts it on the cotangent: that tells
where in the backward pass the cut is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.extend.core as jex
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from .._runtime._errors import HintError
from . import _compat
from ._compat import Atom
from ._primitives import inner_jaxprs

T = TypeVar("T")

ACTIONS = ("save", "recompute", "offload", "stage")

HINT: Any = jex.Primitive("jaxremat_hint")
HINT.def_impl(lambda x, **_: x)
HINT.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(HINT, lambda ctx, x, **_: [x])
batching.defvectorized(HINT)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, action: str, name: str, role: str
) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    made = HINT.bind(x, action=action, name=name, role=role)
    if action == "stage" and type(dx) is not ad.Zero:
        dx = HINT.bind(dx, action=action, name=name, role="cotangent" if role == "cotangent" else "tangent")
    return made, dx


def _transpose(ct: object, x: object, *, action: str, name: str, role: str) -> list[Any]:
    return [HINT.bind(ct, action=action, name=name, role="tangent" if role == "cotangent" else "cotangent")]


ad.deflinear2(HINT, _transpose)
ad.primitive_jvps[HINT] = _jvp


def hint(x: T, action: Literal["save", "recompute", "offload", "stage"], *, name: str = "") -> T:
    """Decide in model code what the planner does with a value. Return the value, unchanged.

    **Arguments:**

    - `x`: an array, or a tree of arrays, each of which is meant.
    - `action`: `"save"` saves the value if the backward pass reads it. `"recompute"` does not save it, and recomputes
      it. `"offload"` saves it and keeps it in host memory until it is read, where `optimize` may use host memory and a
      copy is possible (else a warning says why not). `"stage"` begins a stage of the backward pass where the gradient
      with respect to `x` is complete, so no recomputation serves both sides.
    - `name`: the name in plans and errors; also its `jax.ad_checkpoint.checkpoint_name`.

    **Returns:** `x`. A hint is followed whatever the solver, the budget or the size of the value, and in the body of a
    scan in each iteration. Arguments of the step are in memory anyway: for them only `"stage"` has a meaning.

    **Raises:** `HintError` for another action; when planning, for hints that contradict each other or the program;
    `InfeasibleHintError` for hints that do not fit the budget.

    ```python
    attended = jaxremat.hint(attention(x), "save", name="attended")
    ```
    """
    if action not in ACTIONS:
        raise HintError(
            f'`hint(x, {action!r})`: the action is unknown. Write "save", "recompute", "offload" or "stage".'
        )

    def marked(leaf: object) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        named = checkpoint_name(leaf, name) if name else leaf
        return HINT.bind(named, action=action, name=name, role="primal")

    return jax.tree.map(marked, x)


@dataclass(frozen=True, slots=True)
class Hint:
    """A mark of the program.

    **Fields:** `variable` of the jaxpr that is meant; for `"stage"` the cotangent; `action`; `origin` as in `Pin`.
    """

    variable: Any
    action: str
    origin: str


def is_hint(eqn: jex.JaxprEqn) -> bool:
    """Return whether the equation is a mark."""
    return eqn.primitive is HINT


def read_hint(eqn: jex.JaxprEqn, operand: Atom) -> Hint | None:
    """Return what the equation marks, with that operand; None for a mark that only leads to another."""
    role = "cotangent" if eqn.params["action"] == "stage" else "primal"
    if eqn.params["role"] != role or _compat.is_literal(operand):
        return None
    return Hint(operand, eqn.params["action"], origin(eqn))


def origin(eqn: jex.JaxprEqn) -> str:
    """`hint(..., "save", name="h") at model.py:12 (f)`."""
    name = eqn.params["name"]
    named = f', name="{name}"' if name else ""
    return f'hint(..., "{eqn.params["action"]}"{named}) at {_compat.calling_line(eqn) or "an unknown line"}'


def hidden(eqns: Iterable[jex.JaxprEqn]) -> dict[str, str]:
    """Return the hints inside equations that are planned whole, each with the primitive that hides it."""
    found: dict[str, str] = {}
    for eqn in eqns:
        for jaxpr in inner_jaxprs(eqn):
            for inner in jaxpr.eqns:
                if is_hint(inner):
                    found.setdefault(origin(inner), eqn.primitive.name)
            for text in hidden(jaxpr.eqns):
                found.setdefault(text, eqn.primitive.name)
    return found
