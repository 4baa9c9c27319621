"""The networks by name, at the sizes that benchmarks and tests use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from .data import Images, Pairs, Tokens
from .googlenet import STAGES, Branches, GoogLeNet
from .gpt import GPT
from .kinds import Depthwise, EncoderDecoder, Highway
from .mobilenet import MobileNetV2, Stage
from .rematerialisation import Remat
from .resnet import ResNet
from .reversible import RevNet, RevTransformer
from .training import Program, make_program
from .unet import UNet
from .vgg import VGG
from .vit import ViT

Scale = Literal["full", "small", "tiny"]
"""The published sizes, sizes for seconds on a CPU, and sizes for tests."""


@dataclass(frozen=True)
class Size:
    """The data of one scale, and what the network has other than its defaults."""

    data: Images | Tokens | Pairs
    network: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A network, how it is trained, and its sizes."""

    network: Callable[..., nn.Module]
    optimizer: optax.GradientTransformation
    full: Size
    small: Size
    tiny: Size
    sharpness: float = 0.0


_SGD = optax.sgd(0.01, momentum=0.9)
# Softmax leaves the bias of attention's keys a gradient of nothing but rounding, which
# the usual eps of 1e-8 would blow up into visible differences between runs.
_ADAMW = optax.adamw(3e-4, b2=0.95, eps=1e-6, weight_decay=0.1)

_HALF_STAGES = tuple(tuple(row.narrowed(2) for row in stage) for stage in STAGES)
_THIN = Branches(8, 8, 16, 4, 8, 8)

_RECIPES: dict[str, Recipe] = {
    "resnet50": Recipe(
        ResNet,
        _SGD,
        full=Size(Images(32, 224), {}),
        small=Size(Images(8, 112), {"width": 32, "classes": 100}),
        tiny=Size(Images(4, 32), {"blocks": (1, 2), "width": 8, "classes": 10}),
    ),
    "vgg16": Recipe(
        VGG,
        _SGD,
        full=Size(Images(32, 224), {}),
        small=Size(Images(8, 96), {"features": (32, 64, 128, 256, 256), "hidden": 1024, "classes": 100}),
        tiny=Size(
            Images(4, 32), {"convolutions": (1, 2, 2), "features": (8, 16, 16), "hidden": 32, "classes": 10}
        ),
    ),
    "mobilenet_v2": Recipe(
        MobileNetV2,
        _SGD,
        full=Size(Images(32, 224), {}),
        small=Size(Images(8, 96), {"last": 640, "classes": 100}),
        tiny=Size(
            Images(4, 32),
            {
                "stages": (Stage(1, 8, 1, 1), Stage(6, 8, 2, 2), Stage(6, 16, 1, 1)),
                "stem": 8,
                "last": 32,
                "classes": 10,
            },
        ),
    ),
    "googlenet": Recipe(
        GoogLeNet,
        _SGD,
        full=Size(Images(32, 224), {}),
        small=Size(Images(8, 112), {"stages": _HALF_STAGES, "stem": 32, "classes": 100}),
        tiny=Size(Images(4, 64), {"stages": ((_THIN,), (_THIN, _THIN)), "stem": 8, "classes": 10}),
    ),
    "unet": Recipe(
        UNet,
        _SGD,
        full=Size(Images(2, (416, 608), dense=True), {}),
        small=Size(Images(1, (112, 160), dense=True), {"width": 32}),
        tiny=Size(Images(2, (32, 48), dense=True), {"depth": 2, "width": 8}),
    ),
    "vit": Recipe(
        ViT,
        _ADAMW,
        full=Size(Images(16, 224), {}),
        small=Size(Images(8, 112), {"layers": 6, "width": 384, "heads": 6, "classes": 100}),
        tiny=Size(Images(4, 32), {"layers": 2, "width": 32, "heads": 4, "patch": 8, "classes": 10}),
    ),
    "gpt": Recipe(
        GPT,
        _ADAMW,
        full=Size(Tokens(4, 512), {}),
        small=Size(Tokens(2, 256), {"layers": 6, "width": 384, "heads": 6, "vocabulary": 8192}),
        tiny=Size(Tokens(2, 16), {"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "context": 32}),
    ),
    "gpt_scanned": Recipe(
        GPT,
        _ADAMW,
        full=Size(Tokens(2, 512), {"scanned": True, "layers": 24, "width": 1024, "heads": 16}),
        small=Size(
            Tokens(2, 256), {"scanned": True, "layers": 6, "width": 384, "heads": 6, "vocabulary": 8192}
        ),
        tiny=Size(
            Tokens(2, 16),
            {"scanned": True, "layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "context": 32},
        ),
    ),
    "vit_scanned": Recipe(
        ViT,
        _ADAMW,
        full=Size(Images(16, 224), {"scanned": True}),
        small=Size(Images(8, 112), {"scanned": True, "layers": 6, "width": 384, "heads": 6, "classes": 100}),
        tiny=Size(
            Images(4, 32),
            {"scanned": True, "layers": 2, "width": 32, "heads": 4, "patch": 8, "classes": 10},
        ),
    ),
}

_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), _ADAMW)
_HIGHWAY = Recipe(
    Highway,
    _SGD,
    full=Size(Images(4096, 16), {}),
    small=Size(Images(256, 16), {"width": 512, "layers": 8, "classes": 100}),
    tiny=Size(Images(16, 8), {"width": 32, "layers": 3, "classes": 10}),
)

_KINDS: dict[str, Recipe] = {
    "dropout": Recipe(
        GPT,
        _ADAMW,
        full=Size(
            Tokens(16, 512), {"layers": 6, "width": 1024, "heads": 16, "vocabulary": 16384, "dropout": 0.1}
        ),
        small=Size(
            Tokens(2, 128), {"layers": 4, "width": 256, "heads": 4, "vocabulary": 4096, "dropout": 0.1}
        ),
        tiny=Size(
            Tokens(2, 16),
            {"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "context": 32, "dropout": 0.1},
        ),
    ),
    "depthwise": Recipe(
        Depthwise,
        _SGD,
        full=Size(Images(32, 224), {}),
        small=Size(Images(4, 96), {"widths": (32, 64, 128, 256), "classes": 100}),
        tiny=Size(Images(4, 32), {"depths": (1, 2), "widths": (16, 32), "classes": 10}),
    ),
    "encoder_decoder": Recipe(
        EncoderDecoder,
        _CLIPPED,
        full=Size(Pairs(16, 256), {}),
        small=Size(Pairs(4, 64), {"layers": 3, "width": 256, "heads": 4, "vocabulary": 2048}),
        tiny=Size(Pairs(2, 16), {"layers": 1, "width": 32, "heads": 4, "vocabulary": 64}),
    ),
    "distances": Recipe(
        EncoderDecoder,
        _CLIPPED,
        full=Size(Pairs(4, 1024), {"distances": 32}),
        small=Size(
            Pairs(4, 64), {"layers": 3, "width": 256, "heads": 4, "vocabulary": 2048, "distances": 32}
        ),
        tiny=Size(Pairs(2, 16), {"layers": 1, "width": 32, "heads": 4, "vocabulary": 64, "distances": 8}),
    ),
    "highway": _HIGHWAY,
    "sharpness": replace(_HIGHWAY, sharpness=0.05),
}

_REVERSIBLE: dict[str, Recipe] = {
    "revnet": Recipe(
        RevNet,
        _SGD,
        full=Size(Images(128, 32), {}),
        small=Size(Images(32, 16), {"depths": (3, 3), "widths": (32, 64)}),
        tiny=Size(Images(4, 8), {"depths": (2, 2), "widths": (8, 16), "classes": 10}),
    ),
    "revtransformer": Recipe(
        RevTransformer,
        _SGD,
        full=Size(Tokens(1, 4096), {}),
        small=Size(Tokens(1, 256), {"layers": 8, "width": 128, "heads": 4, "vocabulary": 1024}),
        tiny=Size(Tokens(2, 16), {"layers": 3, "width": 32, "heads": 4, "vocabulary": 64, "context": 32}),
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

LABELS = {
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
    "mobilenet_v2": "MobileNet-V2",
    "googlenet": "GoogLeNet",
    "unet": "UNet",
    "vit": "ViT-B/16",
    "gpt": "GPT-2 small",
    "gpt_scanned": "GPT-2 medium, scanned",
    "vit_scanned": "ViT-B/16, scanned",
}
"""What they are called in tables."""

KINDS: tuple[str, ...] = tuple(_KINDS)
"""More that it knows, of kinds that those lack."""

REVERSIBLE: tuple[str, ...] = tuple(_REVERSIBLE)
"""And those whose blocks can be undone."""


def program(
    name: str,
    *,
    remat: Remat = "none",
    scale: Scale = "full",
    dtype: DTypeLike = jnp.float32,
    batch: int | None = None,
    **sizes: Any,
) -> Program:
    """The train step of the network or variant ``name``.

    ``dtype`` is what the network computes in; parameters and loss are float32. ``sizes``
    overrides fields of the network or of its data, such as ``layers`` or ``pixels``.
    """
    if name in VARIANTS:
        variant = VARIANTS[name]
        other = {**(variant.full if scale == "full" else {}), **variant.always}
        asked = {"remat": remat, "dtype": dtype, "batch": batch, **sizes}
        defaults = {"remat": "none", "dtype": jnp.float32, "batch": None}
        other |= {key: value for key, value in asked.items() if value != defaults.get(key)}
        return program(variant.network, scale=scale, **other)
    known = _RECIPES | _KINDS | _REVERSIBLE
    if name not in known:
        raise ValueError(f"no network is called {name!r}; there are {', '.join(known)}")
    if scale not in ("full", "small", "tiny"):
        raise ValueError(f"scale is {scale!r}, not 'full', 'small' or 'tiny'")
    recipe = known[name]
    size: Size = getattr(recipe, scale)
    if batch is not None:
        sizes["batch"] = batch
    of_data = {field.name for field in fields(size.data)} & sizes.keys()
    data = replace(size.data, **{key: sizes.pop(key) for key in of_data})
    model = recipe.network(**{**size.network, **sizes}, remat=remat, dtype=dtype)
    return make_program(name, model, recipe.optimizer, data.maker(model, dtype), recipe.sharpness)
