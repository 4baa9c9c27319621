"""Arguments -> the way by which a step of plain trees takes them: NNX objects, or classes that hold arrays alone."""

from .._program._compat import Args, Kwargs
from ._nnx_objects import OfObjects, has_objects
from ._strict_trees import OfLeaves, has_strict_trees


def kind_of(args: Args, kwargs: Kwargs) -> type[OfObjects] | type[OfLeaves] | None:
    """Return what makes of the step one of plain trees; None where it is one."""
    if has_objects(args, kwargs):
        return OfObjects
    return OfLeaves if has_strict_trees(args, kwargs) else None
