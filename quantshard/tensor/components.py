"""State-dict entries of quantized weights: names, placements, saving and loading of components.

For a weight named `X` the state dict has a plain tensor or DTensor per component and per piece of state, which aliases
the live one: `X` (codes), `X_scale_inv`, ..., `X_key`, `X_draws`, `X_amax_history` and `X_format` (docs/format.md).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from quantshard import limits, private_torch, sharding
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import FORMAT_NAME_BYTES, Component, Orientation
from quantshard.sharding import Shard
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage


def quantized_local(tensor: object) -> QuantizedTensor | None:
    """The (local) quantized tensor of a parameter, or None for a plain parameter."""
    if isinstance(tensor, DTensor):
        tensor = private_torch.local_tensor(tensor)
    return tensor if isinstance(tensor, QuantizedTensor) else None


def quantized_storage(param: object) -> QuantizedStorage | None:
    """The storage of a parameter's (local) quantized tensor, or None for a plain parameter."""
    local = private_torch.local_tensor(param) if isinstance(param, DTensor) else param
    return local.quantized_storage if isinstance(local, QuantizedTensor) else None


def part_of_whole(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a parameter's whole values, a view; a stack of quantized matrices counts as one matrix."""
    storage = quantized_storage(param)
    offsets: Sequence[int] = private_torch.global_offset(param) if storage is None else storage.shard.origin
    shape = private_torch.local_tensor(param).shape if storage is None else storage.shard.shape
    whole = whole if storage is None else whole.flatten(0, -2)
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def storage_of(param: Tensor) -> QuantizedStorage:
    storage = quantized_storage(param)
    assert storage is not None
    return storage


def canonical_name(name: str) -> str:
    """A name as in the keys of the model's state dict, without the parts that `checkpoint_wrapper` inserts."""
    # only wrappers insert parts that start with an underscore
    return private_torch.without_wrappers(name) if "._" in f".{name}" else name


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by their keys in the model's state dict. A tied parameter appears under all of its names."""
    return {canonical_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}


def quantized_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in named_parameters(model).items() if quantized_local(param) is not None}


def component_placements(
    shard: Shard, component: Component, placements: tuple[Placement, ...], ndim: int = 2
) -> list[Placement]:
    """Placements of a component: the weight's `placements`, but replicated on mesh axes whose cuts cross its blocks."""
    whole = sharding.whole_axes(shard, component, private_torch.cut_dims(placements, ndim))
    return [Replicate() if axis in whole else placement for axis, placement in enumerate(placements)]


def storage_tensors(storage: QuantizedStorage, owner: Tensor) -> dict[str, Tensor]:
    """Component name -> live component; DTensors if `owner`, the parameter or state of this storage, is a DTensor.
    Components of a stack of matrices have three dims too."""
    if owner.ndim < 3 and not isinstance(owner, DTensor):
        return dict(storage.components)
    tensors: dict[str, Tensor] = {}
    whole = sharding.whole(storage.shard.global_shape)
    for name, part in storage.components.items():
        component = storage.spec.format.by_name[name]
        shape: tuple[int, ...] = whole.component_shape(component)
        if owner.ndim == 3:
            rows = owner.shape[1] // min(component.block_shape[0], owner.shape[1])
            part, shape = part.view(len(part) // rows, rows, part.shape[1]), (shape[0] // rows, rows, shape[1])
        if isinstance(owner, DTensor):
            placements = component_placements(storage.shard, component, owner.placements, owner.ndim)
            part = as_dtensor(part, owner, placements, shape)
        tensors[name] = part
    return tensors


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


def as_matrix(tensor: Tensor, like: QuantizedStorage | None) -> Tensor:
    """View a tensor that belongs to a stack of matrices as `like` stores the stack: [rows of all, columns]."""
    return tensor if like is None or not like.spec.format.matrix_rows else tensor.flatten(0, -2)


def shard_of(param: Tensor) -> Shard:
    """The rectangle of the global tensor that a parameter's local tensor holds; a vector is one column."""
    storage = quantized_storage(param)
    if storage is not None:
        return storage.shard
    rows = param.shape[1] if param.ndim == 3 else 1  # a stack is cut between its matrices
    shard = sharding.whole((param.shape[0] * rows, param.shape[-1] if param.ndim > 1 else 1))
    if isinstance(param, DTensor):
        mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
        assert coordinate is not None
        dims = private_torch.cut_dims(param.placements, param.ndim)
        for axis in reversed(range(mesh.ndim)):  # tensor parallelism has the last axes and cuts first
            dim = dims[axis]
            if dim is not None:
                unit = 1 if dim else rows
                chunk = unit * sharding.ceil_div(shard.shape[dim] // unit, mesh.size(axis))  # as in torch.chunk
                shard = shard.piece(dim, coordinate[axis] * chunk, chunk)
    return shard


def check_offsets(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check, alike on all ranks, that DTensor's metadata, by which DCP saves and loads, match how tensors are cut."""
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            problem = private_torch.misplaced_shard(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements))
            if problem is not None:
                subject = f"{name} {tuple(tensor.shape)} on a mesh {mesh.shape}: {problem}"
                raise ConfigurationError(limits.refusal("misplaced shards", subject))


FORMAT_SUFFIX, FORMAT_TAG_BYTES = "_format", 1 + FORMAT_NAME_BYTES + 1

CHECKPOINT_VERSION = 1
"""Version of the layout that docs/format.md specifies; the first byte of every `X_format`."""


def format_tag(name: str, padding: int = 0) -> Tensor:
    """The `X_format` entry of a weight, uint8 [16]: version, name of the format, elements that pad each row."""
    padded = name.encode("ascii").ljust(FORMAT_NAME_BYTES, b"\0")
    return torch.tensor([CHECKPOINT_VERSION, *padded, padding], dtype=torch.uint8, device="cpu")


def read_format_tag(tag: Tensor) -> str:
    """The format's name in a tag. Raises CheckpointError for a malformed tag or another version."""
    if tag.dtype != torch.uint8 or tag.numel() != FORMAT_TAG_BYTES:
        raise CheckpointError(f"its format tag is {tag.dtype} {list(tag.shape)}, not {FORMAT_TAG_BYTES} bytes")
    version, *padded, _ = tag.reshape(-1).tolist()
    if version != CHECKPOINT_VERSION:
        raise CheckpointError(f"it has format version {version}, not {CHECKPOINT_VERSION}; update quantshard")
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
    storage = storage_of(param)
    components = (storage.spec.format.by_name[name].key_suffix for name in storage.components)
    return [*components, *(f"_{key}" for key in storage.state), FORMAT_SUFFIX]


def zero_centered_gammas(model: nn.Module) -> list[str]:
    """Names of the normalization weights that are stored as gamma - 1 (`zero_centered_gamma`)."""
    names = (
        canonical_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in getattr(module, "zero_centered_gammas", ())
    )
    return list(dict.fromkeys(names))  # wrappers expose the attributes of the module inside, so names repeat
