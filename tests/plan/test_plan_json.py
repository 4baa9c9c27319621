"""Plans as JSON text and files: what is written is read again, and what is no plan is refused in words."""

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from graphs import blocks, chain
from hypothesis import given
from outcomes import plan_of
from strategies import plans

from jaxremat import (
    Action,
    HeldPlan,
    JaxrematError,
    MinCut,
    Plan,
    PlanMismatchError,
    close_over_dependencies,
)
from jaxremat._model._host_copies import HostCopy
from jaxremat._model._optimizer_updates import with_updates
from jaxremat._model._variant import Variant

GRAPH = blocks(3)
PLAN = plan_of(GRAPH, close_over_dependencies(GRAPH, GRAPH.residuals[::3], {(GRAPH.residuals[1], 1)}))
DATA: dict[str, Any] = json.loads(PLAN.to_json())


def same(a: Plan, b: Plan) -> bool:
    """Equal in value and in type, all the way down."""
    return a == b and all(repr(getattr(a, f.name)) == repr(getattr(b, f.name)) for f in fields(Plan))


@given(plans())
def test_round_trip(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert same(again, plan)
    assert again.to_json() == text
    assert hash(again) == hash(plan)


def test_the_plan_of_a_graph_gives_its_schedule_back() -> None:
    for graph in (chain(6, size=2), blocks(3)):
        for saved in ((), graph.residuals, graph.residuals[::2]):
            kept = {(v, 1) for v in graph.residuals[1::4]}
            schedule = close_over_dependencies(graph, saved, kept)
            plan = Plan.from_json(plan_of(graph, schedule).to_json())
            layout = plan.layout(replace(graph, stages=(), small_nbytes=99))
            cuts = [*(stage.start for stage in graph.stages), len(graph.nodes)]
            assert layout == replace(graph, stages=with_updates(graph, cuts))
            assert plan.schedule(layout) == schedule
            assert plan.drops_nothing == schedule.drops_nothing


def test_copies_that_were_planned_before_they_said_when_they_are_over_are_read() -> None:
    data = {**DATA, "offloaded": [[3, 1, 2, 4], [5, 2, 4, 4, 6]]}
    assert Plan.from_json(json.dumps(data)).offloaded == (HostCopy(3, 1, 2, 4, -1), HostCopy(5, 2, 4, 4, 6))
    with pytest.raises(PlanMismatchError):
        Plan.from_json(json.dumps({**DATA, "offloaded": [[3, 1, 2]]}))


def test_sums_of_bytes() -> None:
    plan = plan_of(GRAPH, MinCut().solve(GRAPH, None, time_limit=1.0).schedule)
    assert plan.saved_nbytes + plan.dropped_nbytes == sum(GRAPH.values[v].nbytes for v in GRAPH.residuals)
    assert plan.dropped_nbytes > 0
    assert {a.value for a in plan.actions} == set(GRAPH.residuals)
    assert [a.nbytes for a in plan.actions] == sorted((a.nbytes for a in plan.actions), reverse=True)
    for action in plan.actions:
        assert (action.action == "save") == (action.value in plan.saved)
        assert bool(action.stages) <= (action.action == "recompute")


def test_the_text_is_json_for_people() -> None:
    assert DATA["format"] == 3
    assert set(DATA) == {"format", *(f.name for f in fields(Plan))}
    assert DATA["actions"][0] | {"value": 0, "shape": "", "nbytes": 0, "stages": []} == {
        "value": 0, "name": "op", "shape": "", "nbytes": 0, "action": DATA["actions"][0]["action"],
        "stages": [], "scope": "", "source": DATA["actions"][0]["source"], "pin": "", "named": False,
        "sent": [], "decision": False,
    }  # fmt: skip


@pytest.mark.parametrize("version", [0, 1, 4, "3", None, 1.5])
def test_other_format_versions(version: Any) -> None:
    text = json.dumps({**DATA, "format": version})
    words = rf"The plan has format {version}, but this jaxremat reads format 3\. Plan again\."
    with pytest.raises(PlanMismatchError, match=words):
        Plan.from_json(text)


NO_PLAN = r"This text is not a jaxremat plan \(.*\)\. Pass what `Plan\.to_json` or `Plan\.save` wrote\."


def test_plans_from_before_sums_were_planned_are_read() -> None:
    def before(action: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in action.items() if k != "sent"}

    old = Plan.from_json(json.dumps({**DATA, "actions": [*map(before, DATA["actions"])]}))
    assert old == Plan.from_json(json.dumps(DATA))
    assert (old.gathered_again, old.summed_again) == (0, 0)


def test_forms_of_format_2_are_read() -> None:
    """They were settings of all sites in a row."""

    def before(part: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in part.items() if k != "form"} | {"segments": [[], [2, 4]]}

    old = before(DATA) | {"format": 2, "rounds": [before(each) for each in DATA["rounds"]]}
    read = Plan.from_json(json.dumps(old))
    assert {each.form for each in (read, *read.rounds)} == {Variant.unnamed(((), (2, 4)))}
    form = PLAN.form
    rounds = tuple(replace(each, form=form) for each in read.rounds)
    assert same(replace(read, form=form, rounds=rounds), PLAN) and read.form.named(2, 0) == form


LATER = {f.name for kind in (Plan, Action) for f in fields(kind) if f.default is not MISSING}
"""Fields that came after the first plans of this format were written."""


def test_fields_with_defaults_may_be_absent() -> None:
    """So that a plan of before there was the field is read as it was meant."""
    assert {"margin_nbytes", "respect_checkpoint", "loops", "pin", "named"} <= LATER
    assert not PLAN.margin_nbytes and not PLAN.respect_checkpoint and not PLAN.loops
    plan = replace(PLAN, actions=tuple(replace(a, pin="", named=False) for a in PLAN.actions))
    data: dict[str, Any] = json.loads(plan.to_json())
    actions = [{k: v for k, v in a.items() if k not in LATER} for a in data["actions"]]
    assert len(actions[0]) < len(data["actions"][0])
    old = {k: v for k, v in data.items() if k not in LATER} | {"actions": actions}
    assert len(old) < len(data) - 3
    assert same(Plan.from_json(json.dumps(old)), plan)


@pytest.mark.parametrize("name", ["format", *(f.name for f in fields(Plan) if f.name not in LATER)])
def test_a_missing_field(name: str) -> None:
    text = json.dumps({k: v for k, v in DATA.items() if k != name})
    with pytest.raises(PlanMismatchError, match=NO_PLAN) as caught:
        Plan.from_json(text)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [f.name for f in fields(Action) if f.name not in LATER])
def test_an_action_without_a_field(name: str) -> None:
    action = {k: v for k, v in DATA["actions"][0].items() if k != name}
    with pytest.raises(PlanMismatchError, match=NO_PLAN) as caught:
        Plan.from_json(json.dumps({**DATA, "actions": [action]}))
    assert name in str(caught.value)


def test_unknown_fields() -> None:
    with pytest.raises(PlanMismatchError, match=NO_PLAN) as caught:
        Plan.from_json(json.dumps({**DATA, "colour": "red"}))
    assert "colour" in str(caught.value)
    with pytest.raises(PlanMismatchError, match=NO_PLAN):
        Plan.from_json(json.dumps({**DATA, "actions": [{**DATA["actions"][0], "colour": "red"}]}))


@pytest.mark.parametrize(
    "text", ["", "{", "not json", "[]", "null", "1", '"text"', "{}", '{"format": 2}', '{"format": 3}']
)
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(PlanMismatchError, match=NO_PLAN):
        Plan.from_json(text)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_text_cut_short(share: float) -> None:
    text = PLAN.to_json()
    with pytest.raises(PlanMismatchError, match=NO_PLAN):
        Plan.from_json(text[: int(len(text) * share)])


@pytest.mark.parametrize(
    "change",
    [
        {"saved": None},
        {"saved": [1, "x"]},
        {"saved": 3},
        {"kept": [[1]]},
        {"kept": [[1, 2, 3]]},
        {"kept": [1]},
        {"stages": [["a", "b"]]},
        {"materialised": [None]},
        {"actions": None},
        {"actions": [1]},
        {"actions": [[]]},
        {"actions": ["save"]},
        {"actions": [{**DATA["actions"][0], "stages": None}]},
        # These would fail later, far from the file that holds them.
        {"budget_nbytes": "24GiB"},
        {"compiled_peak_nbytes": "much"},
        {"fingerprint": 7},
        {"solver": None},
        {"overhead": "none"},
        {"actions": [{**DATA["actions"][0], "action": "forget"}]},
        {"actions": [{**DATA["actions"][0], "nbytes": "1"}]},
    ],
)
def test_fields_of_the_wrong_kind(change: dict[str, Any]) -> None:
    with pytest.raises(PlanMismatchError, match=NO_PLAN):
        Plan.from_json(json.dumps({**DATA, **change}))


def test_the_error_is_of_this_library_and_a_value_error() -> None:
    assert issubclass(PlanMismatchError, JaxrematError)
    assert issubclass(PlanMismatchError, ValueError)


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "step.plan.json"
    PLAN.save(path)
    assert same(Plan.load(path), PLAN)
    assert same(Plan.load(str(path)), PLAN)
    assert [p.name for p in tmp_path.iterdir()] == ["step.plan.json"]
    other = replace(PLAN, fingerprint="other", solver="gröbner ≤ 1")
    other.save(str(path))  # over an older one
    assert same(Plan.load(path), other)
    assert len(list(tmp_path.iterdir())) == 1


def test_save_in_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    assert same(Plan.load("plan.json"), PLAN)


def test_a_failed_save_leaves_the_old_plan_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def fail(self: Plan) -> str:
        raise OSError("the disk is full")

    monkeypatch.setattr(Plan, "to_json", fail)
    with pytest.raises(OSError, match="disk is full"):
        replace(PLAN, fingerprint="new").save(path)
    monkeypatch.undo()
    assert same(Plan.load(path), PLAN)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_save_cut_short_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        replace(PLAN, fingerprint="new").save(path)
    monkeypatch.undo()
    assert same(Plan.load(path), PLAN)


def test_loading_what_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(PlanMismatchError, match=NO_PLAN):
        Plan.load(path)
    path.write_bytes(b"\xff\xfe\x00binary\x80")
    with pytest.raises(PlanMismatchError):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nowhere.json")


def test_a_plan_of_another_graph_has_no_layout_here() -> None:
    words = r"values that this program does not have\. Make a new plan for this program\."
    with pytest.raises(PlanMismatchError, match=words):
        replace(PLAN, materialised=(10_000,)).layout(GRAPH)


def test_a_plan_says_what_it_does() -> None:
    text = str(PLAN)
    assert "within" in text and "the plain step needs" in text
    assert "3 compilations" in text and "mincut" in text
    assert "compiled" in text
    assert "model.py:" in text
    plain = str(plan_of(GRAPH, close_over_dependencies(GRAPH, GRAPH.residuals)))
    assert "largest values" not in plain
    assert "not compiled" in str(replace(PLAN, compiled_peak_nbytes=None))


HELD = HeldPlan(
    budget_nbytes=None, held_nbytes=3, plain_nbytes=9, overhead=-0.5, solver="mincut", stage_count=2,
    actions=PLAN.actions,
)  # fmt: skip


def test_held_plans_follow_the_same_law() -> None:
    text = HELD.to_json()
    data: dict[str, Any] = json.loads(text)
    assert data["held_format"] == 1
    again = HeldPlan.from_json(text)
    assert again == HELD and hash(again) == hash(HELD) and again.to_json() == text
    bare = [{k: v for k, v in a.items() if k not in LATER} for a in data["actions"]]
    assert HeldPlan.from_json(json.dumps({**data, "actions": bare})) == HELD
    changes: list[dict[str, Any]] = [{"colour": "red"}, {"held_format": 2}, {"held_nbytes": "3"}]
    assert (
        HeldPlan.from_json(json.dumps({k: v for k, v in data.items() if k != "parts"})) == HELD
    )  # of before
    for wrong in [
        {k: v for k, v in data.items() if k != f.name} for f in fields(HeldPlan) if f.name != "parts"
    ]:
        with pytest.raises(PlanMismatchError, match=r"HeldPlan\.save"):
            HeldPlan.from_json(json.dumps(wrong))
    for change in changes:
        with pytest.raises(PlanMismatchError):
            HeldPlan.from_json(json.dumps({**data, **change}))


def test_one_kind_of_plan_is_not_read_as_the_other() -> None:
    with pytest.raises(PlanMismatchError, match="held_format"):
        HeldPlan.from_json(PLAN.to_json())
    with pytest.raises(PlanMismatchError, match="'format'"):
        Plan.from_json(HELD.to_json())
