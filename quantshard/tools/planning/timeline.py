"""Timeline of a step's memory on the meta device: each allocation with its begin, its end and its kind.

Allocations are the storages of tensors that operations return. Tensors on the meta device have storages with a size but
no memory, so a step can be measured that fits on no local device. PyTorch chooses an attention backend by device, and
on the meta device materializes query-key products. A GPU uses flash attention for 16-bit dtypes without a mask (or
cuDNN's, which saves the same), otherwise memory-efficient attention.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from quantshard import private_torch
from quantshard.modules import chunked_loss
from quantshard.modules.graphs.recorder import tensors_in
from quantshard.sharding import ceil_div
from quantshard.tensor.quantized_tensor import QuantizedTensor

_aten = torch.ops.aten

GRANULE = 512
"""PyTorch's CUDA allocator rounds each allocation up to a multiple of this many bytes."""


@dataclass(eq=False)
class Allocation:
    """Bytes, rounded up, that are allocated from moment `born` up to `died`. `kind`: the purpose, "" if unlabelled."""

    bytes: int
    born: int
    died: int = sys.maxsize
    kind: str = ""

    def lives(self, moment: int) -> bool:
        return self.born <= moment < self.died


@dataclass
class MemoryTimeline:
    """Allocations of all operations that run within `recorded`, as a GPU runs them, except `existing` tensors.

    Moments are numbers; each operation is one moment. A model's checks that all elements satisfy a condition (no
    padding token, one sequence per row) evaluate to true, because a training step has full sequences.
    """

    existing: Iterable[Tensor] = ()
    now: int = 0
    kind: str = ""
    allocations: list[Allocation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._live: dict[int, tuple[Any, Allocation]] = {}
        # References keep the ids of these storages from being reused.
        self._held = [tensor.untyped_storage() for tensor in self.existing]
        self._known = set(map(id, self._held))
        self._conditions = WeakTensorKeyDictionary()

    def recorded(self) -> AbstractContextManager[Any]:
        return private_torch.answer_operations(self.operation)

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """Label the allocations of the block as `kind`."""
        outer_kind, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer_kind

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function is _aten._local_scalar_dense.default and args[0] in self._conditions:
            return True
        if function is _aten._scaled_dot_product_flash_attention_backward.default:
            # the float32 sums of the gradient of queries
            self._add_scratch(args[1].numel() * 4)
        elif function in chunked_loss.OPERATORS:
            self._add_scratch(chunked_loss.logits_bytes(args))
        out = (_scaled_product if function is _aten._scaled_mm_v2.default else function)(*args, **kwargs)
        self.now += 1
        for tensor in tensors_in(out):
            self._add(tensor)
        if function is _aten.all.default:
            self._conditions[out] = True
        return out

    def _add_scratch(self, size: int) -> None:
        self.allocations.append(Allocation(size, self.now + 1, self.now + 2, self.kind))

    def tick(self) -> int:
        """Advance by a moment without an operation, so that what has been freed no longer counts."""
        self.now += 1
        return self.now

    def label(self, tensor: Tensor, kind: str) -> None:
        if entry := self._live.get(id(tensor.untyped_storage())):
            entry[1].kind = kind

    def _add(self, tensor: Tensor) -> None:
        # The components of a quantized tensor are recorded; the wrapper has no memory.
        if isinstance(tensor, QuantizedTensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._known or not storage.nbytes():
            return
        allocation = Allocation(GRANULE * ceil_div(storage.nbytes(), GRANULE), self.now, kind=self.kind)
        self.allocations.append(allocation)

        def end(_: Any) -> None:
            # The storage still existed while the running operation allocated.
            allocation.died = self.now + 1
            self._live.pop(key, None)

        # The storage object lives as long as its memory.
        self._live[key] = weakref.ref(storage, end), allocation

    def highest(self, begin: int, end: int) -> int:
        """The first moment in `begin`..`end` (inclusive) with the most allocated bytes."""
        changes: Counter[int] = Counter()
        for allocation in self.allocations:
            changes[max(allocation.born, begin)] += allocation.bytes * (allocation.died > begin)
            changes[allocation.died] -= allocation.bytes * (allocation.died > begin)
        moments = sorted(moment for moment in {*changes, begin} if moment <= end)
        totals = list(accumulate(changes[moment] for moment in moments))
        return moments[totals.index(max(totals))]


def meta_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _scaled_product(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    # others[7]: the output dtype
    return a.new_empty((a.shape[0], b.shape[1]), dtype=others[7])


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Make `torch.nn.functional.scaled_dot_product_attention` use a GPU's backend for tensors on the meta device.

    Backends that the caller disabled (`torch.nn.attention.sdpa_kernel`) are not used. A `TorchFunctionMode` would not
    do: PyTorch disables such modes in backward, where layers are recomputed.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


_original = F.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    plain = partial(_original, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not query.is_meta:
        return plain()
    backends = torch.backends.cuda
    is_flash = query.itemsize == 2 and attn_mask is None and query.shape[-1] <= 256
    if is_flash and (backends.flash_sdp_enabled() or backends.cudnn_sdp_enabled()):
        flash = _aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if query.ndim == 4 and query.shape[-3] == key.shape[-3] and backends.mem_efficient_sdp_enabled():
        bias = attn_mask
        if bias is not None:
            shape = (*query.shape[:-1], key.shape[-2])
            bias = (torch.empty_like(bias, dtype=query.dtype) if bias.dtype is torch.bool else bias).expand(shape)
        saves_logsumexp = query.requires_grad or key.requires_grad or value.requires_grad
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, saves_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    return plain()
