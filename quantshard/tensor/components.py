"""State dict entries of a quantized weight: the conversion between components and checkpoint keys.

For a weight named `X` the state dict has, in place of `X`, one plain tensor (or plain DTensor) per component and per
piece of state: `X` (codes), `X_scale_inv`, ..., `X_key`, `X_draws`, `X_amax_history` and `X_format`, 16 bytes that
name the format of the codes. They alias the live components, so loading writes through them. None has a class of
quantshard, and reading them back needs no quantshard: see docs/format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from quantshard import limits, numerics, private_torch, sharding
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import FORMAT_NAME_BYTES, FP32, Component, Format, Orientation, Role
from quantshard.sharding import Shard
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import AMAX_HISTORY, KEY, QuantizedStorage

FORMAT_SUFFIX, FORMAT_TAG_BYTES = "_format", 1 + FORMAT_NAME_BYTES + 1
CHECKPOINT_VERSION = 1
"""Version of the layout that docs/format.md specifies; the first byte of every `X_format`."""


def quantized_local(tensor: object) -> QuantizedTensor | None:
    """The (local) quantized tensor of a parameter, or None for a plain parameter."""
    if isinstance(tensor, DTensor):
        tensor = private_torch.local_tensor(tensor)
    return tensor if isinstance(tensor, QuantizedTensor) else None


PARAMETER_ENTRIES = ("params", "param_names")
"""Entries of an optimizer's group that list its parameters. A load compares them and does not change them. All other
entries are options."""

_LARGEST_INTEGER = (1 << 63) - 1  # PyTorch stores Python's integers as int64


def own_settings(optimizer: Optimizer) -> set[str]:
    """Names of the options that the optimizer itself puts into a group, as defaults or as `group_entries`.

    Others come from elsewhere: an LR scheduler adds `initial_lr`, and users may add any entry.
    """
    return {*optimizer.defaults, *getattr(optimizer, "group_entries", ())}


def can_take(is_own: bool, saved: Any, own: Any) -> bool:
    """Whether a saved option can replace this optimizer's `own`.

    A number or bool replaces a number or bool, a list a list of the same length, None a bool or a string, and any
    value replaces None. Any value also replaces an option that the optimizer did not add itself (`is_own` is False),
    unless `own` is a number.
    """
    return not (is_own or isinstance(own, bool | int | float | Tensor)) or _is_like(saved, own)


def _is_like(saved: Any, own: Any) -> bool:
    if own is None:
        return True
    if saved is None:
        return isinstance(own, bool | str)
    if isinstance(own, tuple | list):
        is_list = isinstance(saved, tuple | list) and len(saved) == len(own)
        return is_list and all(_is_like(saved_item, own_item) for saved_item, own_item in zip(saved, own, strict=True))
    if isinstance(own, bool | int | float | Tensor):
        if isinstance(saved, Tensor):
            return not saved.is_complex() and (saved.numel() == 1 or saved.shape == getattr(own, "shape", None))
        return isinstance(saved, float) or (isinstance(saved, int) and abs(saved) <= _LARGEST_INTEGER)
    return type(saved) is type(own)


def as_setting(saved: Any, own: Any) -> Any:
    """Convert a saved option to the form of `own`: a one-element tensor becomes a number where `own` is a number."""
    is_number = isinstance(own, bool | int | float) and isinstance(saved, Tensor)
    return saved.item() if is_number and saved.numel() == 1 else saved


def canonical_name(name: str) -> str:
    """A module's or parameter's name as in the keys of the model's state dict, without the parts that
    `checkpoint_wrapper` inserts."""
    return private_torch.without_wrappers(name)


def is_same_name(name: str, other: str) -> bool:
    """Whether two names, taken before and after DDP, torch.compile or `checkpoint_wrapper`, mean one parameter."""
    first, second = (
        [part for part in canonical_name(path).split(".") if part not in ("module", "_orig_mod")]
        for path in (name, other)
    )
    return first == second


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by their keys in the model's state dict. A tied parameter appears under all of its names."""
    return {canonical_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}


def quantized_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The quantized parameters among `named_parameters`."""
    return {name: param for name, param in named_parameters(model).items() if quantized_local(param) is not None}


def storage_of(param: Tensor) -> QuantizedStorage:
    """The (local) storage of a quantized parameter."""
    local = quantized_local(param)
    assert local is not None
    return local.quantized_storage


def format_tag(name: str, padding: int = 0) -> Tensor:
    """The `X_format` entry of a weight, uint8 [16].

    Byte 0 is the version of the checkpoint format, bytes 1 to 14 a format's name in ASCII, padded with zeros. Byte 15
    is the number of elements that pad each row to a whole byte.
    """
    padded = name.encode("ascii").ljust(FORMAT_NAME_BYTES, b"\0")
    return torch.tensor([CHECKPOINT_VERSION, *padded, padding], dtype=torch.uint8, device="cpu")


def read_format_tag(tag: Tensor) -> str:
    """The format's name in a tag.

    Raises:
        CheckpointError: the tag is malformed, or of a version that this release does not support.
    """
    if tag.is_floating_point():
        raise CheckpointError(
            "its format tag has a floating-point dtype, as in averages of state dicts, which average codes; average "
            "checkpoints.high_precision_state_dict(model) instead"
        )
    if tag.dtype != torch.uint8 or tag.numel() != FORMAT_TAG_BYTES:
        raise CheckpointError(f"its format tag is {tag.dtype} {list(tag.shape)}, not {FORMAT_TAG_BYTES} bytes")
    version, *padded, _ = tag.reshape(-1).tolist()
    if version != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, this release of quantshard reads version "
            f"{CHECKPOINT_VERSION}; install the release that wrote it, or a newer one"
        )
    return bytes(padded).rstrip(b"\0").decode("ascii", errors="replace")


def component_placements(shard: Shard, component: Component, placements: tuple[Placement, ...]) -> list[Placement]:
    """Placements of a component of a weight with these `placements`.

    On mesh axes with a clean cut for the component they are the weight's; on other axes the component is replicated.
    """
    whole = sharding.whole_axes(shard, component, private_torch.cut_dims(placements))
    return [Replicate() if axis in whole else placement for axis, placement in enumerate(placements)]


def check_offsets(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that DTensor's metadata match how FSDP2 and tensor parallelism really cut these tensors.

    DCP saves and loads by the metadata. The check is arithmetic over the mesh, so all ranks get the same result. Plain
    tensors always pass.

    Raises:
        ConfigurationError: a piece is misplaced; the message names the first such tensor, a rank and the two places.
    """
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            problem = _misplaced(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements))
            if problem is not None:
                raise ConfigurationError(
                    limits.refusal(
                        "misplaced pieces", f"{name} {tuple(tensor.shape)} on a mesh {mesh.shape}: {problem}"
                    )
                )


@lru_cache(maxsize=4096)
def _misplaced(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> str | None:
    """Describe the first rank that DTensor's metadata give another piece than the real one; None if there is none."""
    dims = private_torch.cut_dims(placements)
    for dim, size in enumerate(shape):
        # the last axis cuts first; only a later cut of FSDP2 along the same dim (3 ranks or more) is misplaced
        axes = [axis for axis in reversed(range(len(dims))) if dims[axis] == dim and mesh_shape[axis] > 1]
        if len(axes) < 2:
            continue
        inner = mesh_shape[axes[0]]
        if len(axes) == 2 and size % inner == 0 and private_torch.is_strided_over(placements[axes[1]], inner):
            continue  # DTensor places equal pieces correctly; checking each of a thousand ranks would be slow
        for indices in product(*(range(mesh_shape[axis]) for axis in axes)):
            extent = (0, size)
            for axis, index in zip(axes, indices, strict=True):
                extent = sharding.chunk_of(extent, index, mesh_shape[axis])
            index_by_axis = dict(zip(axes, indices, strict=True))
            coordinate = tuple(index_by_axis.get(axis, 0) for axis in range(len(dims)))
            claimed = private_torch.dtensor_extents(shape, mesh_shape, placements, coordinate)[dim]
            # empty pieces have no place
            if claimed != extent and (claimed[0] < claimed[1] or extent[0] < extent[1]):
                actual, expected = (f"[{start}:{stop}]" for start, stop in (extent, claimed))
                return f"of dim {dim} the rank at {coordinate} holds {actual}, DTensor says {expected}"
    return None


def shard_of(param: Tensor) -> Shard:
    """The rectangle of the global tensor that a 2-D parameter's local tensor holds."""
    local = quantized_local(param)
    if local is not None:
        return local.quantized_storage.shard
    shard = sharding.whole((param.shape[0], param.shape[1]))
    if isinstance(param, DTensor):
        mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
        assert coordinate is not None
        dims = private_torch.cut_dims(param.placements)
        for axis in reversed(range(mesh.ndim)):  # tensor parallelism has the last axes and cuts first
            dim = dims[axis]
            if dim is not None:
                chunk = sharding.ceil_div(shard.shape[dim], mesh.size(axis))  # as in torch.chunk
                shard = shard.piece(dim, coordinate[axis] * chunk, chunk)
    return shard


def as_dtensor(local: Tensor, like: DTensor, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """A DTensor on the mesh of `like` around a local tensor, without a copy or a move."""
    return private_torch.dtensor_around(local, like.device_mesh, placements, torch.Size(shape))


@torch.no_grad()
def move_parameter(param: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Move or cast a quantized parameter like `nn.Module` does a plain one, keeping the object, its attributes and its
    grad.

    `change` returns the moved or cast version of a tensor. Hooks survive too, except on the way to or from the meta
    device, where PyTorch can only swap tensors and a plain parameter would lose its hooks as well.
    """
    changed, grad = change(param), param.grad
    if private_torch.takes_data(param, changed):
        param.data = changed
        if grad is not None:
            grad.data = change(grad)
        return
    # as in `nn.Module._apply`: a gradient that has a Python object prevents the swap
    param.grad = None
    with attributes_kept([param]):
        torch.utils.swap_tensors(param, nn.Parameter(changed, requires_grad=param.requires_grad))
    if grad is not None:
        param.grad = change(grad)


@contextmanager
def attributes_kept(params: Iterable[Tensor]) -> Iterator[None]:
    """Restore, on exit, tensor attributes that PyTorch removed by swapping tensors."""
    attributes_before = [(param, dict(vars(param))) for param in params]
    yield
    for param, attributes in attributes_before:
        vars(param).update({name: value for name, value in attributes.items() if name not in vars(param)})


_OWN_ATTRIBUTES = ("quantized_storage", "_is_param", "_fsdp_", "quantshard_", "_quantshard_", "_is_hf_initialized")
"""Prefixes of parameter attributes that describe the object itself and must not be copied: quantshard's, PyTorch's,
and the loading marks of transformers."""
_UNMARKED = {"quantized_storage", "_is_param", "_fsdp_orig_uid"}


def set_attributes(param: Tensor) -> dict[str, Any]:
    """Attributes that users and frameworks have set on a parameter."""
    return {name: value for name, value in vars(param).items() if not name.startswith(_OWN_ATTRIBUTES)}


def carry_attributes(old: Tensor | None, new: Tensor | None) -> None:
    """Copy user attributes from a parameter to its replacement, if both have the same quantized weight.

    PyTorch makes new objects for a shard, for an unsharded parameter and for a move off the meta device, and drops
    such attributes. An unsharded parameter receives the attributes of its shard and passes none back.
    """
    # the last condition is a fast path: each gather calls this function
    if old is None or new is None or old is new or vars(old).keys() <= _UNMARKED:
        return
    if user_attributes := set_attributes(old):
        before, after = quantized_local(old), quantized_local(new)
        if before is None or after is None or before.quantized_storage.gathered:
            return
        if before.quantized_storage.state.get(KEY) is after.quantized_storage.state.get(KEY):
            vars(new).update(user_attributes)


def zeros_like(param: Tensor, dtype: torch.dtype, *last: int) -> Tensor:
    """Zeros of the parameter's shape, with `last` appended; a DTensor if the parameter is one."""
    local = private_torch.local_tensor(param)
    zeros = torch.zeros((*local.shape, *last), dtype=dtype, device=local.device)
    if not isinstance(param, DTensor):
        return zeros
    return as_dtensor(zeros, param, list(param.placements), (*param.shape, *last))


def storage_tensors(storage: QuantizedStorage, owner: Tensor) -> dict[str, Tensor]:
    """Component name -> live component; DTensors if `owner`, the parameter or state of this storage, is a DTensor."""
    return {name: storage_tensor(storage, owner, name) for name in storage.components}


def storage_tensor(storage: QuantizedStorage, owner: Tensor, name: str) -> Tensor:
    """One entry of `storage_tensors`."""
    part = storage.components[name]
    if not isinstance(owner, DTensor):
        return part
    placements = component_placements(storage.shard, storage.cell.format.by_name[name], owner.placements)
    return as_dtensor(part, owner, placements, global_component_shape(storage.cell.format, storage.shard, name))


def global_component_shape(fmt: Format, shard: Shard, name: str) -> tuple[int, int]:
    """Shape of a component of the whole tensor."""
    return sharding.whole(shard.global_shape).component_shape(fmt.by_name[name])


def state_of(param: Tensor) -> dict[str, Tensor]:
    """Key suffix -> live tensor, for each checkpoint entry of a quantized parameter.

    Raises:
        ConfigurationError: see `check_offsets`.
    """
    storage = storage_of(param)
    # each save and load calls this function, and DCP would silently mix up misplaced pieces
    check_offsets([(f"the {storage.cell.tag} weight", param)])
    by_name = storage.cell.format.by_name
    entries = {by_name[name].key_suffix: part for name, part in storage_tensors(storage, param).items()}
    entries.update({f"_{name}": value for name, value in storage.state.items()})
    packed = storage.cell.format.copies[Orientation.ROWWISE].codes.block_shape[1]
    entries[FORMAT_SUFFIX] = format_tag(storage.cell.tag, -storage.shard.global_shape[1] % packed)
    return entries


def suffixes(param: Tensor) -> list[str]:
    """The key suffixes of a quantized parameter, in the order of `state_of`."""
    storage = storage_of(param)
    by_name = storage.cell.format.by_name
    return [
        *(by_name[name].key_suffix for name in storage.components),
        *(f"_{key}" for key in storage.state),
        FORMAT_SUFFIX,
    ]


def state_entry(param: Tensor, suffix: str) -> Tensor | None:
    """The entry of `state_of` for one suffix, or None, without building DTensors for the other entries."""
    storage = storage_of(param)
    by_name = storage.cell.format.by_name
    for name in storage.components:
        if by_name[name].key_suffix == suffix:
            return storage_tensor(storage, param, name)
    return state_of(param).get(suffix) if suffix in suffixes(param) else None


def load_components(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Copy loaded components and state, by key suffix, into a quantized parameter. No value is dequantized.

    Each loaded value is a DTensor like the live one, or a plain tensor: the local part or the whole component.

    Raises:
        CheckpointError: the values have another format or shape; nothing was written.
    """
    write_components(param, fitting_pairs(param, values, name))


def fitting_pairs(param: Tensor, values: Mapping[str, Tensor], name: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs of live local tensors and their loaded values, as `load_components` copies them.

    Raises:
        CheckpointError: the values have another format or shape.
    """
    storage = storage_of(param)
    tag = values.get(FORMAT_SUFFIX)
    if tag is not None and read_format_tag(tag) != storage.cell.tag:
        raise CheckpointError(
            f"{name}: the state dict holds {read_format_tag(tag)!r}, but this model's weight is {storage.cell.tag!r}; "
            "build the model with the recipe that the checkpoint was written with"
        )
    pairs = []
    for suffix, live in state_of(param).items():
        if suffix != FORMAT_SUFFIX and suffix in values:
            component = next((c for c in storage.cell.format.components if c.key_suffix == suffix), None)
            pairs.append(_checked(live, values[suffix], f"{name}{suffix}", storage.shard, component))
    lacking = [c.key_suffix for c in storage.cell.format.components if c.key_suffix not in values]
    if pairs and lacking:
        raise CheckpointError(
            f"{name}: the state dict has some of this weight's components but not {name}{lacking[0]}; codes mean "
            "nothing without their scales, so load all or none"
        )
    check_scales(param, values, name)
    return pairs


def power_of_two_scales(param: Tensor) -> list[str]:
    """Key suffixes of a parameter's float32 scales that must be powers of two by its scaling.

    The encoding also holds other scales, and the format tag does not record the difference.
    """
    local = quantized_local(param)
    if local is None or not local.quantized_storage.cell.scaling.power_of_two:
        return []
    scales = (c for c in local.quantized_storage.cell.format.components if c.role is Role.SCALE and c.encoding == FP32)
    return [component.key_suffix for component in scales]


def check_scales(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Check the scales among this rank's loaded components, by key suffix.

    Raises:
        CheckpointError: the parameter's scaling needs powers of two, and a scale is not one.
    """
    for suffix in power_of_two_scales(param):
        scale = None if suffix not in values else private_torch.local_tensor(values[suffix])
        if scale is not None and not scale.is_meta and not numerics.are_powers_of_two(scale):
            raise CheckpointError(
                f"{name}{suffix}: the state dict holds scales that are not powers of two, but this model's weight is "
                f"{storage_of(param).cell}; build the model with the recipe that the checkpoint was written with, or "
                "load it with quantshard.checkpoints.load(requantize=True)"
            )


@torch.no_grad()
def write_components(param: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the pairs of `fitting_pairs` into a parameter, quantized or not."""
    for target, source in pairs:
        target.copy_(source)
    local = quantized_local(param)
    if local is not None and pairs:
        local.quantized_storage.mark_written()


def assigned(param: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> nn.Parameter:
    """A quantized parameter like `param` around the loaded components themselves, on the device they were loaded to.

    Its random key, draws and amax history are copies. `pairs`: as from `fitting_pairs`, with live tensors as targets.
    """
    storage, loaded = storage_of(param), {id(target): source for target, source in pairs}
    parts = {name: loaded[id(part)] for name, part in storage.components.items()}
    device = next(iter(parts.values())).device
    for name, part in parts.items():
        # a view of a whole component would keep all of it alive
        is_cut = isinstance(param, DTensor) and part.untyped_storage().nbytes() > part.nbytes
        parts[name] = part.to(device, copy=is_cut).contiguous()
    state = {name: state_like(value, loaded.get(id(value)), device) for name, value in storage.state.items()}
    new = replace(storage, components=parts, state=state, high_precision=None)
    new.mark_written()
    tensor: Tensor = QuantizedTensor(new, param.dtype)
    if isinstance(param, DTensor):
        tensor = as_dtensor(tensor, param, list(param.placements), tuple(param.shape))
    loaded_param = nn.Parameter(tensor, requires_grad=param.requires_grad)
    vars(loaded_param).update(set_attributes(param))
    return loaded_param


def state_like(own: Tensor, loaded: Tensor | None, device: torch.device) -> Tensor:
    """A copy of a loaded piece of a weight's state on the device of `own`, or on `device` if `own` is on meta.

    If nothing was loaded, it is a copy of `own`, or zeros if `own` is on meta.
    """
    where = device if own.is_meta else own.device
    if loaded is None:
        return torch.zeros_like(own, device=where) if own.is_meta else own.clone()
    return loaded.to(where, own.dtype, copy=True)


def _checked(live: Tensor, value: Tensor, key: str, shard: Shard, component: Component | None) -> tuple[Tensor, Tensor]:
    """The local tensors to copy to and from."""
    target, source = private_torch.local_tensor(live), private_torch.local_tensor(value)
    # a whole component from rank 0 or another program is a plain tensor: take this rank's entries
    if component is not None and not isinstance(value, DTensor) and source.shape == live.shape != target.shape:
        (r0, r1), (c0, c1) = shard.resident(component)
        source = source[r0:r1, c0:c1]
    if component is not None and source.dtype != target.dtype:
        raise CheckpointError(
            f"{key}: a {str(source.dtype).removeprefix('torch.')} tensor cannot be loaded as "
            f"{component.encoding.name} {component.role.value}; to quantize high-precision weights into this model "
            "call quantshard.checkpoints.load_high_precision(model, state_dict) on every rank"
        )
    if key.endswith(AMAX_HISTORY) and source.shape != target.shape:
        raise CheckpointError(
            f"{key}: amax_history_len is {source.numel()} in the state dict, {target.numel()} in this model; build "
            "the model with the checkpoint's recipe"
        )
    if source.shape != target.shape or (isinstance(value, DTensor) and value.shape != live.shape):
        raise CheckpointError(
            f"{key}: shape {tuple(value.shape)} (local {tuple(source.shape)}) in the state dict, "
            f"{tuple(live.shape)} (local {tuple(target.shape)}) in this model; the checkpoint is of another model or, "
            "for local tensors, of another mesh"
        )
    return target, source
