"""`jaxremat devices` and `demo`: what can be planned for, and what that is like."""

import json
from typing import Annotated, Any

import jax
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .._compiler._devices import detect
from .._compiler._target import targets
from .._model._device_specs import DEVICES, DeviceSpec
from .._runtime._bytes import format_nbytes
from .._runtime._extras import require
from ._command import Answer, command


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @command(app, "devices")
    def devices() -> Answer:
        """List this machine's devices, and the targets of plans.

        A machine can plan for a target, a GPU, without having one.
        """
        here = {f"{d.platform}:{d.id}": detect(d) for d in jax.local_devices()}
        there = {name: DEVICES[name] for name in targets()}
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
        for name in ("target", "device"):
            table.add_column(name, no_wrap=True)
        for name in ("memory", "GB/s", "f32 TFLOP/s", "bf16"):
            table.add_column(name, justify="right")
        for name, spec in (*here.items(), *there.items()):
            table.add_row(f"[dim]{name}[/]" if name in here else name, *_row(spec))
        data = [_data(name, spec, name in here) for name, spec in (*here.items(), *there.items())]
        return Answer(data, table)

    @command(app, "demo")
    def demo(
        console: Console,
        steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 40,
        batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 48,
        budget: Annotated[
            str | None,
            typer.Option(help='Budget, such as "60MiB" or "min"; by default half of the plain step\'s peak.'),
        ] = None,
    ) -> Answer:
        """Train a small ResNet, plainly and within a budget.

        The network is a Flax ResNet, the data are scikit-learn's handwritten digits.
        """
        require("the demo", "demo", "sklearn")
        from ._demo import demo as run

        found = run(console, steps, batch, budget)
        return Answer(json.loads(found.to_json()), "")


def _row(spec: DeviceSpec) -> tuple[str, ...]:
    digits = 0 if spec.peak("f32") > 1e13 else 2
    rates = (f"{spec.peak(dtype) / 1e12:.{digits}f}" for dtype in ("f32", "bf16"))
    return (
        spec.name.partition(", jax")[0],
        format_nbytes(spec.memory_nbytes),
        f"{spec.bandwidth / 1e9:.0f}",
        *rates,
    )


def _data(name: str, spec: DeviceSpec, here: bool) -> dict[str, Any]:
    return {
        "name": name,
        "here": here,
        "device": spec.name,
        "memory_nbytes": spec.memory_nbytes,
        "bandwidth": spec.bandwidth,
        "peak_flops": dict(spec.peak_flops),
    }
