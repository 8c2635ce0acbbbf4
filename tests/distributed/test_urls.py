"""Checkpoints behind URLs, where folders cannot be renamed. Each test names its rank count."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from quantshard import checkpoints
from quantshard.checkpoints import saving
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import commit, manifest
from quantshard.checkpoints.disk.ownership import Ownership
from quantshard.checkpoints.disk.store import locate
from quantshard.checkpoints.inspection import inspect_checkpoint as inspect, verify
from quantshard.checkpoints.manager import Manager
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.cli import app
from tests.distributed.models import Case
from tests.distributed.pool import run_ranks
from tests.distributed.saving import SHAPES, new_run, on_rank_0
from tests.distributed.shelf import SCHEME, Shelf
from tests.distributed.test_manager import message_of, restored
from tests.interop.layouts import models

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter
except ImportError:  # before PyTorch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

pytestmark = pytest.mark.distributed


def url_of(folder: Path, mode: str | None = None) -> str:
    return f"{SCHEME}{folder}/{mode}"


def beside(url: str, step: int, name: str) -> Path:
    return Path(f"{url.removeprefix(SCHEME)}/step-{step:06d}/{name}")


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


def run_of_four(case: Case, url: str, mode: str | None) -> list[Any]:
    """Retention; a damaged file; a marker that never came; a removal that was cut short; a run that was overtaken."""
    run, held, found = new_run(case, url), {}, []
    with Manager(url, keep_last=2, async_=mode) as manager:
        for step in range(1, 5):
            run.train(1)
            held[step] = run.held()
            manager.save(step, run.model, run.optimizer, {"step": step})
        manager.wait()
        found += [manager.steps(), manifest.problems(manager.path(4))]
        dist.barrier()
        on_rank_0(flip, beside(url, 4, "__1_0.distcp"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            back, state = restored(case, manager)
        found += [back.step, back.skipped, state == held[3], sum("__1_0.distcp is damaged" in str(w) for w in caught)]
        # as a run leaves it that is killed before the manifest
        on_rank_0(beside(url, 4, manifest.MANIFEST).write_bytes, b"")
        on_rank_0(beside(url, 2, "").mkdir)
        on_rank_0(beside(url, 2, "__0_0.distcp").touch)  # as one leaves it that is killed while it removes
        found.append(manager.latest())
        with Manager(url, keep_last=2, async_=mode) as after:
            after.save(4, run.model, run.optimizer, {"step": 4})
            after.wait()
            found += [after.steps(), restored(case, after)[1] == held[4], beside(url, 2, "").exists()]
            with mock.patch.object(commit, "clean", lambda *_: Ownership(*locate(url))):
                found.append(message_of(lambda: (after.save(5, run.model, run.optimizer), after.wait())))
            found.append(message_of(lambda: (manager.save(5, run.model, run.optimizer), manager.wait())))
    return found


@pytest.mark.parametrize("mode", [None, pytest.param("thread", marks=pytest.mark.exhaustive)])
def test_a_run_behind_a_url(mode: str | None, tmp_path: Path) -> None:
    """2 ranks: the manifest, written last, is what makes a checkpoint."""
    case, url = Case("block", (2,), shapes=SHAPES), url_of(tmp_path, mode)
    for rank, (*found, at_the_commit, overtaken) in enumerate(run_ranks(2, run_of_four, case, url, mode)):
        assert found == [[3, 4], [], 3, (4,), True, int(rank == 0), 3, [3, 4], True, False]
        assert f"{url} is in use by another run, process " in at_the_commit
        assert overtaken.startswith(f"{url} is in use by another run, process ")
    assert "no checkpoint" not in str(verify(f"{url}/step-000004")) and verify(f"{url}/step-000004").ok
    assert compare(f"{url}/step-000003", f"{url}/step-000004").differences
    assert inspect(f"{url}/step-000004").rows == inspect(beside(url, 4, "")).rows


def late(case: Case, url: str) -> list[Any]:
    """A run that was overtaken learns that its save failed when the next one has saved the same step."""
    run, finish, found = new_run(case, url), commit.CommitWriter.finish, []

    def overtaken(writer: commit.CommitWriter, **arguments: Any) -> None:
        with mock.patch.object(commit.CommitWriter, "finish", finish):
            Ownership(*locate(url))  # as the next run takes it, which saves the step here, too
            finish(writer, **arguments)

    with Manager(url, async_="thread") as manager:
        with mock.patch.object(commit.CommitWriter, "finish", overtaken):
            manager.save(1, run.model, run.optimizer)
            pending = manager._pending
            assert pending is not None
            pending.future.exception()
        dist.barrier()
        of_the_next = manifest.Manifest({}, 2, "", "", 1, None, None)
        on_rank_0(lambda: commit.commit(replace(pending.target, owner=None), of_the_next))
        found += [manager.steps(), message_of(manager.wait), manager.steps()]
    spoilt = Path("s3://bucket/step")
    try:
        checkpoints.save(spoilt, run.model, run.optimizer)
    except ConfigurationError as error:
        found.append(str(error))
    return found


def test_an_overtaken_run_leaves_the_next_ones_checkpoint(tmp_path: Path) -> None:
    """2 ranks: and a URL that pathlib has spoilt is refused by both."""
    url = url_of(tmp_path, "late")
    for before, said, after, spoilt in run_ranks(2, late, Case("block", (2,), shapes=SHAPES), url):
        assert before == after == [1] and "in use by another run" in said
        assert "is a URL that pathlib changed" in spoilt


def refused(case: Case, url: str, mode: str | None) -> list[str]:
    """The last rank's client raises its own errors."""
    run, found = new_run(case, url), []
    with Manager(url, async_=mode) as manager:
        manager.save(1, run.model, run.optimizer)
        manager.wait()
        dist.barrier()
        for failing in ("write", "read"):
            with mock.patch.object(Shelf, "fails_at", (failing,) if dist.get_rank() else ()):
                if failing == "write":
                    found.append(message_of(lambda: (manager.save(2, run.model, run.optimizer), manager.wait())))
                    found.append(message_of(lambda: checkpoints.save(f"{url}-b", run.model, run.optimizer)))
                else:
                    found.append(message_of(lambda: manager.restore(run.model, run.optimizer)))
                    found.append(message_of(lambda: checkpoints.load(manager.path(1), run.model)))
        dist.barrier()
        with mock.patch.object(Shelf, "fails_at", ("read", "write")):
            found.append(message_of(lambda: manager.restore(run.model)))
            found.append(message_of(lambda: manager.save(2, run.model, run.optimizer)))
            found.append(message_of(lambda: Manager(f"{url}-c")))
            found.append(message_of(lambda: checkpoints.is_complete(manager.path(1))))
        found.append(str(manager.steps()))
    return found


@pytest.mark.parametrize("mode", [None, "thread"])
def test_what_a_client_raises_is_one_line_on_every_rank(mode: str | None, tmp_path: Path) -> None:
    """3 ranks: on two of them, then on all."""
    url = url_of(tmp_path, mode)
    found, *others = run_ranks(3, refused, Case("mxfp8", (3,), shapes=((32, 32),)), url, mode)
    assert all(other == found for other in others)
    assert not any("\n" in line or "RequestId" in line for line in found)
    writing, reading = "403: you may not write", "403: you may not read"
    assert found[0].startswith(f"{url}/step-000002 could not be written: on rank 1: {writing}"), found[0]
    assert f"{url}/step-000002/__1_0" in found[0] and "other checkpoints are unchanged" in found[0], found[0]
    assert found[1].startswith(f"{url}-b could not be written: on rank 1: {writing}"), found[1]
    assert f"{url}/step-000001/manifest.json cannot be read ({reading})" in found[2]
    assert found[3].startswith(f"on rank 1: {url}/step-000001/manifest.json cannot be read ({reading})")
    assert f"{url} cannot be read ({reading})" in found[4]
    assert f"cannot be read ({reading})" in found[5] and writing in found[6]
    assert found[7] == f"{url}/step-000001 cannot be read ({reading})" and found[8] == "[1]"


# One process ----------------------------------------------------------------------------------------------------------


def in_memory(case: Case) -> list[Any]:
    run, url = new_run(case, "memory://run"), "memory://run"
    with Manager(url, keep_last=1) as manager:
        for step in (1, 2):
            run.train(1)
            manager.save(step, run.model, run.optimizer)
        found = [manager.steps(), restored(case, manager)[1] == run.held(), verify(manager.path(2)).ok]
    checkpoints.save("memory://one", run.model, run.optimizer, {"step": 2})
    other = new_run(replace(case, seed=9), url)
    found += [checkpoints.load("memory://one", other.model, other.optimizer), other.held() == run.held()]
    found.append(compare("memory://one", manager.path(2)).differences[0].key)
    found.append(message_of(lambda: checkpoints.save("memory://one", run.model, run.optimizer)))
    return [*found, message_of(lambda: checkpoints.load("memory://two", other.model))]


def test_in_memory() -> None:
    """1 rank."""
    *found, there, missing = run_ranks(1, in_memory, Case("nvfp4", (1,), shapes=SHAPES))[0]
    assert found == [[2], True, True, {"step": 2}, True, "extra.step"]
    assert there.startswith("memory://one holds a complete checkpoint")
    assert missing.startswith("memory://two is not a complete checkpoint")


def elsewhere(case: Case, url: str) -> list[str]:
    run, found = new_run(case, url), []
    with (
        Manager("memory://run") as manager,
        mock.patch.object(saving, "write_checkpoint"),
    ):  # as in the memory of another process
        found.append(message_of(lambda: manager.save(1, run.model, run.optimizer)))
    return [*found, message_of(lambda: Manager("nowhere://run"))]


def test_places_that_cannot_do(tmp_path: Path) -> None:
    """1 rank: the memory of another process, a protocol that is none; and what pathlib makes of a URL."""
    memory, unknown = run_ranks(1, elsewhere, Case("mxfp8", (1,), shapes=((32, 32),)), str(tmp_path))[0]
    assert memory.startswith("memory://run/step-000001 was saved, and is not seen here")
    assert unknown.startswith("nowhere://run cannot be reached by fsspec: Protocol not known")
    for call in (verify, inspect, lambda path: compare(path, path), checkpoints.is_complete):
        with pytest.raises(ConfigurationError, match="s3:/bucket/run is a URL"):
            call(Path("s3://bucket/run"))


def beside_stock(case: Case, url: str) -> list[Any]:
    """A checkpoint of plain DCP counts behind a URL too, and is not overwritten."""
    run = new_run(case, url)
    with Manager(url) as manager:
        writer = FsspecWriter(manager.path(1), sync_files=False)
        dcp.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, storage_writer=writer)
        found = [manager.steps(), checkpoints.is_complete(manager.path(1))]
        found.append(message_of(lambda: manager.save(1, run.model, run.optimizer)))
        manager.save(2, run.model, run.optimizer)
        return [*found, manager.steps()]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_stock_checkpoint_behind_a_url(tmp_path: Path) -> None:
    """1 rank."""
    case = Case("mxfp8", (1,), shapes=((32, 32),))
    steps, complete, refused, after = run_ranks(1, beside_stock, case, url_of(tmp_path))[0]
    assert (steps, complete, after) == ([1], True, [1, 2])
    assert "step-000001 holds a complete checkpoint; save to another" in refused


LOCAL = {
    "the folder of a run": ["resume", "s3://bucket/run"],
    "an export": ["export", "memory://one", "--layout", "plain", "--out", "s3://bucket/served"],
    "safetensors files": ["import", "s3://bucket/served", "--recipe", "mxfp8", "--out", "there"],
}


@pytest.mark.parametrize("what", LOCAL)
def test_what_must_be_local_is_refused_by_name(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app(), LOCAL[what])
    assert isinstance(told.exception, ConfigurationError) and f"{what} cannot be behind a URL" in str(told.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_commands_take_urls(tmp_path: Path) -> None:
    def said(*command: str) -> str:
        told = CliRunner().invoke(app(), command, catch_exceptions=False, env={"COLUMNS": "10000"})
        assert told.exit_code == 0, told.output
        return told.output

    url = f"{SCHEME}{models.save(tmp_path / 'run', 'mxfp8')[1]}"
    assert said("verify", url).startswith(f"whole: {url}")
    assert "model.layers.{0-1}." in said("inspect", url) and said("diff", url, url).startswith("equal")
    out, back = str(tmp_path / "out"), f"{SCHEME}{tmp_path}/back"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(models.CONFIG))
    assert "14 weights exact" in said("export", url, "--layout", "sglang-mxfp8", "--out", out, "--config", str(config))
    assert f"wrote {back}" in said("import", out, "--recipe", "mxfp8", "--out", back)
    assert said("verify", back).startswith("whole")
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        said("import", out, "--recipe", "mxfp8", "--out", back)
