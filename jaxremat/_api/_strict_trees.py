"""A step with arguments whose classes accept only arrays -> the same step of their leaves.

To lower a step, `jax.jit` puts descriptions of arrays into the trees of its arguments. A class that checks its fields
(`jmp.DynamicLossScale`, some dataclasses) rejects them: such a step can be called, but not lowered. Here each argument
is a tuple of its leaves, and the trees are built while the step is traced, as in a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from operator import itemgetter
from typing import Any

import jax

from .._compiler._program import Program
from .._program._compat import Args, Kwargs


def has_strict_trees(args: Args, kwargs: Kwargs) -> bool:
    """Return whether a class among the arguments rejects `jax.jit`'s descriptions of arrays."""
    return _is_strict(jax.tree.structure((args, kwargs)))


@lru_cache(maxsize=256)
def _is_strict(tree: Any) -> bool:
    try:
        for description in (jax.stages.ArgInfo(jax.typeof(0.0), False), jax.ShapeDtypeStruct((), "float32")):
            tree.unflatten([description] * tree.num_leaves)
    except Exception:  # whatever the class raises
        return True
    return False


@dataclass
class _OfStructure:
    """The step for one structure of its arguments.

    **Fields:** the `trees` of its traced arguments, by place and by name; the callable `made` from its program; the
    `structures` of its results by `_key`, known after tracing.
    """

    trees: tuple[Sequence[Any], dict[str, Any]]
    made: Any = None
    structures: dict[Any, Any] = field(default_factory=dict)


class OfLeaves:
    """A function of trees, implemented by functions of leaves, one for each structure of the arguments.

    **Arguments:** `program` of the function of trees; `make` returns the callable for the program of a function of
    leaves.
    """

    def __init__(self, program: Program, make: Callable[[Program], Any]):
        self._program = program
        self._make = make
        self._steps: dict[Any, _OfStructure] = {}

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the step on trees."""
        step = self._step(args, kwargs)
        leaves, named = self._each(jax.tree.leaves, args, kwargs)
        results = step.made(*leaves, **named)
        return jax.tree.unflatten(step.structures[self._key(leaves, named)], results)

    def ask(self, question: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
        """Return the result of `question` for the callable from `make` and the leaves."""
        leaves, named = self._each(jax.tree.leaves, args, kwargs)
        return question(self._step(args, kwargs).made, *leaves, **named)

    def _each(
        self, change: Callable[[object], object], args: Sequence[object], kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, each traced one changed."""
        positional, named = self._program.dynamic(args, kwargs)
        changed = [change(a) for a in positional], {name: change(a) for name, a in named.items()}
        return self._program.refilled(changed, args, kwargs)

    def _step(self, args: Args, kwargs: Kwargs) -> _OfStructure:
        positional, named = self._program.dynamic(args, kwargs)
        trees = [*map(jax.tree.structure, positional)], {k: jax.tree.structure(a) for k, a in named.items()}
        key = (*trees[0], *sorted(trees[1].items(), key=itemgetter(0)))
        if key not in self._steps:
            step = self._steps[key] = _OfStructure(trees)
            step.made = self._make(replace(self._program, fn=self._function(step)))
        return self._steps[key]

    def _function(self, step: _OfStructure) -> Callable[..., Any]:
        """Return the user's function, from leaves to leaves."""

        @wraps(self._program.fn)  # with its signature
        def of_leaves(*args: object, **kwargs: object) -> Any:
            positional, named = self._program.dynamic(args, kwargs)
            whole = (
                [tree.unflatten(a) for tree, a in zip(step.trees[0], positional, strict=True)],
                {name: step.trees[1][name].unflatten(a) for name, a in named.items()},
            )
            args_, kwargs_ = self._program.refilled(whole, args, kwargs)
            leaves, structure = jax.tree.flatten(self._program.fn(*args_, **kwargs_))
            step.structures[self._key(args, kwargs)] = structure
            return leaves

        return of_leaves

    def _key(self, leaves: Sequence[object], named: dict[str, object]) -> Any:
        """Return a key of everything except the arguments' structure on which that of the results may depend."""
        types = [jax.typeof(leaf) for leaf in jax.tree.leaves(self._program.dynamic(leaves, named))]
        return tuple((t.shape, t.dtype) for t in types), self._program.static(leaves, named)
