"""The one tensor class: a `torch.Tensor` whose data are the components of a number format.

To PyTorch a `QuantizedTensor` is a bf16 (or fp32, fp16) tensor of the weight's shape, but it is a handle to a
`QuantizedStorage`. `detach`, a flat `view(-1)` and FSDP2's narrows are further handles, so they never dequantize.
`aten_rules`, `copy_rules` and `arithmetic` have rules for ATen operations; all others read the values (`reads`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import limits, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.tensor import all_gather, reads, requantize
from quantshard.tensor.all_gather import GatherMetadata
from quantshard.tensor.storage import Placeholder, QuantizedStorage

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""ATen operation -> its implementation for quantized tensors. `aten_rules`, `copy_rules` and `arithmetic` fill it."""

_COMPONENT, _STATE = "component_", "state_"  # prefixes of the attribute names in __tensor_flatten__


class QuantizedTensor(reads.ReadableTensor):
    """A matrix, or a stack of matrices [matrices, rows, columns], stored as codes and scales of a number format.

    Modules create it under `quantized_model_init`; do not call the constructor. `dtype` is nominal: `dequantize` and
    gradients have it, and changing it (`.to(torch.float32)`) changes no code. `element_size()` and `nbytes` are those
    of a plain tensor with that dtype; `explain` shows the stored bytes.
    """

    quantized_storage: QuantizedStorage

    _stable_hash_for_caching = private_torch.compile_cache_key

    def __new__(
        cls, storage: QuantizedStorage, dtype: torch.dtype, shape: torch.Size | tuple[int, ...] | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:  # fmt: skip
        size = torch.Size(storage.shape if shape is None else shape)
        self = private_torch.make_wrapper(cls, size, dtype, storage.device)
        self.quantized_storage = storage
        self.requires_grad_(requires_grad)
        return self

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of `dtype` (default: the nominal dtype). Gradients flow back unchanged."""
        return _Dequantize.apply(self, dtype or self.dtype)

    float, double, half, bfloat16 = map(reads.cast_to, (torch.float32, torch.float64, torch.float16, torch.bfloat16))

    def read_values(self, dtype: torch.dtype | None = None) -> Tensor:
        self.check_filled("dequantize")
        values = private_torch.cast(self.quantized_storage.dequantize(), dtype or self.dtype)
        return values if values.shape == self.shape else values.reshape(self.shape)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Quantize a high-precision tensor of the same shape, on any device, into this one, in place.

        If `noop_flag`, a tensor of one element, is not zero, nothing is written.
        Raises if new values are infinite or NaN, or if blocks of this shard straddle ranks: call `requantize_` then.
        """
        self.check_filled("quantize_")
        storage = self.quantized_storage
        if any(storage.shard.shares_blocks(part) for part in storage.spec.format.components):
            raise UnsupportedOperationError(f"quantize_ on {self!r}: ranks share its scales; call requantize_")
        if tensor.shape != self.shape or not tensor.is_floating_point():
            actual = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UnsupportedOperationError(f"quantize_ needs floats of shape {tuple(self.shape)}, got {actual}")
        if noop_flag is None or not noop_flag.any():
            requantize.requantize_([(self, tensor.to(self.device).reshape(storage.shard.shape))])
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """The initial values that `quantized_model_init(preserve_high_precision_init_val=True)` kept on the CPU, or
        None. A write to the weight drops them."""
        values = self.quantized_storage.initial_values()
        return values if values is None or values.shape == self.shape else values.view(self.shape)

    def clear_high_precision_init_val(self) -> None:
        """Free the result of `get_high_precision_init_val`."""
        self.quantized_storage.high_precision = None

    def check_filled(self, what: str) -> None:
        if isinstance(self.quantized_storage, Placeholder):
            raise UnsupportedOperationError(f"{what} on a placeholder, which holds nothing; copy a tensor into it")

    def data_ptr(self) -> int:
        """Address of the codes, 0 on the meta device, or for an empty shard a number that no other tensor has."""
        if self.is_meta:
            return 0
        codes = next(iter(self.quantized_storage.components.values()), None)
        return id(self.quantized_storage) if codes is None or codes.numel() == 0 else codes.data_ptr()

    def share_memory_(self) -> QuantizedTensor:
        """Raise, because the storage of a wrapper is empty."""
        raise UnsupportedOperationError(limits.refusal("shared memory", self))

    @property
    def data(self) -> QuantizedTensor:  # type: ignore[override]
        """A detached handle to the same storage. A quantized tensor of the same format and place can be assigned."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        # `moves.move_parameter` and `w.data -= update` assign it
        if not isinstance(value, QuantizedTensor) or not _is_in_place_of(value, self):
            description = repr(value) if isinstance(value, QuantizedTensor) else f"{value.dtype} {tuple(value.shape)}"
            raise UnsupportedOperationError(limits.refusal("assigned data", f"{description} as .data of {self!r}"))
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # dtype, device and shape
        self.quantized_storage = value.quantized_storage

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if isinstance(self.quantized_storage, Placeholder):
            return f"QuantizedTensor(placeholder, shape={tuple(self.shape)}, dtype={self.dtype})"
        shard = self.quantized_storage.shard
        where = f", origin={shard.origin} of {shard.global_shape}" if shard.cut is not None else ""
        return (
            f"QuantizedTensor({self.quantized_storage.spec.tag}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}{where})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        copied: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied  # first, since an attribute may refer to this tensor
        vars(copied).update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in vars(copied)}, memo))
        return copied

    def __getattr__(self, name: str) -> Tensor:
        # only for the names in __tensor_flatten__, which PyTorch reads with getattr
        for prefix, part in ((_COMPONENT, "components"), (_STATE, "state")):
            if name.startswith(prefix):
                tensor = getattr(self.quantized_storage, part).get(name.removeprefix(prefix))
                if tensor is not None:
                    return tensor
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        self.check_filled("__tensor_flatten__")
        names = [_COMPONENT + name for name in self.quantized_storage.components]
        names += [_STATE + name for name in self.quantized_storage.state]
        # Names are part of the guards: a graph is valid for the copies that it was traced with, and FSDP2 gathers one
        # copy in forward and another in backward.
        return names, (self.quantized_storage.spec, self.quantized_storage.shard, self.dtype, tuple(names))

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], meta: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        spec, shard, dtype, _ = meta
        parts: dict[str, dict[str, Tensor]] = {_COMPONENT: {}, _STATE: {}}
        for name, tensor in inner.items():
            prefix = _COMPONENT if name.startswith(_COMPONENT) else _STATE
            parts[prefix][name.removeprefix(prefix)] = tensor
        return QuantizedTensor(QuantizedStorage(spec, shard, parts[_COMPONENT], parts[_STATE]), dtype, outer_size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = RULES.get(func)
        return reads.read(func, *args, **(kwargs or {})) if rule is None else rule(*args, **(kwargs or {}))

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], GatherMetadata]:
        """The tensors that this rank sends; see `all_gather`. FSDP2 also accepts this short signature."""
        return all_gather.gather_inputs(self.quantized_storage, mesh)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: GatherMetadata, param_dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:  # fmt: skip
        """The unsharded weight, or None after refilling `out`, that of an earlier all-gather."""
        gathered = all_gather.unsharded_storage(metadata, all_gather_outputs)
        if out is not None:
            unsharded: Any = private_torch.local_tensor(out)  # a DTensor under tensor parallelism
            unsharded.quantized_storage.take(gathered)
            return None
        return QuantizedTensor(gathered, param_dtype), ()  # FSDP2 frees its own buffers; a few scales stay


# FSDP2 inspects the signature at each gather; storing it makes that fast
QuantizedTensor.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    QuantizedTensor.fsdp_pre_all_gather
)


def _is_in_place_of(new: QuantizedTensor, old: QuantizedTensor) -> bool:
    """True if `new` can become the data of `old`. An unsharded copy cannot: FSDP2 frees and refills its buffers."""
    ours, theirs = new.quantized_storage, old.quantized_storage
    if ours is theirs:
        return True  # the last step of `weight.data -= update`
    alike = (ours.spec, ours.shard, new.shape) == (theirs.spec, theirs.shard, old.shape)
    passing = isinstance(ours, Placeholder) or ours.gathered or theirs.gathered
    return alike and not passing and private_torch.takes_data(old, new)


class _Dequantize(torch.autograd.Function):
    # connects the result to the tensor, since autograd does not see its components
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return tensor.read_values(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
