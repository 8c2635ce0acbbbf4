"""State of compiled layers: past amaxes and random draws enter a graph as tensors, and new amaxes leave it as tensors.

    read_state      before a pass that needs them: reads past amaxes and counts draws
    record_amaxes   after a pass under delayed scaling: records the new amaxes
    fetch_copy      gathers the copy of a weight that FSDP2 did not gather

Graphs call these operators in the order of the code. No CUDA graph contains them: a replay would repeat their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from quantshard import kernels, limits, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.gemm.operands import OperandPlan, OperandUsage
from quantshard.modules.contexts import pending_amaxes, recompute, settings
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_state import DelayedScale, GraphState, LayerPlans, LinearState
from quantshard.modules.gemms.operator_arguments import (
    LinearModule,
    StepArguments,
    StepStructure,
    live_module,
    structure_of,
)
from quantshard.recipe import QuantSpec, TensorRole
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tensor.storage import QuantizedStorage

DelayedTensor = tuple[int, TensorRole, int]
"""A tensor that a pass scales by a past amax: number of the layer, role, and index of the weight in the layer."""


def delayed_tensors(structure: StepStructure, backward: bool) -> list[DelayedTensor]:
    """The tensors that a pass scales by past amaxes."""
    tensors: list[DelayedTensor] = []
    for layer, parts in enumerate(range(len(layer.weights)) for layer in structure.layers):
        if backward:
            tensors += [(layer, TensorRole.GRAD_OUTPUT, part) for part in parts]
        else:
            tensors.append((layer, TensorRole.INPUT, 0))
            tensors += [] if structure.is_stored else [(layer, TensorRole.WEIGHT, part) for part in parts]
    return [tensor for tensor in tensors if (spec := _spec(structure, tensor[1])) and spec.scaling.history]


def _spec(structure: StepStructure, role: TensorRole) -> QuantSpec | None:
    if role is TensorRole.WEIGHT:
        return structure.recipe.weight
    first, second = structure.recipe.activations[role]
    return first or second


def records(structure: StepStructure, backward: bool) -> bool:
    """Return whether a pass has new amaxes, which its operator returns as its last result."""
    return structure.record and bool(delayed_tensors(structure, backward))


def draws(structure: StepStructure, backward: bool) -> bool:
    """Return whether a pass may draw random bits."""
    role = TensorRole.GRAD_OUTPUT if backward else TensorRole.INPUT
    return any(spec is not None and spec.scaling.stochastic_rounding for spec in structure.recipe.activations[role])


def tensors_read(structure: StepStructure, backward: bool) -> int:
    """How many tensors of `read_state` a pass computes with; 0: it does not call that."""
    if draws(structure, backward):
        return 4
    return 1 + structure.is_observed if delayed_tensors(structure, backward) else 0


_FACTS: dict[str, Callable[[StepStructure, bool], int]] = {
    "tensors read": tensors_read, "draws": draws, "records": records
}  # fmt: skip


@private_torch.constant_in_graphs
def in_forward(fact: str, key: str) -> int:
    """One of the facts above about a forward, while Dynamo traces."""
    return _FACTS[fact](structure_of(key), False)


# Operators ------------------------------------------------------------------------------------------------------------


def _read_state(module: Tensor, key: str, needs: list[bool], after: Tensor | None) -> list[Tensor]:
    """Past amaxes, float32 [delayed tensors]; whether this is a recomputed forward, on the CPU; and for passes that
    draw RNG key and stream of each weight, int64 [weights, 2] as int32 on the CPU, and the number of its draw.

    `needs`: in backward, whether the input and each weight need gradients. `after`: in backward, the gradient of an
    output, without which the partitioner could move the call to forward; None in forward.
    """
    structure, backward = structure_of(key), after is not None
    live = live_module(module, structure)
    states = _live_states(live, structure)
    pending_amaxes.drop_failed_backward()  # entering autocast does this in eager code, but leaves no trace in a graph
    calls = _backward_calls(structure) if backward else _forward_calls(live, structure, module.device)
    amaxes = [_scale(structure, calls, states, tensor).amax for tensor in delayed_tensors(structure, backward)]
    past = torch.stack(amaxes) if amaxes else torch.empty(0, dtype=torch.float32, device=module.device)
    repeated = torch.tensor([any(call.repeated for call in calls)], dtype=torch.bool, device="cpu")
    return [past, repeated, *_drawn(structure, states, needs, module.device)]


def _drawn(
    structure: StepStructure, states: list[LinearState], needs: list[bool], device: torch.device
) -> list[Tensor]:
    if not draws(structure, bool(needs)):
        return [torch.empty((0, 4), dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.int64, device=device)]
    need_weights = structure.by_layer(needs[1:] or [False] * len(structure.weights))
    numbers, role = [], TensorRole.GRAD_OUTPUT if needs else TensorRole.INPUT
    draw_numbers = torch.zeros(len(structure.weights), dtype=torch.int64, device=device)
    slots = iter(draw_numbers.unbind())
    for index, (layer, state) in enumerate(zip(structure.layers, states, strict=True)):
        for part, weight in enumerate(state.weights):
            slot, usage = next(slots), OperandUsage(part == 0, part == 0 and layer.keeps)
            if needs:
                usage = OperandUsage(index > 0 or needs[0], need_weights[index][part])
            plan = OperandPlan(structure.recipe, role, usage)
            if any(spec is not None and spec.scaling.stochastic_rounding for spec in (plan.quantized, plan.transposed)):
                slot.fill_(state.draw(part)[1])
            numbers.append([int(weight[RNG_KEY]), state.stream])
    return [torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.int32), draw_numbers]


def _live_states(module: LinearModule, structure: StepStructure) -> list[LinearState]:
    states = [module._linear_state(layer.weights, structure.recipe, layer.prefix) for layer in structure.layers]
    return [replace(state, record=structure.record) for state in states]


def _forward_calls(module: LinearModule, structure: StepStructure, device: torch.device) -> list[LinearContext]:
    """Check the weights, and return the context of each layer's call."""
    if structure.setting == settings.NO_AUTOCAST and structure.is_stored and structure.is_trained:
        limits.warn("dequantized", module.label(structure.layers[0].weights[0]), "autocast(enabled=False)")
    calls = []
    for layer in structure.layers:
        names = id(module), layer.weights
        call = recompute.linear_context(names, structure.is_stored, structure.record, structure.setting)
        if call.repeated:
            pending_amaxes.flush_after_backward()
        for name in layer.weights:
            module.weight_operand(name, call, device)
        calls.append(call)
    return calls


def _backward_calls(structure: StepStructure) -> list[LinearContext]:
    setting = settings.registered[structure.setting]
    return [LinearContext(setting.recipe, setting.amax_reduction_group, setting.strict) for _ in structure.layers]


def _scale(
    structure: StepStructure, calls: Sequence[LinearContext], states: Sequence[LinearState], tensor: DelayedTensor
) -> DelayedScale:
    layer, role, part = tensor
    scale = DelayedScale.of(role, _spec(structure, role), calls[layer], states[layer], part)
    assert scale is not None
    return scale


def _read_state_shapes(module: Tensor, key: str, needs: list[bool], after: Tensor | None) -> list[Tensor]:
    private_torch.check_order_is_kept()
    structure, backward = structure_of(key), after is not None
    if not backward and structure.recipe.is_delayed and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {structure.names!r}: under "
            "delayed scaling its second forward must scale by the amaxes of the first, which a graph does not keep; "
            "compile the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    weights = len(structure.weights) if draws(structure, backward) else 0
    return [
        module.new_empty((len(delayed_tensors(structure, backward)),), dtype=torch.float32),
        torch.empty((1,), dtype=torch.bool, device="cpu"),
        torch.empty((weights, 4), dtype=torch.int32, device="cpu"),
        module.new_empty((weights,), dtype=torch.int64),
    ]


def _record_amaxes(module: Tensor, key: str, backward: bool, repeated: Tensor, amaxes: Tensor) -> Tensor:
    """Record the new amaxes [delayed tensors] of a pass, unless it recomputed a forward or inferred shapes."""
    structure = structure_of(key)
    if not repeated:
        states, calls = _live_states(live_module(module, structure), structure), _backward_calls(structure)
        for tensor, amax in zip(delayed_tensors(structure, backward), amaxes.clone().unbind(), strict=True):
            scale = _scale(structure, calls, states, tensor)
            if scale.notes:
                scale.add(amax)
    # a tensor, because torch 2.13's Inductor would use a previous output after freeing it
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _fetch_copy(module: Tensor, key: str, index: int, names: list[str], after: Tensor | None) -> list[Tensor]:
    """The missing components of a weight. `after`: see `_read_state`."""
    structure = structure_of(key)
    weight: Any = private_torch.local_tensor(attrgetter(structure.weights[index])(live_module(module, structure)))
    storage: QuantizedStorage = weight.quantized_storage
    for which in storage.spec.format.copies:
        storage = storage.with_copy(which)
    # cloned, because FSDP2 may have gathered them in the meantime
    return [storage.components[name].clone() for name in names]


def _fetch_copy_shapes(module: Tensor, key: str, index: int, names: list[str], after: Tensor | None) -> list[Tensor]:
    spec, shard = structure_of(key).stored[index]
    parts = [spec.format.by_name[name] for name in names]
    return [module.new_empty(shard.component_shape(part), dtype=part.encoding.storage) for part in parts]


def _register(name: str, schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    full = f"quantshard::{name}"
    torch.library.define(full, schema, tags=(torch.Tag.cudagraph_unsafe,))
    torch.library.impl(full, "default", body)
    torch.library.register_fake(full, shapes)
    private_torch.keep_order(getattr(torch.ops.quantshard, name).default)


_register(
    "read_state", "(Tensor module, str key, bool[] needs, Tensor? after) -> Tensor[]", _read_state, _read_state_shapes
)
_register(
    "record_amaxes", "(Tensor module, str key, bool backward, Tensor repeated, Tensor amaxes) -> Tensor",
    _record_amaxes, lambda *_: torch.empty(0, dtype=torch.float32, device="cpu"),
)  # fmt: skip
_register(
    "fetch_copy", "(Tensor module, str key, int index, str[] names, Tensor? after) -> Tensor[]",
    _fetch_copy, _fetch_copy_shapes,
)  # fmt: skip


# In the bodies of operators -------------------------------------------------------------------------------------------


_PLANS: dict[tuple[str, int], LayerPlans] = {}


def layers_of(step: StepArguments, backward: bool) -> tuple[list[LinearContext], list[LinearState], list[Tensor]]:
    """Context and state of each layer in the body of an operator, and the slots of new amaxes."""
    structure, calls, slots = step.structure, _backward_calls(step.structure), list[Tensor]()
    past, repeated, numbers, draw_numbers = (*step.state, *[None] * 4)[:4]
    if not (backward or step.state or kernels.tracing.on):
        calls = _forward_calls(live_module(step.module, structure), structure, step.x.device)
    # an observer finds a layer by the key tensor of its weight
    live = _live_states(live_module(step.module, structure), structure) if structure.is_observed else None
    states, graphs, first = list[LinearState](), list[GraphState](), 0
    for index, layer in enumerate(structure.layers):
        if live is not None and repeated is not None:
            calls[index].repeated = bool(repeated)
        weights = [{} for _ in layer.weights] if live is None else live[index].weights
        plans = _PLANS.setdefault((step.key, index), LayerPlans())
        graphs.append(GraphState(numbers, draw_numbers, first))
        states.append(LinearState(weights, None, None, structure.record, plans=plans, graph=graphs[-1]))
        first += len(layer.weights)
    amaxes = () if past is None else past.unbind()
    for (index, role, part), amax in zip(delayed_tensors(structure, backward), amaxes, strict=True):
        calls[index].amaxes[role, part] = amax
        if structure.record:
            slots.append(torch.zeros((), dtype=torch.float32, device=amax.device))
            graphs[index].slots[role, part] = slots[-1]
    return calls, states, slots
