"""The benchmark of peaks against depth, at small sizes."""

import pytest

from examples.benchmarks import depth


@pytest.mark.parametrize("each", [7, 10, 33])
def test_the_deepest_net_is_found_by_a_few_compilations(each: int) -> None:
    """Peaks that grow by about the same for each block."""
    compiled = []

    def peak(blocks: int) -> int:
        compiled.append(blocks)
        return 100 + each * blocks + blocks // 10

    found = depth.deepest(peak, 5000, (20, 30))
    assert peak(found["blocks"]) == found["peak_nbytes"] <= 5000 < peak(found["blocks"] + 1)
    assert len(compiled) <= 10


def test_plans_that_use_all_of_the_budget_say_little_of_deeper_ones() -> None:
    """The deepest net is looked for in small steps then."""
    compiled = []

    def peak(blocks: int) -> int:
        compiled.append(blocks)
        return 5000 if blocks <= 44 else 120 * blocks

    assert depth.deepest(peak, 5000, (20, 30))["blocks"] == 44
    assert max(compiled) < 60


def test_levels_lower_the_compiled_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "ROWS", 1024)
    found = {row["form"]: row["peak_nbytes"] for row in depth.peaks(64)}
    assert list(found) == list(depth.FORMS)
    assert list(found.values()) == sorted(found.values(), reverse=True)
