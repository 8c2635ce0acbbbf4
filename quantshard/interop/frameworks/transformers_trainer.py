"""transformers' Trainer over quantized weights: its optimizer, replicas and checkpoints.

`integrations/transformers.py` exports these names too.
"""

from __future__ import annotations

import os
from typing import Any, Final, cast

import transformers
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer
from transformers import PreTrainedConfig, TrainingArguments
from transformers.utils import CONFIG_NAME, logging

from quantshard.distributed.replicas import check_replicas
from quantshard.errors import ConfigurationError, warn_user
from quantshard.interop.frameworks import transformers_files as files
from quantshard.interop.frameworks.accelerate import check_before_sharding, replica_arguments, warn_of_replicas
from quantshard.interop.frameworks.transformers_checkpoint import load_weights, weight_files
from quantshard.optimizers import FusedAdam

ADAMS: Final = frozenset("adamw_torch adamw_torch_fused".split())
"""Names of the Trainer's optimizers that `FusedAdam` replaces; the second is the default."""

ADAPTERS_ALONE: Final = "_hf_peft_config_loaded"
"""transformers' private mark on models that save and load only adapters."""

_TOLD: Final = "_told_of_plain_model"
"""Attribute of a Trainer: whether it has warned that its model is not quantized."""

_LOGGER: Final = logging.get_logger("transformers.trainer")


class AdamFactory:
    """Builds `FusedAdam` for the Trainer. The factory is called with the model, so it has the parameters' names.

    As in the Trainer, weight decay applies to parameters with two or more dims.
    """

    def __call__(self, model: nn.Module, weight_decay: float = 0.0, **options: Any) -> Optimizer:
        named_params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = [
            {
                "params": [(name, param) for name, param in named_params if (param.ndim > 1) == decays],
                "weight_decay": decay,
            }
            for decays, decay in ((True, weight_decay), (False, 0.0))
        ]
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

    def create_accelerator_and_postprocess(self) -> None:
        """Like the Trainer's, with `init_sync=False` for DistributedDataParallel."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = cast(Any, self).accelerator
        accelerator.ddp_handler = replica_arguments(accelerator)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Replace the Trainer's AdamW by `FusedAdam`.

        Raises:
            ConfigurationError: another optimizer is configured, or checkpoints of a kind that cannot be resumed.
            RankMismatchError: replicas hold different bits.
        """
        trainer = cast(Any, self)
        target = trainer.model if model is None else model
        if files.quantized_weights(target):
            if trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None:
                trainer.optimizer_cls_and_kwargs = _default_optimizer(trainer.args)
            if trainer.args.fsdp and not trainer.is_fsdp_enabled:
                warn_of_replicas(trainer.accelerator)
            if trainer.is_fsdp_enabled:
                _check_sharded_checkpoints(trainer)
                if not trainer.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:  # otherwise rank 0's is sent
                    check_before_sharding(target)
            elif trainer.args.world_size > 1:
                check_replicas(target)
        elif not vars(self).setdefault(_TOLD, False):
            vars(self)[_TOLD] = True
            warn_user(
                f"QuantizedTraining: {type(target).__name__} has no quantized weight, and is trained as by the Trainer "
                "alone; call quantshard.convert(model, recipe) before, or use the Trainer alone, which takes plain "
                "models",
                is_counted=True,
            )
        return super().create_optimizer(model)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Like the Trainer's, but rank 0 writes the whole model under FSDP2, which the Trainer omits with sharded
        checkpoints."""
        trainer = cast(Any, self)
        plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
        if plugin is not None and _internal_call and output_dir is not None:
            # the Trainer looks for the best checkpoint's folder on each rank before sharded files are written
            os.makedirs(output_dir, exist_ok=True)
        if plugin is None or _internal_call or not files.quantized_weights(trainer.model):
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        previous, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            plugin.state_dict_type = previous

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Like the Trainer's, but uses `from_pretrained`'s names; see `transformers_checkpoint.load_weights`."""
        trainer = cast(Any, self)
        target = trainer.model if model is None else model
        if not _is_read_here(trainer, target, resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        _log_of_release(resume_from_checkpoint)
        load_weights(target, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Like the Trainer's, but reads the checkpoint as `_load_from_checkpoint` does."""
        trainer = cast(Any, self)
        best = trainer.state.best_model_checkpoint
        if not _is_read_here(trainer, trainer.model, best):
            return super()._load_best_model()  # type: ignore[misc]
        _LOGGER.info(f"Loading best model from {best} (score: {trainer.state.best_metric}).")
        load_weights(trainer.model, best)


def _is_read_here(trainer: Any, model: nn.Module, folder: str) -> bool:
    """Return whether a checkpoint contains the whole model. Sharding and PEFT have their own loading code."""
    has_adapters = hasattr(model, "get_base_model") or getattr(model, ADAPTERS_ALONE, False)
    is_whole = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or has_adapters)
    return is_whole and bool(weight_files(folder))


def _log_of_release(folder: str) -> None:
    """Log the Trainer's warning about a checkpoint from another release of transformers."""
    if not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
        return
    release = PreTrainedConfig.from_json_file(os.path.join(folder, CONFIG_NAME)).transformers_version
    if release not in (None, transformers.__version__):
        _LOGGER.warning(
            f"You are resuming training from a checkpoint trained with {release} of Transformers but your current "
            f"version is {transformers.__version__}. This is not recommended and could yield to errors or unwanted "
            "behaviors."
        )


def _check_sharded_checkpoints(trainer: Any) -> None:
    kind = str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    if "FULL" in kind and getattr(trainer.args.save_strategy, "value", "no") != "no":
        raise ConfigurationError(
            "TrainingArguments(fsdp_config): checkpoints of state_dict_type 'FULL_STATE_DICT', the default, cannot be "
            "resumed, since codes would be sent without scales; set fsdp_config={'state_dict_type': "
            "'SHARDED_STATE_DICT'}, with which save_model writes the whole model too"
        )


def _default_optimizer(args: TrainingArguments) -> tuple[type[AdamFactory], dict[str, Any]]:
    name = getattr(args.optim, "value", args.optim)
    if name not in ADAMS:
        raise ConfigurationError(
            f"TrainingArguments(optim={name!r}): this optimizer was not tried on quantized weights; leave the default, "
            "which is FusedAdam then, or pass optimizers= or optimizer_cls_and_kwargs="
        )
    return adam(args)
