"""One sampled step: what layers and optimizers show in it, and what is looked at when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantshard import kernel_dispatch, private_torch
from quantshard.collectives.process_groups import Group
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import Orientation
from quantshard.kernels.tables import lasting_table
from quantshard.modules.base.module import QuantizedModule
from quantshard.numerics.states import MASTER, has_master
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.guards import gradient_of
from quantshard.recipe import TensorRole
from quantshard.tensor import components, observation
from quantshard.tensor.observation import Observer
from quantshard.tensor.storage import KEY, QuantizedStorage
from quantshard.tools.statistics.slots import KINDS, PARAMETER, PendingNumbers, SampleBuffer, gathered

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class ModelNames:
    """The names of a model's parameters and of its weights that layers multiply with, those of other ranks included, in
    an order that all ranks have. A collective call where there are ranks.

    `own`: this rank's parameters, by name. `sizes`: elements of each parameter, globally. `buffers`: where samples add
    up their numbers, by device.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.own = dict(model.named_parameters())
        self.buffers: dict[torch.device, SampleBuffer] = {}
        self._layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedModule)}
        mine = {name: param.numel() for name, param in self.own.items()}, list(self._weights())
        told: list[Any] = [mine]
        if group is not None:
            told = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, mine, group=group)
        self.sizes = _as_in_one_process(sizes for sizes, _ in told)
        self.weights = list(_as_in_one_process(dict.fromkeys(weights) for _, weights in told))
        self.places = {name: place for place, name in enumerate(self.sizes)}

    def _weights(self) -> Iterable[str]:
        for prefix, module in self._layers.items():
            for leaf in module._weights:
                yield f"{prefix}.{leaf}" if prefix else leaf

    def rows(self) -> dict[int, tuple[Tensor, int]]:
        """The first row of each weight of this rank, by the id of its key, which is the weight's alone: a copy of the
        model has a key of the same value. With the key, so that no other gets its id."""
        numbers = {name: number for number, name in enumerate(self.weights)}
        found: dict[int, tuple[Tensor, int]] = {}
        for prefix, module in self._layers.items():
            for leaf in module._weights:
                key = module.weight_state(leaf)[KEY]
                found.setdefault(id(key), (key, numbers[f"{prefix}.{leaf}" if prefix else leaf] * len(KINDS)))
        return found


class StepSample(Observer):
    """One sampled step, from before its forward until after its optimizers' steps.

    `captures`: all of it may be in a CUDA graph, its `measure` included; the graph's replays then make `numbers` anew.
    """

    def __init__(self, names: ModelNames, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._names, self._optimizers, self._rows = names, optimizers, names.rows()
        self._by_device = names.buffers
        self.captures = False
        self.numbers: Tensor | None = None
        """What was measured, as `gathered` gives it; None before."""
        self.order: dict[int, None] = {}
        """Rows in the order in which operands were seen."""
        self._last = -1
        self._gradients: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._codes: dict[str, Tensor] = {}
        self._elements: dict[str, int] = {}
        self._coded: dict[str, int] = {}
        self._by_param: dict[Tensor, str] = {param: name for name, param in names.own.items()}
        self._hooks: list[RemovableHandle] = [each.register_step_pre_hook(self._stepping) for each in optimizers]

    # What it is shown ------------------------------------------------------------------------------------------------

    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """As of all observers. Layers of other models are none of its business."""
        known = self._rows.get(id(key))
        if known is None:
            return
        if not self.captures and kernel_dispatch.is_capturing():
            raise UnsupportedOperationError(
                "Statistics: a CUDA graph is captured in a step that is sampled, and each replay would be counted to "
                "it; capture before Statistics is made, whose samples will not see what replays compute, or capture a "
                "whole step within `with statistics.whole_step()`"
            )
        row = known[1] + _KIND_NUMBERS[role, for_wgrad]
        # whole, unless what was seen last is the other operand of these values
        is_second = for_wgrad and self._last == known[1] + _KIND_NUMBERS[role, False]
        self._last = row
        self.order.setdefault(row)
        buffer = self._by_device.get(values.device) or self._buffer(values.device)
        values = values.detach() if values.requires_grad else values
        buffer.add_operand(row, values, operand, partial=is_second)

    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """As of all observers."""
        rows = x.detach().reshape(-1, x.shape[-1])
        self.see_operand(keys[0], TensorRole.INPUT, False, rows, rows)
        for key, output in zip(keys, outputs, strict=True):
            if output.requires_grad:
                output.register_hook(partial(self._see_gradient, key))

    def _see_gradient(self, key: Tensor, grad: Tensor) -> None:
        if observation.active is self:
            rows = grad.reshape(-1, grad.shape[-1])
            self.see_operand(key, TensorRole.GRAD_OUTPUT, False, rows, rows)

    def _buffer(self, device: torch.device) -> SampleBuffer:
        found = self._by_device.get(device)
        if found is None:
            found = SampleBuffer(len(self._names.weights), len(self._names.sizes), device)
            self._by_device[device] = found
        return found

    # Around an optimizer's step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before it: gradients, and what the step will have changed."""
        values: dict[str, Tensor] = {}
        codes: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self._by_param.get(param)
                grad = gradient_of(param)
                if name is None or grad is None:
                    continue
                self._gradients[name] = private_torch.local_tensor(grad)
                found = _values(optimizer, param)
                (self._before if _values_are_new(optimizer, param) else values)[name] = found
                quantized = components.quantized_local(param)
                if quantized is not None:
                    codes[name] = _codes(quantized.quantized_storage)
        for kept, given in ((self._before, values), (self._codes, codes)):
            kept.update({name: torch.empty_like(each) for name, each in given.items()})
            for names in _by_kind(given):
                torch.ops.aten._foreach_copy_.default([kept[name] for name in names], [given[name] for name in names])
        self._add_squares("gradient", self._gradients)
        for name, grad in self._gradients.items():
            self._elements[name] = grad.numel()
        self._gradients.clear()

    def _add_squares(self, column: str, tensors: Mapping[str, Tensor]) -> None:
        """Of all parameters in a few launches, in float64, without a copy of any."""
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            by_device.setdefault(tensor.device, []).append(name)
        for device, names in by_device.items():
            norms = torch.ops.aten._foreach_norm.Scalar([tensors[name] for name in names], 2, torch.float64)
            rows = self._buffer(device).parameters[:, PARAMETER.index(column)]
            places = lasting_table((tuple(self._names.places[name] for name in names),), device).tensor()[0]
            rows.index_add_(0, places, torch.stack(norms).double().square())

    def read(self) -> PendingNumbers:
        """What was measured, on its way to the host."""
        assert self.numbers is not None
        return PendingNumbers(self.numbers, len(self._names.weights), len(self._names.sizes))

    @torch.no_grad()
    def measure(self, group: Group) -> None:
        """After the optimizers' steps: look at the weights, and bring all numbers together. A collective call."""
        self.stop()
        owners = {
            param: optimizer
            for optimizer in self._optimizers
            for each in optimizer.param_groups
            for param in each["params"]
        }
        self._add_squares("value", self._before)
        for names in _by_kind(self._before):
            now = [_values(owners[param], param) for param in map(self._names.own.__getitem__, names)]
            torch.ops.aten._foreach_sub_.List([self._before[name] for name in names], now)
        self._add_squares("update", self._before)
        for name, param in self._names.own.items():
            quantized = components.quantized_local(param)
            if quantized is not None:
                self._add_weight(name, param, quantized.quantized_storage, owners.get(param))
        if not self._by_device:
            self._buffer(private_torch.local_tensor(next(iter(self._names.own.values()))).device)
        self._add_elements()
        buffers = list(self._by_device.values())
        self.numbers = gathered(buffers, len(self._names.weights), len(self._names.sizes), group)
        for buffer in buffers:
            buffer.clear()
        for copies in (self._before, self._codes):  # a sample that was captured stays, and they are not read again
            copies.clear()

    def _add_elements(self) -> None:
        """What the host knows of parameters, whose columns are the first."""
        known = tuple((self._elements.get(name, 0), self._coded.get(name, 0)) for name in self._names.sizes)
        buffer = next(iter(self._by_device.values()))
        buffer.parameters[:, :2] += lasting_table(known, buffer.parameters.device).tensor()

    def _add_weight(
        self, name: str, param: Tensor, storage: QuantizedStorage, owner: torch.optim.Optimizer | None
    ) -> None:
        known = self._rows.get(id(storage.state[KEY]))
        if known is None:
            return
        row = known[1]
        buffer = self._buffer(storage.device)
        if owner is not None and _has_master(owner, param):
            buffer.add_operand(row, _values(owner, param), storage)
        else:
            buffer.add_codes(row, storage)
        before = self._codes.pop(name, None)
        if before is not None:
            packed = storage.cell.format.copies[Orientation.ROWWISE].codes.encoding.bits < 8
            differing = before.bitwise_xor_(_codes(storage))
            found = [differing & 0xF, differing & 0xF0] if packed else [differing]
            self._coded[name] = differing.numel() * len(found)
            changed = buffer.parameters[self._names.places[name], PARAMETER.index("changed")]
            for part in found:
                changed += part.count_nonzero()

    def stop(self) -> None:
        """See no more."""
        if observation.active is self:
            observation.active = None
        while self._hooks:
            self._hooks.pop().remove()


def _as_in_one_process(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks have by names, in the order of the model of one process: modules have one order on all of them, and of
    the experts of a `GroupedLinear` each rank the next ones. Modules that some ranks lack come behind the others."""
    by_module: dict[str, dict[str, Any]] = {}
    for own in told:
        for name, value in own.items():
            by_module.setdefault(name.rpartition(".")[0], {})[name] = value
    return {name: value for each in by_module.values() for name, value in each.items()}


def _by_kind(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of those of one device and dtype, for which a few launches do."""
    found: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault((tensor.device, tensor.dtype), []).append(name)
    return list(found.values())


def _codes(storage: QuantizedStorage) -> Tensor:
    copy = storage.cell.format.copies[Orientation.ROWWISE]
    return storage.components[copy.codes.name]


def _has_master(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    return has_master(optimizer.state.get(param, {}))


def _values_are_new(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Whether `_values` makes a tensor of what is stored in another form."""
    if not _has_master(optimizer, param):
        return components.quantized_local(param) is not None
    master = optimizer.state[param].get(MASTER)
    is_float32 = isinstance(master, Tensor) and master.dtype is torch.float32
    return isinstance(optimizer, ElementwiseOptimizer) and not is_float32


def _values(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """The local values that an optimizer trains: those of the master, or else of the parameter."""
    if _has_master(optimizer, param):
        if isinstance(optimizer, ElementwiseOptimizer):
            return private_torch.local_tensor(optimizer.get_unscaled_state(param, MASTER))
        return private_torch.local_tensor(optimizer.state[param][MASTER])
    quantized = components.quantized_local(param)
    if quantized is not None:
        return quantized.quantized_storage.dequantize()
    return private_torch.local_tensor(param).detach()
