"""A step of NNX objects -> the same step of trees, with the objects updated as `nnx.jit` updates them.

`nnx.jit` takes objects (modules, optimizers, metrics, random streams) apart, calls what `jax.jit` made of a function of
trees, and writes the results back, shared references and changes of structure included. Here it calls a planned step of
that function instead. Flax is imported by those who have such objects alone.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from .._compiler._program import Program
from .._runtime._errors import ArgumentError


def has_objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether NNX objects are among the arguments. A `State` is none: it is a tree already."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False

    def whole(x: Any) -> bool:
        return isinstance(x, nnx.State | nnx.Variable) or nnx.graph.is_graph_node(x)

    leaves = jax.tree.leaves((args, kwargs), is_leaf=whole)
    return any(whole(leaf) and not isinstance(leaf, nnx.State) for leaf in leaves)


class OfObjects:
    """A function of objects, by way of a function of trees.

    **Arguments:** `program` of the function of objects; `make` gives for the program of the function of trees what is
    called in its place.
    """

    def __init__(self, program: Program, make: Callable[[Program], Any]):
        from flax import nnx

        if program.in_shardings is not None or program.out_shardings is not None:
            raise ArgumentError(
                "`in_shardings` and `out_shardings` are not understood for NNX objects. Leave them out: the step "
                "follows the shardings of its arguments. Or take the objects apart with `nnx.split`."
            )
        options = {
            name: getattr(program, name)
            for name in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
            if getattr(program, name)
        }
        self._outside: Any = nnx.jit(program.fn, graph=True, graph_updates=True, **options)
        self.of_trees = make(replace(program, fn=self._outside.jitted_fn.__wrapped__))
        self._outside.jitted_fn = self

    def __call__(self, *trees: Any, **named: Any) -> Any:
        return self.of_trees(*trees, **named)

    def lower(self, *trees: Any, **named: Any) -> Any:
        self._answer = self._question(*trees, **named)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on objects."""
        return self._outside(*args, **kwargs)

    def ask(self, question: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function of the trees says; the objects stay as they are."""
        self._question = question
        self._outside.lower(*args, **kwargs)
        return self._answer
