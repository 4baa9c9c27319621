"""Reports of plans: text, one HTML page that needs nothing else, and what both say."""

import json
import re
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from graphs import blocks, chain
from hypothesis import given, settings
from outcomes import plan_of
from strategies import plans

import jaxremat
from jaxremat import Alive, InstallError, MinCut, Plan, close_over_dependencies, format_nbytes
from jaxremat._cli._check import _compared
from jaxremat._model._timeline import Copied, Timeline
from jaxremat._report._account import account_of_plain
from jaxremat._report._actions import Decided
from jaxremat._report._content import format_seconds, largest, module_of, modules, remarks, tidy
from jaxremat._report._html import HEIGHT, WIDTH, chart
from jaxremat._report._loop_forms import LoopForm

GRAPH = blocks(4)
PLAN = plan_of(GRAPH, MinCut().solve(GRAPH, None, time_limit=1.0).schedule)
PLAIN = replace(
    plan_of(GRAPH, close_over_dependencies(GRAPH, GRAPH.residuals)),
    account=account_of_plain(GRAPH),
    rounds=(),
    stages=(),
)
UNCOMPILED = replace(
    PLAN, compiled_peak_nbytes=None, memory=None, compiler="", compiled_overhead=None, alive=(), rounds=()
)
VOID = {"meta", "link", "br", "img", "input", "path", "rect", "wbr"}


class Page(HTMLParser):
    """Reads a page: its text, its tags, and whether they are nested as they should be."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self.words.append("" if tag == "wbr" else " ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.words.append(" ")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.mark.parametrize("plan", [PLAN, PLAIN, UNCOMPILED], ids=["planned", "plain", "uncompiled"])
def test_the_page_stands_alone(plan: Plan) -> None:
    text = plan.report().html()
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "embed", "base")
        assert not {"src", "srcset", "action", "onclick", "onload"} & set(attributes)
        if "href" in attributes:
            assert attributes["href"] == "data:,"
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert text.startswith("<!DOCTYPE html>")
    assert len(text) < 200_000
    names = {
        attributes.get("aria-label") for tag, attributes in page.tags if attributes.get("role") == "slider"
    }
    assert len(names) == (1 if plan is PLAIN else 2)


def test_the_page_says_what_the_plan_does() -> None:
    text = Page(PLAN.report().html()).text
    assert PLAN.compiled_peak_nbytes and PLAN.memory
    for nbytes in (
        PLAN.compiled_peak_nbytes,
        PLAN.baseline_peak_nbytes,
        PLAN.budget_nbytes,
        PLAN.memory.temporaries_nbytes,
    ):
        assert format_nbytes(nbytes) in text
    for value in largest(PLAN.actions):
        assert value.module in text and tidy(value.source) in text
    assert "recompute in stage" in text and "save" in text
    assert PLAN.compiler in text
    assert "net.py:7 (Net.__call__)" in text  # what is alive at the compiled peak
    assert "12.50%" in text  # the round's overhead by roofline
    assert "Time runs from left to right" in text


def test_a_step_that_fits_is_told_apart() -> None:
    text = Page(PLAIN.report().html()).text
    assert "as written" in text and "The plan costs nothing" in text
    assert "How the plan was found" not in text and "Planned step" not in text
    assert "as written" in PLAIN.report().text()


def test_more_or_less_time() -> None:
    text = replace(PLAN, overhead=0.0312, compiled_overhead=-0.25).report().text(1000)
    assert "3.1% more time than the plain step by the planner's model, and 25.0% less by a roofline" in text


def test_what_was_not_compiled_is_not_called_compiled() -> None:
    text = Page(UNCOMPILED.report().html()).text
    assert (
        "Nothing was compiled" in text
        and "compiled: the compiler's own" not in text
        and "by the planner's model" in text
    )
    assert "What fills memory" not in text
    assert "Nothing was compiled" in UNCOMPILED.report().text()


def test_what_else_to_know_of_the_figures() -> None:
    plan = replace(PLAN, margin_nbytes=1 << 20, respect_checkpoint=True)
    for text in (Page(plan.report().html()).text, plan.report().text(1000), str(plan.report())):
        assert "1.00 MiB of the budget is kept free" in re.sub(r"\s+", " ", text)
        assert "own checkpoints are kept" in re.sub(r"\s+", " ", text)
    assert "kept free" not in PLAN.report().html()


def test_pins_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    pinned = replace(PLAN.actions[0], pin='hint("save")')
    plan = replace(PLAN, actions=(pinned, *PLAN.actions[1:]))
    assert Page(plan.report().html()).text.count('pinned by hint("save")') == 1
    assert plan.report().text(200).count("(pinned)") == str(plan.report()).count("(pinned)") == 1
    assert "pinned" not in PLAN.report().html()


def test_decisions_that_are_kept_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    bare = plan_of(GRAPH, close_over_dependencies(GRAPH, sorted(GRAPH.residuals)[:2]))
    marked = tuple(replace(a, decision=a.action == "save") for a in bare.actions)
    plan = replace(bare, actions=marked, decided=Decided(3, 5 << 10))
    said = "3 values (5.00 KiB) saved because decisions run only once"
    for text in (Page(plan.report().html()).text, plan.report().text(1000), str(plan.report()), str(plan)):
        assert said in re.sub(r"\s+", " ", text)
    assert str(plan).count("save (decision)") == 2
    assert "decision" not in str(bare) + bare.report().text(1000)
    assert Plan.from_json(plan.to_json()) == plan


def test_what_was_not_proved_is_told() -> None:
    plan = replace(PLAN, unproved=("loops with nested checkpointing",))
    for text in (Page(plan.report().html()).text, plan.report().text(1000), str(plan)):
        assert "ot proved for this step, only tested in general: loops with nested checkpointing" in text
    assert "proved" not in PLAN.report().html() + str(PLAN)
    assert Plan.from_json(plan.to_json()) == plan


def test_words_of_the_program_are_no_markup() -> None:
    hostile = "</script><script>alert(1)</script><b x='"
    action = replace(
        PLAN.actions[0], name=hostile, source=f"{hostile}:1 ({hostile})", scope=f"jvp({hostile})/{hostile}"
    )
    groups = tuple(g._replace(name=hostile, source=hostile, module=hostile) for g in PLAN.account.groups)
    shares = tuple(s._replace(path=(hostile, *s.path)) for s in PLAN.account.shares)
    plan = replace(
        PLAN,
        step=hostile,
        compiler=hostile,
        actions=(action, *PLAN.actions[1:]),
        account=replace(PLAN.account, groups=groups, shares=shares),
        alive=tuple(replace(a, source=hostile, shape=hostile) for a in PLAN.alive),
    )
    text = plan.report().html()
    assert "alert(1)" in text and "<script>alert" not in text
    assert len([tag for tag, _ in Page(text).tags if tag == "script"]) == 2


@settings(max_examples=25, deadline=None)
@given(plans())
def test_any_plan_has_a_report(plan: Plan) -> None:
    """Whatever its numbers are: empty timelines, budgets far off, names of odd characters."""

    def runnable(run: Timeline) -> Timeline:
        moments = (m._replace(running=0, alive=(), seconds=min(m.seconds, run.seconds)) for m in run.moments)
        return replace(
            run,
            forward_seconds=min(run.forward_seconds, run.seconds),
            moments=tuple(sorted(moments)) if plan.account.groups else (),
        )

    account = plan.account
    planned = account.planned and runnable(account.planned)
    account = replace(account, plain=runnable(account.plain), planned=planned)
    report = replace(plan, account=account).report()
    Page(report.html())
    assert report.text() and str(report)


def test_a_saved_plan_gives_the_same_report(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").report()
    assert loaded.html() == PLAN.report().html()
    assert str(loaded) == str(PLAN.report())
    loaded.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == loaded.html()
    loaded.save(str(tmp_path / "report.txt"))
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == loaded.text()


def test_a_plan_stays_small_however_long_the_step_is() -> None:
    """What the report needs grows with the number of modules and kinds of values, not with equations."""
    lengths = []
    for graph in (chain(200, size=2), chain(1500, size=2)):
        nodes = (replace(n, scope=f"jvp(Net)/layer{n.id % 9}", source="net.py:7 (f)") for n in graph.nodes)
        graph = replace(graph, nodes=tuple(nodes))
        plan = plan_of(graph, close_over_dependencies(graph, graph.residuals[::9]))
        lengths.append(len(json.dumps(asdict(plan.account))))
    assert lengths[1] < 1.5 * lengths[0] < 100_000


def test_the_picture_is_drawn_to_scale() -> None:
    drawn = chart(PLAN)
    assert drawn.budget is not None
    assert [panel.name for panel in drawn.panels] == ["Plain step", "Planned step"]
    plain, planned = drawn.panels
    assert planned.end == 100 >= plain.end
    assert planned.modelled_nbytes == PLAN.predicted_peak_nbytes
    top = 100 * PLAN.budget_nbytes / (100 - drawn.budget.top)  # bytes at the upper edge
    for panel, run in zip(drawn.panels, PLAN.account.runs, strict=True):
        levels = [
            int(y) for y in re.findall(r"V(\d+)", panel.layers[0].path)
        ]  # the highest layer: all memory
        peak = PLAN.account.base_nbytes + max(m.nbytes for m in run.moments)
        assert abs(HEIGHT * (1 - peak / top) - min(levels)) <= 1
        widths = [int(x) for x in re.findall(r"H(\d+)", panel.layers[0].path)]
        assert widths == sorted(widths) and abs(widths[-1] - WIDTH * panel.end / 100) <= 1
        assert sum(s.width for s in panel.stretches) == widths[-1]
        assert {s.kind for s in panel.stretches} >= {"forward", "backward"}
    assert any(s.kind == "recomputed" for s in planned.stretches)
    assert not any(s.kind == "recomputed" for s in plain.stretches)
    far = replace(PLAN, budget_nbytes=100 * PLAN.baseline_peak_nbytes)
    assert chart(far).budget is None and "far above" in far.report().html()


def test_copies_have_a_lane_of_their_own() -> None:
    assert PLAN.account.planned is not None
    seconds = PLAN.account.planned.seconds
    planned = replace(
        PLAN.account.planned,
        copies=(Copied(0, False, 0.1 * seconds, 0.3 * seconds), Copied(0, False, 0.2 * seconds, 0.4 * seconds),
                Copied(0, True, 0.6 * seconds, 0.7 * seconds)),
    )  # fmt: skip
    assert planned.link_seconds(back=False) == pytest.approx(0.3 * seconds)
    assert planned.link_seconds(back=True) == pytest.approx(0.1 * seconds)
    plan = replace(PLAN, account=replace(PLAN.account, planned=planned))
    before, after = chart(plan).panels
    assert not before.copies and [c.kind for c in after.copies] == ["offload", "offload", "fetch"]
    page = Page(plan.report().html())
    lanes = [tag for tag, attrs in page.tags if tag == "rect" and attrs["class"] in ("offload", "fetch")]
    assert len(lanes) == 3
    assert "copies to the host take " + format_seconds(0.3 * seconds) in page.text
    assert "and back" in str(plan.report()) and "and back" not in str(PLAN.report())
    assert Plan.from_json(plan.to_json()) == plan


def test_the_tree_of_modules_adds_up() -> None:
    tree = modules(PLAN.account)

    def check(branch: Any) -> None:
        for child in branch.children.values():
            check(child)
        assert branch.nbytes >= sum(child.nbytes for child in branch.children.values())

    check(tree)
    assert tree.saved_nbytes == PLAN.saved_nbytes
    assert tree.recomputed_nbytes + tree.dropped_nbytes == PLAN.dropped_nbytes


def test_text_has_no_colours_and_no_more_columns_than_wanted() -> None:
    for text in (str(PLAN.report()), PLAN.report().text()):
        assert "train_step needs" in text and "forward" in text and "█" in text
        assert PLAN.compiler in text and "left below the budget" in text
        assert "\x1b" not in text  # where there is no terminal
    assert max(map(len, PLAN.report().text(60).splitlines())) <= 60


def test_rich_prints_it_with_colours() -> None:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    with console.capture() as capture:
        console.print(PLAN.report())
    assert "\x1b[" in capture.get() and "The largest values" in capture.get()


def test_without_jinja2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InstallError, match=r'pip install "\.\[tools\]"'):
        PLAN.report().save(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
    assert PLAN.report()._repr_html_().startswith("<pre>train_step needs")
    assert (PLAN._repr_html_() or "").startswith("<pre>")
    PLAN.report().save(tmp_path / "report.txt")


def test_notebooks_get_a_fragment() -> None:
    summary, whole = PLAN._repr_html_(), PLAN.report()._repr_html_()
    assert summary is not None and len(summary) < len(whole)
    for text in (summary, whole):
        page = Page(text)
        assert not {"html", "head", "body", "title", "main"} & {tag for tag, _ in page.tags}
        assert "Memory over one step" in page.text
    assert "What was verified" not in summary and "What was verified" in whole
    style = re.sub(r"/\*.*?\*/", "", whole.partition("<style>")[2].partition("</style>")[0], flags=re.S)
    for rule in re.findall(r"^\s*([^@{}\s][^{}]*)\{", style, re.M):
        for selector in rule.split(","):  # styles of the notebook itself are left alone
            assert ".jaxremat" in selector, selector


def test_seconds_and_names_for_people() -> None:
    assert [format_seconds(s) for s in (0, 1.5e-9, 84e-6, 0.0123, 0.9996, 250.0)] == [
        "0 s", "1.50 ns", "84.0 us", "12.3 ms", "1.00 s", "250 s",
    ]  # fmt: skip
    assert format_seconds(-0.0123) == "-12.3 ms"
    assert tidy("net.py:7 (f.<locals>.g.<locals>.<lambda>)") == "net.py:7 (f.g)"
    first = Alive(8, "f32[2]", "forward", "jit(step)/jvp(Net)/Dense_0/dot_general", "")
    assert module_of([first]) == "Net/Dense_0"
    assert module_of([first, replace(first, scope="jit(step)/jvp(Net)/Dense_1/dot_general")]) == "Net/Dense_*"
    assert module_of([replace(first, scope="fusion")]) == ""


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = nn.gelu(nn.Dense(128)(x))
        return jnp.mean(x**2)


def step(params: Any, x: jax.Array) -> Any:
    grads = jax.grad(Net().apply)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


ARGS = (
    jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((2, 128))),
    jax.ShapeDtypeStruct((4096, 128), jnp.float32),
)


def test_of_a_step() -> None:
    plain = jaxremat.memory(step, *ARGS)
    budget = plain.base_nbytes + int(0.6 * plain.temporaries_nbytes)
    planned = jaxremat.optimize(budget)(step)
    plan = planned.plan(*ARGS)
    report = planned.report(*ARGS)
    assert plan.step == "step" and plan.memory is not None
    assert plan.memory.peak_nbytes == plan.compiled_peak_nbytes
    assert plan.rounds and {r.compiled_peak_nbytes for r in plan.rounds} >= {plan.compiled_peak_nbytes}
    assert sum(r.solve_seconds for r in plan.rounds) <= plan.solve_seconds + 1e-9
    assert plan.compiler.startswith("XLA of jax ") and "the CPU" in plan.compiler
    account = plan.account
    assert account.base_nbytes == plain.base_nbytes and account.planned is not None
    assert account.base_nbytes + max(m.nbytes for m in account.planned.moments) == plan.predicted_peak_nbytes
    assert account.planned.seconds == pytest.approx(account.plain.seconds * (1 + plan.overhead), rel=1e-3)
    assert ("Net", "Dense_0") in {s.path for s in account.shares}
    assert any(g.module == "Net/Dense_*" for g in account.groups)
    text = Page(report.html()).text
    assert "Dense_3" in text and "test_report.py:" in text
    again = jaxremat.optimize(plan=Plan.from_json(plan.to_json()))(step)
    assert again.plan(*ARGS).report().html() == report.html()


def test_of_a_step_that_fits_or_is_not_compiled() -> None:
    fits = jaxremat.plan(step, *ARGS, budget="1GiB")
    assert fits.account.planned is None
    assert "The plan costs nothing" in str(fits.report())
    guess = jaxremat.plan(step, *ARGS, budget="min", planning=jaxremat.Planning(verify=False))
    assert guess.memory is None and guess.account.planned is not None
    assert "Nothing was compiled" in str(guess.report())


def test_of_a_method() -> None:
    class Trainer:
        @jaxremat.optimize("1GiB", static_argnums=0)
        def step(self, params: Any, x: jax.Array) -> Any:
            return step(params, x)

    assert str(Trainer().step.report(*ARGS)).startswith("step needs")


def test_microbatches_are_said_in_whole_sentences() -> None:
    """And a plan that recomputes nothing in them does not fit as it is written."""
    form = LoopForm(8, (4,), "", rows=True, whole=True)
    plan = replace(PLAN, loops=(form,), actions=(), saved=(), kept=())
    assert "The step: in 4 microbatches" in remarks(plan)
    shown = "\n".join(str(each) for each in _compared(plan, [], made_up=False).renderables)
    assert plan.drops_nothing
    assert "Nothing is recomputed: the step: in 4 microbatches" in shown
    assert "the plain step fits" in str(_compared(replace(plan, loops=()), [], made_up=False).renderables)
