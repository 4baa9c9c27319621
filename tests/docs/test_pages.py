"""Every python example of the README and of the site's pages runs, and prints what the page says; every link leads
somewhere.

    python -m pytest tests/docs/test_pages.py --rewrite-outputs [-m "slow or not slow"]    # writes what they print now

The examples of a page run in order, and go on from one another. What a page shows behind an example, as a block of
`text`, is what it prints: the same words, and figures within 3 %, or one point of a percentage; `...` stands for
any lines. `<!-- slow -->` above an example leaves it to the slow tests, where its page runs whole. An example that
makes several devices of the CPU has its page to a process of its own, because that is done before any array is.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import recorded
import typer

from examples.benchmarks import table
from jaxremat._cli._app import application
from jaxremat._compiler import _program

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "pages"
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted(SITE.rglob("*.md")))}
DEVICES = "jax_num_cpu_devices"

_EXAMPLE = re.compile(
    r"(?P<slow><!-- slow -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shows>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"(?P<number>-?\d+(?:\.\d+)?(?:e[-+]\d+)?)(?P<percent> ?%)?")
MACHINE = re.compile(r"(?<= on )[^;]*, jax [\d.]+(?=;)")
ELIDED = "..."


@dataclass(frozen=True)
class Example:
    """A block of code of a page, and what the page shows of what it prints, "" for nothing."""

    code: str
    line: int
    slow: bool
    shows: str


def examples(text: str) -> Iterator[Example]:
    for found in _EXAMPLE.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Example(found["code"], line, found["slow"] is not None, found["shows"] or "")


EXAMPLES = {name: tuple(examples(path.read_text())) for name, path in PAGES.items()}


def words(line: str) -> str:
    return re.sub(r"\s+", " ", FIGURE.sub("#", MACHINE.sub("here", line)))


def is_alike(shown: str, printed: str) -> bool:
    """Whether two lines have the same words, and about the same figures."""
    pairs = zip(
        FIGURE.finditer(MACHINE.sub("", shown)), FIGURE.finditer(MACHINE.sub("", printed)), strict=False
    )
    return words(shown) == words(printed) and all(
        abs(float(a["number"]) - float(b["number"])) <= max(_within(b), bool(a["percent"])) for a, b in pairs
    )


def _within(figure: re.Match[str]) -> float:
    number = figure["number"]
    return abs(float(number)) * (0.5 if "e" in number else 0.03)  # one with an exponent is a rounding error


def shown_of(printed: str, shows: str) -> str:
    """What a page that shows this has to show of what is printed: the lines that begin with the same words."""
    left, found = printed.splitlines(), list[str]()
    for line in shows.splitlines():
        if line.strip() == ELIDED:
            found.append(line)
            continue
        begins = words(line).partition("#")[0]
        while left and not words(left[0]).startswith(begins):
            left.pop(0)
        found += left[:1]
        left = left[1:]
    return "".join(f"{line}\n" for line in found)


def compare(page: str, example: Example, printed: str, rewrite: bool) -> None:
    """Compare what an example prints with what its page shows, or write it there."""
    now = shown_of(printed, example.shows)
    lines = example.shows.splitlines(), now.splitlines()
    if len(lines[0]) == len(lines[1]) and all(map(is_alike, *lines)):
        return
    assert rewrite, f"{page}:{example.line} shows\n{example.shows}and it printed\n{printed}"
    shown, put = (f"{example.code}```\n\n```text\n{each}```\n" for each in (example.shows, now))
    text = PAGES[page].read_text()
    assert text.count(shown) == 1 and now
    PAGES[page].write_text(text.replace(shown, put))


def run(chosen: Sequence[Example], page: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run examples of a page here; return what each prints."""
    printed = []
    for example in chosen:
        code = compile("\n" * example.line + example.code, page, "exec")
        exec(code, vars(sys.modules["__main__"]))
        printed.append(capsys.readouterr().out)
    return printed


def run_apart(chosen: Sequence[Example], folder: Path) -> list[str]:
    """Run examples of a page in a process of their own; return what each prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    code = 'print("\\0", end="")\n'.join(example.code for example in chosen)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")


@pytest.fixture
def as_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compiled as users' are: how a compiled program's time is put together is on pages."""
    own = _program.compiler_options

    def options(platform: str, given: dict[str, Any]) -> dict[str, Any]:
        return own(platform, {**recorded.EMITTED, **given} if platform == "cpu" else given)

    monkeypatch.setattr(_program, "compiler_options", options)


@pytest.fixture
def check(
    as_users: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Callable[[str, bool], None]:
    """Run a page, whole or without what is slow, and compare what it prints."""

    def checked(page: str, whole: bool) -> None:
        chosen = [example for example in EXAMPLES[page] if whole or not example.slow]
        monkeypatch.chdir(tmp_path)
        if any(DEVICES in example.code for example in EXAMPLES[page]):
            printed = run_apart(chosen, tmp_path)
        else:
            # Flax looks for types of fields in the main module.
            monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
            printed = run(chosen, page, capsys)
        for example, each in zip(chosen, printed, strict=True):
            compare(page, example, each, bool(request.config.getoption("--rewrite-outputs")))

    return checked


@pytest.mark.parametrize("page", [name for name, found in EXAMPLES.items() if found])
def test_the_examples_of_a_page_run(page: str, check: Callable[[str, bool], None]) -> None:
    check(page, False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, found in EXAMPLES.items() if any(e.slow for e in found)])
def test_the_slow_examples_of_a_page_run(page: str, check: Callable[[str, bool], None]) -> None:
    check(page, True)


def test_no_example_is_overlooked() -> None:
    """Each block of python is one, also where it stands in a list or is marked in another way."""
    for name, path in PAGES.items():
        assert len(re.findall(r"``` *python", path.read_text())) == len(EXAMPLES[name]), name


def test_what_examples_show_is_read_off() -> None:
    text = "<!-- slow -->\n```python\nx = 1\n```\n\n```text\nPlan: peak 3 MiB\n  more\n```\n\n```python\ny = 2\n```\n"
    assert list(examples(text)) == [
        Example("x = 1\n", 2, True, "Plan: peak 3 MiB\n  more\n"),
        Example("y = 2\n", 11, False, ""),
    ]


def test_what_is_printed_is_held_against_what_is_shown() -> None:
    shows = "Plan: peak 3.0 MiB, 4.1% more\n  ...\n  loop of 6 iterations\n"
    printed = "Plan: peak 3.05 MiB, 4.9% more\n  saved 2\n  loop of 6 iterations\n"
    assert shown_of(printed, shows) == printed.replace("  saved 2", "  ...")
    assert all(map(is_alike, shows.splitlines(), shown_of(printed, shows).splitlines()))
    assert not is_alike("peak 3.0 MiB", "peak 3.2 MiB") and not is_alike("4.1% more", "5.2% more")
    assert not is_alike("peak 3.0 MiB", "peak 3.0 GiB") and is_alike("  9.9%  x", " 10.1%   x")
    assert shown_of("Plan: 3\n", "least: 3\n") == ""


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
