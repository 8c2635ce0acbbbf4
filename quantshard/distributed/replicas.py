"""Replicas: ranks that hold the whole model, as under DistributedDataParallel, and must start from the same bits.

DistributedDataParallel would broadcast weights as plain tensors. Pass `init_sync=False`, after calling one of the
functions here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard.collectives import flat_max, process_groups
from quantshard.errors import ConfigurationError
from quantshard.tensor import components


def check_replicas(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks hold the same bits: parameters, components, scales, random keys and buffers.

    A collective call, which every rank must make. Reads the whole model once and communicates 16 bytes per tensor.

    Args:
        model: a whole model, not sharded.
        process_group: the ranks to compare (default: all).

    Raises:
        RankMismatchError: on every rank, naming the first tensor that differs.
        ConfigurationError: the model is sharded, or on the meta device.
    """
    group = process_group or process_groups.world()
    live = _live_tensors(model)
    _check_same_model(model, live, group)
    digests = {name: _digest([_bytes(tensor)]) for name, tensor in live.items()}
    for name, initial in _initial_values(model).items():  # None too: only some ranks might keep them
        digests[f"{name} as initialized"] = _digest([] if initial is None else [_bytes(initial)])
    flat_max.check_equal_on_ranks(
        digests, group, "the hash", f"{flat_max.SEED_ALIKE}, or call quantshard.broadcast_(model)"
    )


@torch.no_grad()
def broadcast_(model: nn.Module, src: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
    """Copy the bits of rank `src` to all ranks: parameters, components, scales, random keys and buffers.

    A collective call, which every rank must make before building the optimizer. Initial values that were kept for
    masters are sent too if every rank has them; otherwise they are dropped.

    Args:
        model: a whole model, not sharded.
        src: the sending rank, numbered among all processes.
        process_group: the participating ranks (default: all).

    Raises:
        RankMismatchError: on every rank, if ranks built different models.
        ConfigurationError: the model is sharded, or on the meta device.
    """
    group = process_group or process_groups.world()
    live = _live_tensors(model)
    _check_same_model(model, live, group)
    if group is None:
        return
    initial_values = _initial_values_of_all(model, group)
    for tensor in [*live.values(), *initial_values.values()]:
        sent = tensor.detach().to(process_groups.collective_device(group)).contiguous()
        dist.broadcast(sent.reshape(-1).view(torch.uint8), src, group=group)
        tensor.copy_(sent)
    for name, param in model.named_parameters():
        quantized = components.quantized_local(param)
        if quantized is not None:
            quantized.quantized_storage.mark_written()
            quantized.quantized_storage.keep_initial_values(initial_values.get(name))


def _live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that ranks must agree on, by name, except `_initial_values`: buffers and the state dict."""
    live: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) or param.is_meta:
            where = "sharded" if isinstance(param, DTensor) else "on the meta device"
            raise ConfigurationError(
                f"{name} is {where}; check_replicas and broadcast_ are for whole models, and models under fully_shard "
                "do not need them"
            )
    live.update(model.named_buffers())
    live.update(model.state_dict())
    return {name: value for name, value in live.items() if isinstance(value, Tensor)}


def _initial_values(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the kept initial values of each quantized weight, which seed masters, or None."""
    weights = ((name, components.quantized_local(param)) for name, param in model.named_parameters())
    return {name: weight.get_high_precision_init_val() for name, weight in weights if weight is not None}


def _initial_values_of_all(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the initial values that every rank has kept."""
    initial_values = _initial_values(model)
    if not initial_values:
        return {}
    device = process_groups.collective_device(group)
    everywhere = torch.tensor(
        [int(values is not None) for values in initial_values.values()], dtype=torch.int32, device=device
    )
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return {name: values for (name, values), is_kept in zip(initial_values.items(), everywhere.tolist(), strict=True)
            if is_kept and values is not None}  # fmt: skip


def _check_same_model(model: nn.Module, live: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    described = [f"{name} {tensor.dtype} {tuple(tensor.shape)};" for name, tensor in live.items()]
    described += [
        f"{components.storage_of(p).spec};" for p in model.parameters() if components.quantized_local(p) is not None
    ]
    digest = _digest(text.encode() for text in described)
    flat_max.check_equal_on_ranks(
        {type(model).__name__: digest}, group, "the structure", "build the same model on all ranks"
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> Tensor:
    """Hash bytes to int64 [1]."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)], dtype=torch.int64, device="cpu")
