"""Python's collector while planning: off, and never asked to look at the same objects twice."""

import gc

import pytest

from jaxremat._runtime._garbage import uncollected


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, gone: list[str]) -> None:
        self.own, self.gone = self, gone

    def __del__(self) -> None:
        self.gone.append("gone")


@pytest.mark.parametrize("enabled", [True, False])
def test_what_an_inner_function_leaves_behind_is_collected_at_its_end(enabled: bool) -> None:
    gone: list[str] = []

    @uncollected
    def inner() -> None:
        Cycle(gone)
        assert not gc.isenabled() and not gone

    @uncollected
    def outer() -> None:
        inner()
        assert not gc.isenabled()
        assert gone == (["gone"] if enabled else [])

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        outer()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
