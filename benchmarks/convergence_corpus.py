"""Tokenize the sources and documentation of installed Python packages: the corpus of the convergence benchmark.

    python benchmarks/convergence_corpus.py OUT [--megabytes 1500] [--vocabulary 50257] [--like CORPUS.json]

Reads `.py`, `.pyi`, `.md`, `.rst` and `.txt` files of the standard library and of the interpreter's own packages with a
permissive licence in their metadata; packages on PYTHONPATH are ignored. Trains a byte-level BPE on a sample and writes
`train.bin` and `heldout.bin` (uint16 tokens, documents end with token 0), `tokenizer.json`, and `corpus.json` with
packages, versions, sizes and hashes.

Files are deduplicated and sorted by the hash of their contents, which also selects one of 200 as held out. So the same
packages give the same tokens on any machine, and another version of one package changes little. `--like` first compares
the packages with another corpus and lists versions that differ, because losses are only comparable on equal
tokens. `corpus-3e702f98.json` is the corpus of RESULTS.md, made with `--megabytes 230`.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness import make_parser

SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})
PERMISSIVE = ("mit", "bsd", "apache", "psf", "python software foundation", "isc", "zlib", "unlicense")
SMALLEST, LARGEST = 200, 1_000_000
"""Limits of a file's bytes; larger files are mostly tables."""
HELD_OUT = 200
END_OF_DOCUMENT = "<|end|>"
SAMPLE_BYTES = 200_000_000
ENCODE_BATCH = 2_000


class Document(NamedTuple):
    """A file: the hash of its contents, its text, and its package."""

    digest: str
    text: str
    source: str


def licence(distribution: Distribution) -> str:
    """Return the licences in a distribution's metadata, in lower case."""
    metadata = distribution.metadata
    texts = [metadata.get("License-Expression"), metadata.get("License")]
    texts += [text for text in metadata.get_all("Classifier") or [] if text.startswith("License")]
    return " ".join(text.splitlines()[0] for text in texts if text).lower()


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file with a permissive licence and its package."""
    for path in Path(sysconfig.get_path("stdlib")).rglob("*"):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            yield path, f"Python {sysconfig.get_python_version()}"
    for distribution in distributions(path=sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})):
        if any(word in licence(distribution) for word in PERMISSIVE):
            name = f"{distribution.metadata['Name']} {distribution.version}"
            for path in distribution.files or ():
                yield Path(str(path.locate())), name


def documents(limit: int) -> list[Document]:
    """Read the first documents by hash, up to `limit` characters in total."""
    by_digest: dict[str, Document] = {}
    for path, source in files():
        if path.suffix not in SUFFIXES or not path.is_file() or not SMALLEST <= path.stat().st_size <= LARGEST:
            continue
        data = path.read_bytes()
        try:
            document = Document(hashlib.sha256(data).hexdigest(), data.decode("utf-8"), source)
        except UnicodeDecodeError:
            continue
        by_digest[document.digest] = min(document, by_digest.get(document.digest, document))
    return first_documents(sorted(by_digest.values()), limit)


def first_documents(texts: Iterable[Document], limit: int) -> list[Document]:
    """Return documents from the start, up to `limit` characters in total."""
    selected, size = [], 0
    for document in texts:
        size += len(document.text)
        if size > limit:
            break
        selected.append(document)
    return selected


def is_held_out(document: Document) -> bool:
    return int(document.digest, 16) % HELD_OUT == 0


def train_tokenizer(texts: list[Document], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on the first documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in first_documents(texts, SAMPLE_BYTES)), trainer)
    return tokenizer


def write(path: Path, texts: list[Document], tokenizer: Tokenizer) -> dict[str, int | str]:
    """Write the tokens of documents, and return their number and hash."""
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as out:
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = [document.text for document in texts[start : start + ENCODE_BATCH]]
            for encoding in tokenizer.encode_batch(batch):
                data = np.asarray([*encoding.ids, 0], dtype=np.uint16).tobytes()
                digest.update(data)
                count += len(encoding.ids) + 1
                out.write(data)
    return {"tokens": count, "sha256": digest.hexdigest()}


def check_packages(sources: Iterable[str], other_corpus: Path) -> None:
    """Exit with a list of differences if packages differ from another `corpus.json`."""
    current, expected = set(sources), set(json.loads(other_corpus.read_text())["sources"])
    if current != expected:
        added, missing = (", ".join(sorted(names)) or "nothing" for names in (current - expected, expected - current))
        raise SystemExit(
            f"packages differ from {other_corpus}: here {added}; there {missing}; pip install NAME==VERSION"
        )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--like", type=Path, help="corpus.json of a corpus that must have the same packages")
    options = parser.parse_args()
    texts = documents(options.megabytes * 1_000_000)
    sources = {document.source for document in texts}
    if options.like is not None:
        check_packages(sources, options.like)
    options.out.mkdir(parents=True, exist_ok=True)
    train = [document for document in texts if not is_held_out(document)]
    heldout = [document for document in texts if is_held_out(document)]
    tokenizer = train_tokenizer(train, options.vocabulary)
    tokenizer.save(str(options.out / "tokenizer.json"))
    summary = {
        "vocabulary": tokenizer.get_vocab_size(),
        "documents": len(texts),
        "bytes": sum(len(document.text.encode()) for document in texts),
        "heldout": write(options.out / "heldout.bin", heldout, tokenizer),
        "train": write(options.out / "train.bin", train, tokenizer),
    }
    text = json.dumps(summary | {"sources": sorted(sources)}, indent=1)
    (options.out / "corpus.json").write_text(text + "\n")
    print(summary, f"{len(sources)} packages")


if __name__ == "__main__":
    main()
