"""Reading compiled modules: the text itself, who is alive at the peak, whose values kernels write."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax

from jaxremat._compiler._hlo import Instruction, Module, Shape, materialised, parse
from jaxremat._compiler._liveness import live_at_peak
from jaxremat._compiler._tags import tagged, written
from jaxremat._model._graph import backend
from jaxremat._rewrite._trace import trace

TAG = re.compile(r"#(\d+)(?:/|$)")
# XLA:CPU drops barriers unless told otherwise (DESIGN.md, section 9).
FENCES: dict[str, str | bool] = {"xla_disable_hlo_passes": "cse_barrier_expander"}

# Layouts with tiles and memory spaces, nested tuples, comments, operands with and without types and percent
# signs, a constant over several lines, strings with brackets and quotes.
SYNTAX = """\
HloModule odd, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "a {file}.py"

FileLocations
1 {file_name_id=1 line=1}

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n.1 = f32[8]{0:T(256)S(1)} negate(f32[8]{0:T(8,128)(2,1)} %p), metadata={op_name="jit(f)/neg"}
}, execution_thread="other"

ENTRY %main (a: f32[8], p.2: bf16[2,3]) -> f32[8] {
  a = f32[8]{0} parameter(0), metadata={op_name="p[\\'w\\'] \\"(\\\\"}
  p.2 = bf16[2,3]{1,0:T(8,128)(2,1)S(5)} parameter(1), sharding={replicated}
  c = s32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
})
  text = u8[3]{0} constant("a)=("), metadata={op_name="literal"}
  %s = ((f32[8]{0:T(256)}, (s4[3]{0}, pred[])), c64[2]{0}, /*index=2*/token[], f8e4m3fn[<=5]{0}) \
custom-call(f32[8]{0} %a, (s32[2,2], s4[]) %c), custom_call_target="x(\\"", backend_config={"a": ")"}
  %g = c64[2]{0} get-tuple-element(%s), index=1
  h = (s4[3]{0}, pred[]) get-tuple-element(((f32[8]{0:T(8)}, (s4[3], pred[])), c64[2], token[]) s), index=0
  %f = (f32[8]{0}, f32[8]{0}) fusion(a, /*index=1*/c), kind=kLoop, calls=body
  %w = f32[8]{0} conditional(a, a, a), branch_computations={%body, %body}
  ROOT r = f32[8]{0} add(a, f32[8]{0} a)
}
"""


def _module(fn: Any, *args: Any, **jit: Any) -> Module:
    return parse(str(jax.jit(fn, **jit).lower(*args).compile(compiler_options=FENCES).as_text()))


def _instructions(module: Module, computation: str) -> Mapping[str, Instruction]:
    return module.computations[computation].by_name()


def test_syntax() -> None:
    module = parse(SYNTAX)
    assert module.entry == "main"
    assert module.computations.keys() == {"body", "main"}
    read = _instructions(module, "main")
    assert list(read) == ["a", "p.2", "c", "text", "s", "g", "h", "f", "w", "r"]
    assert [i.opcode for i in read.values()][4:] == [
        "custom-call", "get-tuple-element", "get-tuple-element", "fusion", "conditional", "add",
    ]  # fmt: skip
    assert read["a"].op_name == "p['w'] \"(\\"
    assert read["text"].op_name == "literal"
    assert (read["a"].index, read["p.2"].index, read["r"].index) == (0, 1, -1)
    assert read["p.2"].shapes == (Shape("bf16", (2, 3), space=5),)
    flat = [("f32", (8,)), ("s4", (3,)), ("pred", ()), ("c64", (2,)), ("token", ()), ("f8e4m3fn", (5,))]
    assert [(s.dtype, s.dims) for s in read["s"].shapes] == flat
    assert [s.nbytes for s in read["s"].shapes] == [32, 2, 1, 16, 0, 5]
    assert read["s"].operands == ("a", "c")
    assert (read["g"].index, read["h"].index) == (3, 0)  # leaves, not elements
    assert read["h"].operands == ("s",)
    assert read["f"].operands == ("a", "c")
    assert read["f"].callees == ("body",)
    assert read["w"].callees == ("body", "body")
    assert read["r"].operands == ("a", "a")
    assert module.computations["main"].root is read["r"]
    inside = _instructions(module, "body")
    assert inside["n.1"].shapes == (Shape("f32", (8,), space=1),)
    assert (inside["n.1"].operands, inside["n.1"].op_name, inside["n.1"].is_root) == (
        ("p",),
        "jit(f)/neg",
        True,
    )


def test_text_that_is_no_module() -> None:
    with pytest.raises(ValueError, match=r"not an HLO module with an ENTRY.*'module @jit_f'.*as_text"):
        parse("module @jit_f")


def test_real_modules_are_read_completely() -> None:
    def f(p: Any, x: Any) -> Any:
        y = lax.sort(x) @ p["w"]
        values, indices = lax.top_k(y, 3)
        z = lax.cond(x[0, 0] > 0, lambda a: a @ a.T, lambda a: jnp.cos(a) @ a.T, y)
        noise = jax.random.normal(jax.random.key(0), y.shape)
        _, ys = lax.scan(lambda c, a: (c + a, jnp.sin(c) * a), jnp.zeros(4), y)
        return values, z, y.at[indices[:, 0]].add(noise), ys, jnp.linalg.cholesky(z)

    text = str(jax.jit(f).lower({"w": jnp.ones((8, 4))}, jnp.ones((16, 8))).compile().as_text())
    module = parse(text)
    printed = [line for line in text.splitlines() if re.match(r"\s+(ROOT )?%\S+ = ", line)]
    assert sum(len(c.instructions) for c in module.computations.values()) == len(printed)
    for computation in module.computations.values():
        names = computation.by_name()
        for instruction in computation.instructions:
            assert names.keys() >= set(instruction.operands)
            assert module.computations.keys() >= set(instruction.callees)
    assert "p['w']" in {i.op_name for i in module.computations[module.entry].instructions}


# `fresh` and `late` overlap at %late; the loop's body needs 2 x 400 bytes while only `fresh` is alive.
SCHEDULE = """\
HloModule m, is_scheduled=true

%body (s: (s32[], f32[100])) -> (s32[], f32[100]) {
  %s = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[100]{0} get-tuple-element(%s), index=1
  %sin = f32[100]{0} sine(%x)
  %cos = f32[100]{0} cosine(%x)
  %sum = f32[100]{0} add(%sin, %cos)
  ROOT %next = (s32[], f32[100]{0}) tuple(%i, %sum)
}

%condition (s.1: (s32[], f32[100])) -> pred[] {
  %s.1 = (s32[], f32[100]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %zero = s32[] constant(0)
  %fresh = f32[100]{0} negate(%a)
  %count = s32[] copy(%zero)
  %init = (s32[], f32[100]{0}) tuple(%count, %fresh)
  %loop = (s32[], f32[100]{0}) while(%init), condition=%condition, body=%body
  %got = f32[100]{0} get-tuple-element(%loop), index=1
  %pair = (f32[60]{0}, f32[90]{0}) fusion(%got), kind=kLoop, calls=%pair_computation
  %one = f32[60]{0} get-tuple-element(%pair), index=0
  %view = f32[6,10]{1,0} bitcast(%one)
  %late = f32[50]{0} negate(%got)
  ROOT %out = f32[100]{0} custom-call(%view, %late), custom_call_target="x"
}

%pair_computation (p: f32[100]) -> (f32[60], f32[90]) {
  %p = f32[100]{0} parameter(0)
  %l = f32[60]{0} slice(%p), slice={[0:60]}
  %r = f32[90]{0} slice(%p), slice={[0:90]}
  ROOT %t = (f32[60]{0}, f32[90]{0}) tuple(%l, %r)
}
"""


def test_live_at_peak_of_a_schedule() -> None:
    peak = live_at_peak(parse(SCHEDULE))
    # In the loop: its state (100 f32 and the count), sine and cosine; the sum is the state's next value.
    assert peak.nbytes == 400 + 4 + 400 + 400
    assert peak.position == 5
    names = [(b.instruction.name, b.element, b.nbytes) for b in peak.buffers]
    assert names == [("fresh", 0, 400), ("sin", 0, 400), ("cos", 0, 400), ("count", 0, 4)]


def test_live_at_peak_without_the_loop_body() -> None:
    peak = live_at_peak(parse(SCHEDULE.replace("%cos = f32[100]", "%cos = f32[1]")))
    # `fresh` lives on as the loop's result; the dead second element of the pair dies at once.
    assert [(b.instruction.name, b.element) for b in peak.buffers] == [
        ("fresh", 0), ("pair", 1), ("pair", 0),
    ]  # fmt: skip
    assert (peak.nbytes, peak.position) == (400 + 360 + 240, 7)


ASYNC = """\
HloModule m, is_scheduled=true

ENTRY %main (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %x = f32[100]{0} negate(%a)
  %out = (f32[100]{0:S(5)}, f32[100]{0}, u32[]) copy-start(%x)
  %saved = f32[100]{0:S(5)} copy-done(%out)
  %begin = ((f32[100]{0}), f32[200]{0}, s32[]) custom-call-start(%a), custom_call_target="y"
  %end = f32[200]{0} custom-call-done(%begin)
  %back = (f32[100]{0}, f32[100]{0:S(5)}, u32[]) copy-start(%saved)
  %x.2 = f32[100]{0} copy-done(%back)
  %part = f32[10]{0} slice(%end), slice={[0:10]}
  %where = s32[] constant(0)
  %y = f32[100]{0} dynamic-update-slice(%x.2, %part, %where)
  ROOT %r = f32[100]{0} multiply(%y, %y)
}
"""


def test_live_at_peak_with_asynchronous_copies() -> None:
    peak = live_at_peak(parse(ASYNC))
    # At the slice: the call's result and the value that came back. In host memory `saved` costs nothing, and
    # the update takes over the memory of what it updates.
    assert [(b.instruction.name, b.element, b.nbytes) for b in peak.buffers] == [
        ("begin", 1, 800), ("back", 0, 400), ("part", 0, 40),
    ]  # fmt: skip
    assert peak.nbytes == 1240


def test_live_at_peak_agrees_with_the_compiler() -> None:
    def loss(weights: Any, x: Any) -> Any:
        y, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights)
        return (y * y).sum()

    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((4, 64, 64)), jnp.ones((256, 64))).compile()
    statistics = compiled.memory_analysis()
    assert statistics is not None
    nbytes = live_at_peak(parse(str(compiled.as_text()))).nbytes
    assert nbytes == pytest.approx(statistics.temp_size_in_bytes, rel=0.01)


def test_materialised_values_of_a_chain_of_kernels() -> None:
    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("#10"):
            h = x @ w
        with jax.named_scope("#11"):
            a = jnp.tanh(h)
        with jax.named_scope("#12"):
            b = a * 2
        with jax.named_scope("#13"):
            return b @ w

    sizes = materialised(_module(f, jnp.ones((32, 16)), jnp.ones((16, 16))), TAG)
    # tanh and the product are one kernel, which writes the product only.
    assert sizes == {"10": (2048,), "12": (2048,), "13": (2048,)}


def test_materialised_follows_each_element_and_layout_copies() -> None:
    text = """\
HloModule m, is_scheduled=true

%two (p: f32[4,8]) -> (f32[4,8], f32[8,4]) {
  %p = f32[4,8]{1,0} parameter(0)
  %e = f32[4,8]{1,0} exponential(%p), metadata={op_name="jit(f)/#1/exp"}
  %s = f32[4,8]{1,0} sine(%e), metadata={op_name="jit(f)/#1/x/#2/sin"}
  %t = f32[8,4]{1,0} transpose(%s), dimensions={1,0}
  %c = f32[8,4]{0,1} copy(%t)
  ROOT %r = (f32[4,8]{1,0}, f32[8,4]{0,1}) tuple(%e, %c)
}

%move (p.1: f32[4,8]) -> f32[5,8] {
  %p.1 = f32[4,8]{1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %pad = f32[5,8]{1,0} pad(%p.1, %z), padding=0_1x0_0
}

%loop (q: (f32[4,8])) -> (f32[4,8]) {
  %q = (f32[4,8]{1,0}) parameter(0)
  %v = f32[4,8]{1,0} get-tuple-element(%q), index=0
  %k = f32[4,8]{1,0} cosine(%v), metadata={op_name="jit(f)/#5/while/body/#0/cos"}
  ROOT %n = (f32[4,8]{1,0}) tuple(%k)
}

ENTRY %main (a: f32[4,8]) -> f32[5,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %own = f32[4,8]{1,0} copy(%a)
  %f = (f32[4,8]{1,0}, f32[8,4]{0,1}) fusion(%own), kind=kLoop, calls=%two, metadata={op_name="jit(f)/#9/x"}
  %g = f32[4,8]{1,0} get-tuple-element(%f), index=0
  %st = (f32[4,8]{1,0}) tuple(%g)
  %w = (f32[4,8]{1,0}) while(%st), condition=%c, body=%loop, metadata={op_name="jit(f)/#5/while"}
  %h = f32[4,8]{1,0} get-tuple-element(%w), index=0
  %zeros = f32[4,8]{1,0} custom-call(), custom_call_target="z"
  %conv = (f32[4,8]{1,0}, u8[99]{0}) custom-call(%h), custom_call_target="c", metadata={op_name="#7"}
  ROOT %padded = f32[5,8]{1,0} fusion(%g), kind=kLoop, calls=%move
}
"""
    # The copy of the argument and `zeros` are nobody's; the padded copy is the exponential's.
    assert materialised(parse(text), TAG) == {"1": (128, 160), "2": (128,), "7": (128,), "0": (128,)}


def test_materialised_in_scans_and_branches() -> None:
    def f(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            with jax.named_scope("#1"):
                s = jnp.sin(c)
            with jax.named_scope("#2"):
                return s @ s, s

        with jax.named_scope("#8"):
            y, ys = lax.scan(body, x, None, length=5)
        with jax.named_scope("#9"):
            return lax.cond(y[0, 0] > 0, jnp.cos, lambda v: v @ v, y), ys

    sizes = materialised(_module(f, jnp.ones((8, 8))), TAG)
    assert {1 * 256} <= set(sizes["1"])
    assert sizes["2"] == (256,)
    assert 5 * 256 in sizes["8"]  # the stacked values belong to the scan
    assert 256 in sizes["9"]


def test_materialised_only_what_the_tag_names() -> None:
    module = _module(lambda x: jnp.sin(x) @ x, jnp.ones((8, 8)))
    assert materialised(module, TAG) == {}
    assert materialised(module, re.compile(r"/(\w+)$")).keys() == {"sin", "dot_general"}


def test_kernels_read_what_kernels_write() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = jnp.sin(x @ x)
        return (y @ y) + 1.0

    x = jnp.ones((64, 64))
    traced = trace(jax.jit(f), (x,), {})
    names = [eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns]
    assert names == ["dot_general", "sin", "dot_general", "add"]
    program = jax.jit(jex.jaxpr_as_fun(tagged(traced, backend("cpu"))))
    found = written(parse(str(program.lower(x).compile().as_text())))
    assert found.sizes[1] == (64 * 64 * 4,)
    assert [k.reads for k in found.kernels if 2 in k.writes] == [{1}]
    assert all(k.reads <= found.sizes.keys() for k in found.kernels)
