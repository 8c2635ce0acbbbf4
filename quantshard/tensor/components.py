"""State-dict entries of quantized weights: names, placements, saving and loading of components.

For a weight named `X` the state dict has, in place of `X`, one plain tensor (or plain DTensor) per component and per
piece of state: `X` (codes), `X_scale_inv`, ..., `X_key`, `X_draws`, `X_amax_history` and `X_format`, 16 bytes that
name the format of the codes. They alias the live components, so loading writes through them. None has a class of
quantshard, and reading them back needs no quantshard: see docs/format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from quantshard import limits, numerics, private_torch, sharding
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import FORMAT_NAME_BYTES, FP32, Component, Orientation, Role
from quantshard.sharding import Shard
from quantshard.tensor import moves
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import AMAX_HISTORY, QuantizedStorage

# Quantized parameters and their names


REPLACED = "_replaced_by_quantshard"
"""Attribute of a parameter that `convert` or `revert` took out of its model."""


def quantized_local(tensor: object) -> QuantizedTensor | None:
    """The (local) quantized tensor of a parameter, or None for a plain parameter."""
    if isinstance(tensor, DTensor):
        tensor = private_torch.local_tensor(tensor)
    return tensor if isinstance(tensor, QuantizedTensor) else None


def storage_of(param: Tensor) -> QuantizedStorage:
    """The (local) storage of a quantized parameter."""
    local = quantized_local(param)
    assert local is not None
    return local.quantized_storage


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


# Where the components of a sharded weight are


def component_placements(shard: Shard, component: Component, placements: tuple[Placement, ...]) -> list[Placement]:
    """Placements of a component of a weight with these `placements`.

    On mesh axes with a clean cut for the component they are the weight's; on other axes the component is replicated.
    """
    whole = sharding.whole_axes(shard, component, private_torch.cut_dims(placements))
    return [Replicate() if axis in whole else placement for axis, placement in enumerate(placements)]


def storage_tensors(storage: QuantizedStorage, owner: Tensor) -> dict[str, Tensor]:
    """Component name -> live component; DTensors if `owner`, the parameter or state of this storage, is a DTensor."""
    return {name: storage_tensor(storage, owner, name) for name in storage.components}


def storage_tensor(storage: QuantizedStorage, owner: Tensor, name: str) -> Tensor:
    """One entry of `storage_tensors`."""
    part = storage.components[name]
    if not isinstance(owner, DTensor):
        return part
    component = storage.spec.format.by_name[name]
    placements = component_placements(storage.shard, component, owner.placements)
    return as_dtensor(part, owner, placements, sharding.whole(storage.shard.global_shape).component_shape(component))


def as_dtensor(local: Tensor, like: DTensor, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """A DTensor on the mesh of `like` around a local tensor, without a copy or a move."""
    return private_torch.dtensor_around(local, like.device_mesh, placements, torch.Size(shape))


def zeros_like(param: Tensor, dtype: torch.dtype, *last: int) -> Tensor:
    """Zeros of the parameter's shape, with `last` appended; a DTensor if the parameter is one."""
    local = private_torch.local_tensor(param)
    zeros = torch.zeros((*local.shape, *last), dtype=dtype, device=local.device)
    if not isinstance(param, DTensor):
        return zeros
    return as_dtensor(zeros, param, list(param.placements), (*param.shape, *last))


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


def check_offsets(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that DTensor's metadata match how FSDP2 and tensor parallelism really cut these tensors.

    DCP saves and loads by the metadata. The check is arithmetic over the mesh, so all ranks raise the same error.
    """
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            problem = _misplaced(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements))
            if problem is not None:
                raise ConfigurationError(
                    limits.refusal(
                        "misplaced shards", f"{name} {tuple(tensor.shape)} on a mesh {mesh.shape}: {problem}"
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


# State-dict entries of one weight


FORMAT_SUFFIX, FORMAT_TAG_BYTES = "_format", 1 + FORMAT_NAME_BYTES + 1


CHECKPOINT_VERSION = 1
"""Version of the layout that docs/format.md specifies; the first byte of every `X_format`."""


def format_tag(name: str, padding: int = 0) -> Tensor:
    """The `X_format` entry of a weight, uint8 [16].

    Byte 0 is the version of the checkpoint format, bytes 1 to 14 a format's name in ASCII, padded with zeros. Byte 15
    is the number of elements that pad each row to a whole byte.
    """
    padded = name.encode("ascii").ljust(FORMAT_NAME_BYTES, b"\0")
    return torch.tensor([CHECKPOINT_VERSION, *padded, padding], dtype=torch.uint8, device="cpu")


def read_format_tag(tag: Tensor) -> str:
    """The format's name in a tag. Raises CheckpointError for a malformed tag or another version."""
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


def state_of(param: Tensor) -> dict[str, Tensor]:
    """Key suffix -> live tensor, for each checkpoint entry of a quantized parameter."""
    storage = storage_of(param)
    # each save and load calls this function, and DCP would silently mix up misplaced pieces
    check_offsets([(f"the {storage.spec.tag} weight", param)])
    by_name = storage.spec.format.by_name
    entries = {by_name[name].key_suffix: part for name, part in storage_tensors(storage, param).items()}
    entries.update({f"_{name}": value for name, value in storage.state.items()})
    packed = storage.spec.format.copies[Orientation.ROWWISE].codes.block_shape[1]
    entries[FORMAT_SUFFIX] = format_tag(storage.spec.tag, -storage.shard.global_shape[1] % packed)
    return entries


def suffixes(param: Tensor) -> list[str]:
    """The key suffixes of a quantized parameter, in the order of `state_of`."""
    storage = storage_of(param)
    by_name = storage.spec.format.by_name
    return [
        *(by_name[name].key_suffix for name in storage.components),
        *(f"_{key}" for key in storage.state),
        FORMAT_SUFFIX,
    ]


def state_entry(param: Tensor, suffix: str) -> Tensor | None:
    """The entry of `state_of` for one suffix, or None, without building DTensors for the other entries."""
    storage = storage_of(param)
    by_name = storage.spec.format.by_name
    for name in storage.components:
        if by_name[name].key_suffix == suffix:
            return storage_tensor(storage, param, name)
    return state_of(param).get(suffix) if suffix in suffixes(param) else None


# Loading entries into a weight


def load_components(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Copy loaded components and state, by key suffix, into a quantized parameter. No value is dequantized.

    Each loaded value is a DTensor like the live one, or a plain tensor: the local part or the whole component. If one
    does not fit, a CheckpointError is raised and nothing is written.
    """
    write_components(param, fitting_pairs(param, values, name))


def fitting_pairs(param: Tensor, values: Mapping[str, Tensor], name: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs of live local tensors and their loaded values, as `load_components` copies them."""
    storage = storage_of(param)
    tag = values.get(FORMAT_SUFFIX)
    if tag is not None and read_format_tag(tag) != storage.spec.tag:
        raise CheckpointError(
            f"{name}: the state dict holds {read_format_tag(tag)!r}, but this model's weight is {storage.spec.tag!r}; "
            "build the model with the recipe that the checkpoint was written with"
        )
    pairs = []
    for suffix, live in state_of(param).items():
        if suffix != FORMAT_SUFFIX and suffix in values:
            component = next((c for c in storage.spec.format.components if c.key_suffix == suffix), None)
            pairs.append(_checked(live, values[suffix], f"{name}{suffix}", storage.shard, component))
    lacking = [c.key_suffix for c in storage.spec.format.components if c.key_suffix not in values]
    if pairs and lacking:
        raise CheckpointError(
            f"{name}: the state dict has some of this weight's components but not {name}{lacking[0]}; codes mean "
            "nothing without their scales, so load all or none"
        )
    check_scales(param, values, name)
    return pairs


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


def power_of_two_scales(param: Tensor) -> list[str]:
    """Key suffixes of a parameter's float32 scales that must be powers of two by its scaling.

    The encoding also holds other scales, and the format tag does not record the difference.
    """
    local = quantized_local(param)
    if local is None or not local.quantized_storage.spec.scaling.power_of_two:
        return []
    scales = (c for c in local.quantized_storage.spec.format.components if c.role is Role.SCALE and c.encoding == FP32)
    return [component.key_suffix for component in scales]


def check_scales(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Check that loaded scales, by key suffix, are powers of two if the parameter's scaling needs them."""
    for suffix in power_of_two_scales(param):
        scale = None if suffix not in values else private_torch.local_tensor(values[suffix])
        if scale is not None and not scale.is_meta and not numerics.are_powers_of_two(scale):
            raise CheckpointError(
                f"{name}{suffix}: the state dict holds scales that are not powers of two, but this model's weight is "
                f"{storage_of(param).spec}; build the model with the recipe that the checkpoint was written with, or "
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
    vars(loaded_param).update(moves.set_attributes(param))
    return loaded_param


def state_like(own: Tensor, loaded: Tensor | None, device: torch.device) -> Tensor:
    """A copy of a loaded piece of a weight's state on the device of `own`, or on `device` if `own` is on meta.

    If nothing was loaded, it is a copy of `own`, or zeros if `own` is on meta.
    """
    where = device if own.is_meta else own.device
    if loaded is None:
        return torch.zeros_like(own, device=where) if own.is_meta else own.clone()
    return loaded.to(where, own.dtype, copy=True)


# State-dict keys of a whole model that differ from its parameters


def zero_centered_gammas(model: nn.Module) -> list[str]:
    """Names of the normalization weights that are stored as gamma - 1 (`zero_centered_gamma`)."""
    names = (
        canonical_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in getattr(module, "zero_centered_gammas", ())
    )
    return list(dict.fromkeys(names))  # wrappers expose the attributes of the module inside, so names repeat


def split_stacked(module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "") -> Mapping[str, Any]:
    """Split state dict entries that stack the rows of several parameters of a module.

    TransformerEngine stores the gated `fc1_weight` as gate over up. Entries with a row count that does not divide stay
    as they are. A state dict without stacked entries is returned itself, since it may read a file at each access.
    """
    stacked: dict[str, list[str]] = {}
    for path, owner in module.named_modules():
        start = prefix + (f"{canonical_name(path)}." if path else "")
        for name, parts in getattr(owner, "stacked_names", {}).items():
            if start + name in state_dict:
                stacked[start + name] = [start + part for part in parts]
    if not stacked:
        return state_dict
    entries = dict(state_dict)
    for name, parts in stacked.items():
        value = entries[name]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] % len(parts) == 0:
            entries.update(zip(parts, entries.pop(name).chunk(len(parts)), strict=True))
    return entries


def held_elsewhere(model: nn.Module, keys: Iterable[str]) -> set[str]:
    """The state dict keys, of the whole model, of experts that live on other ranks (`GroupedLinear`)."""
    result: set[str] = set()
    for prefix, module in model.named_modules():
        # duck typing: `GroupedLinear` is in a higher layer of the package, so it cannot be imported here
        is_held_elsewhere = getattr(module, "is_held_elsewhere", None)
        if is_held_elsewhere is not None:
            start = f"{canonical_name(prefix)}." if prefix else ""
            result |= {key for key in keys if key.startswith(start) and is_held_elsewhere(key.removeprefix(start))}
    return result
