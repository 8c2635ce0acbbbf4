"""The corpus and its windows: what is read, in which order, and that a change of the data is seen."""

import sysconfig
from pathlib import Path

import pytest
import torch

from quantshard.errors import ConfigurationError
from quantshard.trainer import data
from quantshard.trainer.data import END_OF_DOCUMENT, Windows, collect, collect_recorded, from_table


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    for name, content in {"b/2.txt": b"defgh", "a.txt": b"abc", "b/1.txt": b"", "c": bytes(range(200))}.items():
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
        assert torch.equal(windows.sources[0].stream.window(start, 10), whole[start : start + 10]), start


def test_heldout_is_apart(folder, monkeypatch):
    corpus = collect([str(folder)])
    windows = Windows(corpus, 9, 0.2)
    [source] = windows.sources
    assert source.boundary == corpus.tokens - round(corpus.tokens * 0.2)
    seen: list[int] = []

    def window(start, width):
        seen.append(start)
        return torch.zeros(width)

    monkeypatch.setattr(source.stream, "window", window)
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
        windows.sources[0].stream.window(100, 10)


def test_default_is_the_library_without_tests():
    corpus = collect([])
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [document.path.relative_to(library).as_posix() for document in corpus.documents]
    assert names == sorted(names) and "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "idlelib", "site-packages"}.intersection(name.split("/"))]
    assert corpus.tokens > 5_000_000


def test_text():
    assert data.text([104, 9, END_OF_DOCUMENT, 0xFF, 27]) == "h\t\n<end of document>\n\ufffd\ufffd"
