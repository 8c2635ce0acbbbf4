"""The mesh of a run: how its processes are arranged, as `--mesh dp_replicate=1,dp_shard=2,tp=2` says it.

    dp_replicate   copies of the model (HSDP)
    dp_shard       parts that each copy is sharded into (FSDP2)
    ep             parts that the experts are divided into (expert parallelism); all else is sharded over it too
    tp             processes that compute together on the same sequences (tensor parallelism)

Axes that are not named are of one process. They always stand in this order, so that the processes of one
tensor-parallel group have neighbouring ranks, and share a machine where they can.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quantshard.argument_kinds import meant
from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.settings.schema import shown_value

EP, TP = "ep", "tp"
"""The axes of expert and of tensor parallelism."""

_DIGITS = 6
"""The most digits of a number of processes along an axis."""


@dataclass(frozen=True)
class MeshSpec:
    """The axes of a mesh and the number of processes along each."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """The axes of a text such as "dp_shard=2,tp=2", in any order.

        Raises:
            ConfigurationError: an axis is unknown, is named twice, or has no process; or the text is of another form.
        """
        known, sizes = [field.name for field in fields(cls)], dict[str, int]()
        for entry in text.split(","):
            name, _, size = (part.strip() for part in entry.partition("="))
            if name and name not in known:
                raise ConfigurationError(
                    f"mesh = {shown_value(text)}: there is no axis {shown_value(name)}; {meant(name, known)}"
                    f"use {', '.join(known)}"
                )
            if not name or not (size.isascii() and size.isdigit()):
                raise ConfigurationError(
                    f"mesh = {shown_value(text)}: {shown_value(entry.strip())} does not give an axis its number of "
                    "processes; write it as in dp_shard=2,tp=2"
                )
            if name in sizes:
                raise ConfigurationError(f"mesh = {shown_value(text)}: the axis {name} is named twice; name it once")
            if len(size) > _DIGITS or int(size) < 1:
                raise ConfigurationError(
                    f"mesh = {shown_value(text)}: {name} = {size:.20} must be 1 or more, and of at most "
                    f"{_DIGITS} digits"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.present.items())

    @property
    def present(self) -> dict[str, int]:
        """The axes that the mesh of torch has: those of more than one process, and dp_shard."""
        return {name: size for name, size in asdict(self).items() if size > 1 or name == "dp_shard"}

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.data_parallel * self.tp

    @property
    def data_parallel(self) -> int:
        """Into how many parts the sequences of a step are divided."""
        return self.dp_replicate * self.dp_shard * self.ep

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of torch over all processes. A collective call."""
        return init_device_mesh(device_type, tuple(self.present.values()), mesh_dim_names=tuple(self.present))


class MeshParts(NamedTuple):
    """What a mesh is used for: `fully_shard` takes `data`, and of experts `experts`; the axes of expert and of tensor
    parallelism, where it has them."""

    data: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh | None
    tp: DeviceMesh | None


def split(mesh: DeviceMesh) -> MeshParts:
    """The parts of a mesh that has names. A collective call, where it has the axis ep."""
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
    """Which part of the sequences a process computes with: part `index` of `count`.

    `counts`: whether figures of this part are to be counted here; the processes of one tensor-parallel group have the
    same figures, and the first of them counts.
    """

    index: int
    count: int
    counts: bool

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SequenceShare:
        """The share of this process."""
        index, counts = 0, True
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if name == TP:
                counts = mesh.get_local_rank(axis) == 0
            else:
                index = index * mesh.size(axis) + mesh.get_local_rank(axis)
        cut = mesh[TP].size() if TP in (mesh.mesh_dim_names or ()) else 1
        return cls(index, mesh.size() // cut, counts)
