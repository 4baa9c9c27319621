"""Train steps of well-known networks, written plainly, to measure memory and time on.

Every layer is unrolled in Python, so a step's jaxpr shows each block separately:

    from examples.benchmarks.networks import program

    resnet = program("resnet50", scale="tiny")
    state, batch = resnet.make_args()
    state, loss = jax.jit(resnet.step, donate_argnums=resnet.donate_argnums)(state, batch)
"""

from .registry import KINDS, LABELS, NAMES, REVERSIBLE, VARIANTS, Scale, program
from .training import Program, Remat

__all__ = ["KINDS", "LABELS", "NAMES", "REVERSIBLE", "VARIANTS", "Program", "Remat", "Scale", "program"]
