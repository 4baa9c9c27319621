"""What people read uses the glossary's words: pages, notebooks, examples' first lines, public docstrings, messages."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxremat
import jaxremat.flax

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
    r"one (part|chunk) of [^.,;]{3,40} after another": "one part at a time",
    r"(a )?few \w+ after others": "a few at a time",
    r"(something|nothing|anything) else than": "nothing but; other operations than",
    r"(be|is|are) (looked for|done (row|chunk|part) by)": "the planner looks for; run row by row",
    r"taken apart|put together again": "split, recombined",
    r"for as long again": "spends the same work again",
    r"what (it|XLA|the (compiler|planner)|a solver) (makes?|made|knows?) of": "say which values or figures",
    r"pass(es)? (them )?round|go(es)? round with": "ring attention; travel with",
    r"of which (it|the \w+) (is|says|finds)": "that the ... confirms",
    r"(bytes|sizes) in words": "as text",
    r"whatever else is needed": "the rest",
    r"nothing to decide": "too small to decide about",
    r"so (are|is) those that": "and ... likewise",
    r"the most that another": "a bound on",
    r"has a search of their own|have a search of their own": "is searched separately",
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
    yield (
        "Makefile",
        "\n\n".join(re.findall(r"^[a-z-]+:.*## (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)),
    )
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        yield path.relative_to(ROOT).as_posix(), CODE.sub("", text)
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield (
            path.relative_to(ROOT).as_posix(),
            CODE.sub("", ast.get_docstring(ast.parse(path.read_text())) or ""),
        )


def public() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of what users import, and of the methods and properties of classes among it."""
    for module in (jaxremat, jaxremat.flax, jaxremat.testing, jaxremat.zoo):
        yield module.__name__, module.__doc__ or ""
        for name, value in vars(module).items():
            if name.startswith("_") or not str(getattr(value, "__module__", "")).startswith("jaxremat"):
                continue
            yield f"{module.__name__}.{name}", inspect.getdoc(value) or ""
            for part, each in vars(value).items() if inspect.isclass(value) else ():
                if not part.startswith("_") and not isinstance(each, type):
                    yield f"{module.__name__}.{name}.{part}", inspect.getdoc(each) or ""


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


def test_docstrings_of_the_public_api_use_the_glossarys_words() -> None:
    wrong = {name: words for name, text in public() if (words := found(CODE.sub("", text)))}
    assert not wrong


def test_public_docstrings_begin_with_what_they_are_about() -> None:
    """A verb for functions, a noun for values: neither a relative clause nor a pronoun."""
    start = re.compile(r"(What|That which|It|They|This|The same|The one|Those|See) ")
    wrong = {name: text.splitlines()[0] for name, text in public() if start.match(text)}
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
