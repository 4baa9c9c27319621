"""A checkout is tagged only where version, changelog, packages and git agree."""

import subprocess
from pathlib import Path

import pytest
import release

READY = "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-01-02\n\n- A change.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of version 1.2.0 that is ready."""
    (tmp_path / "jaxremat").mkdir()
    (tmp_path / "jaxremat" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(READY)
    (tmp_path / ".gitignore").write_text("dist/\n")
    (tmp_path / "dist").mkdir()
    for name in ("jaxremat-1.2.0-py3-none-any.whl", "jaxremat-1.2.0.tar.gz"):
        (tmp_path / "dist" / name).touch()
    release.git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    release.git(folder, "add", "--all")
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    subprocess.run(["git", *who, "commit", "--quiet", "--message", "m"], cwd=folder, check=True)


def test_what_is_ready_has_no_problems(checkout: Path) -> None:
    assert release.version(checkout) == "1.2.0"
    assert list(release.problems(checkout)) == []


@pytest.mark.parametrize(
    "change, said",
    [
        (
            ("CHANGELOG.md", READY.replace("Unreleased\n", "Unreleased\n\n- New.\n")),
            "entries under Unreleased",
        ),
        (
            ("CHANGELOG.md", READY.replace("1.2.0", "1.1.0")),
            "newest version is 1.1.0, but `__version__` is 1.2.0",
        ),
        (("CHANGELOG.md", "# Changelog\n\n## Unreleased\n"), "newest version is none"),
    ],
    ids=["unreleased", "older", "none"],
)
def test_a_changelog_of_another_version_is_a_problem(
    checkout: Path, change: tuple[str, str], said: str
) -> None:
    name, text = change
    (checkout / name).write_text(text)
    commit(checkout)
    (problem,) = release.problems(checkout)
    assert said in problem


def test_what_is_not_committed_tagged_before_or_not_built_is_a_problem(checkout: Path) -> None:
    (checkout / "new.py").touch()
    (checkout / "dist" / "jaxremat-1.2.0.tar.gz").unlink()
    release.git(checkout, "tag", "v1.2.0")
    changed, tagged, built = release.problems(checkout)
    assert "not committed" in changed and "v1.2.0 exists" in tagged and "make package" in built


def test_this_checkout_says_one_version() -> None:
    """Entries may wait under Unreleased; the version below is the library's."""
    assert release.newest(release.ROOT) == release.version(release.ROOT)
