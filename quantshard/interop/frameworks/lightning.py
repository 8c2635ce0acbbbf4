"""Lightning: models converted and sharded inside of its `ModelParallelStrategy`, by Fabric and by the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric import strategies as fabric_strategies
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.conversion.convert import convert
from quantshard.interop.conversion.selection import Filter
from quantshard.modules.contexts.layer_recipes import Recipes
from quantshard.optimizers import optimizer_members
from quantshard.recipe import AUTO
from quantshard.tensor import components

__all__ = ["FabricStrategy", "TrainerStrategy", "convert_and_shard"]

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""Axes of the mesh that Lightning makes."""

_IN_FABRIC = "_forward_module."
"""What names of parameters begin with in what `fabric.setup` returns."""


def convert_and_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    recipe: Recipes = AUTO,
    *,
    filter: Filter | None = None,
    layers: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
    **options: Any,
) -> nn.Module:
    """`quantshard.convert`, then `fully_shard` of each layer and of the model: what a `parallelize_fn` is to do.

    Fabric: `FabricStrategy(lambda model, mesh: convert_and_shard(model, mesh), n, 1)`. The Trainer: in
    `configure_model`, `convert_and_shard(self.model, self.device_mesh)`; it calls that again for another
    `fit` or `test`, and a model that is converted and sharded stays as it is. Make the optimizer afterwards.

    Args:
        model: the network; not the LightningModule around it, whose `forward` the Trainer does not call.
        mesh: the strategy's `device_mesh`; its axis "tensor_parallel" has one rank.
        recipe: as of `convert`, which tells on rank 0 what it did.
        filter: as of `convert`.
        layers: which modules FSDP2 gathers by themselves; by default the elements of `nn.ModuleList`s.
        **options: of `fully_shard` (`mp_policy`, `reshard_after_forward`, `offload_policy`).

    Returns:
        The model.

    Raises:
        ConfigurationError: the model is a LightningModule, the mesh has tensor parallelism, or what `convert` refuses.
    """
    if isinstance(model, LightningModule):
        raise ConfigurationError(
            f"convert_and_shard: {type(model).__name__} is a LightningModule, whose training_step runs outside of its "
            "forward, so no recipe would be in force; give it the network inside: convert_and_shard(self.model, ...)"
        )
    if mesh[TENSOR].size() > 1:
        raise ConfigurationError(
            f"convert_and_shard: this strategy has tensor_parallel_size={mesh[TENSOR].size()}, and layers that convert "
            f"made are not cut over it; make the strategy with data_parallel_size={mesh.size()}, tensor_parallel_size=1"
        )
    if isinstance(model, FSDPModule) and quantized_names(model):
        return model
    rank_zero_info(str(convert(model, recipe, filter=filter)))
    for layer in (layers or listed_layers)(model):
        fully_shard(layer, mesh=mesh[DATA], **options)
    fully_shard(model, mesh=mesh[DATA], **options)
    return model


def listed_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of a model's `nn.ModuleList`s, not of those that are inside of another."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else listed_layers(child)
    return found


class FabricStrategy(fabric_strategies.ModelParallelStrategy):
    """Fabric's `ModelParallelStrategy`, which refuses what is told too late, without a name, or not at all.

    An optimizer that was made before its model was sharded, or of one that is not, and a checkpoint in a single file.
    """

    _known: frozenset[int] = frozenset()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """As its base."""
        module = super().setup_module(module)
        self._known |= {id(param) for param in module.parameters()}
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """As its base; but one that holds no parameter of the models here is refused, or whole quantized weights."""
        held = [param for group in optimizer.param_groups for param in group["params"]]
        if self._known.isdisjoint(map(id, held)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds {len(held)} parameters, none of a model that this strategy has "
                "converted and sharded, so it would train nothing: call model = fabric.setup(model) first, make the "
                "optimizer of model.named_parameters(), then call fabric.setup_optimizers(optimizer)"
            )
        names = {param: name.removeprefix(_IN_FABRIC) for param, name in optimizer_members.held([optimizer]).items()}
        refuse_whole(type(self).__name__, {name: param for param, name in names.items()}, self.world_size)
        return super().setup_optimizer(optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As its base; but a single file is refused for a quantized model."""
        held = [state] if isinstance(state, nn.Module) else [*(state or {}).values()]
        refuse_single_file(self.broadcast(path), [each for each in held if isinstance(each, nn.Module)])
        return super().load_checkpoint(path, state, *args, **kwargs)


class TrainerStrategy(trainer_strategies.ModelParallelStrategy):
    """The Trainer's `ModelParallelStrategy`, which refuses two things that are told without a name, or not at all.

    A checkpoint in a single file, and training of a model that several processes hold whole.
    """

    def setup(self, trainer: Trainer) -> None:
        """As its base; but replicas, whose gradients this strategy does not reduce, are refused for training."""
        if trainer.state.fn == TrainerFn.FITTING and self.model is not None:
            refuse_whole(type(self).__name__, components.named_parameters(self.model), self.world_size)
        super().setup(trainer)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As its base; but a single file is refused for a quantized model."""
        refuse_single_file(self.broadcast(checkpoint_path), [self.model] if self.model is not None else [])
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)


def refuse_whole(strategy: str, named: Mapping[str, Tensor], ranks: int) -> None:
    """Nothing reduces gradients of what is not sharded: each rank would train a model of its own.

    Args:
        named: the parameters of a model, or those that an optimizer holds.

    Raises:
        ConfigurationError: there are quantized weights, and none of those that train is sharded.
    """
    quantized = {name for name, param in named.items() if components.quantized_local(param) is not None}
    trained = {name: param for name, param in named.items() if param.requires_grad}
    asked = {name: param for name, param in trained.items() if name in quantized} or trained
    if ranks > 1 and quantized and asked and not any(isinstance(param, DTensor) for param in asked.values()):
        raise ConfigurationError(
            f"{strategy}: {next(iter(asked))}, the first of {len(asked)} that train, is whole on each of {ranks} ranks,"
            " and this strategy does not reduce gradients of what is not sharded, so each would train a model of its "
            "own; shard it by convert_and_shard(network, mesh, recipe), in configure_model or as parallelize_fn does, "
            "or by fully_shard if it was converted before"
        )


def refuse_single_file(path: Any, models: Iterable[nn.Module]) -> None:
    """Lightning loads a file one key at a time: codes without their scales.

    Raises:
        CheckpointError: it is a file, and a model has quantized weights.
    """
    names = [name for model in models for name in quantized_names(model)]
    if names and Path(path).is_file():
        raise CheckpointError(
            f"{path} is a single file, which Lightning loads one key at a time, so codes without their scales, of "
            f"{len(names)} quantized weights ({names[0]}, ...); save with save_distributed_checkpoint=True, into a "
            "folder, or read it on rank 0 and call quantshard.checkpoints.load_from_rank0(model, state_dict)"
        )


def quantized_names(model: nn.Module) -> list[str]:
    """Names of the quantized weights."""
    return list(components.quantized_parameters(model))
