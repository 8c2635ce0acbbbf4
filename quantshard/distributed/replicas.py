"""Replicas: ranks that hold the whole model, as under DistributedDataParallel, and must start from the same bits.

DistributedDataParallel would broadcast weights as plain tensors. Pass `init_sync=False`, after calling one of the
functions here.
"""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard.collectives import process_groups, rank_checks
from quantshard.errors import ConfigurationError
from quantshard.tensor import components


def check_replicas(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks, or the ranks of a group, hold the same bits of an unsharded model.

    A collective call. Reads the whole model once and communicates 16 bytes per tensor. If a tensor differs, every rank
    raises a RankMismatchError that names it.
    """
    group = process_group or process_groups.world()
    live = _live_tensors(model)
    _check_same_model(model, live, group)
    digests = {name: _digest([_bytes(tensor)]) for name, tensor in live.items()}
    for name, initial in _initial_values(model).items():  # None too: only some ranks might keep them
        digests[f"{name} as initialized"] = _digest([] if initial is None else [_bytes(initial)])
    rank_checks.check_equal_on_ranks(
        digests, group, "the hash", f"{rank_checks.SEED_ALIKE}, or call quantshard.broadcast_(model)"
    )


@torch.no_grad()
def broadcast_(model: nn.Module, src: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
    """Copy the bits of rank `src`, numbered among all processes, to all ranks, of a model that is not sharded.

    A collective call, before the optimizer is built. Initial values that were kept for masters are sent too if every
    rank has them; otherwise they are dropped. If ranks built different models, every rank raises a RankMismatchError.
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
    for name, param in components.quantized_parameters(model).items():
        storage = components.storage_of(param)
        storage.mark_written()
        storage.keep_initial_values(initial_values.get(name))


def _live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that ranks must agree on, by name, except `_initial_values`: buffers and the state dict."""
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) or param.is_meta:
            where = "sharded" if isinstance(param, DTensor) else "on the meta device"
            raise ConfigurationError(f"{name} is {where}; pass a whole model, before fully_shard")
    live = {**dict(model.named_buffers()), **model.state_dict()}
    return {name: value for name, value in live.items() if isinstance(value, Tensor)}


def _initial_values(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the kept initial values of each quantized weight, which seed masters, or None."""
    weights = components.quantized_parameters(model)
    return {name: components.storage_of(param).initial_values() for name, param in weights.items()}


def _initial_values_of_all(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor]:
    initial_values = _initial_values(model)
    if not initial_values:
        return {}
    device = process_groups.collective_device(group)
    are_kept = [int(values is not None) for values in initial_values.values()]
    everywhere = torch.tensor(are_kept, dtype=torch.int32, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    kept_names = {name for name, is_kept in zip(initial_values, everywhere.tolist(), strict=True) if is_kept}
    return {name: values for name, values in initial_values.items() if name in kept_names and values is not None}


def _check_same_model(model: nn.Module, live: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    specs = [components.storage_of(param).spec for param in components.quantized_parameters(model).values()]
    described = [f"{name} {tensor.dtype} {tuple(tensor.shape)};" for name, tensor in live.items()]
    described += [f"{spec};" for spec in specs]
    digest = _digest(text.encode() for text in described)
    rank_checks.check_equal_on_ranks(
        {type(model).__name__: digest}, group, "the structure", "build the same model on all ranks"
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> Tensor:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)], dtype=torch.int64, device="cpu")
