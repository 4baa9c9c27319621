"""CBC against HiGHS: rows of a small network, and their table."""

from pathlib import Path

from examples.benchmarks import records, solvers


def test_both_engines_solve_the_same_program(tmp_path: Path) -> None:
    benchmark = solvers.BENCHMARK
    asked = benchmark.asked(["gpt", "--scale", "tiny", "--shares", "0.6", "--results", str(tmp_path)])
    record = benchmark.run(asked, "gpt")
    cbc, highs = (record["rows"][f"0.6 {engine}"] for engine in solvers.ENGINES)
    assert cbc["fits"] and highs["fits"]
    assert cbc["proven"] and highs["proven"]
    assert abs(cbc["overhead"] - highs["overhead"]) < 0.01
    assert benchmark.records(tmp_path) == [records.read(benchmark.path(asked, "gpt"))]
    row = solvers.markdown([record]).splitlines()[-1]
    assert row.count("|") == 3 + 3 * len(solvers.ENGINES) + 1
    assert "gpt, tiny" in row and "60%" in row
    assert solvers.markdown([]) == ""
