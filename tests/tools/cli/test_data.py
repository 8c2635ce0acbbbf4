"""The corpus and its windows: what is read, in which order, and that a change of the data is seen."""

import gzip
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.trainer.data import (
    END_OF_DOCUMENT,
    BatchLoader,
    Corpus,
    Windows,
    collect,
    collect_recorded,
    from_table,
    windows as windows_module,
)
from quantshard.tools.trainer.data.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    for name, content in {"b/2.txt": b"defgh", "a.txt": b"abc", "b/1.txt": b"", "c": bytes(range(1, 101)) * 2}.items():
        (root / name).write_bytes(content)
    (root / ".hidden").write_text("no")
    return root


def stream(corpus):
    tokens = []
    for document in corpus.documents:
        tokens += [*document.path.read_bytes(), END_OF_DOCUMENT]
    return torch.tensor(tokens)


def test_documents_are_sorted_and_not_empty(folder):
    assert [d.path.relative_to(folder).as_posix() for d in collect([str(folder)]).documents] == [
        "a.txt",
        "b/2.txt",
        "c",
    ]
    given = [str(folder / "c"), str(folder / "a.txt")]
    assert [d.path.name for d in collect(given).documents] == ["c", "a.txt"]  # files keep the order given


def test_windows_are_slices_of_the_stream(folder):
    corpus = collect([str(folder)])
    windows = Windows(corpus, 9, 0.1)
    whole = stream(corpus)
    assert len(whole) == corpus.tokens == windows.tokens
    for start in range(len(whole) - 9):
        assert torch.equal(windows.sources[0].window(start, 10), whole[start : start + 10]), start


def test_heldout_is_apart(folder, monkeypatch):
    corpus = collect([str(folder)])
    windows = Windows(corpus, 9, 0.2)
    [source] = windows.sources
    assert source.boundary == corpus.tokens - round(corpus.tokens * 0.2)
    seen: list[int] = []

    def window(start, width):
        seen.append(start)
        return torch.zeros(width, dtype=torch.int64)

    monkeypatch.setattr(source, "window", window)
    for step in range(200):
        windows.batch(0, step, 0, 8)
    assert max(seen) == source.boundary - 10 and min(seen) == 0  # the last window ends at the boundary
    seen.clear()
    windows.heldout(4)
    assert seen[0] == source.boundary and seen[-1] == corpus.tokens - 10 and len(seen) == 4
    assert len(Windows(corpus, 9, 0.0).heldout(4)) == 0


def test_order_is_of_seed_and_step_not_of_processes(folder):
    windows = Windows(collect([str(folder)]), 9, 0.1)
    for step in (1, 2, 1000):
        on_one = windows.batch(7, step, 0, 12)
        for ranks in (2, 3, 4):
            share = 12 // ranks
            assert torch.equal(
                torch.cat([windows.batch(7, step, rank * share, share) for rank in range(ranks)]), on_one
            )
        assert not torch.equal(on_one, windows.batch(8, step, 0, 12))
        assert not torch.equal(on_one, windows.batch(7, step + 1, 0, 12))


def test_table_says_all(folder):
    corpus = collect([str(folder)])
    table = corpus.table()
    assert table["bytes"] == 208 and from_table(table) == corpus
    assert collect_recorded([str(folder)], corpus) == corpus


def test_same_bytes_elsewhere_are_the_same(folder):
    corpus = collect([str(folder)])
    folder.rename(folder.with_name("moved"))
    moved = collect_recorded([str(folder.with_name("moved"))], corpus)
    assert moved.sha256 == corpus.sha256 and moved.documents[0].path == folder.with_name("moved") / "a.txt"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "b/2.txt").write_bytes(b"dEfgh"), r"b/2\.txt is not the .*b/2\.txt .* content is another"),
        (lambda f: (f / "c").unlink(), r"/c is missing"),
        (lambda f: (f / "d").write_bytes(b"x"), r"/d was not there"),
        (lambda f: (f / "a.txt").write_bytes(b"ab"), r"is not the .*a\.txt that .* \(3 bytes, .* length is another"),
    ],
)
def test_change_is_named(folder, change, says):
    corpus = collect([str(folder)])
    change(folder)
    with pytest.raises(ConfigurationError, match=says) as caught:
        collect_recorded([str(folder)], corpus)
    assert "\n" not in str(caught.value)


def test_refused(folder, tmp_path):
    with pytest.raises(ConfigurationError, match="no data file or folder"):
        collect([str(tmp_path / "none")])
    with pytest.raises(ConfigurationError, match="no text"):
        collect([str(folder / "b/1.txt")])
    with pytest.raises(ConfigurationError, match="too few for seq_length = 300"):
        Windows(collect([str(folder)]), 300, 0.1)
    windows = Windows(collect([str(folder)]), 9, 0.1)
    (folder / "c").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="became shorter"):
        windows.sources[0].window(100, 10)


def test_default_is_the_library_without_tests():
    corpus = collect([])
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [document.path.relative_to(library).as_posix() for document in corpus.documents]
    assert names == sorted(names) and "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "idlelib", "site-packages"}.intersection(name.split("/"))]
    assert corpus.tokens > 5_000_000


def test_text():
    assert ByteTokenizer().decode([104, 9, END_OF_DOCUMENT, 0xFF, 27]) == "h\t\n<end of document>\n\ufffd\ufffd"


# Tokens


def token_file(path, tokens, dtype="<u2", header=b""):
    path.write_bytes(header + np.array(tokens, dtype).tobytes())
    return str(path)


def header(count, magic=20240520):
    """The header of llm.c's files: a magic number, the version and the number of tokens."""
    return np.array([magic, 1, count, *[0] * 253], "<i4").tobytes()


def test_token_files_are_streams(tmp_path):
    """nanoGPT's, with two or four bytes a token, and llm.c's, with a header; one after the other."""
    tokens = list(range(300)) * 4
    plain = token_file(tmp_path / "plain.bin", tokens)
    wide = token_file(tmp_path / "wide.bin", [70000, *tokens], "<u4")
    headed = token_file(tmp_path / "headed.bin", tokens[:7], "<u2", header(7))
    corpus = collect([plain, headed], like=Corpus((), vocabulary=300, end_of_document=0))
    assert [(d.dtype, d.header, d.tokens) for d in corpus.documents] == [("uint16", 0, 1200), ("uint16", 1024, 7)]
    assert from_table(corpus.table()) == corpus
    stream = Windows(corpus, 9, 0.0).sources[0]
    whole = torch.tensor([*tokens, *tokens[:7]])
    for start in (0, 1, 1190, 1195, 1197):
        assert torch.equal(stream.window(start, 10), whole[start : start + 10])
    corpus = collect([wide], like=Corpus((), vocabulary=70001, end_of_document=0))
    assert Windows(corpus, 9, 0.0).sources[0].window(0, 2).tolist() == [70000, 0]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffab".encode())
    (tmp_path / "b.txt").write_bytes("c\ufeff".encode())
    corpus = collect([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert Windows(corpus, 7, 0.0).sources[0].window(0, 8).tolist() == [97, 98, 256, 99, 0xEF, 0xBB, 0xBF, 256]
    assert from_table(corpus.table()) == corpus
    assert collect_recorded([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], corpus) == corpus
    as_it_is = collect([str(tmp_path / "a.txt")], data_format="text")
    assert as_it_is.tokens == 5 + 1


def test_tokens_beyond_the_vocabulary_are_named(tmp_path):
    like = Corpus((), vocabulary=300, end_of_document=0)
    bad = token_file(tmp_path / "bad.bin", [*range(300)] * 2000 + [300, 5])
    with pytest.raises(ConfigurationError, match=r"bad\.bin has the token 300, but vocabulary = 300 .*--vocabulary"):
        collect([bad], like=like)
    headed = token_file(tmp_path / "headed.bin", [1, 2, 301], "<u2", header(3))
    with pytest.raises(ConfigurationError, match=r"headed\.bin has the token 301"):
        collect([headed], like=like)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(ConfigurationError, match=r"odd\.bin: 3 bytes are no whole number of uint16"):
        collect([str(tmp_path / "odd.bin")], like=like)
    assert collect([str(tmp_path / "odd.bin")], data_format="text").tokens == 4


def test_text_needs_the_tokens_of_bytes(folder):
    with pytest.raises(ConfigurationError, match=r"vocabulary = 256, but bytes have 257 tokens"):
        collect([str(folder)], like=Corpus((), vocabulary=256))
    assert collect([str(folder)], like=Corpus((), vocabulary=320)).vocabulary == 320


# Several sources


@pytest.fixture
def mixed(tmp_path):
    """Two sources whose tokens tell which they are of, with weights, and held-out ones."""
    for name, low in (("a", 0), ("b", 100), ("kept", 200)):
        (tmp_path / name).write_bytes(bytes(range(low, low + 50)) * 20)
    like = Corpus((), weights=(0.75, 0.25))
    return collect([str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path / "kept")], like=like, data_format="text")


def test_sources_are_drawn_by_weight_on_any_number_of_processes(mixed):
    windows = Windows(mixed, 9, 0.5)  # the share is not taken where documents are held out
    on_one = [windows.batch(7, step, 0, 12) for step in range(100)]
    of_second = [(batch[:, 1, 0] >= 100).sum().item() for batch in on_one]
    assert abs(sum(of_second) / 1200 - 0.25) < 0.04  # three standard deviations
    assert torch.equal(torch.cat([windows.batch(7, 3, rank * 4, 4) for rank in range(3)]), on_one[3])
    assert max(batch.max().item() for batch in on_one) == 149 and windows.tokens == 2002
    heldout = windows.heldout(4)
    assert len(heldout) == 4 and min(rows.min() for _, rows in heldout) >= 200
    assert heldout[-1][1][1, -1] == END_OF_DOCUMENT


def test_each_source_keeps_its_share(mixed):
    windows = Windows(replace(mixed, documents=mixed.documents[:2], heldout_files=0), 9, 0.1)
    assert [source.boundary for source in windows.sources] == [901, 901]
    assert [document.path.name for document, _ in windows.heldout(8)] == ["a"] * 6 + ["b"] * 2  # by weight
    assert windows_module._apportioned(7, (0.5, 0.3, 0.2)) == [4, 2, 1]


def test_sources_are_recorded(mixed, tmp_path):
    table = mixed.table()
    assert table["sources"] == ["1 files, weight 0.75", "1 files, weight 0.25"] and table["heldout_files"] == 1
    assert from_table(table) == mixed
    paths, kept = [str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path / "kept")]
    assert collect_recorded(paths, mixed, heldout=kept) == mixed
    with pytest.raises(ConfigurationError, match=r"the data have changed: .*kept is missing"):
        collect_recorded(paths, mixed)


@pytest.mark.parametrize(
    "change",
    [
        {"heldout_files": 3}, {"heldout_files": 0}, {"sources": ["1 files, weight 0.75"]}, {"vocabulary": 200},
        {"sources": ["2 files, weight nan", "0 files, weight 1"]}, {"end_of_document": 257}, {"sources": ["x", "y"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_changed_table_is_refused(mixed, change):
    with pytest.raises(ConfigurationError, match=r"restore the file|is not a number of files|leave it out"):
        from_table({**mixed.table(), "vocabulary": 257, "end_of_document": 256} | change)


# Batches ahead


def test_batches_are_made_ahead_and_errors_come_at_their_step():
    made = []

    def make(step):
        made.append(step)
        if step == 4:
            raise ValueError("the disk is gone")
        return torch.full((1, 2), step)

    loader = BatchLoader(make, torch.device("cpu"), 6, {"seed": 1, "corpus": "x"})
    assert loader.batch(1).tolist() == [[1, 1]] and loader.batch(2).tolist() == [[2, 2]]
    wait_until(lambda: made == [1, 2, 3, 4])
    assert loader.batch(3).tolist() == [[3, 3]]  # 4 has failed already
    with pytest.raises(ValueError, match="the disk is gone"):
        loader.batch(4)
    assert loader.batch(2).tolist() == [[2, 2]]  # out of turn
    loader.load_state_dict({**loader.state_dict(), "step": 4})
    assert [loader.batch(step)[0, 0].item() for step in (5, 6)] == [5, 6] and loader.step == 6
    assert max(made) == 6
    loader.close()


def test_state_of_another_run_is_refused():
    loader = BatchLoader(torch.tensor, torch.device("cpu"), 6, {"seed": 1, "corpus": "x"})
    loader.load_state_dict({"step": 3, "recipe": "mxfp8"})  # of a release that said no more
    for other in ({"seed": 2}, {"corpus": "y"}):
        with pytest.raises(CheckpointError, match="its data would differ"):
            loader.load_state_dict({"step": 3, "seed": 1, "corpus": "x"} | other)


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"a text", mtime=0),
        b"PK\x03\x04\x14\x00\x08",
        "a text".encode("utf-16-le"),
        "a text".encode("utf-16"),
        b"\x93NUMPY",
        b"text, and then " * 3000 + b"\xff",
    ],
    ids=["gzip", "zip", "UTF-16-LE", "UTF-16", "NumPy", "later"],
)
def test_what_is_no_text_is_not_taken_for_one_by_its_name(tmp_path, content):
    """Named, in a folder, or held out; its bytes are data where that is asked for."""
    (tmp_path / "texts").mkdir()
    odd, good = tmp_path / "texts" / "odd.txt", tmp_path / "good.txt"
    odd.write_bytes(content)
    good.write_bytes(b"BZh" + b"a" * 65532 + "\u00e9".encode())  # a letter across the end of what is looked at
    for paths, heldout in (([str(odd)], []), ([str(odd.parent)], []), ([str(good)], [str(odd)])):
        with pytest.raises(
            ConfigurationError,
            match=r"odd\.txt is no text in UTF-8; convert it.*--data-format text",
        ):
            collect(paths, heldout)
    assert collect([str(good)]).tokens == 65535 + 2 + 1
    assert collect([str(odd.parent)], data_format="text").tokens == len(content) + 1
