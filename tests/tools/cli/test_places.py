"""Where a run's things are: its checkpoints, elsewhere or behind a URL, and its tokens, once it was moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import tomli_w

from quantshard.checkpoints.disk import store
from quantshard.errors import ConfigurationError
from quantshard.tools.cli import debug
from quantshard.tools.trainer.models.initialization import config_of_run, run_of
from quantshard.tools.trainer.run_dir import RunDir
from tests.tools.cli.hostile import content, made, told

URL = "s3://bucket/run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path)


def changed(run: Path, **settings: object) -> None:
    (run / "config.toml").write_text(tomli_w.dumps(content(run) | settings))


def elsewhere(run: Path) -> Path:
    """The place to which the checkpoints of a run are moved, as its settings then say, and a mark there."""
    place = run.parent / "place"
    (run / "checkpoints").rename(place)
    changed(run, checkpoints=str(place))
    (place / "of-run.json").write_text(json.dumps({"run": str(run)}))
    return place


@pytest.mark.parametrize("recipe", ["*=mxfp8", "layers.0=mxfp8", "layers.0=mxfp8,*=bf16"])
def test_debug_looks_at_recipes_by_patterns(run: Path, recipe: str) -> None:
    changed(run, recipe=recipe)
    assert debug.find(str(run)).settings.recipe == recipe


def test_debug_follows_the_place_of_checkpoints(run: Path) -> None:
    place = elsewhere(run)
    assert debug.find(str(run)).checkpoint == str(place / "step-000002")
    assert debug.find(str(place / "step-000002")).settings.hidden == 64
    (place / "of-run.json").unlink()
    with pytest.raises(ConfigurationError, match="is not known as this run's"):
        debug.find(str(run))
    assert debug.find(str(run), str(place)).checkpoint == str(place / "step-000002")


def test_debug_finds_the_tokens_of_a_run_that_was_moved(run: Path) -> None:
    tokens = run / "tokens"
    tokens.mkdir()
    (run.parent / "text").rename(tokens / "text")
    recorded = content(run)["corpus"]
    recorded["files"] = [each.replace(f"{run.parent}/text", f"{tokens}/text") for each in recorded["files"]]
    changed(run, corpus=recorded)
    moved = run.rename(run.parent / "moved")
    assert debug.batch_of(debug.find(str(moved)), (), 2).shape == (2, 4, 16)


def test_a_checkpoint_elsewhere_knows_its_run(run: Path) -> None:
    """A mark counts if the run that it names says so too."""
    checkpoint = str(run / "checkpoints" / "step-000002")
    assert run_of(checkpoint) is not None
    place = elsewhere(run)
    checkpoint = str(place / "step-000002")
    settings, config = run_of(checkpoint), config_of_run(checkpoint)
    assert settings is not None and settings.layers == 1 and config is not None and config["hidden_size"] == 64
    changed(run, checkpoints=str(run.parent / "other"))
    assert run_of(checkpoint) is None
    changed(run, checkpoints=str(place))
    for named in (3, "", "relative", str(run.parent / "nothing"), "s3://bucket/run", "/\0"):
        (place / "of-run.json").write_text(json.dumps({"run": named}))
        assert run_of(checkpoint) is None, named
    assert run_of(f"{URL}/step-000002") is None
    (place / "of-run.json").unlink()
    (place / "of-run.json").symlink_to(run / "config.toml")
    with pytest.raises(ConfigurationError, match=r"of-run.json: it is a link"):
        run_of(checkpoint)
    (place / "of-run.json").unlink()
    (place / "of-run.json").write_bytes(b" " * (1 << 17))
    with pytest.raises(ConfigurationError, match=r"it has 131072 bytes, and at most 65536"):
        run_of(checkpoint)


def test_a_new_run_leaves_an_unfinished_save_alone(run: Path, tmp_path: Path) -> None:
    """It may be another run's first."""
    place = tmp_path / "place"
    (place / "step-000003").mkdir(parents=True)
    new = RunDir(tmp_path / "new")
    settings = replace(RunDir(run).read_config()[0], checkpoints=str(place))
    with pytest.raises(ConfigurationError, match="place holds checkpoints of another run; name another --checkpoints"):
        new.create(settings, {}, {})
    assert new.incomplete_steps() == [3] and new.saved_steps() == [] and not new.path.exists()


def test_a_url_is_asked_only_if_the_user_names_it(run: Path) -> None:
    """By `status`, as by `debug`."""
    changed(run, checkpoints=URL)
    with mock.patch.object(store, "FsspecStore", side_effect=ZeroDivisionError) as asked:
        for command in ("status", "debug"):
            code, _, (line,) = told(command, run)
            assert code == 1 and line.endswith(f"at a URL; pass --checkpoints {URL}")
        assert not asked.called
        with pytest.raises(ZeroDivisionError):
            found = RunDir(run)
            found.look_in(URL)
            found.saved_steps()


def test_status_of_a_place_elsewhere(run: Path) -> None:
    changed(run, steps=2)
    assert told("status", run)[0] == 0
    place = elsewhere(run)
    assert told("status", run)[0] == 0
    (place / "of-run.json").write_text(json.dumps({"run": "/other"}))
    code, _, (line,) = told("status", run)
    assert code == 1 and "of-run.json there names /other" in line
    assert told("status", run, "--checkpoints", place)[0] == 0
    assert told("status", run, "--checkpoints", "")[0] == 75
