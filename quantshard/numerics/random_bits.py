"""Random words of the elements of a global tensor, counted by Philox: the same however the tensor is cut.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quantshard.numerics.chunks import in_chunks

Pair = tuple[int, int]

_WORD: Final = 0xFFFFFFFF
_PHILOX_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Tensor | Sequence[Tensor | int], key: int) -> Tensor:
    """Philox4x32-10: counter int64 [..., 4] of 32-bit words (or its four words), 64-bit key -> int64 [..., 4].

    Word 0 of the key is its low half. 32 x 32 -> 64 bit products are taken modulo 2**64 in int64, then masked.
    """
    c0, c1, c2, c3 = counter.unbind(-1) if isinstance(counter, Tensor) else counter
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        p0, p1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) & _WORD ^ c1 ^ k0, p1 & _WORD
        c2, c3 = (p0 >> 32) & _WORD ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD, (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    device = next((c.device for c in (c0, c1, c2, c3) if isinstance(c, Tensor)), "cpu")
    return torch.stack([torch.as_tensor(c, dtype=torch.int64, device=device) for c in (c0, c1, c2, c3)], dim=-1)


class RandomBits(NamedTuple):
    """Which random words: the arguments of `random_words`, for whoever makes them where they are used.

    `transposed`: element [i, j] of the rectangle has the word that [j, i] has in a global matrix [C, R], its halves
    exchanged. So a matrix and its transpose share the calls of the generator, and round apart nonetheless: the highest
    bits decide.
    """

    key: int
    draw: int | Tensor
    stream: int
    global_shape: Pair
    origin: Pair = (0, 0)
    shape: Pair | None = None
    transposed: bool = False

    @property
    def untransposed(self) -> RandomBits:
        """Those of the transpose, if they are `transposed`: plain ones."""
        return RandomBits(*self[:3], self.global_shape[::-1], self.origin[::-1], self.shape and self.shape[::-1])

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The words, int64 of the rectangle's shape."""
        if self.transposed:
            return swap_halves(self.untransposed.tensor(device)).t()
        return random_words(*self[:6], device=device)


def swap_halves(words: Tensor) -> Tensor:
    """Words of `random_words` whose 16 highest and lowest bits have changed places."""
    return words >> 16 | (words & 0xFFFF) << 16


def random_words(
    key: int,
    draw: int | Tensor,
    stream: int,
    global_shape: Pair,
    origin: Pair = (0, 0),
    shape: Pair | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Random words of a rectangle [R, C]: int64 in [0, 2**32), the same however the tensor is cut.

    Element i (row-major, in `global_shape`) gets word i % 4 of Philox call (lo(i // 4), hi(i // 4), draw, stream) under
    the 64-bit `key`. `draw` counts the draws of a parameter, `stream` tells apart several tensors of one draw; both
    are taken modulo 2**32; `draw` may be an int64 scalar on `device`. `shape` defaults to all that follows `origin`.
    """
    rows, cols = shape if shape is not None else (global_shape[0] - origin[0], global_shape[1] - origin[1])
    if rows <= 0 or cols <= 0:
        return torch.empty(max(rows, 0), max(cols, 0), dtype=torch.int64, device=device)
    start = origin[0] * global_shape[1] + origin[1]
    if cols == global_shape[1] or rows == 1:  # one run of elements: no gather, and no word is computed twice
        call = start // 4
        calls = torch.arange(call, -((start + rows * cols) // -4), device=device)
        words = _words_of_calls(calls, key, draw, stream).flatten()
        return words[start - 4 * call :][: rows * cols].view(rows, cols)
    starts = torch.arange(rows, device=device).mul_(global_shape[1]).add_(start).unsqueeze(1)
    calls = (starts >> 2) + torch.arange((cols + 6) // 4, device=device)  # enough from any offset within a call
    words = _words_of_calls(calls, key, draw, stream).flatten(1)
    return words.gather(1, (starts & 3) + torch.arange(cols, device=device))


def _words_of_calls(calls: Tensor, key: int, draw: int | Tensor, stream: int) -> Tensor:
    return in_chunks(lambda c: philox((c & _WORD, c >> 32, draw & _WORD, stream & _WORD), key), calls)
