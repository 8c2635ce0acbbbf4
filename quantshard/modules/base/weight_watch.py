"""Warns about parameters that get gradients but are in no optimizer, usually because it was built before `fully_shard`.

Nothing links a model to its optimizer. After some optimizer steps, parameters with a gradient that no known optimizer
holds are sampled, and checked again after the next step. If some of them have a new gradient and none of these has
changed, a warning is shown. If any has changed, user code updates them, for example from masters; a small update can
leave other 16-bit weights unchanged.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from quantshard import kernel_dispatch, private_torch
from quantshard.errors import warn_user
from quantshard.tensor import components

_LOOKS = (2, 8, 64)
"""Steps of an optimizer to sample after. Several, because other optimizers and gradients can appear later."""
_EVERY = 128
"""Further sampling interval in steps, because weights can be unfrozen at any time."""
_FEW = 4
_MOST = 64
"""Largest number of sampled parameters."""

_modules: WeakSet[nn.Module] = WeakSet()
_told: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_held: WeakKeyDictionary[Optimizer, frozenset[int]] = WeakKeyDictionary()
"""Ids of the parameters of optimizers that have stepped, valid while the optimizer is alive.

Ids instead of weak references, because `Module.to` does not move a tensor that has weak references."""
_samples: WeakKeyDictionary[Optimizer, list[WeightSample]] = WeakKeyDictionary()
_hooks: list[Any] = []


@dataclass(frozen=True)
class WeightSample:
    """A parameter with a gradient that no optimizer holds, and its state at the time of sampling. Lives for one step.

    `leaf`: name of the parameter in `module`. `changes`: version counter of `grad`. `values`: sums over the parameter.
    """

    module: nn.Module
    leaf: str
    param: Tensor
    grad: Tensor
    changes: int
    values: tuple[float, ...]

    @staticmethod
    def of(module: nn.Module, leaf: str, param: Tensor) -> WeightSample:
        assert param.grad is not None
        changes = private_torch.in_place_changes(param.grad)
        return WeightSample(module, leaf, param, param.grad, changes, _values(param))

    def has_new_gradient(self) -> bool:
        """Return whether the parameter has another gradient, or the gradient was changed in place."""
        grad = self.param.grad
        if grad is None or not self.param.requires_grad:
            return False
        return grad is not self.grad or private_torch.in_place_changes(grad) != self.changes

    def has_changed(self) -> bool:
        """Return whether the parameter's values have changed."""
        return _values(self.param) != self.values

    @property
    def shown(self) -> str:
        """Description of the parameter, without the module's name, which is unknown."""
        kind = next(cls for cls in type(self.module).__mro__ if not issubclass(cls, FSDPModule)).__name__
        return f"{self.leaf} {list(self.param.shape)} of a {kind}"


def watch(module: nn.Module) -> None:
    """Start to watch the parameters of a module."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _modules.add(module)


def note_told(modules: Iterable[nn.Module], held: Collection[int]) -> None:
    """Suppress warnings about trainable parameters of `modules` whose ids are not in `held`.

    The caller, who knows their names, has already reported them. Parameters that are unfrozen later are still watched.
    """
    for module in modules:
        for leaf, param in module.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in held:
                _told.setdefault(module, set()).add(leaf)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Post-step hook of every optimizer in this process."""
    if torch.compiler.is_compiling() or kernel_dispatch.is_capturing():
        return
    count = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    looks = count in _LOOKS or count % _EVERY == 0
    if count == 1 or looks:
        _note(optimizer)
    if (samples := _samples.pop(optimizer, None)) is not None:
        _confirm(optimizer, samples)
    if looks and (unheld := list(_unheld())):
        sampled = unheld[:: -(-len(unheld) // _MOST)]  # spread over all models
        _samples[optimizer] = [WeightSample.of(*entry) for entry in sampled]


def _note(optimizer: Optimizer) -> None:
    _held[optimizer] = frozenset(id(param) for group in optimizer.param_groups for param in group["params"])


def _unheld() -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (module, name, parameter) for parameters with a gradient that no known optimizer holds."""
    held_ids = frozenset[int]().union(*_held.values())
    for module in list(_modules):
        for leaf, param in module.named_parameters(recurse=False):
            trains = param.requires_grad and param.grad is not None and id(param) not in held_ids
            if trains and leaf not in _told.get(module, ()) and _has_values(param):
                yield module, leaf, param


def _has_values(param: Tensor) -> bool:
    """Return False in a rehearsed step, as in `plan`, and while tracing."""
    return not private_torch.local_tensor(param).is_meta and not private_torch.is_traced(param)


def _confirm(optimizer: Optimizer, samples: list[WeightSample]) -> None:
    trained = [sample for sample in samples if sample.has_new_gradient()]
    if not trained or any(sample.has_changed() for sample in trained):  # a change means that user code updates them
        return
    gc.collect()  # frees abandoned optimizers
    for living in components.living_optimizers():
        if hasattr(living, "param_groups"):  # missing if its constructor failed
            _note(living)
    unheld = {id(param) for _, _, param in _unheld()}
    confirmed = [sample for sample in trained if id(sample.param) in unheld]
    if confirmed:
        _warn(optimizer, sorted(sample.shown for sample in confirmed))
    for sample in confirmed:
        _told.setdefault(sample.module, set()).add(sample.leaf)


def _values(param: Tensor) -> tuple[float, ...]:
    """Sums over the stored local components of a weight, to detect changes. Synchronizes with the device."""
    quantized = components.quantized_local(param)
    if quantized is None:
        return (float(private_torch.local_tensor(param).detach().sum(dtype=torch.float64)),)
    parts = quantized.quantized_storage.components.values()
    return tuple(float(part.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for part in parts)


def _warn(optimizer: Optimizer, names: list[str]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kind, is_one = type(optimizer).__name__, len(names) == 1
    text = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
    why = (
        f"{kind}, which stepped, has {len(params)} parameters, none of them with a gradient; build it after convert "
        "and fully_shard, which put others in their place"
        if all(param.grad is None for param in params)
        else "give the optimizer model.named_parameters(), or freeze what is not to train: requires_grad_(False)"
    )
    warn_user(
        f"{text}: {'it gets a gradient and is' if is_one else 'they get gradients and are'} in no optimizer, so no "
        f"step changes {'it' if is_one else 'them'}; {why}",
        is_counted=True,
    )
