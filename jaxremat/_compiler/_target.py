"""Programs compiled for a GPU that is not in this machine: `Target("h100").lower(jitted, ...).compile()`.

XLA's GPU compiler runs in a worker process (`_target_worker`), started on first use.
"""

import functools
import importlib.metadata
import importlib.util
import io
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax

from .._attention._operations import lowered_for
from .._model._device_specs import DEVICES, DeviceSpec
from .._program._compat import Args, Kwargs
from .._runtime._errors import CompilationError, TargetError
from .._runtime._extras import version_of
from .._runtime._worker import WorkerLateError, WorkerLostError, WorkerRefusedError, ask

logger = logging.getLogger("jaxremat")

WORKER = Path(__file__).with_name("_target_worker.py")
_PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")


def targets() -> tuple[str, ...]:
    """Return the names of devices for which any machine can plan: `("h100", ...)`."""
    return tuple(name for name, spec in DEVICES.items() if spec.chip is not None)


_SEVERAL = re.compile(r"(?P<device>[^:]+?)(?::(?P<hosts>[1-9]\d*))?x(?P<each>[1-9]\d*)")


@dataclass(frozen=True)
class Target:
    """A device by its name in `targets()`, in any case, or several: `h100x8`, or `h100:16x8`, 16 hosts with 8 each.

    **Raises:** `TargetError` for other names.
    """

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.name).lower())
        if self.device not in targets():
            raise TargetError(
                f"`target={self.name!r}` is unknown. Write one of {', '.join(targets())}. For several devices "
                'append their number ("h100x8"), or hosts and devices per host ("h100:16x8").'
            )

    @property
    def _parts(self) -> tuple[str, int, int]:
        several = None if self.name in targets() else _SEVERAL.fullmatch(self.name)
        if several is None:
            return self.name, 1, 1
        return several["device"], int(several["hosts"] or 1), int(several["each"])

    @property
    def device(self) -> str:
        """The name of one device."""
        return self._parts[0]

    @property
    def devices(self) -> int:
        """The number of devices."""
        _, hosts, each = self._parts
        return hosts * each

    @property
    def spec(self) -> DeviceSpec:
        """The specification of one device."""
        return DEVICES[self.device]

    def topology(self, partitions: int) -> str:
        """Return the devices for a program of this many partitions, in XLA's form: slices x hosts x devices per host.

        **Raises:** `TargetError` if the target has another number of devices.
        """
        if partitions == 1:
            return "1x1x1"
        if partitions != self.devices:
            raise mismatch(self, partitions)
        _, hosts, each = self._parts
        return f"1x{hosts}x{each}"

    def _described(self) -> Any:
        """Return the device as JAX describes it."""
        chip = self.spec.chip
        assert chip is not None
        return jax.sharding.AbstractDevice(_KINDS.get(chip.capability, self.spec.name), chip.cores, "gpu")

    def lower(
        self, jitted: jax.stages.Wrapped, args: Args, kwargs: Kwargs, options: Mapping[str, object]
    ) -> "TargetLowered":
        """Return a jitted function, lowered for the device with these compiler options.

        **Raises:** `TargetError` if JAX cannot lower it for GPUs.
        """
        try:
            traced = jitted.trace(*args, **kwargs)
            with lowered_for(self._described()):
                lowered = traced.lower(lowering_platforms=("cuda",))
        except (NotImplementedError, ValueError) as error:
            raise TargetError(
                f"The step cannot be lowered for `target={self.name!r}`: {error}. Host callbacks (`jax.debug.print`, "
                "`jax.pure_callback`, ...) need the device itself: plan without them, or on the device."
            ) from error
        return TargetLowered(self, lowered, options)


def in_words(devices: int) -> str:
    """Return a number of devices as text."""
    return "one device" if devices == 1 else f"{devices} devices"


def mismatch(target: Target, devices: int) -> TargetError:
    """Return the error for a step whose number of devices is not the target's."""
    if devices == 1:
        return TargetError(
            f"`target={target.name!r}` has {target.devices} devices, but no argument of the step is sharded. "
            "Pass arguments with shardings, such as `jax.ShapeDtypeStruct(shape, dtype, "
            'sharding=NamedSharding(mesh, P("data")))` with `mesh = '
            f'jax.sharding.AbstractMesh(({target.devices},), ("data",))`, or write `target={target.device!r}`.'
        )
    return TargetError(
        f"`target={target.name!r}` has {in_words(target.devices)}, but the step's mesh has {devices}. Write "
        f'`target="{target.device}x{devices}"` (for several hosts `"{target.device}:HOSTSxDEVICES"`), or pass '
        f"arguments on a mesh of {target.devices}."
    )


_KINDS = {(8, 0): "NVIDIA A100", (8, 9): "NVIDIA L4", (9, 0): "NVIDIA H100", (10, 0): "NVIDIA B200"}
"""JAX's name for a device of each CUDA capability, which it needs to lower kernels for a device that is not present."""


class TargetLowered:
    """A step lowered for a target, like `jax.stages.Lowered`."""

    def __init__(self, target: Target, lowered: jax.stages.Lowered, options: Mapping[str, object]):
        self.target = target
        self._lowered = lowered
        self._options = options

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the program before XLA."""
        return self._lowered.as_text(dialect, debug_info=debug_info)

    def compile(self, seconds: float = math.inf) -> "TargetCompiled":
        """Compile the step with XLA's GPU compiler, for at most `seconds`.

        **Raises:** `CompilationError` if that fails; `TargetError` if the compiler is not installed.
        """
        module: Any = self._lowered.compiler_ir("stablehlo")
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        topology = self.target.topology(int(module.operation.attributes["mhlo.num_partitions"].value))
        options = tuple(sorted(self._options.items()))
        _check_installed()
        figures, text = _compile(self.target, topology, buffer.getvalue(), options, seconds)
        return TargetCompiled(self.target, figures, text)


@functools.lru_cache(maxsize=16)  # planning one step for several budgets compiles the plain step once
def _compile(
    target: Target, topology: str, module: bytes, options: tuple[tuple[str, object], ...], seconds: float
) -> tuple[dict[str, int], str]:
    chip = target.spec.chip
    assert chip is not None
    asked = chip.config(target.spec.name), topology, module
    try:
        try:
            return ask(WORKER, (*asked, dict(options)), seconds)
        except WorkerLostError as error:  # or it refused
            if not any(words in str(error) for words in _NO_TILING):
                raise
            logger.info(
                "compiling again without Triton's matrix products, because XLA finds no tiling for one of them"
            )
            return ask(WORKER, (*asked, {**_WITHOUT_TRITON, **dict(options)}), seconds)
    except WorkerLostError as error:
        raise _failure(error, f"XLA's compiler for `target={target.name!r}`", seconds) from None


def _failure(error: WorkerLostError, compiler: str, seconds: float) -> CompilationError:
    """Return the error of a compilation without a result."""
    said = str(error)
    if isinstance(error, WorkerLateError) and seconds < math.inf:
        return CompilationError(
            f"{compiler} takes longer than {seconds:.0f} s for the step, its share of `Planning.planning_seconds`.",
            reason="time",
        )
    if said.startswith("SIGKILL") or any(words in said for words in _NO_MEMORY):
        return CompilationError(
            f"{compiler} needs more memory for the step than this machine has: {said}", reason="memory"
        )
    if isinstance(error, WorkerRefusedError) or "Check failed" in said:
        return CompilationError(f"{compiler} refuses the step: {said}", reason="refused")
    return CompilationError(f"The process that runs {compiler} died: {said}", reason="lost")


_NO_MEMORY = ("MemoryError", "bad_alloc", "RESOURCE_EXHAUSTED")
"""Texts of the compiler if an allocation fails. Linux may also kill the process, without a text."""


_NO_TILING = ("find output tile sizes", "triton_tiling_propagation")
"""Texts of XLA for a product that Triton should compute, but for whose shape it finds no tiling (attention over an odd
length), or if a check fails while XLA looks for operations to fuse with one (images of which every other row and column
is read). On a machine with the device, XLA would try cuBLAS too, and take the faster one.
"""

_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


class TargetCompiled:
    """A step compiled for a target, like `jax.stages.Compiled`, but it cannot run."""

    def __init__(self, target: Target, figures: dict[str, int], text: str):
        self.target = target
        self._figures = figures
        self._text = text

    def as_text(self) -> str:
        """Return the optimised, scheduled HLO."""
        return self._text

    def memory_analysis(self) -> SimpleNamespace:
        """Return XLA's figures in bytes, as attributes (`temp_size_in_bytes`)."""
        return SimpleNamespace(**self._figures)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise elsewhere(self.target)


def elsewhere(target: Target) -> TargetError:
    """Return the error of a step that is called on a machine without its target."""
    return TargetError(
        f'The step is planned for `target="{target.name}"` and cannot run on this machine. Save its plan with '
        '`step.plan(...).save("plan.json")`, and on that device write `optimize(plan="plan.json")`.'
    )


def compilers() -> list[tuple[str, str]]:
    """Return the installed packages with XLA's GPU compiler, each with its version."""
    return [(name, version) for name in _PLUGINS if (version := version_of(name)) is not None]


def _check_installed() -> None:
    """Check XLA's GPU compiler. **Raises:** `TargetError` if it is missing, or its version is not jaxlib's."""
    wanted = importlib.metadata.version("jaxlib")
    found = compilers()
    if not found:
        raise TargetError(
            "Compiling for a GPU that this machine lacks needs XLA's GPU compiler, which is not installed. "
            'Install it, in a checkout of jaxremat, with: pip install ".[targets]"'
        )
    if not any(version == wanted for _, version in found):
        name, version = found[0]
        raise TargetError(
            f"{name} {version} is installed with jaxlib {wanted}, but their versions must be equal. "
            f'Install: pip install "{name}=={wanted}"'
        )
