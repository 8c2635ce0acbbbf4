"""What one linear layer carries between steps: amax histories, to scale by under delayed scaling, and random draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, limits
from quantshard.collectives.delayed_scaling import PendingAmaxes
from quantshard.collectives.process_groups import Groups, including, spanned, world
from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import ConfigurationError
from quantshard.formats import ALL
from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit
from quantshard.modules.contexts import context
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.numerics import RandomBits
from quantshard.private_torch import RunningStage
from quantshard.recipe import QuantSpec, TensorRole
from quantshard.sharding import Shard
from quantshard.tensor.storage import AMAX_HISTORY, GRADIENT_STREAM, KEY, STREAMS_PER_RANK, next_draw


@dataclass
class LinearState:
    """What one linear layer carries between steps: state of its weights, and delayed-scaling histories.

    `weights`: for each of its weights the key, draws and, under delayed scaling, amax history. `record`: whether amaxes
    seen now are recorded (in training). `tp`: how its weights are cut by tensor parallelism. `amax_group`: whom
    delayed scaling reduces amaxes over; None: whom autocast says. `data_group`: the ranks that together work on one
    batch, if not those of `tp`, by which random streams are told apart. `layers`: of which layers the weights are,
    where each has histories of its own; the input is scaled by the first one's, and noted for all. `stage`: of which
    pipeline's the call is, as far as that matters.
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

    @staticmethod
    def joined(layers: Sequence[LinearState]) -> LinearState:
        """That of several layers, of one weight each, which read one input."""
        return replace(layers[0], weights=[layer.weights[0] for layer in layers], layers=layers)

    def history(self, role: TensorRole, part: int) -> Tensor | None:
        """Under delayed scaling, that of a tensor's amaxes."""
        if role is TensorRole.WEIGHT:
            return self.weights[part].get(AMAX_HISTORY)
        return self.input_history if role is TensorRole.INPUT else self.grad_output_history

    def owners(self, role: TensorRole, part: int) -> Sequence[LinearState]:
        """The layers whose histories are told of an amax: of an input all, of an output's gradient its own."""
        if not self.layers or role is TensorRole.WEIGHT:
            return (self,)
        return self.layers if role is TensorRole.INPUT else (self.layers[part],)

    def split(self, role: TensorRole) -> OperandSplit | None:
        """How an input, or the gradient of an output, [tokens, features] is cut over the ranks.

        Along features, it stays so. Along tokens (under sequence parallelism) the GEMMs need it gathered.
        """
        if self.tp.size == 1 or self.tp.mode is None:
            return None
        if (role is TensorRole.INPUT) == (self.tp.mode == "row"):
            return self.tp.split(1)
        return self.tp.split(0) if self.tp.sequence_parallel else None

    @property
    def weight_split(self) -> OperandSplit | None:
        """How a weight [out_features, in_features] is cut over the ranks."""
        if self.tp.size == 1 or self.tp.mode is None:
            return None
        return self.tp.split(0 if self.tp.mode == "column" else 1)


class GradientRandomBits:
    """Random words for the stochastic rounding of one gradient: one draw of the weight's counter, taken if needed.

    Ranks that work on different data have streams of their own; those of one group, a tensor-parallel one, share the
    words of the tensor that they hold pieces of, by global index.
    """

    def __init__(self, state: LinearState, part: int) -> None:
        self.weight = state.weights[part]
        self.group = state.tp.group if state.data_group is None else state.data_group
        self.drawn: tuple[int, int | Tensor] | None = None

    @property
    def by_rows(self) -> operands.RandomBitsFn:
        """Words of dgrad's operand, for any rectangle of it."""
        return partial(self._words, False)

    @property
    def by_columns(self) -> operands.RandomBitsFn:
        """Words of wgrad's operand, which is the transpose."""
        return partial(self._words, True)

    def _words(self, transposed: bool, shard: Shard) -> RandomBits:
        if self.drawn is None:
            self.drawn = int(self.weight[KEY]), next_draw(self.weight)
        base = tensor_parallel.stream_base(self.group) * STREAMS_PER_RANK
        stream = base + GRADIENT_STREAM
        return RandomBits(*self.drawn, stream, shard.global_shape, shard.origin, shard.shape, transposed)


AMAX_NUMBERS = {role: number for number, role in enumerate(TensorRole)}
"""By which ranks tell apart the amaxes of tensors that belong to one weight."""


def amaxes_of(role: TensorRole) -> PendingAmaxes:
    """Those of the pass in which tensors of a role are quantized for the first time."""
    if role is not TensorRole.GRAD_OUTPUT:
        return context.forward_amaxes()
    context.flush_after_backward()
    return context.backward_amaxes


def check_same_stage(group: Groups, stage: RunningStage) -> None:
    """Refuse to reduce amaxes over ranks that run other stages of a pipeline: each would wait for the other, since a
    stage runs backward once for each micro-batch, when its gradients come. A stage that infers shapes notes none.

    Raises:
        ConfigurationError: `group` has such ranks.
    """
    pipeline = world() if stage.group is None else stage.group
    if pipeline is None or stage.infers:
        return
    others = {*dist.get_process_group_ranks(pipeline)} - {dist.get_rank()}
    if any(not others.isdisjoint(dist.get_process_group_ranks(each)) for each in spanned(group)):
        raise ConfigurationError(limits.refusal("other stages", "torch.distributed.pipelining"))


class DelayedScale:
    """One tensor under delayed scaling: the amax of its history, to scale by, and where its own is noted for later.

    `notes`: whether it is to be. Of an input or a weight that is done once for a call: its backward and its
    recomputation scale by the same amax. All output gradients of a layer share one history, as one GEMM's would.
    """

    def __init__(self, role: TensorRole, cell: QuantSpec, call: LinearContext, state: LinearState, part: int) -> None:
        self._role, self._call, self._state, self._part = role, call, state, part
        known = call.amaxes.get((role, part))
        infers = state.stage is not None and state.stage.infers
        self.notes = known is None and state.record and not infers  # `record` of compiled layers is that of their trace
        if known is None:
            self._pass, self._owners = amaxes_of(role), state.owners(role, part)
            self._histories = [found for owner in self._owners if (found := owner.history(role, part)) is not None]
            self._queue = kernel_dispatch.launch_queue(self._histories[0].device)
            known = self._pass.past(self._histories[0], cell.scaling.most_recent, self._queue)
            if role is not TensorRole.GRAD_OUTPUT:
                call.amaxes[role, part] = known
        self.amax: Tensor = known

    @staticmethod
    def of(
        role: TensorRole, cell: QuantSpec | None, call: LinearContext, state: LinearState, part: int = 0
    ) -> DelayedScale | None:
        """None unless `cell` scales by past amaxes."""
        if cell is None or not cell.scaling.history:
            return None
        return DelayedScale(role, cell, call, state, part)

    def slot(self, device: torch.device) -> Tensor:
        """Where the largest of its amaxes, float32, is kept until it is recorded: for kernels to raise."""
        role, part, state = self._role, self._part, self._state
        group = self._call.group if state.amax_group is None else state.amax_group
        if state.tp.mode is not None:  # what is cut has one scale, whomever autocast was told
            group = including(group, state.tp.group)
        if state.stage is not None:
            check_same_stage(group, state.stage)
        # all output gradients of a layer have one history: of the largest of their amaxes
        keys = [owner.weights[part if role is TensorRole.WEIGHT else 0][KEY] for owner in self._owners]
        queue = self._queue if self._queue[0] == device else kernel_dispatch.launch_queue(device)
        return self._pass.slot(keys, AMAX_NUMBERS[role], self._histories, group, queue)

    def note(self, values: Tensor) -> None:
        """Note the amax of a matrix."""
        slot = self.slot(values.device)
        torch.maximum(slot, kernel_dispatch.block_amax(values, (ALL, ALL)).view(()), out=slot)
