"""Verification of one checkpoint: files by the manifest, tensors by the metadata, weights by their formats."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from quantshard.checkpoints.disk import manifest, transfer
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.inspect import contents
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    `checksums`: whether files were compared with the checksums of a manifest. `tensors`: number of tensors; a quantized
    one counts once. `bytes`: size of their values. `problems`: defects, in words.
    """

    path: str
    checksums: bool
    tensors: int
    quantized: int
    others: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(path: Path_) -> Verification:
    """Check one checkpoint. Not a collective call. Every byte is read, one chunk at a time.

    With a manifest, the files must be those it names, with their lengths and checksums. In any case:

    - the chunks of each tensor must cover it exactly once and lie in the files;
    - each entry must be readable and match the metadata;
    - each quantized weight must have a known format, all of its components in the right shapes, and finite scales.

    Defects of the checkpoint never raise: they are listed in `problems`.
    """
    problems = manifest.problems(path)
    checksums = manifest.exists(path)
    try:
        reader = SafeReader(path)
        groups = contents.groups(reader)
    except CheckpointError as error:
        # the manifest's error can be raised again here
        all_problems = problems if str(error) in problems else [*problems, str(error)]
        return Verification(str(path), checksums, 0, 0, 0, 0, tuple(all_problems))
    sizes = [contents.group_bytes(reader, group) for group in groups]
    transfer.expect(sum(sizes))
    for group, size in zip(groups, sizes, strict=True):
        try:
            wrong = [*group.wrong, *contents.figures(reader, group).wrong]
        except CheckpointError as error:
            wrong = [*group.wrong, str(error)]
        transfer.moved(size)
        problems += [line if line.startswith(group.name) else f"{group.name}: {line}" for line in wrong]
    object_keys = [key for key, entry in reader.entries.items() if isinstance(entry, BytesStorageMetadata)]
    for key in object_keys:
        try:
            reader.value(key)
        except CheckpointError as error:
            problems.append(str(error))
    return Verification(
        str(path),
        checksums,
        tensors=len(groups),
        quantized=sum(group.format is not None for group in groups),
        others=len(object_keys),
        bytes=sum(sizes),
        problems=tuple(problems),
    )
