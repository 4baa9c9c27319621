"""Step, object -> the step as a method of the object, as functions that classes hold have them."""

import functools
from typing import Any

from .._plan._plan import Plan
from .._report import Report


class Bound:
    """`step` as a method of `instance`, which becomes its first argument."""

    def __init__(self, step: Any, instance: object):
        functools.update_wrapper(self, step)
        self.__self__ = instance
        self.__func__ = step

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: object, **kwargs: object) -> Plan:
        """`Step.plan` for this object."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def report(self, *args: object, **kwargs: object) -> Report:
        """`Step.report` for this object."""
        return self.__func__.report(self.__self__, *args, **kwargs)

    def lower(self, *args: object, **kwargs: object) -> Any:
        """`Step.lower` for this object."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def compile(self, *args: object, **kwargs: object) -> Any:
        """`Step.compile` for this object."""
        return self.__func__.compile(self.__self__, *args, **kwargs)
