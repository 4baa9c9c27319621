"""Step, arguments -> `MadeFor`, as text: jax's version, the mesh, places, types and shardings of arguments.

Invariant: two calls with equal `MadeFor` have the same program, unless the step's code differs.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from .._compiler._program import Program
from .._program._compat import Args, Kwargs
from .._program._host_arguments import is_there
from ._plan import MadeFor

_LONGEST = 60  # characters of a static argument


def made_for(program: Program, args: Args, kwargs: Kwargs) -> MadeFor:
    """Return the `MadeFor` of these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
    found, _ = tree_flatten_with_path(program.dynamic(args, kwargs))
    places = [_place(path) for path, _ in found]
    infos = jax.tree.leaves(program.plain.trace(*args, **kwargs).args_info)
    meshes = (leaf.sharding.mesh for _, leaf in found if isinstance(_sharding(leaf), NamedSharding))
    return MadeFor(
        jax=jax.__version__,
        mesh=next((", ".join(f"{name}={size}" for name, size in m.shape.items()) for m in meshes), ""),
        arguments=tuple((place, _type(leaf)) for place, (_, leaf) in zip(places, found, strict=True)),
        donated=tuple(place for place, info in zip(places, infos, strict=True) if info.donated),
        static=tuple((str(place), _repr(value)) for place, value in program.static(args, kwargs)),
    )


def placeless(text: str) -> str:
    """Return a text without the memory addresses of objects, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _place(path: Sequence[object]) -> str:
    """Return the place of a leaf, such as `0['w']` in the first argument, or `batch['x']` in a keyword argument."""
    first, *rest = path[1:]
    return f"{getattr(first, 'idx', getattr(first, 'key', first))}{keystr(tuple(rest))}"


def _sharding(leaf: object) -> Any:
    return getattr(leaf, "sharding", None)


def _type(leaf: object) -> str:
    aval = jax.typeof(leaf)
    weak = " of a Python number" if getattr(aval, "weak_type", False) else ""
    where = _sharding(leaf)
    spec = f" over {tuple(where.spec)}" if isinstance(where, NamedSharding) and any(where.spec) else ""
    there = " in host memory (`jaxremat.to_host`)" if is_there(leaf) else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}{spec}{there}"


def _repr(value: object) -> str:
    text = placeless(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
