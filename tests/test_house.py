"""CONTRIBUTING.md: its picture is that of the imports, its links lead somewhere, its recipes name what is there."""

import re

import house
import pytest

TEXT = house.PAGE.read_text()
LINKS = re.findall(r"\[([^\]]+)\]\(([^)#:]+)\)", TEXT)


def test_the_picture_is_of_the_imports_as_they_are() -> None:
    assert house.drawn(TEXT) == TEXT, "draw it anew: python tests/house.py"
    assert TEXT.count(house.BEGIN) == TEXT.count(house.END) == 1


def test_the_reader_of_imports_reads_them() -> None:
    found = house.imports()
    assert {("_solver", "_model"), ("_cli", "_api"), ("_plan", "_emit")} <= found
    assert ("_model", "_solver") not in found
    order = [room for floor in house.floors() for room in floor]
    assert all(order.index(a) < order.index(b) for a, b in found)
    assert {room for pair in found for room in pair} == set(order)


def test_arrows_that_others_imply_are_left_out() -> None:
    arrows = {("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")}
    assert house.needed(arrows) == [("a", "b"), ("a", "d"), ("b", "c")]
    assert house.reached("a", arrows) == {"b", "c", "d"}
    found = house.imports()
    few = house.needed(found)
    rooms = {room for pair in found for room in pair}
    assert all(house.reached(room, few) == house.reached(room, found) for room in rooms)


@pytest.mark.parametrize(("words", "path"), LINKS)
def test_links_lead_to_what_they_name(words: str, path: str) -> None:
    """A link whose words are a name in code leads to a file in which that name stands."""
    target = house.ROOT / path
    assert target.exists()
    name = words.strip("`")
    if target.is_file() and re.fullmatch(r"`\w+`", words) and name not in (target.stem, target.parent.name):
        assert re.search(rf"(def|class) {name}\b|^{name}\b", target.read_text(), re.MULTILINE)


def test_there_is_a_recipe_for_each_thing_that_is_often_added() -> None:
    recipes = TEXT.partition("## To add something")[2].partition("\n## ")[0].split("\n### ")[1:]
    titles = [recipe.partition("\n")[0] for recipe in recipes]
    assert titles == [
        "a primitive's rule",
        "a form of the step",
        "a way to keep values in fewer bits",
        "a solver",
        "a device",
        "a section of reports",
    ]
    for recipe in recipes:
        assert (
            len(re.findall(r"^\d\. ", recipe, re.MULTILINE)) == 5
            and "](jaxremat/" in recipe
            and "](tests/" in recipe
        )
