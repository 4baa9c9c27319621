"""Tagged plain program -> equation -> seconds of its library kernels, and of those that only prepare their operands.

The arithmetic of an equation says what it must compute; the compiler may have a library compute more. A transposed
convolution, for one, becomes a dense one of an operand with zeros in between, which another kernel writes first.
"""

from collections.abc import Sequence

import jax.extend.core as jex

from ._attribution import purposes, values_of
from ._devices import DeviceSpec
from ._hlo import Module, executed
from ._roofline import kernels, seconds_of


def library_seconds(module: Module, eqns: Sequence[jex.JaxprEqn], device: DeviceSpec) -> dict[int, float]:
    """Seconds of one run by the roofline, of each equation that is a call into a library there, by index."""
    unseen = values_of(eqns)
    seconds = {(k.computation, k.instruction.name): seconds_of(k, device) for k in kernels(module)}
    found: dict[int, float] = {}
    for computation in executed(module):
        known = purposes(module, computation, unseen)
        here = [seconds.get((computation.name, each.name), 0.0) for each in computation.instructions]
        called = [each.opcode == "custom-call" for each in computation.instructions]
        calls = {i for i, tags in enumerate(known.own) if called[i] and here[i] and len(tags) == 1}
        for position in sorted(calls):
            (n,) = known.own[position]
            found[n] = found.get(n, 0.0) + here[position]
        preparing = {
            life.born for life, of_argument in known.extras if not of_argument and not called[life.born]
        }
        for position in sorted(preparing - {life.born for _, life in known.made}):
            readers = [life.readers for life, _ in known.extras if life.born == position]
            for n in {n for read in readers for p in read if p in calls for n in known.own[p]}:
                found[n] += here[position]
    return found
