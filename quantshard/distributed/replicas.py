"""Replicas: ranks that hold the whole model, as under DistributedDataParallel, must start from the same bits

DistributedDataParallel would copy weights as plain tensors, so it is told not to (`init_sync=False`), after one of the
functions here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard.argument_kinds import MODULE, PROCESS_GROUP, check_arguments, suggests_names
from quantshard.collectives import flat_max, process_groups
from quantshard.errors import ConfigurationError
from quantshard.tensor import components


@suggests_names
def check_replicas(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks hold the same bits: parameters, components, scales, random keys and buffers.

    A collective call: every rank must make it. It reads the whole model once, and communicates 16 bytes per tensor.

    Args:
        model: a whole model, not sharded.
        process_group: the ranks to compare (default: all).

    Raises:
        RankMismatchError: on every rank, naming the first tensor that differs.
        ConfigurationError: the model is sharded, or on the meta device.
    """
    check_arguments("check_replicas", MODULE, model=model)
    check_arguments("check_replicas", PROCESS_GROUP.or_none, process_group=process_group)
    group = process_group or process_groups.world()
    live = _live_tensors(model)
    _check_same_model(model, live, group)
    digests = {name: _digest([_bytes(tensor)]) for name, tensor in live.items()}
    flat_max.check_equal_on_ranks(
        digests, group, "the hash", f"{flat_max.SEED_ALIKE}, or call quantshard.broadcast_(model)"
    )


@suggests_names
@torch.no_grad()
def broadcast_(model: nn.Module, src: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks the bits of rank `src`: parameters, components, scales, random keys and buffers.

    A collective call: every rank must make it, before the optimizer is built.

    Args:
        model: a whole model, not sharded.
        src: the rank, among all processes, whose bits are sent.
        process_group: the ranks that take part (default: all).

    Raises:
        RankMismatchError: on every rank, if ranks built different models.
        ConfigurationError: the model is sharded, or on the meta device.
    """
    check_arguments("broadcast_", MODULE, model=model)
    check_arguments("broadcast_", PROCESS_GROUP.or_none, process_group=process_group)
    group = process_group or process_groups.world()
    live = _live_tensors(model)
    _check_same_model(model, live, group)
    if group is None:
        return
    for tensor in live.values():
        sent = tensor.detach().to(process_groups.collective_device(group)).contiguous()
        dist.broadcast(sent.reshape(-1).view(torch.uint8), src, group=group)
        tensor.copy_(sent)
    for param in model.parameters():
        quantized = components.quantized_local(param)
        if quantized is not None:
            quantized.quantized_storage.mark_written()


def _live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that ranks must agree on, by name: what a state dict holds, and what masters are seeded from."""
    live: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) or param.is_meta:
            where = "sharded" if isinstance(param, DTensor) else "on the meta device"
            raise ConfigurationError(
                f"{name} is {where}, but replicas are compared whole; models under fully_shard need neither "
                "check_replicas nor broadcast_: FusedAdam and reset_parameters compare their random keys"
            )
        quantized = components.quantized_local(param)
        kept = None if quantized is None else quantized.get_high_precision_init_val()
        if kept is not None:
            live[f"{name} as initialized"] = kept
    live.update(model.named_buffers())
    live.update(model.state_dict())
    return {name: value for name, value in live.items() if isinstance(value, Tensor)}


def _check_same_model(model: nn.Module, live: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    described = [f"{name} {tensor.dtype} {tuple(tensor.shape)};" for name, tensor in live.items()]
    described += [
        f"{components.storage_of(p).cell};" for p in model.parameters() if components.quantized_local(p) is not None
    ]
    digest = _digest(text.encode() for text in described)
    flat_max.check_equal_on_ranks(
        {type(model).__name__: digest}, group, "the structure", "build the same model on all ranks"
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> Tensor:
    """int64 [1]"""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return torch.tensor([int.from_bytes(found.digest(), "little", signed=True)], dtype=torch.int64, device="cpu")
