"""Measure attention's kernels on the GPU at hand, beside cuDNN's and XLA's operations: seconds and errors.

    python -m examples.benchmarks.attention all --save

A case is the attention of one layer, `[batch, length, heads, width]`. Each implementation runs forward, and forward
and backward. Its error is the largest |difference| from the attention in float32 at the highest precision, over all
results, relative to the largest entry. A rate is the share of the device's peak that the products reach that the
planner's model counts, by which `KERNEL_RATES` are set.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from examples.benchmarks.records import Record
from examples.benchmarks.runner import Asked, Benchmark, Rows, grid, shown
from jaxremat._attention._finding import Site, attention
from jaxremat._attention._operations import ATTENTION, GRADIENT
from jaxremat._compiler._devices import detect
from jaxremat._rewrite._trace import trace

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Case:
    """Causal self-attention of one layer; `shared` heads of keys and values, and numbers of type `dtype`."""

    batch: int
    length: int
    heads: int
    width: int
    shared: int
    dtype: str = "bfloat16"

    def operands(self, dtype: Any) -> Arrays:
        """Queries, keys, values and the result's cotangent."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.shared, self.shared, self.heads)
        shapes = [(self.batch, self.length, n, self.width) for n in heads]
        drawn = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
        return tuple(a.astype(self.dtype).astype(dtype) for a in drawn)


CASES = {
    "tiny": Case(1, 64, 2, 16, 2, "float32"),
    "gpt-2, 1k": Case(16, 1024, 12, 64, 12),
    "gpt-2, 1k, float32": Case(16, 1024, 12, 64, 12, "float32"),
    "width 64, 4k": Case(4, 4096, 16, 64, 16),
    "width 128, 4k": Case(2, 4096, 16, 128, 16),
    "8 heads of keys, 8k": Case(1, 8192, 32, 128, 8),
    "8 heads of keys, 32k": Case(1, 32768, 32, 128, 8),
}
MOST_SCORES = 2**31
"""XLA's operations are measured where there are at most so many scores."""


def written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention as people write it, with groups of heads that read the same keys and values."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) / width**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(v.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, length, heads, width)


def site_of(case: Case) -> Site:
    """The attention that is found in the written one."""
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(lambda: case.operands(case.dtype))
    ]

    traced = trace(jax.jit(passes(written)[1]), shapes, {})
    (site,) = attention(traced.jaxpr, [-1] * len(traced.loop_of), traced.program.alive)
    return site


def in_kernels(site: Site) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The library's kernels forward, and forward and backward.

    The product that is found has `[batch, shared, width, group, length]` as its result, which the step transposes.
    """
    params = {"pattern": site.pattern, "kernels": True, "places": None}
    batch, shared, width, group, length = site.result.aval.shape

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Arrays, Any]:
        read = (q.reshape(site.operands[0].aval.shape), k, v)
        return read, ATTENTION.bind(*read, **params)

    def outward(result: jax.Array, like: jax.Array) -> jax.Array:
        return result.transpose(0, 4, 1, 3, 2).reshape(like.shape)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, to: jax.Array) -> Any:
        return outward(attend(q, k, v)[1][0], to)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, to: jax.Array) -> Any:
        read, result = attend(q, k, v)
        inward = to.reshape(batch, length, shared, group, width).transpose(0, 2, 4, 3, 1)
        to_queries, *rest = GRADIENT.bind(*read, *result, inward, **params)
        return outward(result[0], to), to_queries.reshape(q.shape), *rest

    return forward, both


def passes(attend: Callable[..., jax.Array]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An attention forward, and forward and backward."""

    def both(q: Any, k: Any, v: Any, to: Any) -> Any:
        result, back = jax.vjp(attend, q, k, v)
        return result, *back(to)

    return lambda q, k, v, to: attend(q, k, v), both


def implementations(case: Case) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Each implementation forward, and forward and backward, of queries, keys, values and the cotangent."""
    of_jax = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    found = {"kernels": in_kernels(site_of(case))}
    if case.dtype != "float32":
        found["cudnn"] = passes(functools.partial(of_jax, implementation="cudnn"))
    if case.batch * case.heads * case.length**2 <= MOST_SCORES:
        found["xla"] = passes(written)
    return found


def measure(case: Case, runs: int = 10) -> Record:
    """Seconds, rate and error of each implementation."""
    site, peak = site_of(case), detect(jax.devices()[0]).peak(_SPELLING[case.dtype])
    operands = jax.block_until_ready(case.operands(case.dtype))
    exact = case.batch * case.heads * case.length**2 <= MOST_SCORES
    wanted = _reference(case) if exact else None
    row: Record = {}
    for name, passes in implementations(case).items():
        try:
            forward, both = (jax.jit(function).lower(*operands).compile() for function in passes)
            row[f"{name} forward seconds"] = seconds_of(forward, operands, runs)
            row[f"{name} both seconds"] = seconds_of(both, operands, runs)
            if wanted is not None:
                results = both(*operands)
                row[f"{name} error"] = max(_apart(a, b) for a, b in zip(results, wanted, strict=True))
        except Exception as error:  # what one implementation cannot do says nothing of the others
            row[f"{name} failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if "kernels both seconds" in row:
        forward, both = row["kernels forward seconds"], row["kernels both seconds"]
        flops = [site.pattern.flops(gradient=each, kernels=True) for each in (False, True)]
        row["forward rate"] = flops[0] / forward / peak
        row["backward rate"] = flops[1] / (both - forward) / peak
        row["rate"] = sum(flops) / both / peak
    return row


_SPELLING = {"bfloat16": "bf16", "float32": "f32"}


def _reference(case: Case) -> Sequence[jax.Array]:
    with jax.default_matmul_precision("highest"):
        return jax.block_until_ready(jax.jit(passes(written)[1])(*case.operands(jnp.float32)))


def _apart(a: jax.Array, b: jax.Array) -> float:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def seconds_of(compiled: Any, operands: Arrays, runs: int) -> float:
    """The median over five series of runs, each without waiting between its runs."""
    jax.block_until_ready(compiled(*operands))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([compiled(*operands) for _ in range(runs)][-1])
        seconds.append((time.perf_counter() - began) / runs)
    return statistics.median(seconds)


def rows(asked: Asked, name: str) -> Rows:
    """The one row of a case."""
    return {name: functools.partial(measure, CASES[name])}


def markdown(found: Sequence[Record]) -> str:
    """The rates that the library's kernels reach."""
    lines = []
    for record in found:
        for name, row in record["rows"].items():
            figures = (shown(row, f"{each}rate", "{:.1%}".format) for each in ("forward ", "backward ", ""))
            lines.append((name, *figures, shown(row, "kernels error", "{:.1g}".format)))
    return grid(("case", "rate, forward", "backward", "both", "error"), lines)


BENCHMARK = Benchmark("attention", __doc__, CASES, rows, markdown, quick=("tiny",), shared=True)

if __name__ == "__main__":
    BENCHMARK.main()
