"""Flags of `train` that say what is learned from: what is refused, in one line, before a folder is made."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer import worker
from quantshard.tools.trainer.data import from_table
from quantshard.tools.trainer.data.corpus import Preparation
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings, from_mapping
from tests.tools.cli import sources
from tests.tools.cli.hostile import SMALL, Started, told


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("0123456789" * 100)
    (tmp_path / "short").write_text("01234")
    sources.jsonl(tmp_path / "a.jsonl", sources.texts(20))
    sources.tokenizer_folder(tmp_path / "tokenizer", eos_token=sources.END)
    np.arange(1000, dtype="<u2").tofile(tmp_path / "raw.bin")
    return tmp_path


REFUSED = {
    "--data raw.bin": "raw.bin holds tokens; name their tokenizer with",
    "--data raw.bin --vocabulary 999": "raw.bin has the token 999, but vocabulary = 999",
    "--data raw.bin --data text --vocabulary 1000": "raw.bin holds tokens, and other data are texts; name the",
    "--data raw.bin --tokenizer tokenizer": "raw.bin has the token 999, but vocabulary = 400 (read as uint16)",
    "--data raw.bin --vocabulary 1000 --sample-tokens 3": "--sample-tokens needs the tokenizer of the data",
    "--data text --vocabulary 100": "vocabulary = 100, but the tokenizer has 257",
    "--data text --vocabulary 99999999": "vocabulary = 99999999: must be 0 or more, and at most 16,777,216",
    "--data text --data-weights 1,2": "data_weights = '1,2': give a number above 0 for each of the 1 --data",
    "--data text --data a.jsonl --data-weights 1,x": "data_weights = '1,x': give a number above 0",
    "--data text --data a.jsonl --data-weights 1,0": "give a number above 0 for each of the 2 --data",
    "--data text --data a.jsonl --data-weights 1,nan": "give a number above 0 for each of the 2 --data",
    "--data text --model moe-small --heads 2": "num_gqa_groups 4 must divide num_attention_heads 2",
    "--data text --model moe-small --heads 8 --kv-heads 5": "num_gqa_groups 5 must divide num_attention_heads 8",
    "--data-weights 1": "data_weights = '1': give a number above 0 for each of the 0 --data",
    "--data text --data text": "text is named twice; name it once, or",
    "--data text --heldout-data txet": "there is no data file or folder",
    "--data text --heldout-data short": "the held-out text has 6 tokens, too few for seq_length = 16",
    "--data a.jsonl --text-field body": "a.jsonl, line 1 has no 'body', only 'id', 'text'; see --text-field",
    "--data text --data-format jsonl": "data_format = 'jsonl': choose one of: auto, text",
    "--data text --tokenizer tokenzier": "/tokenzier; name a folder with tokenizer.json",
    "--data text --tokenizer text": "text cannot be read as a tokenizer",
    "--data text --end-of-document x": "--end-of-document 'x' is about --tokenizer; give both",
    "--data text --tokenizer tokenizer --end-of-document <x>": "the tokenizer has no token '<x>' to end documents with",
    "--data a.jsonl --tokenizer tokenizer --seq-length 9000": "too few for seq_length = 9000",
    "--data a.jsonl --token-cache text": "cannot write",
    "--data a.jsonl --data-split ''": "data_split = ''",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_line(folder, flags):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    arguments = [flag.replace("''", "") for flag in flags.split(" ")]
    code, _, err = told("train", "--run", "r", "--seq-length", 16, "--nproc-per-node", 1, *arguments)
    assert code == 1 and len(err) == 1 and err[0].startswith("quantshard: ") and REFUSED[flags] in err[0], err
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in folder.glob("r/*")} <= {"tokens"}  # what was made of texts stays for the next try


def test_rows_are_added_where_no_weights_say_how_many_there_are(folder):
    settings = TrainSettings(
        **(vars(SMALL) | {"data": (str(folder / "text"),), "tokenizer": str(folder / "tokenizer")})
    )
    sizes = [{}, {"init_from": "/a"}, {"vocabulary": 401}, {"model": "/a"}, {"tokenizer": ""}]
    assert [Preparation(replace(settings, **each)).settings.vocabulary for each in sizes] == [512, 400, 401, 400, 0]


def test_a_vocabulary_that_is_left_to_the_tokenizer_changes_no_run(folder):
    """That of a run from before rows were added stays."""
    data = {"data": (str(folder / "text"),), "tokenizer": str(folder / "tokenizer")}
    new, run = TrainSettings(**(vars(SMALL) | data)), RunDir(folder / "run")
    worker.create_run(run, new.resolved(), 1)
    config = folder / "run" / "config.toml"
    config.write_text(config.read_text().replace("vocabulary = 512", "vocabulary = 400"))
    assert "vocabulary" not in worker.changes(run, new.resolved(), ["vocabulary", "tokenizer", "data"], 1)
    with pytest.raises(ConfigurationError, match="was started with vocabulary = 400"):
        worker.changes(run, replace(new, vocabulary=512).resolved(), ["vocabulary"], 1)


def test_the_next_try_finds_the_tokens(folder):
    arguments = ["train", "--run", "r", "--nproc-per-node", 1, "--data", "a.jsonl", "--seq-length", 16]
    assert told(*arguments, "--heldout", "0.9999")[0] == 1
    [shards] = (folder / "r" / "tokens").iterdir()
    made = (shards / "00000.bin").stat().st_mtime_ns
    assert told(*arguments)[0] is Started and (shards / "00000.bin").stat().st_mtime_ns == made
    (folder / "other").mkdir()
    again = [*arguments[:2], "r2", *arguments[3:5], "--config", "r/config.toml", "--token-cache", "cache"]
    assert told(*again)[0] is Started and not (folder / "cache").exists()
    assert not (folder / "r2" / "tokens").exists()  # the configuration of r names its tokens


def test_every_file_as_a_text_with_a_tokenizer(folder):
    """What the tokens are made of is no text any more: of the run, and of one by its config.toml."""
    arguments = ["--nproc-per-node", 1, "--data", "a.jsonl", "--seq-length", 16, "--data-format", "text"]
    arguments += ["--tokenizer", "tokenizer"]
    assert told("train", "--run", "r", *arguments)[0] is Started
    settings, _, corpus = RunDir(folder / "r").read_config()
    assert settings.data_format == "auto" and corpus["files"][0].split(" ")[2].startswith("uint16+")
    assert from_table(corpus).tokens > 100
    (folder / "r" / "checkpoints" / "step-000002").mkdir(parents=True)
    (folder / "r" / "checkpoints" / "step-000002" / ".metadata").touch()
    assert told("train", "--run", "r", "--auto-resume", *arguments)[0] is Started
    assert told("resume", "r")[0] is Started
    assert told("train", "--run", "s", "--nproc-per-node", 1, "--config", "r/config.toml")[0] is Started


def test_what_is_recorded(folder):
    """The settings of a run read tokens; those of bytes are as they were."""
    told("train", "--run", "plain", "--nproc-per-node", 1, "--data", "text", "--seq-length", 16)
    settings, _, corpus = RunDir(folder / "plain").read_config()
    assert (settings.vocabulary, settings.tokenizer, settings.heldout) == (0, "", 0.02)
    assert corpus.keys() == {"sha256", "bytes", "files"}
    told("train", "--run", "cached", "--nproc-per-node", 1, "--data", "a.jsonl", "--seq-length", 16, 
         "--token-cache", "c",
         "--tokenizer", "tokenizer", "--vocabulary", 512)  # fmt: skip
    settings, _, corpus = RunDir(folder / "cached").read_config()
    assert settings.vocabulary == from_table(corpus).vocabulary == 512 and settings.end_of_document == sources.END
    assert settings.data[0].startswith(str(folder / "c" / "a.jsonl-")) and from_table(corpus).tokenizer
    assert from_mapping(asdict(settings), "it") and not (folder / "cached" / "tokens").exists()


def test_the_tokenizer_of_shards_is_the_one_that_counts(folder):
    told("tokenize", "a.jsonl", "--out", "shards", "--tokenizer", "tokenizer")
    arguments = ["train", "--run", "r", "--nproc-per-node", 1, "--seq-length", 16, "--data", "shards"]
    sources.tokenizer_folder(folder / "other", eos_token="<|other|>")
    code, _, err = told(*arguments, "--tokenizer", "other")
    assert code == 1 and "shards was tokenized otherwise than" in err[0]
    copied = folder / "shards" / "tokenizer" / "tokenizer.json"
    content = json.loads(copied.read_text())
    copied.write_text(json.dumps(content))
    code, _, err = told(*arguments)
    assert code == 1 and "is not the tokenizer of the data" in err[0], err
    assert told(*arguments, "--tokenizer", "tokenizer", "--data", "a.jsonl", "--sample-tokens", 3)[0] is Started
