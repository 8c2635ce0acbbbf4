"""Whether one checkpoint is whole: files by its manifest, tensors by their metadata, weights by their formats."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from quantshard.argument_kinds import PATH, check_arguments, suggests_names
from quantshard.checkpoints.disk import manifest, transfer
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.inspect import contents
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.checkpoints.untrusted.pickles import NeedsCodeError
from quantshard.errors import CheckpointError


@dataclass(frozen=True)
class Verification:
    """What `verify` found. `checksums`: whether there is a manifest, by which the files were compared.

    `tensors`: quantized ones count as one each; `bytes`: those of the values. `notes`: what is not wrong, but will be
    missed: the caller's own entries that need code to be read, which a load leaves out.
    """

    path: str
    checksums: bool
    tensors: int
    quantized: int
    others: int
    bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems


@suggests_names
def verify(path: Path_) -> Verification:
    """Check one checkpoint. Not a collective call; reads every byte, and holds one chunk at a time.

    With a manifest: that each file is there, as long as it says and with its checksum, and no other. In any case: that
    the chunks of each tensor cover it exactly once and lie in the files; that each entry can be read and is what the
    metadata say; that each quantized weight has a known format, all of its components in the shapes that this has, and
    finite scales.

    Never raises for what is wrong with the checkpoint: it is listed in `problems`.
    """
    check_arguments("verify", PATH, path=path)
    problems = manifest.problems(path)
    try:
        checksums = manifest.read_manifest(path) is not None
    except CheckpointError:
        checksums = True  # and said among the problems
    try:
        reader = contents.opened(path)
        found = contents.groups(reader)
    except CheckpointError as error:
        told = problems if str(error) in problems else [*problems, str(error)]  # of a manifest, it is the same
        return Verification(str(path), checksums, 0, 0, 0, 0, tuple(told))
    sizes = [contents.group_bytes(reader, group) for group in found]
    transfer.expect(sum(sizes))
    for group, size in zip(found, sizes, strict=True):
        try:
            wrong = [*group.wrong, *contents.figures(reader, group).wrong]
        except CheckpointError as error:
            wrong = [*group.wrong, str(error)]
        transfer.moved(size)
        problems += [line if line.startswith(group.name) else f"{group.name}: {line}" for line in wrong]
    entries = reader.read_metadata().state_dict_metadata
    others = [key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]
    notes: list[str] = []
    for key in others:
        try:
            reader.object(key)
        except CheckpointError as error:
            missed = isinstance(error, NeedsCodeError) and key.startswith(f"{EXTRA}.")
            (notes if missed else problems).append(str(error))
    return Verification(
        str(path),
        checksums,
        tensors=len(found),
        quantized=sum(group.format is not None for group in found),
        others=len(others),
        bytes=sum(sizes),
        problems=tuple(problems),
        notes=tuple(notes),
    )
