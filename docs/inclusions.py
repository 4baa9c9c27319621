"""Files of the repository outside `docs/pages` -> pages of the site: results, notebooks as run, scripts, benchmarks.

Law: what stands elsewhere is taken from there, never copied; and a link to a file that is not there stays broken, so
that a strict build fails.
"""

import base64
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jaxremat

ROOT = Path(__file__).resolve().parents[1]
PAGES = PurePosixPath("docs/pages")
README = "README.md"
BENCHMARKS = "examples/benchmarks/README.md"
SCRIPTS = "examples.md"
"""The page of all example scripts."""

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)")
_PLAN = re.compile(r"<!-- plan: (\S+) (\S+) (\S+) -->")
_TABLE = re.compile(r"<!-- table: (.+?) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand elsewhere."""

    def add(place: str, content: str | bytes) -> None:
        files.append(File.generated(config, place, content=content))

    add("results.md", results())
    add("benchmarks.md", (ROOT / BENCHMARKS).read_text())
    add(SCRIPTS, scripts())
    for path in notebooks():
        source, pictures = rendered(path)
        add(f"notebooks/{path.stem}.md", source)
        for name, picture in pictures.items():
            add(f"notebooks/{name}", picture)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links into the repository into links within the site, names of plans into pictures of them, and headings of
    the benchmarks' page into what stands under them.
    """
    here = page.file.src_uri
    origins = {place: origin for origin, place in places().items()}
    base = PurePosixPath(origins.get(here, str(PAGES / here))).parent
    markdown = _TABLE.sub(lambda found: table(found[1]), markdown)
    return _PLAN.sub(lambda found: summary(*found.groups()), relinked(markdown, str(base), here))


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def examples() -> list[Path]:
    """All example scripts."""
    return sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")


def places() -> dict[str, str]:
    """For each file that has a page its path in the repository, and that of its page in the site."""
    books = {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in notebooks()}
    return {README: "results.md", BENCHMARKS: "benchmarks.md", **books}


def results() -> str:
    """The README's tables of results and of comparisons, as a page."""
    _, proof, rest = re.split(r"(?=^## Proof$|^## Read on$)", (ROOT / README).read_text(), flags=re.MULTILINE)
    assert "## Compared with" in proof and rest.strip()
    return f"# Results\n\n{proof}"


def table(words: str) -> str:
    """What stands under the heading of the benchmarks' page that has these words. **Raises:** ValueError."""
    _, *parts = re.split(r"^#+ (.*)$", (ROOT / BENCHMARKS).read_text(), flags=re.MULTILINE)
    found = [body for heading, body in zip(parts[::2], parts[1::2], strict=True) if words in heading]
    if len(found) != 1:
        raise ValueError(f"{len(found)} headings of {BENCHMARKS} have the words {words!r}, not one")
    return found[0].strip()


def relinked(markdown: str, base: str, here: str) -> str:
    """Links of a file in the folder `base` of the repository, as links of the page `here` of the site.

    What has no page becomes its text alone; what is no file stays as it is.
    """
    known = places() | {f"examples/{path.name}": f"{SCRIPTS}#{anchor(path)}" for path in examples()}

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, mark, fragment = target.partition("#")
        if not path or ":" in path:
            return found[0]
        origin = os.path.normpath(f"{base}/{path}")
        if origin in known:
            place = known[origin]
        elif PurePosixPath(origin).is_relative_to(PAGES):
            place = str(PurePosixPath(origin).relative_to(PAGES))
        else:
            return text if (ROOT / origin).exists() else found[0]
        return f"[{text}]({os.path.relpath(place, PurePosixPath(here).parent)}{mark}{fragment})"

    return _LINK.sub(link, markdown)


def anchor(script: Path) -> str:
    """Where on their page a script is."""
    return script.name.removesuffix(".py")


def scripts() -> str:
    """The page of all scripts, each with the text that it begins with."""
    parts = ["# Examples", "Scripts that run as they are. Each has `--help`, and sizes that can be set."]
    for path in examples():
        text = path.read_text()
        first = text.split('"""')[1].strip().partition("\n")[0]
        parts += [f"## {path.name} {{ #{anchor(path)} }}", first, fenced(text, "python")]
    return "\n\n".join(parts) + "\n"


def rendered(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown with the outputs that it was saved with, and its pictures by name."""
    pictures: dict[str, bytes] = {}

    def picture(data: bytes) -> str:
        name = f"{path.stem}_{len(pictures) + 1}.png"
        pictures[name] = data
        return f"![]({name})"

    book = nbformat.read(path, as_version=4)
    parts: list[str] = []
    for cell in book.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(fenced(cell.source, "python"))
            parts += [shown(out, picture) for out in joined(cell.outputs)]
    return "\n\n".join(parts) + "\n", pictures


def joined(outputs: Any) -> Iterator[Any]:
    """A cell's outputs, with the pieces of what it printed in one."""
    text = "".join(out.text for out in outputs if out.output_type == "stream")
    if text:
        yield nbformat.v4.new_output("stream", text=text)
    yield from (out for out in outputs if out.output_type != "stream")


def shown(out: Any, picture: Callable[[bytes], str]) -> str:
    """One output of a cell, in the richest form that it has."""
    data = out.get("data", {})
    if "image/png" in data:
        return picture(base64.b64decode(data["image/png"]))
    if "text/html" in data:
        return figure(data["text/html"])
    return fenced(out.get("text") or data["text/plain"], "text")


def fenced(text: str, language: str) -> str:
    """A block of code, within a fence longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def summary(network: str, budget: str, target: str) -> str:
    """What was reached by a plan that comes with the library, and its memory over the step, as the library draws it."""
    given = (network, budget, target)
    found = [
        e
        for e in jaxremat.zoo.entries()
        if (e.network, e.budget.removesuffix(jaxremat.zoo.OF), e.target) == given and e.scale == "full"
    ]
    return figure(found[0].plan.report().summary_html())


def figure(html: str) -> str:
    """HTML within Markdown: no empty lines, which would end it."""
    return "<div>\n" + re.sub(r"\n\s*\n+", "\n", html).strip() + "\n</div>"
