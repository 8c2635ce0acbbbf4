"""Token shards: the same tokens of every kind of source, whatever the parts; gone on with after a kill; bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.data import shards as shards_module, sources as sources_module
from quantshard.tools.trainer.data.shards import ShardedSource, read_index
from quantshard.tools.trainer.data.sources import INDEX, TextOptions, find
from quantshard.tools.trainer.data.tokenizer import load_tokenizer
from tests.tools.cli import sources
from tests.tools.cli.hostile import told

ROOT = Path(__file__).parents[3]
DOCUMENTS = sources.texts(60)


@pytest.fixture(autouse=True)
def one_line_each(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The documents as every kind of source, and a tokenizer."""
    at = tmp_path_factory.mktemp("sources")
    sources.tokenizer_folder(at / "tokenizer", eos_token=sources.END)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        sources.jsonl(at / name, DOCUMENTS)
    sources.parquet(at / "a.parquet", DOCUMENTS)
    (at / "texts").mkdir()
    for number, document in enumerate(DOCUMENTS):
        (at / "texts" / f"{number:03d}.txt").write_text(document, encoding="utf-8")
    return at


@pytest.fixture(scope="module")
def datasets(folder):
    """The documents as datasets: saved, with splits, and as a copy of a repository."""
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    whole = found.Dataset.from_dict({"text": DOCUMENTS, "id": list(range(len(DOCUMENTS)))})
    whole.save_to_disk(folder / "saved", num_shards=3)
    found.DatasetDict({"train": whole, "test": whole.select(range(3))}).save_to_disk(folder / "splits")
    (folder / "hub" / "data").mkdir(parents=True)
    sources.parquet(folder / "hub" / "data" / "train-0.parquet", DOCUMENTS)
    sources.parquet(folder / "hub" / "data" / "test-0.parquet", DOCUMENTS[:5])
    (folder / "hub" / "README.md").write_text("---\nconfigs: no file of this name is read\n---\n")
    return folder


def sharded(path, folder, shard_bytes=500, tokenizer="tokenizer", **options):
    place = str(folder / tokenizer) if tokenizer else ""
    [source] = find([str(path)], split=options.get("split", "train"))
    return ShardedSource(source, load_tokenizer(place), place, TextOptions(**options), shard_bytes)


def stored(out):
    index = read_index(out)
    dtype = {"uint16": "<u2", "uint32": "<u4"}[index.dtype]
    return np.concatenate([np.fromfile(out / shard.file, dtype) for shard in index.shards]).tolist()


def expected(folder, documents=DOCUMENTS):
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    return [token for text in documents for token in [*made.encode(text).ids, made.token_to_id(sources.END)]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "texts"])
def test_each_kind_has_the_same_tokens(folder, tmp_path, name):
    for size in (300, 10**6):
        out = tmp_path / str(size)
        index = sharded(folder / name, folder, size).write(out)
        assert stored(out) == expected(folder) and index.documents == len(DOCUMENTS)
        assert (len(index.shards) > 5) == (size == 300)
        assert index == read_index(out) and index.dtype == "uint16" and index.vocabulary == 400
        assert sorted(path.name for path in (out / "tokenizer").iterdir()) == [
            "tokenizer.json",
            "tokenizer_config.json",
        ]


def test_datasets_have_the_same_tokens(datasets, tmp_path, capsys):
    for name in ("saved", "splits", "hub"):
        sharded(datasets / name, datasets).write(tmp_path / name)
        assert stored(tmp_path / name) == expected(datasets), name
    assert "hub: reading the split train, 1 of 2 files" in capsys.readouterr().out
    sharded(datasets / "hub", datasets, split="test").write(tmp_path / "test")
    assert stored(tmp_path / "test") == expected(datasets, DOCUMENTS[:5])
    for name, says in (
        ("splits", r"no split 'dev', only 'train', 'test'"),
        ("hub", r"no split 'dev', only test, train"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            sharded(datasets / name, datasets, split="dev").write(tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"saved has no 'body', only 'text', 'id'"):
        sharded(datasets / "saved", datasets, field="body").write(tmp_path / "none")


def test_bytes_and_larger_vocabularies(folder, tmp_path, monkeypatch):
    sharded(folder / "a.jsonl", folder, tokenizer="").write(tmp_path / "bytes")
    assert stored(tmp_path / "bytes") == [token for text in DOCUMENTS for token in [*text.encode(), 256]]
    monkeypatch.setattr(shards_module, "token_dtype", lambda vocabulary: "uint32")
    sharded(folder / "a.jsonl", folder).write(tmp_path / "wide")
    assert stored(tmp_path / "wide") == expected(folder)


@pytest.mark.parametrize("size", [1, 100, 500])
def test_a_long_text_is_one_document_in_pieces(folder, tmp_path, monkeypatch, size):
    monkeypatch.setattr(sources_module, "_PIECE", size)
    text = "\n".join(DOCUMENTS[:12]) + "\n" + "weight" * 60 + "\u4e2d" * 90
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    assert sharded(tmp_path / "long.txt", folder, tokenizer="").write(tmp_path / "bytes").documents == 1
    assert stored(tmp_path / "bytes") == [*text.encode(), 256]
    sharded(tmp_path / "long.txt", folder).write(tmp_path / "out")
    [*tokens, end] = stored(tmp_path / "out")
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    assert end == tokenizer.end_of_document and tokenizer.decode(tokens) == text


def test_a_byte_order_mark_is_not_text(folder, tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffa \ufeffb", encoding="utf-8")
    for tokenizer, tokens in (("tokenizer", expected(folder, ["a \ufeffb"])), ("", [*"a \ufeffb".encode(), 256])):
        sharded(tmp_path / "a.txt", folder, tokenizer=tokenizer).write(tmp_path / f"out{tokenizer}")
        assert stored(tmp_path / f"out{tokenizer}") == tokens


def test_what_looks_special_is_text(folder, tmp_path):
    sources.jsonl(tmp_path / "a.jsonl", [f"a{sources.END}b"])
    sharded(tmp_path / "a.jsonl", folder).write(tmp_path / "out")
    end = load_tokenizer(str(folder / "tokenizer")).end_of_document
    assert stored(tmp_path / "out").count(end) == 1 and stored(tmp_path / "out")[-1] == end


def test_half_characters_are_replaced(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": ""}\n\n{"text": "c"}')
    index = sharded(tmp_path / "a.jsonl", folder).write(tmp_path / "out")
    assert index.documents == 2 and stored(tmp_path / "out") == expected(folder, ["a?b", "c"])


def test_it_goes_on_after_an_error(folder, tmp_path, monkeypatch, capsys):
    """Shards that are finished are not made anew, and what was half written is removed."""
    written, out = [], tmp_path / "out"
    write = ShardedSource._write_shard

    def failing(self, path, *arguments):
        if path.name == "00004.bin":
            raise KeyboardInterrupt
        return write(self, path, *arguments)

    monkeypatch.setattr(ShardedSource, "_write_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        sharded(folder / "a.jsonl", folder).write(out)
    with pytest.raises(ConfigurationError, match="holds tokens that were not finished; run the same"):
        read_index(out)
    with pytest.raises(ConfigurationError, match=r"out holds tokens of other data, tokenizer or options"):
        sharded(folder / "a.jsonl", folder, 400).write(out)
    (out / ("." + "0" * 16 + ".new")).write_text("half")
    monkeypatch.setattr(
        ShardedSource, "_write_shard", lambda self, path, *a: written.append(path) or write(self, path, *a)
    )
    index = sharded(folder / "a.jsonl", folder).write(out)
    assert len(written) == len(index.shards) - 4 and "has 4 shards already" in capsys.readouterr().out
    assert stored(out) == expected(folder) and not list(out.glob(".*.new"))
    written.clear()
    assert sharded(folder / "a.jsonl", folder).write(out) == index and not written


@pytest.mark.exhaustive
def test_killed_in_the_middle_and_gone_on(folder, tmp_path):
    sources.jsonl(tmp_path / "many.jsonl", sources.texts(2500))
    out = tmp_path / "out"
    arguments = ["tokenize", tmp_path / "many.jsonl", "--tokenizer", folder / "tokenizer", "--out", out]
    arguments = [*map(str, arguments), "--shard-size", "2kb"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "quantshard", *arguments], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (out / INDEX).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(240)
    done = len(read_index(out, unfinished=True).shards)
    code, said, err = told(*arguments)
    assert code == 0 and not err and any("shards already; going on" in line for line in said), (said, err)
    assert len(read_index(out).shards) > done
    assert stored(out) == expected(folder, sources.texts(2500))


# Bad input: one line, and nothing is written


def line(answer, says):
    code, out, err = answer
    assert code == 1 and not out and len(err) == 1 and err[0].startswith("quantshard: "), answer
    assert says in err[0], err[0]


BAD_LINES = {
    "[1]": "line 2 is not a JSON object",
    "{": "line 2 is not JSON",
    '{"body": "x"}': "line 2 has no 'text', only 'body'; see --text-field",
    '{"text": 3}': "line 2: 'text' is 3, and must be a text",
    "\xff": "is not JSON",
    "[" * 100_000: "is not JSON",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=[text[:8] for text in BAD_LINES])
def test_bad_lines_are_named(folder, tmp_path, bad):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"a"}\n' + bad.encode("latin-1"))
    line(told("tokenize", tmp_path / "a.jsonl", "--out", tmp_path / "out"), BAD_LINES[bad])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
def test_a_row_without_text_is_named(folder, tmp_path, name):
    documents = [*DOCUMENTS[:9], None]
    if name == "a.jsonl":
        sources.jsonl(tmp_path / name, documents)
    elif name == "a.parquet":
        sources.parquet(tmp_path / name, documents)  # in the second row group
    else:
        found = pytest.importorskip("datasets")
        found.disable_progress_bars()
        found.Dataset.from_dict({"text": documents}).save_to_disk(tmp_path / name)
    answer = told("tokenize", tmp_path / name, "--out", tmp_path / "out")
    line(answer, f"{tmp_path / name}")
    assert re.search(r"(line 10|row 9): 'text' is null, and must be a text", answer[2][0]), answer[2][0]


def test_a_long_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "LINE_BYTES", 20)
    (tmp_path / "x.jsonl").write_bytes(b'{"text":"0"}\n{"text":"01234567890"}\n')
    line(told("tokenize", tmp_path / "x.jsonl", "--out", tmp_path / "out"), "line 2 has more than 20 bytes")


def test_bad_options_are_refused(folder, tmp_path):
    data, out, tokenizer = folder / "a.jsonl", tmp_path / "out", folder / "tokenizer"

    def refused(says, *arguments, at=data, to=out):
        before = sorted(tmp_path.rglob("*"))
        line(told("tokenize", at, "--out", to, *arguments), says)
        assert sorted(tmp_path.rglob("*")) == before

    refused("there is no data file or folder", at=folder / "a.jsnl")
    refused("there is nothing at", "--tokenizer", tmp_path / "none")
    refused("is a folder without tokenizer.json", "--tokenizer", folder / "texts")
    refused("cannot be read as a tokenizer", "--tokenizer", data)
    refused("--end-of-document 'x' is about --tokenizer", "--end-of-document", "x")
    refused(
        "has no token '<|ent|>' to end documents with; did you mean '<|end|>'?",
        "--tokenizer", tokenizer, "--end-of-document", "<|ent|>",
    )  # fmt: skip
    bare = tokenizer / "tokenizer.json"
    refused("give --end-of-document TOKEN", "--tokenizer", bare)
    refused("--shard-size '0' is not a size", "--shard-size", "0")
    refused("data_format = 'jsonl': choose one of: auto, text", "--data-format", "jsonl")
    refused("text_field = ''", "--text-field", "")
    refused("has no 'body', only 'id', 'text'", "--text-field", "body", at=folder / "a.parquet")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text("{}")
    (tmp_path / "mixed" / "b.txt").write_text("x")
    refused("mixed holds JSON lines (a.jsonl) and text (b.txt); name the files of one kind", at=tmp_path / "mixed")
    refused("exists and holds other files", to=tmp_path / "mixed")
    refused("exists and holds other files", to=tmp_path / "mixed" / "a.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "no.jsonl.gz").write_bytes(b"no")
    for name, says in {
        "latin.txt": "no text in UTF-8",
        "no.parquet": "cannot read",
        "no.jsonl.gz": "cannot read",
    }.items():
        to = tmp_path / f"of-{name}"
        line(told("tokenize", tmp_path / name, "--out", to, "--tokenizer", tokenizer), says)
        assert not (to / INDEX).exists()


def test_a_library_that_is_missing_is_named(folder, tmp_path, monkeypatch):
    for name, data in {"datasets": "a.parquet", "tokenizers": "a.jsonl", "pyarrow": "a.jsonl.zst"}.items():
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            tokenizer = ["--tokenizer", folder / "tokenizer"] if name == "tokenizers" else []
            answer = told("tokenize", folder / data, "--out", tmp_path / "out", *tokenizer)
        line(answer, f"needs the package {name}; run: pip install 'quantshard[train]'")


def test_a_slow_tokenizer_is_read_by_transformers(folder, tmp_path):
    """Of a folder that has a vocabulary and merges alone."""
    pytest.importorskip("transformers")
    model = json.loads(sources.tokenizer_json())["model"]
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "slow" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": sources.END, "unk_token": sources.END}
    (tmp_path / "slow" / "tokenizer_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = load_tokenizer(str(tmp_path / "slow"))
    fast = load_tokenizer(str(folder / "tokenizer"))
    assert made.encode(DOCUMENTS) == fast.encode(DOCUMENTS) and made.end_of_document == fast.end_of_document
    config["tokenizer_class"], config["auto_map"] = "Mine", {"AutoTokenizer": ["evil.Mine", None]}
    (tmp_path / "slow" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "slow" / "evil.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigurationError, match="cannot be read as a tokenizer"):
        load_tokenizer(str(tmp_path / "slow"))


def test_tokens_come_back_as_text(folder):
    made = load_tokenizer(str(folder / "tokenizer"))
    [tokens] = made.encode([DOCUMENTS[0]])
    shown = made.decode([*tokens, made.end_of_document, *tokens, 10**6])
    assert shown == f"{DOCUMENTS[0]}\n<end of document>\n{DOCUMENTS[0]}"


FIELDS = {
    "format": ["x", None],
    "version": [1, "2"],
    "dtype": ["int8", 3, None],
    "vocabulary": [0, -1, 1 << 40, "x", None],
    "end_of_document": [400, -1, None],
    "key": ["x", None],
    "tokenizer": ["x" * 64, 3],
    "complete": [False, "yes"],
    "shards": [[], [3], None],
    "shards.file": ["../00000.bin", "/etc/passwd", "00001.bin", "0.bin", 3],
    "shards.tokens": [-1, 10**6, 1 << 63, 1.5],
    "shards.sha256": ["0" * 64, "0"],
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_index_is_not_believed(folder, tmp_path, field):
    whole = tmp_path / "whole"
    sharded(folder / "a.jsonl", folder, 10**6).write(whole)
    content = (whole / INDEX).read_text()
    for value in FIELDS[field]:
        changed = json.loads(content)
        if field.startswith("shards."):
            changed["shards"][0][field.partition(".")[2]] = value
        else:
            changed[field] = value
        (whole / INDEX).write_text(json.dumps(changed))
        code, out, err = told("train", "--run", tmp_path / "r", "--data", whole, "--nproc-per-node", 1)
        assert code == 1 and not out and len(err) == 1 and "whole" in err[0], (value, err)
        assert not (tmp_path / "r").exists()
