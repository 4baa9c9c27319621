"""Names -> a policy for `jax.checkpoint`. Plans import JAX only through this module, when a policy is requested."""

from collections.abc import Callable, Set
from typing import Any

import jax


def by_name(saved: Set[str], offloaded: Set[str]) -> Callable[..., Any]:
    """Return a policy for `jax.checkpoint` that saves the values of these names, and no others.

    **Arguments:** `offloaded` the saved names whose values are offloaded to host memory.
    """
    policies = jax.checkpoint_policies
    if not saved & offloaded:
        return policies.save_only_these_names(*sorted(saved))
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(saved - offloaded),
        names_which_can_be_offloaded=sorted(saved & offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
