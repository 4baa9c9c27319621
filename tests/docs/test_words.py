"""What people read uses the glossary's words: pages, notebooks, examples' first lines, and messages of the library."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BANNED = {
    r"witness(es)?": "tagged baseline",
    r"astray": "over-predicted",
    r"foresees?|foreseen": "start compiling",
    r"deepen(s|ed)?": "add a variant",
    r"bearable": "affordable",
    r"dear(er|est)?": "expensive",
    r"fences?|fenced": "barrier",
    r"triggers?": "release dependency",
    r"laid open": "inlined loop",
    r"way back": "backward pass",
    r"part after part": "in parts",
    r"(made|make|making) again": "recomputed",
    r"anew": "again",
    r"meanwhile": "offloaded; or say from when to when",
    r"not here": "another GPU",
    r"planned and proven": "the gap is a bound in the model",
    r"(?<!there )is no (number|plan|array|file|choice)": "is not a",
}
"""Words of earlier texts, as patterns, and what to write instead: the glossary's words, or plain ones."""

PATTERN = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]+`|<!--.*?-->|\$\$.*?\$\$|^\|[^\n]*$", re.DOTALL | re.MULTILINE)
"""Code, comments, formulas, and rows of tables, which have names of mechanisms."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield what is read as text: names and texts, without code."""
    names = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/benchmarks/README.md"]
    for path in [*(ROOT / name for name in names), *sorted((ROOT / "docs" / "pages").rglob("*.md"))]:
        yield path.relative_to(ROOT).as_posix(), CODE.sub("", path.read_text())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        yield path.relative_to(ROOT).as_posix(), CODE.sub("", text)
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield (
            path.relative_to(ROOT).as_posix(),
            CODE.sub("", ast.get_docstring(ast.parse(path.read_text())) or ""),
        )


def said(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield texts of a program of at least four words, by line, but for docstrings: messages, help, reports."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (bare | inner)
        ):
            text = node.value
        else:
            continue
        if len(text.split()) >= 4:
            yield node.lineno, text


def found(text: str) -> list[str]:
    """Return the banned words of a text, each with what stands around it."""
    return [" ".join(text[max(m.start() - 40, 0) : m.end() + 30].split()) for m in PATTERN.finditer(text)]


PAGES = dict(pages())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_the_glossarys_words(page: str) -> None:
    assert not found(PAGES[page])


def test_messages_use_the_glossarys_words() -> None:
    wrong = {}
    for path in sorted((ROOT / "jaxremat").rglob("*.py")):
        for line, text in said(ast.parse(path.read_text())):
            if words := found(CODE.sub("", text)):
                wrong[f"{path.relative_to(ROOT)}:{line}"] = words
    assert not wrong


def test_banned_words_are_found() -> None:
    assert found("There is no file, and a plan that is not anywhere.") == []
    assert found(CODE.sub("", "A dear value, and `fence` is code.")) == ["A dear value, and is code."]
    source = 'def f():\n    """A witness."""\n    raise ValueError(f"{f} is computed on the way back, {f}")\n'
    assert list(said(ast.parse(source))) == [(3, "_ is computed on the way back, _")]


def test_every_output_stands_right_behind_its_example() -> None:
    """So that it is compared with what the example prints."""
    for page in ("README.md", *(name for name in PAGES if name.startswith("docs/pages"))):
        text = (ROOT / page).read_text()
        shown = len(re.findall(r"^```text", text, re.MULTILINE))
        assert shown == len(re.findall(r"```python\n(?:(?!^```).*\n)*```\n\n```text", text, re.MULTILINE)), (
            page
        )
