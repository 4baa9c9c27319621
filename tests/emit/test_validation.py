"""What is emitted is proved to compute the step: every program of the zoo, and none in which one equation is wrong."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from evaluation import evaluate
from forms import of_chunks, of_levels
from jax import lax
from zoo import BY_NAME, Case
from zoo_calls import CALLS
from zoo_checkpoints import CHECKPOINTS
from zoo_loops import LOOPS

from jaxremat import Graph, close_over_dependencies
from jaxremat._compiler._devices import DeviceSpec
from jaxremat._emit import _validation
from jaxremat._emit._emit import FENCES, emit
from jaxremat._emit._validation import UNPROVED, EmittedOtherwiseError, names, unproved, validated
from jaxremat._emit._writer import Writer
from jaxremat._lower._lower import lower
from jaxremat._model._variant import LOOP, Variant
from jaxremat._program import _compat
from jaxremat._rewrite import _row_regions
from jaxremat._rewrite._trace import Traced, trace

DEVICE = DeviceSpec("here", "cpu", 2**30, 2.5e10, (("f32", 1.5e11),), 2e-6, 2.5e10)
CASES = {**BY_NAME, **LOOPS, **CALLS, **CHECKPOINTS}
MUTATED = (
    "mlp_adamw", "resnet", "transformer", "custom_vjp", "scan", "cond", "masks",
    "layers", "constants", "recurrent", "random", "nested", "linen scan", "while", "blocks", "loop, dots",
)  # fmt: skip


@functools.cache
def traced(case: Case, least_nbytes: int = _row_regions.LEAST_NBYTES) -> Traced:
    """**Arguments:** `least_nbytes` as `_row_regions` has it."""
    assert least_nbytes == _row_regions.LEAST_NBYTES
    found = trace(jax.jit(case.step, donate_argnums=case.donate_argnums), case.make_args(), {})
    assert found.sites.found  # now, with that constant
    return found


def schedules(found: Traced, seed: int = 0) -> Iterator[tuple[Graph, tuple[int, ...]]]:
    """The graphs of both kinds of compilers, with nothing saved, all, and some."""
    rng = random.Random(seed)
    for platform in ("cpu", "gpu"):
        graph = lower(found, replace(DEVICE, platform=platform), base_nbytes=0)
        some = tuple(v for v in graph.residuals if rng.random() < 0.5)
        for saved in ((), tuple(graph.residuals), some):
            yield graph, saved


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_emitted_is_proved(name: str) -> None:
    """Each schedule with one kind of barrier, of each case with another."""
    found, fences = traced(CASES[name]), itertools.cycle(FENCES)
    for _ in range([*CASES].index(name) % len(FENCES)):
        next(fences)
    for (graph, saved), fence in zip(schedules(found), fences, strict=False):
        planned = emit(found, graph, close_over_dependencies(graph, saved), fence)
        assert validated(found, planned) == ()


NAMED = {
    "layers": (of_levels((2, 3)), UNPROVED[LOOP]),
    "checkpointed body": (of_levels((3, 2)), UNPROVED[LOOP]),
}
"""Forms that are not: arrays that levels write over. Their numbers are compared with the plain step's by
`tests/rewrite/test_absorb.py`.
"""

IN_CHUNKS = {
    "tied_embeddings": 0, "transformer": 0, "transformer, whole": 1, "scan": 1, "bfloat16": 0, "masks": 0,
    "layers": 0, "turned": 0, "constants": 1, "linen scan": 0, "custom_jvp": 0,
    "loops": 0,
}  # fmt: skip
"""Work in chunks of rows, or most of a step in microbatches, by the number of the region."""


def test_nested_checkpointing_of_shared_weights_is_proved() -> None:
    found = traced(CASES["recurrent"])
    form = found.in_form(of_levels((4, 3)))
    for graph, saved in schedules(form):
        assert validated(form, emit(form, graph, close_over_dependencies(graph, saved))) == ()


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_work_in_chunks_is_proved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)
    found, site = traced(CASES[name.removesuffix(", whole")], 1), IN_CHUNKS[name]
    for count in {found.sites.regions[site].choices[0], found.sites.regions[site].choices[-1]}:
        form = found.in_form(of_chunks(*[0] * site, count))
        graph = lower(form, DEVICE, base_nbytes=0)
        for saved in ((), tuple(graph.residuals)):
            assert validated(form, emit(form, graph, close_over_dependencies(graph, saved))) == ()


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_proved_is_named(name: str) -> None:
    form, said = NAMED[name]
    found = traced(CASES[name]).in_form(form)
    for graph, saved in schedules(found):
        planned = emit(found, graph, close_over_dependencies(graph, saved))
        assert validated(found, planned) == (said,) == unproved(planned)


def test_the_step_as_written_has_nothing_to_name() -> None:
    assert names(Variant()) == ()
    assert set(names(of_levels((2, 3)))) == {UNPROVED[LOOP]}


Mutation = Callable[[random.Random, list[Any], Any], list[Any] | None]
"""Equations, and the body that they are of -> the same, one of them wrong; None where none can be."""


def _swapped(rng: random.Random, eqns: list[Any], jaxpr: Any) -> list[Any] | None:
    """The operands of a difference or a quotient exchanged."""
    able = [
        i
        for i, e in enumerate(eqns)
        if e.primitive.name in ("sub", "div", "pow", "atan2", "lt", "gt", "ge", "le")
        and e.invars[0] is not e.invars[1]
        and e.invars[0].aval.shape == e.invars[1].aval.shape
        and e.invars[0].aval.dtype == e.invars[1].aval.dtype
        and _compat.variables(e.invars)
    ]
    if not able:
        return None
    i = rng.choice(able)
    return [e.replace(invars=e.invars[::-1]) if j == i else e for j, e in enumerate(eqns)]


def _replaced(rng: random.Random, eqns: list[Any], jaxpr: Any) -> list[Any] | None:
    """Another operation of the same type."""
    pairs = {
        "sin": lax.cos_p,
        "tanh": lax.sin_p,
        "add": lax.mul_p,
        "mul": lax.add_p,
        "max": lax.min_p,
        "exp": lax.sin_p,
    }
    able = [
        i
        for i, e in enumerate(eqns)
        if e.primitive.name in pairs and jnp.issubdtype(e.outvars[0].aval.dtype, jnp.floating)
    ]
    if not able:
        return None
    i = rng.choice(able)
    (new,) = [pairs[eqns[i].primitive.name]]
    params = {"accuracy": None} if "accuracy" in eqns[i].params else {}
    return [e.replace(primitive=new, params=params) if j == i else e for j, e in enumerate(eqns)]


def _parameter(rng: random.Random, eqns: list[Any], jaxpr: Any) -> list[Any] | None:
    """A power, a permutation of equal axes, or the number that an operand is."""

    def changed(eqn: Any) -> Any | None:
        name = eqn.primitive.name
        if name == "integer_pow":
            return eqn.replace(params={**eqn.params, "y": eqn.params["y"] + 1})
        literals = [k for k, a in enumerate(eqn.invars) if _compat.is_literal(a)]
        if name in ("add", "sub", "mul", "div") and literals:
            a = eqn.invars[literals[0]]
            if not jnp.issubdtype(a.aval.dtype, jnp.floating) or not float(a.val):
                return None
            other = jex.Literal((2.5 * a.val).astype(a.aval.dtype), a.aval)
            return eqn.replace(invars=[other if k == literals[0] else b for k, b in enumerate(eqn.invars)])
        return None

    able = [(i, new) for i, e in enumerate(eqns) if (new := changed(e)) is not None]
    if not able:
        return None
    i, new = rng.choice(able)
    return [new if j == i else e for j, e in enumerate(eqns)]


def _other_operand(rng: random.Random, eqns: list[Any], jaxpr: Any) -> list[Any] | None:
    """Another variable of the same type."""
    there: dict[Any, list[Any]] = {}
    able: list[tuple[int, int, Any]] = []
    for v in jaxpr.invars:
        there.setdefault(str(v.aval), []).append(v)
    for i, eqn in enumerate(eqns):
        if not eqn.effects:
            for k, a in enumerate(eqn.invars):
                others = (
                    [] if _compat.is_literal(a) else [v for v in there.get(str(a.aval), ()) if v is not a]
                )
                able.extend((i, k, v) for v in others[-6:])
        for v in eqn.outvars:
            there.setdefault(str(v.aval), []).append(v)
    if not able:
        return None
    i, k, v = rng.choice(able)
    invars = [v if j == k else a for j, a in enumerate(eqns[i].invars)]
    return [e.replace(invars=invars) if j == i else e for j, e in enumerate(eqns)]


MUTATIONS: tuple[Mutation, ...] = (_swapped, _replaced, _parameter, _other_operand)


def _inside(rng: random.Random, closed: Any, mutate: Mutation) -> Any | None:
    """A program, or a body of one of its loops, with something wrong in it."""
    jaxpr = closed.jaxpr
    scans = [i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "scan"]
    eqns: list[Any] | None
    if scans and rng.random() < 0.7:
        i = rng.choice(scans)
        body = jaxpr.eqns[i].params["jaxpr"]
        if rng.random() < 0.2 and (crossed := _crossed(rng, jaxpr.eqns[i])) is not None:
            inner = crossed
        else:
            inner = _inside(rng, body, mutate)
        if inner is None:
            return None
        eqns = [
            e.replace(params={**e.params, "jaxpr": inner}) if j == i else e for j, e in enumerate(jaxpr.eqns)
        ]
    else:
        eqns = mutate(rng, list(jaxpr.eqns), jaxpr)
    if eqns is None:
        return None
    return _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, jaxpr.outvars, eqns)


def _crossed(rng: random.Random, eqn: Any) -> Any | None:
    """The body of a loop that stacks the carry as the iteration leaves it where it stacks it as it found it."""
    closed = eqn.params["jaxpr"]
    consts, carries = _compat.scan_counts(eqn)
    jaxpr = closed.jaxpr
    found = jaxpr.invars[consts : consts + carries]
    able = [
        (i, jaxpr.outvars[found.index(a)])
        for i, a in enumerate(jaxpr.outvars)
        if i >= carries and a in found and jaxpr.outvars[found.index(a)] is not a
    ]
    if not able:
        return None
    i, left = rng.choice(able)
    outvars = [left if j == i else a for j, a in enumerate(jaxpr.outvars)]
    return _compat.new_jaxpr(jaxpr.constvars, closed.consts, jaxpr.invars, outvars, jaxpr.eqns)


@pytest.mark.parametrize(
    "name",
    [*MUTATED, "tied_embeddings, in chunks", "layers, in chunks"],
)
def test_one_wrong_equation_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with one wrong equation is refused, or gives the very same results as without it."""
    case, rng = CASES[name.removesuffix(", in chunks")], random.Random(name)
    monkeypatch.setattr(_row_regions, "LEAST_NBYTES", 1)
    found, args = traced(case, 1), jax.tree.leaves(case.make_args())
    if name.endswith("chunks"):
        monkeypatch.setattr(_validation, "names", lambda form: ())  # what is not proved is an error
        found = found.in_form(of_chunks(4))
    refused = 0
    for graph, saved in schedules(found):
        planned, want = emit(found, graph, close_over_dependencies(graph, saved)), list[Any]()
        for mutate in MUTATIONS * 3:
            if (wrong := _inside(rng, planned, mutate)) is None:
                continue
            try:
                assert validated(found, wrong) == ()
            except EmittedOtherwiseError:
                refused += 1
            else:
                want = want or evaluate(planned, args)
                assert_equal(want, evaluate(wrong, args))
    assert refused > 20


def assert_equal(first: Any, second: Any) -> None:
    for a, b in zip(first, second, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_barriers_hand_on_what_they_are_given_in_order() -> None:
    found = traced(CASES["mlp_adamw"])
    graph = lower(found, DEVICE, base_nbytes=0)
    planned = emit(found, graph, close_over_dependencies(graph, ()))
    eqns = list(planned.jaxpr.eqns)
    alike = [
        (i, [k for k, a in enumerate(e.invars) if a.aval.shape == e.invars[0].aval.shape])
        for i, e in enumerate(eqns)
        if e.primitive.name == "optimization_barrier"
    ]
    i, (first, second, *_) = next((i, same) for i, same in alike if len(same) > 1)
    invars = list(eqns[i].invars)
    invars[first], invars[second] = invars[second], invars[first]
    eqns[i] = eqns[i].replace(invars=invars)
    own = planned.jaxpr
    wrong = _compat.new_jaxpr(own.constvars, planned.consts, own.invars, own.outvars, eqns)
    with pytest.raises(EmittedOtherwiseError, match="does not provably compute the step: result"):
        validated(found, wrong)


def test_emit_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emitter that forgets a barrier's names is found out before anything is compiled."""
    found = traced(CASES["mlp_adamw"])
    graph = lower(found, DEVICE, base_nbytes=0)

    def forgetful(self: Any, eqn: Any, loop: int, var: Any, *names: Any) -> Any:
        alike = (v for v in found.jaxpr.jaxpr.invars if str(v.aval) == str(var.aval) and v is not var)
        return next(alike, var) if eqn.primitive.name == "dot_general" else var

    monkeypatch.setattr(Writer, "seen", forgetful)
    with pytest.raises(EmittedOtherwiseError):
        emit(found, graph, close_over_dependencies(graph, ()))
