"""Reads a model's weights from the model itself, in training, one bucket of weights at a time.

`LiveModel` has the methods of `source.CheckpointModel`, so an export and a transfer to an engine share one plan.
Every cut of a weight (by tensor parallelism, then by FSDP2) is undone by an all-gather over the axis that made it, in
the reverse order. Codes and scales are gathered as bytes, and nothing is dequantized. A bucket holds the weights of
attention or MLP of one decoder layer, or a part of them, and is freed when the next one is gathered. Weights that are
not sharded are not copied.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from quantshard import private_torch, sharding
from quantshard.checkpoints.conversions import in_batches
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.formats import Component, Orientation, Role
from quantshard.interop.layouts.conversion import RowRun
from quantshard.interop.layouts.names import FileNames, Names
from quantshard.interop.layouts.source import ModelWeight, WeightReader, input_history, is_state
from quantshard.modules.stacked_experts import StackedExperts
from quantshard.optimizers import averaging
from quantshard.sharding import Shard
from quantshard.tensor import components

_BUCKET_BYTES, _ALONE_BYTES = 32 << 20, 1 << 20
"""Largest bucket of several weights; largest gathered tensor that shares a collective with others."""


@dataclass(eq=False)  # tensors have no truth value
class _Piece:
    """This rank's piece of a component (None: of a plain tensor), as a matrix, and the groups to gather it from.

    tensors: the parts of the piece along dim `dim`: one tensor, or after a gather one tensor per rank.
    groups: the group of each cut, the last cut first.
    """

    tensors: list[Tensor]
    shard: Shard
    component: Component | None
    groups: list[dist.ProcessGroup]
    dim: int = 0

    def joined(self) -> Tensor:
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors, self.dim)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_replicated(self) -> bool:
        """Whether undoing the last cut needs nothing from other ranks."""
        return self.groups[0].size() == 1 or (self.component is not None and not self.shard.gathers(self.component))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or type(model).__name__ == "OptimizedModule":
        model = next(model.children())
    return model


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class before `fully_shard` replaced it."""
    return type(model).__name__.removeprefix("FSDP" if isinstance(model, FSDPModule) else "")


class LiveModel(WeightReader):
    """A model in training. Reads are collective calls, which all ranks make in the same order.

    `held_only`: weights include only this rank's experts. `has_read`: whether a weight's values or scales were read.
    """

    def __init__(self, model: nn.Module, held_only: bool) -> None:
        self.path, self._model = class_name(model), model
        averaging.reshard(model)
        self._contents = _contents(model)
        self._expert_ranks, self._held_only = _expert_ranks(model), held_only
        self.tensors = dict(_entries(model))
        self._history_buffers = dict(model.named_buffers())
        self.weights = {name: self._weight(name, tensor) for name, tensor in self.tensors.items()}
        sizes = {name: tensor.numel() * self.weights[name].dtype.itemsize for name, tensor in self.tensors.items()}
        batches = (in_batches(names, sizes.__getitem__, _BUCKET_BYTES) for _, names in groupby(self.weights, _block))
        self._buckets = {name: bucket for bucket in chain.from_iterable(batches) for name in bucket}
        self.has_read = False
        self.free()

    def is_current(self) -> bool:
        """Reshard the model, and return whether its modules, weights and buffers are those at construction."""
        averaging.reshard(self._model)
        weights = {name: self._weight(name, tensor) for name, tensor in self.tensors.items()}
        before, now = ([(name, id(part)) for name, part in parts] for parts in (self._contents, _contents(self._model)))
        return now == before and weights == self.weights

    def free(self) -> None:
        """Free what the last read gathered."""
        self._gathered: dict[str, dict[str, _Piece]] = {}
        self._last: tuple[str, Mapping[str, Tensor]] = "", {}

    def _weight(self, name: str, tensor: Tensor) -> ModelWeight:
        if tensor.is_meta:
            raise ConfigurationError(f"{name} is on the meta device; load the model, or call reset_parameters()")
        shape = tuple(tensor.shape)
        if self.is_held_only(name):
            shape = (shape[0] // self._expert_ranks[_module(name)].size(), *shape[1:])
        local = components.quantized_local(tensor)
        spec = None if local is None else local.quantized_storage.spec.of_matrix
        return ModelWeight(name, shape, spec, tensor.dtype if local is None else torch.uint8)

    def is_held_only(self, name: str) -> bool:
        """Return whether this rank reads only its own experts of a parameter."""
        return self._held_only and _module(name) in self._expert_ranks

    def held_rows(self, names: Names) -> Names:
        """Return a map with only the rows that this rank reads, by their numbers in what it reads."""
        experts = [name for name in self.weights if self.is_held_only(name)]
        if not experts:
            return names
        if not isinstance(names, FileNames):
            raise ConfigurationError("held_only needs the default names; omit names=")
        files = dict(names.files)
        for name in experts:
            rows = self.weights[name].rows
            first = self._expert_ranks[_module(name)].get_local_rank() * rows
            inside = {
                file: [RowRun(run.ours - first, run.theirs, run.length) for run in runs]
                for file, runs in files[name].items()
                if all(first <= run.ours and run.ours + run.length <= first + rows for run in runs)
            }
            if sum(run.length for runs in inside.values() for run in runs) != rows:
                raise ConfigurationError(f"{name}: engines read its experts in one tensor; omit held_only")
            files[name] = inside
        return FileNames({}, files=files)

    def parts(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        if self._last[0] != weight.name:
            # free what is not needed any more before the next allocation
            self._last = "", {}
            if weight.name not in self._gathered:
                self._gathered = {}
                self._gathered = self._gather(self._buckets[weight.name], frozenset(Role))
            self._last = weight.name, self._joined(weight, self._gathered[weight.name])
        return self._last[1]

    def scales(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        return self._joined(weight, self._gather([weight.name], frozenset(Role) - {Role.CODES})[weight.name])

    @staticmethod
    def _joined(weight: ModelWeight, pieces: Mapping[str, _Piece]) -> dict[str, Tensor]:
        return {part: piece.joined() if part else piece.joined().view(weight.shape) for part, piece in pieces.items()}

    def input_amax(self, name: str) -> float | None:
        history = self._history_buffers.get(input_history(name))
        return None if history is None or not history.numel() else float(history.max()) or None

    def is_same(self, weight: ModelWeight, other: ModelWeight) -> bool:
        return self.tensors[weight.name] is self.tensors[other.name] or super().is_same(weight, other)

    @torch.no_grad()
    def _gather(self, names: Iterable[str], roles: frozenset[Role]) -> dict[str, dict[str, _Piece]]:
        self.has_read = True
        pieces = {name: self._pieces(name, roles) for name in names}
        _undo_cuts([piece for by_part in pieces.values() for piece in by_part.values()])
        return pieces

    def _pieces(self, name: str, roles: frozenset[Role]) -> dict[str, _Piece]:
        tensor, groups = self.tensors[name], list[dist.ProcessGroup]()
        local = components.quantized_local(tensor)
        if isinstance(tensor, DTensor):
            dims = private_torch.cut_dims(tensor.placements, tensor.ndim)
            groups = [tensor.device_mesh.get_group(axis) for axis, dim in enumerate(dims) if dim is not None]
        if self.is_held_only(name):
            groups.pop()
        if local is None:
            return {"": _plain_piece(tensor, groups)}
        storage = local.quantized_storage
        copy = storage.spec.format.copies[Orientation.ROWWISE]
        parts = (part for part in (copy.codes, copy.scale, copy.amax) if part is not None and part.role in roles)
        return {part.name: _Piece([storage.components[part.name]], storage.shard, part, list(groups)) for part in parts}


def _contents(model: nn.Module) -> list[tuple[str, object]]:
    lists = (model.named_modules, model.named_parameters, model.named_buffers)
    return [entry for entries in lists for entry in entries(remove_duplicate=False)]


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers by name, in the order of the state dict; a tied one under all of its names."""
    params = components.named_parameters(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for key in model.state_dict():
        name = components.canonical_name(key)
        if name in params:
            yield uncompiled_name(name), params[name]
        elif name in buffers and not is_state(name, buffers[name].dtype):
            yield uncompiled_name(name), buffers[name]


def uncompiled_name(name: str) -> str:
    """Return a canonical name without the parts that `torch.compile(module)` adds."""
    return components.canonical_name(name).replace("_orig_mod.", "")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _expert_ranks(model: nn.Module) -> dict[str, DeviceMesh]:
    """Return the mesh axis over which each module of stacked experts is spread, by the module's name."""
    ranks = {}
    for name, module in model.named_modules():
        if isinstance(module, StackedExperts) and module.tp_mesh is not None:
            ranks[uncompiled_name(name)] = module.tp_mesh
        elif process_groups.expert_axis(module) is not None:
            raise ConfigurationError(f"{name}: an expert-parallel GroupedLinear cannot be sent; use distribute_experts")
    return ranks


def _block(name: str) -> str:
    """Return a name up to the part after its first number: attention or MLP of a decoder layer."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -2)
    return ".".join(parts[: number + 2])


def _plain_piece(tensor: Tensor, groups: list[dist.ProcessGroup]) -> _Piece:
    """Return this rank's piece of a plain tensor, as a matrix."""
    values = private_torch.local_tensor(tensor).detach()
    if tensor.ndim in (1, 2):
        shard = components.shard_of(tensor)
    elif not isinstance(tensor, DTensor):
        shard = sharding.whole((tensor.numel(), 1))
    else:
        values = tensor.full_tensor()
        shard, groups = sharding.whole((values.numel(), 1)), []
    return _Piece([values.reshape(shard.shape)], shard, None, groups)


def _undo_cuts(pieces: list[_Piece]) -> None:
    """Replace pieces by the whole tensors. A collective call over the groups of the pieces."""
    while waiting := [piece for piece in pieces if piece.groups]:
        by_group: dict[dist.ProcessGroup, list[_Piece]] = {}
        for piece in waiting:
            piece.tensors = [piece.joined()]
            if not piece.is_replicated:
                by_group.setdefault(piece.groups[0], []).append(piece)
        for group, members in by_group.items():
            small = [piece for piece in members if piece.nbytes * group.size() <= _ALONE_BYTES]
            for batch in filter(None, [small, *([piece] for piece in members if piece not in small)]):
                _all_gather(batch, group)
        for piece in waiting:
            piece.groups.pop(0)
            piece.shard = piece.shard.before_cut()


@lru_cache(maxsize=1 << 14)
def _cut_shapes(shard: Shard, component: Component | None, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the dim of the last cut, and the shape of each rank's piece."""
    cut = shard.cut
    assert cut is not None
    pieces = [cut.parent.piece(cut.dim, i * cut.chunk, cut.chunk) for i in range(size)]
    return cut.dim, [piece.shape if component is None else piece.component_shape(component) for piece in pieces]


def _all_gather(pieces: list[_Piece], group: dist.ProcessGroup) -> None:
    """Undo the last cut of each piece, in one collective."""
    size, device, alone = group.size(), process_groups.collective_device(group), len(pieces) == 1
    shapes, lengths = [], []
    for piece in pieces:
        piece.dim, by_rank = _cut_shapes(piece.shard, piece.component, size)
        shapes.append(by_rank)
        longest = max(map(prod, shapes[-1])) * piece.tensors[0].itemsize
        lengths.append(longest if alone else sharding.ceil_div(longest, 16) * 16)
    as_bytes = [piece.tensors[0].contiguous().view(-1).view(torch.uint8) for piece in pieces]
    if alone and as_bytes[0].device == device and len(as_bytes[0]) == lengths[0]:
        sent = as_bytes[0]
    else:
        sent = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        for part, content in zip(sent.split(lengths), as_bytes, strict=True):
            part[: len(content)] = content
    gathered = sent.new_empty((size, len(sent)))
    private_torch.all_gather_single(gathered.view(-1), sent, group=group)
    for piece, by_rank, parts in zip(pieces, shapes, gathered.split(lengths, 1), strict=True):
        local = piece.tensors[0]
        if alone and piece.dim == 0:
            # only the last pieces can be shorter, so the rows are in their places already
            by_rank, parts = [(sum(rows for rows, _ in by_rank), by_rank[0][1])], parts.reshape(1, -1)
        piece.tensors = [
            part[: prod(shape) * local.itemsize].view(local.dtype).view(shape).to(local.device)
            for shape, part in zip(by_rank, parts, strict=True)
        ]
