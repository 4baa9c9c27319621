"""Scanned against unrolled networks, and `nn.remat_scan` by hand: the same network, whatever its blocks are."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples.benchmarks import records, unrolled
from examples.benchmarks.bench import Bench, by_hand
from examples.benchmarks.networks import program
from examples.benchmarks.unrolled import Unrolled, excess, plans_of, table


def row(peak: int, extra: float, **more: Any) -> dict[str, Any]:
    return {"peak_nbytes": peak, "extra_flops": extra, "budget_nbytes": peak, **more}


SCANNED = {
    "rows": {
        "plain": {"peak_nbytes": 2000},
        "scan": {"peak_nbytes": 900, "extra_flops": 0.5},
        "0.5": row(1000, 0.01),
        "0.33": row(800, 0.05),
        "min": row(700, 0.3),
        "0.1": {"infeasible": True, "budget_nbytes": 600, "min_peak_nbytes": 700},
    }
}
WRITTEN_OUT = {
    "rows": {
        "plain": {"peak_nbytes": 1900},
        "0.5": row(990, 0.03),
        "0.33": {"infeasible": True, "budget_nbytes": 800, "min_peak_nbytes": 850},
    }
}


def nested(**sizes: Any) -> tuple[Any, Any]:
    """A scanned network, plain and in two levels by hand."""
    plain, scan = (program("gpt_scanned", remat=remat, scale="tiny", **sizes) for remat in ("none", "scan"))
    return plain, scan


def test_two_levels_by_hand_stack_the_weights_once_more() -> None:
    before, after = (each.abstract_args()[0]["params"] for each in nested(layers=6))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert {a.shape[0] for a in jax.tree.leaves(before["blocks"])} == {6}
    assert {a.shape[:2] for a in jax.tree.leaves(after["blocks"])} == {(2, 3)}


@pytest.mark.slow
def test_two_levels_by_hand_are_the_same_network() -> None:
    plain, scan = nested(layers=4)
    state, batch = plain.make_args()
    again = jax.tree.map(lambda a, b: a.reshape(b.shape), state, scan.abstract_args()[0])
    (_, value), (_, other) = jax.jit(plain.step)(state, batch), jax.jit(scan.step)(again, batch)
    np.testing.assert_allclose(value, other, rtol=1e-5)


def test_networks_of_a_loop_have_one_more_step_by_hand() -> None:
    assert by_hand("gpt") == ("block", "dots")
    assert by_hand("gpt_scanned") == ("block", "dots", "scan")


def test_a_step_by_hand_gives_its_peak_as_a_budget(tmp_path: Path) -> None:
    bench = Bench("gpt_scanned", "tiny", tmp_path / "x.json")
    bench.record = SCANNED
    assert bench.budget("at scan") == 900
    names = ["plain", "block", "dots", "scan", "0.5", "0.33", "min", "at block", "at scan"]
    assert sorted(set(names), key=bench.place) == names


def test_the_unrolled_network_has_the_scanned_ones_peaks_as_budgets(tmp_path: Path) -> None:
    bench = Unrolled("gpt_scanned", "tiny", tmp_path / "x.json", sizes={"scanned": False}, scanned=SCANNED)
    assert [bench.budget(name) for name in plans_of(SCANNED)] == [1000, 800, 700]
    primitives = {
        eqn.primitive.name
        for eqn in jax.make_jaxpr(bench.program().step)(*bench.program().abstract_args()).eqns
    }
    assert "scan" not in primitives


def test_the_table_says_by_how_much_the_scanned_plans_are_dearer() -> None:
    assert excess(SCANNED, WRITTEN_OUT) == {"0.5": pytest.approx(-0.02)}
    lines = table(SCANNED, WRITTEN_OUT).splitlines()[2:]
    assert lines == [
        "| 1000 B | 1.00% | 990 B | 3.00% | -2.00 points |",
        "| 800 B | 5.00% | infeasible: least 850 B |  |  |",
    ]


def test_rows_of_the_scanned_network_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        unrolled.main(["gpt_scanned", "--results", str(tmp_path)])
    assert "python -m examples.benchmarks.steps gpt_scanned" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        unrolled.main(["gpt"])
    assert "nothing is called gpt" in capsys.readouterr().err
    assert not list(records.read_all(tmp_path, "unrolled"))
