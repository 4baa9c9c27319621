"""Settings of the whole test suite: property tests draw the same examples on every machine.

`HYPOTHESIS_PROFILE=explore` draws new ones, more of them, and shrinks what fails, which may take minutes.

Figures of single operations are kept from run to run in a folder of the tests' own, and so is what compilers make of
programs (`recorded`). Plans are not: a test of the planner has to plan.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import recorded
from hypothesis import Phase, settings

from jaxremat._plan import _ledger
from jaxremat._solver import _milp

settings.register_profile(
    "same", deadline=None, derandomize=True, max_examples=40, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


recorded.begin()  # before test modules are imported


WHOLE = _milp.RATE
"""Of the work of integer programs: all of it for the solver's own tests, pages and slow tests; a quarter for those of
what is planned rather than of how good the plan is."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    whole = item.path.parent.name in ("solver", "docs") or item.get_closest_marker("slow")
    _milp.RATE = WHOLE if whole else WHOLE // 4
    recorded.suspend(any(item.get_closest_marker(name) for name in ("uncached", "slow")))
    if (marker := item.get_closest_marker("jax_0_10")) and jax.__version_info__ >= (0, 11):
        pytest.skip(f"jax 0.10's: {marker.args[0]}")


Constants = dict[tuple[str, str], object]
before_the_test: Constants = {}


def _constants() -> Constants:
    """The numbers and words in capitals of the library's modules."""
    return {
        (name, constant): value
        for name, module in sys.modules.items()
        if name.startswith("jaxremat.")
        for constant, value in vars(module).items()
        if constant.isupper() and isinstance(value, (bool, int, float, str))
    }


def pytest_collection_finish() -> None:
    before_the_test.update(_constants())
    gc.freeze()  # modules and collected tests, through which the collector would walk again and again
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test that leaves a constant changed fails, and none of the thousands after it."""
    result = yield
    _milp.RATE = WHOLE
    now = _constants()
    changed = {each: value for each, value in before_the_test.items() if now[each] != value}
    before_the_test.update(now)
    assert not changed, f"left changed, before: {changed}"
    return result


@pytest.fixture(params=[False, True], ids=["", "remat3"])
def remat3(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both forms in which JAX stages checkpoints: as `checkpoint` equations, and under the flag `jax_remat3`."""
    before = jax.config.jax_remat3  # type: ignore[attr-defined]
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


@pytest.fixture
def few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning ends after as many compilations as that of a large step: for tests of what is planned, not of how good
    the plan is that a longer search finds.
    """
    monkeypatch.setattr(_ledger, "MORE_COMPILATIONS", 0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where plans are kept, in a cache folder of the test's own that is in use."""
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path))
    monkeypatch.delenv("JAXREMAT_PLAN_CACHE")
    return tmp_path / "plans"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/plan/golden.json anew")
    parser.addoption(
        "--rewrite-outputs", action="store_true", help="write what examples print into their pages"
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["JAXREMAT_CACHE"] = str(config.rootpath / ".pytest_cache" / "jaxremat")
    os.environ["JAXREMAT_PLAN_CACHE"] = "0"
    if not hasattr(config, "workerinput"):
        recorded.prune()
