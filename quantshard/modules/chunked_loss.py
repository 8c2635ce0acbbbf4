"""A linear layer and the cross-entropy of its outputs, computed for some tokens at a time.

The logits of all tokens never exist together. For a mean or a sum, forward also computes the gradients: it overwrites
the logits of each chunk with their gradient, multiplies, and adds the products in float32. Backward scales these sums
by the incoming gradient and rounds them to the dtypes of the inputs, once. With `reduction="none"`, backward computes
each chunk's logits again.

Results depend on the shapes, not on the time or order of anything: the same call has the same bits on the same device.
Another number of tokens can change the chunks, and with them the last bits of a GEMM or of a gradient's sum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from quantshard import kernel_dispatch, private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.contexts.context import autocast_input

LOGITS_AT_ONCE: Final = 1 << 27
"""The most logits of a chunk: 256 MiB in bfloat16.

If the weight is trained and larger, a chunk has as many logits as the weight has elements: rounding its gradient takes
this memory too, and each chunk adds to the whole gradient.
"""

ROWS: Final = 128
"""Chunks have a multiple of this number of tokens, for the tiles of GEMMs."""

DESCRIPTION: Final = "quantshard_loss"
"""Attribute of a converted model: how its loss is computed, for reports."""

REDUCTIONS: Final = ("mean", "sum", "none")


class Gradients(NamedTuple):
    """Gradients of the sum of the losses, in float32 (float64 for float64 inputs); empty if not required."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None,
    return_z_loss: bool = False,
) -> Any:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)` without the logits of all tokens.

    Logits have the dtype of the inputs, losses are float32. A weight that is a DTensor sharded by rows over one mesh
    axis (a sharded vocabulary) gives each rank the loss of all tokens; `hidden` is then the same on all ranks of the
    axis, or a DTensor. A label outside the vocabulary makes the loss NaN.

    Args:
        hidden: [..., features].
        weight: [vocabulary, features].
        labels: int64 [...], not shifted.
        bias: [vocabulary].
        ignore_index: label of tokens without loss.
        label_smoothing: share of the target probability that is spread over the vocabulary, 0 to 1.
        z_loss: factor of log(Z)^2 that is added to each token's loss, where Z is the denominator of the softmax.
        logit_scale: factor of all logits, as in Granite (1 / logits_scaling) and Cohere.
        softcap: bound of the logits x, which become softcap * tanh(x / softcap), as in Gemma 2; 0: no bound.
        reduction: "mean" over tokens that are not ignored, "sum", or "none".
        num_items_in_batch: divisor of the sum, instead of the number of tokens of this call.
        return_z_loss: also return the part of the loss that `z_loss` adds, detached.

    Returns:
        The float32 loss; with `return_z_loss` a tuple.
    """
    if reduction not in REDUCTIONS:
        raise ConfigurationError(f"linear_cross_entropy(reduction={reduction!r}): choose one of: {REDUCTIONS}")
    if hidden.shape[:-1] != labels.shape:
        raise ConfigurationError(f"linear_cross_entropy: labels {list(labels.shape)} must be {list(hidden.shape[:-1])}")
    shape, labels = labels.shape, labels.flatten()
    vocabulary, first, group = weight.shape[0], 0, ""
    hidden = hidden.flatten(0, -2)
    if isinstance(weight, DTensor):
        hidden, weight, bias, first, group = _shards(hidden, weight, bias)
    hidden, weight, bias = (
        autocast_input(hidden),
        autocast_input(weight),
        None if bias is None else autocast_input(bias),
    )
    options = (ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    arguments = (hidden, weight, bias, labels, *options, vocabulary, first, group)
    needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias)]
    is_valid = labels != ignore_index
    if reduction != "none" and any(needs):
        total, log_z, *_ = _OPS.linear_cross_entropy_sum.default(*arguments, needs)
    else:
        losses, log_z = _OPS.linear_cross_entropy.default(*arguments)
        total = losses.view(shape) if reduction == "none" else losses.sum()
    z_losses = torch.where(is_valid, z_loss * log_z.detach().square(), 0.0)
    z_total = z_losses.view(shape) if reduction == "none" else z_losses.sum()
    if num_items_in_batch is not None:
        total, z_total = total / num_items_in_batch, z_total / num_items_in_batch
    elif reduction == "mean":
        count = is_valid.sum()
        total, z_total = (_mean(x, count) for x in (total, z_total))
    return (total, z_total) if return_z_loss else total


def _mean(total: Tensor, count: Tensor) -> Tensor:
    # without tokens the loss is NaN and its gradient 0, as in torch.nn.functional.cross_entropy
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def _shards(hidden: Tensor, weight: DTensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, int, str]:
    """Return the local tensors, the vocabulary index of the first local row, and the name of the process group."""
    mesh = weight.device_mesh
    if weight.placements != (Shard(0),):
        raise ConfigurationError(f"linear_cross_entropy: weight is {weight.placements}; shard its rows over one axis")
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    # each rank computes a part of the gradient of hidden; DTensor sums them in backward
    hidden = hidden.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    rows = -(weight.shape[0] // -mesh.size())
    first = min(rows * mesh.get_local_rank(), weight.shape[0])
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return hidden, weight.to_local(), local_bias, first, mesh.get_group().group_name


# Operators, opaque to torch.compile, which would trace every chunk. The first arguments are the fields of ChunkedHead.

_FIELDS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, float label_smoothing, float z_loss, "
    "float logit_scale, float softcap, SymInt vocabulary, SymInt first, str group"
)


def _sum_and_gradients(*args: Any) -> tuple[Tensor, ...]:
    """Return the sum of the losses, log(Z) of each token, and `Gradients`."""
    head = ChunkedHead(*args[:-1])
    losses, log_z, gradients = head.computed(head.is_valid.float(), args[-1])
    return (losses.sum(), log_z, *gradients)


def _sum_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    log_z = hidden.new_empty(len(hidden), dtype=torch.float32)
    return (log_z.new_empty(()), log_z, *_empty_gradients(hidden, weight, bias, rest[-1]))


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])
    ctx.dtypes, ctx.needs, ctx.rest = [None if x is None else x.dtype for x in inputs[:3]], inputs[-1], len(inputs) - 3


def _scaled_gradients(ctx: Any, grad_total: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    if grad_total is None:
        return (None,) * (3 + ctx.rest)
    # read in float32 and written rounded, without a scaled copy in float32
    grads = [
        torch.mul(grad, grad_total, out=torch.empty_like(grad, dtype=dtype)) if is_required else None
        for grad, dtype, is_required in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs, strict=True)
    ]
    return (*grads, *[None] * ctx.rest)


def _token_losses(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and log(Z) of each token."""
    return ChunkedHead(*args).computed(None, [False] * 3)[:2]


def _token_shapes(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    return losses, torch.empty_like(losses)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:4])
    ctx.options = inputs[4:]


def _recomputed_gradients(ctx: Any, grad_losses: Tensor | None, grad_log_z: Any) -> tuple[Any, ...]:
    unused = [None] * (1 + len(ctx.options))
    if grad_losses is None:
        return (None, None, None, *unused)
    log_z, *inputs = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads = _OPS.linear_cross_entropy_backward.default(*inputs, *ctx.options, grad_losses, log_z, needs)
    return (*[g.to(x.dtype) if n else None for g, x, n in zip(grads, inputs[:3], needs, strict=True)], *unused)


def _token_gradients(*args: Any) -> tuple[Tensor, ...]:
    """Return `Gradients` of the losses' sum weighted by the gradient of each loss."""
    *fields, grad_losses, log_z, needs = args
    head = ChunkedHead(*fields)
    return tuple(head.computed(grad_losses.where(head.is_valid, 0.0), needs, log_z)[2])


def _gradient_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_gradients(hidden, weight, bias, rest[-1]))


def _without_autocast(body: Callable[..., Any]) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return body(hidden, *args)

    return run


_NAME = "quantshard::linear_cross_entropy"
for _name, _more, _results, _body, _shapes in (
    (f"{_NAME}_sum", ", bool[] needs", 5, _sum_and_gradients, _sum_shapes),
    (_NAME, "", 2, _token_losses, _token_shapes),
    (f"{_NAME}_backward", ", Tensor grad_losses, Tensor log_z, bool[] needs", 3, _token_gradients, _gradient_shapes),
):
    torch.library.define(_name, f"({_FIELDS}{_more}) -> ({', '.join(['Tensor'] * _results)})")
    torch.library.impl(_name, "default", _without_autocast(_body))
    torch.library.register_fake(_name, _shapes)
torch.library.register_autograd(f"{_NAME}_sum", _scaled_gradients, setup_context=_keep_gradients)
torch.library.register_autograd(_NAME, _recomputed_gradients, setup_context=_keep_inputs)

_OPS: Final = torch.ops.quantshard
OPERATORS: Final = frozenset(getattr(_OPS, f"linear_cross_entropy{end}").default for end in ("", "_sum", "_backward"))


def logits_bytes(args: Sequence[Any]) -> int:
    """Compute the size of the logits of a chunk from the arguments of one of `OPERATORS`."""
    hidden, weight = [x for x in args if isinstance(x, Tensor) and x.ndim == 2][:2]
    trains_weight = isinstance(args[-1], list) and args[-1][1]
    first = next(_chunks(hidden, len(weight), trains_weight), slice(0))
    return int(first.stop) * len(weight) * weight.itemsize * (2 if args[8] else 1)


# Computation


class ChunkedHead(NamedTuple):
    """A linear layer with its inputs and labels; fields as in `linear_cross_entropy`, of local shards."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float
    vocabulary: int
    first: int
    group: str

    @property
    def is_valid(self) -> Tensor:
        return self.labels != self.ignore_index

    def computed(
        self, factors: Tensor | None, needs: list[bool], log_z: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Gradients]:
        """Compute losses, log(Z) and the needed `Gradients`, chunk by chunk.

        `factors`: float32 [tokens], the gradient of each token's loss; None: without gradients. `log_z`: a former
        result; the losses are then not computed.
        """
        hidden, weight = self.hidden, self.weight
        columns = self.labels - self.first
        is_local = (columns >= 0) & (columns < len(weight)) & self.is_valid
        columns = torch.where(is_local, columns, 0)
        entropies = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        has_log_z, log_z = log_z is not None, torch.empty_like(entropies) if log_z is None else log_z
        gradients = _empty_gradients(hidden, weight, self.bias, needs)
        row_sums = torch.zeros_like(entropies) if self.label_smoothing and self.is_transformed else None
        for number, rows in enumerate(_chunks(hidden, self.vocabulary, needs[1])):
            logits = F.linear(hidden[rows], weight, self.bias)
            tanh = self._transform(logits, factors is not None)
            if row_sums is not None:
                row_sums[rows] = logits.sum(-1, dtype=row_sums.dtype)
            if not has_log_z:
                entropies[rows], log_z[rows] = self._cross_entropies(logits, columns[rows], is_local[rows])
            if factors is not None:
                row_factors = factors[rows] * (1 + 2 * self.z_loss * log_z[rows])
                of_targets = factors[rows] * (1 - self.label_smoothing) * is_local[rows]
                kernel_dispatch.cross_entropy_of(logits).logits_gradient(
                    logits, columns[rows], log_z[rows], row_factors, of_targets, logits
                )
                if self.is_transformed:
                    self._backpropagate(logits, tanh, factors[rows])
                if needs[0]:
                    _add_product(gradients.hidden[rows], logits, weight, is_first=True)
                if needs[1]:
                    _add_product(gradients.weight, logits.t(), hidden[rows], is_first=number == 0)
                if needs[2]:
                    gradients.bias.add_(logits.sum(0, dtype=gradients.bias.dtype))
            # free them before the next chunk is allocated
            del logits, tanh
        losses = entropies
        if self.label_smoothing:
            losses = self._smoothed(entropies, log_z, factors, gradients, needs, row_sums)
        losses = torch.where(self.is_valid, losses + self.z_loss * log_z.square(), 0.0)
        is_outside = self.is_valid & ((self.labels < 0) | (self.labels >= self.vocabulary))
        return torch.where(is_outside, math.nan, losses), log_z, gradients

    @property
    def is_transformed(self) -> bool:
        return self.softcap != 0 or self.logit_scale != 1

    def _transform(self, logits: Tensor, has_backward: bool) -> Tensor | None:
        """Scale and cap logits in place. Return what the derivative of the cap needs."""
        if self.is_transformed:
            logits.div_((self.softcap or 1.0) / self.logit_scale)
        if not self.softcap:
            return None
        tanh = logits.tanh_().clone() if has_backward else None
        logits.mul_(self.softcap)
        return tanh

    def _backpropagate(self, grad: Tensor, tanh: Tensor | None, factors: Tensor) -> None:
        """Turn the gradient of scaled, capped and smoothed logits into the gradient of the product, in place."""
        if self.label_smoothing:
            grad.sub_((factors * (self.label_smoothing / self.vocabulary))[:, None])
        if tanh is not None:
            torch.ops.aten.tanh_backward.grad_input(grad.mul_(self.softcap), tanh, grad_input=grad)
        grad.div_((self.softcap or 1.0) / self.logit_scale)

    def _cross_entropies(self, logits: Tensor, columns: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
        """Return -log p of each token's target and log(Z), both over the whole vocabulary."""
        entropies, log_z = kernel_dispatch.cross_entropy_of(logits).cross_entropies(logits, columns)
        if not self.group:
            return entropies, log_z
        group = private_torch.process_group(self.group)
        top = log_z.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        targets = logits.gather(1, columns[:, None])[:, 0].float()
        # one collective: sums of exponentials, and targets relative to the largest
        sums = torch.stack([(log_z - top).exp(), torch.where(is_local, targets - top, 0.0)])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        return log_sum - sums[1], top + log_sum

    def _smoothed(
        self, entropies: Tensor, log_z: Tensor, factors: Tensor | None, gradients: Gradients, needs: list[bool],
        row_sums: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Apply label smoothing to the losses and the gradients.

        The mean of a token's logits is the product of its hidden state and the mean of the weight's rows, so no pass
        over logits is necessary. `row_sums`: sums of transformed logits, whose gradients are smoothed.
        """
        share, hidden, bias = self.label_smoothing / self.vocabulary, self.hidden, self.bias
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        row_sum = self.weight.sum(0, dtype=dtype)
        mean_logits = hidden.to(dtype) @ row_sum if row_sums is None else row_sums
        if bias is not None and row_sums is None:
            mean_logits = mean_logits + bias.sum(dtype=dtype)
        if self.group:
            dist.all_reduce(mean_logits, group=private_torch.process_group(self.group))
        if factors is not None and row_sums is None:
            if needs[0]:
                gradients.hidden.addr_(factors.to(dtype), row_sum, alpha=-share)
            if needs[1]:
                gradients.weight.sub_(factors.to(dtype) @ hidden.to(dtype), alpha=share)
            if needs[2]:
                gradients.bias.sub_(factors.sum(), alpha=share)
        return (1 - self.label_smoothing) * entropies + self.label_smoothing * log_z - share * mean_logits.float()


def _chunks(hidden: Tensor, vocabulary: int, trains_weight: bool) -> Iterator[slice]:
    """Divide tokens into nearly equal chunks."""
    tokens, features = hidden.shape
    count = -(tokens // -max(1, LOGITS_AT_ONCE // vocabulary, features * trains_weight))
    size = -(-(tokens // -max(1, count)) // -ROWS) * ROWS
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size or 1))


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> Gradients:
    """Allocate gradients. The bias gradient is zero, the others are uninitialized unless there are no tokens."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    results = [
        torch.empty(x.shape if is_required and x is not None else 0, dtype=dtype, device=hidden.device)
        for x, is_required in zip((hidden, weight, bias), needs, strict=True)
    ]
    results[2].zero_()
    if len(hidden) == 0:
        results[1].zero_()
    return Gradients(*results)


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add a @ b to `total`, which has a wider dtype, or write it if `is_first`."""
    beta = 0 if is_first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)
