"""Benchmarks that write a row at a time, and the table of what copies in fewer bits are worth."""

from pathlib import Path

import pytest

from examples.benchmarks import records, residuals


def test_rows_that_are_there_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "net-full.json", []

    def row(name: str) -> records.Record:
        made.append(name)
        return {"name": name}

    def wanted(*names: str) -> dict[str, object]:
        return {name: lambda name=name: row(name) for name in names}

    records.completed(path, {"kind": "some"}, wanted("a"))  # type: ignore[arg-type]
    found = records.completed(path, {"kind": "some"}, wanted("a", "b"))  # type: ignore[arg-type]
    assert made == ["a", "b"]
    assert found == records.read(path) == {"kind": "some", "rows": {"a": {"name": "a"}, "b": {"name": "b"}}}
    assert "net-full b" in capsys.readouterr().out
    records.completed(path, {"kind": "some"}, wanted("a"), fresh=True)  # type: ignore[arg-type]
    assert records.read(path)["rows"].keys() == {"a"}


def test_the_table_sets_copies_beside_what_rounds_nothing() -> None:
    exact = {"compiled_overhead": 0.0966}
    copies = {"compiled_overhead": 0.0302, "whole_nbytes": 2**29, "copied_nbytes": 2**28}
    rows = {
        "0.33 exact": exact,
        "0.33 bf16_residuals": copies,
        "0.1 exact": {"least_nbytes": 2**30},
        "0.1 bf16_residuals": copies,
        "0.05 exact": exact,
    }
    table = residuals.markdown([{"network": "vit", "scale": "full", "rows": rows}])
    assert "| vit, full | 33% | +9.7% | +3.0% | 512 MiB | 256 MiB |" in table
    assert "| vit, full | 10% | at least 1.00 GiB | +3.0% | 512 MiB | 256 MiB |" in table
    assert "| 5% |" not in table
    assert residuals.markdown([]) == ""
