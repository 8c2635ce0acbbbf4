"""Attention masks of transformers during a capture: the same as in eager steps.

While a CUDA graph is captured, transformers believes that it is traced and may not read values. It then builds explicit
masks where eager steps rely on causal attention, which is several times slower.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MODULE = "transformers.masking_utils"


@contextmanager
def as_in_eager_steps(arguments: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Make transformers build the masks of eager steps during a capture.

    Masks that depend on the values of an argument stay explicit, because each replay may have other values. Position
    ids that the step makes itself are taken as one sequence per row, as in training without packing. The list that is
    yielded gets a flag for each of them, which a replay sets if rows do contain several sequences.

    `arguments`: the tensors that the graph reads the step's arguments from.
    """
    module: Any = sys.modules.get(MODULE)
    is_tracing, packed_indices = (
        getattr(module, name, None) for name in ("is_tracing", "find_packed_sequence_indices")
    )
    flags: list[Tensor] = []
    if is_tracing is None or packed_indices is None:
        yield flags
        return
    memory = {tensor.untyped_storage().data_ptr() for tensor in arguments}

    def traces(tensor: Tensor | None = None) -> bool:
        # without a mask there are no values to read
        return False if tensor is None and not torch.compiler.is_compiling() else bool(is_tracing(tensor))

    def indices(position_ids: Tensor) -> Tensor | None:
        sequences: Tensor | None = packed_indices(position_ids)
        if sequences is None or position_ids.untyped_storage().data_ptr() in memory:
            return sequences
        flags.append((sequences[:, -1] != 0).any())
        return None

    with mock.patch.multiple(module, is_tracing=traces, find_packed_sequence_indices=indices):
        yield flags
