"""The loss of converted transformers models, computed without the logits of all tokens.

In a training pass with labels, the head returns `DeferredLogits`, and `self.loss_function` calls the head again, as a
module (so FSDP2's hooks run), for the loss. Scaling and capping by tanh stay deferred; any other use computes logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from quantshard import private_torch
from quantshard.errors import ConfigurationError, warn_once
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.modules import chunked_loss
from quantshard.modules.chunked_loss import DESCRIPTION, linear_cross_entropy
from quantshard.modules.contexts.recompute import checkpoint

AUTO, CHUNKED, MODEL = LOSSES = ("auto", "chunked", "model")
"""Values of `loss=`: chunked where possible, chunked or an error, and the model's own loss."""

OPTIONS: Final = frozenset(("label_smoothing", "z_loss"))

_LOSS_FUNCTION: Final = "_loss_function"
"""Attribute of transformers models that their property `loss_function` sets."""

Loss = str | Mapping[str, float]


def check_loss(function: str, loss: Loss) -> None:
    is_known = loss.keys() <= OPTIONS if isinstance(loss, Mapping) else loss in LOSSES
    if not is_known:
        raise ConfigurationError(f"{function}(loss={loss!r}): use one of {', '.join(LOSSES)}, or {sorted(OPTIONS)}")


def set_loss(model: nn.Module, loss: Loss) -> str:
    """Make the transformers models in `model` compute their loss in chunks; return a line for the report, or ""."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    models = [module for module in model.modules() if isinstance(module, kind)]
    owners = [module for module in models if module.get_output_embeddings() is not None]
    reasons = ["it is no transformers model with an output head"] if not owners else [_unfit(owner) for owner in owners]
    reason = next(filter(None, reasons), "")
    if loss == MODEL or (loss == AUTO and not owners):
        return ""
    if reason and loss != AUTO:
        raise ConfigurationError(f"convert(loss={loss!r}): the model cannot have a chunked loss: {reason}")
    description = f"loss: the model's own ({reason})" if reason else "loss: in chunks of tokens, without all logits"
    for owner in owners:
        setattr(owner, DESCRIPTION, description)
        if reason:
            continue
        head: Any = owner.get_output_embeddings()  # type: ignore[operator]
        head.__class__ = LOSS_HEADS[type(head)]
        owner.loss_function = ChunkedLoss(dict(loss) if isinstance(loss, Mapping) else {})  # type: ignore[assignment]
    return description


def unset_loss(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, _LOSS_FUNCTION, None), ChunkedLoss):
            delattr(module, _LOSS_FUNCTION)
        vars(module).pop(DESCRIPTION, None)
        if type(module) in LOSS_HEADS.values():
            module.__class__ = type(module).__mro__[2]  # type: ignore[assignment]


@contextmanager
def deferring_logits(model: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let the head of a model defer its logits in this pass, if it is a training pass with labels."""
    loss_function: Any = getattr(model, _LOSS_FUNCTION, None)
    head = model.get_output_embeddings() if isinstance(loss_function, ChunkedLoss) else None
    is_training = model.training and arguments.get("labels") is not None and torch.is_grad_enabled()
    if not is_training or not isinstance(head, DeferringHead) or _has_own_hooks(head):
        # a model around this one may have asked the head to defer
        yield
        return
    head.defers = loss_function.expects_deferred = True
    try:
        yield
    finally:
        head.defers = loss_function.expects_deferred = False


def _has_own_hooks(head: nn.Module) -> bool:
    """Return whether a head has forward hooks that FSDP2 and tensor parallelism did not register."""
    if torch.compiler.is_compiling():
        return False
    modules = [getattr(hook, "__module__", "") for hook in private_torch.forward_hooks(head)]
    return not all(str(name).startswith("torch.distributed") for name in modules)


def _library_loss() -> Any:
    return getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)


def _unfit(model: Any) -> str:
    head = model.get_output_embeddings()
    if model.loss_function is not _library_loss():
        return "its loss is not transformers' ForCausalLMLoss"
    if "self.loss_function" not in _source_of_forward(model):
        return "its forward does not call loss_function"
    if type(head) not in LOSS_HEADS or "forward" in vars(head):
        return f"its head is a {type(head).__name__} or has its own forward"
    return "its head has hooks" if _has_own_hooks(head) else ""


def _source_of_forward(model: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(type(model).forward))
    except OSError:  # code without a file
        return "self.loss_function"


class DeferringHead(nn.Module):
    """Mixin for the class of an output head. `defers`: whether the next call returns `DeferredLogits`."""

    defers: bool = False

    def __call__(self, hidden: Tensor, **loss_arguments: Any) -> Any:
        if self.defers:
            # forward and its hooks run when the logits or the loss are computed
            self.defers = False
            return DeferredLogits(self, hidden)
        return super().__call__(hidden, **loss_arguments)


class LossLinear(DeferringHead, nn.Linear):
    """A head in high precision."""

    def forward(self, input: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """Compute logits; with `labels`, the loss (`linear_cross_entropy`)."""
        if labels is None:
            return super().forward(input)
        loss: Tensor = linear_cross_entropy(input, self.weight, labels, self.bias, **options)
        if isinstance(self.weight, DTensor):
            # hooks of tensor parallelism expect a DTensor
            return DTensor.from_local(loss, self.weight.device_mesh, [Replicate()], run_check=False)
        return loss


class LossConverted(DeferringHead, ConvertedLinear):
    """A quantized head. Each chunk of tokens is a checkpointed call of the layer."""

    def forward(self, inp: Tensor, labels: Tensor | None = None, **options: Any) -> Any:  # type: ignore[override]
        if labels is None:
            return super().forward(inp)
        labels, count = labels.flatten(), options.pop("num_items_in_batch")
        rows = max(1, chunked_loss.LOGITS_AT_ONCE // self.out_features // chunked_loss.ROWS) * chunked_loss.ROWS
        parts = zip(inp.flatten(0, -2).split(rows), labels.split(rows), strict=True)
        total = sum(checkpoint(self._loss_of, *part, preserve_rng_state=False, **options) for part in parts)
        return total / ((labels != options["ignore_index"]).sum() if count is None else count)

    def _loss_of(self, hidden: Tensor, labels: Tensor, logit_scale: float, softcap: float, **options: Any) -> Tensor:
        logits = super().forward(hidden) / ((softcap or 1.0) / logit_scale)
        return _summed_losses(logits.tanh() * softcap if softcap else logits, labels, **options)


LOSS_HEADS: Final[dict[type, type]] = {nn.Linear: LossLinear, ConvertedLinear: LossConverted}


def _summed_losses(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    logits = logits.float()
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        total = total + z_loss * torch.where(labels != ignore_index, logits.logsumexp(-1).square(), 0.0).sum()
    return total


class DeferredLogits:
    """Logits that are computed when something reads them, by any method or function of a tensor.

    `_transform`: a divisor of the head's outputs, and the factor of their hyperbolic tangent (0: without one).
    `_origin`: the logits that these are computed from, the method that does it, and its arguments. Read logits before
    the optimizer's step and, under FSDP2, before backward.
    """

    def __init__(self, head: Any, hidden: Tensor, dtype: torch.dtype | None = None) -> None:
        self._head, self._hidden, self._dtype = head, hidden, dtype
        self._transform = 1.0, 0.0
        self._origin: tuple[DeferredLogits, str, tuple[float, ...]] | None = None
        self._logits: Tensor | None = None
        kind = hidden.device.type
        is_cast = kind != "meta" and torch.is_autocast_enabled(kind)
        self._cast = torch.get_autocast_dtype(kind) if is_cast else None
        self._is_gathered = not isinstance(head.weight, DTensor)
        self._changes = -1 if torch.compiler.is_compiling() else private_torch.in_place_changes(head.weight)

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits, which does not compute them."""
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype or self._cast or self._head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def contiguous(self) -> DeferredLogits:
        return self

    def tensor(self) -> Tensor:
        """Return the logits, which become a part of the autograd graph."""
        if self._logits is None:
            if self._is_gathered and isinstance(self._head.weight, DTensor):
                raise RuntimeError("output.logits: FSDP2 has freed the head's weight; use reshard_after_forward=False")
            if self._changes >= 0 and self._changes != private_torch.in_place_changes(self._head.weight):
                raise RuntimeError("output.logits: the head's weight has changed; read them before backward")
            precision = nullcontext() if self._cast is None else torch.autocast(self.device.type, dtype=self._cast)
            with torch.enable_grad(), precision:
                if self._origin is not None:
                    origin, name, args = self._origin
                self._logits = getattr(origin.tensor(), name)(*args) if self._origin else self._head(self._hidden)
        return self._logits

    def loss(self, labels: Tensor, options: Mapping[str, Any]) -> Tensor | None:
        """Compute the loss of labels that are shifted; None if these logits were changed or have another shape."""
        if self._logits is not None or labels.shape != self._hidden.shape[:-1]:
            return None
        divisor, softcap = self._transform
        transform = {"logit_scale": (softcap or 1.0) / divisor, "softcap": softcap}
        device = self.device
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        return self._head(self._hidden, labels=labels.to(device), **moved, **transform)

    def tanh(self) -> Any:
        """Compute the hyperbolic tangent, still deferred."""
        return self.tensor().tanh() if self._transform[1] or self._dtype else self._after("tanh", (), 1.0, tanh=1.0)

    def float(self) -> Any:
        """Convert to float32, still deferred; the loss is float32 in any case."""
        return self._after("float", dtype=torch.float32)

    def _after(
        self, name: str, args: Any = (), divisor: Any = 1.0, tanh: Any = 0.0, dtype: torch.dtype | None = None
    ) -> Any:
        """Return the result of a method, deferred. `divisor`: what it divides by. `tanh`: 1 if it is a tangent."""
        if self._logits is not None:
            return getattr(self._logits, name)(*args)
        logits = DeferredLogits(self._head, self._hidden, dtype)
        logits._changes, logits._cast, logits._is_gathered = self._changes, self._cast, self._is_gathered
        before, softcap = self._transform
        logits._transform = (before, softcap / divisor) if softcap else (before * divisor, tanh)
        logits._origin = self, name, args
        return logits

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # copies and pickles look for hooks before the fields exist
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and type(args[0]) is DeferredLogits and not kwargs:
            return args[0].tanh()
        return function(*_computed(args), **_computed(kwargs or {}))


def _operator(name: str) -> Any:
    def operate(self: DeferredLogits, *args: Any) -> Any:
        if name in ("__mul__", "__rmul__", "__truediv__") and self._dtype is None:
            if type(args[0]) in (int, float) and args[0] > 0:
                return self._after(name, args, args[0] if name == "__truediv__" else 1 / args[0])
        return getattr(self.tensor(), name)(*_computed(args))

    return operate


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow matmul rmatmul neg abs lt le gt ge eq ne "
    "getitem setitem len iter bool invert and or"
).split():
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _computed(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.tensor()
    if type(value) in (list, tuple):
        return type(value)(_computed(entry) for entry in value)
    return {key: _computed(entry) for key, entry in value.items()} if type(value) is dict else value


@dataclass
class ChunkedLoss:
    """Replaces transformers' ForCausalLMLoss. `expects_deferred`: the head defers the logits of this forward."""

    options: dict[str, float]
    expects_deferred: bool = False

    def __call__(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Any:
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        if isinstance(logits, DeferredLogits):
            options = {**self.options, "ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch}
            loss = logits.loss(shift_labels, options) if logits.shape[-1] == vocab_size else None
            if loss is not None:
                return loss
            logits = logits.tensor()
        if self.expects_deferred:
            _warn_of_logits()
        if not self.options:
            compute = _library_loss()
            return compute(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels)
        shift_labels = shift_labels.view(-1).to(logits.device)
        total = _summed_losses(logits.view(-1, vocab_size), shift_labels, ignore_index, **self.options)
        return total / ((shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


@private_torch.constant_in_graphs
def _warn_of_logits() -> None:
    warn_once(
        "head loss",
        "the model changes its logits before the loss, which therefore has the logits of all tokens in memory; "
        "avoid this warning with convert(loss='model')",
    )
