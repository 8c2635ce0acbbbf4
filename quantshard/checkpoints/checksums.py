"""Compares the files of a checkpoint with its manifest before anything is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping

from quantshard.checkpoints.disk import agreement, manifest, transfer
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE, Manifest
from quantshard.checkpoints.disk.store import LocalStore, Path_, locate
from quantshard.checkpoints.metadata import DamagedError
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import warn_user

# Nanoseconds; clocks of hosts that share a file system differ.
_LATER = 10**9


class NoManifestWarning(UserWarning):
    """A checkpoint without a manifest is loaded, so its files cannot be verified to be of one save."""


def check_share(path: Path_, described: Manifest, files: Collection[str]) -> None:
    """Compare this rank's share of `files` (the same on all ranks) with the manifest.

    Raises:
        DamagedError: a file of the share differs from the manifest; the message names the first one.
    """
    sizes = {name: described.files[name].bytes if name in described.files else 0 for name in files}
    names = share(sizes, agreement.rank(), agreement.rank_count())
    transfer.expect(sum(sizes[name] for name in names))
    compare_files(path, described, names)


def compare_files(path: Path_, described: Manifest, names: Iterable[str]) -> None:
    """Compare files with the manifest.

    Raises:
        DamagedError: a file differs from the manifest; the message names the first one.
    """
    for name in names:
        problem = f"its {METADATA_FILE} names the file {name}, and its {MANIFEST} does not"
        if name in described.files:
            difference = manifest.wrong_file(path, name, described.files[name])
            if difference is None:
                continue
            problem = difference
        raise DamagedError(
            f"{path} is damaged or incomplete: {problem}; nothing was loaded. Restore its files or choose another "
            "checkpoint"
        )


def share(sizes: Mapping[str, int], rank: int, count: int) -> list[str]:
    """Files that one of `count` ranks compares: each file falls to one rank, and each rank gets about as many bytes.

    Files are assigned in the order of the ranks that wrote them. Under FSDP2, a rank then loads mostly the files that
    it compared, on the same or a different number of ranks, and finds them in the page cache.
    """
    total = max(1, sum(sizes.values()))
    names, offset = [], 0
    for name in sorted(sizes, key=_by_writer):
        # The middle of a file decides its rank.
        if min((2 * offset + sizes[name]) * count // (2 * total), count - 1) == rank:
            names.append(name)
        offset += sizes[name]
    return names


def _by_writer(name: str) -> tuple[list[int], str]:
    """Sort key for DCP's file names, `__RANK_NUMBER.distcp`."""
    return [int(number) for number in re.findall("[0-9]+", name)], name


def warn_of_none(reader: SafeReader) -> None:
    """Warn on rank 0 that a checkpoint has no manifest, and name files that look like another save's."""
    path = reader.path
    if agreement.rank() == 0:
        hints = "".join(f"; {hint}" for hint in _of_another_save(reader))
        warn_user(
            f"{path} has no {MANIFEST}, so nothing tells whether its files are all of one save, unchanged (a save into "
            f"a directory that holds one mixes them if it is killed){hints}; `quantshard verify {path}` looks at what "
            "can be told, and checkpoints.save and Manager write a manifest",
            NoManifestWarning,
        )


def _of_another_save(reader: SafeReader) -> list[str]:
    """Describe files that the metadata do not name, and files written after the metadata."""
    store, folder = locate(reader.path)
    if not isinstance(store, LocalStore):
        return []
    expected = {info.relative_path for info in reader.metadata.storage_data.values()}
    try:
        unnamed = sorted(name for name in store.names(folder) if name.endswith(".distcp") and name not in expected)
        metadata_time = os.stat(store.join(folder, METADATA_FILE)).st_mtime_ns
        later = sorted(
            name for name in expected if os.stat(store.join(folder, name)).st_mtime_ns > metadata_time + _LATER
        )
    except OSError:
        return []
    findings = [(unnamed, f"are not named in its {METADATA_FILE}"), (later, f"were written after its {METADATA_FILE}")]
    return [f"{len(names)} of its files (first: {names[0]}) {description}" for names, description in findings if names]
