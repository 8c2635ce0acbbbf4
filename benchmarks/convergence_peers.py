"""The decoder of `convergence.py` in plain PyTorch with the same initial weights, to convert with other libraries.

Its linear layers are `nn.Linear` in BF16; torchao's float8 quantizes their operands for each GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import to_float8
from quantshard.tools.trainer.models.decoder import LanguageModel
from quantshard.tools.trainer.settings.config import TrainSettings

PLAIN, TENSORWISE = "plain", "tensorwise"
"""Not converted; converted with torchao's recipe of this name, one scale per tensor."""


class PlainLayer(nn.Module):
    """Attention and MLP, each with a norm in front and a residual connection."""

    def __init__(self, settings: TrainSettings, device: str) -> None:
        super().__init__()
        hidden, ffn = settings.hidden, settings.ffn
        options: dict[str, Any] = {"dtype": settings.torch_params_dtype, "device": device}
        self.heads = settings.heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, settings.norm_eps, **options) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, **options), nn.Linear(hidden, hidden, **options)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn, **options), nn.Linear(ffn, hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden] -> the same shape and dtype."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class PlainModel(nn.Module):
    """A decoder with the weights of a `LanguageModel` of architecture "gpt" with a tied head.

    `kind`: PLAIN, or the name of a torchao recipe.
    """

    def __init__(self, source: LanguageModel, kind: str, device: str) -> None:
        super().__init__()
        settings = source.settings
        if settings.architecture != "gpt" or not settings.tied or settings.kv_heads != settings.heads:
            raise ValueError("the plain model needs learned positions, a tied head and no grouped-query attention")
        options: dict[str, Any] = {"dtype": settings.torch_params_dtype, "device": device}
        self.settings = settings
        self.embedding = nn.Embedding(len(source.embedding.weight), settings.hidden, **options)
        self.positions = nn.Embedding(settings.seq_length, settings.hidden, **options)
        self.layers = nn.ModuleList(PlainLayer(settings, device) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.hidden, settings.norm_eps, **options)
        self.load_state_dict(_plain_weights(source))
        if kind != PLAIN:
            to_float8(self.layers, kind, device)
        if device == "cuda":
            for layer in self.layers:
                layer.compile()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, sequence] -> logits float32 [batch, sequence, vocabulary]."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight).float()


def _plain_weights(source: LanguageModel) -> dict[str, Tensor]:
    """Return the high-precision weights of a decoder by the plain model's names."""
    params = {name: param.detach() for name, param in source.named_parameters()}
    weights = {name: value for name, value in params.items() if not name.startswith("layers.")}
    for number in range(source.settings.layers):
        layer = f"layers.{number}"
        attention, mlp = f"{layer}.self_attention", f"{layer}.layernorm_mlp"
        for kind in ("weight", "bias"):
            qkv = [params[f"{attention}.layernorm_qkv.{part}_{kind}"] for part in ("query", "key", "value")]
            weights[f"{layer}.qkv.{kind}"] = torch.cat(qkv)
            weights[f"{layer}.norm1.{kind}"] = params[f"{attention}.layernorm_qkv.layer_norm_{kind}"]
            weights[f"{layer}.proj.{kind}"] = params[f"{attention}.proj.{kind}"]
            weights[f"{layer}.norm2.{kind}"] = params[f"{mlp}.layer_norm_{kind}"]
            weights[f"{layer}.fc1.{kind}"] = params[f"{mlp}.fc1_{kind}"]
            weights[f"{layer}.fc2.{kind}"] = params[f"{mlp}.fc2_{kind}"]
    return weights
