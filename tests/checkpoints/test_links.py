"""Links in the place of checkpoints: neither written through, nor removed with what they lead to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quantshard.checkpoints import Manager, save
from quantshard.checkpoints.disk import commit
from quantshard.checkpoints.inspection import verify
from quantshard.checkpoints.manager import remove
from quantshard.errors import CheckpointError
from tests.checkpoints.small import built


def refusing(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied", "there")


@pytest.mark.parametrize("leads_to", ["nowhere", "an empty folder"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_link_is_not_written_through(tmp_path: Path, leads_to: str, slash: str) -> None:
    (tmp_path / "an empty folder").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / leads_to)
    with pytest.raises(CheckpointError, match=rf"c{slash} is a symbolic link"):
        save(f"{tmp_path}/c{slash}", *built("mxfp8"))
    assert sorted(os.listdir(tmp_path)) == ["an empty folder", "c"] and not os.listdir(tmp_path / "an empty folder")


def test_what_a_removed_link_leads_to_stays(tmp_path: Path) -> None:
    model, optimizer = built("mxfp8")
    save(tmp_path / "elsewhere", model, optimizer)
    with Manager(tmp_path / "run", keep_last=1) as manager:
        Path(manager.path(1)).symlink_to(tmp_path / "elsewhere")
        manager.save(2, model, optimizer)
        assert manager.steps() == [2] and not os.path.lexists(manager.path(1))
        Path(manager.path(3)).symlink_to(tmp_path / "elsewhere")
        manager.restore(model, optimizer, step=2)
        manager.save(3, model, optimizer)
        assert not Path(manager.path(3)).is_symlink() and verify(manager.path(3)).ok
    assert verify(tmp_path / "elsewhere").ok


@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_a_link_that_cannot_be_removed(tmp_path: Path, call: str) -> None:
    model, optimizer = built("mxfp8")
    save(tmp_path / "elsewhere", model, optimizer)
    (tmp_path / "c").symlink_to(tmp_path / "elsewhere")
    with (
        mock.patch.object(os, call, refusing),
        pytest.raises(CheckpointError, match=r"c could not be removed: Permission denied: there"),
    ):
        remove(tmp_path / "c")
    with Manager(tmp_path / "run", keep_last=1) as manager:
        Path(manager.path(1)).symlink_to(tmp_path / "elsewhere")
        with (
            mock.patch.object(commit.LocalStore, "remove", refusing),
            pytest.warns(match="step-000001 could not be rem"),
        ):
            manager.save(2, model, optimizer)
    assert verify(tmp_path / "elsewhere").ok


def test_a_folder_that_cannot_be_looked_at(tmp_path: Path) -> None:
    model, optimizer = built("mxfp8")
    with Manager(tmp_path / "run") as manager:
        says = "could not be written: Permission denied: there; other checkpoints are unchanged"
        with mock.patch.object(os, "listdir", refusing), pytest.raises(CheckpointError, match=f"step-000001 {says}"):
            manager.save(1, model, optimizer)
        (tmp_path / "c").mkdir()
        with mock.patch.object(os, "listdir", refusing), pytest.raises(CheckpointError, match=f"c {says}"):
            save(tmp_path / "c", model, optimizer)
