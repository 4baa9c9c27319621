"""The command line: what the demo prints, and what it says where it cannot run."""

import io
import re
import sys

import jax
import numpy as np
import pytest

import jaxremat
from jaxremat import __main__ as cli

pytest.importorskip("typer")
pytest.importorskip("sklearn")

from rich.console import Console
from typer.testing import CliRunner

from jaxremat._cli import application
from jaxremat._cli._demo import Digits, ResNet, demo, initial_state


@pytest.mark.slow
def test_both_runs_are_reported_and_the_budget_is_kept() -> None:
    text = io.StringIO()
    plan = demo(Console(file=text, width=100), steps=2, batch_size=16, budget="min", blocks=(1, 1), side=8)
    out = text.getvalue()
    assert plan.compiled_peak_nbytes is not None
    assert plan.compiled_peak_nbytes < plan.baseline_peak_nbytes
    for part in ("compiled peak", "step time", "test accuracy", "loss curves differ by", str(plan)):
        assert part in out
    assert "\x1b" not in out, "escape codes do not belong in a file"
    # Before the first update, and after it, rounding has had no time to grow.
    plain, planned = (float(x) for x in re.findall(r"step +1 of 2: loss ([0-9.]+) \| ([0-9.]+)", out)[0])
    assert plain == pytest.approx(planned, abs=1e-3)


def run(*words: str) -> int:
    """The exit code of the command line."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["jaxremat", *words])
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_budget_that_cannot_be_met_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_small(*args: object) -> None:
        raise jaxremat.InfeasibleBudgetError("Use at least 2 bytes.", budget_nbytes=1, min_peak_nbytes=2)

    monkeypatch.setattr("jaxremat._cli._demo.demo", too_small)
    assert run("demo", "--budget", "1") == 1
    assert capsys.readouterr().err == "jaxremat: Use at least 2 bytes.\n"


@pytest.mark.parametrize(("module", "extra"), [("typer", "tools"), ("sklearn", "demo")])
def test_a_missing_dependency_is_named_with_the_command_that_installs_it(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run("demo") == 4
    said = capsys.readouterr().err
    assert re.fullmatch(rf'jaxremat: .*{module}, which is not installed\. .*"\.\[{extra}\]"\n', said)


def test_the_version_is_said_with_and_without_what_the_command_line_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxremat", "--version"])
    cli.main()
    said = capsys.readouterr().out
    assert said == f"jaxremat {jaxremat.__version__}, jax {jax.__version__}\n"
    assert CliRunner().invoke(application(), ["--version"]).stdout == said
    monkeypatch.setitem(sys.modules, "typer", None)
    cli.main()
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("words", "status"), [(["--help"], 0), (["demo", "--help"], 0), ([], 2), (["fly"], 2)]
)
def test_the_command_line_explains_itself(
    words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == status
    seen = capsys.readouterr()
    assert ("Usage: jaxremat" if words != ["fly"] else "jaxremat --help") in seen.out + seen.err


def test_batches_are_the_same_on_every_run_and_never_test_images() -> None:
    digits = Digits.load(8)
    first, second = (list(digits.batches(100, 20)) for _ in range(2))
    for (images, labels), (again, _) in zip(first, second, strict=True):
        assert images.shape == (100, 8, 8, 1) and labels.shape == (100,)
        np.testing.assert_array_equal(images, again)
    test = {image.tobytes() for image in digits.images[: digits.test_count]}
    assert not any(np.asarray(image).tobytes() in test for images, _ in first for image in images)


def test_the_network_is_the_residual_network_of_the_paper() -> None:
    state = jax.eval_shape(lambda: initial_state(ResNet(), 16, steps=10))
    kernels = [k for k in jax.tree.leaves(state.params) if k.ndim == 4]
    assert len(kernels) == 1 + 6 * 2 + 2  # the stem, two per block, a shortcut where the shape changes
