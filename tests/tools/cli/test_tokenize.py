"""Token shards: the same tokens of every kind of source, whatever the parts; gone on with after a kill; bad input."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.data import texts, tokenization
from quantshard.tools.trainer.data.finding import INDEX, JOURNAL, JSONL, find
from quantshard.tools.trainer.data.shards import read_index
from quantshard.tools.trainer.data.texts import TextOptions
from quantshard.tools.trainer.data.tokenization import ShardedSource
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
    (folder / "hub" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: data/train-*}\n"
        "  - {split: test, path: data/test-*}\n---\n# Of the test\n"
    )
    return folder


def sharded(path, folder, shard_bytes=500, tokenizer="tokenizer", **options):
    place = str(folder / tokenizer) if tokenizer else ""
    [source] = find([str(path)])
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
        index = sharded(folder / name, folder, size).write(out, 1)
        assert stored(out) == expected(folder) and index.documents == len(DOCUMENTS)
        assert (len(index.shards) > 5) == (size == 300 and not name.endswith(("gz", "zst")))
        assert index == read_index(out) and index.dtype == "uint16" and index.vocabulary == 400
        assert sorted(path.name for path in (out / "tokenizer").iterdir()) == [
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert not (out / JOURNAL).exists()


def test_datasets_have_the_same_tokens(datasets, tmp_path):
    for name in ("saved", "splits", "hub"):
        sharded(datasets / name, datasets).write(tmp_path / name, 1)
        assert stored(tmp_path / name) == expected(datasets), name
    sharded(datasets / "hub", datasets, split="test").write(tmp_path / "test", 1)
    assert stored(tmp_path / "test") == expected(datasets, DOCUMENTS[:5])
    for name, says in (
        ("splits", r"no split 'dev', only 'train', 'test'"), ("hub", r"no split 'dev'"),
        ("saved", r"saved as one split, without names, so there is no 'dev' in it; leave --data-split out"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=says):
            sharded(datasets / name, datasets, split="dev").write(tmp_path / "none", 1)
    with pytest.raises(ConfigurationError, match=r"saved has no column 'body', only 'text', 'id'"):
        sharded(datasets / "saved", datasets, field="body").write(tmp_path / "none", 1)
    state = datasets / "saved" / "state.json"
    state.write_text(
        state.read_text().replace("data-00000-of-00003.arrow", "../splits/train/data-00000-of-00001.arrow")
    )
    with pytest.raises(ConfigurationError, match=r"state\.json: '\.\./splits.*' is not the name of a file beside it"):
        sharded(datasets / "saved", datasets).write(tmp_path / "none", 1)


def test_bytes_and_larger_vocabularies(folder, tmp_path, monkeypatch):
    sharded(folder / "a.jsonl", folder, tokenizer="").write(tmp_path / "bytes", 1)
    assert stored(tmp_path / "bytes") == [token for text in DOCUMENTS for token in [*text.encode(), 256]]
    monkeypatch.setattr(tokenization, "token_dtype", lambda vocabulary: "uint32")
    sharded(folder / "a.jsonl", folder).write(tmp_path / "wide", 1)
    assert stored(tmp_path / "wide") == expected(folder)


SPLITS = ["byte level", "prefix space", "Metaspace", "Metaspace, first", "T5", "Llama 2"]


def subword_tokenizer(folder, kind):
    """A tokenizer of the kind, trained on the documents."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "Metaspace, first" else "always")
    if kind == "T5":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    elif kind.startswith("Metaspace"):
        made.pre_tokenizer = spaces
    elif kind == "Llama 2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[sources.END, "<unk>"], show_progress=False)
    made.train_from_iterator([word + " " for text in sources.texts(200) for word in text.split(" ")], trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": sources.END}))


@pytest.mark.parametrize("kind", SPLITS)
def test_chunks_have_the_tokens_of_the_whole_text(tmp_path, monkeypatch, kind):
    """Wherever a text is cut: at a line, in a word, in white space, or in a run of letters without either."""
    subword_tokenizer(tmp_path / "tokenizer", kind)
    text = "\n".join(DOCUMENTS[:12]) + "\n\n    of  the \n" + "weight" * 60 + "\u4e2d" * 90 + "\n" + DOCUMENTS[0]
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    whole = expected(tmp_path, [text])
    monkeypatch.setattr("quantshard.tools.trainer.data.texts.OVERLAP", 200)
    for size in (1, 7, 100, 500, 10**6):
        monkeypatch.setattr("quantshard.tools.trainer.data.texts.CHUNK_CHARACTERS", size)
        index = sharded(tmp_path / "long.txt", tmp_path).write(tmp_path / str(size), 1)
        assert index.documents == 1 and stored(tmp_path / str(size)) == whole, size
    sharded(tmp_path / "long.txt", tmp_path, tokenizer="").write(tmp_path / "bytes", 1)
    assert stored(tmp_path / "bytes") == [*text.encode(), 256]


def test_a_byte_order_mark_is_not_text(folder, tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffa \ufeffb", encoding="utf-8")
    for tokenizer, tokens in (("tokenizer", expected(folder, ["a \ufeffb"])), ("", [*"a \ufeffb".encode(), 256])):
        sharded(tmp_path / "a.txt", folder, tokenizer=tokenizer).write(tmp_path / f"out{tokenizer}", 1)
        assert stored(tmp_path / f"out{tokenizer}") == tokens


def test_what_looks_special_is_text(folder, tmp_path):
    sources.jsonl(tmp_path / "a.jsonl", [f"a{sources.END}b"])
    sharded(tmp_path / "a.jsonl", folder).write(tmp_path / "out", 1)
    end = load_tokenizer(str(folder / "tokenizer")).end_of_document
    assert stored(tmp_path / "out").count(end) == 1 and stored(tmp_path / "out")[-1] == end


def test_half_characters_are_replaced_and_told(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": ""}\n\n{"text": "c"}')
    with pytest.warns(UserWarning, match=r"a\.jsonl: 1 texts have halves of surrogate pairs"):
        index = sharded(tmp_path / "a.jsonl", folder).write(tmp_path / "out", 1)
    assert index.documents == 2 and stored(tmp_path / "out") == expected(folder, ["a\ufffdb", "c"])


def test_it_goes_on_after_an_error(folder, tmp_path, monkeypatch, capsys):
    """Shards that are finished are not made anew; what was half written is gone or removed."""
    made, out = [], tmp_path / "out"
    whole = tokenization.make_shard

    def failing(job, number, told):
        if number == 4:
            raise KeyboardInterrupt
        made.append(number)
        return whole(job, number, told)

    monkeypatch.setattr(tokenization, "make_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        sharded(folder / "a.jsonl", folder).write(out, 1)
    assert made == [0, 1, 2, 3] and (out / JOURNAL).exists() and not (out / INDEX).exists()
    with pytest.raises(ConfigurationError, match="holds tokens that were not finished; give the same"):
        find([str(out)])
    with pytest.raises(ConfigurationError, match=r"out holds tokens of other data, of another tokenizer"):
        sharded(folder / "a.jsonl", folder, 400).write(out, 1)
    (out / ("." + "0" * 16 + ".new")).write_text("half")
    with open(out / JOURNAL, "a") as journal:
        journal.write('{"part": 5, "fi')
    (out / "00001.bin").write_bytes(b"short")
    monkeypatch.setattr(tokenization, "make_shard", lambda *a: made.append(a[1]) or whole(*a))
    made.clear()
    index = sharded(folder / "a.jsonl", folder).write(out, 1)
    assert made == [1, *range(4, len(index.shards))] and "has 3 shards already" in capsys.readouterr().out
    assert stored(out) == expected(folder) and not list(out.glob(".*.new"))
    made.clear()
    assert sharded(folder / "a.jsonl", folder).write(out, 1) == index and not made  # it is complete


def test_killed_in_the_middle_and_gone_on(folder, tmp_path):
    """The command in two processes, killed; they end with it, and the command makes what is missing."""
    sources.jsonl(tmp_path / "many.jsonl", sources.texts(2500))
    out = tmp_path / "out"
    arguments = ["tokenize", tmp_path / "many.jsonl", "--tokenizer", folder / "tokenizer", "--out", out]
    arguments = [*map(str, arguments), "--shard-size", "2kb"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "quantshard", *arguments, "--processes", "2"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 240
    while not (out / JOURNAL).exists() or len((out / JOURNAL).read_bytes().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=240)  # the others have its stderr, so they ended too
    assert b"Traceback" not in errors, errors
    done = len((out / JOURNAL).read_bytes().splitlines()) - 1
    assert not (out / INDEX).exists()
    code, said, err = told(*arguments, "--processes", "1")
    assert code == 0 and not err and any("shards already; going on" in line for line in said), (said, err)
    assert len(read_index(out).shards) > done
    assert stored(out) == expected(folder, sources.texts(2500))


# Bad input: one line, and nothing is written


def line(answer, says):
    code, out, err = answer
    assert code == 1 and not out and len(err) == 1 and err[0].startswith("quantshard: "), answer
    assert says in err[0], err[0]


BAD_LINES = {
    "[1]": "byte 12: the line is not a JSON object",
    "{": "byte 12: the line is not JSON",
    '{"body": "x"}': "byte 12: the object has no 'text', only 'body'; name the text with --text-field",
    '{"text": 3}': "byte 12: 'text' is 3, and must be a text",
    "\xff": "is not JSON",
    "[" * 100_000: "is not JSON",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=[text[:8] for text in BAD_LINES])
def test_bad_lines_are_named(folder, tmp_path, bad):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"a"}'[:11] + b"}" + b"\n"[:0] + b"\n" + bad.encode("latin-1"))
    line(told("tokenize", tmp_path / "a.jsonl", "--out", tmp_path / "out"), BAD_LINES[bad].replace("12", "13"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved", "hub"])
def test_a_row_without_text_is_named(folder, tmp_path, name):
    documents = [*DOCUMENTS[:9], None]
    if name == "a.jsonl":
        sources.jsonl(tmp_path / name, documents)
    elif name == "a.parquet":
        sources.parquet(tmp_path / name, documents)  # in the second row group
    else:
        found = pytest.importorskip("datasets")
        found.disable_progress_bars()
        if name == "saved":
            found.Dataset.from_dict({"text": documents}).save_to_disk(tmp_path / name)
        else:
            (tmp_path / "hub").mkdir()
            sources.parquet(tmp_path / "hub" / "train.parquet", documents)
            (tmp_path / "hub" / "README.md").write_text(
                "---\nconfigs:\n- config_name: default\n  data_files: train.parquet\n---\n"
            )
    answer = told("tokenize", tmp_path / name, "--out", tmp_path / "out")
    line(answer, f"{tmp_path / name}")
    assert re.search(r"(byte \d+|row 9): 'text' is null, and must be a text", answer[2][0]), answer[2][0]


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_a_small_file_does_not_unpack_to_much(tmp_path, end):
    pyarrow = pytest.importorskip("pyarrow")
    content, path = (b" " * 1023 + b"\n") * (17 << 10), tmp_path / f"x.jsonl.{end}"
    path.write_bytes(gzip.compress(content) if end == "gz" else pyarrow.compress(content, "zstd", asbytes=True))
    piece = texts.Piece(str(path), 0, 1, 1)
    with pytest.raises(ConfigurationError, match=r"unpacks to more than 16777216 bytes.*; unpack it first"):
        list(texts.chunks(JSONL, piece, texts.TextOptions()))


def test_a_long_line(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LINE_BYTES", 20)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text":"0"}\n{"text":"01234567890"}\n')
    with pytest.raises(ConfigurationError, match="the line at byte 13 has more than 20 bytes"):
        list(texts.chunks(JSONL, texts.Piece(str(path), 0, 100, 1), texts.TextOptions()))


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
    refused("name it with --end-of-document TOKEN; its special tokens are '<|end|>', '<|other|>'", "--tokenizer", bare)
    refused("--shard-size '0' is no size", "--shard-size", "0")
    refused("processes", "--processes", "100000")
    refused("data_format = 'jsonl': choose one of: auto, text", "--data-format", "jsonl")
    refused("text_field = ''", "--text-field", "")
    refused("no column 'body', only 'id', 'text'", "--text-field", "body", at=folder / "a.parquet")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text("{}")
    (tmp_path / "mixed" / "b.txt").write_text("x")
    refused("mixed holds JSON lines (a.jsonl) and text (b.txt); name the files of one kind", at=tmp_path / "mixed")
    refused("exists and holds other files", to=tmp_path / "mixed")
    refused("exists and is no folder", to=tmp_path / "mixed" / "a.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "no.jsonl.gz").write_bytes(b"no")
    for name, says in {"latin.txt": "is not UTF-8", "no.parquet": "cannot read", "no.jsonl.gz": "cannot read"}.items():
        to = tmp_path / f"of-{name}"
        line(told("tokenize", tmp_path / name, "--out", to, "--tokenizer", tokenizer), says)
        assert not (to / INDEX).exists()


def test_a_library_that_is_missing_is_named(folder, tmp_path, monkeypatch):
    for name, data in {"pyarrow.parquet": "a.parquet", "tokenizers": "a.jsonl"}.items():
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            answer = told("tokenize", folder / data, "--out", tmp_path / "out", "--tokenizer", folder / "tokenizer")
        line(answer, f"needs a missing package; run: pip install {name.split('.')[0]}")


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


# An index of anybody's

FIELDS = {
    "format": ["x", None],
    "version": [2, "1"],
    "dtype": ["int8", 3, []],
    "vocabulary": [0, -1, 1 << 40, "x", None],
    "end_of_document": [400, -1, None],
    "key": ["x", None],
    "tokenizer": ["x" * 64, 3],
    "shards": [[], {}, [3], None],
    "tokens": [1, None],
    "documents": [1 << 70],
    "shards.file": ["../00000.bin", "/etc/passwd", "00001.bin", "0.bin", 3],
    "shards.tokens": [-1, 10**6, 1 << 63, 1.5],
    "shards.sha256": ["0" * 64, "0"],
}


@pytest.fixture(scope="module")
def whole(folder):
    sharded(folder / "a.jsonl", folder, 10**6).write(folder / "whole", 1)
    return folder / "whole"


@pytest.mark.parametrize("field", FIELDS)
def test_an_index_is_not_believed(whole, tmp_path, field):
    content = {**read_index(whole).content(), "shards": [asdict(shard) for shard in read_index(whole).shards]}
    kept = (whole / INDEX).read_bytes()
    try:
        for value in FIELDS[field]:
            changed = json.loads(json.dumps(content))
            if field.startswith("shards."):
                changed["shards"][0][field.partition(".")[2]] = value
                if field == "shards.tokens":
                    changed["tokens"] = value
            else:
                changed[field] = value
            (whole / INDEX).write_text(json.dumps(changed))
            code, out, err = told("train", "--run", tmp_path / "r", "--data", whole, "--nproc-per-node", 1)
            assert code == 1 and not out and len(err) == 1 and "whole" in err[0], (value, err)
            assert not (tmp_path / "r").exists()
    finally:
        (whole / INDEX).write_bytes(kept)
