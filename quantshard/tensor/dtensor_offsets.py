"""A comparison of DTensor's offsets with the real ones: DTensor misplaces some uneven shards that two axes cut."""

from functools import lru_cache
from itertools import product

from torch.distributed.tensor.placement_types import Placement

from quantshard import private_torch
from quantshard.sharding import ceil_div


@lru_cache(maxsize=4096)
def misplaced(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> str | None:
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
            start, stop = 0, size
            for axis, index in zip(axes, indices, strict=True):
                chunk = ceil_div(stop - start, mesh_shape[axis])  # as in torch.chunk
                start, stop = (min(start + i * chunk, stop) for i in (index, index + 1))
            extent = start, stop
            index_by_axis = dict(zip(axes, indices, strict=True))
            coordinate = tuple(index_by_axis.get(axis, 0) for axis in range(len(dims)))
            claimed = private_torch.dtensor_extents(shape, mesh_shape, placements, coordinate)[dim]
            # empty pieces have no place
            if claimed != extent and (claimed[0] < claimed[1] or extent[0] < extent[1]):
                actual, expected = (f"[{start}:{stop}]" for start, stop in (extent, claimed))
                return f"of dim {dim} the rank at {coordinate} holds {actual}, DTensor says {expected}"
    return None
