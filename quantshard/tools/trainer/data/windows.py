"""Windows of the data, in an order that is independent of the number of ranks.

The windows of a step are a pure function of (seed, step, index in the global batch): the counter-based generator gives
the start of each. A rank computes its share of the indices, so any number of ranks sees the same global batch, and a
resumed run continues the same sequence. With several weighted sources, the same generator first draws the source of
each window. With best-fit packing a row of documents takes the place of a window; the rows of a single source are
shuffled in each epoch, so that each is trained on once.

The end of each source is held out, or separate documents are. Training windows lie entirely before the boundary,
evaluation windows entirely after it. Files are read instead of memory-mapped, because a file that became shorter then
raises an error instead of crashing the process.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.trainer.data import packing as packs
from quantshard.tools.trainer.data.corpus import Corpus, Document
from quantshard.tools.trainer.data.shards import TOKEN_DTYPES
from quantshard.tools.trainer.data.sources import reading
from quantshard.tools.trainer.settings.values import BEST_FIT, STREAM

_ORDER_STREAM, _SOURCE_STREAM, _EPOCH_STREAM = 0, 2, 3  # stream 1 is used by generated texts
_WORDS = 1 << 32
_TOKENS_AT_ONCE = 1 << 22

AHEAD = 2
"""The number of batches to prepare ahead."""


class TokenStream:
    """The concatenated documents of a source, in windows of `width` tokens; the end can be held out.

    `corpus`: properties of the tokens. `share`: share of the tokens to hold out. Training windows lie before
    `boundary`, evaluation windows after it. `rows`, `heldout_rows`: what takes the place of windows in best-fit
    packing, otherwise None.
    """

    def __init__(
        self, documents: Sequence[Document], corpus: Corpus, width: int, share: float, packing: str = STREAM
    ) -> None:
        self.documents, self.corpus, self.width = documents, corpus, width
        self._ends = list(accumulate(document.tokens for document in documents))
        self.tokens = self._ends[-1]
        num_heldout = self.tokens if share == 1 else max(width, round(self.tokens * share)) if share else 0
        self.boundary = self.tokens - num_heldout
        if (self.tokens if share == 1 else self.boundary) < width:
            what = "held-out text" if share == 1 else "text"
            heldout = f" and {num_heldout} held-out tokens" if 0 < share < 1 else ""
            raise ConfigurationError(
                f"the {what} has {self.tokens} tokens, too few for seq_length = {width - 1}{heldout}; give more data"
            )

        self.packing, self.rows, self.heldout_rows = packing, None, None
        if packing == BEST_FIT:
            starts, ends = self._document_starts(), (0, self.boundary, self.tokens)
            spans = [packs.document_spans(*starts, first, max(first, end - 1)) for first, end in pairwise(ends)]
            self.rows, self.heldout_rows = (packs.PackedRows(*span, width - 1) for span in spans)

    def _document_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions at which documents begin, and whether nothing is predicted from the position before."""
        starts, separate = [np.zeros(1, np.int64)], [np.ones(1, np.bool_)]
        for document, end in zip(self.documents, self._ends, strict=True):
            if not document.dtype:
                # its last token; the text itself holds none
                starts.append(np.array([end - 1], np.int64))
                separate.append(np.zeros(1, np.bool_))
                continue
            for offset in range(0, document.stored, _TOKENS_AT_ONCE):
                ids = self._read(document, offset, min(_TOKENS_AT_ONCE, document.stored - offset))
                begins = packs.starts_document(ids, self.corpus.end_of_document).nonzero()[:, 0]
                starts.append(end - document.stored + offset + begins.numpy())
                separate.append((ids[begins] & packs.UNTRAINED != 0).numpy())
        positions, first = np.unique(np.concatenate(starts), return_index=True)
        return positions, np.concatenate(separate)[first]

    def window(self, start: int, width: int) -> Tensor:
        """Return tokens [start, start + width) of the stream, int64, with flags if the files have them."""
        pieces: list[Tensor] = []
        index, remaining = bisect_right(self._ends, start), width
        while remaining:
            document = self.documents[index]
            offset = start - (self._ends[index] - document.tokens)
            length = min(remaining, document.stored - offset)
            if length:
                pieces.append(self._read(document, offset, length))
                remaining -= length
            if remaining and not document.dtype:
                pieces.append(torch.tensor([self.corpus.end_of_document], dtype=torch.int64, device="cpu"))
                remaining -= 1
            index, start = index + 1, self._ends[index]
        return torch.cat(pieces)

    def _read(self, document: Document, offset: int, length: int) -> Tensor:
        kind, size = TOKEN_DTYPES.get(document.dtype, np.dtype(np.uint8)), document.itemsize
        with reading(document.path):
            ids = np.fromfile(document.path, kind, length, offset=document.header + offset * size)
        if len(ids) != length:
            raise ConfigurationError(f"the data file {document.path} became shorter than {document.size} bytes")
        return torch.from_numpy(ids.astype(np.int64))

    def training(self, word: int) -> Tensor:
        """Return the sequence that a random 64-bit integer selects, as `packing.sequence`."""
        if self.rows is not None:
            return self._sequence(self.rows.rows[word % len(self.rows.rows)])
        return self._sequence([(word % (self.boundary - self.width + 1), self.width - 1)])

    def most_documents(self) -> int:
        """Return at least the largest number of documents in a training sequence; 0 if packing is "stream"."""
        if self.packing == STREAM:
            return 0
        if self.rows is not None:
            return 1 + max(map(len, self.rows.rows))
        starts, length = self._document_starts()[0], self.width - 1
        return 1 + int((np.searchsorted(starts, starts + length) - np.arange(len(starts))).max())

    def heldout(self, most: int) -> list[tuple[Document, Tensor]]:
        """Return at most `most` sequences, evenly spaced in the held-out part, and the document that each begins in."""
        span = self.tokens - self.boundary - self.width
        if self.heldout_rows is not None:
            rows = self.heldout_rows.rows
            count = min(most, len(rows))
            selected = [rows[len(rows) * i // count] for i in range(count)]
        else:
            count = min(most, span // self.width + 1) if span >= 0 else 0
            starts = [self.boundary + (span * i // (count - 1) if count > 1 else 0) for i in range(count)]
            selected = [[(start, self.width - 1)] for start in starts]
        return [(self.documents[bisect_right(self._ends, row[0][0])], self._sequence(row)) for row in selected]

    def _sequence(self, pieces: Sequence[tuple[int, int]]) -> Tensor:
        """Read a sequence: `pieces` are the first input and the number of inputs of its parts."""
        tokens = [self.window(start, length + 1) for start, length in pieces]
        return packs.sequence(tokens, self.width - 1, self.corpus.end_of_document, self.packing)


class Windows:
    """Sequences of seq_length tokens, their targets and, unless packing is "stream", their documents.

    Args:
        seq_length: tokens per sequence of the model.
        heldout: share of each source, at its end, for evaluation; ignored if the corpus has held-out documents.
        packing: one of `packing.PACKINGS`.
        global_batch: sequences per step, for the epochs of best-fit packing.

    `is_masked`: whether some targets may be IGNORED.
    """

    def __init__(
        self, corpus: Corpus, seq_length: int, heldout: float, packing: str = STREAM, global_batch: int = 1
    ) -> None:
        width, share = seq_length + 1, 0.0 if corpus.heldout_files else heldout
        self.packing, self.global_batch = packing, global_batch
        self.is_masked = packing == BEST_FIT or corpus.is_masked
        self.sources = [TokenStream(documents, corpus, width, share, packing) for documents in corpus.sources]
        self.weights = corpus.weights or (1.0,)
        self.tokens = sum(source.tokens for source in self.sources)
        self.apart = TokenStream(corpus.heldout, corpus, width, 1.0, packing) if corpus.heldout_files else None
        total = math.fsum(self.weights)
        self._limits = [round(_WORDS * sum_ / total) for sum_ in accumulate(self.weights)][:-1]

    def batch(self, seed: int, step: int, first: int, count: int) -> Tensor:
        """Return sequences `first` to `first + count` of a step's global batch: int64 [count, 2 or 4, seq_length]."""
        if self.rows and len(self.sources) == 1:
            begin, size = (step - 1) * self.global_batch + first, self.rows[0].num_rows
            places = [divmod(number, size) for number in range(begin, begin + count)]
            return torch.stack([self.sources[0].training(_epoch_order(seed, epoch, size)[n]) for epoch, n in places])
        random_bits = numerics.random_words(seed, step, _ORDER_STREAM, (first + count, 2), (first, 0), (count, 2))
        source_indices = self.chosen(seed, step, first, count)
        draws = zip(source_indices, random_bits.tolist(), strict=True)
        return torch.stack([self.sources[source].training(high << 32 | low) for source, (low, high) in draws])

    @property
    def rows(self) -> list[packs.PackedRows]:
        return [source.rows for source in self.sources if source.rows is not None]

    def chosen(self, seed: int, step: int, first: int, count: int) -> list[int]:
        if len(self.sources) == 1:
            return [0] * count
        random_bits = numerics.random_words(seed, step, _SOURCE_STREAM, (first + count, 1), (first, 0), (count, 1))
        return [bisect_right(self._limits, word) for [word] in random_bits.tolist()]

    def heldout(self, most: int) -> list[tuple[Document, Tensor]]:
        """Return held-out sequences as `TokenStream.heldout` does, divided over the sources by weight."""
        if self.apart is not None:
            return self.apart.heldout(most)
        shares = _apportioned(most, self.weights)
        return [pair for source, share in zip(self.sources, shares, strict=True) for pair in source.heldout(share)]


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, rows: int) -> list[int]:
    low, high = numerics.random_words(seed, epoch, _EPOCH_STREAM, (rows, 2)).unbind(1)
    return (high << 31 | low >> 1).sort(stable=True).indices.tolist()


def _apportioned(count: int, weights: Sequence[float]) -> list[int]:
    """Divide a number by weights: integer parts first, then one more for the largest remainders."""
    exact = [count * weight / math.fsum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return parts


class BatchLoader:
    """One rank's share of each step's batch, on its device; a thread prepares the next `AHEAD` batches.

    Args:
        make: pure function that returns the batch of a step.
        identity: values that determine the data, and must match the state in a checkpoint.

    `waited`: seconds that the last call of `batch` waited. `documents`: `most_documents` of its batch. An error in
    `make` is raised by the call for its step.
    """

    def __init__(
        self, make: Callable[[int], Tensor], device: torch.device, last: int, identity: Mapping[str, Any]
    ) -> None:
        self.make, self.device, self.last, self.identity = make, device, last, dict(identity)
        self.step, self.waited, self.documents = 0, 0.0, 0
        self._pool = ThreadPoolExecutor(1, "batches")
        self._ready: dict[int, Future[tuple[Tensor, int]]] = {}

    def batch(self, step: int) -> Tensor:
        """Return the batch of a step, and start to prepare the following ones."""
        start = time.perf_counter()
        steps = range(step, min(self.last, step + AHEAD) + 1)
        self._ready = {n: self._ready.get(n) or self._pool.submit(self._host_batch, n) for n in steps}
        batch, self.documents = self._ready.pop(step).result()
        batch = batch.to(self.device, non_blocking=True)
        self.step, self.waited = step, time.perf_counter() - start
        return batch

    def _host_batch(self, step: int) -> tuple[Tensor, int]:
        batch = self.make(step)
        return batch.pin_memory() if self.device.type == "cuda" else batch, packs.most_documents(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the last step, and what determines the order of the data."""
        return {"step": self.step, **self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a state."""
        for name, value in self.identity.items():
            if state.get(name, value) != value:
                raise CheckpointError(f"{name} was {str(state[name])[:80]}, not {value}; its data would differ")
        self.step = int(state["step"])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
