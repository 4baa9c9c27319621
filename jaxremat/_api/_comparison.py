"""Plain step, planned step, arguments -> the differences between their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler._program import placed
from .._program import _compat
from .._program._compat import Args, Kwargs
from .._runtime._errors import ArgumentError
from ._nnx_objects import has_objects
from ._step import Step

Run = Callable[..., Any]

ROUNDINGS = 8.0
"""Allowed difference of results, as a multiple of the change in the plain step's results when the last bit of its
arguments changes: programs that add in another order differ that much."""

ROWS = 20
"""Number of results that are printed, those that differ most."""

NOTHING = float(np.finfo(np.float32).eps) ** 2
"""Share of the largest of all results below which a difference counts as zero."""


@dataclass(frozen=True)
class Leaf:
    """One array of the results.

    **Fields:** `path` in the results; `shape` with its type; `apart` the largest difference between the two; `scale`
    the largest entry, or the largest change if an argument is at the same place; `rounding` the largest difference from
    a change of the arguments' last bits; the `allowed` difference; `finite` whether all entries are finite in both.
    """

    path: str
    shape: str
    apart: float
    scale: float
    rounding: float
    allowed: float
    finite: bool

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.apart <= self.allowed

    @property
    def relative(self) -> float:
        """The difference as a share of the scale."""
        return self.apart / self.scale if self.scale else float(self.apart > 0)


@dataclass(frozen=True)
class Comparison:
    """The differences between the results of two steps. **Fields:** `leaves`, one for each array, in order."""

    leaves: tuple[Leaf, ...]

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        return all(leaf.agrees for leaf in self.leaves)

    @property
    def worst(self) -> Leaf:
        """The result with the largest relative difference."""
        return max(self.leaves, key=lambda leaf: leaf.relative)

    def __str__(self) -> str:
        ordered = sorted(self.leaves, key=lambda leaf: (leaf.agrees, -leaf.relative))
        width = max((len(leaf.path) for leaf in ordered), default=0)
        apart = sum(not leaf.agrees for leaf in ordered)
        first = (
            f"{apart} of {len(ordered)} results differ by more than rounding explains:"
            if apart
            else f"{len(ordered)} results differ by no more than rounding explains:"
        )
        lines = [
            f"{leaf.relative:8.1e}  {leaf.path:<{width}}  {leaf.shape}{'' if leaf.agrees else '  differs'}"
            for leaf in ordered[:ROWS]
        ]
        rest = [f"... and {len(ordered) - ROWS} more in `leaves`"] if len(ordered) > ROWS else []
        return "\n".join([first, *lines, *rest, *follows_signs(self.leaves)])


def follows_signs(leaves: Sequence[Leaf]) -> list[str]:
    """Return a note if results differ by their whole change, and rounding alone changes other results as much: then
    signs flip in different entries of the planned and the plain step.
    """
    apart = [leaf for leaf in leaves if not leaf.agrees]
    moved = sum(leaf.rounding >= leaf.scale > 0 for leaf in leaves)
    if not apart or not moved or any(leaf.apart < leaf.scale for leaf in apart):
        return []
    return [
        f"Rounding alone moves {moved} of {len(leaves)} results by as much as the step changes them; updates by the "
        "sign of a gradient do this. Judge by other results, such as the optimizer's moments."
    ]


@_compat.api_boundary
def compare(step: Step, *args: object, rtol: float = 1e-3, **kwargs: object) -> Comparison:
    """Run a planned step and its plain step once each, and compare every array of their results.

    A result at the place of an argument (new parameters, new optimizer state) is compared by how it changed. Where a
    plan saves values in fewer bits, an optimizer's first moments show how far the gradients are apart (see `allow` of
    `optimize`). The arguments are copied first, so none is donated.

    **Arguments:** a `step` of `jaxremat.optimize`; its arguments, as arrays; `rtol`, the tolerance relative to the
    largest entry, or change, of each result.

    **Raises:** `ArgumentError` for NNX objects.

    ```python
    print(jaxremat.compare(train_step, params, opt_state, batch))
    ```
    """
    if not isinstance(step, Step):
        raise ArgumentError(
            f"`compare` takes a step of `jaxremat.optimize`; it was given a {type(step).__name__}. Write "
            "`compare(jaxremat.optimize(budget)(fn), *args)`."
        )
    if has_objects(args, kwargs):
        raise ArgumentError(
            "`compare` runs a step twice on the same arguments, but each run changes NNX objects. Write the "
            "step as a function of what `nnx.split` returns, and compare that."
        )
    plain = placed(step._program, args, kwargs).plain  # with the same compiler options
    return Comparison(tuple(differences(plain, step, args, kwargs, rtol)))


def differences(plain: Run, planned: Run, args: Args, kwargs: Kwargs, rtol: float) -> list[Leaf]:
    """Return every leaf of the results of both, in order. **Arguments:** `rtol` relative to a leaf's scale."""

    def results(run: Run, args: Args, kwargs: Kwargs) -> list[tuple[str, np.ndarray]]:
        args, kwargs = copied((args, kwargs))
        leaves = jax.tree.leaves_with_path(run(*args, **kwargs))
        return [(jax.tree_util.keystr(path), _array(leaf)) for path, leaf in leaves]

    before = {
        jax.tree_util.keystr(path): _array(leaf)
        for path, leaf in jax.tree.leaves_with_path(args)
        if isinstance(leaf, (jax.Array, np.ndarray))
    }
    rows = zip(
        results(plain, args, kwargs),
        results(planned, args, kwargs),
        results(plain, *_nudged((args, kwargs))),
        strict=True,
    )
    leaves = [_leaf(path, a, b, c, before.get(path), rtol) for (path, a), (_, b), (_, c) in rows]
    # Gradients that are zero up to rounding, and their squares in second moments, have no meaningful scale.
    largest = max((leaf.scale for leaf in leaves if leaf.allowed and np.isfinite(leaf.scale)), default=0.0)
    return [
        replace(leaf, allowed=max(leaf.allowed, NOTHING * largest * (leaf.rounding > 0))) for leaf in leaves
    ]


def _leaf(
    path: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, before: np.ndarray | None, rtol: float
) -> Leaf:
    shape = f"{a.dtype}[{','.join(map(str, a.shape))}]"
    exact = a.dtype.kind not in "fc" and not jnp.issubdtype(a.dtype, jnp.floating)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    eps = 0.0 if exact else float(jnp.finfo(a.dtype).eps)
    a, b, c = (x.astype(wide) for x in (a, b, c))
    start = before.astype(wide) if before is not None and before.shape == a.shape else 0.0
    rounding = _apart(a, c)
    scale = float(np.abs(np.nan_to_num(a - start)).max(initial=0.0))
    bound = 0.0 if exact else max(rtol, 8 * eps) * scale
    return Leaf(
        path=path,
        shape=shape,
        apart=_apart(a, b),
        scale=scale,
        rounding=rounding,
        allowed=max(bound, ROUNDINGS * rounding if np.isfinite(rounding) else 0.0),
        finite=bool(np.isfinite(a).all() and np.isfinite(b).all()),
    )


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference; infinite if different entries are finite."""
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    return float(np.abs(np.nan_to_num(a - b)).max(initial=0.0))


def copied(tree: object) -> Any:
    """Return a copy of the tree with copied arrays."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, (jax.Array, np.ndarray)) else x, tree)


def _nudged(tree: object) -> Any:
    """Return the tree with every float replaced by an adjacent one."""

    def nudge(x: object) -> Any:
        if isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.nextafter(
                jnp.asarray(x), jnp.inf
            )  # the same type, weak or not, so that nothing is compiled again
        return x

    return jax.tree.map(nudge, tree)


def _array(leaf: object) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
