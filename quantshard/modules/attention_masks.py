"""Which keys a query sees: mask types, sliding windows, and sequences packed into one dim of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, private_torch
from quantshard.errors import ConfigurationError, warn_user

QKV_FORMATS = ("sbhd", "bshd", "thd")
MASK_TYPES = (
    "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
_OTHER_NAMES = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}
_INTEGERS = (torch.int32, torch.int64)
UNLIMITED = -1

AttentionMask = Tensor | tuple[Tensor, Tensor]
"""True where masked out: one mask, or for padding a pair of masks, of the queries and of the keys."""
WindowSize = tuple[int, int]


def check_choice(owner: str, argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ConfigurationError if an argument is not one of its `choices`."""
    if value not in choices:
        raise ConfigurationError(f"{owner}({argument}={value!r}) is not supported; use one of: {', '.join(choices)}")


def mask_type(owner: str, name: str) -> str:
    """Return the entry of `MASK_TYPES` that a name stands for."""
    check_choice(owner, "attn_mask_type", name, (*MASK_TYPES, *_OTHER_NAMES))
    return _OTHER_NAMES.get(name, name)


class Diagonals(NamedTuple):
    """A query at position i sees the keys from i - left to i + right, both included; `UNLIMITED` removes a bound.
    `bottom_right`: the position of a query is counted such that the last query is at the position of the last key."""

    left: int
    right: int
    bottom_right: bool

    @classmethod
    def of(cls, owner: str, kind: str, window: WindowSize | None, bottom_right: bool | None) -> Diagonals:
        """Combine a mask type, a window and `bottom_right_diagonal`."""
        window = (UNLIMITED, UNLIMITED) if window is None else window
        if not isinstance(window, tuple | list) or [type(size) for size in window] != [int, int]:
            raise ConfigurationError(f"{owner}(window_size={window!r}) must be two integers (left, right)")
        left, right = window
        if min(left, right) < UNLIMITED or ((left, right) == (UNLIMITED, 0) and "causal" not in kind):
            raise ConfigurationError(f"{owner}(window_size={window}): use sizes >= 0 (-1: no limit), or a causal type")
        if "causal" in kind:
            right, bottom_right = 0, "bottom_right" in kind
        return cls(left, right, bottom_right is None or bottom_right)

    @property
    def is_limited(self) -> bool:
        """Whether a query does not see all keys."""
        return self[:2] != (UNLIMITED, UNLIMITED)

    @property
    def is_window(self) -> bool:
        """Whether a query sees neither all keys nor all up to its position."""
        return self.left != UNLIMITED or self.right > 0

    def shift(self, queries: Any, keys: Any) -> Any:
        """Return how far positions of queries are shifted, for these numbers of queries and keys."""
        return keys - queries if self.bottom_right else 0

    def allow(self, distance: Tensor) -> Tensor | None:
        """Return where a query sees a key, from key position - query position; None for everywhere."""
        visible = None if self.left == UNLIMITED else distance >= -self.left
        if self.right == UNLIMITED:
            return visible
        return distance <= self.right if visible is None else visible & (distance <= self.right)


class Packing(NamedTuple):
    """Sequences among packed tokens.

    `starts`, `lengths`: of each sequence, int32 [sequences], on the tokens' device. `longest`: at least the largest
    length. `has_gaps`: whether there can be tokens that belong to no sequence.
    """

    starts: Tensor
    lengths: Tensor
    longest: int
    has_gaps: bool

    @classmethod
    def of_batch(cls, batch: int, length: int, device: torch.device) -> Packing:
        """Return the sequences of a batch [batch, length, ...] without padding."""
        starts = torch.arange(batch, dtype=torch.int32, device=device) * length
        return cls(starts, torch.full_like(starts, length), length, False)

    def slots(self) -> tuple[Tensor, Tensor]:
        """Return the token in each place of a padded batch, and where there is one: [sequences, longest]."""
        places = torch.arange(self.longest, dtype=torch.int32, device=self.starts.device)
        return self.starts[:, None] + places, places < self.lengths[:, None]

    def unpack(self, x: Tensor) -> Tensor:
        """Copy tokens [tokens, heads, features] into a padded batch [sequences, heads, longest, features]."""
        slots, belongs = self.slots()
        rows = x.index_select(0, slots.flatten().clamp(max=x.shape[0] - 1))
        return keep_where(belongs.flatten(), rows).unflatten(0, slots.shape).transpose(1, 2)

    def pack(self, x: Tensor, tokens: int) -> Tensor:
        """Do the opposite of `unpack`; tokens that belong to no sequence get zeros."""
        document, position, belongs = self.documents(tokens)
        rows = document * self.longest + position.clamp(max=self.longest - 1)
        return keep_where(belongs, x.transpose(1, 2).flatten(0, 1).index_select(0, rows))

    def documents(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sequence of each token, its position there, and whether it does belong to the sequence."""
        index = torch.arange(tokens, dtype=torch.int32, device=self.starts.device)
        document = torch.searchsorted(self.starts, index, right=True, out_int32=True) - 1
        position = index - self.starts[document]
        return document, position, position < self.lengths[document]

    def boundaries(self, tokens: int) -> Tensor:
        """Return cumulative lengths for kernels, int32; gaps are sequences too."""
        ends = self.starts + self.lengths
        pairs = torch.stack((self.starts, ends), 1).flatten() if self.has_gaps else self.starts
        return torch.cat((pairs, ends.new_full((1,), tokens)))


def keep_where(belongs: Tensor, x: Tensor) -> Tensor:
    """Replace other tokens of x [tokens, heads, features] by zeros, and their gradients."""
    return torch.where(belongs[:, None, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def packing(
    name: str, cumulative: Tensor, padded: Tensor | None, longest: int | None, tokens: Tensor, layout: str
) -> Packing:
    """Check and combine the boundaries of sequences: cumulative lengths [sequences + 1], or [rows, sequences + 1].

    `name`: "q" or "kv". `padded`: cumulative lengths with the gaps after each sequence; only for "thd". `longest`: at
    least the largest length, if known. `tokens`: [tokens, ...], or for other layouts padded sequences.
    """
    batch, size = (tokens.shape[1], tokens.shape[0]) if layout == "sbhd" else tokens.shape[:2]
    has_rows = layout != "thd" and isinstance(cumulative, Tensor) and cumulative.ndim == 2
    for x in (cumulative, padded):
        fits = isinstance(x, Tensor) and x.ndim == 1 + has_rows and x.shape[-1] > 1 and x.dtype in _INTEGERS
        if x is not None and not (fits and (not has_rows or len(x) == batch)):
            raise ConfigurationError(f"cu_seqlens_{name} must be int32 [sequences + 1], or for rows [b, sequences + 1]")
    cumulative = cumulative.to(torch.int32)
    lengths = cumulative.diff().flatten()
    if layout != "thd":
        result, end = Packing.of_batch(batch, size, cumulative.device)._replace(lengths=lengths), batch * size
        starts = (result.starts[:, None] + cumulative[:, :-1]).flatten() if has_rows else result.starts
        result = result._replace(starts=starts, has_gaps=not has_rows)
    else:
        starts, end = (cumulative if padded is None else padded.to(torch.int32))[:-1], tokens.shape[0]
        result = Packing(starts, lengths, longest or end, padded is not None)
    if len(result.starts) != len(lengths):
        raise ConfigurationError(f"cu_seqlens_{name} has {len(lengths)} lengths for {len(result.starts)} sequences")
    is_read = longest is None and layout == "thd"
    if is_read and (kernel_dispatch.is_capturing() or private_torch.is_traced(cumulative)):
        raise ConfigurationError(f"give max_seqlen_{name}: a graph cannot read it from cu_seqlens_{name}")
    if is_read or (cumulative.device.type == "cpu" and not private_torch.is_traced(cumulative)):
        result = result._replace(longest=_checked_longest(name, result, end))
    return result


def _checked_longest(name: str, packing: Packing, end: int) -> int:
    """Return the largest length, after a check of all boundaries; reads them on the host."""
    starts, lengths = torch.stack((packing.starts, packing.lengths)).tolist()
    if starts[0] != 0:
        raise ConfigurationError(f"cu_seqlens_{name} must start at 0, not at {starts[0]}")
    if min(lengths) < 0:
        raise ConfigurationError(f"cu_seqlens_{name} must not decrease")
    for start, length, limit in zip(starts, lengths, [*starts[1:], end], strict=True):
        if start + length > limit or (start + length < limit and not packing.has_gaps):
            problem = f"{length} tokens from {start} must end at {limit}"
            raise ConfigurationError(f"cu_seqlens_{name}: {problem}; give cu_seqlens_{name}_padded")
    longest = max(lengths, default=0)
    if longest > packing.longest:
        raise ConfigurationError(f"max_seqlen_{name}={packing.longest}, but a sequence has {longest} tokens")
    return max(packing.longest if packing.longest < end else longest, 1)


def used_mask(kind: str, mask: AttentionMask | None, has_lengths: bool) -> AttentionMask | None:
    """Return the attention mask that a mask type uses; None if it uses none. Raises if one is missing."""
    if "padding" not in kind and kind != "arbitrary":
        if mask is not None:
            warn_user(f"attention_mask is ignored: attn_mask_type={kind!r} uses none, as in TransformerEngine")
        return None
    if has_lengths and kind != "arbitrary":
        return None
    if mask is None:
        instead = "" if kind == "arbitrary" else ", or cu_seqlens_q and cu_seqlens_kv"
        raise ConfigurationError(f"attention: attn_mask_type={kind!r} needs an attention_mask{instead}")
    masks = mask if isinstance(mask, tuple | list) else (mask,)
    if kind == "arbitrary" and len(masks) > 1:
        raise ConfigurationError("attention_mask of 'arbitrary' is one mask [b, h, queries, keys]; combine both by |")
    for item in masks:
        if item.dtype != torch.bool:
            raise ConfigurationError(f"attention_mask is {item.dtype}; use bool, True where masked out")
    return mask
