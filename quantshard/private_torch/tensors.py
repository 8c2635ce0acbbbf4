"""Private parts of tensor subclasses and DTensors: construction, local tensors, offsets, and collectives."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from quantshard.private_torch.autograd import define_operator
from quantshard.private_torch.lookup import missing, private_name

_DTENSOR = "torch.distributed.tensor"
_SHARDED, _TENSOR = "a sharded parameter or state", "a quantized tensor"
_spec = private_name(f"{_DTENSOR}._dtensor_spec.DTensorSpec", _SHARDED)
_spec_meta = private_name(f"{_DTENSOR}._dtensor_spec.TensorMeta", _SHARDED)
_place = private_name(f"{_DTENSOR}._utils._compute_local_shape_and_global_offset", _SHARDED)
_strided_shard = private_name(f"{_DTENSOR}.placement_types._StridedShard", "FSDP2 over tensor parallelism")
_unfinished = private_name(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor", "what DTensor's collectives are still filling"
)
_wrapper = private_name("torch.Tensor._make_wrapper_subclass", _TENSOR)
_null_pointer = private_name("torch._C._set_throw_on_mutable_data_ptr", "telling who would read from a null pointer")
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_version_of = operator.attrgetter("_version")

disabled_torch_function = private_name("torch._C._disabled_torch_function_impl", _TENSOR)
"""A `__torch_function__` without overhead, as of DTensor, for subclasses that work at the dispatch level."""

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed both functions, and warns about the old names."""

assert_on_device = private_name("torch._assert_async", "experts whose tokens are counted on the device")
"""Stops the device with a message unless a bool tensor is true, without waiting; on the CPU, raises RuntimeError."""

takes_data = private_name("torch._has_compatible_shallow_copy_type", "moving or casting a quantized tensor's module")
"""Whether `.data` of a tensor can be set to another one. False if exactly one of them is on the meta device."""

scaled_mm = private_name("torch._scaled_mm_v2", "a native product of quantized operands")
"""The implementation of the public `torch.nn.functional.scaled_mm`, which builds lists of numbers in every call."""

scaled_mm_single = private_name("torch._scaled_mm", "a native product in a compiled graph")
"""The same product with a single scale for each operand, under the name that Inductor of torch 2.11 knows."""


def traced_scaled_mm(
    a: Tensor, b: Tensor, a_scales: Sequence[Tensor], a_kinds: Sequence[int], a_swizzle: Sequence[int],
    b_scales: Sequence[Tensor], b_kinds: Sequence[int], b_swizzle: Sequence[int],
    bias: Tensor | None, dtype: torch.dtype, dims: Sequence[int], fast: bool,
) -> Tensor:  # fmt: skip
    """`scaled_mm` in a graph that is being traced."""
    if len(a_scales) == len(b_scales) == 1 and a_scales[0].numel() == b_scales[0].numel() == 1:
        return scaled_mm_single(a, b, a_scales[0], b_scales[0], bias=bias, out_dtype=dtype, use_fast_accum=fast)
    return torch.ops.quantshard.scaled_product(
        a, b, a_scales, a_kinds, a_swizzle, b_scales, b_kinds, b_swizzle, bias, dtype, dims, fast
    )


# an operator, because torch 2.11 rejects scales of fewer than 128 columns when it computes the shape
define_operator(
    "scaled_product",
    "(Tensor a, Tensor b, Tensor[] a_scales, int[] a_kinds, int[] a_swizzle, Tensor[] b_scales, int[] b_kinds, "
    "int[] b_swizzle, Tensor? bias, ScalarType dtype, int[] dims, bool fast) -> Tensor",
    lambda *args: scaled_mm(*args),
    lambda a, b, *args: a.new_empty((a.shape[0], b.shape[1]), dtype=args[7]),
    torch.Tag.needs_exact_strides,
)


def compile_cache_key(tensor: Any) -> str:
    """Describe a wrapper tensor for the keys of compile caches: the same in every process, and without values."""
    names, metadata = tensor.__tensor_flatten__()
    layouts = [(tuple(part.shape), part.stride(), part.device) for part in operator.attrgetter(*names)(tensor)]
    return repr((metadata, tuple(tensor.shape), tensor.requires_grad, layouts))


def make_wrapper(
    cls: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device, strides: Any = None
) -> Any:
    """A tensor of class `cls` without data; C++ code that reads its null address raises instead of crashing."""
    with torch.inference_mode(False):  # a view of a normal tensor is a normal tensor
        wrapper = _wrapper(cls, shape, strides=strides, dtype=dtype, device=device)
    if missing(_null_pointer) is None:
        _null_pointer(wrapper)
    return wrapper


@functools.cache
def operator_facts(operation: Any) -> tuple[list[tuple[int, str]], bool, bool]:
    """Arguments that an operation writes to, by position and name; whether its results are views of arguments; whether
    PyTorch decomposes it before subclasses see it, except in inference mode."""
    schema = getattr(operation, "_schema", None)
    if schema is None:  # a higher-order operator
        return [], False, False
    is_c10d = schema.name.startswith("c10d::")  # these schemas declare no writes
    infos = enumerate((argument.name, argument.alias_info) for argument in schema.arguments)
    writes = [(i, name) for i, (name, alias) in infos if is_c10d or (alias is not None and alias.is_write)]
    is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
    return writes, is_view, operation.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, for the result of an autograd function: if `to` (or `reshape`) returns its argument, torch
    2.11's Dynamo silently treats the result as one without a gradient."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or the values of one that DTensor's collectives are still filling. Not differentiable."""
    return tensor.wait() if isinstance(tensor, _unfinished) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, without the autograd node of the public `to_local()`; other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def in_place_changes(tensor: Tensor) -> int:
    """How often a tensor, and its local tensor, was changed in place; changes through `.data` are not counted."""
    local = local_tensor(tensor)
    return count_in_place_changes([tensor] if local is tensor else [tensor, local])


def count_in_place_changes(tensors: Iterable[Tensor]) -> int:
    """How often plain tensors were changed in place, in total. Inference mode does not count, and gives 0."""
    try:
        return sum(map(_version_of, tensors))
    except RuntimeError:
        return 0


def keep_with(owner: Tensor, other: Tensor) -> None:
    """Keep a tensor alive as long as `owner`, for objects that store its address."""
    tensors = _kept.setdefault(owner, [])
    if all(other is not tensor for tensor in tensors):
        tensors.append(other)


def dtensor_around(local: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: torch.Size) -> DTensor:
    """A DTensor around this local tensor, which the public `DTensor.from_local` would move under CPU offload."""
    strides = [prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]  # contiguous
    meta = _spec_meta(shape, tuple(strides), local.dtype)
    return DTensor(local, _spec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def global_offset(tensor: Tensor) -> tuple[int, ...]:
    """Global index of the first local element of a plain parameter, a DTensor or not."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    mesh = tensor.device_mesh
    coordinate = tuple(mesh.get_coordinate() or ())
    extents = dtensor_extents(tuple(tensor.shape), tuple(mesh.shape), tensor.placements, coordinate)
    return tuple(start for start, _ in extents)


def dtensor_extents(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> list[tuple[int, int]]:
    """For each dim the first and one past the last index that DTensor's metadata give to a rank."""
    lengths, starts = _place(shape, mesh_shape, list(coordinate), placements)
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def is_strided_over(placement: Placement, inner: int) -> bool:
    """True for FSDP2's own placement on a dim that axes of `inner` ranks cut before."""
    return isinstance(placement, _strided_shard) and placement.split_factor == inner


def cut_dims(placements: Iterable[Placement], ndim: int = 2) -> list[int | None]:
    """Return the dim that each mesh axis shards, or None. A stack of matrices (`ndim` 3) counts as one matrix with the
    rows of all of them."""
    dims = [None if placement.is_replicate() else int(placement.dim) for placement in placements]  # type: ignore[attr-defined]
    return [None if dim is None else max(dim - max(ndim - 2, 0), 0) for dim in dims]


@functools.lru_cache(maxsize=4096)
def misplaced_shard(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> str | None:
    """Describe the first rank whose piece DTensor misplaces (some uneven shards that two axes cut), or return None."""
    dims = cut_dims(placements)
    for dim, size in enumerate(shape):
        # the last axis cuts first; only a later cut of FSDP2 along the same dim (3 ranks or more) is misplaced
        axes = [axis for axis in reversed(range(len(dims))) if dims[axis] == dim and mesh_shape[axis] > 1]
        if len(axes) < 2:
            continue
        inner = mesh_shape[axes[0]]
        if len(axes) == 2 and size % inner == 0 and is_strided_over(placements[axes[1]], inner):
            continue  # DTensor places equal pieces correctly; checking each of a thousand ranks would be slow
        for indices in product(*(range(mesh_shape[axis]) for axis in axes)):
            start, stop = 0, size
            for axis, index in zip(axes, indices, strict=True):
                chunk = -((start - stop) // mesh_shape[axis])  # as in torch.chunk
                start, stop = (min(start + i * chunk, stop) for i in (index, index + 1))
            extent = start, stop
            index_by_axis = dict(zip(axes, indices, strict=True))
            coordinate = tuple(index_by_axis.get(axis, 0) for axis in range(len(dims)))
            claimed = dtensor_extents(shape, mesh_shape, placements, coordinate)[dim]
            # empty pieces have no place
            if claimed != extent and (claimed[0] < claimed[1] or extent[0] < extent[1]):
                actual, expected = (f"[{start}:{stop}]" for start, stop in (extent, claimed))
                return f"of dim {dim} the rank at {coordinate} holds {actual}, DTensor says {expected}"
    return None
