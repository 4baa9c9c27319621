"""The networks by name, at the sizes that benchmarks and tests use: those of `networks.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import optax

from . import convolutional, transformers
from .training import Images, Program, Tokens, make_program

Scale = Literal["full", "small", "tiny"]

SCALES: tuple[Scale, ...] = ("full", "small", "tiny")

# Softmax leaves the bias of attention's keys a gradient of nothing but rounding, which
# the usual eps of 1e-8 would blow up into visible differences between runs.
_ADAMW = optax.adamw(3e-4, b2=0.95, eps=1e-6, weight_decay=0.1)
_OPTIMIZERS = {
    "sgd": optax.sgd(0.01, momentum=0.9),
    "adamw": _ADAMW,
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), _ADAMW),
}
_RECIPES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("networks.toml").read_text())

LABELS: dict[str, str] = {name: known["label"] for name, known in _RECIPES.items() if "label" in known}
"""What famous networks are called in tables."""

NAMES: tuple[str, ...] = tuple(LABELS)
"""The networks that ``program`` knows by their papers' names."""

REVERSIBLE: tuple[str, ...] = ("revnet", "revtransformer")
"""Those whose blocks can be undone."""

VARIANTS: tuple[str, ...] = (
    *("gpt of 4 layers", "resnet50 bf16", "dropout bf16", "loops in loops"),
    *("gpt_medium", "gpt_1b", "deep"),
)
"""Other sizes and types of these."""

KINDS: tuple[str, ...] = tuple(name for name in _RECIPES if name not in (*NAMES, *REVERSIBLE, *VARIANTS))
"""Networks of kinds that the famous ones lack."""


def program(name: str, *, scale: Scale = "full", **sizes: Any) -> Program:
    """The train step of the network ``name``.

    ``sizes`` overrides fields of the network or of its data, such as ``layers``, ``batch`` or ``pixels``, what it
    recomputes by hand (``remat``), and what it computes in (``dtype``); parameters and loss are float32.
    """
    if name not in _RECIPES:
        raise ValueError(f"no network is called {name!r}; there are {', '.join(_RECIPES)}")
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}, not 'full', 'small' or 'tiny'")
    recipe = _recipe(name)
    sizes = _tuples({**recipe[scale], **recipe.get("always", {}), **sizes})
    data = Images(*sizes.pop("images")) if "images" in sizes else Tokens(*sizes.pop("tokens"))
    of_data = {field.name for field in fields(data)} & sizes.keys()
    data = replace(data, **{key: sizes.pop(key) for key in of_data})
    kind = recipe["network"]
    network = getattr(convolutional if hasattr(convolutional, kind) else transformers, kind)
    model, optimizer = network(**sizes), _OPTIMIZERS[recipe["optimizer"]]
    make_batch = data.maker(model, sizes.get("dtype", jnp.float32))
    return make_program(name, model, optimizer, make_batch, recipe.get("sharpness", 0.0))


def _recipe(name: str) -> dict[str, Any]:
    """What the file says of a network, and of those that it is like."""
    own = _RECIPES[name]
    return {**_recipe(own["like"]), **own} if "like" in own else own


def _tuples(value: Any) -> Any:
    """Lists as tuples, which modules can be hashed with."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
