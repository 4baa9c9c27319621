"""The table of axes is total: each primitive that JAX registers has a rule, a body or a reason for having neither."""

import importlib

import jaxremat  # noqa: F401  (registers primitives of its own)
from jaxremat._program import _compat
from jaxremat._program._axes import RULES
from jaxremat._program._axes_opaque import BODIES, OPAQUE

MODULES = (
    "jax.nn", "jax.numpy.linalg", "jax.scipy.linalg", "jax.scipy.special", "jax.random", "jax.checkpoint_policies",
    "jax.export", "jax.custom_batching", "jax.experimental.checkify", "jax.experimental.custom_partitioning",
    "jax.experimental.multihost_utils", "jax.experimental.pallas", "jax.experimental.shard_map",
    "jax._src.cudnn.fused_attention_stablehlo", "jax._src.cudnn.scaled_matmul_stablehlo",
)  # fmt: skip


def registered() -> frozenset[str]:
    """Return the names of all primitives that JAX compiles, once what registers them is imported."""
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ImportError:  # of another version of JAX
            continue
    return frozenset(_compat.registered_primitives())


def test_each_primitive_has_a_rule_or_a_reason() -> None:
    names = registered()
    assert {"dot_general", "scan", "stack", "conv_general_dilated"} <= names
    unknown = names - RULES.keys() - BODIES - OPAQUE.keys()
    assert not unknown, f"no rule of axes, and no reason for having none: {sorted(unknown)}"


def test_no_primitive_has_both() -> None:
    assert not RULES.keys() & OPAQUE.keys()
    assert not (RULES.keys() | OPAQUE.keys()) & BODIES
