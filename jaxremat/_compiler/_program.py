"""A function with its `jit` options -> compiled variants of the function, which differ only in their equations."""

import inspect
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex

from .._program import _compat
from .._program._compat import Args, Aval, Kwargs
from .._program._host_arguments import any_on_host, from_host, is_elsewhere
from .._rewrite._trace import Traced
from .._runtime._errors import ArgumentError, CompilationError, TargetError
from ._target import Target, TargetCompiled, TargetLowered, mismatch

_UNFUSED = {"xla_backend_optimization_level": 0}
"""Unoptimised machine code of the same kernels, in the same order and memory: halves the compilation time."""

_UNOPTIMISED = {"xla_cpu_use_fusion_emitters": False}
"""XLA:CPU's older emitters: a third to two thirds of an unfused build's compilation time. They write the same values to
memory, but with more kernels and slightly different sizes, so such a build confirms neither a peak nor a time.
"""

_ALONE = {"xla_gpu_shard_autotuning": False}
"""One process autotunes all kernels. Otherwise it would wait for the other processes' shares, which compile nothing."""

_DISABLED = "xla_disable_hlo_passes"
_FENCE_BREAKERS = ("cse_barrier_expander", "small-while-loop-hoisting")
"""Disabled passes of XLA:CPU. The first removes optimization barriers before the last elimination of common
subexpressions, which then undoes every plan. The second turns a loop over less than a kilobyte into one kernel, whose
emitter aborts the process with `Check failed: buffer != nullptr` if the loop contains a barrier.
"""


def compiler_options(platform: str | None = None, own: dict[str, object] | None = None) -> dict[str, Any]:
    """Return the compiler options with which XLA keeps barriers on this platform, merged with the caller's own.

    **Arguments:** `platform`: JAX's name for it ("cpu", "gpu"), None for the default backend's.
    """
    platform = jax.default_backend() if platform is None else platform
    merged = dict(own or {})
    if platform == "cpu":
        given = [name for name in str(merged.get(_DISABLED, "")).split(",") if name]
        merged[_DISABLED] = ",".join(dict.fromkeys([*given, *_FENCE_BREAKERS]))
    return merged


Lowered = jax.stages.Lowered | TargetLowered
Compiled = jax.stages.Compiled | TargetCompiled


@dataclass(frozen=True)
class Program:
    """A function and its `jit` options.

    **Fields** as in `jax.jit`; `target` the device to compile for, None for this machine's; `otherwise` the options for
    a second attempt if compilation fails with `compiler_options`, for example if a version of jax does not know them.
    """

    fn: Callable[..., Any]
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    in_shardings: Any = None
    out_shardings: Any = None
    compiler_options: tuple[tuple[str, Any], ...] = ()
    target: Target | None = None
    otherwise: tuple[tuple[str, Any], ...] = ()

    def lower(self, jitted: jax.stages.Wrapped, args: Args, kwargs: Kwargs) -> Lowered:
        """Return a jitted variant of the function, lowered for the device that this program is for."""
        if self.target is None:
            return jitted.lower(*args, **kwargs)
        return self.target.lower(jitted, args, kwargs, dict(self.compiler_options))

    def compile(
        self, jitted: jax.stages.Wrapped, args: Args, kwargs: Kwargs, seconds: float = math.inf
    ) -> "Compiled":
        """Return a jitted variant of the function, compiled with this program's options in place of its own.

        **Arguments:** `seconds` limits the compilation for a target only: for this machine's device the compiler runs
        in this process, which cannot stop it.

        **Raises:** `CompilationError` if the compiler fails.
        """
        return self._compiled(self.lower(jitted, args, kwargs), seconds)

    def begin(
        self,
        jitted: jax.stages.Wrapped,
        args: Args,
        kwargs: Kwargs,
        seconds: float = math.inf,
        *,
        apart: bool,
    ) -> "Future[tuple[Compiled, float]]":
        """Start the same compilation, and return a future of its result and seconds: with `apart` in another thread,
        otherwise it is done on return.
        """
        began = time.monotonic()
        lowered = self.lower(jitted, args, kwargs)

        def finish() -> tuple[Compiled, float]:
            return self._compiled(lowered, seconds), time.monotonic() - began

        if apart:
            compiling = ThreadPoolExecutor(1)
            begun = compiling.submit(finish)
            compiling.shutdown(wait=False)
            return begun
        done = Future[tuple[Compiled, float]]()
        try:
            done.set_result(finish())
        except CompilationError as error:
            done.set_exception(error)
        return done

    def _compiled(self, lowered: Lowered, seconds: float = math.inf) -> "Compiled":
        if isinstance(lowered, TargetLowered):
            return lowered.compile(seconds)
        if self.otherwise:
            with suppress(Exception):
                return lowered.compile(compiler_options=dict(self.compiler_options))
        try:
            return lowered.compile(compiler_options=dict(self.otherwise or self.compiler_options) or None)
        except MemoryError as error:
            raise CompilationError(
                "XLA needs more memory for the step than this machine has.", reason="memory"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            raise CompilationError(f"XLA refuses the step: {error}", reason="refused") from error

    def unfused_build(self, platform: str, *, shared: bool = False) -> "Program":
        """Return the program with options for a build that is read, not run. On this machine's GPU the options stay:
        XLA autotunes kernels by running them, so these must be as fast as in the final build.

        **Arguments:** `shared` whether the program runs on devices of several processes, one of which compiles it.
        """
        given = dict(self.compiler_options)
        if platform == "cpu" or self.target is not None:
            options = _UNFUSED
        else:
            options = _ALONE if shared and platform == "gpu" else {}
        return replace(self, compiler_options=tuple(sorted((options | given).items()))) if options else self

    def unoptimised_build(self, platform: str, *, shared: bool = False) -> "Program":
        """Return the program with options for a build that shows only which values it writes to memory, not its peak or
        time. **Arguments:** as in `unfused_build`.
        """
        unfused_build = self.unfused_build(platform, shared=shared)
        if platform != "cpu" or self.target is not None:
            return unfused_build
        options = tuple(sorted((_UNOPTIMISED | dict(unfused_build.compiler_options)).items()))
        return replace(unfused_build, compiler_options=options, otherwise=unfused_build.compiler_options)

    def alone(self, fn: Callable[..., object], donate_argnums: tuple[int, ...] = ()) -> "Program":
        """Return the program of another function, such as a part of this one, for the same device and with the same
        compiler options.
        """
        options = {name: getattr(self, name) for name in ("compiler_options", "target", "otherwise")}
        return Program(fn, donate_argnums=donate_argnums, **options)

    @cached_property
    def plain(self) -> Any:
        """`jax.jit` of the function itself."""
        return self.jit(self.fn)

    def jit(self, fn: Callable[..., object], *, keep_unused: bool = False) -> Any:
        """Return `jax.jit` of a function with this program's signature, with this program's options."""
        options: dict[str, Any] = {"keep_unused": keep_unused}
        for name in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"):
            if getattr(self, name):
                options[name] = getattr(self, name)
        if self.in_shardings is not None:
            options["in_shardings"] = self.in_shardings
        if self.out_shardings is not None:
            options["out_shardings"] = self.out_shardings
        known = self.otherwise or self.compiler_options  # compiling can add options to these, but remove none
        return jax.jit(fn, compiler_options=dict(known) or None, **options)

    @cached_property
    def _positional(self) -> list[str] | None:
        """The names of the positional parameters; None if the signature cannot be read."""
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except (TypeError, ValueError):
            return None
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in parameters if p.kind in kinds]

    def name_of(self, path: Sequence[Any]) -> str:
        """Return the user's name for the leaf at a path of `dynamic`'s result: `params['w']`, `args[3]`."""
        _, first, *rest = path
        name = getattr(first, "key", None)
        if name is None:
            numbers, named = self._static[0], self._positional or []
            place = [i for i in range(first.idx + len(numbers) + 1) if i not in numbers][first.idx]
            name = named[place] if place < len(named) else f"args[{place}]"
        return f"`{name}{jax.tree_util.keystr(tuple(rest))}`"

    @cached_property
    def _static(self) -> tuple[frozenset[int], frozenset[str]]:
        """The static arguments by position and by name, each completed from the other as `jit` does."""
        numbers, names = set(self.static_argnums), set(self.static_argnames)
        if (positional := self._positional) is None:
            return frozenset(numbers), frozenset(names)
        numbers = {n + len(positional) if n < 0 else n for n in numbers}
        if not self.static_argnames:
            names |= {positional[n] for n in numbers if n < len(positional)}
        if not self.static_argnums:
            numbers |= {i for i, name in enumerate(positional) if name in names}
        return frozenset(numbers), frozenset(names)

    @property
    def static_places(self) -> list[int]:
        """The positions of static arguments."""
        return sorted(self._static[0])

    @property
    def has_static(self) -> bool:
        """Whether some argument is static."""
        return bool(self.static_argnums or self.static_argnames)

    def dynamic(self, args: Sequence[object], kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the traced arguments."""
        numbers, names = self._static
        if not numbers and not names:
            return tuple(args), kwargs
        return tuple(a for i, a in enumerate(args) if i not in numbers), {
            k: v for k, v in kwargs.items() if k not in names
        }

    def refilled(
        self, dynamic: tuple[Sequence[object], dict[str, object]], args: Sequence[object], kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the traced ones replaced by those of `dynamic`: the inverse of that method."""
        numbers, _ = self._static
        traced = iter(dynamic[0])
        return tuple(a if i in numbers else next(traced) for i, a in enumerate(args)), kwargs | dynamic[1]

    def static(self, args: Sequence[object], kwargs: Kwargs) -> tuple[Any, ...]:
        """Return the static arguments, each with its position or name."""
        numbers, names = self._static
        return (
            *((i, a) for i, a in enumerate(args) if i in numbers),
            *sorted((k, v) for k, v in kwargs.items() if k in names),
        )

    def evaluating(self, closed: jex.ClosedJaxpr, traced: Traced, *, keep_unused: bool = False) -> Any:
        """Return `jit` of a function with the program's signature that evaluates a flat jaxpr of the program."""
        evaluate = jex.jaxpr_as_fun(traced.step(closed))
        name = getattr(self.fn, "__name__", "step")
        types = traced.step(traced.closed).out_avals[: traced.source.out_tree.num_leaves]

        def step(*args: object, **kwargs: object) -> Any:
            leaves = jax.tree.leaves(self.dynamic(args, kwargs))
            made = (
                traced.source.references.run(evaluate, leaves)
                if traced.source.references
                else evaluate(*leaves)
            )
            results = [_as_weak(*each) for each in zip(made, types, strict=True)]
            return jax.tree.unflatten(traced.source.out_tree, results)

        step.__name__ = step.__qualname__ = name
        step.__wrapped__ = self.fn  # type: ignore[attr-defined]  # its signature, for donation and static arguments by name
        return self.jit(step, keep_unused=keep_unused)


def _as_weak(array: jax.Array, aval: Aval) -> Any:
    """Return the array with the weak type of the plain step's result: results of a step are arguments of the next,
    which would otherwise be traced again.
    """
    if not getattr(aval, "weak_type", False) or array.aval.weak_type:
        return array
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def placed(program: Program, args: Args, kwargs: Kwargs) -> Program:
    """Return the program with the compiler options of its device, and able to take arguments in host memory.

    **Raises:** `TargetError` if its number of devices is not the target's, or it has no devices; `ArgumentError` if an
    argument is donated from a memory to which the step cannot return it.
    """
    _check_donated(program, args, kwargs)
    count = device_count(program, args, kwargs)
    if program.target is not None and program.target.devices != count:
        raise mismatch(program.target, count)
    if program.target is None and any(map(_is_abstract, _shardings(program, args, kwargs))):
        raise TargetError(
            "The arguments are on an `AbstractMesh`, which has no devices to compile for. Name the devices: "
            f'`target="h100x{count}"`; or pass arguments on a mesh of this machine\'s devices (`jax.make_mesh`).'
        )
    platform = "gpu" if program.target is not None else device_of(args, kwargs).platform
    options = compiler_options(platform, dict(program.compiler_options))
    program = replace(program, compiler_options=tuple(sorted(options.items())))
    return _from_host(program, args, kwargs) if any_on_host(args, kwargs) else program


def _check_donated(program: Program, args: Args, kwargs: Kwargs) -> None:
    """Check donated arrays. **Raises:** `ArgumentError` for one in neither device nor pinned host memory: XLA aborts
    the process if a result for the device takes its place.
    """
    leaves, _ = jax.tree.flatten_with_path(program.dynamic(args, kwargs))
    if not any(is_elsewhere(leaf) for _, leaf in leaves):
        return
    infos = jax.tree.leaves(program.plain.trace(*args, **kwargs).args_info)
    for (path, leaf), info in zip(leaves, infos, strict=True):
        if info.donated and is_elsewhere(leaf):
            raise ArgumentError(
                f"The argument {program.name_of(path)}, {leaf.dtype}{list(leaf.shape)}, is donated, but its memory "
                f"kind is {leaf.sharding.memory_kind!r}, where a step returns nothing. Move it to the device, with "
                "`jax.device_put(x, jax.memory.Space.Device)`, or to host memory, with `jaxremat.to_host(x)`."
            )


def _from_host(program: Program, args: Args, kwargs: Kwargs) -> Program:
    """Return the program with copies of its arguments to the device, unless it contains them already."""
    moving = replace(program, fn=from_host(program.fn))
    for each in (program, moving):
        with suppress(Exception):
            each.plain.trace(*args, **kwargs)
            return each
    return program  # tracing it later raises the error of the user's code


def device_of(args: Args, kwargs: Kwargs) -> Any:
    """Return the device that the step will run on: that of the first argument that is a committed array or a struct
    with a sharding, else the default. Of several devices it is the first, of this process if it has one.
    """
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not _is_abstract(sharding) and getattr(leaf, "committed", True):
            return min(sharding.device_set, key=lambda d: (d.process_index != jax.process_index(), d.id))
    return _compat.default_device()


def processes_of(program: Program, args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    """Return the processes of this job on whose devices the step runs."""
    if jax.process_count() == 1:
        return (jax.process_index(),)
    shardings = {s for s in _shardings(program, args, kwargs) if not _is_abstract(s)}
    found = {device.process_index for sharding in shardings for device in sharding.device_set}
    return tuple(sorted(found)) or (jax.process_index(),)


def device_count(program: Program, args: Args, kwargs: Kwargs) -> int:
    """Return the number of devices of the step, by its arguments and results."""
    return max((sharding.num_devices for sharding in _shardings(program, args, kwargs)), default=1)


def _shardings(program: Program, args: Args, kwargs: Kwargs) -> list[jax.sharding.Sharding]:
    given = jax.tree.leaves((program.in_shardings, program.out_shardings))
    given += [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((args, kwargs))]
    return [sharding for sharding in given if isinstance(sharding, jax.sharding.Sharding)]


def _is_abstract(sharding: jax.sharding.Sharding) -> bool:
    """Return whether a sharding is on a mesh without devices."""
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
