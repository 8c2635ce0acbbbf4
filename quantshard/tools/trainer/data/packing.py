"""Sequences of documents: tokens, targets and positions, and best-fit packing of whole documents.

A document is predicted up to its last token, the end of a document. In files without flags that token is also the first
input of the next document, as a beginning-of-sequence token would be. In files with flags (`MASKED`) every token has
the bit FLAGGED, the first token of a document STARTS, and tokens without a loss UNTRAINED.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard.tools.trainer.settings.values import STREAM

IGNORED: Final = -100
"""Target without a loss, as in `torch.nn.functional.cross_entropy`."""

MASKED: Final = "masked"
"""Layout of token files with flags."""

TOKEN, FLAGGED, STARTS, UNTRAINED = (1 << 24) - 1, 1 << 29, 1 << 30, 1 << 31


class Documents(NamedTuple):
    """The documents of a batch: positions of tokens, int64 [batch, sequence], and boundaries in each sequence, int32
    [batch, documents + 1], where empty documents are last."""

    positions: Tensor
    boundaries: Tensor


def starts_document(ids: Tensor, end_of_document: int) -> Tensor:
    """Return which inputs begin a document."""
    return (ids == end_of_document) | (ids & STARTS != 0)


def sequence(pieces: Sequence[Tensor], length: int, end_of_document: int, packing: str) -> Tensor:
    """Return a sequence as int64 [2 or 4, length]: tokens, targets and, unless `packing` is "stream", positions and
    the first tokens of the documents, followed by `length`.

    Positions restart at each document and each of `pieces`, which are read tokens: n + 1 of them give n inputs. The
    sequence is padded with targets that are IGNORED, as one document whose positions are 0.
    """
    inputs, targets = (torch.cat([piece[part] for piece in pieces]) for part in (slice(-1), slice(1, None)))
    missing = length - len(inputs)
    inputs, targets = F.pad(inputs, (0, missing), value=end_of_document), F.pad(targets, (0, missing), value=UNTRAINED)
    rows = [inputs & TOKEN, torch.where(targets & UNTRAINED != 0, IGNORED, targets & TOKEN)]
    if packing != STREAM:
        starts, index = starts_document(inputs, end_of_document), torch.arange(length, device="cpu")
        starts[[0, *accumulate(len(piece) - 1 for piece in pieces[:-1])]] = True
        rows.append(index - (index * starts).cummax(0).values)
        starts[length - missing + 1 :] = False
        rows.append(torch.where(starts, index, length).sort().values)
    return torch.stack(rows)


def most_documents(batch: Tensor) -> int:
    """Return the largest number of documents in a sequence of a batch. Waits for the device."""
    return int((batch[:, 3:] < batch.shape[2]).sum(-1).amax()) if batch.shape[1] > 2 else 0


def split(batch: Tensor, most: int | None = None) -> tuple[Tensor, Tensor, Documents | None]:
    """Split `sequence`s into tokens, targets and documents, of which there are at most `most`; None for "stream"."""
    tokens, targets, *documents = batch.unbind(1)
    if not documents:
        return tokens, targets, None
    positions, starts = documents
    # the deterministic backward of flash attention divides its sums if there are fewer sequences x heads than SMs
    most = max(most_documents(batch) if most is None else most, -(-32 // len(batch)))
    return tokens, targets, Documents(positions, F.pad(starts[:, :most], (0, 1), value=batch.shape[2]).int())


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group items of at most `capacity` by index: longest first, each into the fullest row with room."""
    rows: list[list[int]] = []
    # rows by their free space, and the spaces that some row has, ascending
    by_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = bisect_left(spaces, lengths[item])
        if fitting < len(spaces):
            space = spaces[fitting]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[fitting]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if space := space - lengths[item]:
            if not by_space[space]:
                insort(spaces, space)
            by_space[space].append(row)
    return rows


class PackedRows:
    """Rows of at most `capacity` inputs that hold whole documents; longer documents are cut into pieces.

    Args:
        starts, lengths: first input and number of inputs of each document in a stream of tokens.
        capacity: inputs per row.
    """

    COUNTS = ("num_rows", "documents", "cut", "inputs")

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], capacity: int) -> None:
        documents = list(zip(starts, lengths, strict=True))
        cuts = ((start, length, range(0, length, capacity)) for start, length in documents)
        pieces = [(s + first, min(capacity, n - first)) for s, n, firsts in cuts for first in firsts]
        packed = best_fit([length for _, length in pieces], capacity)
        self.rows = [[pieces[index] for index in row] for row in packed]
        self.num_rows, self.documents, self.inputs, self.capacity = len(packed), len(documents), sum(lengths), capacity
        self.cut = sum(length > capacity for length in lengths)


def describe_rows(packed: Sequence[PackedRows]) -> str:
    """Return a line about rows: documents, cuts, and the share of inputs that are padding."""
    rows, documents, cut, inputs = (sum(getattr(p, name) for p in packed) for name in PackedRows.COUNTS)
    padding = 1 - inputs / (rows * packed[0].capacity)
    return f"best-fit packing: {rows:,} rows hold {documents:,} documents ({cut:,} of them cut), {padding:.2%} padding"


def document_spans(starts: np.ndarray, separate: np.ndarray, first: int, last: int) -> tuple[list[int], list[int]]:
    """Return the first input and the number of inputs of each document among the inputs [first, last) of a stream.

    `starts`: inputs that begin documents, ascending. `separate`: whether the input before each of them has no target.
    A document that crosses `first` or `last` is cut there, and empty ones are left out.
    """
    ends = np.append(starts[1:] - separate[1:], last)
    is_empty = np.append((ends[:-1] - starts[:-1] == 1) & ~separate[1:] & (starts[:-1] > 0), False)
    begins, ends = np.maximum(starts, first), np.minimum(ends, last)
    has_tokens = (ends > begins) & ~is_empty
    return begins[has_tokens].tolist(), (ends - begins)[has_tokens].tolist()
