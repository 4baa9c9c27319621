"""Outcome -> HTML: a whole page, or a fragment for notebooks. Needs jinja2."""

import re
from functools import cache
from typing import Any

from .._model._timeline import KINDS
from .._runtime._bytes import format_nbytes
from ._chart import HEIGHT, LAYERS, WIDTH, chart
from ._content import (
    ROUND,
    format_seconds,
    is_plain,
    largest,
    memory_note,
    module_of,
    modules,
    price,
    remarks,
    rounds,
    tidy,
    verdict,
    verified,
)
from ._notes import NOTES
from ._outcome import Outcome, alike, by_kind, bytes_of

VALUES = 24
"""Rows of the tables of values, at most; the rest is summed up."""

_WORDS = {
    "base": "arguments and outputs",
    "forward": "made by the forward pass",
    "recomputed": "recomputed",
    "backward": "made by the backward pass",
    "scratch": "scratch of the running kernel",
}


def page(outcome: Outcome, whole: bool = True, summary: bool = False) -> str:
    """Return the report as HTML.

    **Arguments:** `whole`: a page of its own, not a fragment; `summary`: only its beginning.
    """
    values, alive = largest(outcome.actions), alike(outcome.alive)
    return _template().render(
        o=outcome,
        whole=whole,
        summary=summary,
        plain=is_plain(outcome),
        chart=chart(outcome),
        moments=_moments(outcome),
        width=WIDTH,
        height=HEIGHT,
        layers=LAYERS,
        words=_WORDS,
        values=values[:VALUES],
        more_values=values[VALUES:],
        alive=alive[:VALUES],
        more_alive=sum(map(bytes_of, alive[VALUES:])),
        kinds=by_kind(outcome.alive),
        modules=modules(outcome.account),
        verified=verified(outcome),
        notes=NOTES,
        ROUND=ROUND,
    )


def _moments(outcome: Outcome) -> dict[str, Any]:
    """Return what the page shows of each moment under the pointer, in few words: see `report.js`."""
    account = outcome.account
    return {
        "base": account.base_nbytes,
        "groups": [
            [g.name, g.shape, KINDS.index(g.kind), g.nbytes, g.module, tidy(g.source)] for g in account.groups
        ],
        "runs": [
            {"seconds": run.seconds, "moments": run.moments, "copies": run.copies} for run in account.runs
        ],
    }


def _breakable(path: str) -> Any:
    """Return a path as HTML that may be broken where a reader would."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([/_.])|(?=\()", r"\1<wbr>", str(escape(path))))


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("jaxremat", "_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        {f.__name__: f for f in (bytes_of, memory_note, module_of, price, remarks, rounds, tidy, verdict)}
    )
    environment.filters["breakable"] = _breakable
    environment.filters["nbytes"] = format_nbytes
    environment.filters["seconds"] = format_seconds
    return environment.get_template("report.html")
