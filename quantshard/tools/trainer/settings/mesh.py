"""The mesh of a run: the arrangement of its ranks, written as `--mesh dp_replicate=1,dp_shard=2,tp=2`.

    dp_replicate   copies of the model (HSDP)
    dp_shard       shards of each copy (FSDP2)
    ep             parts of the experts (expert parallelism); all other parameters are sharded over it too
    tp             ranks that compute the same sequences together (tensor parallelism)

Omitted axes have size 1. The order is fixed, so that the ranks of a tensor-parallel group are neighbours and share a
machine if possible.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quantshard.errors import ConfigurationError, meant
from quantshard.tools.trainer.settings.schema import shown_value

EP, TP = "ep", "tp"
"""Names of the axes of expert and tensor parallelism."""

_SIZE = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)


@dataclass(frozen=True)
class MeshSpec:
    """The sizes of the axes of a mesh."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Parse a text such as "dp_shard=2,tp=2", in any order."""
        axes, sizes = [field.name for field in fields(cls)], dict[str, int]()
        for entry in text.split(","):
            name, _, size = (part.strip() for part in entry.partition("="))
            if not _SIZE.fullmatch(size):
                problem = f"{shown_value(entry.strip())} must be AXIS=SIZE, such as dp_shard=2"
            elif name not in axes:
                problem = f"there is no axis {shown_value(name)}; {meant(name, axes)}use {', '.join(axes)}"
            elif name in sizes:
                problem = f"axis {name!r} is set twice"
            else:
                sizes[name] = int(size)
                continue
            raise ConfigurationError(f"mesh = {shown_value(text)}: {problem}")
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.present.items())

    @property
    def present(self) -> dict[str, int]:
        """Axes of the DeviceMesh: those of size > 1, and dp_shard."""
        return {name: size for name, size in asdict(self).items() if size > 1 or name == "dp_shard"}

    @property
    def processes(self) -> int:
        """The number of ranks."""
        return self.data_parallel * self.tp

    @property
    def data_parallel(self) -> int:
        """The number of parts that the sequences of a step are divided into."""
        return self.dp_replicate * self.dp_shard * self.ep

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Create the DeviceMesh over all ranks. Collective."""
        return init_device_mesh(device_type, tuple(self.present.values()), mesh_dim_names=tuple(self.present))


class MeshParts(NamedTuple):
    """The submeshes of a mesh: `data` and (for expert weights) `experts` for `fully_shard`, and the expert- and
    tensor-parallel axes, if present."""

    data: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh | None
    tp: DeviceMesh | None


def split(mesh: DeviceMesh) -> MeshParts:
    """Split a mesh with named axes. Collective if the mesh has the axis ep."""
    names = mesh.mesh_dim_names or ()
    if EP in names:
        outer = tuple(name for name in names if name != EP)
        shape = (*(mesh[name].size() for name in outer[:-1]), mesh[outer[-1]].size() * mesh[EP].size())
        data = init_device_mesh(mesh.device_type, shape, mesh_dim_names=outer)
        return MeshParts(data, mesh[outer], mesh[EP], None)
    if TP not in names:
        return MeshParts(mesh, mesh, None, None)
    data = mesh[tuple(name for name in names if name != TP)]
    return MeshParts(data, data, None, mesh[TP])


@dataclass(frozen=True)
class SequenceShare:
    """A rank's part of the sequences: part `index` of `count`.

    `counts`: whether to count this rank's metrics; the ranks of a tensor-parallel group have the same metrics, so only
    the first counts.
    """

    index: int
    count: int
    counts: bool

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SequenceShare:
        """Return the share of this rank."""
        index, counts = 0, True
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if name == TP:
                counts = mesh.get_local_rank(axis) == 0
            else:
                index = index * mesh.size(axis) + mesh.get_local_rank(axis)
        tp_size = mesh[TP].size() if TP in (mesh.mesh_dim_names or ()) else 1
        return cls(index, mesh.size() // tp_size, counts)
