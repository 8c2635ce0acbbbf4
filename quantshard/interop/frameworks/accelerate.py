"""Hugging Face accelerate: `prepare` for models with quantized weights.

`Accelerator.prepare(model, optimizer)` handles such models under FSDP2. `prepare` in this module also supports
optimizers built after sharding (so that no rank holds masters of the whole model), `cpu_ram_efficient_loading`, models
that are on the meta device on all ranks, and DDP, and raises for unsupported settings. Importing this module also makes
accelerate's loading functions reject files of quantized weights for models that are not converted.
"""

from __future__ import annotations

import functools
import inspect
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
from accelerate.utils import DistributedDataParallelKwargs, constants, fsdp_utils, modeling
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.from_rank0 import load_from_rank0
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.collectives import process_groups
from quantshard.distributed.replicas import broadcast_, check_replicas
from quantshard.errors import CheckpointError, ConfigurationError, warn_user
from quantshard.foreign import FILE_BYTES, read_json
from quantshard.tensor import components

OptimizerFactory = Callable[[Iterator[tuple[str, nn.Parameter]]], Optimizer]
"""Builds an optimizer from `model.named_parameters()`, for example `functools.partial(FusedAdam, lr=3e-4)`."""

_Names = list[list[str]]

_OPTIMIZERS = "_optimizers"
"""An Accelerator's list of prepared optimizers, which has no public method to remove one."""


@dataclass
class ReplicaArguments(DistributedDataParallelKwargs):
    """accelerate's arguments of DistributedDataParallel plus `init_sync`, which accelerate lacks.

    DistributedDataParallel would copy quantized weights as plain tensors; `broadcast_` makes the ranks equal instead.
    """

    init_sync: bool = True


def replica_arguments(accelerator: Accelerator) -> ReplicaArguments:
    """Return an accelerator's DistributedDataParallel arguments with `init_sync=False`, so that weights are not
    copied."""
    current = accelerator.ddp_handler
    return ReplicaArguments(**{**({} if current is None else vars(current)), "init_sync": False})


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any) -> Any:
    """`accelerator.prepare(model, *others)` for a model with quantized weights. A collective call on all processes.

    Under FSDP2, an optimizer can be a function, which is called with the sharded `model.named_parameters()`. An
    existing optimizer gets the sharded parameters, matched by name, and new states. With `cpu_ram_efficient_loading`,
    rank 0's values are used, and the model can be on the meta device on other ranks. Without it, a model on the meta
    device on all ranks is sharded there; build its optimizer after loading values. Under DDP, all ranks get rank 0's
    bits.

    Args:
        accelerator: configured for FSDP2, DDP or one process.
        model: a model from `convert` or `quantized_model_init`.
        others: optimizers or optimizer functions, schedulers and data loaders.

    Returns:
        The model and the others, in order; only the model if there are no others.

    Raises:
        ConfigurationError: the model has no quantized weight, accelerate's settings are unsupported, or an optimizer
            has parameters of another model or states that sharding would lose.
        CheckpointError: ranks have different models while rank 0's is sent.
        RankMismatchError: ranks hold different bits while each shards its own.
    """
    _check_model(model)
    _check_settings(accelerator)
    if not accelerator.is_fsdp2:
        return _replicated(accelerator, model, others)
    params_by_name = dict(model.named_parameters())
    names = {index: _names_in(arg, params_by_name) for index, arg in enumerate(others) if isinstance(arg, Optimizer)}
    model = _sharded(accelerator, model)
    params_by_name = _by_canonical_name(model)
    prepared: dict[int, Any] = {}
    for index, arg in enumerate(others):
        if index in names:
            _follow(arg, names[index], params_by_name)
        if index in names or _is_factory(arg):
            optimizer = arg if index in names else arg(iter(params_by_name.items()))
            prepared[index] = accelerator.prepare_optimizer(optimizer, device_placement=False)
    remaining = [index for index in range(len(others)) if index not in prepared]
    if remaining:
        results = accelerator.prepare(*[others[index] for index in remaining])
        prepared.update(zip(remaining, results if len(remaining) > 1 else [results], strict=True))
    return (model, *(prepared[index] for index in range(len(others)))) if others else model


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
        # plugins set this variable too
        warn_of_replicas(accelerator)
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
    """Warn that accelerate was configured for FSDP but runs without it."""
    warn_user(
        f"accelerate was asked for FSDP and runs {accelerator.distributed_type.value}, so each process holds the whole "
        "model; it shards on GPUs alone, over processes that its launcher or torchrun has started, and not with a CPU "
        "asked for (cpu=True, use_cpu=True)"
    )


def _names_in(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> _Names:
    """Return the names of an optimizer's parameters, by group and position."""
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
    other_kinds = (Optimizer, nn.Module, torch.utils.data.DataLoader, torch.optim.lr_scheduler.LRScheduler)
    return callable(other) and not isinstance(other, other_kinds)


# DDP and one process -------------------------------------------------------------------------------------------------


def _replicated(accelerator: Accelerator, model: nn.Module, others: tuple[Any, ...]) -> Any:
    model.to(accelerator.device)
    for arg in others:
        if isinstance(arg, Optimizer):
            _names_in(arg, dict(model.named_parameters()))
    if process_groups.world() is not None:
        broadcast_(model)
        accelerator.ddp_handler = replica_arguments(accelerator)
        for arg in others:
            if hasattr(arg, "reseed_masters"):
                arg.reseed_masters()  # from rank 0's bits
    objects = [arg(model.named_parameters()) if _is_factory(arg) else arg for arg in others]
    return accelerator.prepare(model, *objects)


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def _sharded(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard the model by accelerate's own policy.

    accelerate shards together with an optimizer and matches its parameters by address, which does not work for the meta
    device or empty shards. So accelerate gets a dummy optimizer, which is discarded.
    """
    plugin = accelerator.state.fsdp_plugin
    from_rank0 = bool(plugin.cpu_ram_efficient_loading) and not isinstance(model, FSDPModule)
    state = agreement.run_on_all_ranks(lambda: _taken(model) if from_rank0 else {}, "prepare: ")
    if not from_rank0:
        check_before_sharding(model)
    dummy = torch.optim.SGD(model.parameters(), lr=0.0)
    with _without_ram_efficient_loading(plugin):
        model, dummy = accelerator.prepare(model, dummy)
    vars(accelerator)[_OPTIMIZERS].remove(dummy)  # save_state would write it
    if from_rank0:
        _fill(accelerator, model, state)
    return model


def check_before_sharding(model: nn.Module) -> None:
    """Check that all ranks hold the same model before each keeps its shard. A collective call.

    Skipped unless all ranks hold the whole model with values.

    Raises:
        RankMismatchError: ranks hold different bits.
    """
    params = components.named_parameters(model).values()
    if all(agreement.all_gather_object(not any(param.is_meta or isinstance(param, DTensor) for param in params))):
        check_replicas(model)


@contextmanager
def _without_ram_efficient_loading(plugin: Any) -> Iterator[None]:
    """Disable accelerate's own implementation, which sends entries one by one and expects all of them to be
    DTensors."""
    previous, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = previous


def _taken(model: nn.Module) -> dict[str, Tensor]:
    """Move a model to the meta device, and return all its values on rank 0 (empty on other ranks)."""
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
            weight = components.quantized_local(param)
            if weight is not None and weight.get_high_precision_init_val() is not None:
                raise ConfigurationError(
                    f"{name} keeps its high-precision initial values, which cpu_ram_efficient_loading does not send; "
                    "set cpu_ram_efficient_loading=False, or call convert without preserve_high_precision_init_val"
                )
    model.to("meta")
    return values


def _fill(accelerator: Accelerator, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Fill a sharded model on the meta device with rank 0's values."""
    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    model.to_empty(device=torch.device("cpu") if offloads else accelerator.device)
    live = model.state_dict()
    load_from_rank0(
        model,
        # `mixed_precision` converts trained parameters to float32
        {k: v.to(live[k].dtype) if v.is_floating_point() else v for k, v in values.items() if k in live},
    )
    for name, buffer in model.named_buffers():
        if name not in live:
            _send(buffer, values.get(name))


def _send(buffer: Tensor, value: Tensor | None) -> None:
    """Broadcast a buffer that is not in the state dict from rank 0."""
    if value is not None:
        buffer.copy_(value)
    group = process_groups.world()
    if group is not None:
        staging = buffer.to(process_groups.collective_device(group)).contiguous()
        dist.broadcast(staging, src=0, group=group)
        buffer.copy_(staging)


def _by_canonical_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return {_canonical_name(name): param for name, param in model.named_parameters()}


def _canonical_name(name: str) -> str:
    """Remove the name components added by torch.compile and activation checkpointing."""
    return components.canonical_name(name).replace("_orig_mod.", "")


def _follow(optimizer: Optimizer, names: _Names, named: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer that was built before sharding by the model's sharded ones."""
    adopts = hasattr(optimizer, "reseed_masters")
    if not adopts and optimizer.state:
        raise ConfigurationError(
            f"prepare: {type(optimizer).__name__} has states of {len(optimizer.state)} whole parameters, which "
            "sharding would lose; prepare before the first step, and load_state after"
        )
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [named[name] for name in members]
    if adopts:
        # adopts the new parameters and frees the masters of the unsharded ones
        optimizer.zero_grad()


# Guards against loading codes as values ------------------------------------------------------------------------------

_LOADS: dict[str, tuple[Callable[..., Any], Callable[[Mapping[str, Any]], None]]] = {}
"""accelerate's functions that load files into models, by name, with the check to run on their arguments first."""


def guard_loads() -> None:
    """Keep accelerate from loading codes as values into a plain model, including functions that are already imported
    elsewhere.

    With `strict=False`, the default of `load_checkpoint_in_model`, accelerate would copy codes and drop their scales.
    PyTorch always does so for sharded checkpoints.
    """
    for name, (plain, check) in _LOADS.items():
        guarded = _looking_before(plain, check)
        for home in list(sys.modules.values()):
            if getattr(home, "__dict__", {}).get(name) is plain:
                setattr(home, name, guarded)


def _looking_before(plain: Callable[..., Any], check: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        check(signature.bind(*args, **kwargs).arguments)
        return plain(*args, **kwargs)

    return load


def _check_checkpoint(given: Mapping[str, Any]) -> None:
    """Check the arguments of `load_checkpoint_in_model`."""
    path = Path(given["checkpoint"])
    files = [path]
    if path.is_dir():
        weight_files = [path / name for name in (constants.WEIGHTS_NAME, constants.SAFE_WEIGHTS_NAME)]
        files = [file_path for file_path in weight_files if file_path.is_file()][:1] or [*path.glob("*.index.json")]
    if len(files) == 1 and files[0].suffix == ".json" and files[0].is_file():
        index = read_json(files[0], FILE_BYTES["index"], raising=CheckpointError, follow=True)
        files = [files[0].parent / name for name in sorted({*index.get("weight_map", index).values()})]
    _check_model_takes(given["model"], _tags_in(files), str(path))


def _check_state(given: Mapping[str, Any]) -> None:
    """Check the arguments of `Accelerator.load_state` under DDP or with one process."""
    for number, model in enumerate(given["models"]):
        ending = f"_{number}" if number else ""
        names = f"{constants.SAFE_MODEL_NAME}{ending}.safetensors", f"{constants.MODEL_NAME}{ending}.bin"
        files = [path for name in names if (path := Path(given["input_dir"]) / name).is_file()]
        _check_model_takes(model, _tags_in(files[:1]), str(given["input_dir"]))


def _check_sharded_state(given: Mapping[str, Any]) -> None:
    """Check the arguments of `Accelerator.load_state` and of transformers' Trainer under FSDP."""
    name = f"{constants.FSDP_MODEL_NAME}_{given.get('model_index', 0)}"
    folder = Path(given["input_dir"])
    folder = folder if folder.name == name else folder / name
    if "SHARDED" not in str(given["fsdp_plugin"].state_dict_type) or not (folder / ".metadata").is_file():
        return
    try:
        reader = SafeReader(folder)
        tags = reader.read(key for key in reader.entries if key.endswith(components.FORMAT_SUFFIX))
    except CheckpointError:
        # written by another program, or damaged; PyTorch raises
        return
    _check_model_takes(given["model"], {key.removeprefix("model."): tag for key, tag in tags.items()}, str(folder))


def _tags_in(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the format tags in state dict files, by key. Unreadable files are left for accelerate to report."""
    tags: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            continue
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                entries = {key: file.get_tensor(key) for key in file.keys() if key.endswith(components.FORMAT_SUFFIX)}
        else:
            try:
                entries = dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
            except (OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
                continue
        tags |= {key: value for key, value in entries.items() if str(key).endswith(components.FORMAT_SUFFIX)}
    return tags


def _check_model_takes(model: nn.Module, tags: Mapping[str, Tensor], path: str) -> None:
    """Check that no high-precision weight of a model is quantized in a file.

    Raises:
        CheckpointError: such a weight exists.
    """
    params = {_without_wrapper(name): param for name, param in components.named_parameters(model).items()}
    names = {_without_wrapper(key.removesuffix(components.FORMAT_SUFFIX)): tag for key, tag in tags.items()}
    mismatched = [name for name, param in params.items() if name in names and components.quantized_local(param) is None]
    if mismatched:
        more = f" and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
        tag = components.read_format_tag(names[mismatched[0]])
        raise CheckpointError(
            f"{path} holds quantized weights, {mismatched[0]} of format {tag}{more}, "
            f"which this {type(model).__name__} has in high precision, so that their codes would be read as values; "
            "call quantshard.convert(model, recipe) first, with the recipe that was saved"
        )


def _without_wrapper(name: str) -> str:
    """Remove the name components added by DistributedDataParallel and torch.compile."""
    return _canonical_name(name).removeprefix("module.")


_LOADS |= {
    "load_checkpoint_in_model": (modeling.load_checkpoint_in_model, _check_checkpoint),
    "load_accelerator_state": (checkpointing.load_accelerator_state, _check_state),
    "load_fsdp_model": (fsdp_utils.load_fsdp_model, _check_sharded_state),
}
guard_loads()
