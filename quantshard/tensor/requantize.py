"""New values for quantized weights: amaxes are measured, reduced over the ranks that share blocks, and codes written.

A block that straddles ranks must get one scale, so the amaxes of all blocks that ranks share are reduced (MAX) before
any code is written: the one collective that makes sharding invisible to the numbers. `FlatMax` does it for everything
that is registered in one flat collective per process group; `Requantization` is the two halves, measure and write, of
giving a weight new values around it.

Where several mesh axes shard a weight (FSDP over tensor parallelism), each component is reduced over those of them
that left its grid whole, axis by axis: one collective for each axis, whatever the components need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, limits, private_torch, sharding
from quantshard.argument_kinds import ITERABLE, check_arguments, suggests_names
from quantshard.collectives.delayed_scaling import history_amax, record_amax_
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups, sharding_group, united
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.kernel_dispatch import RandomWords
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import AMAX_HISTORY, QuantizedStorage, Remainder


def shared_scales(owner: Tensor, storage: QuantizedStorage) -> dict[str, tuple[dist.ProcessGroup, ...]]:
    """The components with amaxes whose blocks several ranks hold, each with the ranks to reduce them over.

    `owner`: the parameter whose storage, or a state of which, this is.
    """
    if not isinstance(owner, DTensor):
        return {}
    dims, by_name = private_torch.cut_dims(owner.placements), storage.cell.format.by_name
    axes = {
        name: sharding.whole_axes(storage.shard, by_name[name], dims) for name in storages.scale_names(storage.cell)
    }
    groups = {name: private_torch.axis_groups(owner.device_mesh, sorted(found)) for name, found in axes.items()}
    return {name: group for name, group in groups.items() if group}


class Requantization:
    """New values for one weight, or one optimizer state: measured at construction, written by `commit`.

    Between the two, the `reduction` given must have run. The values are not kept: `commit` takes them again. It drops
    the initial values that a weight may have kept (`get_high_precision_init_val`): it no longer has them.
    """

    def __init__(
        self, storage: QuantizedStorage, values: Tensor, shared: Mapping[str, Groups], reduction: FlatMax
    ) -> None:
        """`shared`: what `shared_scales` gives for the storage."""
        self.storage = storage
        self.amaxes = storage.measure(values)
        for name, grid in self.amaxes.items():
            reduction.add(grid, shared.get(name))

    def commit(self, values: Tensor, words: RandomWords | None = None, remainder: Remainder | None = None) -> None:
        """Write codes and scales. Under delayed scaling the scale is that of past amaxes, or of this one if it is
        larger, and this one is recorded. Arguments as of `QuantizedStorage.write`."""
        self.storage.high_precision = None
        history = self.storage.state.get(AMAX_HISTORY)
        if history is None:
            self.storage.write(values, self.amaxes, words, remainder)
            return
        (name,) = storages.scale_names(self.storage.cell)
        amax = self.amaxes[name]
        past = history_amax(history, self.storage.cell.scaling.most_recent)
        # as the kernels do: an infinite or NaN amax, which is not recorded either, changes no scale
        used = torch.where(torch.isfinite(amax), torch.maximum(past, amax), past)
        self.storage.write(values, {name: used.view(1, 1)}, words, remainder)
        record_amax_(history, amax.view(()))


@suggests_names
def requantize_(
    weights: Iterable[tuple[Tensor, Tensor]],
    *,
    names: Sequence[str] = (),
    assume_finite: bool = False,
    plain: Iterable[tuple[Tensor, Tensor]] = (),
) -> None:
    """Quantize new local values into weights, with one collective per sharding axis for all of them together.

    Under delayed scaling the amax history of each weight begins again, with the amax of its new values.

    Args:
        weights: pairs of a `QuantizedTensor`, or a DTensor of one, and its local values in high precision. All ranks
            must pass the same weights in the same order, ranks with an empty shard too.
        names: of the weights, for messages.
        judged: the caller knows that all values are finite, as an optimizer does that judged its gradients: nobody
            waits for a GPU to say so.
        plain: pairs of other parameters and their local values, which the caller writes afterwards. They are judged
            with the weights, unless `assume_finite`; in `names` theirs come last.

    Raises:
        ConfigurationError: values are infinite or NaN, which codes would hide: they saturate. It is raised on every
            rank that holds a piece of one of the weights, and nothing is written. Or values are of another shape.
        UnsupportedOperationError: a weight is a gathered copy; or a CUDA graph is being captured, and values are not
            `assume_finite`.
    """
    check_arguments("requantize_", ITERABLE, weights=weights, plain=plain)
    reduction, bad = FlatMax(), None
    weights = [(weight, _checked_values(weight, values)) for weight, values in weights]
    all_values = [*weights, *plain]
    if all_values and not assume_finite:
        bad = _are_bad(all_values)
        reduction.add(bad, united(sharding_group(param) for param, _ in all_values))
    begun = [
        (Requantization(storage, values, shared_scales(weight, storage), reduction), values)
        for weight, values in weights
        for storage in (_storage_of(weight),)
    ]
    reduction.reduce()
    if bad is not None:
        _check_finite(all_values, bad, names)
    for requantization, values in begun:
        requantization.storage.forget_amaxes()
        requantization.commit(values)
    for weight, _ in weights:
        torch.autograd.graph.increment_version(private_torch.local_tensor(weight))


def _checked_values(weight: Tensor, values: Tensor) -> Tensor:
    storage = _storage_of(weight)
    if storage.gathered:
        raise UnsupportedOperationError(
            f"{private_torch.local_tensor(weight)!r} is the copy that FSDP gathered, and what is written to it is "
            "lost; call reshard() on the FSDP-wrapped module first, and write to its sharded parameter"
        )
    if values.shape != storage.shard.shape:
        raise ConfigurationError(
            f"requantize_: the values of {private_torch.local_tensor(weight)!r} have shape {tuple(values.shape)}, not "
            f"{storage.shard.shape}"
        )
    return values


def _are_bad(weights: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Float32 [weights]: 1 where not all values are finite here."""
    if kernel_dispatch.is_capturing():
        raise UnsupportedOperationError(limits.refusal("captured values", private_torch.local_tensor(weights[0][0])))
    device = weights[0][1].device
    return torch.stack([1 - torch.isfinite(values).all().to(device, torch.float32) for _, values in weights])


def _check_finite(weights: Sequence[tuple[Tensor, Tensor]], bad: Tensor, names: Sequence[str]) -> None:
    for index, (at_fault, (weight, values)) in enumerate(zip(bad.tolist(), weights, strict=True)):
        if at_fault:
            name = names[index] if names else repr(private_torch.local_tensor(weight))
            is_quantized = hasattr(private_torch.local_tensor(weight), "quantized_storage")
            told = non_finite(values, _storage_of(weight).shard.origin if is_quantized else None)
            hidden = "codes saturate, which would hide it, so " if is_quantized else ""
            raise ConfigurationError(
                f"requantize_: {name}: {told or 'values that other ranks hold are infinite or NaN'}; {hidden}nothing "
                "was written. Look at where the values come from"
            )


def non_finite(values: Tensor, origin: tuple[int, ...] | None) -> str:
    """How many of some values are infinite or NaN, and where in the whole the first is; "" if none is.

    `origin`: of the values [R, C] in the whole; without one, of any shape, no place is told. It waits for a GPU.
    """
    bad = ~torch.isfinite(values)
    if not bad.any():
        return ""
    first = int(bad.flatten().to(torch.uint8).argmax())
    found, place = values.flatten()[first].item(), ""
    if origin is not None:
        at = [start + here for start, here in zip(origin, divmod(first, values.shape[1]), strict=True)]
        place = f", at {at}"
    return f"{int(bad.sum())} of {values.numel()} values are infinite or NaN, the first, {found}{place}"


def _storage_of(weight: Tensor) -> QuantizedStorage:
    local: Any = private_torch.local_tensor(weight)  # a QuantizedTensor, a class that imports this file
    storage: QuantizedStorage = local.quantized_storage
    return storage
