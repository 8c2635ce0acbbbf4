"""transformers' Trainer over quantized weights: its optimizer, replicas and checkpoints.

The Trainer loads by the names in the files and only logs missing weights. But transformers saves many architectures
under other names, some with split or joined tensors (experts), and reverses this while loading. `load_weights` does so
too, and treats a missing weight as an error.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainingArguments
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from quantshard import foreign
from quantshard.distributed.replicas import check_replicas
from quantshard.errors import CheckpointError, ConfigurationError, warn_user
from quantshard.foreign import FILE_BYTES
from quantshard.integrations.accelerate import check_before_sharding, replica_arguments, warn_of_replicas
from quantshard.integrations.transformers.saving import ADAPTERS_ALONE
from quantshard.interop.conversion.linear import is_packed
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components

ADAMS: Final = frozenset("adamw_torch adamw_torch_fused".split())
"""Names of the Trainer's optimizers that `FusedAdam` replaces; the second is the default."""

_UNSAVED: Final = "_keys_to_ignore_on_save"
"""transformers' private list of a model's computed entries, such as sinusoids, which are never saved."""

_LOGGER: Final = logging.get_logger("transformers.trainer")


class AdamFactory:
    """Builds `FusedAdam` with a model's parameter names; as in the Trainer, only matrices get weight decay."""

    def __call__(self, model: nn.Module, weight_decay: float = 0.0, **options: Any) -> Optimizer:
        named_params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        decayed = [(name, param) for name, param in named_params if param.ndim > 1]
        undecayed = [(name, param) for name, param in named_params if param.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
        return FusedAdam([group for group in groups if group["params"]], **options)


def adam(args: TrainingArguments, **options: Any) -> tuple[type[AdamFactory], dict[str, Any]]:
    """Return `FusedAdam` with a Trainer's settings: `transformers.Trainer(..., optimizer_cls_and_kwargs=adam(args))`.

    Args:
        args: source of the learning rate, betas, epsilon and weight decay.
        options: other arguments of `FusedAdam`, such as `exp_avg_dtype`.
    """
    settings = {
        "lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }  # fmt: skip
    return AdamFactory, {**settings, **options}


class QuantizedTraining:
    """Mixin that lets a Trainer train quantized weights: `class T(QuantizedTraining, Trainer)`.

    The default optimizer becomes `FusedAdam`; other names raise. DistributedDataParallel does not copy weights, but all
    ranks are checked to hold the same ones. Under FSDP2, checkpoints are sharded and `save_model` writes the whole
    model. Otherwise checkpoints are read by `from_pretrained`'s names, and a missing weight is an error.
    """

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Like the Trainer's, with `init_sync=False` for DistributedDataParallel."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.ddp_handler = replica_arguments(self.accelerator)

    def create_optimizer(self: Any, model: nn.Module | None = None) -> Optimizer:
        """Replace the Trainer's AdamW by `FusedAdam`."""
        target = self.model if model is None else model
        if components.quantized_parameters(target):
            if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
                name = getattr(self.args.optim, "value", self.args.optim)
                if name not in ADAMS:
                    raise ConfigurationError(f"TrainingArguments(optim={name!r}) is not supported; keep the default")
                self.optimizer_cls_and_kwargs = adam(self.args)
            if self.args.fsdp and not self.is_fsdp_enabled:
                warn_of_replicas(self.accelerator)
            if self.is_fsdp_enabled:
                kind = str(self.accelerator.state.fsdp_plugin.state_dict_type)
                if "FULL" in kind and getattr(self.args.save_strategy, "value", "no") != "no":
                    raise ConfigurationError(f"{kind} cannot be resumed; set state_dict_type='SHARDED_STATE_DICT'")
                if not self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:  # otherwise rank 0's is sent
                    check_before_sharding(target)
            elif self.args.world_size > 1:
                check_replicas(target)
        else:
            name = type(target).__name__
            warn_user(f"QuantizedTraining: {name} has no quantized weight; call quantshard.convert", is_counted=True)
        return super().create_optimizer(model)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Like the Trainer's, but under FSDP2 rank 0 also writes the whole model if checkpoints are sharded."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is not None and _internal_call and output_dir is not None:
            # the Trainer looks for the best checkpoint's folder on each rank before sharded files are written
            os.makedirs(output_dir, exist_ok=True)
        if plugin is None or _internal_call or not components.quantized_parameters(self.model):
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        previous, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            plugin.state_dict_type = previous

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Like the Trainer's, but uses `from_pretrained`'s names; see `load_weights`."""
        target = self.model if model is None else model
        if not _is_read_here(self, target, resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        load_weights(target, resume_from_checkpoint)

    def _load_best_model(self: Any) -> None:
        """Like the Trainer's, but reads the checkpoint as `_load_from_checkpoint` does."""
        best = self.state.best_model_checkpoint
        if not _is_read_here(self, self.model, best):
            return super()._load_best_model()  # type: ignore[misc]
        _LOGGER.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        load_weights(self.model, best)


def _is_read_here(trainer: Any, model: nn.Module, folder: str) -> bool:
    """Return whether a checkpoint contains the whole model. Sharding and PEFT have their own loading code."""
    has_adapters = hasattr(model, "get_base_model") or getattr(model, ADAPTERS_ALONE, False)
    is_whole = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or has_adapters)
    return is_whole and bool(weight_files(folder))


def weight_files(folder: str) -> list[str]:
    """Return the files of a checkpoint that hold the model's weights, as the Trainer chooses them."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if os.path.isfile(path := os.path.join(folder, name)):
            return [path]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if os.path.isfile(path := os.path.join(folder, name)):
            index = foreign.read_json(path, FILE_BYTES["index"], raising=CheckpointError, follow=True)
            names = index.get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise CheckpointError(f"{path} is damaged: it has no weight_map of names")
            return [os.path.join(folder, file) for file in sorted(set(names.values()))]
    return []


def load_weights(model: nn.Module, folder: str) -> None:
    """Load the weights of a checkpoint in place into an unsharded model, bit for bit."""
    file_entries: dict[str, Tensor] = {}
    for path in weight_files(folder):
        file_entries.update(load_state_dict(path))
    entries = _by_live_names(model, file_entries, folder) if isinstance(model, PreTrainedModel) else file_entries
    weights = components.quantized_parameters(model)
    _check_forms(model, weights, entries, folder)
    _check_complete(model, weights, entries, folder)
    if unexpected := model.load_state_dict(entries, strict=False).unexpected_keys:
        warn_user(f"{folder}: ignored {len(unexpected)} tensors that the model does not have: {_listed(unexpected)}")


def _by_live_names(model: PreTrainedModel, stored: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """Rename, split and join tensors, also packed ones, as `from_pretrained` would, but without casting."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    live, prefix = {**components.named_parameters(model), **model.state_dict()}, model.base_model_prefix
    entries: dict[str, Tensor] = {}
    pending: dict[str, WeightConverter] = {}
    # in transformers' order: expert 2 before expert 10
    numbered = {key: [(0, int(n)) if n.isdigit() else (1, n) for n in key.split(".")] for key in stored}
    for key in sorted(stored, key=numbered.__getitem__):
        name, pattern = rename_source_key(key, renamings, converters, prefix, live)
        # unknown to the model, or a rule changed a name that was already correct
        if name not in live:
            entries[key] = stored[key]
        elif pattern is None:
            entries[name] = stored[key]
        else:
            converter = pending.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, stored[key])  # type: ignore[arg-type]
    for name, converter in pending.items():
        try:
            converted: dict[str, Any] = converter.convert(name, model=model, config=model.config)
        # transformers' operations can raise any exception
        except Exception as error:
            raise CheckpointError(f"{folder}: {name} cannot be assembled: {type(error).__name__}: {error}") from error
        entries.update({entry: value[0] if isinstance(value, list) else value for entry, value in converted.items()})
    return entries


def _check_forms(
    model: nn.Module, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor], folder: str
) -> None:  # fmt: skip
    for name, param in components.named_parameters(model).items():
        own = components.storage_of(param).spec.tag if name in weights else None
        bits = entries.get(name + components.FORMAT_SUFFIX)
        if bits is None and name in entries and is_packed(entries[name]):
            bits = entries[name][: components.FORMAT_TAG_BYTES]
        tag = None if bits is None else components.read_format_tag(bits)
        is_missing = tag is None and (own is None or name not in entries)
        if tag != own and not is_missing and param.is_floating_point():
            kinds = f"{tag or entries[name].dtype} in the checkpoint, but {own or 'plain'} in the model"
            raise ConfigurationError(f"{folder}: {name} is {kinds}; convert with the saved recipe")


def _check_complete(
    model: nn.Module, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor], folder: str
) -> None:  # fmt: skip
    """Check that the checkpoint has each state dict entry: by name, in a packed weight, or as a tied tensor."""
    packed = {name for name in weights if name in entries and is_packed(entries[name])}
    parts = {name + suffix: (name, suffix) for name, param in weights.items() for suffix in components.suffixes(param)}
    tensors = {**components.named_parameters(model), **dict(model.named_buffers(remove_duplicate=False))}

    def is_there(key: str) -> bool:
        name, suffix = parts.get(key, (key, ""))
        tied = [alias for alias, tensor in tensors.items() if tensor is tensors.get(name)] or [name]
        return any(alias in packed or alias + suffix in entries for alias in tied)

    known = {*entries, *(getattr(model, _UNSAVED, None) or ())}
    if missing := [key for key in model.state_dict() if key not in known and not is_there(key)]:
        # name a completely missing weight once, without its scales
        named = list(dict.fromkeys(key if (name := parts.get(key, (key,))[0]) in entries else name for key in missing))
        what = f"{len(named)} weights of this {type(model).__name__}"
        raise CheckpointError(f"{folder}: {what} are not in the checkpoint: {_listed(named)}; resume the saved model")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
