"""What the tensors of a step on the CPU take, counted at every operation, with kernels that do nothing.

Another count than the plan's: of real storages, resized ones too, under real FSDP2 over gloo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import quantshard as qs
from benchmarks import host
from quantshard import recipe
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.optimizer import make_optimizer
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Operations that would take most of the time in bfloat16 on a CPU."""


def zeros_like_result(function: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of the shapes and dtypes that a function returns, without the computation."""
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return tree_map_only(
        Tensor,
        lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_(),
        function(*on_meta[0], **on_meta[1]),
    )


class StorageCounter(TorchDispatchMode):
    """The most bytes of living storages in each phase, but for those that are `given`; `phase` says which it is."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.phase, self.most = "", dict[str, int]()
        self._given = {StorageWeakRef(tensor.untyped_storage()).cdata: tensor for tensor in given}
        self._live: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = zeros_like_result(function, args, kwargs) if function in _PRODUCTS else function(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, (QuantizedTensor, DTensor)):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._given:
                    self._live[reference.cdata] = reference, None
        self.look()
        return out

    def look(self) -> None:
        """Note what is there now."""
        held = 0
        for address, (reference, _) in list(self._live.items()):
            if reference.expired():
                del self._live[address]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            held += 0 if storage is None else storage.nbytes()
        self.most[self.phase] = max(self.most.get(self.phase, 0), held)


def plain_tensors(tensors: Iterable[Any]) -> list[Tensor]:
    """Local tensors, those of components among them."""
    found: list[Tensor] = []
    for tensor in tensors:
        quantized = components.quantized_local(tensor)
        if quantized is not None:
            found += [*quantized.quantized_storage.components.values(), *quantized.quantized_storage.state.values()]
        else:
            found.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return found


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*plain_tensors([*model.parameters(), *states]), *model.buffers()]


# A training step as `quantshard train` makes it ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run's settings, on how many ranks, and whether its layers are recomputed."""

    settings: TrainSettings
    ranks: int
    recomputed: bool = False

    @property
    def mesh(self) -> MeshSpec:
        """Of its ranks."""
        return self.settings.axes(self.ranks)


def counted(case: Case) -> dict[str, int]:
    """On a rank: the most bytes that the phases of a second step take, weights and optimizer included."""
    settings = case.settings.resolved()
    with host.without_device():
        model = models.build(models.ModelSpec(settings), case.mesh.device_mesh("cpu"))
        optimizer = make_optimizer(model, settings)
        for layer in model.layers if case.recomputed else ():
            layer.forward = partial(qs.checkpoint, layer.forward)  # type: ignore[method-assign]
        tokens = torch.randint(0, 257, (settings.global_batch // dist.get_world_size(), settings.seq_length + 1))
        given = held_by(model, optimizer)
        with StorageCounter([*given, tokens]) as counter:
            for _ in range(2):  # the first allocates what lasts
                counter.most.clear()
                train(model, optimizer, settings, counter, tokens)
    return {phase: held_bytes(given) + most for phase, most in counter.most.items()}


def held_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {StorageWeakRef(each.untyped_storage()).cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def train(
    model: models.LanguageModel,
    optimizer: FusedAdam,
    settings: TrainSettings,
    counter: StorageCounter,
    tokens: Tensor,
) -> None:
    """`Trainer.step`, without what it reports."""
    parts = tokens.chunk(settings.micro_batches)
    for number, part in enumerate(parts):
        models.reduce_gradients(model, now=number == len(parts) - 1)
        counter.phase = "forward"
        loss = models.loss(model(part[:, :-1]), part[:, 1:]) / len(parts)
        counter.look()
        counter.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        counter.look()
    del loss
    counter.phase = "optimizer step"
    for gradient in plain_tensors(param.grad for param in model.parameters()):
        gradient.double().square().sum()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def planned(case: Case, capability: tuple[int, int]) -> dict[str, int]:
    """The same by `quantshard.plan`."""
    settings = case.settings.resolved()
    model = models.LanguageModel(settings, recipe.resolve(settings.recipe), "meta")
    step = qs.TrainingStep(
        settings.global_batch // case.ranks // settings.micro_batches,
        settings.seq_length,
        settings.micro_batches,
        loss=lambda model, tokens, targets: models.loss(model(tokens), targets),
        checkpoint_activations=case.recomputed,
        forward_prefetch=True,
        reduce_dtype=settings.torch_reduce_dtype,
        norm_dtype=torch.float64,
        capability=capability,
    )
    states = settings.state_options
    report = qs.plan(
        model, case.mesh.present, layers=model.layers, reshard_after_forward=True,
        exp_avg_dtype=states.exp_avg_dtype, exp_avg_sq_dtype=states.exp_avg_sq_dtype, step=step,
    )  # fmt: skip
    assert report.memory is not None
    return {each.phase: each.total for each in report.memory.phases}
