"""Platform -> what its compiler does with a step, as far as plans depend on it."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A compiler's habits.

    **Fields:**

    - `materialises_eagerly`: it makes large arrays (broadcasts, zeros, operands in another layout, costly pointwise
      results) long before they are read, unless a barrier holds back what they are made of.
    - `fuses_reductions`: it makes one kernel of a reduction or an update and of what makes its operands, which a
      barrier would cut in two. So barriers are few, updates run in the stage of their gradient, and the kernels of a
      compiled program say what it costs.
    """

    materialises_eagerly: bool
    fuses_reductions: bool


@functools.cache
def backend(platform: str) -> Backend:
    """Return the compiler of a platform, by JAX's name (`"cpu"`, `"gpu"`, ...)."""
    return Backend(materialises_eagerly=platform == "cpu", fuses_reductions=platform != "cpu")
