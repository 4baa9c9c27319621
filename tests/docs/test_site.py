"""The site is built whole and strictly, without a network; a link that leads nowhere fails it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxremat
from jaxremat import flax, testing, zoo

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "docs" / "mkdocs.yml"


def build(settings: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does. Not `--quiet`, which hides warnings from the check that fails for them."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "NO_MKDOCS_2_WARNING": "1",
        "no_proxy": "*",
    }
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(settings), "-d", str(into)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(SETTINGS, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def inclusions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inclusions", ROOT / "docs" / "inclusions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name(site: Path) -> None:
    pages = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    described = set(re.findall(r'<h2 id="(jaxremat[.\w]*)"', pages))

    def public(module: ModuleType) -> set[str]:
        found = {name: getattr(module, name) for name in vars(module) if not name.startswith("_")}
        return {
            f"{module.__name__}.{name}"
            for name, value in found.items()
            if (module is jaxremat and isinstance(value, tuple))
            or (
                str(getattr(value, "__module__", "")).startswith("jaxremat")
                and (module is jaxremat or value.__module__ == module.__name__)
            )
        }

    format_of_the_zoo = {f"jaxremat.zoo.{name}" for name in ("file_name", "parse", "to_bytes", "to_json")}
    expected = set.union(*map(public, (jaxremat, flax, testing, zoo))) - format_of_the_zoo
    assert described == expected


def test_nothing_is_taken_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not re.findall(r'(?:src|<link[^>]*href)="?(?:https?:)?//', path.read_text()), path
    for path in site.rglob("*.css"):
        assert not re.findall(r"@import|url\(.?(?:https?:)?//", path.read_text()), path


def test_what_stands_elsewhere_is_taken_in(site: Path) -> None:
    """Notebooks with what they have put out, pictures too; the tables of the benchmarks; the library's reports."""
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert '<span class="kn">import</span>' in (site / "notebooks" / f"{path.stem}.html").read_text()
    assert len(list((site / "notebooks").glob("3_*.png"))) == 7
    assert (site / "benchmarks.html").read_text().count("<table>") > 20
    results = (site / "results.html").read_text()
    assert results.count("<table>") == 6 and 'href="examples.html#llama_lora"' in results
    assert 'href="results.html#compared-with"' in (site / "index.html").read_text()
    assert (site / "concepts" / "memory.html").read_text().count('<div class="jaxremat') == 1
    for path in (ROOT / "examples").glob("*.py"):
        assert path.stem == "__init__" or f'id="{path.stem}"' in (site / "examples.html").read_text()


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    settings = tmp_path / "mkdocs.yml"
    rest = "docs_dir: pages\nhooks: []\nplugins: []\nnav: []\nextra_css: []\nextra_javascript: []\n"
    settings.write_text(f"INHERIT: {SETTINGS}\n{rest}".replace("nav: []", "nav: [index.md]"))
    page = tmp_path / "pages" / "index.md"
    for text, code in (("# A\n[x](#a)", 0), ("# A\n[x](b.md)", 1), ("# A\n[x](#b)", 1)):
        page.write_text(text)
        done = build(settings, tmp_path / "site")
        assert done.returncode == code, done.stdout + done.stderr


def test_links_into_the_repository_become_links_of_the_site(inclusions: ModuleType) -> None:
    def relinked(text: str) -> str:
        return inclusions.relinked(text, "docs/pages/guides", "guides/flax.md")

    assert relinked("[a](../../../examples/gpt.py)") == "[a](../examples.md#gpt)"
    assert relinked("[a](../../../notebooks/1_quickstart.ipynb)") == "[a](../notebooks/1_quickstart.md)"
    assert relinked("[a](../../../examples/benchmarks/README.md#tables)") == "[a](../benchmarks.md#tables)"
    assert relinked("[a](../which.md)") == "[a](../which.md)"
    assert relinked("[a](../../../Makefile)") == "a"
    for kept in ("[a](nowhere.py)", "[a](#here)", "[a](https://x.org)", "![a](../x.svg)"):
        assert relinked(kept) == kept


def test_a_notebook_keeps_the_order_of_its_outputs(inclusions: ModuleType, tmp_path: Path) -> None:
    from nbformat import v4, write

    outputs = [
        v4.new_output("stream", text="one "),
        v4.new_output("display_data", {"image/png": "aGk=", "text/plain": "<Figure>"}),
        v4.new_output("stream", text="two"),
        v4.new_output("execute_result", {"text/plain": "3"}),
    ]
    cells = [v4.new_markdown_cell("# Title"), v4.new_code_cell("x", outputs=outputs)]
    path = tmp_path / "book.ipynb"
    write(v4.new_notebook(cells=cells), path)
    text, pictures = inclusions.rendered(path)
    assert pictures == {"book_1.png": b"hi"}
    assert text.split("\n\n") == [
        "# Title", "```python\nx\n```", "```text\none two\n```", "![](book_1.png)", "```text\n3\n```\n"
    ]  # fmt: skip


def test_tables_of_the_benchmarks_are_taken_in(site: Path, inclusions: ModuleType) -> None:
    page = (site / "guides" / "devices.html").read_text()
    assert (
        "| sequences |" in inclusions.table("71 billion weights on") and "<th" in page and "64</td>" in page
    )
    with pytest.raises(ValueError, match="0 headings"):
        inclusions.table("no such words")
