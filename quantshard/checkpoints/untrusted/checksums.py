"""Comparing the files of a checkpoint with its manifest before anything of them is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata

from quantshard.checkpoints.disk import agreement, manifest
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE, Manifest
from quantshard.checkpoints.disk.store import LocalStore, Path_, locate
from quantshard.checkpoints.untrusted.reader import DamagedError
from quantshard.errors import CheckpointError

_LATER = 10**9  # nanoseconds: clocks of hosts that share a file system differ


class NoManifestWarning(UserWarning):
    """A checkpoint without a manifest is loaded: whether its files are those of one save cannot be told."""


def check_files(path: Path_, described: Manifest | None, own: Collection[str]) -> None:
    """Compare the files that ranks are about to read with the manifest. A collective call.

    Each file is read by one of the ranks that will read it again, which then find it in memory if there is room.

    Args:
        described: the manifest; None if there is none.
        own: the files that this rank will read.

    Raises:
        DamagedError: naming the first file that is not as the manifest says; the same on every rank.
    """
    by_rank = agreement.gathered(None if described is None else set(own))
    if described is None and not any(by_rank):
        return
    if described is None or None in by_rank:
        raise CheckpointError(
            f"{path}: rank {by_rank.index(None)} finds no {MANIFEST} there and others do; load from a directory that "
            "all ranks share"
        )
    sizes = {name: entry.bytes for name, entry in described.files.items()}
    mine = shares([files for files in by_rank if files is not None], sizes)[agreement.rank()]
    agreement.alike(lambda: compare_files(path, described, mine))


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


def shares(wanted: Sequence[Collection[str]], sizes: Mapping[str, int]) -> list[list[str]]:
    """Which files each rank compares: every one that some rank wants, by one of those that do, about as many bytes on
    each."""
    found: list[list[str]] = [[] for _ in wanted]
    loads = [0] * len(wanted)
    for name in sorted({name for names in wanted for name in names}, key=lambda name: (-sizes.get(name, 0), name)):
        rank = min((rank for rank, names in enumerate(wanted) if name in names), key=lambda rank: (loads[rank], rank))
        found[rank].append(name)
        loads[rank] += sizes.get(name, 0)
    return found


def warn_of_none(path: Path_, metadata: Metadata, stacklevel: int) -> None:
    """Say that a checkpoint has no manifest, and what looks like files of another save. On rank 0."""
    if agreement.rank() == 0:
        hints = "".join(f"; {hint}" for hint in _of_another_save(path, metadata))
        warnings.warn(
            f"{path} has no {MANIFEST}, so nothing tells whether its files are all of one save, unchanged (a save into "
            f"a directory that holds one mixes them if it is killed){hints}; `quantshard verify {path}` looks at what "
            "can be told, and checkpoints.save and Manager write a manifest",
            NoManifestWarning,
            stacklevel=stacklevel + 1,
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
