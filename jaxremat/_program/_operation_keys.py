"""Equation parameters -> the key that identifies an operation, for the operations that `_value_numbers` has rules for.

Views are among them. The devices and the layout of results do not affect their values, and are left out.
"""

from collections.abc import Callable
from typing import Any

_WINDOW = ("window_dimensions", "window_strides", "padding")


def _window(params: dict[str, Any]) -> tuple[Any, ...]:
    dimensions, strides, padding = (params[name] for name in _WINDOW)
    return tuple(dimensions), tuple(strides), tuple((int(low), int(high)) for low, high in padding)


KEYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(("add", "add_any"), lambda params: ("add",)),
    "broadcast_in_dim": lambda params: tuple(params["broadcast_dimensions"]),
    "concatenate": lambda params: params["dimension"],
    "dynamic_slice": lambda params: None,
    "dynamic_update_slice": lambda params: None,
    "expand_dims": lambda params: None,
    "iota": lambda params: params["dimension"],
    "max_pool_gradient": _window,
    "max_pool_places": lambda params: (*_window(params), params["largest"]),
    "pad": lambda params: tuple(tuple(map(int, each)) for each in params["padding_config"]),
    "reshape": lambda params: None,
    "rev": lambda params: tuple(params["dimensions"]),
    "select_and_scatter_add": lambda params: (*_window(params), params["select_prim"].name == "ge"),
    "slice": lambda params: (
        tuple(params["start_indices"]),
        tuple(params["limit_indices"]),
        tuple(params["strides"] or (1,) * len(params["start_indices"])),
    ),
    "squeeze": lambda params: None,
    "transpose": lambda params: tuple(params["permutation"]),
}
"""The parameters that identify an operation, for operations with rules and for views, without shardings of results."""

UNCHANGED = frozenset(
    {
        "optimization_barrier", "device_put", "sharding_constraint", "reshard", "mesh_cast", "layout_constraint",
        "stop_gradient", "name", "jaxremat_hint", "copy", "copy_p", "pvary", "jaxremat_fence",
    }
)  # fmt: skip
"""Equations whose results are their operands, wherever and however these are in memory."""
