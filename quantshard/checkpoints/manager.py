"""Managing a run's checkpoints: saved whole, in the background or not, verified, restored, and retired.

A directory holds `step-000050` after 50 steps, and so on; one run writes there at a time. What is guaranteed, and of
what it is made: docs/checkpoints.md.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful

from quantshard import private_torch
from quantshard.argument_kinds import MAPPING, PATH, WHOLE_NUMBER, check_arguments, suggests_names
from quantshard.checkpoints import loading, rank_state, saving
from quantshard.checkpoints.disk import agreement, commit, manifest
from quantshard.checkpoints.disk.commit import CommitWriter, SaveTarget
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.disk.ownership import Ownership, being_read, is_being_read
from quantshard.checkpoints.disk.store import Path_, locate, why
from quantshard.checkpoints.load_plan import LoadRequest
from quantshard.checkpoints.pending import PendingSave, SaveReport, wait_for_process
from quantshard.checkpoints.staging import CopiedStateStager, Stager
from quantshard.checkpoints.untrusted import extras
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.checkpoints.untrusted.reader import DamagedError
from quantshard.collectives.process_groups import world
from quantshard.errors import CheckpointError, ConfigurationError

_NAME = re.compile(r"step-(\d{6,})")
MODES = (None, "thread", "process")
CLOSE_SECONDS = 60.0
"""For how long the end of a run waits for the save that is under way: ranks that are gone may keep it from ending."""


@dataclass(frozen=True)
class Restored:
    """What `restore` loaded: the step, the caller's `extra` entries, and the names in `state` that were left alone.

    `skipped`: later steps whose checkpoint is damaged. `requantized`: which weights were quantized anew, in words.
    """

    step: int
    path: str
    extra: dict[str, Any]
    left: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    requantized: str = ""


class Manager:
    """The checkpoints of one run in one directory. Making one is a collective call; so are save, restore and wait.

    Args:
        directory: a path, or a URL that fsspec knows. It is made if it is not there.
        keep_last: how many of the newest checkpoints are kept; None for all. The last good one is never removed, nor
            one that is being read.
        keep_every: checkpoints of steps that this divides are kept as well; 0 for none.
        async_: None to save while training waits; "thread" or "process" to save beside it, from a copy of the state in
            memory (pinned where there is a GPU, and kept for the next save).
        state: objects with `state_dict` and `load_state_dict` that each rank saves its own of: the order of the data, a
            schedule. Random generators (torch's on CPU and GPU, Python's, NumPy's) are saved with them.
        read_only: for a process that only looks and restores, beside the run that writes.

    Raises:
        CheckpointError: another run writes there, or the directory cannot be made; the same on every rank.
        ConfigurationError: an argument does not fit.
    """

    _by_process: ClassVar[WeakSet[Future[Any]]] = WeakSet()
    """Saves by the process that all Managers share, which takes one at a time: torch would mix up the answers."""
    _given_up: ClassVar[list[Manager]] = []
    """Those whose last save failed and still ran on some rank, the same on every rank. The save reads their memory, so
    they are kept until all ranks have agreed that it has ended."""

    @suggests_names
    def __init__(
        self,
        directory: Path_,
        *,
        keep_last: int | None = None,
        keep_every: int = 0,
        async_: str | None = None,
        state: Mapping[str, Stateful] | None = None,
        read_only: bool = False,
    ) -> None:
        check_arguments("Manager", PATH, directory=directory)
        check_arguments("Manager", WHOLE_NUMBER.or_none, keep_last=keep_last)
        check_arguments("Manager", WHOLE_NUMBER, keep_every=keep_every)
        check_arguments("Manager", MAPPING.or_none, state=state)
        if keep_last is not None and keep_last < 1:
            raise ConfigurationError(f"keep_last = {keep_last}: must be 1 or more, or None to keep all")
        if keep_every < 0:
            raise ConfigurationError(f"keep_every = {keep_every}: must be 0 or more, 0 for none")
        if async_ not in MODES:
            raise ConfigurationError(f'async_ = {async_!r}: choose one of: None, "thread", "process"')
        if async_ == "process" and world() is None:
            raise ConfigurationError('async_ = "process" needs a process group; take "thread" in a single process')
        self.directory, self.keep_last, self.keep_every, self.async_ = directory, keep_last, keep_every, async_
        self.state = rank_state.with_generators(state or {})
        self._store, self._folder = locate(directory)
        self._owner: Ownership | None = None
        self._pending: PendingSave | None = None
        self._failed: PendingSave | None = None  # why this is among those given up
        self._closed = False
        self._left_behind: set[int] = set()  # later steps than the restored one, which are saved anew
        self._damaged: set[int] = set()  # of the checksums that `restore` has compared
        if not read_only:
            agreement.alike(self._check_given_up)
            self._forget_given_up()
            agreement.from_rank0(self._own)
        self._read_only = read_only
        self._group: Any = dist.new_group(backend="gloo") if async_ and world() is not None else None
        self._stager = Stager(shared=async_ == "process") if async_ else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if async_ == "thread" else None

    def _own(self) -> None:
        try:
            self._owner = Ownership(self._store, self._folder)
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be made or locked: {agreement.words(error)}; see that this "
                "process may write there"
            ) from error

    # Looking ---------------------------------------------------------------------------------------------------------

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._store.join(self._folder, f"step-{step:06d}")

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending, as this process sees them now. Not a collective call.

        Raises:
            CheckpointError: the directory cannot be looked at.
        """
        try:
            return [step for step in self._named() if self._is_complete(step)]
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be looked at ({why(error)}); see that it can") from error

    def _named(self) -> list[int]:
        found = (_NAME.fullmatch(name) for name in self._store.names(self._folder))
        return sorted(int(name[1]) for name in found if name and name[0] == f"step-{int(name[1]):06d}")

    def _is_complete(self, step: int) -> bool:
        mark = commit.METADATA_FILE if self._store.renames else MANIFEST
        return self._store.is_file(self._store.join(self.path(step), mark))

    def latest(self) -> int | None:
        """The last step with a complete checkpoint, as this process sees it now. Not a collective call."""
        return max(self.steps(), default=None)

    # Saving ----------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any] | None = None
    ) -> SaveReport:
        """Save a checkpoint of the state as it is now. A collective call.

        A save that still runs is waited for first: there are never two. In the background, this one goes on after the
        call; that it failed is raised by the next `save` or `wait`.

        Raises:
            CheckpointError: the step is saved already (unless the run went back behind it by `restore`), or cannot be
                written; or a save that failed has not ended on every rank. The same on every rank, and what was saved
                before is as it was.
            ConfigurationError, RankMismatchError: the step is not an int of 0 or more, `extra` or what `state` names is
                no plain data, `extra` is not equal on all ranks, or the Manager is read_only or closed; raised by this
                call in any mode, on every rank.
        """
        began = time.perf_counter()
        agreement.alike(lambda: self._check_save(step))
        self._forget_given_up()
        self.wait()
        if self.async_ == "process":
            wait_for_process(Manager._by_process)
        state = saving.checkpoint_state(model, optimizer, extra)
        state[rank_state.RANKS] = agreement.alike(lambda: rank_state.entries(self.state))
        target = agreement.from_rank0(lambda: self._prepare(step))
        writer = CommitWriter(target, {**saving.facts_of(model, extra or {}), "step": step})
        report = SaveReport(step, target.path, _held_bytes(state), 0.0)
        if self.async_ is None:
            with commit.abandoned_if_it_fails(target):
                saving.write_checkpoint(state, writer)
            agreement.from_rank0(lambda: self._retire(step))
            return replace(report, held_seconds=time.perf_counter() - began)
        future = self._start(state, writer)
        now = time.perf_counter()
        report = replace(report, held_seconds=now - began, background_seconds=None)
        pending = self._pending = PendingSave(report, target, future, self._owner, now)
        future.add_done_callback(pending.end)
        return report

    def _check_save(self, step: object) -> None:
        if self._read_only:
            raise ConfigurationError(f"this Manager of {self.directory} is read_only, so it cannot save")
        if self._closed:
            raise ConfigurationError(f"this Manager of {self.directory} is closed, so it cannot save; make another")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigurationError(f"Manager.save(step={step!r}): a step is an int, 0 or more; give int(step)")
        self._check_given_up()

    def _in_the_way(self) -> list[Manager]:
        """Those given up that share this one's directory, or the process that saves."""
        return [
            other
            for other in Manager._given_up
            if other._folder == self._folder or self.async_ == other.async_ == "process"
        ]

    def _check_given_up(self) -> None:
        """A new save would meet one that still runs: in its collective calls, its memory, or its files."""
        for failed in (other._failed for other in self._in_the_way()):
            if failed is not None and not failed.future.done():
                raise CheckpointError(
                    f"the save of {failed.report.path} failed and has not ended on this rank, which may wait for "
                    "others until the timeout of its process group; save again when it has, or end the run and start "
                    "it from the last checkpoint"
                )

    def _forget_given_up(self) -> None:
        """Once all ranks have agreed that their saves have ended."""
        for other in self._in_the_way():
            Manager._given_up.remove(other)
            other._failed = None
            if other._closed:
                other._let_go()

    def _prepare(self, step: int) -> SaveTarget:
        assert self._owner is not None
        self._owner.proof.check()
        try:
            commit.clean(self._folder)
            commit.clean_remnants(self.path(other) for other in self._named() if other < step)
        except OSError as error:
            raise CheckpointError(commit.said_of(self.path(step), error)) from error
        replaced = step in self._left_behind or (not self._store.renames and not self._is_complete(step))
        return replace(commit.prepare_target(self.path(step), replaced), owner=self._owner.proof)

    def _start(self, state: dict[str, Any], writer: CommitWriter) -> Future[Any]:
        """Copy the state, and begin to write the copy."""
        assert self._stager is not None
        stager = self._stager
        copy = agreement.alike(lambda: stager.stage(state), f"{writer.target.path} could not be copied to memory: ")
        if self._thread is not None:
            return self._thread.submit(saving.write_checkpoint, copy, writer, self._group)
        future = dcp.async_save(
            copy,
            storage_writer=writer,
            planner=extras.ExtraSavePlanner(),
            async_stager=CopiedStateStager(),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert isinstance(future, Future)
        Manager._by_process.add(future)
        return future

    def wait(self) -> SaveReport | None:
        """Wait for the save in the background, if there is one, and say what it cost. A collective call.

        Raises:
            CheckpointError: it failed on some rank; the same on every rank.
        """
        pending = self._pending
        if pending is None:
            return None
        failures = pending.failures()
        self._pending = None  # only now: whoever interrupts the waiting closes what is still being written
        if pending.running:
            self._failed = pending
            Manager._given_up.append(self)
        step = pending.report.step
        with commit.abandoned_if_it_fails(pending.target):
            agreement.raise_first(failures)
        agreement.from_rank0(lambda: self._retire(step))
        ended = pending.ended or time.perf_counter()  # it is done just now, and is yet to say so
        return replace(pending.report, background_seconds=ended - pending.began)

    def _retire(self, last: int) -> None:
        """Remove the checkpoints that need not be kept, unless this is closed. Later than the last do not count."""
        self._left_behind.discard(last)
        self._damaged.discard(last)
        if not self._is_complete(last):
            raise CheckpointError(
                f"{self.path(last)} was saved and is not to be seen from the process that trains; save to a place that "
                "all processes share, which the memory of one is not"
            )
        if self.keep_last is None or self._closed:
            return
        if wrong := self._problems(last, contents=False):
            raise CheckpointError(f"{wrong[0]}, though it was just saved; nothing older was removed")
        good = [
            step
            for step in self.steps()
            if step <= last and step not in self._damaged and (step == last or self._has_all_files(step))
        ]
        kept = {*good[-self.keep_last :], *(step for step in good if self.keep_every and step % self.keep_every == 0)}
        for step in good:
            if step not in kept and not is_being_read(self._store, self._store.join(self.path(step), MANIFEST)):
                try:
                    commit.remove(self.path(step))
                except CheckpointError as error:
                    warnings.warn(str(error), stacklevel=4)

    def _has_all_files(self, step: int) -> bool:
        return not self._problems(step, contents=False)

    # Restoring -------------------------------------------------------------------------------------------------------

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        requantize: bool = False,
        lossy: bool = False,
    ) -> Restored | None:
        """Load the last good checkpoint, or that of a step, after its checksums are verified. A collective call.

        All ranks load the same one. Each verifies a part of its files; a damaged checkpoint is skipped with a warning
        that names the file, and the one before is taken. One without a manifest, of plain `dcp.save`, is loaded as is.
        `requantize` and `lossy` are those of `checkpoints.load`.

        Returns:
            None if the directory holds no complete checkpoint, and no step was asked for.

        Raises:
            CheckpointError: the step's checkpoint, or every one, is missing or damaged, or it is of another model,
                recipe or optimizer; the same on every rank.
        """
        self.wait()
        steps = agreement.from_rank0(self.steps)
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.path(step)} is not a complete checkpoint; there are those of {steps or 'none'}"
            )
        wrong: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            with being_read(self._store, self._store.join(self.path(candidate), MANIFEST)):
                problem = self._verify(candidate)
                if problem is None:
                    try:
                        path = self.path(candidate)
                        request = LoadRequest(path, model, optimizer, requantize, lossy, False, self.state)
                        loaded = loading.load_checkpoint(request)
                        self._left_behind = {other for other in steps if other > candidate}
                        return Restored(candidate, path, skipped=tuple(wrong), **vars(loaded))
                    except DamagedError as error:  # or a rank is gone, which asking all of them shows
                        problem = agreement.gathered(str(error))[0]
            wrong[candidate] = problem
            self._damaged.add(candidate)
            if step is None and agreement.rank() == 0:
                warnings.warn(f"the checkpoint of step {candidate} is skipped: {problem}", stacklevel=2)
        if not wrong:
            return None
        raise CheckpointError(
            f"{self.directory} has no checkpoint to go on from: {'; '.join(wrong.values())}"
            if step is None
            else f"{wrong[step]}; choose another step of {[other for other in steps if other != step] or 'none'}"
        )

    def _verify(self, step: int) -> str | None:
        """The first thing that is wrong with a checkpoint, on any rank; each reads a part of the files."""
        _, found = agreement.exchanged(
            lambda: self._problems(step, contents=True), lambda problems: next(iter(problems), None)
        )
        return next((problem for problem in found if problem is not None), None)

    def _problems(self, step: int, contents: bool) -> list[str]:
        """What is wrong with this rank's part of a checkpoint's files; without `contents`, with the length of any."""
        path = self.path(step)
        part = slice(agreement.rank(), None, agreement.rank_count()) if contents else slice(None)
        try:
            described = manifest.read_manifest(path)
            if described is None:  # nothing else is known of it
                read_metadata(path)
                return []
        except CheckpointError as error:
            return [str(error)]
        entries = sorted(described.files.items())[part]
        checked = (manifest.wrong_file(path, name, entry, contents) for name, entry in entries)
        return [problem for problem in checked if problem is not None]

    # The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the directory, and of what saving in the background takes. Not a collective call.

        A save that is under way is waited for first, but no longer than `CLOSE_SECONDS`. Then it goes on alone, and the
        directory stays this run's until it is done. `wait` says how it ended, and removes nothing any more. So does one
        that failed and still ran on some rank, which a warning tells: what another rank does nobody can tell alone, so
        the directory then stays this run's until its processes end, or make a Manager of it when all is done.
        """
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        running = self._pending or self._failed
        if running is not None:
            running.future.add_done_callback(lambda _: self._release())
            ended = not wait_for([running.future], CLOSE_SECONDS).not_done
            if self._failed is not None and not (ended and self._may_release()):
                warnings.warn(
                    f"the save of {running.report.path} failed and had not ended on ranks {list(running.running)}; it "
                    f"is left alone, and {self.directory} stays this run's until it, or this process, has ended",
                    stacklevel=2,
                )
            if not ended:
                return
        self._let_go()

    def _let_go(self) -> None:
        if self._stager is not None:
            self._stager.close()
        if self.async_ == "process" and not wait_for(Manager._by_process, 0).not_done:
            private_torch.end_checkpoint_process()
        self._release()

    def _may_release(self) -> bool:
        """Whether no other rank may still write, as far as this one knows."""
        return self._failed is None or set(self._failed.running) <= {agreement.rank()}

    def _release(self) -> None:
        if self._owner is not None and self._may_release():
            self._owner.release()

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last save together; alone, as `close` does, if an error ends the run: others may not come."""
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()


def _held_bytes(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(_held_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_held_bytes(value) for value in state)
    return private_torch.local_tensor(state).nbytes if isinstance(state, Tensor) else 0
