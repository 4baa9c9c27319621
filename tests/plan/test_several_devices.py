"""Steps on several devices are planned by what one device has, and send each other no more than the plan says."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from sharded import ask

import jaxremat
from examples.benchmarks.sharded import measured

CASES = ("fsdp", "uneven", "scan", "explicit", "typed", "shard_map")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict]:
    return request.param, ask(request.param)


def test_values_have_the_size_of_one_device_s_part(case: tuple[str, dict]) -> None:
    name, found = case
    rows = {"uneven": 1001}.get(name, 1024)
    products = [p for p in found["parts"] if p[0] == "dot_general" and p[1] == [rows, 512]]
    assert products
    for _, _, part, flops in products:
        assert part == [-(-rows // 8), 512]
        assert flops == pytest.approx(2 * rows * 128 * 512 / 8)
    gradients = [p for p in found["parts"] if p[0] == "dot_general" and rows not in p[1]]
    assert all(p[3] == pytest.approx(2 * rows * 128 * 512 / 8) for p in gradients)


def test_what_is_gathered_counts_whole(case: tuple[str, dict]) -> None:
    name, found = case
    gathers = ("sharding_constraint", "reshard")
    gathered = [p for p in found["parts"] if p[0] in gathers and p[1] == p[2] == [128, 512]]
    assert len(gathered) == {"scan": 0, "shard_map": 1}.get(name, 3)


def test_a_shard_map_s_result_is_divided(case: tuple[str, dict]) -> None:
    name, found = case
    mapped = [p for p in found["parts"] if p[0] == "shard_map"]
    assert bool(mapped) == (name == "shard_map")
    assert all(part == [128, 128] for _, _, part, _ in mapped)


def test_a_plan_that_drops_nothing_sends_what_the_plain_step_does(case: tuple[str, dict]) -> None:
    _, found = case
    assert found["plans"]["all"]["sent"] == found["sent"]
    assert found["sent"]


def test_budgets_are_of_one_device(case: tuple[str, dict]) -> None:
    _, found = case
    plan = found["plans"]["some"]
    assert plan["peak"] <= plan["budget"]
    assert abs(plan["predicted"] / plan["compiled"] - 1) < 0.15
    assert "per device (of 8)" in plan["text"]
    assert plan["same"]


def test_only_what_is_planned_is_sent_again(case: tuple[str, dict]) -> None:
    _, found = case
    plan = found["plans"]["some"]
    again = {kind: plan["sent"].get(kind, 0) - count for kind, count in found["sent"].items()}
    assert again.pop("all-gather", 0) <= plan["again"]
    assert max(again.values(), default=0) <= 0
    assert plan["sent"].keys() <= found["sent"].keys()
    assert ("gather" in plan["text"]) >= bool(plan["again"])


def test_operations_that_send_are_those_of_the_plain_step_or_counted_in_the_plan(
    case: tuple[str, dict],
) -> None:
    name, found = case
    for plan in (found["plans"]["most"], found["plans"]["some"]):
        check_counted(plan, found["operations"], plan["operations"], loops=name == "scan")


def test_gradients_are_added_up_at_once_where_memory_allows_it(case: tuple[str, dict]) -> None:
    """And the loss by itself, which a barrier waits for."""
    name, found = case
    apart = found["plans"]["most"]["operations"]["all-reduce"] - found["operations"]["all-reduce"]
    assert apart <= 1, name


@pytest.mark.parametrize("case", ["nnx shardings", "nnx with_partitioning"])
def test_objects_are_where_the_step_or_their_model_says(case: str) -> None:
    found = ask(case)
    plain, planned = found["losses"]
    assert planned == pytest.approx(plain, rel=1e-4)
    assert found["same"] and found["placed_alike"]
    assert found["divided"] == 3 * 4  # of each kernel itself, and two moments
    assert found["peak"] <= found["budget"]
    assert not found["drops_nothing"]
    assert "per device (of 8)" in found["text"]


@pytest.mark.parametrize(
    "case",
    ["in shards, update outside", "in shards, checked, scan", "in shards, checked, gradient outside"]
    + [
        pytest.param(f"in shards{more}", marks=pytest.mark.slow)
        for more in (
            "",
            ", scan",
            ", checked",
            ", checked, scan, update outside",
            ", gradient outside",
            ", checked, scan, gradient outside",
        )
    ],
)
def test_a_step_in_a_shard_map_is_planned_inside(case: str) -> None:
    found = ask(case)
    assert found["peak"] <= found["budget"]
    assert not found["drops_nothing"]
    assert abs(found["predicted"] / found["compiled"] - 1) < 0.15
    assert found["same"] and found["placed_alike"]
    assert all(again == pytest.approx(plain, rel=1e-5) for plain, again in found["losses"])
    assert found["sent"][0] == found["sent"][1]
    assert "per device (of 8)" in found["text"]


def test_a_plan_that_is_read_gives_the_program_that_was_planned(case: tuple[str, dict]) -> None:
    """In each process of a job: devices that send in another order wait for each other for ever."""
    name, found = case
    plan = found["plans"]["some"]
    assert plan["followed"] and found["plans"]["all"]["followed"]
    if name != "scan":  # where loops may have another form
        assert plan["unrepeated"] and plan["once"] == plan["unrepeated"]


@pytest.mark.slow
def test_gpus_send_what_they_send_anyway() -> None:
    """Not each product of a sum of which every device has a part."""
    row = measured("transformer tp", 0.6, "h100x8", 1)
    assert row["peak_nbytes"] <= row["budget_nbytes"]
    assert row["sent"] == row["plain_sent"]
    assert row["compiled_overhead"] < row["overhead"] + 0.06


def test_what_was_gathered_is_kept_where_there_is_room() -> None:
    """A gather takes longer than making a small value again: none is sent besides the plain step's."""
    found = ask("perceptron")
    check_within(found)
    assert found["operations"][1]["all-gather"] == found["operations"][0]["all-gather"] == 10
    assert found["peak"] > 0.9 * found["budget"]


def test_pooling_s_gradients_are_made_of_each_device_s_part() -> None:
    found = ask("pooled")
    assert found["overhead"] < 0.1
    check_within(found)


@pytest.mark.parametrize("words", ["tp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_masks_are_in_bits_where_they_are(words: str) -> None:
    found = ask(f"dropout {words}")
    check_within(found)
    assert found["copies"] == ["bits"]


@pytest.mark.parametrize("words", [" scan fsdp", " fsdp tp", " tp scan"])
def test_microbatches_have_rows_of_every_device(words: str) -> None:
    """So that nothing is sent besides what a batch sends, but for each of them."""
    found = ask(f"microbatches{words}")
    assert [form["count"] for form in found["forms"]] == [2, 4]
    for form in found["forms"]:
        assert form["parts"] == (4 if "tp" in words else 8)
        assert form["same"] and form["sent"] == found["sent"]
    assert found["peak"] <= found["budget"]
    assert found["same"] and found["placed_alike"]
    if "scan" not in words:
        assert "microbatches, with accumulated gradients" in found["text"]


@pytest.mark.parametrize(
    "words",
    [
        "tp: masked, one head of keys",
        "fsdp: jax, biased",
        "queries: plain, capped",
        "tp fsdp scan: plain, dropout",
    ],
)
def test_each_device_does_its_part_of_attention(words: str) -> None:
    """And sends no more for it than it does for scores, but for sums that a plan says to be added up again."""
    found = ask(f"attention {words}")
    for form in found["forms"].values():
        assert form["done"] == (1 if "scan" in words else 2)
        assert form["same"]
        plain, made = map(Counter, form["sent"])
        assert made <= plain
    assert found["peak"] <= found["budget"] < found["plain"] / 2
    assert "attention" in found["form"]
    assert "without its matrix of scores, in parts" in found["text"]
    assert found["same"] and found["followed"]
    again = found["again"]["all-reduce"]
    assert (f"add up {again} sums" in found["text"]) == bool(again)
    if "queries" not in words:  # nothing is sent besides what the plain step sends and what is planned
        plain, planned = map(Counter, found["sent"])
        assert planned <= plain + Counter(found["again"])


@pytest.mark.parametrize(
    "words",
    [
        "sequence: masked, masked out, grouped, biased, dropout",
        "sequence fsdp scan: masked, written out, capped, jax, grouped",
    ],
)
def test_keys_of_a_sequence_over_devices_pass_round(words: str) -> None:
    """Nothing of them is gathered, and a device has no scores of all keys."""
    found = ask(f"attention {words}")
    for kind, form in found["forms"].items():
        assert form["done"] == (1 if "scan" in words else 2), kind
        assert form["same"], kind
        plain, made = map(Counter, form["sent"])
        assert made["collective-permute"] > plain["collective-permute"], kind
        assert made["all-gather"] < plain["all-gather"], kind
        assert made["all-reduce"] <= plain["all-reduce"], kind
    assert found["peak"] <= found["budget"] < found["plain"] / 2
    assert found["form"] == ["attention"] or "scan" in words
    assert found["same"] and found["followed"]


def test_queries_over_devices_count_their_places_from_where_they_begin() -> None:
    found = ask("attention queries gathered scan: masked, biased, masked out")
    assert all(form["done"] == 1 and form["same"] for form in found["forms"].values())
    assert not any(form["sent"][1].get("collective-permute") for form in found["forms"].values())
    assert found["same"]


def test_a_step_of_405_billion_weights_in_small_runs_with_moments_in_host_memory() -> None:
    found = ask("llama")
    assert found["peak"] <= found["budget"]
    assert found["same"] and found["placed_alike"]
    assert found["kinds"] and found["on_host"] >= 18  # two for each weight of some size


def test_attention_that_devices_cannot_divide_stays_as_it_is() -> None:
    """Groups of heads that are not all on each device."""
    assert ask("attention found tp: grouped, masked") == {"grouped": 0, "masked": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "tp", "both"])
def test_gpus_do_their_parts_of_attention_in_kernels(how: str) -> None:
    row = measured(f"transformer {how}", 0.5, "h100x8", 2)
    assert row["form"] == ["attention"]
    assert row["peak_nbytes"] <= row["budget_nbytes"]
    assert row["sent"] == row["plain_sent"]


def test_logical_axes_of_linen_modules_are_followed() -> None:
    found = ask("logical")
    assert found["placed_alike"]
    check_within(found)


@pytest.mark.parametrize("words", [pytest.param("", marks=pytest.mark.slow), ", checked"])
def test_a_pipeline_is_planned_inside(words: str) -> None:
    found = ask(f"pipeline{words}")
    check_within(found)
    assert found["least"] < found["budget"]
    assert not found["said"]
    assert found["same"] and found["placed_alike"]
    assert found["sent"][0] == found["sent"][1]


def check_counted(plan: dict, plain: dict, planned: dict, *, loops: bool) -> None:
    """The plan has the operations that send something, of which loops' iterations count one by one, and says so where
    they are more than the plain step's.
    """
    counts = {kind: (before, after) for kind, before, after in plan["counted"]}
    if not loops:
        assert {kind: before for kind, (before, _) in counts.items() if before} == plain
        assert {kind: after for kind, (_, after) in counts.items() if after} == planned
    more = any(after > before for before, after in counts.values())
    assert ("in the plain step)" in plan["text"]) == more


def check_within(found: dict) -> None:
    check_counted(found, *found["operations"], loops=found["loops"])
    assert found["peak"] <= found["budget"]
    assert abs(found["predicted"] / found["compiled"] - 1) < 0.1
    assert found["sent"][1].keys() <= found["sent"][0].keys()
    assert all(again == pytest.approx(plain, rel=1e-4) for plain, again in found["losses"])


def test_a_plan_of_another_mesh_is_refused_as_such() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    args = jnp.ones((8, 8)), jnp.ones((64, 8))
    plan = jaxremat.plan(step, *args, budget="1GiB")
    of_four = replace(plan, devices=4, fingerprint=plan.fingerprint[::-1])
    with pytest.raises(
        jaxremat.PlanMismatchError, match=r"mesh of 4 devices, but this step is on one device\."
    ):
        jaxremat.optimize(plan=of_four)(step).plan(*args)
