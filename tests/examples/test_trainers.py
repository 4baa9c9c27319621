"""The training scripts on files of their own: they learn, within a budget, on several processes, killed and resumed."""

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics
from threading import Timer
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from PIL import Image

from jaxremat import Plan

ROOT = Path(__file__).parents[2]
LINES = {
    "imagenet": "--model resnet10 --width 8 --size 32 --batch 16 --epochs 2 --rate 0.05",
    "llm": "--layers 2 --width 64 --heads 4 --length 64 --batch 8 --steps 8 --rate 0.01",
}
LAST = 8
"""Steps that either takes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """66 small images of three classes, told apart by their colour; and a text."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for label in range(3):
        (folder / "images" / f"class {label}").mkdir(parents=True)
        for number in range(22):
            pixels = rng.integers(0, 80, (*rng.integers(40, 60, 2), 3))
            pixels[..., label] += 120
            path = folder / "images" / f"class {label}" / f"{number}.jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    (folder / "text").write_text("\n".join(topics.values()))
    return {"imagenet": folder / "images", "llm": folder / "text"}


def train(
    script: str, line: str, processes: int = 1, devices: int = 1, until: str | None = None
) -> list[str]:
    """What the first process prints; all are killed once that has `until` in it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), *line.split(), "--log-every", "1"]
    with ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []
        for process in range(processes):
            job = f"--coordinator localhost:{port} --processes {processes} --process {process}".split()
            pipes = (subprocess.DEVNULL,) * 2 if process else (subprocess.PIPE, subprocess.STDOUT)
            full = command + job * (processes > 1)
            popen = subprocess.Popen(full, env=environment, stdout=pipes[0], stderr=pipes[1], text=True)
            started.append(stack.enter_context(popen))

        def kill() -> None:
            for each in started:
                each.kill()

        hanging = Timer(900, kill)
        hanging.start()
        stack.callback(hanging.cancel)
        printed = []
        for text in started[0].stdout or ():
            printed.append(text.rstrip())
            if until is not None and until in text:
                kill()
        codes = [each.wait() for each in started]
    if until is None:
        assert codes == [0] * processes, "\n".join(printed[-40:])
    else:
        assert until in "\n".join(printed) and any(codes), "\n".join(printed[-40:])
    return printed


def steps(printed: list[str]) -> dict[int, tuple[float, ...]]:
    """The loss and the accuracy of each step, as printed."""
    found = (re.search(r"step (\d+) of 8: loss ([\d.]+).*accuracy ([\d.]+)%", line) for line in printed)
    return {int(line[1]): (float(line[2]), float(line[3])) for line in found if line}


def arrays(run: Path) -> list[np.ndarray]:
    """All arrays of the training state after the last step."""
    with ocp.PyTreeCheckpointer() as keeper:
        path = (run / str(LAST) / "state").absolute()
        like = keeper.metadata(path).item_metadata.tree
        wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(keeper.restore(path, restore_args=wanted))]


def test_images_are_learned_without_a_budget(data: dict[str, Path], tmp_path: Path) -> None:
    folders = f"--data {data['imagenet']} --val {data['imagenet']} --run {tmp_path}"
    printed = train("imagenet", f"{LINES['imagenet']} {folders}")
    metrics = steps(printed)
    assert sorted(metrics) == list(range(1, LAST + 1))
    assert metrics[LAST][0] < 0.7 * metrics[1][0]
    right = [float(line.split()[2].rstrip("%")) for line in printed if "of other images right" in line]
    assert len(right) == 2 and right[1] > 60  # of three classes, of 66 images in batches of 16
    assert not any("Plan:" in line for line in printed)
    assert (tmp_path / str(LAST)).is_dir()


def test_text_is_learned_within_a_budget_on_a_mesh(data: dict[str, Path], tmp_path: Path) -> None:
    line = f"{LINES['llm']} --data {data['llm']} --run {tmp_path} --tp 2 --budget 4MiB"
    printed = train("llm", line, devices=4)
    metrics = steps(printed)
    assert metrics[LAST][0] < metrics[1][0] - 0.5
    plan = Plan.load(tmp_path / "plan-4MiB.json")
    assert plan.devices == 4 and not plan.drops_nothing
    assert (plan.compiled_peak_nbytes or 0) <= 4 * 2**20 < (plan.baseline_peak_nbytes or 0)
    assert sum(text.startswith("Plan: ") for text in printed) == 1
    assert plan.memory is not None
    assert plan.memory.arguments_nbytes < 0.3 * sum(array.nbytes for array in arrays(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options, devices",
    [("imagenet", "--fsdp --budget 1000KiB", 1), ("llm", "--tp 2 --budget 4MiB", 2)],
)
def test_killed_and_resumed_is_as_if_it_had_not_been(
    script: str, options: str, devices: int, data: dict[str, Path], tmp_path: Path
) -> None:
    line = f"{LINES[script]} {options} --save-every 3 --data {data[script]} --run"
    whole = train(script, f"{line} {tmp_path}/whole", 2, devices)
    assert sum(text.startswith("Plan: ") for text in whole) == 1
    saved = next((tmp_path / "whole").glob("plan-*.json"))
    plan = Plan.load(saved)
    assert plan.devices == 2 * devices and not plan.drops_nothing and plan.memory is not None
    state_nbytes = sum(array.nbytes for array in arrays(tmp_path / "whole"))
    assert plan.memory.arguments_nbytes < 1.2 * state_nbytes / plan.devices + 50_000

    # Planned with other seconds at hand, another plan might be found: it is given.
    (tmp_path / "parts").mkdir()
    shutil.copy(saved, tmp_path / "parts")
    killed = train(script, f"{line} {tmp_path}/parts", 2, devices, until="step 7 of 8")
    assert steps(killed).keys() >= set(range(1, 8)) and not (tmp_path / "parts" / str(LAST)).exists()
    resumed = train(script, f"{line} {tmp_path}/parts", 2, devices)
    assert any(text in ("resumed after step 3", "resumed after step 6") for text in resumed)
    assert not any("Plan:" in text for text in killed + resumed)

    again: Any = steps(resumed)
    assert min(again) > 3 and max(again) == LAST
    assert steps(killed) | again == steps(whole)
    for found, wanted in zip(arrays(tmp_path / "parts"), arrays(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(found, wanted)
