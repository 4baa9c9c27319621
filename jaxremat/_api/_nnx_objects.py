"""A step of NNX objects -> the same step of trees, with the objects updated as `nnx.jit` updates them.

`nnx.jit` splits objects (modules, optimizers, metrics, random streams) into trees, calls a jitted function of trees,
and writes the results back, including shared references and changes of structure. Here it calls a planned step of that
function instead. Flax is imported only if there are such objects.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from .._compiler._program import Program
from .._program._compat import Args, Kwargs


def has_objects(args: Args, kwargs: Kwargs) -> bool:
    """Return whether NNX objects are among the arguments. `State`s, and the trees into which `nnx.jit` splits objects,
    do not count: those are trees already.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False

    trees = nnx.State | nnx.extract.NodeStates

    def whole(x: object) -> bool:
        return isinstance(x, trees | nnx.Variable) or nnx.graph.is_graph_node(x)

    leaves = jax.tree.leaves((args, kwargs), is_leaf=whole)
    return any(whole(leaf) and not isinstance(leaf, trees) for leaf in leaves)


class OfObjects:
    """A function of objects, implemented by a function of trees.

    **Arguments:** `program` of the function of objects; `make` returns the callable for the program of the function of
    trees.
    """

    def __init__(self, program: Program, make: Callable[[Program], Any]):
        from flax import nnx

        names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
        options = {name: getattr(program, name) for name in names if getattr(program, name)}
        placed = {"in_shardings": program.in_shardings, "out_shardings": program.out_shardings}
        self._outside: Any = nnx.jit(program.fn, graph=True, graph_updates=True, **options, **placed)
        of_trees = replace(program, fn=self._outside.jitted_fn.__wrapped__)
        if any(given is not None for given in placed.values()):
            came, made = self._outside.jax_in_shardings, self._outside.jax_out_shardings
            with_static = self._beside_static(came, program)
            of_trees = replace(of_trees, in_shardings=came, out_shardings=(with_static, None, made))
        self._of_trees = make(of_trees)
        self._outside.jitted_fn = self

    def _beside_static(self, shardings: object, program: Program) -> Any:
        """Return the arguments' shardings with an entry for each static argument, which the function of trees returns
        too.
        """
        if not isinstance(shardings, tuple | list):
            return shardings
        every = list(shardings)
        for place in program.static_places:
            every.insert(place, None)
        return tuple(every)

    def __call__(self, *trees: object, **named: object) -> Any:
        return self._of_trees(*trees, **named)

    def lower(self, *trees: object, **named: object) -> Any:
        self._answer = self._question(self._of_trees, *trees, **named)

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the step on objects."""
        return self._outside(*args, **kwargs)

    def ask(self, question: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
        """Return the result of `question` for the callable from `make` and the trees, without updating the objects."""
        self._question = question
        self._outside.lower(*args, **kwargs)
        return self._answer
