"""The manifest of a checkpoint: read back as written, and each kind of damage is found and named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash

from quantshard import checkpoints
from quantshard.checkpoints.disk import commit, manifest
from quantshard.checkpoints.disk.manifest import MANIFEST, DamagedError, FileEntry, Manifest
from quantshard.checkpoints.disk.store import FsspecStore, locate
from quantshard.errors import CheckpointError
from tests.checkpoints.small import built

CONTENT = {".metadata": b"meta", "__0_0.distcp": bytes(range(256)) * 40, "__1_0.distcp": b""}


def written(folder: Path) -> Path:
    """A directory with the files of CONTENT and their manifest."""
    files = {}
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
        files[name] = FileEntry(*manifest.digest_of(folder / name))
    made = Manifest(files, 2, "2.13.0", "2026-01-02T03:04:05+00:00", 50, {"dp_shard": 2}, "mxfp8")
    (folder / MANIFEST).write_text(made.to_json(), encoding="utf-8")
    return folder


def test_a_manifest_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    size = (written(tmp_path) / MANIFEST).stat().st_size
    monkeypatch.setattr(manifest, "MANIFEST_BYTES", size)
    assert manifest.read_manifest(tmp_path)
    monkeypatch.setattr(manifest, "MANIFEST_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=f"{size - 1}"):
        manifest.read_manifest(tmp_path)


def test_a_digest_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "_AT_ONCE", 7)
    (tmp_path / "file").write_bytes(CONTENT["__0_0.distcp"])
    assert manifest.digest_of(tmp_path / "file") == (10240, xxhash.xxh3_128_hexdigest(CONTENT["__0_0.distcp"]))


def test_what_was_written_is_read(tmp_path: Path):
    found = manifest.read_manifest(written(tmp_path))
    assert found is not None
    assert (found.step, found.mesh, found.recipe, found.world_size) == (50, {"dp_shard": 2}, "mxfp8", 2)
    assert Manifest.from_json(found.to_json()) == found
    assert manifest.problems(tmp_path) == []


def test_a_checkpoint_without_one_has_no_problems(tmp_path: Path):
    assert manifest.read_manifest(tmp_path) is None
    assert manifest.problems(tmp_path) == []


def damage(folder: Path, how: str) -> None:
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    if how == "bit":
        content[100] ^= 1
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[:-1])
    elif how == "gone":
        file.unlink()
    elif how == "folder":
        file.unlink()
        file.mkdir()
    elif how == "more":
        (folder / "more").write_bytes(b"x")
    elif how == "swapped":
        (folder / ".metadata").rename(folder / "other")
        file.rename(folder / ".metadata")
        (folder / "other").rename(file)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("bit", ["__0_0.distcp is damaged: its checksum is"]),
        ("cut", ["__0_0.distcp has 10239 bytes, and manifest.json says 10240"]),
        ("gone", ["__0_0.distcp is missing"]),
        ("folder", ["__0_0.distcp cannot be read (Is a directory)"]),
        ("more", ["more is not named in manifest.json"]),
        ("swapped", [".metadata has 10240 bytes", "__0_0.distcp has 4 bytes"]),
    ],
)
def test_damage_is_one_line_each(tmp_path: Path, how: str, words: list[str]):
    damage(written(tmp_path), how)
    found = manifest.problems(tmp_path)
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True)), found


def altered(**fields) -> str:
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    whole = {"quantshard": 1, "files": {"a": entry}, "world_size": 1, "torch": "2", "saved_at": "now"}
    return json.dumps({k: v for k, v in (whole | fields).items() if v != "leave out"})


def test_fields_that_are_unknown_or_null_are_read():
    assert Manifest.from_json(altered(later=1, step=None)).step is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty: the save has not ended"),
        ("{" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ("[]", "it is not a JSON object"),
        (altered(quantshard=2), "has version 2, not 1"),
        (altered(world_size="leave out"), "world_size is None"),
        (altered(step=True), "step is True"),
        (altered(mesh={"dp": "2"}), "mesh"),
        (altered(files=[]), "files is"),
        (altered(files={"a": 1}), "the entry of 'a' has no length"),
        (altered(files={"a": {"bytes": -1}}), "the entry of 'a' has no length"),
        (altered(files={"a": {"bytes": 1, "xxh3_128": "0"}}), "the entry of 'a' has no checksum"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        manifest.read_manifest(tmp_path)
    found = manifest.problems(tmp_path)
    assert len(found) == 1 and words in found[0]


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/../b", "/etc/passwd", "a/b", "a\\b", "C:a", "a\0", MANIFEST]
)
def test_names_outside_the_checkpoint_are_refused(name: str):
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    with pytest.raises(CheckpointError, match="not inside the checkpoint"):
        Manifest.from_json(altered(files={name: entry}))


def test_a_load_reads_the_metadata_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compares what it read with the manifest, whether or not other files are."""
    model, optimizer = built("mxfp8")
    checkpoints.save(tmp_path / "c", model, optimizer)
    opened: list[str] = []
    really = os.open

    def counted(path: str, *args: int) -> int:
        opened.append(os.path.basename(path))
        return really(path, *args)

    monkeypatch.setattr(os, "open", counted)
    checkpoints.load(tmp_path / "c", model, optimizer)
    assert opened.count(".metadata") == 1
    content = bytearray((tmp_path / "c" / ".metadata").read_bytes())
    content[-2] ^= 1
    (tmp_path / "c" / ".metadata").write_bytes(content)
    for verify in (True, False):
        with pytest.raises(DamagedError, match=r"it is not the file that manifest.json describes"):
            checkpoints.load(tmp_path / "c", model, optimizer, verify=verify)


def test_a_file_that_is_cut_or_gone_is_named(tmp_path: Path) -> None:
    """And with both lengths: that of the manifest, or else the least that its pieces need."""
    path = tmp_path / "c"
    checkpoints.save(path, *built("mxfp8"))
    file = path / "__0_0.distcp"
    length, model = file.stat().st_size, built("mxfp8")[0]
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp has 1000 bytes, and manifest.json says {length}"):
        checkpoints.load(path, model)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"{path}: its file __0_0\.distcp is cut short: 1000 bytes of [0-9]+"):
        checkpoints.load(path, model)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{path}: its file __0_0\.distcp is missing; restore its files"):
        checkpoints.load(path, model)


def test_a_kill_while_an_unfinished_checkpoint_is_removed_leaves_it_incomplete(monkeypatch):
    """A store deletes files in any order: without its manifest alone, the rest would pass for one of plain DCP."""
    url = "memory://removed/step-1"
    checkpoints.save(url, *built("mxfp8"))
    store, folder = locate(url)
    store.write(store.join(folder, MANIFEST), b"")
    assert not checkpoints.is_complete(url)

    def rm(store, path):
        store.fs.rm_file(store.join(path, MANIFEST))
        raise KeyboardInterrupt

    monkeypatch.setattr(FsspecStore, "remove", rm)
    with pytest.raises(KeyboardInterrupt):
        commit.prepare_target(url)
    assert not checkpoints.is_complete(url)
