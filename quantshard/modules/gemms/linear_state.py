"""State of a linear layer between steps: amax histories for delayed scaling, and RNG counters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.collectives.delayed_scaling import PendingAmaxes, check_same_stage
from quantshard.collectives.process_groups import Groups, including
from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import RecipeMismatchError
from quantshard.formats import ALL
from quantshard.gemm import hardware
from quantshard.gemm.operands import OperandPlan, OperandSplit, OperandUsage
from quantshard.kernels.workspace import launch_queue
from quantshard.modules.contexts import context, pending_amaxes
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.weight_gradients import WeightGradients
from quantshard.numerics import RandomBits
from quantshard.private_torch import RunningStage
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.sharding import Shard
from quantshard.tensor import observation
from quantshard.tensor.parameter_state import AMAX_HISTORY, GRADIENT_STREAM, RNG_KEY, STREAMS_PER_RANK, next_draw

if kernels.USABLE:
    from quantshard.gemm import producers

MOST_PLANS: Final = 64
"""The most operand plans that a layer keeps. More than that are needed only if shapes vary, and are then remade."""


class LayerPlans:
    """How the layers of a module quantize and multiply, planned at the first use, and again in copies."""

    def __init__(self) -> None:
        # one attribute, because threads can run one module under different recipes
        self.planned: tuple[Recipe | None, dict[Any, OperandPlan]] = None, {}

    def __reduce__(self) -> Any:
        return LayerPlans, ()

    def operand(
        self, recipe: Recipe, role: TensorRole, like: Tensor, usage: OperandUsage, delayed: bool, stored: bool,
        whole: bool,
    ) -> OperandPlan:  # fmt: skip
        """The plan of an input or output gradient; see `producers.KernelPlan`. `whole`: it is not split over ranks."""
        planned_for, plans = self.planned
        if recipe is not planned_for:
            if recipe != planned_for:
                plans = {}
            self.planned = recipe, plans
        # `has_kernels` depends on the class, since tensors without values have no kernels
        key = (
            role is TensorRole.INPUT, usage, like.shape, like.dtype, type(like), delayed, stored, whole,
            hardware.capability_of(like.device), like.device.type in kernel_dispatch.KERNEL_DEVICES,
        )  # fmt: skip
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            has_kernels = whole and kernel_dispatch.has_kernels(like)
            if has_kernels and producers.can_quantize(like.dtype, recipe.activations[role]):
                plan = producers.KernelPlan(recipe, role, usage, like, delayed, stored)
            else:
                plan = OperandPlan(recipe, role, usage)
            plans[key] = plan
        return plan


@dataclass
class LinearState:
    """State of one linear layer between steps: RNG state of its weights, and delayed-scaling histories.

    `weights`: RNG key, RNG counter and (under delayed scaling) amax history of each weight. `record`: whether amaxes of
    this call are recorded (in training). `tp`: tensor-parallel split of the weights. `amax_group`: ranks that delayed
    scaling reduces amaxes over (None: the group of autocast). `data_group`: ranks that share a batch (None: the
    tensor-parallel group); each such group has its own random stream. `layers`: the layers that own the weights, if
    each keeps its own histories; the input is scaled by the first layer's history and recorded in all. `stage`: running
    pipeline stage; None if amaxes are neither recorded nor observed. `plans`: plans of the module. `graph`: a
    `graph_state.GraphState`, which replaces histories and RNG counters while a graph is traced. `wgrads`: where weight
    gradients go; None: to autograd.
    """

    weights: Sequence[dict[str, Tensor]]
    input_history: Tensor | None
    grad_output_history: Tensor | None
    record: bool
    tp: TensorParallel = tensor_parallel.NONE
    amax_group: Groups = None
    data_group: Groups = None
    layers: Sequence[LinearState] = ()
    stage: RunningStage | None = None
    plans: LayerPlans = field(default_factory=LayerPlans)
    graph: Any = None
    wgrads: WeightGradients | None = None

    @staticmethod
    def joined(layers: Sequence[LinearState]) -> LinearState:
        """Merge the states of layers with one weight each that read the same input."""
        return replace(layers[0], weights=[layer.weights[0] for layer in layers], layers=layers)

    def history(self, role: TensorRole, weight_index: int) -> Tensor | None:
        """The amax history of a tensor; None unless delayed scaling uses one."""
        if role is TensorRole.WEIGHT:
            return self.weights[weight_index].get(AMAX_HISTORY)
        return self.input_history if role is TensorRole.INPUT else self.grad_output_history

    def owners(self, role: TensorRole, weight_index: int) -> Sequence[LinearState]:
        """Layers whose histories record this amax: every layer that reads the input, or the layer of the output."""
        if not self.layers or role is TensorRole.WEIGHT:
            return (self,)
        return self.layers if role is TensorRole.INPUT else (self.layers[weight_index],)

    def draw(self, weight_index: int) -> tuple[Any, int | Tensor, Any]:
        """Draw random bits for the gradient of one weight's output: key, number of the draw, and stream of the data."""
        if self.graph is not None:
            result: tuple[Any, Tensor, Any] = self.graph.draw(weight_index)
            return result
        weight, group = self.weights[weight_index], self.tp.group if self.data_group is None else self.data_group
        stream = tensor_parallel.stream_base(group) * STREAMS_PER_RANK + GRADIENT_STREAM
        return int(weight[RNG_KEY]), next_draw(weight), stream

    def split(self, role: TensorRole) -> OperandSplit | None:
        """The split over ranks of a weight, or of an input or output gradient [tokens, features]; None if not split.

        The GEMMs use pieces along features as they are, and gather pieces along tokens (sequence parallelism).
        """
        if self.tp.size == 1 or self.tp.mode is None:
            return None
        if role is TensorRole.WEIGHT:
            return self.tp.split(0 if self.tp.mode == "column" else 1)
        if (role is TensorRole.INPUT) == (self.tp.mode == "row"):
            return self.tp.split(1)
        return self.tp.split(0) if self.tp.sequence_parallel else None


HISTORIES = {TensorRole.INPUT: "input_amax_history", TensorRole.GRAD_OUTPUT: "grad_output_amax_history"}
"""Role -> name of the amax-history buffer of a layer."""


def linear_state(module: Any, weights: Sequence[str], recipe: Recipe, prefix: str) -> LinearState:
    """State of one linear layer of a module. Missing histories that the recipe needs are created."""
    activations = {}
    for role, length in recipe.histories.items():
        activations[role] = activation_history(module, prefix + HISTORIES[role], length, weights[0], recipe)
    states, spec = [module.weight_state(weight) for weight in weights], recipe.weight
    if spec is not None and spec.scaling.history:
        for weight, state in zip(weights, states, strict=True):
            _check_weight_history(module, weight, state, spec.scaling.history, recipe)
    is_delayed = bool(activations) or (spec is not None and spec.scaling.history > 0)
    is_recorded = module.training and (is_delayed or observation.active is not None)
    stage = private_torch.running_stage() if is_recorded else None
    record = module.training and not (stage is not None and stage.infers)
    input_history, grad_output_history = activations.get(TensorRole.INPUT), activations.get(TensorRole.GRAD_OUTPUT)
    return LinearState(states, input_history, grad_output_history, record, stage=stage, plans=module.gemm_plans)


def activation_history(module: Any, name: str, length: int, weight: str, recipe: Recipe) -> Tensor:
    """Return an amax history of the length that `recipe` needs; create a missing one."""
    history = private_torch.registered_buffer(module, name)
    if history is None:
        if module.training and context.is_strict():
            raise limits.fallback_error(("late amax history",), module.label(name))
        if module.training:
            warnings.warn(f"{module.label(name)}: {limits.FALLBACKS['late amax history']}", stacklevel=2)
        device = private_torch.local_tensor(module.get_parameter(weight)).device
        module.register_buffer(name, history := _empty_history(length, device))
    if history.numel() != length:
        raise _wrong_length(module.label(name), history, length, recipe)
    return history


def _check_weight_history(module: Any, weight: str, state: dict[str, Tensor], length: int, recipe: Recipe) -> None:
    """Ensure that a weight's state has the amax history that the recipe needs, on the weight's device."""
    history = state.get(AMAX_HISTORY)
    if history is not None and history.numel() != length:
        raise _wrong_length(module.label(weight), history, length, recipe)
    if history is None or state is module._born_states.get(weight):
        device = private_torch.local_tensor(getattr(module, weight)).device
        if history is None:
            state[AMAX_HISTORY] = _empty_history(length, device)
        elif history.device != device:  # Module.to moves only parameters and buffers
            state[AMAX_HISTORY] = history.to(device)


def _wrong_length(name: str, history: Tensor, length: int, recipe: Recipe) -> RecipeMismatchError:
    return RecipeMismatchError(
        f"{name} holds {history.numel()} past amaxes, but autocast's recipe {recipe.name!r} asks for {length}; use one "
        "recipe object for training and evaluation"
    )


def _empty_history(length: int, device: torch.device) -> Tensor:
    """A zeroed float32 history, created outside of inference mode so that training can update it later."""
    with torch.inference_mode(False):
        return torch.zeros(length, dtype=torch.float32, device=device)


class GradientRandomBits:
    """Random bits for the stochastic rounding of one gradient, from one lazy draw of the weight's RNG counter."""

    def __init__(self, state: LinearState, weight_index: int) -> None:
        self.state, self.weight_index = state, weight_index
        self.drawn: tuple[Any, int | Tensor, Any] | None = None

    def by_rows(self, shard: Shard, transposed: bool = False) -> RandomBits:
        """Random bits for a rectangle of dgrad's operand."""
        self.drawn = self.drawn or self.state.draw(self.weight_index)
        return RandomBits(*self.drawn, shard.global_shape, shard.origin, shard.shape, transposed)

    def by_columns(self, shard: Shard) -> RandomBits:
        """Random bits for a rectangle of wgrad's operand, which is the transpose."""
        return self.by_rows(shard, transposed=True)


AMAX_NUMBERS = {role: number for number, role in enumerate(TensorRole)}
"""A number per role, which ranks use to agree on the order of a weight's amaxes."""


def amaxes_of(role: TensorRole) -> PendingAmaxes:
    """The pending amaxes of the pass (forward or backward) in which this role is quantized first."""
    if role is not TensorRole.GRAD_OUTPUT:
        return pending_amaxes.forward_amaxes()
    pending_amaxes.flush_after_backward()
    return pending_amaxes.backward_amaxes


class DelayedScale:
    """One tensor under delayed scaling: `amax` of its history, to scale by, and a slot for the new amax.

    `notes`: whether the new amax is recorded. An input or weight records one amax per call; backward and recomputation
    reuse the scale of forward. All output gradients of a layer share one history, like the output of one GEMM.
    """

    def __init__(
        self, role: TensorRole, spec: QuantSpec, call: LinearContext, state: LinearState, weight_index: int
    ) -> None:
        self._role, self._call, self._state, self._weight_index = role, call, state, weight_index
        self._most_recent = spec.scaling.most_recent
        infers = state.stage is not None and state.stage.infers
        is_new = (role, weight_index) not in call.amaxes
        self.notes = is_new and state.record and not infers  # compiled layers have `record` from their trace
        if is_new:
            self._pass, self._owners = amaxes_of(role), state.owners(role, weight_index)
            self._histories = [
                history for owner in self._owners if (history := owner.history(role, weight_index)) is not None
            ]
            self._queue = launch_queue(self._histories[0].device)

    @staticmethod
    def of(
        role: TensorRole, spec: QuantSpec | None, call: LinearContext, state: LinearState, weight_index: int = 0
    ) -> DelayedScale | None:
        """Create a DelayedScale; return None unless `spec` scales by past amaxes."""
        if spec is None or not spec.scaling.history:
            return None
        if state.graph is not None:
            scale: DelayedScale = state.graph.scale(role, weight_index)
            return scale
        return DelayedScale(role, spec, call, state, weight_index)

    @cached_property
    def amax(self) -> Tensor:
        """The amax to scale by."""
        key = self._role, self._weight_index
        amax = self._call.amaxes.get(key)
        if amax is None:
            amax = self._pass.past(self._histories[0], self._most_recent, self._queue)
            if self._role is not TensorRole.GRAD_OUTPUT:
                self._call.amaxes[key] = amax
        return amax

    def slot(self, device: torch.device) -> Tensor:
        """A float32 scalar that kernels raise to the new amax, until the amax is recorded."""
        queue = self._queue if self._queue[0] == device else launch_queue(device)
        return self._pass.slot(*self._destination(), queue)

    def add(self, amax: Tensor) -> None:
        """Record a float32 scalar, which nobody changes any more, as the new amax."""
        keys, number, histories, group = self._destination()
        self._pass.note_all(keys, number, histories, amax.expand(len(histories)), group)

    def _destination(self) -> tuple[list[Tensor], int, Sequence[Tensor], Groups]:
        """Keys, number, histories and group of the new amax; see `PendingAmaxes.slot`."""
        role, state = self._role, self._state
        group = self._call.group if state.amax_group is None else state.amax_group
        if state.tp.mode is not None:  # a sharded tensor has one scale, so its ranks always take part
            group = including(group, state.tp.group)
        if state.stage is not None:
            check_same_stage(group, state.stage)
        # all output gradients of a layer share one history, which records their largest amax
        index = self._weight_index if role is TensorRole.WEIGHT else 0
        return [owner.weights[index][RNG_KEY] for owner in self._owners], AMAX_NUMBERS[role], self._histories, group

    def note(self, values: Tensor) -> None:
        """Record the amax of a matrix in the slot."""
        slot = self.slot(values.device)
        torch.maximum(slot, kernel_dispatch.block_amax(values, (ALL, ALL)).view(()), out=slot)
