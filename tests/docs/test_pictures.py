"""The committed pictures say what the library would draw now."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("schedules", ["everything saved: 28 MiB, 0% longer"]),
        ("memory", ["plain step: 4.58 GiB (compiled)", "planned: 2.98 GiB (compiled)"]),
    ],
)
def test_a_picture_is_that_of_the_planner_or_the_zoo(
    name: str, shown: list[str], pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "HERE", tmp_path)
    pictures.draw(getattr(pictures, name))
    drawn = words(tmp_path / f"{name}.svg")
    assert set(shown) <= set(drawn)
    assert drawn == words(DOCS / "pages" / "pictures" / f"{name}.svg")


@pytest.mark.slow
def test_the_picture_of_a_frontier_has_what_its_page_speaks_of(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are the machine's."""
    monkeypatch.setattr(pictures, "HERE", tmp_path)
    pictures.draw(pictures.frontier)
    kept = words(DOCS / "pages" / "pictures" / "frontier.svg")
    for drawn in (words(tmp_path / "frontier.svg"), kept):
        for said in ("plain step", "knee: ", "by rule: ", "below the model's proven bound"):
            assert any(text.startswith(said) for text in drawn), said
