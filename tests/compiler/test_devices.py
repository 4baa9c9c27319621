"""The table of devices, and the measured CPU with its cache file."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxremat import JaxrematWarning
from jaxremat._compiler import _devices
from jaxremat._compiler._devices import DEVICES, DeviceSpec, detect, measure_cpu

MEASURED = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11), ("f64", 7e10)), 2e-6, 2.5e10)


def _device(kind: str, stats: dict[str, int] | None = None, platform: str = "gpu") -> Any:
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A cache folder of its own, and a measurement that only counts its calls."""
    calls: list[str] = []

    def measure(name: str) -> DeviceSpec:
        calls.append(name)
        return MEASURED

    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_devices, "_measure", measure)
    measure_cpu.cache_clear()
    yield calls
    measure_cpu.cache_clear()


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla P100-PCIE-16GB", "p100"),
    ],
)
def test_gpus_are_known_by_the_words_of_their_kind(kind: str, key: str) -> None:
    assert detect(_device(kind)) == DEVICES[key]


def test_reported_memory_counts() -> None:
    spec = detect(_device("NVIDIA H100 80GB HBM3", {"bytes_limit": 60 * 10**9}))
    assert spec.memory_nbytes == 60 * 10**9
    assert spec.bandwidth == DEVICES["h100"].bandwidth


def test_an_unknown_gpu_has_the_ratios_of_an_h100() -> None:
    spec = detect(_device("NVIDIA L40S", {"bytes_limit": 45 * 10**9}))  # not the L4
    assert (spec.name, spec.memory_nbytes) == ("NVIDIA L40S", 45 * 10**9)
    assert spec.peak_flops == DEVICES["h100"].peak_flops


@pytest.mark.parametrize("spec", DEVICES.values(), ids=DEVICES)
def test_the_table_is_plausible(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert len({spec, spec}) == 1
    assert (
        spec.peak("f64") <= spec.peak("f32") <= spec.peak("bf16") <= spec.peak("f16") <= spec.peak("f8e5m2")
    )
    # A kernel must do tens of operations per byte before arithmetic limits it; the host is far.
    assert 10 < spec.peak("f32") / spec.bandwidth < 200
    assert spec.host_link < spec.bandwidth / 5


def test_types_without_a_rate_run_like_a_relative() -> None:
    spec = DeviceSpec("d", "gpu", 1, 1.0, (("f32", 1.0), ("bf16", 2.0), ("f64", 0.5)), 0.0, 1.0)
    rates = {"f32": 1, "float32": 1, "s32": 1, "bool": 1, "pred": 1, "complex64": 1}
    rates |= {"bf16": 2, "bfloat16": 2, "f16": 2, "float16": 2, "f8e4m3fn": 2, "float8_e5m2": 2}
    rates |= {"f64": 0.5, "float64": 0.5, "c128": 0.5}
    assert {dtype: spec.peak(dtype) for dtype in rates} == rates


def test_a_spec_without_f32_says_so() -> None:
    spec = DeviceSpec("mine", "gpu", 1, 1.0, (("bf16", 2.0),), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"'mine'.*no rate for f32.*\['bf16'\].*Add a pair"):
        spec.peak("s32")


def test_a_cpu_is_measured_once_and_then_read(counted: list[str], tmp_path: Path) -> None:
    first = detect(jax.devices("cpu")[0])
    measure_cpu.cache_clear()  # as in a new process
    assert detect(jax.devices("cpu")[0]) == first == MEASURED
    assert len(counted) == 1
    assert jax.__version__ in counted[0]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]  # no draft left behind


def test_processes_that_measure_at_once_agree(
    counted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While this process measures, another one does, and is done first."""
    measure_cpu()
    (file,) = (tmp_path / "cache").iterdir()
    text = file.read_text().replace(json.dumps(2.5e10), json.dumps(3e10))
    theirs = replace(MEASURED, bandwidth=3e10, host_link=3e10)

    def meanwhile(name: str) -> DeviceSpec:
        file.write_text(text)
        return MEASURED

    file.unlink()
    monkeypatch.setattr(_devices, "_measure", meanwhile)
    for _ in range(2):  # this process, and a later one
        measure_cpu.cache_clear()
        assert measure_cpu() == theirs
    assert file.read_text() == text
    assert list((tmp_path / "cache").iterdir()) == [file]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": "another machine", "spec": {}}',
        '{"key": KEY}',
        '{"key": KEY, "spec": []}',
        '{"key": KEY, "spec": {"name": "x", "peak_flops": {"f32": "fast"}}}',
        '{"key": KEY, "spec": {"name": "x", "platform": "cpu", "memory_nbytes": 1, "bandwidth": 0,'
        ' "peak_flops": {"f32": 1}, "launch_seconds": 0, "host_link": 1}}',
    ],
)
def test_a_corrupt_cache_file_is_measured_anew(counted: list[str], tmp_path: Path, text: str) -> None:
    measure_cpu()
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_text()
    file.write_text(text.replace("KEY", json.dumps(counted[0])))
    measure_cpu.cache_clear()
    with pytest.warns(JaxrematWarning, match=f"{file.name} cannot be read"):
        assert measure_cpu() == MEASURED
    assert len(counted) == 2
    assert file.read_text() == good


def test_a_folder_that_cannot_be_written_is_tolerated(
    counted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXREMAT_CACHE", str(tmp_path / "file" / "cache"))
    assert measure_cpu() == measure_cpu() == MEASURED
    assert len(counted) == 1


@pytest.mark.usefixtures("really_measured")
def test_the_measurement_is_rounded_and_leaves_jax_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_devices, "_SIDE", 64)
    monkeypatch.setattr(_devices, "_STREAM_ELEMENTS", 1 << 12)
    spec = _devices._measure("this machine")
    assert dict(spec.peak_flops).keys() == {"f32", "bf16", "f64"}
    for rate in (spec.bandwidth, *dict(spec.peak_flops).values()):
        assert rate > 0
        assert rate == float(f"{rate:.1e}")
    assert spec.memory_nbytes > 2**28
    assert jax.numpy.ones(()).dtype == "float32"  # x64 was on during the measurement only


@pytest.mark.usefixtures("really_measured")
def test_the_measurement_works_inside_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "_SIDE", 64)
    monkeypatch.setattr(_devices, "_STREAM_ELEMENTS", 1 << 12)
    assert jax.make_jaxpr(lambda x: x if _devices._measure("m").bandwidth > 0 else -x)(1.0).eqns == []
