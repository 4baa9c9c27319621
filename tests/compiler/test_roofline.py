"""What the kernels of compiled modules cost, against counts made by other means."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded
from jax import lax

from jaxremat import compiler_options
from jaxremat._compiler._devices import DEVICES, DeviceSpec
from jaxremat._compiler._hlo import parse
from jaxremat._compiler._roofline import Kernel, _taps, kernels, roofline, seconds_of
from jaxremat._program._flops import alone_seconds, eqn_flops, in_rounds

DEVICE = DeviceSpec("d", "gpu", 1, 1e9, (("f32", 1e10), ("bf16", 4e10)), 1e-6, 1.0)


def _kernels(fn: Any, *args: Any, **jit: Any) -> list[Kernel]:
    made = jax.jit(fn, **jit).lower(*args).compile(recorded.EMITTED or None)
    return list(kernels(parse(str(made.as_text()))))


def _flops(found: list[Kernel], opcodes: tuple[str, ...] = ("dot", "convolution")) -> int:
    """Operations of the kernels that are or contain one of these opcodes."""
    return sum(
        k.total_trips * n for k in found for _, n in k.flops if k.instruction.opcode in (*opcodes, "fusion")
    )


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "expected"),
    [
        ("mk,kn->mn", (8, 16), (16, 32), 2 * 8 * 16 * 32),
        ("bmk,bkn->bmn", (3, 8, 16), (3, 16, 4), 2 * 3 * 8 * 16 * 4),
        ("abm,nab->mn", (4, 5, 8), (6, 4, 5), 2 * 4 * 5 * 8 * 6),
        ("bthd,bshd->bhts", (2, 8, 3, 4), (2, 6, 3, 4), 2 * 2 * 8 * 3 * 4 * 6),
    ],
)
def test_flops_of_products(spec: str, lhs: tuple[int, ...], rhs: tuple[int, ...], expected: int) -> None:
    found = _kernels(lambda a, b: jnp.einsum(spec, a, b), jnp.ones(lhs), jnp.ones(rhs))
    assert _flops(found) == expected


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((2, 12, 12, 4), (3, 3, 4, 8), {}),
        ((2, 12, 12, 4), (3, 3, 4, 8), {"padding": "VALID"}),
        ((2, 13, 11, 4), (5, 3, 4, 8), {"window_strides": (2, 3)}),
        ((2, 12, 12, 4), (3, 3, 4, 8), {"rhs_dilation": (2, 3)}),
        ((2, 6, 7, 4), (3, 3, 4, 8), {"lhs_dilation": (2, 3), "padding": ((1, 2), (0, 3))}),
        (
            (2, 9, 9, 4),
            (4, 4, 4, 8),
            {"lhs_dilation": (3, 3), "window_strides": (2, 2), "padding": ((3, 0), (1, 2))},
        ),
        ((2, 12, 12, 8), (3, 3, 2, 12), {"feature_group_count": 4}),
        ((2, 12, 12, 8), (3, 3, 1, 8), {"feature_group_count": 8}),
        ((6, 12, 12, 4), (3, 3, 4, 9), {"batch_group_count": 3}),
    ],
)
def test_flops_of_convolutions(
    image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    def convolve(a: Any, b: Any) -> Any:
        return lax.conv_general_dilated(
            a,
            b,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **{"window_strides": (1, 1), "padding": "SAME", **options},
        )

    ones = jnp.ones(image), jnp.ones(kernel)
    # A convolution of ones with ones counts the multiplications that read data.
    assert _flops(_kernels(convolve, *ones)) == 2 * int(np.asarray(jax.jit(convolve)(*ones)).sum())


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("base", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("low", [-3, 0, 2])
def test_taps_on_data_are_counted_one_by_one(stride: int, base: int, dilation: int, low: int) -> None:
    for taps, outputs, image in ((1, 1, 1), (3, 9, 7), (5, 4, 2), (7, 3, 30)):
        reads = [o * stride + t * dilation - low for o in range(outputs) for t in range(taps)]
        expected = sum(read % base == 0 and 0 <= read // base < image for read in reads)
        assert _taps(taps, outputs, image, (stride, low, base, dilation)) == expected


def test_flops_agree_with_the_compilers_own_count() -> None:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=_NHWC)) + 1
        return (x.mean((1, 2)) ** 2).sum()

    weights = [jnp.ones((3, 3, 8, 8)), jnp.ones((3, 3, 8, 8))]
    compiled = jax.jit(jax.grad(loss)).lower(weights, jnp.ones((4, 16, 16, 8))).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    found = list(kernels(parse(str(compiled.as_text()))))
    assert sum(n for k in found for _, n in k.flops) == pytest.approx(analysis["flops"], rel=0.01)
    assert sum(k.nbytes for k in found) == pytest.approx(analysis["bytes accessed"], rel=0.05)


_NHWC = ("NHWC", "HWIO", "NHWC")


def test_a_fused_chain_moves_its_ends_only() -> None:
    (kernel,) = _kernels(lambda x, y: jnp.tanh(x * 2 + y) - 1, jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert (kernel.read_nbytes, kernel.written_nbytes) == (2 * 64 * 64 * 4, 64 * 64 * 4)
    assert kernel.flops == (("f32", 4 * 64 * 64),)
    assert kernel.total_trips == 1


def test_slices_read_their_window() -> None:
    x, start = jnp.ones((1000, 64)), jnp.int32(3)
    (kernel,) = _kernels(lambda x, i: jnp.sin(lax.dynamic_slice(x * 2, (i, 0), (5, 64))), x, start)
    assert kernel.read_nbytes <= 5 * 64 * 4 + 8
    assert kernel.written_nbytes == 5 * 64 * 4


def test_gathers_read_their_rows() -> None:
    found = _kernels(lambda x, i: x[i], jnp.ones((1000, 64)), jnp.arange(10))
    assert sum(k.nbytes for k in found) < 3 * (10 * 64 * 4)


def test_updates_in_place_write_their_window() -> None:
    def update(x: Any, y: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(x, y, (i, 0))

    (kernel,) = _kernels(update, jnp.ones((1000, 64)), jnp.ones((5, 64)), jnp.int32(3), donate_argnums=0)
    assert kernel.written_nbytes == 5 * 64 * 4
    assert kernel.read_nbytes <= 5 * 64 * 4 + 8

    found = _kernels(lambda x, i, y: x.at[i].add(y), jnp.ones((1000, 64)), jnp.arange(10), jnp.ones((10, 64)),
                     donate_argnums=0)  # fmt: skip
    (scatter,) = [k for k in found if "scatter" in k.instruction.name]
    assert scatter.written_nbytes == 10 * 64 * 4
    assert scatter.read_nbytes <= 2 * 10 * 64 * 4 + 10 * 8


def test_loops_count_their_trips() -> None:
    def f(x: Any, w: Any) -> Any:
        def outer(h: Any, _: Any) -> Any:
            return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h @ w, None, length=4)[0], None

        return lax.scan(outer, x, None, length=3)[0]

    found = _kernels(f, jnp.ones((8, 16)), jnp.ones((16, 16)))
    products = [k.total_trips for k in found for _, n in k.flops if n >= 2 * 8 * 16 * 16]
    assert sorted(products) == [3, 12]


def test_of_a_branch_the_dearer_side_counts() -> None:
    def f(x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda v: v @ v @ v, lambda v: jnp.sin(v), x)

    found = _kernels(f, jnp.ones((32, 32)))
    assert _flops(found) >= 2 * 2 * 32**3
    assert "sine" not in {k.instruction.opcode for k in found}
    assert not any("sine" in k.instruction.name for k in found)


# Abbreviated from the GPU compiler's output for an H100.
GPU = """\
HloModule gpu, is_scheduled=true

%nested (p.3: bf16[64,32], q.3: bf16[32,16]) -> bf16[64,16] {
  %p.3 = bf16[64,32]{1,0} parameter(0)
  %q.3 = bf16[32,16]{1,0} parameter(1)
  ROOT %d = bf16[64,16]{1,0} dot(%p.3, %q.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%triton (p: bf16[64,32], q: bf16[32,16]) -> bf16[64,16] {
  %p = bf16[64,32]{1,0} parameter(0)
  %q = bf16[32,16]{1,0} parameter(1)
  ROOT %n = bf16[64,16]{1,0} fusion(%p, %q), kind=kCustom, calls=%nested
}

%asynchronous (p.2: f32[64,32]) -> f32[32] {
  %p.2 = f32[64,32]{1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %r = f32[32]{0} reduce(%p.2, %z), dimensions={0}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,33,33,8], k: f32[16,3,3,8], dy: f32[8,16,16,16]) -> f32[8,16,16,16] {
  %x = f32[8,33,33,8]{3,2,1,0} parameter(0)
  %k = f32[16,3,3,8]{3,2,1,0} parameter(1)
  %dy = f32[8,16,16,16]{3,2,1,0} parameter(2)
  %y = (f32[8,16,16,16]{3,2,1,0}, u8[64]{0}) custom-call(%x, %k), window={size=3x3 stride=2x2}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward", backend_config={"cudnn":{"a":"-1"}}
  %dx = (f32[8,33,33,8]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %k), window={size=3x3 stride=2x2}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %dk = (f32[16,3,3,8]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), window={size=3x3 stride=2x2}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %m = f32[64,32]{1,0} bitcast(%x)
  %n = f32[48,32]{1,0} bitcast(%x)
  %gemm = (f32[64,48]{1,0}, s8[1024]{0}) custom-call(%m, %n), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}}
  %onednn = f32[64,48]{1,0} custom-call(%m, %n), custom_call_target="__onednn$matmul"
  %h = bf16[64,32]{1,0} convert(%m)
  %w = bf16[32,16]{1,0} bitcast(%h)
  %gemm_fusion = bf16[64,16]{1,0} fusion(%h, %w), kind=kCustom, calls=%triton
  %heads = bf16[2,16,4,8]{3,2,1,0} bitcast(%h)
  %attention = (bf16[2,16,4,8]{3,2,1,0}, u8[0]{0}) custom-call(%heads, %heads, %heads), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{\
"bmm1_dot_dimension_numbers":{"lhs_contracting_dimensions":["3"]},\
"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","16","16"]}}}
  %begin = ((f32[64,32]{1,0}), f32[32]{0}, u32[]) async-start(%m), calls=%asynchronous
  %end = f32[32]{0} async-done(%begin)
  %save = (f32[64,32]{1,0:S(5)}, f32[64,32]{1,0}, u32[]) copy-start(%m)
  %saved = f32[64,32]{1,0:S(5)} copy-done(%save)
  %twice = (f32[64,32]{1,0}, f32[64,32]{1,0}, u32[]) copy-start(%m)
  %twin = f32[64,32]{1,0} copy-done(%twice)
  %all = (f32[64,32]{1,0}, f32[128,32]{1,0}) all-gather-start(%m), dimensions={0}
  %gathered = f32[128,32]{1,0} all-gather-done(%all)
  ROOT %out = f32[8,16,16,16]{3,2,1,0} get-tuple-element(%y), index=0
}
"""


def test_a_collective_has_the_latency_of_its_devices() -> None:
    """What is sent to eight devices takes as long as some kernels, even where it is a few bytes."""
    found = {k.instruction.name: k for k in kernels(parse(GPU))}
    for device in (DEVICES["h100"], DEVICES["l4"], replace(DEVICES["h100"], platform="cpu", chip=None)):
        assert device.collective_seconds > 10 * device.launch_seconds
        bare = replace(device, launch_seconds=0.0)
        assert seconds_of(found["all"], bare) == pytest.approx(device.collective_seconds, rel=0.02)
        assert seconds_of(found["twice"], bare) < 1e-6


def test_kernels_of_the_gpu_compiler() -> None:
    found = {k.instruction.name: k for k in kernels(parse(GPU))}
    conv = 2 * 8 * 16 * 16 * 16 * (3 * 3 * 8)  # 33 = 2 x 16 + 1: every tap is on data
    product = 2 * 64 * 48 * 32
    expected = {
        "y": {"f32": conv},
        "dx": {"f32": conv},
        "dk": {"f32": conv},
        "gemm": {"f32": product},
        "onednn": {"f32": product},
        "gemm_fusion": {"bf16": 2 * 64 * 16 * 32},
        "attention": {"bf16": 2 * 2 * (2 * 4 * 16 * 16) * 8},
        "r": {"f32": 64 * 32},
    }
    assert {name: dict(k.flops) for name, k in found.items() if k.flops} == expected
    assert found.keys() == {*expected, "h", "twice", "all"}  # "save" goes beside them
    x, k, y = 8 * 33 * 33 * 8 * 4, 16 * 9 * 8 * 4, 8 * 16**3 * 4
    assert (found["dx"].read_nbytes, found["dx"].written_nbytes) == (y + k, x)
    assert (found["twice"].read_nbytes, found["twice"].written_nbytes) == (8192, 8192)
    assert (found["all"].read_nbytes, found["all"].written_nbytes) == (8192, 16384)
    assert found["gemm_fusion"].read_nbytes == 64 * 32 * 2 + 32 * 16 * 2


def test_roofline_of_a_module_by_hand() -> None:
    text = """\
HloModule m, is_scheduled=true

%body (s: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %s = (s32[], f32[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000]{0} get-tuple-element(%s), index=1
  %y = f32[1000]{0} negate(%x)
  ROOT %n = (s32[], f32[1000]{0}) tuple(%i, %y)
}

ENTRY %main (a: bf16[100,200], b: bf16[200,300]) -> bf16[100,300] {
  %a = bf16[100,200]{1,0} parameter(0)
  %b = bf16[200,300]{1,0} parameter(1)
  %c = s32[] constant(0)
  %z = f32[1000]{0} broadcast(%c), dimensions={}
  %t = (s32[], f32[1000]{0}) tuple(%c, %z)
  %w = (s32[], f32[1000]{0}) while(%t), condition=%no, body=%body, \
backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %d = bf16[100,300]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    result = roofline(parse(text), DEVICE)
    product = 2 * 100 * 200 * 300 / 4e10  # more than its 220 kB at 1 GB/s need
    assert product > (20000 + 60000 + 30000) * 2 / 1e9
    negate, broadcast = 7 * (8000 / 1e9 + 1e-6), 4004 / 1e9 + 1e-6
    expected = (("dot", product + 1e-6), ("negate", negate), ("broadcast", broadcast))
    assert [name for name, _ in result.by_opcode] == [name for name, _ in expected]
    for (_, seconds), (_, by_hand) in zip(result.by_opcode, expected, strict=True):
        assert math.isclose(seconds, by_hand)
    assert math.isclose(result.seconds, sum(seconds for _, seconds in expected))
    assert (result.flops, result.kernels) == (2 * 100 * 200 * 300 + 7 * 1000, 9)
    assert result.nbytes == 220_000 + 7 * 8000 + 4004


def test_recomputation_costs_time() -> None:
    def loss(weights: Any, x: Any, remat: bool) -> Any:
        def block(h: Any, w: Any) -> Any:
            return jnp.tanh(jnp.tanh(h @ w) @ w.T)

        for w in weights:
            x = (jax.checkpoint(block) if remat else block)(x, w)
        return (x * x).sum()

    args = [jnp.ones((64, 64))] * 4, jnp.ones((128, 64))
    seconds = []
    for remat in (False, True):
        gradient = jax.jit(lambda w, x, remat=remat: jax.grad(loss)(w, x, remat))
        options: dict[str, str | bool] = {"xla_disable_hlo_passes": "cse_barrier_expander"}
        text = str(gradient.lower(*args).compile(compiler_options=options).as_text())
        seconds.append(roofline(parse(text), DEVICE).seconds)
    # Each product comes back as two products in the backward pass: recomputing all of them adds a third.
    assert 1 + 1 / 6 <= seconds[1] / seconds[0] <= 1 + 1 / 3


@pytest.mark.parametrize("shape", [(64, 64), (512, 128)])
def test_random_words_cost_what_they_compile_to(shape: tuple[int, int]) -> None:
    """XLA:CPU keeps the generator's rounds in a loop, whose arrays it copies on every trip."""
    cpu = DeviceSpec("d", "cpu", 1, 2e10, (("f32", 1e11),), 1e-6, 1.0)

    def words(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, shape)

    key = jax.random.key(0)
    (eqn,) = (e for e in jax.make_jaxpr(words)(key).eqns if e.primitive.name == "random_bits")
    text = jax.jit(words, compiler_options=compiler_options("cpu")).lower(key).compile().as_text()
    found = roofline(parse(str(text)), cpu)
    assert eqn_flops(eqn) == pytest.approx(found.flops, rel=0.1)
    launches = found.kernels * cpu.launch_seconds
    assert alone_seconds(cpu, eqn) == pytest.approx(found.seconds - launches, rel=0.3)
    # A compiler that unrolls the rounds writes the result alone.
    gpu = DeviceSpec("d", "gpu", 1, 1.0, (("f32", 1e30),), 0.0, 1.0)
    assert alone_seconds(gpu, eqn) == pytest.approx(4 * math.prod(shape), rel=0.01)
    other = jax.make_jaxpr(words)(jax.random.key(0, impl="rbg"))
    assert not any(in_rounds(cpu, e) for e in other.eqns)
