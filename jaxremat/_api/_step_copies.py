"""Step -> what pickles and copies it: its function, options and plans; not what is compiled.

Law: a copy follows the plans that the step had, and plans anew for other arguments. A step that is found by the name of
its function, as a decorated one is, is pickled by that name, as functions are.
"""

import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from .._plan._plan import Plan


def reduced(
    step: object, plans: tuple[Plan, ...], make: Callable[..., object], state: tuple[object, ...]
) -> Any:
    """Return what `__reduce__` does of a step. **Arguments:** `make` a step of its `state` and of plans."""
    names = str(getattr(step, "__module__", "")), str(getattr(step, "__qualname__", ""))
    if _found(*names) is step:
        return _with_plans, (*names, plans)
    return make, (*state, plans)


def _found(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _with_plans(module: str, name: str, plans: tuple[Plan, ...]) -> Any:
    step = attrgetter(name)(importlib.import_module(module))
    step.carry(plans)
    return step
