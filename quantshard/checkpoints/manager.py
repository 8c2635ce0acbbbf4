"""Manages the checkpoints of a run: saves, verifies, restores and removes them.

A directory holds `step-000050` after 50 steps, and so on; only one run writes to it at a time. Saves are atomic and can
run in the background. docs/checkpoints.md#checkpoints-of-a-run lists the guarantees and how they are kept.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from quantshard import private_torch
from quantshard.checkpoints import loading, rank_states, saving
from quantshard.checkpoints.disk import agreement, commit, manifest
from quantshard.checkpoints.disk.commit import CommitWriter, SaveTarget
from quantshard.checkpoints.disk.manifest import DamagedError
from quantshard.checkpoints.disk.ownership import Ownership
from quantshard.checkpoints.disk.store import LocalStore, Path_, locate, why
from quantshard.checkpoints.loading import LoadRequest
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.collectives.process_groups import world
from quantshard.errors import CheckpointError, ConfigurationError

_NAME = re.compile(r"step-(\d{6,})")
CLOSE_SECONDS = 60.0
"""How long `close` waits for a running save, which might never end because other ranks are gone."""
POLL_SECONDS, POLLS_AFTER_FAILURE = 10.0, 3
"""Time between polls of the other ranks during a save, and number of polls after a failure before giving up."""


@dataclass(frozen=True)
class Restored:
    """The result of `restore`.

    `step`: the step of the checkpoint. `extra`: the caller's entries. `left`: names in `state` whose objects kept their
    state. `skipped`: later steps with a damaged checkpoint. `requantized`: a description of the weights that were
    quantized again, or "".
    """

    step: int
    path: str
    extra: dict[str, Any]
    left: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    requantized: str = ""


@dataclass(frozen=True)
class SaveReport:
    """The cost of a save on this rank.

    `bytes`: size of this rank's tensors. `held_seconds`: time that training was blocked. `background_seconds`: time
    that the save then ran in the background; None while it runs.
    """

    step: int
    path: str
    bytes: int
    held_seconds: float
    background_seconds: float | None = 0.0


class Manager:
    """The checkpoints of one run in one directory.

    Constructing a Manager, `save`, `restore` and `wait` are collective calls.

    Args:
        directory: a path, or a URL that fsspec supports. It is created if it does not exist.
        keep_last: the number of newest checkpoints to keep; None for all. The last good checkpoint is never removed.
        keep_every: also keep the checkpoints of steps that are multiples of this number; 0 for none.
        async_: None to block training during a save; "thread" to save in the background, from a copy of the state in
            host memory (pinned if there is a GPU, and reused by the next save).
        state: objects with `state_dict` and `load_state_dict` and a state per rank, e.g. a data loader or a scheduler.
            RNG states (torch's on CPU and GPU, Python's, NumPy's) are saved with them.
        read_only: for a process that only lists and restores checkpoints, while another run writes.
    """

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
        if keep_last is not None and keep_last < 1:
            raise ConfigurationError(f"keep_last = {keep_last}: must be 1 or more, or None to keep all")
        if async_ not in (None, "thread"):
            raise ConfigurationError(f'async_ = {async_!r}: choose None or "thread"')
        self.directory, self.keep_last, self.keep_every, self.async_ = directory, keep_last, keep_every, async_
        self.state = rank_states.with_generators(state or {})
        self._store, self._folder = locate(directory)
        self._owner: Ownership | None = None
        self._pending: PendingSave | None = None
        self._failed: PendingSave | None = None  # a failed save that some rank was still writing
        self._closed = False
        self._left_behind: set[int] = set()  # steps after the restored one, which can be overwritten
        self._damaged: set[int] = set()  # steps that `restore` found damaged
        if not read_only:
            agreement.from_rank0(self._own)
        self._read_only = read_only
        self._group: Any = dist.new_group(backend="gloo") if async_ and world() is not None else None
        self._background = BackgroundSaver(self._group) if async_ else None

    def _own(self) -> None:
        try:
            self._owner = Ownership(self._store, self._folder)
            commit.clean(self._folder)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be made or locked: {agreement.reason(error)}") from error

    def path(self, step: int) -> str:
        """The path of a step's checkpoint, whether it exists or not."""
        return self._store.join(self._folder, f"step-{step:06d}")

    def steps(self) -> list[int]:
        """The sorted steps with a complete checkpoint that this process sees now. Not a collective call."""
        try:
            return [step for step in self._named() if commit.is_complete(self.path(step))]
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read ({why(error)})") from error

    def _named(self) -> list[int]:
        matches = (_NAME.fullmatch(name) for name in self._store.names(self._folder))
        return sorted(int(name[1]) for name in matches if name and name[0] == f"step-{int(name[1]):06d}")

    def latest(self) -> int | None:
        """The last step with a complete checkpoint that this process sees now. Not a collective call."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any] | None = None
    ) -> SaveReport:
        """Save a checkpoint of the current state. A collective call.

        A save that is still running is waited for first, so there are never two. With `async_`, the call returns before
        the write ends; if that write fails, the next `save` or `wait` raises. A step that is saved already is an error,
        unless `restore` went back to an earlier one.
        """
        start = time.perf_counter()
        agreement.run_on_all_ranks(lambda: self._check_save(step))
        self._failed = None
        self.wait()
        state = saving.checkpoint_state(model, optimizer, extra or {})
        state[rank_states.RANKS] = agreement.run_on_all_ranks(lambda: rank_states.rank_states(self.state))
        target = agreement.from_rank0(lambda: self._prepare(step))
        writer = CommitWriter(target, {**saving.facts_of(model, extra or {}), "step": step})
        report = SaveReport(step, target.path, _held_bytes(state), 0.0)
        if self._background is None:
            with commit.abandoned_if_it_fails(target):
                saving.write_checkpoint(state, writer)
            agreement.from_rank0(lambda: self._retire(step))
            return replace(report, held_seconds=time.perf_counter() - start)
        future = self._background.start(state, writer)
        now = time.perf_counter()
        report = replace(report, held_seconds=now - start, background_seconds=None)
        pending = self._pending = PendingSave(report, target, future, self._owner, now)
        future.add_done_callback(pending.end)
        return report

    def _check_save(self, step: object) -> None:
        if self._read_only or self._closed:
            raise ConfigurationError(f"this Manager of {self.directory} is read_only or closed; make another to save")
        if type(step) is not int or step < 0:
            raise ConfigurationError(f"Manager.save(step={step!r}): a step is an int, 0 or more; give int(step)")
        if self._failed is not None and not self._failed.future.done():
            # it shares memory and collectives with a new save
            raise CheckpointError(f"the failed save of {self._failed.report.path} is still running; save again later")

    def _prepare(self, step: int) -> SaveTarget:
        assert self._owner is not None
        self._owner.proof.check()
        try:
            commit.clean(self._folder)
            _remove_incomplete(self.path(earlier_step) for earlier_step in self._named() if earlier_step < step)
        except OSError as error:
            raise CheckpointError(commit.save_failure(self.path(step), error)) from error
        return commit.prepare_target(self.path(step), step in self._left_behind, self._owner.proof)

    def wait(self) -> SaveReport | None:
        """Wait for the background save, if any: return its report, or raise on all ranks. A collective call."""
        pending = self._pending
        if pending is None:
            return None
        failures = pending.failures()
        self._pending = None  # only now: if the wait is interrupted, `close` needs the running save
        if pending.running:
            self._failed = pending
        step = pending.report.step
        with commit.abandoned_if_it_fails(pending.target):
            agreement.raise_first(failures)
        agreement.from_rank0(lambda: self._retire(step))
        ended = pending.ended or time.perf_counter()  # the done-callback might not have run yet
        return replace(pending.report, background_seconds=ended - pending.began)

    def _retire(self, last: int) -> None:
        self._left_behind.discard(last)
        self._damaged.discard(last)
        if not commit.is_complete(self.path(last)):
            raise CheckpointError(f"{self.path(last)} was saved, and is not seen here; save where all processes see it")
        if self.keep_last is None or self._closed:
            return
        if problem := self._damage(last):
            raise CheckpointError(f"{problem}, though it was just saved; nothing older was removed")
        steps = [step for step in self.steps() if step <= last and step not in self._damaged]
        good_steps = [step for step in steps if step == last or self._damage(step) is None]
        for step in good_steps[: -self.keep_last]:
            if not self.keep_every or step % self.keep_every:
                try:
                    remove(self.path(step))
                except CheckpointError as error:
                    warnings.warn(str(error), stacklevel=4)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        requantize: bool = False,
        lossy: bool = False,
    ) -> Restored | None:
        """Verify and load the checkpoint of `step`, by default the last good one. A collective call.

        A damaged checkpoint is skipped with a warning that names the file, and the previous one is tried. A checkpoint
        without a manifest (from plain `dcp.save`) is loaded unverified. For `requantize` and `lossy` see
        `checkpoints.load`. Returns None if there is no complete checkpoint.
        """
        self.wait()
        steps = agreement.from_rank0(self.steps)
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.path(step)} is not a complete checkpoint; choose a step of {steps or 'none'}")
        problem_by_step: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            path = self.path(candidate)
            try:
                request = LoadRequest(path, model, optimizer, requantize, lossy, objects=self.state)
                extra, unloaded, requantized = loading.load_checkpoint(request)
                self._left_behind = {n for n in steps if n > candidate}
                return Restored(candidate, path, extra, unloaded, tuple(problem_by_step), requantized)
            except DamagedError as error:  # if a rank is gone, all_gather_object raises that instead
                problem = agreement.all_gather_object(str(error))[0]
            problem_by_step[candidate] = problem
            self._damaged.add(candidate)
            if step is None and agreement.rank() == 0:
                warnings.warn(f"the checkpoint of step {candidate} is skipped: {problem}", stacklevel=2)
        if not problem_by_step:
            return None
        problems = "; ".join(problem_by_step.values())
        if step is None:
            raise CheckpointError(f"{self.directory} has no checkpoint to go on from: {problems}")
        raise CheckpointError(f"{problems}; choose another step of {[n for n in steps if n != step] or 'none'}")

    def _damage(self, step: int) -> str | None:
        """The first problem of a checkpoint that shows without reading its data, or None."""
        path = self.path(step)
        try:
            saved_manifest = manifest.read_manifest(path)
            if saved_manifest is None:  # without a manifest, only the metadata can be checked
                SafeReader(path)
                return None
        except CheckpointError as error:
            return str(error)
        files = sorted(saved_manifest.files.items())
        problems = (manifest.wrong_file(path, name, entry, contents=False) for name, entry in files)
        return next((problem for problem in problems if problem is not None), None)

    def close(self) -> None:
        """Release the directory and the resources of background saves. Not a collective call.

        A running save is waited for, up to `CLOSE_SECONDS`; the directory stays locked until it ends. Call `wait`
        before to see its errors.
        """
        self._closed = True
        if self._background is not None:
            self._background.thread.shutdown(wait=False)
        running = self._pending or self._failed
        if running is not None and wait_for([running.future], CLOSE_SECONDS).not_done:
            if (owner := self._owner) is not None:
                running.future.add_done_callback(lambda _: owner.release())
            return
        if self._background is not None:
            self._background.copier.close()
        if self._owner is not None:
            self._owner.release()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # after an error the other ranks might not call `wait`
                self.wait()
        finally:
            self.close()


def _held_bytes(state: Any) -> int:
    if isinstance(state, Mapping | list | tuple):
        return sum(map(_held_bytes, state.values() if isinstance(state, Mapping) else state))
    return private_torch.local_tensor(state).nbytes if isinstance(state, Tensor) else 0


class BackgroundSaver:
    """Copies states to host memory, pinned with a GPU and reused by the next copy, and writes them in a thread."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.thread = group, ThreadPoolExecutor(1, "checkpoint")
        self.copier = private_torch.state_dict_stager(pin_memory=torch.cuda.is_available(), share_memory=False)

    def start(self, state: dict[str, Any], writer: CommitWriter) -> Future[Any]:
        """Copy the state, and start writing the copy. A collective call."""
        prefix = f"{writer.target.path} could not be copied to memory: "
        copy = agreement.run_on_all_ranks(lambda: self.copied(state), prefix)
        return self.thread.submit(saving.write_checkpoint, copy, writer, self.group)

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a complete copy; entries keep their types (a DTensor keeps its placements)."""
        copy: dict[str, Any] = self.copier.stage(state, non_blocking=torch.cuda.is_available())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy


@dataclass
class PendingSave:
    """A background save. Its future keeps its `owner` alive until the save ends, even if the Manager is gone."""

    report: SaveReport
    target: SaveTarget
    future: Future[Any]
    owner: Ownership | None
    began: float
    ended: float | None = None
    running: tuple[int, ...] = ()

    def end(self, _: object) -> None:
        self.ended, self.owner = time.perf_counter(), None

    def failures(self) -> list[agreement.Failure | None]:
        """Each rank's failure, or None, once all ranks have written or soon after one has failed. A collective call.

        Its own write is not enough: after another rank's failure it waits half an hour for the rest of its group.
        """
        polls_after_failure = 0
        while True:
            done = bool(wait_for([self.future], POLL_SECONDS).done)
            error = self.future.exception() if done else None
            reason = None if error is None else commit.save_failure(self.report.path, error)
            failure: agreement.Failure | None = None if reason is None else (CheckpointError, reason)
            ranks = agreement.all_gather_object((done, failure))
            errors = [rank_error for _, rank_error in ranks]
            polls_after_failure += any(errors)
            self.running = tuple(number for number, (rank_done, _) in enumerate(ranks) if not rank_done)
            if not self.running or polls_after_failure > POLLS_AFTER_FAILURE:
                return errors


def _remove_incomplete(paths: Iterable[str]) -> None:
    for path in paths:
        store, store_path = locate(path)
        if store.renames:
            return
        holds_others = not all(map(commit.CHECKPOINT_FILE.fullmatch, store.names(store_path)))
        if not holds_others and not commit.is_complete(path):
            with suppress(OSError):  # harmless if it stays
                commit.remove_folder(store, store_path)


def remove(path: Path_) -> None:
    """Remove a checkpoint atomically, or at least make it incomplete first; of a link only the link."""
    store, store_path = locate(path)
    try:
        if isinstance(store, LocalStore):
            moved_path = SaveTarget(store_path, secrets.token_hex(8)).hidden("old")
            os.rename(store_path.rstrip("/"), moved_path)
            store.remove(moved_path)
            return
        commit.remove_folder(store, store_path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {agreement.reason(error)}") from error
