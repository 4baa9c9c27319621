"""Arguments -> the wrapper by which a step of plain trees takes them: of NNX objects, or of strict classes."""

from .._program._compat import Args, Kwargs
from ._nnx_objects import OfObjects, has_objects
from ._strict_trees import OfLeaves, has_strict_trees


def kind_of(args: Args, kwargs: Kwargs) -> type[OfObjects] | type[OfLeaves] | None:
    """Return the wrapper that turns the step into one of plain trees; None if its arguments are plain trees."""
    if has_objects(args, kwargs):
        return OfObjects
    return OfLeaves if has_strict_trees(args, kwargs) else None
