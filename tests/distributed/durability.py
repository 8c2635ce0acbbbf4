"""What a save makes durable, and when: each fsync and rename of a process, in the order of the machine's clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from quantshard.checkpoints.disk.commit import CommitWriter, SaveTarget


@contextmanager
def recorded(log: Path) -> Iterator[None]:
    """Note every fsync, with the file's length then, and every rename in a file."""
    sync, rename = os.fsync, os.rename

    def note(what: str, path: str, **others: Any) -> None:
        with open(log, "a") as file:
            file.write(json.dumps({"at": time.monotonic_ns(), "what": what, "path": path, **others}) + "\n")

    def noting_sync(handle: int) -> None:
        sync(handle)
        note("sync", os.readlink(f"/proc/self/fd/{handle}"), bytes=os.fstat(handle).st_size)

    def noting_rename(old: Any, new: Any, **others: Any) -> None:
        rename(old, new, **others)
        note("rename", os.fspath(old), to=os.fspath(new))

    with mock.patch.object(os, "fsync", noting_sync), mock.patch.object(os, "rename", noting_rename):
        yield


class RecordingWriter(CommitWriter):
    """Brings the recording into the process that saves."""

    def __init__(self, target: SaveTarget, facts: Mapping[str, Any]) -> None:
        super().__init__(target, facts)
        self.log = Path(f"{os.path.dirname(target.path)}.{os.getpid()}.log")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.recording = recorded(self.log)
        self.recording.__enter__()


def not_durable(checkpoint: Path, logs: list[Path]) -> list[str]:
    """What of a checkpoint was not durable in time: its files and its folder before it got its name, the folder that it
    is in after that."""
    events = sorted((json.loads(line) for log in logs for line in log.read_text().splitlines()), key=lambda e: e["at"])
    renames = [event for event in events if event["what"] == "rename" and event["to"] == str(checkpoint)]
    if len(renames) != 1:
        return [f"{len(renames)} renames to {checkpoint}"]
    hidden, then = renames[0]["path"], renames[0]["at"]
    syncs = [event for event in events if event["what"] == "sync"]
    wrong = []
    for file in sorted(checkpoint.iterdir()):
        written_as = {f"{hidden}/{file.name}", f"{hidden}/{file.name}.tmp"}
        whole = {"bytes": file.stat().st_size}
        if not any(e["path"] in written_as and e["at"] < then and e["bytes"] == whole["bytes"] for e in syncs):
            wrong.append(f"{file.name} was not synced as it is before the rename")
    last = max((event["at"] for event in syncs if event["path"].startswith(f"{hidden}/")), default=0)
    if not any(event["path"] == hidden and last < event["at"] < then for event in syncs):
        wrong.append("the folder was not synced between its last file and the rename")
    if not any(event["path"] == str(checkpoint.parent) and event["at"] > then for event in syncs):
        wrong.append("the folder that it is in was not synced after the rename")
    return wrong
