"""The table of devices."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxremat._compiler._devices import CPU, DEVICES, DeviceSpec, detect


def _device(kind: str, stats: dict[str, int] | None = None, platform: str = "gpu") -> Any:
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)


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


def test_a_cpu_has_the_rates_of_the_table_and_its_own_memory() -> None:
    found = detect(jax.devices("cpu")[0])
    assert found == replace(CPU, memory_nbytes=found.memory_nbytes)
    assert found.memory_nbytes > 2**28
