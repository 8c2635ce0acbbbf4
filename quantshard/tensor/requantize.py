"""New values for quantized weights: measure amaxes, reduce them over ranks that share blocks, write codes.

A block that straddles ranks must get one scale, so `FlatMax` reduces (MAX) the amaxes of shared blocks before any code
is written: the one collective that makes sharding invisible to the numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch, sharding
from quantshard.collectives.delayed_scaling import history_amax, record_amax_
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups, sharding_group, united
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.kernel_dispatch import RandomWords
from quantshard.tensor import storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY
from quantshard.tensor.storage import QuantizedStorage, Remainder


def shared_scales(owner: Tensor, storage: QuantizedStorage) -> dict[str, tuple[dist.ProcessGroup, ...]]:
    """Process groups to reduce amaxes over, by component, for the storage of a parameter or of one of its states."""
    if not isinstance(owner, DTensor):
        return {}
    dims, by_name = private_torch.cut_dims(owner.placements, owner.ndim), storage.spec.format.by_name
    names = storages.scale_names(storage.spec)
    axes = {name: sharding.whole_axes(storage.shard, by_name[name], dims) for name in names}
    groups = {name: private_torch.axis_groups(owner.device_mesh, sorted(mesh_axes)) for name, mesh_axes in axes.items()}
    return {name: group for name, group in groups.items() if group}


class Requantization:
    """New values for one weight or optimizer state: measured at construction, written by `commit`.
    The caller must run `reduction` in between. `shared`: the result of `shared_scales` for the storage."""

    def __init__(
        self, storage: QuantizedStorage, values: Tensor, shared: Mapping[str, Groups], reduction: FlatMax
    ) -> None:
        self.storage = storage
        self.amaxes = storage.measure(values)
        for name, grid in self.amaxes.items():
            reduction.add(grid, shared.get(name))

    def commit(self, values: Tensor, words: RandomWords | None = None, remainder: Remainder | None = None) -> None:
        """Write codes and scales; arguments as in `QuantizedStorage.write`.

        Under delayed scaling the scale derives from the larger of the past amaxes and the new one, which is recorded.
        """
        history = self.storage.state.get(AMAX_HISTORY)
        if history is None:
            self.storage.write(values, self.amaxes, words, remainder)
            return
        (name,) = storages.scale_names(self.storage.spec)
        amax = self.amaxes[name]
        past = history_amax(history, self.storage.spec.scaling.most_recent)
        # as in the kernels, an infinite or NaN amax is neither used nor recorded
        scale_amax = torch.where(torch.isfinite(amax), torch.maximum(past, amax), past)
        self.storage.write(values, {name: scale_amax.view(1, 1)}, words, remainder)
        record_amax_(history, amax.view(()))


def requantize_(
    weights: Iterable[tuple[Tensor, Tensor]], *, names: Sequence[str] = (), assume_finite: bool = False
) -> None:
    """Quantize new local values into weights, with one collective per sharding axis for all weights together.

    Under delayed scaling the amax history of each weight restarts with the amax of its new values.

    Args:
        weights: pairs of a `QuantizedTensor`, or a DTensor of one, and its local values in high precision. All ranks
            must pass the same weights in the same order, including ranks with an empty shard.
        names: names of the weights, for error messages.
        assume_finite: skip the check for infinite and NaN values, which waits for the GPU. Codes would hide these.
    """
    reduction, bad = FlatMax(), None
    weights = [(weight, _matrix(weight, values)) for weight, values in weights]
    if weights and not assume_finite:
        device = weights[0][1].device
        bad = torch.stack([1 - torch.isfinite(values).all().to(device, torch.float32) for _, values in weights])
        reduction.add(bad, united(sharding_group(weight) for weight, _ in weights))
    requantizations = [
        Requantization(_storage_of(weight), values, shared_scales(weight, _storage_of(weight)), reduction)
        for weight, values in weights
    ]
    reduction.reduce()
    if bad is not None:
        _check_finite(weights, bad, names)
    for requantization, (_, values) in zip(requantizations, weights, strict=True):
        requantization.storage.forget_amaxes()
        requantization.commit(values)
    for weight, _ in weights:
        torch.autograd.graph.increment_version(private_torch.local_tensor(weight))


def _matrix(weight: Tensor, values: Tensor) -> Tensor:
    """Check new values of a weight, and return them in the shape of its storage's rectangle."""
    storage, name = _storage_of(weight), repr(private_torch.local_tensor(weight))
    if storage.gathered:
        raise UnsupportedOperationError(f"requantize_: FSDP gathered {name}; call reshard(), and write to the shard")
    if values.shape not in (storage.shape, storage.shard.shape):
        raise ConfigurationError(f"requantize_: values of {name} are {tuple(values.shape)}, not {storage.shape}")
    return values.reshape(storage.shard.shape)


def _check_finite(weights: Sequence[tuple[Tensor, Tensor]], bad: Tensor, names: Sequence[str]) -> None:
    for index, (is_bad, (weight, values)) in enumerate(zip(bad.tolist(), weights, strict=True)):
        if is_bad:
            name = names[index] if names else repr(private_torch.local_tensor(weight))
            problem = non_finite(values, _storage_of(weight).shard.origin) or "infinite or NaN on other ranks"
            raise ConfigurationError(f"requantize_: {name}: {problem}; nothing was written")


def non_finite(values: Tensor, origin: Sequence[int]) -> str:
    """Describe the infinite and NaN values, with global indices; "" if there are none. Waits for the GPU."""
    bad = ~torch.isfinite(values)
    if not bad.any():
        return ""
    first = int(bad.flatten().to(torch.uint8).argmax())
    value, indices = values.flatten()[first].item(), list[int]()
    for start, size in zip(reversed(origin), reversed(values.shape), strict=True):
        first, offset = divmod(first, size)
        indices.insert(0, start + offset)
    return f"{int(bad.sum())} of {values.numel()} values are infinite or NaN, the first, {value}, at {indices}"


def _storage_of(weight: Tensor) -> QuantizedStorage:
    local: Any = private_torch.local_tensor(weight)  # a QuantizedTensor; its module imports this one
    storage: QuantizedStorage = local.quantized_storage
    return storage
