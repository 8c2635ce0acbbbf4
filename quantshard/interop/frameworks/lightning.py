"""Lightning: models converted and sharded in its `ModelParallelStrategy`, for Fabric and the Trainer."""

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
from quantshard.recipe import AUTO
from quantshard.tensor import components

__all__ = ["FabricStrategy", "TrainerStrategy", "convert_and_shard"]

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""Axes of Lightning's device mesh."""

_IN_FABRIC = "_forward_module."
"""Prefix of parameter names in the module returned by `fabric.setup`."""


def convert_and_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    recipe: Recipes = AUTO,
    *,
    filter: Filter | None = None,
    layers: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
    **options: Any,
) -> nn.Module:
    """Call `quantshard.convert`, then `fully_shard` on each layer and the model, as a `parallelize_fn` should.

    Fabric: `FabricStrategy(lambda model, mesh: convert_and_shard(model, mesh), n, 1)`. Trainer: call
    `convert_and_shard(self.model, self.device_mesh)` in `configure_model`, which the Trainer calls again for each `fit`
    or `test`; a model that is already converted and sharded stays unchanged. Build the optimizer afterwards.

    Args:
        model: the network, not the LightningModule around it, because the Trainer does not call the latter's `forward`.
        mesh: the strategy's `device_mesh`; its axis "tensor_parallel" must have size 1.
        recipe: as in `convert`. Rank 0 prints the conversion report.
        filter: as in `convert`.
        layers: function that returns the modules to shard separately. Default: the elements of `nn.ModuleList`s.
        **options: arguments of `fully_shard` (`mp_policy`, `reshard_after_forward`, `offload_policy`).

    Returns:
        The model.

    Raises:
        ConfigurationError: the model is a LightningModule, the mesh has tensor parallelism, or `convert` raises.
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
    """Return the elements of a model's outermost `nn.ModuleList`s."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else listed_layers(child)
    return layers


class FabricStrategy(fabric_strategies.ModelParallelStrategy):
    """Fabric's `ModelParallelStrategy` with earlier and clearer errors.

    Rejects an optimizer that was built before its model was sharded, or over another model, and single-file
    checkpoints.
    """

    _known: frozenset[int] = frozenset()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Set up the module and record its parameters for `setup_optimizer`."""
        module = super().setup_module(module)
        self._known |= {id(param) for param in module.parameters()}
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer.

        Raises:
            ConfigurationError: it holds no parameter of this strategy's models, or holds unsharded quantized weights.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self._known.isdisjoint(map(id, params)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds {len(params)} parameters, none of a model that this strategy has "
                "converted and sharded, so it would train nothing: call model = fabric.setup(model) first, make the "
                "optimizer of model.named_parameters(), then call fabric.setup_optimizers(optimizer)"
            )
        names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        names = names or [f"parameter {number}" for number in range(len(params))]
        named = {name.removeprefix(_IN_FABRIC): param for name, param in zip(names, params, strict=True)}
        refuse_whole(type(self).__name__, named, self.world_size)
        return super().setup_optimizer(optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint.

        Raises:
            CheckpointError: the checkpoint is a single file and the model is quantized.
        """
        objects = [state] if isinstance(state, nn.Module) else [*(state or {}).values()]
        refuse_single_file(self.broadcast(path), [value for value in objects if isinstance(value, nn.Module)])
        return super().load_checkpoint(path, state, *args, **kwargs)


class TrainerStrategy(trainer_strategies.ModelParallelStrategy):
    """The Trainer's `ModelParallelStrategy` with clearer errors.

    Rejects single-file checkpoints, and training of a model that several processes hold unsharded.
    """

    def setup(self, trainer: Trainer) -> None:
        """Set up the strategy.

        Raises:
            ConfigurationError: training would use replicas, for which this strategy does not reduce gradients.
        """
        if trainer.state.fn == TrainerFn.FITTING and self.model is not None:
            refuse_whole(type(self).__name__, components.named_parameters(self.model), self.world_size)
        super().setup(trainer)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint.

        Raises:
            CheckpointError: the checkpoint is a single file and the model is quantized.
        """
        refuse_single_file(self.broadcast(checkpoint_path), [self.model] if self.model is not None else [])
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)


def refuse_whole(strategy: str, named: Mapping[str, Tensor], ranks: int) -> None:
    """Reject unsharded quantized weights on several ranks: their gradients are not reduced, so ranks would diverge.

    Args:
        strategy: name of the strategy, for the message.
        named: the parameters of a model or of an optimizer.
        ranks: number of ranks.

    Raises:
        ConfigurationError: there are quantized weights, and no trained one is sharded.
    """
    quantized = {name for name, param in named.items() if components.quantized_local(param) is not None}
    trained = {name: param for name, param in named.items() if param.requires_grad}
    items = {name: param for name, param in trained.items() if name in quantized} or trained
    if ranks > 1 and quantized and items and not any(isinstance(param, DTensor) for param in items.values()):
        raise ConfigurationError(
            f"{strategy}: {next(iter(items))}, the first of {len(items)} that train, is whole on each of {ranks} ranks,"
            " and this strategy does not reduce gradients of what is not sharded, so each would train a model of its "
            "own; shard it by convert_and_shard(network, mesh, recipe), in configure_model or as parallelize_fn does, "
            "or by fully_shard if it was converted before"
        )


def refuse_single_file(path: Any, models: Iterable[nn.Module]) -> None:
    """Reject single-file checkpoints, which Lightning loads one key at a time, so codes without their scales.

    Raises:
        CheckpointError: `path` is a file and a model has quantized weights.
    """
    names = [name for model in models for name in quantized_names(model)]
    if names and Path(path).is_file():
        raise CheckpointError(
            f"{path} is a single file, which Lightning loads one key at a time, so codes without their scales, of "
            f"{len(names)} quantized weights ({names[0]}, ...); save with save_distributed_checkpoint=True, into a "
            "folder, or read it on rank 0 and call quantshard.checkpoints.load_from_rank0(model, state_dict)"
        )


def quantized_names(model: nn.Module) -> list[str]:
    """Return the names of the quantized weights."""
    return list(components.quantized_parameters(model))
