"""Rotary position embedding (Su et al., 2021): queries and keys are rotated by angles that grow with the position.

The d features of a head form d / 2 planes; plane i of a token at position p is rotated by p * base**(-2 i / d). Two
layouts of the planes exist: feature i with feature i + d / 2, or, interleaved, feature 2 i with feature 2 i + 1. They
are not interchangeable for a trained model.

Nothing is stored: the frequencies are computed in every forward, so that they are right on any device, and after the
meta device, where a buffer would hold whatever lay in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantshard.errors import ConfigurationError
from quantshard.modules import unsupported


class RotaryPositionEmbedding(nn.Module):
    """The angles for `apply_rotary_pos_emb`.

    Args:
        dim: features of a head.
        rotary_percent: the share of them that is rotated.
        seq_len_interpolation_factor: with `pretrained_max_position_embeddings`, positions are divided by this factor
            (position interpolation), or by sequence length / pretrained length where that is more.
        pretrained_max_position_embeddings: the longest sequence that the model was trained on.
        rotary_base: the base of the frequencies.
        interleaved: the layout of the planes; give the same to `apply_rotary_pos_emb`, or as
            `rotary_pos_interleaved` to the attention module.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if self.dim <= 0 or self.dim % 2:
            raise ConfigurationError(
                f"RotaryPositionEmbedding(dim={dim}, rotary_percent={rotary_percent}) rotates {self.dim} features, but "
                "they are rotated in pairs; choose an even number of them"
            )
        if (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None):
            raise ConfigurationError(
                "RotaryPositionEmbedding: seq_len_interpolation_factor and pretrained_max_position_embeddings belong "
                "together; give both or neither"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved

    def forward(self, max_seq_len: int, offset: int = 0, device: torch.device | str | None = None) -> Tensor:
        """The angles of positions offset, ..., offset + max_seq_len - 1: float32 [max_seq_len, 1, 1, dim].

        On `device`; by default on the current accelerator, or the CPU.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        angles = torch.outer(positions / self._stretch(max_seq_len), 1.0 / self.rotary_base**exponents)
        both = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return both.view(max_seq_len, 1, 1, self.dim)

    def _stretch(self, max_seq_len: int) -> float:
        trained = self.pretrained_max_position_embeddings
        if trained is None or self.seq_len_interpolation_factor is None:
            return 1.0
        return max(max_seq_len / trained, self.seq_len_interpolation_factor)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, rotary_base={self.rotary_base:g}, interleaved={self.interleaved}"


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", *, interleaved: bool = False, **others: Any
) -> Tensor:
    """Rotate the first features of every head, in float32, rounded once to the dtype of t; the rest stay as they are.

    Args:
        t: queries or keys, [s, b, h, d] or, with `tensor_format="bshd"`, [b, s, h, d].
        freqs: angles [at least s, 1, 1, at most d], from `RotaryPositionEmbedding`.
        tensor_format: "sbhd" or "bshd".
        interleaved: the layout of the planes, that of `freqs`.
        **others: TransformerEngine's other arguments; see `unsupported`.
    """
    unsupported.refuse("apply_rotary_pos_emb", others)
    if tensor_format not in ("sbhd", "bshd"):
        raise ConfigurationError(f"apply_rotary_pos_emb(tensor_format={tensor_format!r}): use 'sbhd' or 'bshd'")
    length, rotated = t.shape[tensor_format.index("s")], freqs.shape[-1]
    if freqs.shape[0] < length or rotated > t.shape[-1]:
        raise ConfigurationError(
            f"apply_rotary_pos_emb: freqs {tuple(freqs.shape)} are for {freqs.shape[0]} positions and {rotated} "
            f"features, but t has {length} positions and {t.shape[-1]} features; make them with "
            "RotaryPositionEmbedding(features)(positions)"
        )
    freqs = freqs[:length].to(device=t.device, dtype=torch.float32)
    if tensor_format == "bshd":
        freqs = freqs.transpose(0, 1)
    x = t[..., :rotated].float()
    turned = (x * freqs.cos() + _quarter_turn(x, interleaved) * freqs.sin()).to(t.dtype)
    return turned if rotated == t.shape[-1] else torch.cat((turned, t[..., rotated:]), dim=-1)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each plane's (a, b) -> (-b, a)."""
    if interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-b, a), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
