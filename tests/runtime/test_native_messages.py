"""Standard error of libraries in C: what is unwanted is left out, and nothing else."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxremat._program import _plugin_messages
from jaxremat._runtime._native_messages import without

ROOT = Path(__file__).parents[2]
NOISE = b"""\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795422413.145735   11650 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be \
used.
"""
ERROR = b"E0000 00:00:1795422413.145735   11650 cuda_executor.cc:31] cudaMalloc failed: out of memory\n"


def test_unwanted_lines_are_left_out_and_the_others_stay_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    with without(_plugin_messages.NO_DRIVERS):
        os.write(2, b"first\n" + NOISE)
        os.write(2, b"second\n" + NOISE + ERROR)
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "first\nsecond\n" + ERROR.decode()
    os.write(2, NOISE)
    assert capfd.readouterr().err == NOISE.decode()  # only within the context


def test_what_is_raised_within_is_raised_and_what_was_said_stays(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no"), without(re.compile(b"never")):
        os.write(2, b"said before")
        raise RuntimeError("no")
    assert capfd.readouterr().err == "said before"


def test_a_process_without_standard_error_runs() -> None:
    code = (
        "import os, re; os.close(2); from jaxremat._runtime._native_messages import without\n"
        "with without(re.compile(b'x')): print('ran')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "ran\n"


def record(message: str, *args: str) -> logging.LogRecord:
    return logging.LogRecord("jax._src.xla_bridge", logging.ERROR, "", 0, message, args, None)


def test_only_the_cuda_plugins_setting_up_is_left_out_of_the_log() -> None:
    failed = "Jax plugin configuration error: Exception when calling %s.initialize()"
    assert _plugin_messages.about_missing_gpu(record(failed, "jax_plugins.xla_cuda12"))
    assert not _plugin_messages.about_missing_gpu(record(failed, "jax_plugins.libtpu"))
    assert not _plugin_messages.about_missing_gpu(record("Platform %s is experimental", "cuda"))
    assert not _plugin_messages.about_missing_gpu(record("Unable to initialize"))


def test_only_the_command_line_without_a_gpu_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(_plugin_messages, "has_gpu", lambda: False)

    def quiet(name: str, *words: str) -> bool:
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])
        return _plugin_messages.quiet()

    assert quiet("/usr/bin/jaxremat", "/usr/bin/jaxremat", "demo")
    assert quiet("-m", "-m", "jaxremat", "demo")
    assert not quiet("train.py", "train.py", "-m", "jaxremat")
    assert not quiet("-m", "-m", "pytest")
    for asked, expected in (("cpu", True), ("cuda,cpu", False), ("gpu", False)):
        monkeypatch.setenv("JAX_PLATFORMS", asked)
        assert quiet("/usr/bin/jaxremat") == expected
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(_plugin_messages, "has_gpu", lambda: True)
    assert not quiet("/usr/bin/jaxremat")


@pytest.mark.parametrize("platforms", [None, "cpu"])
@pytest.mark.skipif(_plugin_messages.has_gpu(), reason="is about machines without a GPU")
def test_the_command_line_says_nothing_of_gpus_that_are_not_there(platforms: str | None) -> None:
    pytest.importorskip("typer")
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env |= {"JAX_PLATFORMS": platforms} if platforms else {}
    words = [sys.executable, "-m", "jaxremat", "devices"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0 and "NVIDIA H100" in done.stdout
    assert done.stderr == ""


def test_what_goes_wrong_with_jax_itself_is_said(tmp_path: Path) -> None:
    """A JAX that cannot be imported: the traceback is there, beside the lines that are left out."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        f"import os\nos.write(2, {NOISE + ERROR!r})\nraise ImportError('libdevice is broken')\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxremat", "devices"], capture_output=True, text=True, env=env
    )
    assert done.returncode != 0
    assert "ImportError: libdevice is broken" in done.stderr and ERROR.decode() in done.stderr
    assert ("Could not find cuda drivers" in done.stderr) == _plugin_messages.has_gpu()
