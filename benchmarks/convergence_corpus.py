"""The text of the convergence benchmark: the sources and documentation of installed Python packages, as tokens.

    python benchmarks/convergence_corpus.py OUT [--megabytes 1500] [--vocabulary 50257] [--like CORPUS.json]

Takes `.py`, `.pyi`, `.md`, `.rst` and `.txt` files of the standard library and of every installed distribution whose
metadata name a permissive licence. Trains a byte-level BPE on a sample and writes `train.bin` and `heldout.bin` (uint16
tokens, documents ended by token 0), `tokenizer.json` and `corpus.json`: distributions with versions, bytes and hashes.
Files are ordered by the hash of their contents, and equal ones kept once; the hash also says which are held out, one of
200. So the same packages give the same tokens, whatever machine they lie on, and another version of one changes little.
Of packages, those are taken that the interpreter has of its own, and none that PYTHONPATH adds. `--like` compares with
what another corpus was made of before anything is written, and names the versions that differ: losses are compared on
equal tokens alone. `corpus-3e702f98.json` is of the one of benchmarks/RESULTS.md, made with `--megabytes 230`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})
PERMISSIVE = ("mit", "bsd", "apache", "psf", "python software foundation", "isc", "zlib", "unlicense")
SMALLEST, LARGEST = 200, 1_000_000
"""Bytes of a file that is taken: a larger one is a table."""
HELD_OUT = 200
END_OF_DOCUMENT = "<|end|>"
SAMPLE_BYTES = 200_000_000
AT_ONCE = 2_000


class Document(NamedTuple):
    """One file: the hash of its contents, which orders it, and what it is from."""

    digest: str
    text: str
    source: str


def licence(distribution: Distribution) -> str:
    """What a distribution's metadata say of its licence, in small letters."""
    found = distribution.metadata
    named = [found.get("License-Expression"), found.get("License")]
    named += [each for each in found.get_all("Classifier") or [] if each.startswith("License")]
    return " ".join(each.splitlines()[0] for each in named if each).lower()


def files() -> Iterator[tuple[Path, str]]:
    """Every file that may be taken, and what it is from."""
    for path in Path(sysconfig.get_path("stdlib")).rglob("*"):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            yield path, f"Python {sysconfig.get_python_version()}"
    for distribution in distributions(path=sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})):
        if any(word in licence(distribution) for word in PERMISSIVE):
            name = f"{distribution.metadata['Name']} {distribution.version}"
            for path in distribution.files or ():
                yield Path(str(path.locate())), name


def documents(limit: int) -> list[Document]:
    """The files' texts in their order, of at most `limit` bytes together."""
    found: dict[str, Document] = {}
    for path, source in files():
        if path.suffix not in SUFFIXES or not path.is_file() or not SMALLEST <= path.stat().st_size <= LARGEST:
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(data).hexdigest()
        found[digest] = min(Document(digest, text, source), found.get(digest, Document(digest, text, source)))
    kept, size = [], 0
    for document in sorted(found.values()):
        size += len(document.text)
        if size > limit:
            break
        kept.append(document)
    return kept


def is_held_out(document: Document) -> bool:
    """Whether nothing is trained on it."""
    return int(document.digest, 16) % HELD_OUT == 0


def tokenizer_of(texts: list[Document], vocabulary: int) -> Tokenizer:
    """A byte-level BPE, trained on the first documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    return tokenizer


def _sample(texts: list[Document]) -> Iterator[str]:
    size = 0
    for document in texts:
        size += len(document.text)
        if size > SAMPLE_BYTES:
            return
        yield document.text


def write(path: Path, texts: list[Document], tokenizer: Tokenizer) -> dict[str, int | str]:
    """The tokens of some documents, one after the other; how many there are, and their hash."""
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as out:
        for start in range(0, len(texts), AT_ONCE):
            for encoded in tokenizer.encode_batch([each.text for each in texts[start : start + AT_ONCE]]):
                data = np.asarray([*encoded.ids, 0], dtype=np.uint16).tobytes()
                digest.update(data)
                count += len(encoded.ids) + 1
                out.write(data)
    return {"tokens": count, "sha256": digest.hexdigest()}


def check_alike(sources: Iterable[str], like: Path) -> None:
    """Compare the distributions of texts with those of another corpus, by its `corpus.json`.

    Raises:
        SystemExit: they differ, naming each by name and version.
    """
    here, there = set(sources), set(json.loads(like.read_text())["sources"])
    if here != there:
        more, fewer = ", ".join(sorted(here - there)) or "nothing", ", ".join(sorted(there - here)) or "nothing"
        raise SystemExit(
            f"other packages than {like} was made of: here {more}; there {fewer}; pip install NAME==VERSION"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens for benchmarks/convergence.py.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--like", type=Path, help="corpus.json of another one, which has to be of the same packages")
    asked = parser.parse_args()
    texts = documents(asked.megabytes * 1_000_000)
    if asked.like is not None:
        check_alike((each.source for each in texts), asked.like)
    asked.out.mkdir(parents=True, exist_ok=True)
    train, heldout = ([each for each in texts if is_held_out(each) is held] for held in (False, True))
    tokenizer = tokenizer_of(train, asked.vocabulary)
    tokenizer.save(str(asked.out / "tokenizer.json"))
    said = {
        "vocabulary": tokenizer.get_vocab_size(),
        "documents": len(texts),
        "bytes": sum(len(each.text.encode()) for each in texts),
        "heldout": write(asked.out / "heldout.bin", heldout, tokenizer),
        "train": write(asked.out / "train.bin", train, tokenizer),
        "sources": sorted({each.source for each in texts}),
    }
    (asked.out / "corpus.json").write_text(json.dumps(said, indent=1) + "\n")
    print({name: value for name, value in said.items() if name != "sources"}, f"{len(said['sources'])} packages")


if __name__ == "__main__":
    main()
