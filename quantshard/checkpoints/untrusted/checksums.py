"""Comparing the files of a checkpoint with its manifest before anything of them is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping

from torch.distributed.checkpoint.metadata import Metadata

from quantshard.checkpoints.disk import agreement, manifest, transfer
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE, Manifest
from quantshard.checkpoints.disk.store import LocalStore, Path_, locate
from quantshard.checkpoints.untrusted.reader import DamagedError
from quantshard.errors import warn_user

_LATER = 10**9  # nanoseconds: clocks of hosts that share a file system differ


class NoManifestWarning(UserWarning):
    """A checkpoint without a manifest is loaded: whether its files are those of one save cannot be told."""


def check_share(path: Path_, described: Manifest, files: Collection[str]) -> None:
    """Compare this rank's share of some files, the same on all ranks, with the manifest.

    Raises:
        DamagedError: naming the first file of the share that is not as the manifest says.
    """
    sizes = {name: described.files[name].bytes if name in described.files else 0 for name in files}
    mine = share(sizes, agreement.rank(), agreement.rank_count())
    transfer.expect(sum(sizes[name] for name in mine))
    compare_files(path, described, mine)


def compare_files(path: Path_, described: Manifest, names: Iterable[str]) -> None:
    """Compare files with the manifest.

    Raises:
        DamagedError: naming the first that is not as it says.
    """
    for name in names:
        problem = f"its {METADATA_FILE} names the file {name}, and its {MANIFEST} does not"
        if name in described.files:
            found = manifest.wrong_file(path, name, described.files[name])
            if found is None:
                continue
            problem = found
        raise DamagedError(
            f"{path} is damaged or incomplete: {problem}; nothing was loaded. Restore its files or choose another "
            "checkpoint"
        )


def share(sizes: Mapping[str, int], rank: int, count: int) -> list[str]:
    """Which files one of so many ranks compares: each falls to one rank, about as many bytes to each.

    Ranks take them in the order of the ranks that wrote them. Where FSDP2 cuts, that is what a rank reads again when it
    loads, on as many ranks or on others; it finds it in memory then, if there is room.
    """
    total = max(1, sum(sizes.values()))
    found, before = [], 0
    for name in sorted(sizes, key=_by_writer):
        if min((2 * before + sizes[name]) * count // (2 * total), count - 1) == rank:  # where its middle lies
            found.append(name)
        before += sizes[name]
    return found


def _by_writer(name: str) -> tuple[list[int], str]:
    """The order of DCP's files, `__RANK_NUMBER.distcp`."""
    return [int(number) for number in re.findall("[0-9]+", name)], name


def warn_of_none(path: Path_, metadata: Metadata) -> None:
    """Say that a checkpoint has no manifest, and what looks like files of another save. On rank 0."""
    if agreement.rank() == 0:
        hints = "".join(f"; {hint}" for hint in _of_another_save(path, metadata))
        warn_user(
            f"{path} has no {MANIFEST}, so nothing tells whether its files are all of one save, unchanged (a save into "
            f"a directory that holds one mixes them if it is killed){hints}; `quantshard verify {path}` looks at what "
            "can be told, and checkpoints.save and Manager write a manifest",
            NoManifestWarning,
        )


def _of_another_save(path: Path_, metadata: Metadata) -> list[str]:
    """Files that the metadata do not name, or that were written after them, in words."""
    store, place = locate(path)
    if not isinstance(store, LocalStore):
        return []
    named = {info.relative_path for info in metadata.storage_data.values()}
    try:
        unnamed = sorted(name for name in store.names(place) if name.endswith(".distcp") and name not in named)
        written = os.stat(store.join(place, METADATA_FILE)).st_mtime_ns
        later = sorted(name for name in named if os.stat(store.join(place, name)).st_mtime_ns > written + _LATER)
    except OSError:
        return []
    found = [(unnamed, f"are not named in its {METADATA_FILE}"), (later, f"were written after its {METADATA_FILE}")]
    return [f"{len(names)} of its files (first: {names[0]}) {what}" for names, what in found if names]
