"""Rotary position embedding (Su et al., 2021): rotates queries and keys by angles that grow with the position.

The d features of a head form d / 2 planes. Plane i of a token at position p is rotated by p * base**(-2 i / d). A plane
consists of features i and i + d / 2 or, in the interleaved layout, of features 2 i and 2 i + 1. A trained model works
with one of the two layouts only.

The modules store nothing. Frequencies are computed in every forward, so they are right on any device and after the meta
device, where a buffer would be uninitialized. Cosines and sines are cached as long as their angles live, so all layers
of a step share one table.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.attention_masks import Packing

if kernels.USABLE:
    from quantshard.kernels.fused import rotary as rotary_kernel

RotaryEmbedding = Tensor | tuple[Tensor, Tensor]
"""Angles for both queries and keys, or a pair (angles for queries, angles for keys)."""


class RotaryPositionEmbedding(nn.Module):
    """Computes the angles for `apply_rotary_pos_emb`.

    Args:
        dim: features of a head.
        rotary_percent: fraction of the features to rotate.
        seq_len_interpolation_factor: with `pretrained_max_position_embeddings`, divide positions by this factor
            (position interpolation), or by sequence length / pretrained length if that is larger.
        pretrained_max_position_embeddings: longest sequence that the model was trained on.
        rotary_base: base of the frequencies.
        interleaved: layout of the planes. Pass the same value to `apply_rotary_pos_emb`, or as `rotary_pos_interleaved`
            to the attention module.
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
        if (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None):
            names = "seq_len_interpolation_factor and pretrained_max_position_embeddings"
            raise ConfigurationError(f"RotaryPositionEmbedding: give both or neither of {names}")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved

    def forward(self, max_seq_len: int, offset: int = 0, device: torch.device | str | None = None) -> Tensor:
        """Return the angles of positions offset, ..., offset + max_seq_len - 1: float32 [max_seq_len, 1, 1, dim].

        `device`: device of the result. Default: the current CUDA device if there is one, otherwise the CPU.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        pretrained_length, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        stretch = 1.0 if not pretrained_length or not factor else max(max_seq_len / pretrained_length, factor)
        angles = torch.outer(positions / stretch, 1.0 / self.rotary_base**exponents)
        per_feature = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return per_feature.view(max_seq_len, 1, 1, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, rotary_base={self.rotary_base:g}, interleaved={self.interleaved}"


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    *,
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotate the first features of every head, in float32, and round once to the dtype of t. Other features are
    unchanged.

    Args:
        t: queries or keys, [s, b, h, d], [b, s, h, d] with `tensor_format="bshd"`, or [tokens, h, d] with "thd".
        freqs: angles [positions, 1, 1, at most d], from `RotaryPositionEmbedding`, for as many positions as a sequence
            has; or of each token, [s, b, 1, at most d]. Their cosines and sines are cached until the angles change;
            writes through `.data` or by a collective are not noticed.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: position of the first token of each sequence, int [sequences]. Default: 0.
        interleaved: layout of the planes; must match `freqs`.
        cu_seqlens: for "thd", cumulative lengths, int32 [sequences + 1]; positions start again in each sequence.
    """
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ConfigurationError(f"apply_rotary_pos_emb(tensor_format={tensor_format!r}): use 'sbhd', 'bshd' or 'thd'")
    if (tensor_format == "thd") != (cu_seqlens is not None):
        raise ConfigurationError("apply_rotary_pos_emb: give cu_seqlens with tensor_format='thd' only")
    layout, positions = HeadLayout(tensor_format, interleaved), None
    if cu_seqlens is not None:
        positions = token_positions(t.shape[0], freqs, cu_seqlens, None, start_positions)
    elif start_positions is not None:
        positions = start_positions.to(t.device) + torch.arange(layout.length(t), device=t.device)[:, None]
        positions = positions.mT if tensor_format == "bshd" else positions
    batch_layout, batch = layout.as_batch(t)
    return layout.restored(_rotate(batch, _table(batch, freqs, batch_layout, positions), batch_layout))


def token_positions(
    tokens: int, freqs: Tensor, cu_seqlens: Tensor | None, longest: int | None, start_positions: Tensor | None = None
) -> Tensor:
    """Return the position of each token in its sequence, int [tokens].
    `longest`: at least the largest length. If None, it is read on the host when sequences may exceed the angles."""
    if cu_seqlens is None:
        raise ConfigurationError("qkv_format='thd' needs cu_seqlens_q")
    lengths, count = cu_seqlens.diff(), freqs.shape[0]
    if longest is None and (tokens > count or start_positions is not None):
        ends = lengths if start_positions is None else lengths + start_positions.to(lengths.device)
        longest = int(ends.max())
    if longest is not None and longest > count:
        raise ConfigurationError(f"rotary positions: a sequence ends at {longest}, but freqs are for {count} positions")
    document, position, _ = Packing(cu_seqlens[:-1], lengths, 0, False).documents(tokens)
    if start_positions is not None:
        position = position + start_positions.to(position.device)[document]
    # tokens after the last sequence
    return position.clamp(max=count - 1)


class HeadLayout(NamedTuple):
    """Layout of queries or keys: "sbhd", "bshd" or "thd", and whether planes are interleaved."""

    tensor_format: str
    interleaved: bool

    def length(self, t: Tensor) -> int:
        """Return the number of positions of queries or keys."""
        return t.shape[self.tensor_format.index("s")]

    def as_batch(self, t: Tensor) -> tuple[HeadLayout, Tensor]:
        """Return a batch of one sequence for "thd"."""
        return (self, t) if self.tensor_format != "thd" else (self._replace(tensor_format="sbhd"), t.unsqueeze(1))

    def restored(self, batch: Tensor) -> Tensor:
        """Do the opposite of `as_batch`."""
        return batch.squeeze(1) if self.tensor_format == "thd" else batch


def rotate_queries_and_keys(
    q: Tensor, k: Tensor, freqs: RotaryEmbedding, layout: HeadLayout,
    positions: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply `apply_rotary_pos_emb` to queries and keys. If their angles are the same, cosines and sines are computed
    once. `positions`: of the tokens of queries and keys, for "thd"."""
    for_q, for_k = freqs if isinstance(freqs, tuple) else (freqs, freqs)
    (batch, q_batch), (_, k_batch) = layout.as_batch(q), layout.as_batch(k)
    table = _table(q_batch, for_q, batch, positions[0])
    shared = for_k is for_q and positions[0] is positions[1] and batch.length(k_batch) == batch.length(q_batch)
    k_table = table if shared else _table(k_batch, for_k, batch, positions[1])
    return layout.restored(_rotate(q_batch, table, batch)), layout.restored(_rotate(k_batch, k_table, batch))


def rotate_projection(
    qkv: Tensor, heads: int, groups: int, freqs: Tensor, layout: HeadLayout, positions: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [s, b, heads + 2 * groups, d], [b, s, ...] or [tokens, ...] into queries, keys and values, and rotate.
    Kernels return views of one new tensor, so that `qkv` can be freed, and write its gradient in place."""
    batch_layout, batch = layout.as_batch(qkv)
    table = _table(batch, freqs, batch_layout, positions)
    if _has_kernel(batch, table, batch_layout):
        q, k, v = _KernelRotateProjection.apply(batch, *table, batch_layout, heads, groups)
    else:
        q, k, v = batch.split((heads, groups, groups), dim=-2)
        q, k = _rotate(q, table, batch_layout), _rotate(k, table, batch_layout)
    return layout.restored(q), layout.restored(k), layout.restored(v)


class RotaryTable(NamedTuple):
    """Cosines and sines of each position and feature, float32 [s, 1, 1, rotated], or [1, s, ...] in "bshd"."""

    cos: Tensor
    sin: Tensor


_cache: dict[int, tuple[weakref.ReferenceType[Tensor], Hashable, RotaryTable]] = {}
"""id of angles -> the angles, conditions under which the table is valid, and the table. An entry is dropped with the
angles. Attributes of the tensor would be pickled with it."""


def _table(t: Tensor, freqs: Tensor, layout: HeadLayout, positions: Tensor | None = None) -> RotaryTable:
    """Return the table for t. `positions`: of each token, instead of 0, 1, ...; [s] or, by batch, [s, b] or [b, s]."""
    length, rotated = layout.length(t), freqs.shape[-1]
    if (positions is None and freqs.shape[0] < length) or rotated > t.shape[-1]:
        sizes = f"{freqs.shape[0]} positions and {rotated} features, but t has {length} and {t.shape[-1]}"
        raise ConfigurationError(f"apply_rotary_pos_emb: freqs are for {sizes}; use RotaryPositionEmbedding(features)")
    if positions is None:
        return _cached_table(t, freqs, length, layout.tensor_format)
    whole = _cached_table(t, freqs, freqs.shape[0], "sbhd")
    cos, sin = (part[:, 0][positions] for part in whole)
    return RotaryTable(cos, sin) if positions.ndim == 2 else RotaryTable(cos[:, None], sin[:, None])


def _cached_table(t: Tensor, freqs: Tensor, length: int, tensor_format: str) -> RotaryTable:
    # not for angles that are differentiated, traced or rewritten by graph replays, nor in inference mode, whose tables
    # autograd cannot save
    is_cached = not (
        freqs.requires_grad
        or private_torch.is_traced(freqs)
        or torch.is_inference_mode_enabled()
        or freqs.is_inference()
        or kernel_dispatch.is_capturing()
    )
    key = id(freqs)
    if is_cached:
        # another stream would have to wait for the one that computes the table
        stream = torch.cuda.current_stream(t.device) if t.device.type == "cuda" else None
        conditions = length, tensor_format, t.device, private_torch.in_place_changes(freqs), stream
        if key in _cache:
            angles, valid_for, table = _cache[key]
            if angles() is freqs and valid_for == conditions:
                return table
    by_position = freqs[:length].to(device=t.device, dtype=torch.float32)
    if tensor_format == "bshd":
        by_position = by_position.transpose(0, 1)
    table = RotaryTable(by_position.cos(), by_position.sin())
    # a fake tensor mode makes results fake even for real angles
    if is_cached and not private_torch.is_traced(table.cos):
        _cache[key] = weakref.ref(freqs, lambda _: _cache.pop(key, None)), conditions, table
    return table


def _has_kernel(t: Tensor, table: RotaryTable, layout: HeadLayout) -> bool:
    """Return True if a kernel can rotate t, which takes constant angles, one per position and feature."""
    by_position = table.cos.numel() == layout.length(table.cos) * table.cos.shape[-1]
    return by_position and kernel_dispatch.kernels_read(t) and not table.cos.requires_grad


def _rotate(t: Tensor, table: RotaryTable, layout: HeadLayout) -> Tensor:
    if min(table.cos.shape[:2]) > 1:
        # angles of each token: all tokens as one sequence
        by_token = RotaryTable(*(x.flatten(0, 1)[None] for x in table))
        return _rotate(t.flatten(0, 1)[None], by_token, HeadLayout("bshd", layout.interleaved)).reshape(t.shape)
    if _has_kernel(t, table, layout):
        return cast(Tensor, _KernelRotate.apply(t, *table, layout, False))
    rotated = table.cos.shape[-1]
    x = t[..., :rotated].float()
    rotated_part = (x * table.cos + _quarter_turn(x, layout.interleaved) * table.sin).to(t.dtype)
    return rotated_part if rotated == t.shape[-1] else torch.cat((rotated_part, t[..., rotated:]), dim=-1)


def _launch(
    t: Tensor, cos: Tensor, sin: Tensor, tensor_format: str, interleaved: bool, backward: bool, rotated_heads: int
) -> Tensor:
    """Rotate the first `rotated_heads` heads of t and copy the others."""
    return rotary_kernel.rotate(
        t, cos, sin, tensor_format, interleaved=interleaved, backward=backward, rotated_heads=rotated_heads
    )


def _launch_back(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, tensor_format: str, interleaved: bool
) -> Tensor:
    """Return the gradient of the projection that made queries, keys and values; rotates the first two back."""
    out = _back_shapes(dq, dk, dv)
    into_q, into_k, into_v = out.split([grad.shape[-2] for grad in (dq, dk, dv)], dim=-2)
    for grad, into in ((dq, into_q), (dk, into_k)):
        rotary_kernel.rotate(grad, cos, sin, tensor_format, interleaved=interleaved, backward=True, out=into)
    into_v.copy_(dv)
    return out


def _back_shapes(dq: Tensor, dk: Tensor, dv: Tensor, *others: Any) -> Tensor:
    return dq.new_empty((*dq.shape[:-2], dq.shape[-2] + dk.shape[-2] + dv.shape[-2], dq.shape[-1]))


private_torch.define_operator(
    "rotate",
    "(Tensor t, Tensor cos, Tensor sin, str tensor_format, bool interleaved, bool backward, int rotated_heads)"
    " -> Tensor",
    _launch,
    lambda t, *others: t.new_empty(t.shape),
)
private_torch.define_operator(
    "rotate_back",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, str tensor_format, bool interleaved) -> Tensor",
    _launch_back,
    _back_shapes,
)


def _rotated(t: Tensor, cos: Tensor, sin: Tensor, layout: HeadLayout, backward: bool, heads: int) -> Tensor:
    """Call `_launch`, as a custom operator while a graph is traced."""
    launch: Any = torch.ops.quantshard.rotate if private_torch.is_traced(t) else _launch
    out: Tensor = launch(private_torch.plain(t), cos, sin, *layout, backward, heads)
    return out


class _KernelRotate(torch.autograd.Function):
    """Rotation by kernels. Each derivative is a rotation by the negative angles of the one before."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, layout: HeadLayout, backward: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.backward = layout, backward
        return _rotated(t, cos, sin, layout, backward, t.shape[-2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _KernelRotate.apply(grads[0], cos, sin, ctx.layout, not ctx.backward), None, None, None, None


class _KernelRotateProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, layout: HeadLayout, heads: int, groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        out = _rotated(qkv, cos, sin, layout, False, heads + groups)
        q, k, v = out.split((heads, groups, groups), dim=-2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dq, dk, dv = grads
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            dq, dk = (_KernelRotate.apply(grad, cos, sin, ctx.layout, True) for grad in (dq, dk))
            out = torch.cat((dq, dk, dv), dim=-2)
        else:
            launch: Any = torch.ops.quantshard.rotate_back if private_torch.is_traced(dq) else _launch_back
            out = launch(*map(private_torch.plain, (dq, dk, dv)), cos, sin, *ctx.layout)
        return out, None, None, None, None, None


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Rotate each plane by 90 degrees: (a, b) -> (-b, a)."""
    if interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-b, a), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
