"""Outcome -> HTML: a whole page, or a fragment for notebooks. Needs jinja2.

`chart` turns timelines into shapes, in a box of `WIDTH` by `HEIGHT` that the page stretches.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from .._model._timeline import KINDS, Moment, Timeline
from .._runtime._bytes import format_nbytes
from ._account import Account
from ._content import (
    NOTES,
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
from ._outcome import Outcome, alike, by_kind, bytes_of

WIDTH, HEIGHT = 1000, 300

LAYERS = ("base", "forward", "recomputed", "backward", "scratch")
"""The layers of the chart from bottom to top."""


class Layer(NamedTuple):
    """An area from the bottom of the chart to the layer's upper edge: an SVG `path`, drawn before lower layers."""

    kind: str
    path: str


class Line(NamedTuple):
    """A horizontal line: its distance from the top, in percent, and its label."""

    top: float
    nbytes: int


class Stretch(NamedTuple):
    """A pass, or a copy: its start and end, in the box's units."""

    kind: str
    begin: float
    width: float


class Panel(NamedTuple):
    """The chart of one run.

    **Fields:** `name`; `seconds`; `layers`, the highest first; `stretches` of the passes; `copies` to host memory and
    back; `forward` where the backward pass begins and `end` where the run ends, in percent; `measured` the compiled
    peak, and `modelled_nbytes` the peak of the curve.
    """

    name: str
    seconds: float
    layers: tuple[Layer, ...]
    stretches: tuple[Stretch, ...]
    copies: tuple[Stretch, ...]
    forward: float
    end: float
    measured: Line | None
    modelled_nbytes: int


class Chart(NamedTuple):
    """All panels, on the same scales: `ticks` of memory, the `budget` line if it is in range, total `seconds`."""

    panels: tuple[Panel, ...]
    ticks: tuple[Line, ...]
    budget: Line | None
    seconds: float


def chart(outcome: Outcome) -> Chart:
    """Return the charts of a plan: the plain and the planned step, or the plain step if it runs."""
    account = outcome.account
    compiled = outcome.compiled_peak_nbytes
    plain = None if outcome.baseline_modelled else outcome.baseline_peak_nbytes
    names = ("Plain step", "Planned step")
    runs = list(zip(names, account.runs, (plain, compiled), strict=False))
    highest = max(max(_peak(account, run), measured or 0) for _, run, measured in runs)
    shown = outcome.budget_nbytes <= 1.5 * highest  # a budget far above would flatten the curve
    top = 1.08 * max(highest, outcome.budget_nbytes if shown else 0, 1)
    seconds = max(run.seconds for _, run, _ in runs) or 1.0

    def line(nbytes: int) -> Line:
        return Line(round(100 * (1 - nbytes / top), 2), nbytes)

    panels = tuple(
        Panel(
            name=name,
            seconds=run.seconds,
            layers=_layers(account, run, seconds, top),
            stretches=_stretches(account, run, seconds),
            copies=tuple(
                Stretch(
                    "fetch" if copy.back else "offload",
                    _across(copy.begin, seconds),
                    max(_across(copy.end, seconds) - _across(copy.begin, seconds), 1),
                )
                for copy in run.copies
            ),
            forward=round(100 * run.forward_seconds / seconds, 2),
            end=round(100 * run.seconds / seconds, 2),
            measured=line(measured) if measured else None,
            modelled_nbytes=_peak(account, run),
        )
        for name, run, measured in runs
    )
    ticks = tuple(line(nbytes) for nbytes in _ticks(top))
    return Chart(panels, ticks, line(outcome.budget_nbytes) if shown else None, seconds)


def _peak(account: Account, run: Timeline) -> int:
    return account.base_nbytes + (run.peak.nbytes if run.peak else 0)


def _levels(base_nbytes: int, moment: Moment) -> tuple[int, ...]:
    """Return the upper edges of the layers."""
    edges = [base_nbytes]
    for nbytes in (
        moment.forward_nbytes,
        moment.recomputed_nbytes,
        moment.backward_nbytes,
        moment.scratch_nbytes,
    ):
        edges.append(edges[-1] + nbytes)
    return tuple(edges)


def _layers(account: Account, run: Timeline, seconds: float, top: float) -> tuple[Layer, ...]:
    edges = [_levels(account.base_nbytes, moment) for moment in run.moments]
    found = []
    for i, kind in reversed(list(enumerate(LAYERS))):
        path, y = [f"M0 {HEIGHT}"], HEIGHT
        for moment, levels in zip(run.moments, edges, strict=True):
            new = round(HEIGHT * (1 - levels[i] / top))
            if new != y:
                path.append(f"H{_across(moment.seconds, seconds)}V{new}")
                y = new
        found.append(Layer(kind, "".join([*path, f"H{_across(run.seconds, seconds)}V{HEIGHT}Z"])))
    return tuple(found)


def _stretches(account: Account, run: Timeline, seconds: float) -> tuple[Stretch, ...]:
    kinds = [account.groups[moment.running].kind for moment in run.moments]
    begins = [moment.seconds for i, moment in enumerate(run.moments) if i == 0 or kinds[i] != kinds[i - 1]]
    names = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    places = [_across(begin, seconds) for begin in (*begins, run.seconds)]
    return tuple(
        Stretch(kind, begin, end - begin) for kind, (begin, end) in zip(names, pairwise(places), strict=True)
    )


def _across(at: float, seconds: float) -> int:
    return round(WIDTH * at / seconds)


def _ticks(top: float) -> Sequence[int]:
    """Return up to six round numbers of bytes from 0 up."""
    steps = (
        round_number * 1024**k for k in range(6) for round_number in (1, 2, 5, 10, 20, 50, 100, 200, 500)
    )
    return range(0, int(top), next(step for step in steps if top / step < 6))


VALUES = 24
"""Most rows of the tables of values; the others are summed up in one row."""

_WORDS = {
    "base": "arguments and outputs",
    "forward": "made by the forward pass",
    "recomputed": "recomputed",
    "backward": "made by the backward pass",
    "scratch": "scratch of the running kernel",
}


def page(outcome: Outcome, whole: bool = True, summary: bool = False) -> str:
    """Return the report as HTML.

    **Arguments:** `whole`: a complete page, not a fragment; `summary`: only its beginning.
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
    """Return the data of each moment that the page shows under the pointer, in compact form: see `report.js`."""
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
    """Return a path as HTML with line breaks allowed at natural places."""
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
