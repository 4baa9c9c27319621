"""The table of axes is total: each primitive that JAX registers has a rule, a body or a reason for having neither."""

import subprocess
import sys

from opaque_primitives import BODIES, OPAQUE

from jaxremat._program._axes import RULES

MODULES = (
    "jax.nn", "jax.numpy.linalg", "jax.scipy.linalg", "jax.scipy.special", "jax.random", "jax.checkpoint_policies",
    "jax.export", "jax.custom_batching", "jax.experimental.checkify", "jax.experimental.compute_on",
    "jax.experimental.custom_partitioning", "jax.experimental.multihost_utils", "jax.experimental.pallas",
    "jax.experimental.pallas.fuser", "jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.tpu",
    "jax.experimental.pallas.triton", "jax.experimental.rnn", "jax.experimental.shard_alike",
    "jax.experimental.shard_map", "jax.experimental.sparse", "jax._src.buffer_callback",
    "jax._src.cudnn.fused_attention_stablehlo", "jax._src.cudnn.scaled_matmul_stablehlo",
)  # fmt: skip

# A process of its own: other tests register primitives too, in whatever order they run.
SCRIPT = """
import importlib, sys
import jaxremat
from jaxremat._program import _compat
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError:  # of another version of JAX, or of another machine
        continue
print(*_compat.registered_primitives())
"""


def registered() -> frozenset[str]:
    """Return the names of all primitives that JAX compiles, once what registers them is imported."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *MODULES]
    return frozenset(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_each_primitive_has_a_rule_or_a_reason() -> None:
    names = registered()
    assert {"dot_general", "scan", "stack", "conv_general_dilated"} <= names
    unknown = names - RULES.keys() - BODIES - OPAQUE.keys()
    assert not unknown, f"no rule of axes, and no reason for having none: {sorted(unknown)}"


def test_no_primitive_has_both() -> None:
    assert not RULES.keys() & OPAQUE.keys()
    assert not (RULES.keys() | OPAQUE.keys()) & BODIES
