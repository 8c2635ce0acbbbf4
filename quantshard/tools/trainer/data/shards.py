"""Token shards: `.bin` files of integers, and the index that makes a folder of them a data set.

    quantshard_tokens.json    number of tokens and documents, vocabulary, files and their SHA-256
    00000.bin, 00001.bin      tokens, uint16 or uint32, little endian, as nanoGPT reads them
    tokenizer/                a copy of the tokenizer's files, so that the folder is complete

Each shard is followed by a new index. A later call with the same source, tokenizer and options skips the documents of
finished shards, so the result does not depend on interruptions. A folder is untrusted: fields, file names and lengths
are checked here, and SHA-256 by the reader of the contents.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from quantshard import foreign
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import expect_transfer, regular_size, report_transfer
from quantshard.errors import ConfigurationError
from quantshard.foreign import FILE_BYTES
from quantshard.tools.terminal import outputs, screen
from quantshard.tools.trainer.data.chats import ChatTokenizer
from quantshard.tools.trainer.data.packing import MASKED
from quantshard.tools.trainer.data.sources import INDEX, Chat, DataSource, Text, TextOptions, read_head, reading, texts
from quantshard.tools.trainer.data.tokenizer import Tokenizer, end_text, tokenizer_contents

TOKENIZER = "tokenizer"
"""The folder of the tokenizer's copy."""

TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), MASKED: np.dtype("<u4")}
"""Little-endian dtypes of token files, by layout; `packing.MASKED` has flags next to each token."""

SHARD_BYTES = 100_000_000
"""Characters of text per shard."""

FORMAT, VERSION = "quantshard-tokens", 2
_MOST_TOKENS = 1 << 24
_SHARD = re.compile(r"[0-9]{5,9}\.bin")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_AT_ONCE = 1 << 20
"""Characters per call of the tokenizer."""

_HEADER_BYTES = 1024
_HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""Magic numbers of token files with a header, as in llm.c and modded-nanogpt, and the dtype of each."""


def token_dtype(vocabulary: int) -> str:
    """Return the storage dtype of a vocabulary's tokens: two bytes if they suffice."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class ShardEntry:
    """One file of tokens: name, number of tokens, number of documents, SHA-256."""

    file: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """The index of a folder of shards. `key` identifies all inputs, and `tokenizer` the tokenizer; both are digests."""

    key: str
    tokenizer: str
    vocabulary: int
    end_of_document: int
    end_text: str
    dtype: str
    shards: tuple[ShardEntry, ...] = ()
    complete: bool = False

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        outputs.write_file(folder / INDEX, json.dumps(content, indent=1) + "\n", within=folder)

    def sizes(self, folder: Path) -> list[tuple[Path, int]]:
        """Return the shards with their lengths on disk."""
        result = [(folder / shard.file, shard.tokens * TOKEN_DTYPES[self.dtype].itemsize) for shard in self.shards]
        for path, expected in result:
            with reading(path):
                size = regular_size(path)
            if size != expected:
                raise ConfigurationError(f"{path} has {size} bytes, not {expected} as in {INDEX}; make it again")
        return result

    @property
    def is_valid(self) -> bool:
        """Whether each field has its type and range."""
        digests = (self.key, self.tokenizer, *(shard.sha256 for shard in self.shards))
        counts = [count for shard in self.shards for count in (shard.tokens, shard.documents)]
        return (
            all(isinstance(text, str) for text in (*digests, self.end_text, *(shard.file for shard in self.shards)))
            and all(type(n) is int and 0 <= n < 1 << 63 for n in (self.vocabulary, self.end_of_document, *counts))
            and all(_SHA256.fullmatch(digest) for digest in digests)
            and all(_SHARD.fullmatch(shard.file) for shard in self.shards)
            and self.dtype in list(TOKEN_DTYPES)
            and self.end_of_document < self.vocabulary <= _MOST_TOKENS
        )


def read_index(folder: Path, *, unfinished: bool = False) -> ShardIndex:
    """Read the index of a folder of token shards. `unfinished`: accept one that lacks shards."""
    content = foreign.read_json(folder / INDEX, FILE_BYTES["index"])
    if (content.pop("format", None), content.pop("version", None)) != (FORMAT, VERSION):
        raise ConfigurationError(f"{folder / INDEX} is not of format {FORMAT!r}, version {VERSION}")
    try:
        shards = tuple(ShardEntry(**entry) for entry in content.pop("shards"))
        index = ShardIndex(**content, shards=shards)
    except (TypeError, KeyError):
        index = None
    if index is None or not index.is_valid:
        raise ConfigurationError(f"{folder / INDEX} has a missing or invalid field; make the shards again")
    if index.complete is not True and not unfinished:
        raise ConfigurationError(f"{folder} holds tokens that were not finished; run the same tokenize command again")
    return index


def raw_layout(path: Path, size: int, dtype: str) -> tuple[str, int]:
    """Return the dtype and the header length of a token file without an index. Files of llm.c have a header, those of
    nanoGPT do not. `dtype`: dtype that follows from the vocabulary, for files without a header."""
    header, magic = 0, int.from_bytes(read_head(path, 4), "little")
    if magic in _HEADERS and size >= _HEADER_BYTES:
        dtype, header = _HEADERS[magic], _HEADER_BYTES
    if (size - header) % TOKEN_DTYPES[dtype].itemsize:
        raise ConfigurationError(f"{path}: {size} bytes are no whole number of {dtype}; give the right --vocabulary")
    return dtype, header


class ShardedSource:
    """A source as token shards. `path`: of the tokenizer's files. `key`: digest of all inputs, with times of files."""

    def __init__(
        self, source: DataSource, tokenizer: Tokenizer, path: str, options: TextOptions, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.source, self.tokenizer, self.path = source, tokenizer, path
        self.options, self.shard_bytes, self._chats = options, shard_bytes, ChatTokenizer(tokenizer, path)
        files = [(file.name, size, file.stat().st_mtime_ns) for file, size in source.files]
        inputs = [source.kind, files, tokenizer.digest, tokenizer.end_of_document, options, shard_bytes]
        self.key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()

    def write(self, folder: Path) -> ShardIndex:
        """Write the missing shards to a new folder, or one with unfinished shards of the same inputs."""
        index = self._begun(folder)
        if index.complete:
            return index
        pieces = texts(self.source, self.options)
        documents = index.documents
        while documents:
            documents -= next(pieces)[1]
        # read before the folder is created, for errors of the source
        first = next(pieces, None)
        if first is None and not index.shards:
            raise ConfigurationError(f"there is no text in {self.source.path}")
        if first is not None and isinstance(first[0], Chat):
            index = replace(index, dtype=MASKED)
        outputs.make_folder(folder)
        try:
            lock = ownership.lock(folder)
        except TimeoutError:
            raise ConfigurationError(f"another process writes tokens to {folder}; wait for it") from None
        with screen.transfer_bar("tokenizing"):
            expect_transfer(self.source.size)
            while first is not None:
                path, pieces = folder / f"{len(index.shards):05d}.bin", chain([first], pieces)
                shard = self._write_shard(path, index.dtype, pieces)
                index = replace(index, shards=(*index.shards, shard))
                index.write(folder)
                first = next(pieces, None)
        for name, content in tokenizer_contents(self.path).items() if self.path else ():
            outputs.write_file(folder / TOKENIZER / name, content, within=folder)
        index = replace(index, complete=True)
        index.write(folder)
        outputs.remove_unfinished(folder)
        if lock is not None:
            lock.release()
        return index

    def _begun(self, folder: Path) -> ShardIndex:
        """Return the index of the shards that an earlier call has finished."""
        if os.path.lexists(folder / INDEX):
            index = read_index(folder, unfinished=True)
            if index.key != self.key:
                raise ConfigurationError(f"{folder} holds tokens of other data, tokenizer or options; name another one")
            index.sizes(folder)
            if not index.complete:
                screen.say(f"{folder} has {len(index.shards)} shards already; going on with the others")
            return index
        # a first shard that was not finished may be there
        if os.path.lexists(folder) and (
            not folder.is_dir() or {path.name for path in folder.iterdir() if path.name[0] != "."} - {"00000.bin"}
        ):
            raise ConfigurationError(f"{folder} exists and holds other files; name a new folder with --out")
        tokenizer = self.tokenizer
        return ShardIndex(
            self.key, tokenizer.digest, tokenizer.vocabulary, tokenizer.end_of_document, end_text(tokenizer),
            token_dtype(tokenizer.vocabulary),
        )  # fmt: skip

    def _write_shard(self, path: Path, dtype: str, pieces: Iterator[tuple[Text, bool]]) -> ShardEntry:
        digest, characters, tokens, documents, is_end = hashlib.sha256(), 0, 0, 0, False
        with outputs.written_file(path, within=path.parent) as file:
            while not is_end or characters < self.shard_bytes:
                batch = list(_first(pieces, min(_AT_ONCE, self.shard_bytes - characters)))
                if not batch:
                    break
                for values, (text, is_end) in zip(self._encoded(batch, dtype), batch, strict=True):
                    digest.update(values.data)
                    file.write(values.data)
                    characters, tokens, documents = characters + len(text), tokens + len(values), documents + is_end
                report_transfer(sum(len(text) for text, _ in batch))
        return ShardEntry(path.name, tokens, documents, digest.hexdigest())

    def _encoded(self, batch: Sequence[tuple[Text, bool]], dtype: str) -> Iterator[np.ndarray]:
        """Yield the tokens of texts or chats as they are stored."""
        chats = [text for text, _ in batch if isinstance(text, Chat)]
        if len(chats) not in (0, len(batch)) or bool(chats) != (dtype == MASKED):
            raise ConfigurationError(f"{self.source.path} holds texts and chats; make shards of each by itself")
        if chats:
            yield from (self._chats.encode(chat).astype(TOKEN_DTYPES[dtype]) for chat in chats)
            return
        encoded = self.tokenizer.encode([str(text) for text, _ in batch])
        for ids, (_, is_end) in zip(encoded, batch, strict=True):
            values = np.empty(len(ids) + is_end, TOKEN_DTYPES[dtype])
            values[: len(ids)] = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else ids
            values[len(ids) :] = self.tokenizer.end_of_document
            yield values


def _first(pieces: Iterator[tuple[Text, bool]], characters: int) -> Iterator[tuple[Text, bool]]:
    """Yield texts, at least one, until they have this number of characters."""
    for piece in pieces:
        yield piece
        characters -= len(piece[0])
        if characters <= 0:
            return
