"""PyTorch's `activation_memory_budget` on a ResNet-50 and a GPT of the sizes that the other benchmarks use.

    python -m examples.benchmarks.pytorch.budget resnet50 --sizes '{"batch": 184}'

Loss and gradients go through `torch.compile` at each ratio, the optimizer runs eagerly. Per ratio: the most bytes that
the caching allocator had in use, on devices that count them, and the seconds of a step (the median of many).
It needs PyTorch, which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
from torch import nn  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

from examples.benchmarks import records

RATIOS = (1.0, 0.75, 0.5, 0.33, 0.25, 0.0)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "resnet50": {
        "full": {"batch": 32, "pixels": 224, "blocks": (3, 4, 6, 3), "width": 64, "classes": 1000},
        "tiny": {"batch": 4, "pixels": 32, "blocks": (1, 2), "width": 8, "classes": 10},
    },
    "gpt": {
        "full": {"batch": 4, "length": 512, "layers": 12, "width": 768, "heads": 12, "vocabulary": 50257},
        "tiny": {"batch": 2, "length": 16, "layers": 2, "width": 32, "heads": 4, "vocabulary": 64},
    },
}
"""As in `networks.registry`."""


class Bottleneck(nn.Module):
    """Three convolutions around a sum, as in `networks.resnet`."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.layers = nn.ModuleList(nn.Sequential(*_conv_norm(*size)) for size in sizes)
        same = stride == 1 and inputs == 4 * width
        self.skip = nn.Identity() if same else nn.Sequential(*_conv_norm(inputs, 4 * width, 1, stride))

    def forward(self, x: Any) -> Any:
        """Images to images."""
        y = x
        for index, layer in enumerate(self.layers):
            y = layer(y)
            if index < 2:
                y = functional.relu(y)
        return functional.relu(y + self.skip(x))


def _conv_norm(inputs: int, outputs: int, size: int, stride: int) -> list[Any]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def resnet(*, blocks: Sequence[int], width: int, classes: int, **_: Any) -> Any:
    """A residual network of bottlenecks."""
    layers: list[Any] = [*_conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not index else 1))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Block(nn.Module):
    """Attention and feed-forward layers with the normalisation first, as in `networks.transformer`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Activations to activations."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5).float()
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).to(value.dtype)
        x = x + self.project((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x)), approximate="tanh"))


class GPT(nn.Module):
    """A causal transformer with tied embeddings, as in `networks.gpt`."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int, **_: Any):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Any) -> Any:
        """Tokens to logits, the places one after the other."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) @ self.tokens.weight.T).flatten(0, 1)


def make(network: str, sizes: dict[str, Any], device: str) -> tuple[Any, Any, Any, Any]:
    """The model, its optimizer, inputs and labels."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32, as XLA's default
    if network == "gpt":
        model = GPT(**sizes).to(device)
        tokens = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["length"] + 1), device=device)
        inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
        return model, torch.optim.AdamW(model.parameters(), 3e-4), inputs, labels
    model = resnet(**sizes).to(device)
    inputs = torch.randn(sizes["batch"], 3, sizes["pixels"], sizes["pixels"], device=device)
    labels = torch.randint(sizes["classes"], (sizes["batch"],), device=device)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), inputs, labels


def measure(
    network: str, sizes: dict[str, Any], ratio: float, *, dtype: str, runs: int, backend: str
) -> dict[str, Any]:
    """One ratio's peak and time. **Arguments:** `backend` of `torch.compile`."""
    import torch._functorch.config as functorch  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    functorch.activation_memory_budget = ratio
    model, optimizer, inputs, labels = make(network, sizes, device)

    def loss_of(inputs: Any, labels: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(inputs)
        return functional.cross_entropy(logits.float(), labels)

    compiled: Callable[..., Any] = torch.compile(loss_of, backend=backend)

    def step() -> float:
        _wait(device)
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        compiled(inputs, labels).backward()
        optimizer.step()
        _wait(device)
        return time.perf_counter() - began

    for _ in range(3):  # compiles, and warms up
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [step() for _ in range(runs)]
    return {
        "ratio": ratio,
        "runs": runs,
        "step_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "device_peak_nbytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; writes one JSON file."""
    parser = argparse.ArgumentParser(description="Measure PyTorch's activation_memory_budget.")
    parser.add_argument("network", choices=tuple(SIZES))
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument(
        "--sizes", type=json.loads, default={}, help="what is other than the scale's, as JSON"
    )
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--into", type=Path, required=True, help="the JSON file")
    given = parser.parse_args(argv)
    sizes = {**SIZES[given.network][given.scale], **given.sizes}
    cuda = torch.cuda.is_available()
    record = {
        "kind": "torch",
        "network": given.network,
        "dtype": given.dtype,
        "sizes": sizes,
        "date": records.today(),
        "environment": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "driver": records.driver(),
        },
        "rows": [],
    }
    for ratio in given.ratios:
        row = measure(given.network, sizes, ratio, dtype=given.dtype, runs=given.runs, backend=given.backend)
        record["rows"].append(row)
        records.write(given.into, record)
        print(
            f"  torch at ratio {ratio}: {row['step_seconds']:.4f} s, {row['device_peak_nbytes']} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
