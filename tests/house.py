"""Imports between rooms -> the picture of the house in CONTRIBUTING.md, in mermaid.

    python tests/house.py        # draws it anew

Laws: the rooms and their floors are those of the contract in pyproject.toml. An arrow stands for imports that are
there, as import-linter reads them, and none for what other arrows say already: a way along arrows leads from one room
to another if and only if it builds upon it.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- picture of the rooms: begin -->"
END = "<!-- picture of the rooms: end -->"
PACKAGE = "jaxremat"

Arrow = tuple[str, str]


def floors() -> list[list[str]]:
    """The rooms of the contract, from the top: those of a line are beside each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    return [[name.strip().removeprefix(f"{PACKAGE}.") for name in line.split("|")] for line in layers]


def imports() -> set[Arrow]:
    """(room, another that a module of it imports)."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    rooms = {room for floor in floors() for room in floor}

    def room(module: str) -> str:
        return f"{module}.".split(".")[1]

    pairs = ((room(a), room(b)) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))
    return {(a, b) for a, b in pairs if a != b and a in rooms and b in rooms}


def reached(start: str, arrows: Iterable[Arrow]) -> set[str]:
    """Where one comes to along the arrows."""
    arrows, found, ahead = set(arrows), set[str](), [start]
    while ahead:
        here = ahead.pop()
        new = {b for a, b in arrows if a == here} - found
        found |= new
        ahead.extend(new)
    return found


def needed(arrows: set[Arrow]) -> list[Arrow]:
    """Those without which a room would no longer be reached from another."""
    return [each for each in sorted(arrows) if each[1] not in reached(each[0], arrows - {each})]


def picture() -> str:
    """The rooms floor by floor, and the arrows between them."""
    lines = ["```mermaid", "flowchart TD", *(f"    {line}" for line in _lines()), "```"]
    return "\n".join(lines)


def _lines() -> Iterator[str]:
    order = [room for floor in floors() for room in floor]
    for room in order:
        yield f'{_id(room)}["{room}<br/>{_summary(room)}"]'
    for a, b in sorted(needed(imports()), key=lambda arrow: (order.index(arrow[0]), order.index(arrow[1]))):
        yield f"{_id(a)} --> {_id(b)}"


def _summary(room: str) -> str:
    """The beginning of its docstring, up to a colon or a full stop, without marks that mermaid reads."""
    path = ROOT / PACKAGE / room
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    words = " ".join((ast.get_docstring(ast.parse(source)) or "").replace("`", "").split())
    return re.split(r"[:.](?: |$)", words)[0]


def _id(room: str) -> str:
    return f"room_{room.strip('_')}"


def drawn(text: str) -> str:
    """The page with the picture as it is now between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{picture()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
