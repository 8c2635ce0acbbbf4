"""What the tensors of a step on the CPU take, counted at every operation, with kernels that do nothing.

Another count than the plan's: of real storages, resized ones too, under real FSDP2 over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quantshard as qs
from benchmarks import host
from quantshard import recipe
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.trainer import model as models
from quantshard.trainer.config import TrainSettings
from quantshard.trainer.loop import make_optimizer
from quantshard.trainer.mesh import MeshSpec


class StorageCounter(TorchDispatchMode):
    """The most bytes of living storages in each phase, but for those that are `given`; `phase` says which it is."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.phase, self.most = "", dict[str, int]()
        self._given = {StorageWeakRef(tensor.untyped_storage()).cdata: tensor for tensor in given}
        self._live: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, (QuantizedTensor, DTensor)):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._given:
                    self._live[reference.cdata] = reference, None
        self.look()
        return out

    def look(self) -> None:
        """Note what is there now."""
        held = 0
        for address, (reference, _) in list(self._live.items()):
            if reference.expired():
                del self._live[address]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            held += 0 if storage is None else storage.nbytes()
        self.most[self.phase] = max(self.most.get(self.phase, 0), held)


def plain_tensors(tensors: Iterable[Any]) -> list[Tensor]:
    """Local tensors, those of components among them."""
    found: list[Tensor] = []
    for tensor in tensors:
        quantized = components.quantized_local(tensor)
        if quantized is not None:
            found += [*quantized.quantized_storage.components.values(), *quantized.quantized_storage.state.values()]
        else:
            found.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return found


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*plain_tensors([*model.parameters(), *states]), *model.buffers()]
