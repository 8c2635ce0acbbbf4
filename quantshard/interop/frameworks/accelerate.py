"""Hugging Face accelerate: `prepare` for models with quantized weights, where `Accelerator.prepare` alone falls short.

`Accelerator.prepare(model, optimizer)` takes such a model under FSDP2 as it is. `prepare` here adds what it lacks:
optimizers made after sharding (so that no rank holds masters of the whole model), `cpu_ram_efficient_loading`, models
of which ranks hold nothing yet, DDP, and refusals by name. With this module imported, accelerate's loads of files that
hold codes refuse models that are not converted.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, checkpointing
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, constants, fsdp_utils, modeling
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.from_rank0 import load_from_rank0
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.checkpoints.untrusted.reader import read_whole
from quantshard.collectives import process_groups
from quantshard.distributed.replicas import broadcast_, check_replicas
from quantshard.errors import CheckpointError, ConfigurationError, warn_user
from quantshard.optimizers import optimizer_members
from quantshard.tensor import components

OptimizerFactory = Callable[[Iterator[tuple[str, nn.Parameter]]], Optimizer]
"""Makes an optimizer of `model.named_parameters()`, as `functools.partial(FusedAdam, lr=3e-4)` does."""

_Names = list[list[str]]

_OPTIMIZERS = "_optimizers"
"""An Accelerator's list of those that it has prepared, from which there is no public way to take one."""


@dataclass
class ReplicaArguments(DistributedDataParallelKwargs):
    """accelerate's arguments of DistributedDataParallel, and `init_sync`, which it leaves out.

    DistributedDataParallel would copy quantized weights as plain tensors; `broadcast_` has made ranks equal before.
    """

    init_sync: bool = True


def replica_arguments(accelerator: Accelerator) -> ReplicaArguments:
    """An accelerator's arguments of DistributedDataParallel, which is told not to copy weights."""
    known = accelerator.ddp_handler
    return ReplicaArguments(**{**({} if known is None else vars(known)), "init_sync": False})


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any) -> Any:
    """`accelerator.prepare(model, *others)` for a model with quantized weights. A collective call of all processes.

    Under FSDP2 an optimizer may be given as a function, which is called with the sharded `model.named_parameters()`;
    one that exists already gets the sharded parameters, by name, in place of the whole ones, and new states. With
    `cpu_ram_efficient_loading` the values are those of rank 0, and the model may lie on the meta device on all other
    ranks; without it, a model that is on the meta device everywhere is sharded there, and its optimizer has to wait
    until it has values. Under DDP all ranks get the bits of rank 0.

    Args:
        accelerator: with FSDP2, DDP or one process.
        model: as `convert` or `quantized_model_init` makes it.
        others: optimizers or functions that make them, schedulers, data loaders.

    Returns:
        The model and the others, in their order; the model alone if there are no others.

    Raises:
        ConfigurationError: the model has no quantized weight; accelerate is set to what does not work with them; an
            optimizer has parameters that the model has not, or states that sharding would lose.
        CheckpointError: ranks have different models, and rank 0's is read.
        RankMismatchError: ranks hold different bits, and shard what they hold.
    """
    _check_model(model)
    _check_settings(accelerator)
    if not accelerator.is_fsdp2:
        return _replicated(accelerator, model, others)
    named = dict(model.named_parameters())
    names = {at: _names_in(each, named) for at, each in enumerate(others) if isinstance(each, Optimizer)}
    model = _sharded(accelerator, model)
    named = _by_canonical_name(model)
    ready: dict[int, Any] = {}
    for at, each in enumerate(others):
        if at in names:
            _follow(each, names[at], named)
        if at in names or _is_factory(each):
            made = each if at in names else each(iter(named.items()))
            ready[at] = accelerator.prepare_optimizer(made, device_placement=False)
    rest = [at for at in range(len(others)) if at not in ready]
    if rest:
        found = accelerator.prepare(*[others[at] for at in rest])
        ready.update(zip(rest, found if len(rest) > 1 else [found], strict=True))
    wrapped = [each for each in ready.values() if isinstance(each, AcceleratedOptimizer)]
    optimizer_members.warn_of_unheld(model, [each.optimizer for each in wrapped])
    return (model, *(ready[at] for at in range(len(others)))) if others else model


# Checks --------------------------------------------------------------------------------------------------------------


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"prepare(accelerator, model={type(model).__name__}): give the model first")
    if not components.quantized_parameters(model):
        raise ConfigurationError(
            f"prepare: {type(model).__name__} has no quantized weight; call quantshard.convert(model, recipe) before, "
            "or accelerator.prepare, which takes plain models"
        )


def _check_settings(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigurationError(
            f"prepare: accelerate runs {kind.value}, which keeps flat copies of parameters; use FSDP2 "
            "(FullyShardedDataParallelPlugin(fsdp_version=2)) or DDP"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigurationError(
            "prepare: FSDP1 flattens parameters into one of another dtype; set "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in the configuration file"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and kind != DistributedType.FSDP:
        warn_of_replicas(accelerator)  # a plugin sets that variable too
    if accelerator.mixed_precision == "fp8":
        raise ConfigurationError(
            "prepare: mixed_precision='fp8' makes accelerate convert layers to torchao's or TransformerEngine's; "
            "quantshard.convert has chosen the recipe, so set 'bf16' or 'no'"
        )
    if accelerator.is_fsdp2 and "FULL" in str(accelerator.state.fsdp_plugin.state_dict_type):
        raise ConfigurationError(
            "prepare: state_dict_type=FULL_STATE_DICT writes codes and scales that load_state would send one without "
            "the other; set state_dict_type='SHARDED_STATE_DICT', and quantshard.layouts.export for one file"
        )


def warn_of_replicas(accelerator: Accelerator) -> None:
    """Tell that accelerate was asked for FSDP, and does something else."""
    warn_user(
        f"accelerate was asked for FSDP and runs {accelerator.distributed_type.value}, so each process holds the whole "
        "model; it shards on GPUs alone, over processes that its launcher or torchrun has started, and not with a CPU "
        "asked for (cpu=True, use_cpu=True)"
    )


def _names_in(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> _Names:
    """The names of an optimizer's parameters, by group and position."""
    by_identity = {id(param): _canonical_name(name) for name, param in named.items()}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in by_identity:
                raise ConfigurationError(
                    f"prepare: parameter {position} of group {number} of {type(optimizer).__name__}, of shape "
                    f"{tuple(param.shape)}, is none of the model's; build the optimizer over this model's parameters, "
                    "after convert"
                )
    return [[by_identity[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _is_factory(other: object) -> bool:
    known = (Optimizer, nn.Module, torch.utils.data.DataLoader, torch.optim.lr_scheduler.LRScheduler)
    return callable(other) and not isinstance(other, known)


# DDP and one process -------------------------------------------------------------------------------------------------


def _replicated(accelerator: Accelerator, model: nn.Module, others: tuple[Any, ...]) -> Any:
    model.to(accelerator.device)
    for each in others:
        if isinstance(each, Optimizer):
            _names_in(each, dict(model.named_parameters()))
    if process_groups.world() is not None:
        broadcast_(model)
        accelerator.ddp_handler = replica_arguments(accelerator)
        for each in others:
            if hasattr(each, "reseed_masters"):
                each.reseed_masters()  # of the bits that have come from rank 0
    made = [each(model.named_parameters()) if _is_factory(each) else each for each in others]
    optimizer_members.warn_of_unheld(model, [each for each in made if isinstance(each, Optimizer)])
    return accelerator.prepare(model, *made)


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def _sharded(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """The model, sharded by accelerate's own policy.

    accelerate shards together with an optimizer, whose parameters it finds again by addresses, which those on the meta
    device and empty shards do not have. So it gets another optimizer than those that will step, which is forgotten.
    """
    plugin = accelerator.state.fsdp_plugin
    from_rank0 = bool(plugin.cpu_ram_efficient_loading) and not isinstance(model, FSDPModule)
    state = agreement.alike(lambda: _taken(model) if from_rank0 else {}, "prepare: ")
    if not from_rank0:
        check_before_sharding(model)
    stand_in = torch.optim.SGD(model.parameters(), lr=0.0)
    with _without_ram_efficient_loading(plugin):
        model, stand_in = accelerator.prepare(model, stand_in)
    vars(accelerator)[_OPTIMIZERS].remove(stand_in)  # else save_state would write it
    if from_rank0:
        _fill(accelerator, model, state)
    return model


def check_before_sharding(model: nn.Module) -> None:
    """Check that ranks, of which each will keep its part of what it holds, hold one model: where all of them hold the
    whole, with values. A collective call.

    Raises:
        RankMismatchError: they hold different bits.
    """
    params = components.named_parameters(model).values()
    if all(agreement.gathered(not any(param.is_meta or isinstance(param, DTensor) for param in params))):
        check_replicas(model)


@contextmanager
def _without_ram_efficient_loading(plugin: Any) -> Iterator[None]:
    """accelerate's own sends entries one by one, and takes all of them for DTensors."""
    before, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = before


def _taken(model: nn.Module) -> dict[str, Tensor]:
    """On rank 0 all values of a model, which is then on the meta device, as on the other ranks."""
    params = list(model.named_parameters(remove_duplicate=False))
    if len({id(param) for _, param in params}) < len(params):
        raise ConfigurationError(
            "cpu_ram_efficient_loading moves the model to the meta device, which parts tied weights (of "
            f"{len(params)} parameters {len({id(param) for _, param in params})} are different); set "
            "cpu_ram_efficient_loading=False, or tie_word_embeddings=False in the model's config"
        )
    values: dict[str, Tensor] = {}
    if agreement.rank() == 0:
        values = dict(model.named_buffers()) | model.state_dict()
        for name, param in params:
            if param.is_meta:
                raise ConfigurationError(
                    f"{name} is on the meta device on rank 0, whose values cpu_ram_efficient_loading sends; load the "
                    "model on rank 0, or set cpu_ram_efficient_loading=False and load_high_precision after prepare"
                )
            quantized = components.quantized_local(param)
            if quantized is not None and quantized.get_high_precision_init_val() is not None:
                raise ConfigurationError(
                    f"{name} keeps its high-precision initial values, which cpu_ram_efficient_loading does not send; "
                    "set cpu_ram_efficient_loading=False, or call convert without preserve_high_precision_init_val"
                )
    model.to("meta")
    return values


def _fill(accelerator: Accelerator, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a sharded model on the meta device the values of rank 0."""
    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    model.to_empty(device=torch.device("cpu") if offloads else accelerator.device)
    live = model.state_dict()
    load_from_rank0(
        model,
        # `mixed_precision` has made trained parameters float32
        {k: v.to(live[k].dtype) if v.is_floating_point() else v for k, v in values.items() if k in live},
    )
    for name, buffer in model.named_buffers():
        if name not in live:
            _send(buffer, values.get(name))


def _send(buffer: Tensor, value: Tensor | None) -> None:
    """Give all ranks a buffer of rank 0 that no state dict has."""
    if value is not None:
        buffer.copy_(value)
    group = process_groups.world()
    if group is not None:
        sent = buffer.to(process_groups.collective_device(group)).contiguous()
        dist.broadcast(sent, src=0, group=group)
        buffer.copy_(sent)


def _by_canonical_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return {_canonical_name(name): param for name, param in model.named_parameters()}


def _canonical_name(name: str) -> str:
    """Without the parts that torch.compile and activation checkpointing add."""
    return components.canonical_name(name).replace("_orig_mod.", "")


def _follow(optimizer: Optimizer, names: _Names, named: Mapping[str, nn.Parameter]) -> None:
    """Put a model's sharded parameters into an optimizer that was built over the whole ones."""
    adopts = hasattr(optimizer, "reseed_masters")
    if not adopts and optimizer.state:
        raise ConfigurationError(
            f"prepare: {type(optimizer).__name__} has states of {len(optimizer.state)} whole parameters, which "
            "sharding would lose; prepare before the first step, and load_state after"
        )
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [named[name] for name in members]
    if adopts:
        optimizer.zero_grad()  # looks at its groups, and frees the masters of whole parameters


# Codes that would be read as values ----------------------------------------------------------------------------------

_LOADS: dict[str, tuple[Callable[..., Any], Callable[[Mapping[str, Any]], None]]] = {}
"""accelerate's functions that load files into models, by name, with what looks at their arguments before."""


def guard_loads() -> None:
    """Let accelerate load no codes as values into a plain model, also where its functions were imported before.

    With `strict=False`, `load_checkpoint_in_model`'s default, it would copy codes and leave their scales out; and so
    does PyTorch of a sharded checkpoint, always.
    """
    for name, (plain, check) in _LOADS.items():
        guarded = _looking_before(plain, check)
        for home in list(sys.modules.values()):
            if getattr(home, "__dict__", {}).get(name) is plain:
                setattr(home, name, guarded)


def _looking_before(plain: Callable[..., Any], check: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    takes = inspect.signature(plain)

    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        check(takes.bind(*args, **kwargs).arguments)
        return plain(*args, **kwargs)

    return load


def _check_checkpoint(given: Mapping[str, Any]) -> None:
    """Of `load_checkpoint_in_model`."""
    path = Path(given["checkpoint"])
    files = [path]
    if path.is_dir():
        whole = [path / name for name in (constants.WEIGHTS_NAME, constants.SAFE_WEIGHTS_NAME)]
        files = [each for each in whole if each.is_file()][:1] or [*path.glob("*.index.json")]
    if len(files) == 1 and files[0].suffix == ".json" and files[0].is_file():
        index = json.loads(files[0].read_text())
        files = [files[0].parent / name for name in sorted({*index.get("weight_map", index).values()})]
    _check_model_takes(given["model"], _tags_in(files), str(path))


def _check_state(given: Mapping[str, Any]) -> None:
    """Of `Accelerator.load_state`, with DDP or one process."""
    for number, model in enumerate(given["models"]):
        ending = f"_{number}" if number else ""
        names = f"{constants.SAFE_MODEL_NAME}{ending}.safetensors", f"{constants.MODEL_NAME}{ending}.bin"
        files = [path for name in names if (path := Path(given["input_dir"]) / name).is_file()]
        _check_model_takes(model, _tags_in(files[:1]), str(given["input_dir"]))


def _check_sharded_state(given: Mapping[str, Any]) -> None:
    """Of `Accelerator.load_state` and the Trainer of transformers, under FSDP."""
    name = f"{constants.FSDP_MODEL_NAME}_{given.get('model_index', 0)}"
    folder = Path(given["input_dir"])
    folder = folder if folder.name == name else folder / name
    if "SHARDED" not in str(given["fsdp_plugin"].state_dict_type) or not (folder / ".metadata").is_file():
        return
    try:
        metadata = read_metadata(folder)
        keys = [key for key in metadata.state_dict_metadata if key.endswith(components.FORMAT_SUFFIX)]
        tags = read_whole(folder, metadata, keys) if keys else {}
    except CheckpointError:
        return  # of another program, or damaged, which PyTorch tells
    _check_model_takes(given["model"], {key.removeprefix("model."): tag for key, tag in tags.items()}, str(folder))


def _tags_in(files: Iterable[Path]) -> dict[str, Tensor]:
    """The format tags in files of a state dict, by their keys; of what cannot be read accelerate tells."""
    tags: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            continue
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as opened:
                found = {key: opened.get_tensor(key) for key in opened.keys() if key.endswith(components.FORMAT_SUFFIX)}
        else:
            try:
                found = dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
            except (OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
                continue
        tags |= {key: value for key, value in found.items() if str(key).endswith(components.FORMAT_SUFFIX)}
    return tags


def _check_model_takes(model: nn.Module, tags: Mapping[str, Tensor], path: str) -> None:
    """Refuse quantized weights of a file for weights in high precision.

    Raises:
        CheckpointError: the model has one of them in high precision.
    """
    own = {_without_wrapper(name): param for name, param in components.named_parameters(model).items()}
    names = {_without_wrapper(key.removesuffix(components.FORMAT_SUFFIX)): tag for key, tag in tags.items()}
    wrong = [name for name, param in own.items() if name in names and components.quantized_local(param) is None]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        tag = components.read_format_tag(names[wrong[0]])
        raise CheckpointError(
            f"{path} holds quantized weights, {wrong[0]} of format {tag}{more}, "
            f"which this {type(model).__name__} has in high precision, so that their codes would be read as values; "
            "call quantshard.convert(model, recipe) first, with the recipe that was saved"
        )


def _without_wrapper(name: str) -> str:
    """Without what DistributedDataParallel and torch.compile put in front."""
    return _canonical_name(name).removeprefix("module.")


_LOADS |= {
    "load_checkpoint_in_model": (modeling.load_checkpoint_in_model, _check_checkpoint),
    "load_accelerator_state": (checkpointing.load_accelerator_state, _check_state),
    "load_fsdp_model": (fsdp_utils.load_fsdp_model, _check_sharded_state),
}
guard_loads()
