"""Benchmarks that write a row at a time, and the table of what copies in fewer bits are worth."""

from functools import partial
from pathlib import Path

import pytest

from examples.benchmarks import records, residuals
from examples.benchmarks.runner import Rows, completed


def test_rows_that_are_there_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "net-full.json", []

    def row(name: str) -> records.Record:
        made.append(name)
        return {"name": name}

    def wanted(*names: str) -> Rows:
        return {name: partial(row, name) for name in names}

    completed(path, {"kind": "some"}, wanted("a"))
    found = completed(path, {"kind": "some"}, wanted("a", "b"))
    assert made == ["a", "b"]
    assert found == records.read(path) and found["kind"] == "some"
    assert {key: row["name"] for key, row in found["rows"].items()} == {"a": "a", "b": "b"}
    assert {row["library"] for row in found["rows"].values()} == {records.library_version()}
    assert "net-full b" in capsys.readouterr().out
    completed(path, {"kind": "some"}, wanted("a"), fresh=True)
    completed(path, {"kind": "some"}, wanted("a", "b"), stale=lambda row: row["name"] == "b")
    assert made == ["a", "b", "a", "b"]
    assert records.read(path)["rows"].keys() == {"a", "b"}


def test_the_command_line_says_what_is_measured_and_where_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = residuals.BENCHMARK
    quick = benchmark.asked([])
    assert (quick.names, quick.scale, quick.shares, quick.folder) == (["vit"], "tiny", [0.5], records.OUT)
    asked = benchmark.asked(["gpt", "unet", "--save", "--shares", "0.4", "--target", "l4"])
    assert (asked.names, asked.scale, asked.shares) == (["gpt", "unet"], "full", [0.4])
    assert benchmark.path(asked, "gpt") == records.RESULTS / "residuals" / "gpt-full-l4.json"
    assert benchmark.path(benchmark.asked(["gpt", "--results", str(tmp_path)]), "gpt").is_relative_to(
        tmp_path
    )
    assert len(benchmark.asked(["all"]).names) == 9
    with pytest.raises(SystemExit):
        benchmark.asked(["alexnet"])
    assert "nothing is called alexnet; there are resnet50" in capsys.readouterr().err
