"""Every python example of the README and of the site's pages runs, and prints what the page says; every link leads
somewhere.

The examples of a page run in order, and go on from one another. What a page shows behind an example, as a block of
`text`, is what it prints: the words of its first line, up to its first figure. `<!-- slow -->` above an example leaves
it to the slow tests, where its page runs whole. An example that makes several devices of the CPU has its page to a
process of its own, because that is done before any array is.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from examples.benchmarks import table
from jaxremat._cli._app import application

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "pages"
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted(SITE.rglob("*.md")))}
DEVICES = "jax_num_cpu_devices"

_EXAMPLE = re.compile(
    r"(?P<slow><!-- slow -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<said>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Example:
    """A block of code of a page: `says` how what it prints begins, "" where the page shows nothing."""

    code: str
    line: int
    slow: bool
    says: str


def examples(text: str) -> Iterator[Example]:
    for found in _EXAMPLE.finditer(text):
        said = re.split(r"\d", (found["said"] or "").partition("\n")[0])[0]
        yield Example(
            found["code"], text.count("\n", 0, found.start("code")), found["slow"] is not None, said
        )


EXAMPLES = {name: tuple(examples(path.read_text())) for name, path in PAGES.items()}


def run(page: str, whole: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a page's examples, here."""
    for example in EXAMPLES[page]:
        if whole or not example.slow:
            code = compile("\n" * example.line + example.code, page, "exec")
            exec(code, vars(sys.modules["__main__"]))
            printed = capsys.readouterr().out
            assert example.says in printed, f"{page}:{example.line}: it printed {printed}"


def run_apart(page: str, whole: bool, folder: Path) -> None:
    """Run a page's examples in a process of their own."""
    chosen = [example for example in EXAMPLES[page] if whole or not example.slow]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    code = "\n".join(example.code for example in chosen)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(example.says in done.stdout for example in chosen), done.stdout


def check(
    page: str, whole: bool, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch.chdir(folder)
    if any(DEVICES in example.code for example in EXAMPLES[page]):
        run_apart(page, whole, folder)
    else:
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # where Flax looks for types of fields
        run(page, whole, capsys)


@pytest.mark.parametrize("page", [name for name, found in EXAMPLES.items() if found])
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(page, False, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, found in EXAMPLES.items() if any(e.slow for e in found)])
def test_the_slow_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(page, True, tmp_path, monkeypatch, capsys)


def test_no_example_is_overlooked() -> None:
    """Each block of python is one, also where it stands in a list or is marked in another way."""
    for name, path in PAGES.items():
        assert len(re.findall(r"``` *python", path.read_text())) == len(EXAMPLES[name]), name


def test_what_examples_say_is_read_off() -> None:
    text = "<!-- slow -->\n```python\nx = 1\n```\n\n```text\nPlan: peak 3 MiB\n  more\n```\n\n```python\ny = 2\n```\n"
    assert list(examples(text)) == [
        Example("x = 1\n", 2, True, "Plan: peak "),
        Example("y = 2\n", 11, False, ""),
    ]


LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    """In the repository, where pages are read too; those of the site are checked when it is built."""
    for target in LINK.findall(re.sub(r"```.*?```", "", PAGES[page].read_text(), flags=re.DOTALL)):
        if ":" not in target:
            assert (PAGES[page].parent / target).exists(), target


def test_the_tables_are_those_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the README, and of the benchmarks' page, which the site takes in."""
    assert table.main(["--check"]) == 0, capsys.readouterr().out


SHELL = re.compile(r"^jaxremat (?P<line>[^#\n]+)", re.MULTILINE)
COMMANDS = [found["line"].split() for path in PAGES.values() for found in SHELL.finditer(path.read_text())]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_of_a_page_exist(words: list[str]) -> None:
    """Their names, and the names of their options."""
    command: Any = typer.main.get_command(application())
    while words[0] in getattr(command, "commands", ()):
        command = command.commands[words[0]]
        words = [*words[1:], "--help"]
    assert not hasattr(command, "commands"), words
    known = {name for option in command.params for name in option.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 8
