"""CONTRIBUTING.md: its picture is that of the imports, its links lead somewhere, its recipes name what is there."""

import re

import house

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


def leads_astray(words: str, path: str) -> bool:
    """Return whether there is no such file, or the words name something that stands nowhere in it."""
    target, name = house.ROOT / path, words.strip("`")
    if not target.is_file() or not re.fullmatch(r"`\w+`", words) or name in (target.stem, target.parent.name):
        return not target.exists()
    return not re.search(rf"(def|class) {name}\b|^{name}\b", target.read_text(), re.MULTILINE)


def test_links_lead_to_what_they_name() -> None:
    """A link whose words are a name in code leads to a file in which that name stands."""
    assert len(LINKS) > 30
    assert [link for link in LINKS if leads_astray(*link)] == []
    assert leads_astray("`no_such_name`", "tests/house.py") and leads_astray("house", "tests/no_house.py")


def test_there_is_a_recipe_for_each_thing_that_is_often_added() -> None:
    recipes = TEXT.partition("## To add something")[2].partition("\n## ")[0].split("\n### ")[1:]
    titles = [recipe.partition("\n")[0] for recipe in recipes]
    assert titles == [
        "a primitive's rule",
        "a form of the step",
        "an encoding of values in fewer bits",
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


def test_quick_tests_are_of_every_room() -> None:
    makefile = (house.ROOT / "Makefile").read_text()
    chosen = (
        makefile.partition("QUICK := $(addprefix tests/,")[2].partition(")")[0].replace("\\\n", " ").split()
    )
    assert [name for name in chosen if not (house.ROOT / "tests" / name).exists()] == []
    rooms = {path.parent.name for path in (house.ROOT / "tests").glob("*/test_*.py")}
    assert rooms - {name.partition("/")[0] for name in chosen} == {
        "adversary",
        "package",
    }  # which take minutes, and build distributions
