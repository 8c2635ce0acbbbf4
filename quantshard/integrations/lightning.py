"""Lightning: models converted and sharded in its `ModelParallelStrategy`, for Fabric and the Trainer."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric import strategies as fabric_strategies
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule, Trainer, strategies as trainer_strategies
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

    Fabric: `FabricStrategy(convert_and_shard, n, 1)`. Trainer: call it in `configure_model`, which the Trainer calls
    again for each `fit` or `test`; a converted and sharded model stays unchanged. Build the optimizer afterwards.

    Args:
        model: the network, not the LightningModule around it, because the Trainer does not call the latter's `forward`.
        mesh: the strategy's `device_mesh`; its axis "tensor_parallel" must have size 1.
        recipe: as in `convert`. Rank 0 prints the conversion report.
        filter: as in `convert`.
        layers: function that returns the modules to shard separately. Default: the elements of `nn.ModuleList`s.
        **options: arguments of `fully_shard` (`mp_policy`, `reshard_after_forward`, `offload_policy`).

    Returns:
        The model.
    """
    if isinstance(model, LightningModule):
        kind = type(model).__name__
        raise ConfigurationError(f"convert_and_shard: {kind} is a LightningModule; pass the network inside: self.model")
    if mesh[TENSOR].size() > 1:
        raise ConfigurationError("convert_and_shard: only tensor_parallel_size=1 is supported; use data_parallel_size")
    if isinstance(model, FSDPModule) and components.quantized_parameters(model):
        return model
    rank_zero_info(str(convert(model, recipe, filter=filter)))
    for layer in (layers or listed_layers)(model):
        fully_shard(layer, mesh=mesh[DATA], **options)
    fully_shard(model, mesh=mesh[DATA], **options)
    return model


def listed_layers(model: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for child in model.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else listed_layers(child)
    return layers


class FabricStrategy(fabric_strategies.ModelParallelStrategy):
    """Fabric's `ModelParallelStrategy`; rejects unsharded models and their optimizers, and single-file checkpoints."""

    _param_ids: frozenset[int] = frozenset()

    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        self._param_ids |= {id(param) for param in module.parameters()}
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self._param_ids.isdisjoint(map(id, params)):
            kind = type(optimizer).__name__
            raise ConfigurationError(f"{kind} has no parameter of a model from fabric.setup; build it afterwards")
        names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        names = names or [f"parameter {number}" for number in range(len(params))]
        check_sharded(type(self).__name__, dict(zip(names, params, strict=True)), self.world_size)
        return super().setup_optimizer(optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        objects = [state] if isinstance(state, nn.Module) else [*(state or {}).values()]
        check_folder(self.broadcast(path), [value for value in objects if isinstance(value, nn.Module)])
        return super().load_checkpoint(path, state, *args, **kwargs)


class TrainerStrategy(trainer_strategies.ModelParallelStrategy):
    """The Trainer's `ModelParallelStrategy`; rejects training of unsharded models, and single-file checkpoints."""

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self.model is not None:
            check_sharded(type(self).__name__, components.named_parameters(self.model), self.world_size)
        super().setup(trainer)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_folder(self.broadcast(checkpoint_path), [self.model] if self.model is not None else [])
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)


def check_sharded(strategy: str, params: Mapping[str, Tensor], ranks: int) -> None:
    """Reject unsharded quantized weights on several ranks: their gradients are not reduced, so ranks would diverge."""
    quantized = {name for name, param in params.items() if components.quantized_local(param) is not None}
    trained = {name: param for name, param in params.items() if param.requires_grad}
    items = {name: param for name, param in trained.items() if name in quantized} or trained
    if ranks > 1 and quantized and items and not any(isinstance(param, DTensor) for param in items.values()):
        name = next(iter(items)).removeprefix("_forward_module.")  # of the module returned by `fabric.setup`
        text = f"does not reduce gradients of unsharded weights ({name}) over {ranks} ranks"
        raise ConfigurationError(f"{strategy} {text}; shard the network with convert_and_shard")


def check_folder(path: Any, models: Iterable[nn.Module]) -> None:
    """Reject single-file checkpoints of quantized models: Lightning loads one key at a time, not scales."""
    if Path(path).is_file() and any(components.quantized_parameters(model) for model in models):
        raise CheckpointError(f"{path} is a single file; save with save_distributed_checkpoint=True")
