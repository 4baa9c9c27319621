"""A checkout that is ready -> a tag of its version. `make release` builds and tries the packages first.

    python tests/package/release.py [--check]     # --check only says what is missing

Law: a tag `v1.2.3` is on a commit whose version, changelog and packages say 1.2.3. Nothing is uploaded.
"""

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def version(root: Path) -> str:
    """Return the version that the library has."""
    found = re.search(
        r'^__version__ = "(.+)"$', (root / "jaxremat" / "__init__.py").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1]


def newest(root: Path) -> str:
    """Return the newest version that the changelog has with a date, "none" where there is none."""
    pattern = r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$"
    found = re.search(pattern, (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    return found[1] if found else "none"


def problems(root: Path) -> Iterator[str]:
    """Yield what keeps a checkout from being released, in words that say what to do."""
    this = version(root)
    changes = (root / "CHANGELOG.md").read_text()
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changes, re.MULTILINE | re.DOTALL)
    if unreleased is None or unreleased[1].strip():
        yield "CHANGELOG.md has entries under Unreleased. Move them under the version, and leave the heading empty."
    if newest(root) != this:
        yield f"CHANGELOG.md's newest version is {newest(root)}, but `__version__` is {this}. Make them equal."
    if git(root, "status", "--porcelain"):
        yield "The checkout has changes that are not committed. Commit them first."
    if git(root, "tag", "--list", f"v{this}"):
        yield f"The tag v{this} exists. Raise `__version__` in jaxremat/__init__.py."
    names = sorted(path.name for path in (root / "dist").glob("*"))
    if names != [f"jaxremat-{this}-py3-none-any.whl", f"jaxremat-{this}.tar.gz"]:
        yield f"dist/ has {', '.join(names) or 'nothing'}. Build and try the packages of {this}: make package"


def git(root: Path, *words: str) -> str:
    """Return what a command of git prints."""
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    """Tag the version. Ends with exit status 1 where something is missing."""
    parser = argparse.ArgumentParser(description="Tag the version of a checkout that is ready.")
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    check = parser.parse_args().check
    if found := list(problems(ROOT)):
        raise SystemExit("\n".join(f"make release: {each}" for each in found))
    tag = f"v{version(ROOT)}"
    if not check:
        git(ROOT, "tag", "--annotate", tag, "--message", f"jaxremat {tag}")
    print(f"{tag} is {'ready' if check else f'tagged; next: git push origin {tag}, and upload dist/'}")


if __name__ == "__main__":
    main()
