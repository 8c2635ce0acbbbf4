"""Hugging Face accelerate: `prepare` for models with quantized weights.

`Accelerator.prepare(model, optimizer)` handles such models under FSDP2. `prepare` in this module also supports
optimizers built after sharding, `cpu_ram_efficient_loading`, models on the meta device, and DDP. Importing this module
makes accelerate's loading functions reject files of quantized weights for models that are not converted.
"""

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
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
from quantshard.interop.layouts.live import uncompiled_name
from quantshard.tensor import components

__all__ = ["prepare", "replica_arguments"]

_Names = list[list[str]]


@dataclass
class ReplicaArguments(DistributedDataParallelKwargs):
    """accelerate's arguments of DistributedDataParallel plus `init_sync`, since DDP cannot copy quantized weights."""

    init_sync: bool = True


def replica_arguments(accelerator: Accelerator) -> ReplicaArguments:
    """Return an accelerator's DistributedDataParallel arguments, so that DDP does not copy weights."""
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
    """
    if not components.quantized_parameters(model):
        raise ConfigurationError(f"prepare: {type(model).__name__} has no quantized weight; call quantshard.convert")
    _check_settings(accelerator)
    if not accelerator.is_fsdp2:
        return _replicated(accelerator, model, others)
    params_by_name = dict(model.named_parameters())
    names = {index: _names_in(arg, params_by_name) for index, arg in enumerate(others) if isinstance(arg, Optimizer)}
    model = _sharded(accelerator, model)
    params_by_name = {uncompiled_name(name): param for name, param in model.named_parameters()}
    prepared: dict[int, Any] = {}
    for index, arg in enumerate(others):
        if index in names:
            _follow(arg, names[index], params_by_name)
        if index in names or _is_factory(arg):
            optimizer = arg if index in names else arg(iter(params_by_name.items()))
            prepared[index] = accelerator.prepare_optimizer(optimizer, device_placement=False)
    # schedulers after their optimizers
    results = [prepared[index] if index in prepared else accelerator.prepare(arg) for index, arg in enumerate(others)]
    return (model, *results) if others else model


def _check_settings(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    is_fsdp1 = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if is_fsdp1 or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        name = "FSDP1" if is_fsdp1 else kind.value
        raise ConfigurationError(f"prepare: {name} is not supported; use FSDP2 (fsdp_version=2) or DDP")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and kind != DistributedType.FSDP:
        # plugins set this variable too
        warn_of_replicas(accelerator)
    if accelerator.mixed_precision == "fp8":
        raise ConfigurationError("prepare: mixed_precision='fp8' would convert layers itself; use 'bf16' or 'no'")
    if accelerator.is_fsdp2 and "FULL" in str(accelerator.state.fsdp_plugin.state_dict_type):
        raise ConfigurationError("prepare: FULL_STATE_DICT cannot be loaded; set state_dict_type='SHARDED_STATE_DICT'")


def warn_of_replicas(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    warn_user(f"accelerate was asked for FSDP but runs {kind}; launch it on GPUs, by its launcher or torchrun")


def _names_in(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> _Names:
    names = {id(param): uncompiled_name(name) for name, param in named.items()}
    params = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    if not names.keys() >= {param for group in params for param in group}:
        raise ConfigurationError(f"prepare: {type(optimizer).__name__} has foreign parameters; build it after convert")
    return [[names[param] for param in group] for group in params]


def _is_factory(other: object) -> bool:
    other_kinds = (Optimizer, nn.Module, torch.utils.data.DataLoader, torch.optim.lr_scheduler.LRScheduler)
    return callable(other) and not isinstance(other, other_kinds)


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


def _sharded(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard the model by accelerate's own policy, which needs an optimizer whose parameters it matches by address.

    That does not work for the meta device or empty shards, so accelerate gets a dummy optimizer, which is discarded.
    """
    plugin = accelerator.state.fsdp_plugin
    from_rank0 = bool(plugin.cpu_ram_efficient_loading) and not isinstance(model, FSDPModule)
    state = agreement.run_on_all_ranks(lambda: _taken(model) if from_rank0 else {}, "prepare: ")
    if not from_rank0:
        check_before_sharding(model)
    dummy = torch.optim.SGD(model.parameters(), lr=0.0)
    # accelerate's own implementation sends entries one by one and expects all of them to be DTensors
    previous, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
    try:
        model, dummy = accelerator.prepare(model, dummy)
    finally:
        plugin.cpu_ram_efficient_loading = previous
    # save_state would write it, and no public method removes an optimizer
    vars(accelerator)["_optimizers"].remove(dummy)
    if from_rank0:
        _fill(accelerator, model, state)
    return model


def check_before_sharding(model: nn.Module) -> None:
    """Check that all ranks that hold the whole model with values hold the same bits. A collective call."""
    params = components.named_parameters(model).values()
    if all(agreement.all_gather_object(not any(param.is_meta or isinstance(param, DTensor) for param in params))):
        check_replicas(model)


def _taken(model: nn.Module) -> dict[str, Tensor]:
    """Move a model to the meta device, and return all its values on rank 0 (empty on other ranks)."""
    params = list(model.named_parameters(remove_duplicate=False))
    hint = "set cpu_ram_efficient_loading=False"
    if len({id(param) for _, param in params}) < len(params):
        raise ConfigurationError(f"cpu_ram_efficient_loading would separate tied weights; {hint}")
    values: dict[str, Tensor] = {}
    if agreement.rank() == 0:
        values = dict(model.named_buffers()) | model.state_dict()
        for name, param in params:
            if param.is_meta:
                raise ConfigurationError(f"cpu_ram_efficient_loading: rank 0 has no values of {name}; {hint}")
            weight = components.quantized_local(param)
            if weight is not None and weight.get_high_precision_init_val() is not None:
                raise ConfigurationError(f"cpu_ram_efficient_loading omits the initial values of {name}; {hint}")
    model.to("meta")
    return values


def _fill(accelerator: Accelerator, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    model.to_empty(device=torch.device("cpu") if offloads else accelerator.device)
    live = model.state_dict()
    load_from_rank0(
        model,
        # `mixed_precision` converts trained parameters to float32
        {k: v.to(live[k].dtype) if v.is_floating_point() else v for k, v in values.items() if k in live},
    )
    # one at a time, because causal masks can be large
    for unsaved in agreement.from_rank0(lambda: [name for name in values if name not in live]):
        value = agreement.from_rank0(functools.partial(lambda name: values[name].cpu(), unsaved))
        model.get_buffer(unsaved).copy_(value)


def _follow(optimizer: Optimizer, names: _Names, named: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer that was built before sharding by the model's sharded ones."""
    adopts = hasattr(optimizer, "reseed_masters")
    if not adopts and optimizer.state:
        raise ConfigurationError(f"prepare: {type(optimizer).__name__} would lose its states; prepare it before a step")
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [named[name] for name in members]
    if adopts:
        # adopts the new parameters and frees the masters of the unsharded ones
        optimizer.zero_grad()


def _guard(plain: Callable[..., Any], check: Callable[[Mapping[str, Any]], None]) -> None:
    """Run `check` on the arguments of one of accelerate's functions first, wherever the function was imported.

    With `strict=False`, the default of `load_checkpoint_in_model`, accelerate would copy codes and drop their scales.
    PyTorch always does so for sharded checkpoints.
    """
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        check(signature.bind(*args, **kwargs).arguments)
        return plain(*args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(plain.__name__) is plain:
            setattr(module, plain.__name__, load)


def _check_checkpoint(arguments: Mapping[str, Any]) -> None:
    path = Path(arguments["checkpoint"])
    files = [path]
    if path.is_dir():
        weight_files = [path / name for name in (constants.WEIGHTS_NAME, constants.SAFE_WEIGHTS_NAME)]
        files = [file_path for file_path in weight_files if file_path.is_file()][:1] or [*path.glob("*.index.json")]
    if len(files) == 1 and files[0].suffix == ".json" and files[0].is_file():
        index = read_json(files[0], FILE_BYTES["index"], raising=CheckpointError, follow=True)
        files = [files[0].parent / name for name in sorted({*index.get("weight_map", index).values()})]
    _check_model_takes(arguments["model"], _tags_in(files), str(path))


def _check_sharded_state(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of `Accelerator.load_state` and of transformers' Trainer under FSDP."""
    name = f"{constants.FSDP_MODEL_NAME}_{arguments.get('model_index', 0)}"
    folder = Path(arguments["input_dir"])
    folder = folder if folder.name == name else folder / name
    if "SHARDED" not in str(arguments["fsdp_plugin"].state_dict_type) or not (folder / ".metadata").is_file():
        return
    try:
        reader = SafeReader(folder)
        tags = reader.read(key for key in reader.entries if key.endswith(components.FORMAT_SUFFIX))
    except CheckpointError:
        # written by another program, or damaged; PyTorch raises
        return
    _check_model_takes(arguments["model"], {key.removeprefix("model."): tag for key, tag in tags.items()}, str(folder))


def _tags_in(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the format tags in state dict files, by key. Unreadable files are left for accelerate to report."""
    tags: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            continue
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                tags |= {key: file.get_tensor(key) for key in file.keys() if key.endswith(components.FORMAT_SUFFIX)}
            continue
        try:
            entries = dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        except (OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            continue
        tags |= {key: value for key, value in entries.items() if str(key).endswith(components.FORMAT_SUFFIX)}
    return tags


def _check_model_takes(model: nn.Module, tags: Mapping[str, Tensor], path: str) -> None:
    # DistributedDataParallel adds "module."
    named = components.named_parameters(model).items()
    params = {uncompiled_name(name).removeprefix("module."): param for name, param in named}
    names = {uncompiled_name(key.removesuffix(components.FORMAT_SUFFIX)): tag for key, tag in tags.items()}
    mismatched = [name for name, param in params.items() if name in names and components.quantized_local(param) is None]
    if mismatched:
        tag = components.read_format_tag(names[mismatched[0]])
        what = f"quantized weights ({mismatched[0]}: {tag})"
        raise CheckpointError(f"{path} holds {what}; call quantshard.convert with the recipe that was saved")


_guard(modeling.load_checkpoint_in_model, _check_checkpoint)
_guard(fsdp_utils.load_fsdp_model, _check_sharded_state)
