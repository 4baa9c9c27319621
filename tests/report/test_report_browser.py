"""The HTML report in a real browser: no errors, no requests, tooltips under pointer and keys, nothing blank."""

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from graphs import blocks
from outcomes import plan_of
from playwright.sync_api import Page, sync_playwright

from jaxremat import MinCut, close_over_dependencies, format_nbytes
from jaxremat._report._account import account_of_plain

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium on PATH: `make browser` installs it where apt-get and root are at hand; elsewhere install it, "
    "or name it in the environment variable CHROMIUM",
)

GRAPH = blocks(5)
PLAN = plan_of(GRAPH, MinCut().solve(GRAPH, None, time_limit=1.0).schedule)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[Page]:
    """The page; whatever it logs, raises or asks for besides itself fails the test."""
    page = browser.new_page(**{"viewport": {"width": 1100, "height": 900}, **options})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: (
            wrong.append(request.url) if not request.url.startswith(("data:", path.as_uri())) else None
        ),
    )
    page.goto(path.as_uri())
    yield page
    page.close()
    assert wrong == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    PLAN.report().save(path)
    return path


def hover(page: Page, plot: int, share: float) -> str:
    """Points into a picture, at a share of its width; the tooltip's text."""
    area = page.locator(".area").nth(plot)
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    return page.locator(".tip").nth(plot).inner_text()


def test_the_tooltip_says_what_is_in_memory(browser: Any, saved: Path) -> None:
    account = PLAN.account
    with opened(browser, saved) as page:
        assert page.title() == "train_step: memory plan"
        assert not page.locator(".tip").nth(1).is_visible()
        longest = max(run.seconds for run in account.runs)
        for plot, run in enumerate(account.runs):
            peak = run.peak
            assert peak is not None
            behind = [m.seconds for m in run.moments if m.seconds > peak.seconds]
            share = (peak.seconds + (behind[0] if behind else run.seconds)) / 2 / longest
            text = hover(page, plot, share)
            assert text.startswith(format_nbytes(account.base_nbytes + peak.nbytes))
            group, count = peak.alive[0]
            largest = account.groups[group]
            assert format_nbytes(largest.nbytes * count) in text
            assert largest.name in text and largest.source in text and largest.shape in text
            assert account.groups[peak.running].source in text
            assert "arguments and outputs" in text
        assert "in the forward pass" in hover(page, 1, 0.01)
        assert "in the backward pass" in hover(page, 1, 0.99)
        page.mouse.move(2, 2)
        assert not page.locator(".tip").nth(1).is_visible()


def test_arrow_keys_move_through_the_step(browser: Any, saved: Path) -> None:
    with opened(browser, saved) as page:
        plot = page.locator(".plot").nth(1)
        plot.focus()
        plot.press("Home")
        assert plot.get_attribute("aria-valuenow") == "0"
        first = page.locator(".tip").nth(1).inner_text()
        plot.press("ArrowRight")
        assert plot.get_attribute("aria-valuenow") == "1"
        assert page.locator(".tip").nth(1).inner_text() != first
        assert "at" in (plot.get_attribute("aria-valuetext") or "")
        plot.press("End")
        assert plot.get_attribute("aria-valuenow") == str(len(PLAN.account.runs[1].moments) - 1)
        plot.press("Escape")
        assert not page.locator(".tip").nth(1).is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 800, 360])
def test_the_page_is_painted_and_fits(browser: Any, saved: Path, width: int, scheme: str) -> None:
    with opened(browser, saved, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        hover(page, 0, 0.5)
        pixels = shot(page)
        shades = pixels.reshape(-1, 3)
        assert len({tuple(pixel) for pixel in shades[::97]}) > 20  # text, lines, areas in their colours
        background = shades[:50].mean()
        assert background > 240 if scheme == "light" else background < 40
        for kind in ("forward", "recomputed", "backward"):
            colour = style(page, f".legend .swatch.{kind}", "backgroundColor")
            rgb = [int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
            assert (abs(shades - rgb).max(axis=1) <= 2).sum() > 100, kind  # it is in the picture
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def shot(page: Page) -> Any:
    """The whole page as an array of [height, width, 3] bytes."""
    import matplotlib.image

    return (
        (matplotlib.image.imread(io.BytesIO(page.screenshot(full_page=True)))[..., :3] * 255)
        .round()
        .astype(int)
    )


def style(page: Page, selector: str, name: str) -> str:
    """A property of the first element, as the browser shows it."""
    return page.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{name}")


def test_modules_open_and_print(browser: Any, saved: Path) -> None:
    with opened(browser, saved) as page:
        parts = page.locator("details")
        total = parts.count()
        assert total > 0
        parts.first.locator("summary").first.click()
        assert page.locator("details[open]").count() < total
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("details[open]").count() == total
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details[open]").count() < total
        page.emulate_media(media="print", color_scheme="dark")
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.jaxremat')).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        page.set_viewport_size({"width": 700, "height": 1000})  # what a sheet of paper has
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert len(page.pdf()) > 10_000


def test_two_reports_in_a_notebook(browser: Any, tmp_path: Path) -> None:
    """Each output of a notebook works by itself, and follows the notebook's own theme."""
    plain = plan_of(GRAPH, close_over_dependencies(GRAPH, GRAPH.residuals))
    fragments = [PLAN._repr_html_(), PLAN.report()._repr_html_(), plain.report()._repr_html_()]
    path = tmp_path / "notebook.html"
    path.write_text(
        "<!DOCTYPE html><title>notebook</title><link rel=icon href='data:,'><body data-jp-theme-light='false'>"
        + "<hr>".join(map(str, fragments)),
        encoding="utf-8",
    )
    with opened(browser, path) as page:
        assert page.locator(".jaxremat[data-ready]").count() == 3
        for plot in (0, 1, 2, 4):
            assert "arguments and outputs" in hover(page, plot, 0.4)
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.jaxremat')).color")
            == "rgb(230, 235, 240)"
        )


def test_a_step_that_fits_has_one_picture(browser: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    plan = replace(
        plan_of(GRAPH, close_over_dependencies(GRAPH, GRAPH.residuals)),
        account=account_of_plain(GRAPH),
        rounds=(),
    )
    path = tmp_path / "report.html"
    replace(plan, budget_nbytes=50 * plan.baseline_peak_nbytes).report().save(path)
    with opened(browser, path) as page:
        assert page.locator("figure").count() == 1
        assert "arguments and outputs" in hover(page, 0, 0.5)
        assert "far above these pictures" in page.inner_text("body")
        assert page.locator(".level.budget").count() == 0
