"""Outcome -> `Report`: one object with a text for terminals and HTML for notebooks and files."""

import html
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._runtime._extras import installed, require
from ._html import page
from ._outcome import Outcome


@dataclass(frozen=True)
class Report:
    """A report of a plan: memory over the step, the values that are saved or recomputed, the time of each module, how
    the plan was found, and what the compiler confirmed.

    In a terminal, `print` it. In a notebook, make it the last line of a cell. `save("report.html")` writes one HTML
    file that needs no network.

    **Fields:** `outcome`, the plan.
    """

    outcome: Outcome

    def text(self, width: int = 100) -> str:
        """Return the report as plain text, about `width` columns wide at most."""
        from ._text import rendered

        return rendered(self.outcome, width, colours=False)

    def html(self) -> str:
        """Return the report as one HTML page: no network, no scripts or styles from elsewhere.

        **Raises:** `InstallError` where jinja2 is not installed.
        """
        require("An HTML report", "tools", "jinja2")
        return page(self.outcome)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file: an HTML page, or plain text where the name ends in `.txt`.

        **Raises:** `InstallError` where jinja2 is not installed.
        """
        target = Path(path)
        target.write_text(self.text() if target.suffix == ".txt" else self.html(), encoding="utf-8")

    def summary_html(self) -> str:
        """Return the beginning of the page as a fragment of HTML: the result, and the memory over the step."""
        return self._fragment(summary=True)

    def _repr_html_(self) -> str:
        return self._fragment(summary=False)

    def _fragment(self, summary: bool) -> str:
        if not installed("jinja2"):
            return f"<pre>{html.escape(self.text())}</pre>"
        return page(self.outcome, whole=False, summary=summary)

    def __rich_console__(self, console: object, options: Any) -> Iterator[Any]:
        from ._text import renderables

        yield from renderables(self.outcome, options.max_width)

    def __str__(self) -> str:
        from ._text import rendered

        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        return rendered(self.outcome, width, colours=sys.stdout.isatty())

    def __repr__(self) -> str:
        return f"<jaxremat.Report of {self.outcome.step}>"
