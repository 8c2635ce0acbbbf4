"""The decoder of `convergence.py` in plain PyTorch, with the same initial weights: what other libraries convert.

Its layers hold `nn.Linear`. torchao's float8 quantizes their operands for each product; weights stay in BF16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantshard.tools.trainer.models.decoder import LanguageModel
from quantshard.tools.trainer.settings.config import TrainSettings

PLAIN, TENSORWISE = "plain", "tensorwise"
"""As it is; by torchao with one scale for a tensor, its recipe of this name."""


class PlainLayer(nn.Module):
    """Attention and MLP, each with its norm before it and the residual around it."""

    def __init__(self, settings: TrainSettings, device: str) -> None:
        super().__init__()
        hidden, ffn = settings.hidden, settings.ffn
        made: dict[str, Any] = {"dtype": settings.torch_params_dtype, "device": device}
        self.heads = settings.heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, settings.norm_eps, **made) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, **made), nn.Linear(hidden, hidden, **made)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn, **made), nn.Linear(ffn, hidden, **made)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden] -> the same shape and dtype."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class PlainModel(nn.Module):
    """Logits of the next token, by a decoder of settings whose architecture is "gpt" and whose head is tied.

    `kind`: PLAIN, or a recipe's name of torchao's.
    """

    def __init__(self, source: LanguageModel, kind: str, device: str) -> None:
        super().__init__()
        settings = source.settings
        if settings.architecture != "gpt" or not settings.tied or settings.kv_heads != settings.heads:
            raise ValueError("the plain model is a decoder of GPT-2's kind: learned positions, a tied head, no groups")
        made: dict[str, Any] = {"dtype": settings.torch_params_dtype, "device": device}
        self.settings = settings
        self.embedding = nn.Embedding(len(source.embedding.weight), settings.hidden, **made)
        self.positions = nn.Embedding(settings.seq_length, settings.hidden, **made)
        self.layers = nn.ModuleList(PlainLayer(settings, device) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.hidden, settings.norm_eps, **made)
        self.load_state_dict(_renamed(source))
        if kind != PLAIN:
            _to_float8(self.layers, kind, device)
        if device == "cuda":
            for layer in self.layers:
                layer.compile()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, sequence] -> logits float32 [batch, sequence, vocabulary]."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight).float()


def _renamed(source: LanguageModel) -> dict[str, Tensor]:
    """The weights of a decoder of ours, in high precision, by the plain model's names."""
    given = {name: param.detach() for name, param in source.named_parameters()}
    found = {name: value for name, value in given.items() if not name.startswith("layers.")}
    for number in range(source.settings.layers):
        attention, mlp = f"layers.{number}.self_attention", f"layers.{number}.layernorm_mlp"
        for kind in ("weight", "bias"):
            own = f"layers.{number}.{{}}.{kind}".format
            parts = [given[f"{attention}.layernorm_qkv.{part}_{kind}"] for part in ("query", "key", "value")]
            found[own("qkv")] = torch.cat(parts)
            found[own("norm1")] = given[f"{attention}.layernorm_qkv.layer_norm_{kind}"]
            found[own("proj")] = given[f"{attention}.proj.{kind}"]
            found[own("norm2")] = given[f"{mlp}.layer_norm_{kind}"]
            found[own("fc1")], found[own("fc2")] = given[f"{mlp}.fc1_{kind}"], given[f"{mlp}.fc2_{kind}"]
    return found


def _to_float8(layers: nn.ModuleList, recipe: str, device: str) -> None:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device == "cpu")
    convert_to_float8_training(layers, config=config)
