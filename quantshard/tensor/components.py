"""State dict <-> components: what a checkpoint holds of a quantized weight.

For a weight named `X` the state dict has, in place of `X`, one plain tensor (or plain DTensor) per component and per
piece of state: `X` (codes), `X_scale_inv`, ..., `X_key`, `X_draws`, `X_amax_history` and `X_format`, 16 bytes
that say what the codes are. They alias the live components, so loading writes through them. None is of a class of ours,
and reading them back needs no code of ours: see docs/format.md.
"""

from __future__ import annotations

import gc
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
    """The (local) quantized tensor of a parameter, or None if it is not quantized."""
    if isinstance(tensor, DTensor):
        tensor = private_torch.local_tensor(tensor)
    return tensor if isinstance(tensor, QuantizedTensor) else None


PARAMETER_ENTRIES = ("params", "param_names")
"""The entries of an optimizer's group that name its parameters: a load compares them and leaves them as they are. All
other entries are options."""

_LARGEST_INTEGER = (1 << 63) - 1  # of int64, as which PyTorch takes Python's integers


def own_settings(optimizer: Optimizer) -> set[str]:
    """The options in a group that the optimizer itself put there, by default or as our own name them (`group_entries`):
    an LR scheduler adds `initial_lr`, and a user what they like."""
    return {*optimizer.defaults, *getattr(optimizer, "group_entries", ())}


def can_take(is_own: bool, saved: Any, own: Any) -> bool:
    """Whether a saved option can take the place of this optimizer's `own`: a number or bool that of one, a list that of
    a list of its length, None that of a bool or a string, and anything that of None. An option that somebody else put
    there (not `is_own`) may be anything, unless it is a number here.
    """
    return not (is_own or isinstance(own, bool | int | float | Tensor)) or _is_like(saved, own)


def _is_like(saved: Any, own: Any) -> bool:
    if own is None:
        return True
    if saved is None:
        return isinstance(own, bool | str)
    if isinstance(own, tuple | list):
        is_list = isinstance(saved, tuple | list) and len(saved) == len(own)
        return is_list and all(_is_like(one, other) for one, other in zip(saved, own, strict=True))
    if isinstance(own, bool | int | float | Tensor):
        if isinstance(saved, Tensor):
            return not saved.is_complex() and (saved.numel() == 1 or saved.shape == getattr(own, "shape", None))
        return isinstance(saved, float) or (isinstance(saved, int) and abs(saved) <= _LARGEST_INTEGER)
    return type(saved) is type(own)


def as_setting(saved: Any, own: Any) -> Any:
    """A saved option in the form that this optimizer has: for a number of its own, a tensor of one element is one."""
    is_number = isinstance(own, bool | int | float) and isinstance(saved, Tensor)
    return saved.item() if is_number and saved.numel() == 1 else saved


def canonical_name(name: str) -> str:
    """A module's or parameter's name as the keys of the model's state dict have it: without the parts that
    `checkpoint_wrapper` puts in."""
    return private_torch.without_wrappers(name)


def is_same_name(name: str, other: str) -> bool:
    """Whether two names are of one parameter, named before and after DDP, torch.compile or `checkpoint_wrapper`."""
    first, second = (
        [part for part in canonical_name(path).split(".") if part not in ("module", "_orig_mod")]
        for path in (name, other)
    )
    return first == second


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by their keys in the model's state dict; a tied one under each of its names."""
    return {canonical_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}


def quantized_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Those of `named_parameters` that are quantized."""
    return {name: param for name, param in named_parameters(model).items() if quantized_local(param) is not None}


def storage_of(param: Tensor) -> QuantizedStorage:
    """The (local) storage of a parameter that is quantized."""
    local = quantized_local(param)
    assert local is not None
    return local.quantized_storage


def format_tag(name: str, padding: int = 0) -> Tensor:
    """uint8 [16]: what the codes are.

    Byte 0 is the version of the checkpoint format, bytes 1 to 14 a format's name in ASCII, padded with zeros, byte 15
    the number of elements that were added to each row to fill its last byte.
    """
    padded = name.encode("ascii").ljust(FORMAT_NAME_BYTES, b"\0")
    return torch.tensor([CHECKPOINT_VERSION, *padded, padding], dtype=torch.uint8, device="cpu")


def read_format_tag(tag: Tensor) -> str:
    """The format's name in a tag.

    Raises:
        CheckpointError: the tag has a version that this release does not know, or is no tag.
    """
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
    """Placements of a component of a weight with the given ones: the weight's on each mesh axis whose cut is clean for
    the component, else replicated."""
    whole = sharding.whole_axes(shard, component, private_torch.cut_dims(placements))
    return [Replicate() if axis in whole else placement for axis, placement in enumerate(placements)]


def check_offsets(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that DTensor's metadata, by which DCP saves and loads, place the pieces of these tensors where FSDP2 and
    tensor parallelism really cut them. It is arithmetic over the mesh, so all ranks find the same; plain tensors pass.

    Raises:
        ConfigurationError: naming the first tensor whose piece is elsewhere, with a rank and the two places.
    """
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            found = _misplaced(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements))
            if found is not None:
                raise ConfigurationError(
                    limits.refusal("misplaced pieces", f"{name} {tuple(tensor.shape)} on a mesh {mesh.shape}: {found}")
                )


@lru_cache(maxsize=4096)
def _misplaced(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> str | None:
    """A rank whose piece is not where DTensor says, in words."""
    dims = private_torch.cut_dims(placements)
    for dim, size in enumerate(shape):
        # the last axis cuts first; only what FSDP2 cuts after it along the same dim (3 ranks or more) is misplaced
        axes = [axis for axis in reversed(range(len(dims))) if dims[axis] == dim and mesh_shape[axis] > 1]
        if len(axes) < 2:
            continue
        inner = mesh_shape[axes[0]]
        if len(axes) == 2 and size % inner == 0 and private_torch.is_strided_over(placements[axes[1]], inner):
            continue  # DTensor places equal pieces right; to look at each of a thousand ranks would take long
        for at in product(*(range(mesh_shape[axis]) for axis in axes)):
            held = (0, size)
            for axis, index in zip(axes, at, strict=True):
                held = sharding.chunk_of(held, index, mesh_shape[axis])
            place = dict(zip(axes, at, strict=True))
            coordinate = tuple(place.get(axis, 0) for axis in range(len(dims)))
            told = private_torch.dtensor_extents(shape, mesh_shape, placements, coordinate)[dim]
            if told != held and (told[0] < told[1] or held[0] < held[1]):  # where an empty piece is does not matter
                here, there = (f"[{start}:{stop}]" for start, stop in (held, told))
                return f"of dim {dim} the rank at {coordinate} holds {here}, DTensor says {there}"
    return None


def shard_of(param: Tensor) -> Shard:
    """Which rectangle of the global tensor a 2-D parameter's local tensor is."""
    local = quantized_local(param)
    if local is not None:
        return local.quantized_storage.shard
    shard = sharding.whole((param.shape[0], param.shape[1]))
    if isinstance(param, DTensor):
        mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
        assert coordinate is not None
        dims = private_torch.cut_dims(param.placements)
        for axis in reversed(range(mesh.ndim)):  # tensor parallelism, whose axes stand last, cuts first
            dim = dims[axis]
            if dim is not None:
                chunk = sharding.ceil_div(shard.shape[dim], mesh.size(axis))  # that of torch.chunk, as both cut
                shard = shard.piece(dim, coordinate[axis] * chunk, chunk)
    return shard


def as_dtensor(local: Tensor, like: DTensor, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """A DTensor on the mesh of `like` around a local tensor that is neither copied nor moved."""
    return private_torch.dtensor_around(local, like.device_mesh, placements, torch.Size(shape))


@torch.no_grad()
def move_parameter(param: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Move or cast a quantized parameter as `nn.Module` does a plain one: it remains the object that optimizers hold,
    and keeps its attributes, its hooks and its gradient. `change` makes the moved or cast tensor of a given one.

    PyTorch itself swaps a tensor subclass with a new one, and the parameter then has that one's attributes and hooks.
    To or from the meta device there is no other way: the hooks are lost, like those of a plain parameter, which PyTorch
    replaces there.
    """
    changed, grad = change(param), param.grad
    if private_torch.takes_data(param, changed):
        param.data = changed
        if grad is not None:
            grad.data = change(grad)
        return
    param.grad = None  # as in `nn.Module._apply`: a gradient that Python has looked at prevents the swap
    with attributes_kept([param]):
        torch.utils.swap_tensors(param, nn.Parameter(changed, requires_grad=param.requires_grad))
    if grad is not None:
        param.grad = change(grad)


@contextmanager
def attributes_kept(params: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors back the attributes that they had on entry: PyTorch may swap them with others in between."""
    kept = [(param, dict(vars(param))) for param in params]
    yield
    for param, attributes in kept:
        vars(param).update({name: value for name, value in attributes.items() if name not in vars(param)})


_OWN_ATTRIBUTES = ("quantized_storage", "_is_param", "_fsdp_", "quantshard_", "_quantshard_", "_is_hf_initialized")
"""How the attributes of a parameter begin that tell of this very object: ours, PyTorch's, and transformers' of what it
loaded."""
_UNMARKED = {"quantized_storage", "_is_param", "_fsdp_orig_uid"}


def living_optimizers() -> list[Optimizer]:
    """The optimizers of this process. It goes through all objects of Python, a tenth of a second for some 200,000."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]  # isinstance asks objects, too


def set_attributes(param: Tensor) -> dict[str, Any]:
    """What users and frameworks have set on a parameter, live values."""
    return {name: value for name, value in vars(param).items() if not name.startswith(_OWN_ATTRIBUTES)}


def carry_attributes(old: Tensor | None, new: Tensor | None) -> None:
    """Give a parameter that takes the place of another what was set on that one, where both stand for one quantized
    weight: its shard, the whole that is gathered from that, its copy off the meta device. PyTorch makes new objects for
    these and leaves such marks behind. A gathered weight has those of its shard, and hands none back."""
    if old is None or new is None or old is new or vars(old).keys() <= _UNMARKED:  # at each gather, hence the last
        return
    if given := set_attributes(old):
        before, after = quantized_local(old), quantized_local(new)
        if before is None or after is None or before.quantized_storage.gathered:
            return
        if before.quantized_storage.state.get(KEY) is after.quantized_storage.state.get(KEY):
            vars(new).update(given)


def zeros_like(param: Tensor, dtype: torch.dtype, *last: int) -> Tensor:
    """Zeros of the parameter's shape, and further dims; a DTensor where it is one."""
    local = private_torch.local_tensor(param)
    zeros = torch.zeros((*local.shape, *last), dtype=dtype, device=local.device)
    if not isinstance(param, DTensor):
        return zeros
    return as_dtensor(zeros, param, list(param.placements), (*param.shape, *last))


def storage_tensors(storage: QuantizedStorage, owner: Tensor) -> dict[str, Tensor]:
    """Component name -> live component; a DTensor if `owner`, the parameter or state that has this storage, is one."""
    return {name: storage_tensor(storage, owner, name) for name in storage.components}


def storage_tensor(storage: QuantizedStorage, owner: Tensor, name: str) -> Tensor:
    """One of `storage_tensors`."""
    part = storage.components[name]
    if not isinstance(owner, DTensor):
        return part
    placements = component_placements(storage.shard, storage.cell.format.by_name[name], owner.placements)
    return as_dtensor(part, owner, placements, global_component_shape(storage.cell.format, storage.shard, name))


def global_component_shape(fmt: Format, shard: Shard, name: str) -> tuple[int, int]:
    """Shape of a component of the whole tensor."""
    return sharding.whole(shard.global_shape).component_shape(fmt.by_name[name])


def state_of(param: Tensor) -> dict[str, Tensor]:
    """Key suffix -> live tensor, for all that a checkpoint holds of a quantized parameter.

    Raises:
        ConfigurationError: see `check_offsets`.
    """
    storage = storage_of(param)
    # here, since each save and load comes through here: DCP would mix misplaced pieces up in silence
    check_offsets([(f"the {storage.cell.tag} weight", param)])
    by_name = storage.cell.format.by_name
    found = {by_name[name].key_suffix: part for name, part in storage_tensors(storage, param).items()}
    found.update({f"_{name}": value for name, value in storage.state.items()})
    packed = storage.cell.format.copies[Orientation.ROWWISE].codes.block_shape[1]
    found[FORMAT_SUFFIX] = format_tag(storage.cell.tag, -storage.shard.global_shape[1] % packed)
    return found


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
    """What `state_of` has of a suffix, without the DTensors of all others; None if it has nothing."""
    storage = storage_of(param)
    by_name = storage.cell.format.by_name
    for name in storage.components:
        if by_name[name].key_suffix == suffix:
            return storage_tensor(storage, param, name)
    return state_of(param).get(suffix) if suffix in suffixes(param) else None


def load_components(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Copy loaded components and state, by key suffix, into a quantized parameter. Nothing is dequantized.

    A value may be a DTensor like the live one, or a plain tensor: the local part or the whole component.

    Raises:
        CheckpointError: the values are of another format or shape; nothing was written.
    """
    write_components(param, fitting_pairs(param, values, name))


def fitting_pairs(param: Tensor, values: Mapping[str, Tensor], name: str) -> list[tuple[Tensor, Tensor]]:
    """What `load_components` would copy: pairs of the live local tensor and its new values.

    Raises:
        CheckpointError: the values are of another format or shape.
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
    """The key suffixes of a parameter's float32 scales, if its scaling wants powers of two: the encoding holds others
    too, and the format tag does not tell whether a checkpoint has such."""
    local = quantized_local(param)
    if local is None or not local.quantized_storage.cell.scaling.power_of_two:
        return []
    scales = (c for c in local.quantized_storage.cell.format.components if c.role is Role.SCALE and c.encoding == FP32)
    return [component.key_suffix for component in scales]


def check_scales(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Check the scales among loaded components (by key suffix); each rank checks those that it is given.

    Raises:
        CheckpointError: the parameter's scaling wants powers of two, and one is none.
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
    """Copy the pairs that `fitting_pairs` found into a parameter, quantized or not."""
    for target, source in pairs:
        target.copy_(source)
    local = quantized_local(param)
    if local is not None and pairs:
        local.quantized_storage.mark_written()


def assigned(param: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> nn.Parameter:
    """A quantized parameter like this one around the loaded components themselves, which stay where they were loaded
    to; its random key, draws and amax history are copies. `pairs`: see `fitting_pairs`; targets are live tensors."""
    storage, loaded = storage_of(param), {id(target): source for target, source in pairs}
    parts = {name: loaded[id(part)] for name, part in storage.components.items()}
    device = next(iter(parts.values())).device
    for name, part in parts.items():
        is_cut = isinstance(param, DTensor) and part.untyped_storage().nbytes() > part.nbytes  # it would keep the whole
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
    """A copy of a loaded piece of a weight's state, on the device of its `own` one, or on `device` if that is on meta.
    If nothing was loaded: a copy of its own, or zeros if that is on meta."""
    where = device if own.is_meta else own.device
    if loaded is None:
        return torch.zeros_like(own, device=where) if own.is_meta else own.clone()
    return loaded.to(where, own.dtype, copy=True)


def _checked(live: Tensor, value: Tensor, key: str, shard: Shard, component: Component | None) -> tuple[Tensor, Tensor]:
    """The local tensors to copy to and from."""
    target, source = private_torch.local_tensor(live), private_torch.local_tensor(value)
    # a plain tensor may be the whole component, as rank 0 or another program has it: this rank takes its entries
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
