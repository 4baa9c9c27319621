"""Platform -> what its compiler does with a step, as far as plans depend on it."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A compiler's habits.

    **Fields:**

    - `hoists`: it makes large arrays (broadcasts, zeros, operands in another layout, costly pointwise results) long
      before they are read, unless a fence holds back what they are made of.
    - `fuses`: it makes one kernel of a reduction or an update and of what makes its operands, which a fence would cut
      in two. So fences are few, updates run in the stage of their gradient, and the kernels of a compiled program say
      what it costs.
    """

    hoists: bool
    fuses: bool


@functools.cache
def backend(platform: str) -> Backend:
    """The compiler of a platform, by JAX's name (`"cpu"`, `"gpu"`, ...)."""
    return Backend(hoists=platform == "cpu", fuses=platform != "cpu")
