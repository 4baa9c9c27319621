"""The networks by name, at the sizes that benchmarks and tests use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from .convolutional import (
    INCEPTIONS,
    VGG,
    Branches,
    Depthwise,
    GoogLeNet,
    MobileNetV2,
    ResNet,
    RevNet,
    Stage,
    UNet,
)
from .training import Images, Program, Tokens, make_program
from .transformers import GPT, EncoderDecoder, Highway, RevTransformer, ViT

Scale = Literal["full", "small", "tiny"]
"""The published sizes, sizes for seconds on a CPU, and sizes for tests."""

Size = tuple[Images | Tokens, Mapping[str, Any]]
"""The data of one scale, and what the network has other than its defaults."""


@dataclass(frozen=True)
class Recipe:
    """A network, how it is trained, and its sizes."""

    network: Callable[..., nn.Module]
    optimizer: optax.GradientTransformation
    full: Size
    small: Size
    tiny: Size
    sharpness: float = 0.0

    def having(self, **other: Any) -> Recipe:
        """The same with other fields of the network, at each scale."""
        scales = {scale: getattr(self, scale) for scale in ("full", "small", "tiny")}
        return replace(self, **{scale: (data, {**sizes, **other}) for scale, (data, sizes) in scales.items()})


_SGD = optax.sgd(0.01, momentum=0.9)
# Softmax leaves the bias of attention's keys a gradient of nothing but rounding, which
# the usual eps of 1e-8 would blow up into visible differences between runs.
_ADAMW = optax.adamw(3e-4, b2=0.95, eps=1e-6, weight_decay=0.1)
_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), _ADAMW)

_HALF = tuple(tuple(row.narrowed(2) for row in stage) for stage in INCEPTIONS)
_THIN = Branches(8, 8, 16, 4, 8, 8)
_SMALL = {"layers": 6, "width": 384, "heads": 6}
_TINY = {"layers": 2, "width": 32, "heads": 4}
_WORDS = {"vocabulary": 64, "context": 32}

_RESNET = Recipe(
    ResNet,
    _SGD,
    full=(Images(32, 224), {}),
    small=(Images(8, 112), {"width": 32, "classes": 100}),
    tiny=(Images(4, 32), {"blocks": (1, 2), "width": 8, "classes": 10}),
)
_VGG = Recipe(
    VGG,
    _SGD,
    full=(Images(32, 224), {}),
    small=(Images(8, 96), {"features": (32, 64, 128, 256, 256), "hidden": 1024, "classes": 100}),
    tiny=(
        Images(4, 32),
        {"convolutions": (1, 2, 2), "features": (8, 16, 16), "hidden": 32, "classes": 10},
    ),
)
_TINY_STAGES = (Stage(1, 8, 1, 1), Stage(6, 8, 2, 2), Stage(6, 16, 1, 1))
_MOBILENET = Recipe(
    MobileNetV2,
    _SGD,
    full=(Images(32, 224), {}),
    small=(Images(8, 96), {"last": 640, "classes": 100}),
    tiny=(Images(4, 32), {"stages": _TINY_STAGES, "stem": 8, "last": 32, "classes": 10}),
)
_GOOGLENET = Recipe(
    GoogLeNet,
    _SGD,
    full=(Images(32, 224), {}),
    small=(Images(8, 112), {"stages": _HALF, "stem": 32, "classes": 100}),
    tiny=(Images(4, 64), {"stages": ((_THIN,), (_THIN, _THIN)), "stem": 8, "classes": 10}),
)
_UNET = Recipe(
    UNet,
    _SGD,
    full=(Images(2, (416, 608), dense=True), {}),
    small=(Images(1, (112, 160), dense=True), {"width": 32}),
    tiny=(Images(2, (32, 48), dense=True), {"depth": 2, "width": 8}),
)
_VIT = Recipe(
    ViT,
    _ADAMW,
    full=(Images(16, 224), {}),
    small=(Images(8, 112), {**_SMALL, "classes": 100}),
    tiny=(Images(4, 32), {**_TINY, "patch": 8, "classes": 10}),
)
_GPT = Recipe(
    GPT,
    _ADAMW,
    full=(Tokens(4, 512), {}),
    small=(Tokens(2, 256), {**_SMALL, "vocabulary": 8192}),
    tiny=(Tokens(2, 16), {**_TINY, **_WORDS}),
)
_MEDIUM = (Tokens(2, 512), {"layers": 24, "width": 1024, "heads": 16})
_DROPOUT = {"layers": 6, "width": 1024, "heads": 16, "vocabulary": 16384}
_ENCODER_DECODER = Recipe(
    EncoderDecoder,
    _CLIPPED,
    full=(Tokens(16, 256, pairs=True), {}),
    small=(Tokens(4, 64, pairs=True), {"layers": 3, "width": 256, "heads": 4, "vocabulary": 2048}),
    tiny=(Tokens(2, 16, pairs=True), {"layers": 1, "width": 32, "heads": 4, "vocabulary": 64}),
)
_HIGHWAY = Recipe(
    Highway,
    _SGD,
    full=(Images(4096, 16), {}),
    small=(Images(256, 16), {"width": 512, "layers": 8, "classes": 100}),
    tiny=(Images(16, 8), {"width": 32, "layers": 3, "classes": 10}),
)

_RECIPES: dict[str, Recipe] = {
    "resnet50": _RESNET,
    "vgg16": _VGG,
    "mobilenet_v2": _MOBILENET,
    "googlenet": _GOOGLENET,
    "unet": _UNET,
    "vit": _VIT,
    "gpt": _GPT,
    "gpt_scanned": replace(_GPT, full=_MEDIUM).having(scanned=True),
    "vit_scanned": _VIT.having(scanned=True),
}

_KINDS: dict[str, Recipe] = {
    "dropout": replace(
        _GPT,
        full=(Tokens(16, 512), _DROPOUT),
        small=(Tokens(2, 128), {"layers": 4, "width": 256, "heads": 4, "vocabulary": 4096}),
    ).having(dropout=0.1),
    "depthwise": Recipe(
        Depthwise,
        _SGD,
        full=(Images(32, 224), {}),
        small=(Images(4, 96), {"widths": (32, 64, 128, 256), "classes": 100}),
        tiny=(Images(4, 32), {"depths": (1, 2), "widths": (16, 32), "classes": 10}),
    ),
    "encoder_decoder": _ENCODER_DECODER,
    "distances": replace(_ENCODER_DECODER, full=(Tokens(4, 1024, pairs=True), {})).having(distances=32),
    "highway": _HIGHWAY,
    "sharpness": replace(_HIGHWAY, sharpness=0.05),
}

_REVERSIBLE: dict[str, Recipe] = {
    "revnet": Recipe(
        RevNet,
        _SGD,
        full=(Images(128, 32), {}),
        small=(Images(32, 16), {"depths": (3, 3), "widths": (32, 64)}),
        tiny=(Images(4, 8), {"depths": (2, 2), "widths": (8, 16), "classes": 10}),
    ),
    "revtransformer": Recipe(
        RevTransformer,
        _SGD,
        full=(Tokens(1, 4096), {}),
        small=(Tokens(1, 256), {"layers": 8, "width": 128, "heads": 4, "vocabulary": 1024}),
        tiny=(Tokens(2, 16), {**_TINY, **_WORDS, "layers": 3}),
    ),
}


@dataclass(frozen=True)
class Variant:
    """A network with something other than its recipe says: `full` at that scale alone, `always` at any."""

    network: str
    full: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    "gpt of 4 layers": Variant("gpt", {"layers": 4}),
    "resnet50 bf16": Variant("resnet50", always={"dtype": jnp.bfloat16}),
    "dropout bf16": Variant("dropout", always={"dtype": jnp.bfloat16}),
    "loops in loops": Variant("gpt_scanned", always={"remat": "scan"}),
    "gpt_medium": Variant("gpt_scanned", {"batch": 8, "length": 1024}),
    "gpt_1b": Variant("gpt_scanned", {"layers": 80}),
    "deep": Variant("gpt_scanned", {"layers": 100, "width": 768, "heads": 12, "batch": 8}),
}
"""Networks at other sizes: GPT-2 medium with tokens for a GPU to work on, with three times the parameters, and a
hundred layers; in another type; and with loops in its loops.
"""

NAMES: tuple[str, ...] = tuple(_RECIPES)
"""The networks that ``program`` knows by their papers' names."""

LABELS = dict(
    zip(
        NAMES,
        (
            *("ResNet-50", "VGG-16", "MobileNet-V2", "GoogLeNet", "UNet", "ViT-B/16", "GPT-2 small"),
            *("GPT-2 medium, scanned", "ViT-B/16, scanned"),
        ),
        strict=True,
    )
)
"""What they are called in tables."""

KINDS: tuple[str, ...] = tuple(_KINDS)
"""More that it knows, of kinds that those lack: what a planner is right about on nine famous networks it may have
learnt from them alone.
"""

REVERSIBLE: tuple[str, ...] = tuple(_REVERSIBLE)
"""And those whose blocks can be undone."""


def program(name: str, *, scale: Scale = "full", **sizes: Any) -> Program:
    """The train step of the network or variant ``name``.

    ``sizes`` overrides fields of the network or of its data, such as ``layers``, ``batch`` or ``pixels``, what it
    recomputes by hand (``remat``), and what it computes in (``dtype``); parameters and loss are float32.
    """
    if name in VARIANTS:
        variant = VARIANTS[name]
        other = {**(variant.full if scale == "full" else {}), **variant.always}
        return program(variant.network, scale=scale, **{**sizes, **other})
    known = _RECIPES | _KINDS | _REVERSIBLE
    if name not in known:
        raise ValueError(f"no network is called {name!r}; there are {', '.join(known)}")
    if scale not in ("full", "small", "tiny"):
        raise ValueError(f"scale is {scale!r}, not 'full', 'small' or 'tiny'")
    recipe = known[name]
    data, network = getattr(recipe, scale)
    of_data = {field.name for field in fields(data)} & sizes.keys()
    data = replace(data, **{key: sizes.pop(key) for key in of_data})
    dtype: DTypeLike = sizes.setdefault("dtype", jnp.float32)
    model = recipe.network(**{**network, **sizes})
    return make_program(name, model, recipe.optimizer, data.maker(model, dtype), recipe.sharpness)
