"""What results are compared with: the same but for rounding, in any tree; and what programs are: the same, compiled."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from evaluation import evaluated
from zoo import Case

import jaxremat

ROUNDING = 2e-5
"""Largest difference allowed, relative to the largest entry of the array that it is in."""


def compile_plain(case: Case, args: Any) -> jax.stages.Compiled:
    """The step under `jax.jit`, with the options that make its memory comparable."""
    jitted = jax.jit(case.step, donate_argnums=case.donate_argnums)
    return jitted.lower(*args).compile(compiler_options=jaxremat.compiler_options("cpu"))


def assert_same(want: Any, got: Any, rounding: float = ROUNDING) -> None:
    """Equal structures and types; equal integers and keys; floats equal to rounding."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert (a.dtype, a.shape, a.aval.weak_type) == (b.dtype, b.shape, b.aval.weak_type)
        if jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jax.numpy.issubdtype(a.dtype, jax.numpy.floating):
            x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
            allowed = rounding if a.dtype == np.float32 else float(jax.numpy.finfo(a.dtype).eps)
            assert np.abs(x - y).max(initial=0) <= allowed * np.abs(x).max(initial=0)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(found: Any, wanted: Any, rtol: float = 1e-7, atol: float = 0) -> None:
    """As `np.testing.assert_allclose`, of the arrays of two trees or lists in turn."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_computes(closed: jex.ClosedJaxpr, step: Callable[..., Any], args: Any) -> None:
    """A flat program gives what a step gives, each evaluated operation by operation."""
    found = evaluated(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args))
    assert_same(jax.tree.leaves(evaluated(step)(*args)), found)


def stripped(compiled: jax.stages.Compiled) -> str:
    """A compiled module's text without names of source places, which have no effect."""
    text = re.sub(r", metadata=\{[^}]*\}", "", str(compiled.as_text()))
    return re.sub(r"(?m)^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)
