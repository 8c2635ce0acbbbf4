"""One sampled step: what layers and optimizers report during it, and what is measured at its end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import kernel_dispatch, private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.collectives.process_groups import Group
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import Orientation
from quantshard.kernels.workspace import lasting_table
from quantshard.modules.base.module import QuantizedModule
from quantshard.numerics.states import MASTER, has_master
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.guards import gradient_of
from quantshard.recipe import TensorRole
from quantshard.tensor import components, observation
from quantshard.tensor.observation import Observer
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tensor.storage import QuantizedStorage
from quantshard.tools.statistics.rows import KINDS, PARAMETER, SampleBuffer, gathered

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class ModelNames:
    """Names of a model's parameters and of its GEMM weights over all ranks, in the same order on every rank.

    Construction is a collective call.

    `own`: this rank's parameters, by name. `sizes`: global number of elements of each parameter. `buffers`:
    accumulators of samples, by device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.own = dict(model.named_parameters())
        self.buffers: dict[torch.device, SampleBuffer] = {}
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
        local_info = {name: param.numel() for name, param in self.own.items()}, [name for name, _ in self._weights()]
        info_of_ranks = agreement.all_gather_object(local_info)
        self.sizes = _as_in_one_process(sizes for sizes, _ in info_of_ranks)
        self.weights = list(_as_in_one_process(dict.fromkeys(weights) for _, weights in info_of_ranks))
        self.places = {name: index for index, name in enumerate(self.sizes)}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._layers.items():
            for param_name in module._weights:
                name = f"{prefix}.{param_name}" if prefix else param_name
                yield name, module.weight_state(param_name)[RNG_KEY]

    def rows(self) -> dict[int, tuple[Tensor, int]]:
        """Map the id of each weight's key (a copy of the model has an equal key) to (key, first row of the weight)."""
        numbers = {name: number for number, name in enumerate(self.weights)}
        rows: dict[int, tuple[Tensor, int]] = {}
        for name, key in self._weights():
            rows.setdefault(id(key), (key, numbers[name] * len(KINDS)))
        return rows


class StepSample(Observer):
    """Observer of a step until after its optimizers' steps. `captures`: whether a CUDA graph captures the step."""

    def __init__(self, names: ModelNames, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._names, self._optimizers, self._rows = names, optimizers, names.rows()
        self._by_device = names.buffers
        self.captures = False
        self.numbers: Tensor | None = None
        """Result of `gathered`; None before `measure`."""
        self.order: dict[int, None] = {}
        """Rows in the order in which operands were reported."""
        self._last = -1
        self._before: dict[str, Tensor] = {}
        self._codes: dict[str, Tensor] = {}
        self._elements: dict[str, int] = {}
        self._coded: dict[str, int] = {}
        self._by_param = {param: name for name, param in names.own.items()}
        self._hooks = [optimizer.register_step_pre_hook(self._stepping) for optimizer in optimizers]

    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """See `Observer`. Layers of other models are ignored."""
        entry = self._rows.get(id(key))
        if entry is None:
            return
        if not self.captures and kernel_dispatch.is_capturing():
            advice = "capture before creating Statistics, or within `with statistics.whole_step()`"
            raise UnsupportedOperationError(f"Statistics: a CUDA graph is captured in a sampled step; {advice}")
        row = entry[1] + _KIND_NUMBERS[role, for_wgrad]
        # Sample in part if the previous operand was quantized from the same values.
        is_second = for_wgrad and self._last == entry[1] + _KIND_NUMBERS[role, False]
        self._last = row
        self.order.setdefault(row)
        values = values.detach() if values.requires_grad else values
        self._buffer(values.device).add_operand(row, values, operand, partial=is_second)

    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
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
        if device not in self._by_device:
            self._by_device[device] = SampleBuffer(len(self._names.weights), len(self._names.sizes), device)
        return self._by_device[device]

    @torch.no_grad()
    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before an optimizer's step: record gradients, values and codes that the step will change."""
        gradients, values, codes = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self._by_param.get(param)
                grad = gradient_of(param)
                if name is None or grad is None:
                    continue
                gradients[name] = private_torch.local_tensor(grad)
                param_values = trained_values(optimizer, param)
                (self._before if _values_are_new(optimizer, param) else values)[name] = param_values
                storage = components.quantized_storage(param)
                if storage is not None:
                    codes[name] = _codes(storage)
        for copies, sources in ((self._before, values), (self._codes, codes)):
            copies.update({name: torch.empty_like(source) for name, source in sources.items()})
            for names in _by_kind(sources):
                torch.ops.aten._foreach_copy_.default([copies[n] for n in names], [sources[n] for n in names])
        self._add_squares("gradient", gradients)
        self._elements |= {name: grad.numel() for name, grad in gradients.items()}

    def _add_squares(self, column: str, tensors: Mapping[str, Tensor]) -> None:
        """Add squared norms of all tensors in a few launches, in float64, without copying a tensor."""
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            by_device.setdefault(tensor.device, []).append(name)
        for device, names in by_device.items():
            norms = torch.ops.aten._foreach_norm.Scalar([tensors[name] for name in names], 2, torch.float64)
            rows = self._buffer(device).parameters[:, PARAMETER.index(column)]
            indices = lasting_table((tuple(self._names.places[name] for name in names),), device).tensor()[0]
            rows.index_add_(0, indices, torch.stack(norms).double().square())

    @torch.no_grad()
    def measure(self, group: Group) -> Tensor:
        """After the optimizers' steps: measure the weights, and return `numbers`. A collective call."""
        self.stop()
        groups = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        owners = {param: optimizer for optimizer, group in groups for param in group["params"]}
        self._add_squares("value", self._before)
        for names in _by_kind(self._before):
            new_values = [trained_values(owners[param], param) for param in map(self._names.own.__getitem__, names)]
            torch.ops.aten._foreach_sub_.List([self._before[name] for name in names], new_values)
        self._add_squares("update", self._before)
        for name, param in self._names.own.items():
            storage = components.quantized_storage(param)
            if storage is not None:
                self._add_weight(name, param, storage, owners.get(param))
        if not self._by_device:
            self._buffer(private_torch.local_tensor(next(iter(self._names.own.values()))).device)
        # The first columns of a parameter are known on the host.
        counts = tuple((self._elements.get(name, 0), self._coded.get(name, 0)) for name in self._names.sizes)
        parameters = next(iter(self._by_device.values())).parameters
        parameters[:, :2] += lasting_table(counts, parameters.device).tensor()
        buffers = list(self._by_device.values())
        self.numbers = gathered(buffers, len(self._names.weights), len(self._names.sizes), group)
        for buffer in buffers:
            buffer.clear()
        # A captured sample lives on without these copies.
        for copies in (self._before, self._codes):
            copies.clear()
        return self.numbers

    def _add_weight(
        self, name: str, param: Tensor, storage: QuantizedStorage, owner: torch.optim.Optimizer | None
    ) -> None:
        entry = self._rows.get(id(storage.state[RNG_KEY]))
        if entry is None:
            return
        row = entry[1]
        buffer = self._buffer(storage.device)
        if owner is not None and has_master(owner.state.get(param, {})):
            buffer.add_operand(row, trained_values(owner, param), storage)
        else:
            buffer.add_codes(row, storage)
        old_codes = self._codes.pop(name, None)
        if old_codes is not None:
            is_packed = storage.spec.format.copies[Orientation.ROWWISE].codes.encoding.bits < 8
            differing = old_codes.bitwise_xor_(_codes(storage))
            code_bits = [differing & 0xF, differing & 0xF0] if is_packed else [differing]
            self._coded[name] = differing.numel() * len(code_bits)
            changed = buffer.parameters[self._names.places[name], PARAMETER.index("changed")]
            for part in code_bits:
                changed += part.count_nonzero()

    def stop(self) -> None:
        if observation.active is self:
            observation.active = None
        while self._hooks:
            self._hooks.pop().remove()


def _as_in_one_process(values_of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge values by name over ranks, in the model's order; experts are consecutive over ranks."""
    by_module: dict[str, dict[str, Any]] = {}
    for local in values_of_ranks:
        for name, value in local.items():
            by_module.setdefault(name.rpartition(".")[0], {})[name] = value
    return {name: value for values in by_module.values() for name, value in values.items()}


def _by_kind(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    names_by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        names_by_kind.setdefault((tensor.device, tensor.dtype), []).append(name)
    return list(names_by_kind.values())


def _codes(storage: QuantizedStorage) -> Tensor:
    return storage.components[storage.spec.format.copies[Orientation.ROWWISE].codes.name]


def _values_are_new(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Whether `trained_values` returns a new tensor instead of a stored one."""
    if not has_master(optimizer.state.get(param, {})):
        return components.quantized_local(param) is not None
    master_dtype = getattr(optimizer.state[param].get(MASTER), "dtype", None)
    return isinstance(optimizer, ElementwiseOptimizer) and master_dtype is not torch.float32


def trained_values(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Local values that an optimizer trains: its master's if there is one, otherwise the parameter's."""
    if has_master(optimizer.state.get(param, {})):
        if isinstance(optimizer, ElementwiseOptimizer):
            return private_torch.local_tensor(optimizer.get_unscaled_state(param, MASTER))
        return private_torch.local_tensor(optimizer.state[param][MASTER])
    storage = components.quantized_storage(param)
    return private_torch.local_tensor(param).detach() if storage is None else storage.dequantize()
