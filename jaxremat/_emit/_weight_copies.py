"""Convolution with a large argument as its kernel -> the same, behind a fence of its own with what it convolves.

A library that convolves wants kernels in a layout of its own. XLA:CPU copies arguments into it as soon as it can: at
the step's begin for the whole forward pass, behind a stage's fence for the whole stage. Where weights are large and
activations small, these copies are the peak of any plan. Law: a large argument is copied when the convolution's other
operand is there, not before. Products of matrices read their operands in either order, and copy nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._program import _compat
from .._program._flops import aval_nbytes
from .._program._primitives import is_light
from .._runtime._mechanisms import mechanism


@mechanism("weights' copies behind fences", off=lambda _, __, eqn, ___: eqn)
def behind_operand(emitter: Any, n: int, eqn: Any, name_of: Callable[[Any], Any]) -> Any:
    """The equation, which is `n` or a clone of it; appends the fence that it is behind, if any.

    **Arguments:** `name_of` an argument the name by which it is read here.
    """
    graph, node = emitter.graph, emitter.graph.nodes[n]
    if not graph.backend.hoists or node.primitive != "conv_general_dilated" or node.loop >= 0:
        return eqn
    operands = [
        (a, b) for a, b in zip(emitter.source[n].invars, eqn.invars, strict=True) if not _compat.is_literal(b)
    ]
    chains = {b: found for a, b in operands if (found := _from_argument(emitter, a)) is not None}
    made = [b for _, b in operands if b not in chains]
    weights = {b: chain for b, chain in chains.items() if aval_nbytes(b.aval) > graph.small_nbytes}
    if not made or not weights:
        return eqn
    roots = list(dict.fromkeys(root for root, _ in weights.values()))
    # What is convolved passes too, and is read from behind: else XLA forgets that the fence waits for it.
    behind = emitter.beside([*map(name_of, roots), made[0]], eqn.source_info)
    passed = dict(zip(roots, behind, strict=False))
    names = {b: _again(emitter, passed[root], views) for b, (root, views) in weights.items()}
    names[made[0]] = behind[-1]
    return eqn.replace(invars=[a if _compat.is_literal(a) else names.get(a, a) for a in eqn.invars])


def _from_argument(emitter: Any, var: Any) -> tuple[Any, Sequence[Any]] | None:
    """The argument that an operand is, and what only moves its data until it is read; None where it is another."""
    views: list[Any] = []
    while (v := emitter.value_of.get(var)) is not None:
        eqn = emitter.source[emitter.maker(var)]
        operands = _compat.variables(eqn.invars)
        shared = emitter.graph.values[v].materialised and len(emitter.readers.get(var, ())) > 1
        single = len(operands) == len(eqn.outvars) == 1
        if shared or var in emitter.returned or not is_light(eqn) or not single:
            return None
        views.append(eqn)
        (var,) = operands
    return var, views[::-1]


def _again(emitter: Any, name: Any, views: Sequence[Any]) -> Any:
    """The views of what has passed, appended."""
    for eqn in views:
        invars = [a if _compat.is_literal(a) else name for a in eqn.invars]
        name = _compat.new_var(eqn.outvars[0].aval)
        emitter.append([eqn.replace(invars=invars, outvars=[name])], [-1])
    return name
