"""The one tensor class: a `torch.Tensor` whose data are the components of a format row.

To PyTorch a `QuantizedTensor` is a bf16 (or fp32, fp16) tensor of the weight's shape, but it holds only codes and
scales. It is a handle to a `QuantizedStorage`; `detach`, a flat `view(-1)` and FSDP2's narrows are further handles to
the same storage, so views never dequantize. `aten_rules` and `arithmetic` list the allowed ATen operations and the
callers that need them; every other operation raises.

FSDP2 cuts, pads, gathers and frees weights through the operations in `aten_rules` and the two hooks at the end of the
class. It calls, in this order: `split` into chunks; `new_zeros` of the padded chunk; `copy_` into a `narrow` of that
chunk; another `narrow`, which becomes the sharded parameter; `view(-1)`. The padding is never built: `new_zeros`
returns a placeholder, and `copy_` fills its storage.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, limits, private_torch, sharding
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.formats import Orientation
from quantshard.recipe import QuantSpec
from quantshard.tensor import requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import QuantizedStorage

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""ATen operation -> its implementation for quantized tensors. `aten_rules` and `arithmetic` fill the table."""

_COMPONENT, _STATE = "component_", "state_"  # prefixes of the attribute names in __tensor_flatten__

_OF_AVERAGES = {
    getattr(torch.ops.aten, of + name) for name in ("add", "sub", "mul", "lerp") for of in ("", "_foreach_")
}
_AVERAGE = (
    ". An average of the weights, as torch.optim.swa_utils.AveragedModel computes one, is kept by ema_decay=0.999 of "
    "FusedAdam, Lion, Muon or MasterWeights, in float32; averaged_weights evaluates with it"
)
"""Hint in the error of operations that compute averages of weights out-of-place."""


def _name_in_running_model(weight: Tensor | None) -> str:
    """The weight's name in the outermost module that is being called, or ""."""
    frame, name = inspect.currentframe(), ""
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code is nn.Module.__call__.__code__ else None
        params = module.named_parameters() if isinstance(module, nn.Module) else ()
        name = next((path for path, param in params if param is weight and "." in path), name)
        frame = frame.f_back
    return name


class QuantizedTensor(Tensor):
    """A 2-D tensor stored as codes and scales of a number format.

    Modules create it under `quantized_model_init`, as do `quantize_weight` and FSDP2's cuts and gathers; do not call
    the constructor. `shape` and `dtype` describe the values. `dtype` is nominal: `dequantize` and gradients have it,
    and changing it (`.to(torch.float32)`) changes no code. `element_size()` and `nbytes` are those of a plain tensor
    with that dtype; `explain` shows the stored bytes.
    """

    quantized_storage: QuantizedStorage

    # all rules are in __torch_dispatch__: __torch_function__ would slow down every operation
    __torch_function__ = private_torch.disabled_torch_function  # type: ignore[assignment]

    def __new__(
        cls,
        storage: QuantizedStorage,
        dtype: torch.dtype,
        shape: torch.Size | tuple[int, ...] | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        size = torch.Size(storage.shard.shape if shape is None else shape)
        self = private_torch.make_wrapper(cls, size, dtype, storage.device)
        self.quantized_storage = storage
        self.requires_grad_(requires_grad)
        return self

    # Values ----------------------------------------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of `dtype` (default: the nominal dtype). Gradients flow back unchanged."""
        return _Dequantize.apply(self, dtype or self.dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Quantize a high-precision tensor of the same shape into this one, in place.

        Args:
            tensor: the new values, any floating dtype, on any device.
            noop_flag: a one-element tensor; if it is not zero, nothing is written.

        Raises:
            ConfigurationError: new values are infinite or NaN; nothing is written.
            UnsupportedOperationError: blocks of this shard straddle ranks. Their scales need a collective, which
                `requantize_` runs once for all weights of a model.
        """
        self.check_filled("quantize_")
        shared = [
            c.name
            for c in self.quantized_storage.cell.format.components
            if self.quantized_storage.shard.shares_blocks(c)
        ]
        if shared:
            raise UnsupportedOperationError(
                f"quantize_ on {self!r}: its {' and '.join(shared)} belong to several ranks, so new values need one "
                "reduction of amaxes over them; call quantshard.requantize_([(parameter, local_values), ...]) on "
                "every rank"
            )
        if tensor.shape != self.shape or not tensor.is_floating_point():
            raise UnsupportedOperationError(
                f"quantize_ needs a tensor of shape {tuple(self.shape)} and a floating dtype, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        if noop_flag is None or not noop_flag.any():
            requantize.requantize_([(self, tensor.to(self.device).reshape(self.quantized_storage.shard.shape))])
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """The initial values of this (local) weight, on the CPU. None if they were not kept, as
        `quantized_model_init(preserve_high_precision_init_val=True)` does, or if the weight was written since."""
        return self.quantized_storage.initial_values()

    def clear_high_precision_init_val(self) -> None:
        """Free the result of `get_high_precision_init_val`."""
        self.quantized_storage.high_precision = None

    def check_filled(self, what: str) -> None:
        if isinstance(self.quantized_storage, Placeholder):
            raise UnsupportedOperationError(
                f"{what} on a placeholder: new_zeros and new_empty of a quantized tensor hold nothing until a "
                "quantized tensor is copied into them"
            )

    def data_ptr(self) -> int:
        """Address of the codes: equal for all handles to a storage, 0 on the meta device.

        An empty shard or a placeholder returns a number that is unique among living tensors, because some libraries
        identify parameters by their addresses.
        """
        if self.is_meta:
            return 0
        codes = next(iter(self.quantized_storage.components.values()), None)
        return id(self.quantized_storage) if codes is None or codes.numel() == 0 else codes.data_ptr()

    def share_memory_(self) -> QuantizedTensor:
        """Raise: a quantized tensor has no storage of its own to share."""
        raise UnsupportedOperationError(limits.refusal("shared memory", self))

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise, like `tolist`, `np.asarray` and DLPack: there is no array of values."""
        raise UnsupportedOperationError(limits.refusal("array", self))

    def tolist(self) -> NoReturn:
        """Raise, like `numpy`."""
        self.numpy()

    def __array__(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        self.numpy()

    def __dlpack__(self, **_: Any) -> NoReturn:  # type: ignore[override]
        self.numpy()

    @property
    def data(self) -> QuantizedTensor:  # type: ignore[override]
        """A detached handle to the same storage, like `data` of any tensor.

        A quantized tensor of the same format and place, such as the result of `.to()`, can be assigned. This tensor
        then becomes a handle to that storage, and keeps its identity, attributes and hooks.

        Raises:
            UnsupportedOperationError: the assigned tensor is plain, or has another format or place.
        """
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        # `components.move_parameter` and `w.data -= update` assign it
        if not isinstance(value, QuantizedTensor) or not _is_in_place_of(value, self):
            description = repr(value) if isinstance(value, QuantizedTensor) else f"{value.dtype} {tuple(value.shape)}"
            raise UnsupportedOperationError(limits.refusal("new data", f"{description} as .data of {self!r}"))
        private_torch.set_data(self, value)
        self.quantized_storage = value.quantized_storage

    # Python protocol -------------------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if isinstance(self.quantized_storage, Placeholder):
            return f"QuantizedTensor(placeholder, shape={tuple(self.shape)}, dtype={self.dtype})"
        shard = self.quantized_storage.shard
        where = f", origin={shard.origin} of {shard.global_shape}" if shard.cut is not None else ""
        return (
            f"QuantizedTensor({self.quantized_storage.cell.tag}, shape={tuple(self.shape)}, dtype={self.dtype}, "
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedOperationError(limits.refusal("pickle", self))

    # torch.compile ---------------------------------------------------------------------------------------------------

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
        return names, (self.quantized_storage.cell, self.quantized_storage.shard, self.dtype, tuple(names))

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], meta: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        cell, shard, dtype, _ = meta
        parts: dict[str, dict[str, Tensor]] = {_COMPONENT: {}, _STATE: {}}
        for name, tensor in inner.items():
            prefix = _COMPONENT if name.startswith(_COMPONENT) else _STATE
            parts[prefix][name.removeprefix(prefix)] = tensor
        return QuantizedTensor(QuantizedStorage(cell, shard, parts[_COMPONENT], parts[_STATE]), dtype, outer_size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is None:
            first = first_quantized((*args, *(kwargs or {}).values()))
            if name := _name_in_running_model(first):
                raise UnsupportedOperationError(
                    f"{name}: the model reads this weight directly ({func}), which a quantized weight does not allow; "
                    "read .dequantize() of it, or leave the layer out: convert(model, "
                    f"{{'*.{name.split('.')[-2]}': 'bf16', '*': recipe}})"
                )
            raise UnsupportedOperationError(
                f"{func} on {first!r} would dequantize or change it unasked; use .dequantize() for its values (of a "
                "DTensor .to_local().dequantize(), for this rank's), quantize_() or quantshard.requantize_() to write "
                "it, a module's init_method to initialize it, and a quantshard module to multiply with it; the layer "
                "of a weight that other code reads is left out by convert(filter=...)"
                + (_AVERAGE if getattr(func, "overloadpacket", None) in _OF_AVERAGES else "")
            )
        return rule(*args, **(kwargs or {}))

    # FSDP2 -----------------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], GatherMetadata]:
        """All-gather inputs of this rank: the components that other ranks lack, of the copies that the coming pass
        reads.

        FSDP2's longer hook signature does not fit: with it, inputs of padded shards must have the padded parameter's
        size, which scales do not have.
        """
        storage = self.quantized_storage
        plan = _fsdp_plan(self)
        if plan.reshards_to_other_mesh:
            raise ConfigurationError(limits.refusal("reshard to fewer ranks", self))
        if mesh.size() == 1:
            # FSDP2 then copies only the first input and gathers nothing; the post hook uses the local components.
            return (next(iter(storage.components.values())).reshape(-1)[:1],), GatherMetadata(storage, (), mesh)
        copies = tuple(storage.cell.format.copies)
        passes: tuple[tuple[Orientation, ...], ...] = (copies,)
        if len(copies) > 1 and plan.frees_between_passes:  # fprop reads the rowwise copy, dgrad the columnwise one
            passes = tuple((which,) for which in copies)
        this_pass = passes[-1] if private_torch.in_backward() else passes[0]
        slots = sharding.gather_slots(storage.cell.format, storage.shard, this_pass, passes)
        return tuple(_padded(storage, slot) for slot in slots), GatherMetadata(storage, tuple(slots), mesh)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: GatherMetadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """The unsharded weight. Gathered components alias FSDP2's buffers. Resident components are copied from the
        shard, since a forward can be a call of `unshard`, but alias it in a backward after which FSDP2 frees the
        weight."""
        for_a_pass = private_torch.in_backward() and _fsdp_plan(self).frees_after_passes()
        gathered = _assemble(metadata, all_gather_outputs, for_a_pass)
        # FSDP2 refilled the buffers of the first gather; `out` is a DTensor under TP
        if out is not None:
            unsharded: Any = private_torch.local_tensor(out)
            unsharded.quantized_storage.take(gathered)
            return None
        return QuantizedTensor(gathered, param_dtype), ()  # FSDP2 frees its own buffers; a few scales stay


# FSDP2 inspects the signature at each gather; storing it makes that fast
QuantizedTensor.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    QuantizedTensor.fsdp_pre_all_gather
)


def first_quantized(arguments: Iterable[Any]) -> QuantizedTensor | None:
    """The first quantized tensor among the arguments, or in a list of them, for error messages."""
    for argument in arguments:
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(tensor, QuantizedTensor):
                return tensor
    return None


def _is_in_place_of(new: QuantizedTensor, old: QuantizedTensor) -> bool:
    """True if `new` can become the data of `old`: same format, shape and place in the global tensor, and neither is an
    unsharded copy, which lies in buffers that FSDP2 frees and refills."""
    ours, theirs = new.quantized_storage, old.quantized_storage
    if ours is theirs:
        return True  # the last step of `weight.data -= update`
    alike = (ours.cell, ours.shard, new.shape) == (theirs.cell, theirs.shard, old.shape)
    passing = isinstance(ours, Placeholder) or ours.gathered or theirs.gathered
    return alike and not passing and private_torch.takes_data(old, new)


class Placeholder(QuantizedStorage):
    """The result of `new_zeros` and `new_empty`: a storage that is empty until a quantized tensor is copied into it."""

    def __init__(self, parent: QuantizedStorage, device: torch.device) -> None:
        super().__init__(parent.cell, parent.shard, {}, parent.state)
        self.parent = parent
        self.target = device

    @property
    def device(self) -> torch.device:
        return self.target

    def to(self, device: torch.device | None, *, non_blocking: bool = False) -> Placeholder:
        """A placeholder on another device. FSDP2's CPU offload moves the empty chunk of a rank without rows."""
        return Placeholder(self.parent, self.target if device is None else torch.device(device))

    def fill(self, source: QuantizedStorage) -> None:
        """Become a real storage: the source itself if the placeholder was made from it, otherwise a copy."""
        # fully_shard pads a chunk, which is a view of the whole weight: a copy lets the whole be freed. At the first
        # forward and after loads reset_sharded_param pads the shard, whose tensors optimizers and state dicts have.
        filled = source if source is self.parent else source.map(lambda part: part.to(self.target, copy=True))
        if filled is not source and filled.high_precision is not None:
            filled.high_precision = filled.high_precision.clone()  # not a view of the whole
        self.__class__ = QuantizedStorage  # type: ignore[assignment]  # so that existing handles see it
        del self.parent, self.target
        self.take(filled)


class GatherMetadata(NamedTuple):
    """State that the pre hook passes to the post hook: live shard, component of each input, mesh to gather over."""

    storage: QuantizedStorage
    slots: tuple[sharding.GatherSlot, ...]
    mesh: DeviceMesh


_plans: WeakKeyDictionary[QuantizedStorage, private_torch.FsdpPlan] = WeakKeyDictionary()


def _fsdp_plan(tensor: QuantizedTensor) -> private_torch.FsdpPlan:
    """The FSDP2 plan of a weight at its first gather, when FSDP2 fixes the sizes of its buffers. A weight with two
    copies gathers different components under another plan, so its plan must not change afterwards."""
    storage = tensor.quantized_storage.home
    if storage not in _plans:
        _plans[storage] = private_torch.fsdp_plan(storage)
    plan = _plans[storage]
    if len(storage.cell.format.copies) > 1 and plan.changed():
        raise ConfigurationError(limits.refusal("changed plan", tensor))
    return plan


def _padded(storage: QuantizedStorage, slot: sharding.GatherSlot) -> Tensor:
    """All-gather input of a slot, with uninitialized padding."""
    reference = next(iter(storage.components.values()))
    # only formats of two copies have such slots, and they store bytes: any component has the right dtype
    if slot.name is None:
        return reference.new_empty(slot.numel)
    part = storage.components[slot.name]
    if part.numel() == slot.numel:
        return part.reshape(-1)
    padded = part.new_empty(slot.numel)
    padded[: part.numel()] = part.reshape(-1)
    return padded


def _assemble(gathering: GatherMetadata, outputs: tuple[Tensor, ...], for_a_pass: bool) -> QuantizedStorage:
    """Put the unsharded storage together. `for_a_pass`: nothing writes to the shard while the result is in use."""
    local = gathering.storage
    shard = local.shard.before_cut()
    by_name = local.cell.format.by_name
    components = {}
    for slot, output in zip(gathering.slots, outputs if gathering.slots else (), strict=True):
        if slot.name is None:
            continue
        pieces = output.view(-1, slot.numel)[:, : slot.rows * slot.cols]  # a view unless the slot is padded
        rows = shard.component_shape(by_name[slot.name])[0]
        components[slot.name] = pieces.reshape(-1, slot.cols)[:rows]
    for name, part in local.components.items():
        if part.is_cuda and local.home is not local:
            # CPU offload allocated it on FSDP2's stream, which must not reuse it before this stream is done
            part.record_stream(torch.cuda.current_stream(part.device))
        if not gathering.slots:
            components[name] = part  # a mesh of one rank
        elif not local.shard.gathers(by_name[name]):
            # A few scales. FSDP2 may keep gathered codes over an optimizer's step, which writes the shard's scales in
            # place: old codes must not be read with new scales.
            components[name] = part if for_a_pass else part.clone()
    # CPU offload gathers from a copy of the shard on another device; draws are counted in the shard
    return QuantizedStorage(
        local.cell, shard, components, local.home.state, version=local.version, gathered=True,
        captured=kernel_dispatch.is_capturing(),
        fetch=partial(_gather_copy, ref(local.home), gathering.mesh, local.device), source=ref(local.home),
    )  # fmt: skip


def _gather_copy(
    shard: ReferenceType[QuantizedStorage], mesh: DeviceMesh, device: torch.device, which: Orientation
) -> dict[str, Tensor]:
    """Gather one copy of a weight outside FSDP2, which gathered the other copy for this pass. Activation recomputation
    needs it: it runs fprop in backward. All ranks recompute the same layers, so all ranks make this collective call."""
    home = shard()
    assert home is not None
    storage = home.map(lambda part: part.to(device))  # FSDP2's copy under CPU offload no longer exists
    slots = sharding.gather_slots(storage.cell.format, storage.shard, (which,), ((which,),))
    outputs = []
    for slot in slots:
        part = _padded(storage, slot)
        outputs.append(part.new_empty(mesh.size() * slot.numel))
        private_torch.all_gather_single(outputs[-1], part, group=mesh.get_group())
    return _assemble(GatherMetadata(storage, tuple(slots), mesh), tuple(outputs), for_a_pass=False).components


class _Dequantize(torch.autograd.Function):
    # connects the result to the tensor, since autograd does not see its components
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        tensor.check_filled("dequantize")
        values = private_torch.cast(tensor.quantized_storage.dequantize(), dtype)
        return values if values.shape == tensor.shape else values.reshape(tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantize_weight(
    values: Tensor,
    cell: QuantSpec,
    *,
    dtype: torch.dtype | None = None,
    state: dict[str, Tensor] | None = None,
    keep_high_precision: bool = False,
) -> QuantizedTensor:
    """Quantize a whole 2-D tensor [R, C] of any floating dtype. On the meta device the result has no values.

    Args:
        values: the high-precision values.
        cell: the format row and scaling, e.g. `recipe.weight`.
        dtype: the nominal dtype (default: `values.dtype`).
        state: the parameter's key, draws and amax history (default: new ones).
        keep_high_precision: keep the values on the CPU for `get_high_precision_init_val`.

    Raises:
        UnsupportedOperationError: `values` is not a matrix of a floating dtype.
    """
    if values.ndim != 2 or not values.is_floating_point():
        raise UnsupportedOperationError(
            f"quantize needs a matrix of a floating dtype, got {values.dtype} {tuple(values.shape)}"
        )
    state = state if state is not None else storages.weight_state(cell, values.device)
    shard = sharding.whole((values.shape[0], values.shape[1]))
    storage = storages.empty(cell, shard, values.device, state)
    tensor = QuantizedTensor(storage, dtype or values.dtype)
    if values.device.type != "meta":
        tensor.quantize_(values)
        if keep_high_precision:
            storage.keep_initial_values(values.detach().cpu().clone())
    return tensor
