"""Token shards: `.bin` files of integers, and the index that makes a folder of them a data set.

    quantshard_tokens.json    number of tokens and documents, vocabulary, files and their SHA-256
    00000.bin, 00001.bin      tokens, uint16 or uint32, little endian, as nanoGPT reads them
    tokenizer/                a copy of the tokenizer's files, so that the folder is complete

A folder is untrusted. Each field of the index has a range, files must be in the folder, and their lengths are checked.
The reader of the contents checks their SHA-256.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantshard import foreign
from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader, open_regular, regular_size
from quantshard.read_limits import FILE_BYTES
from quantshard.tools.trainer.data.documents import TOKEN_DTYPES, unreadable
from quantshard.tools.trainer.data.finding import INDEX

TOKENIZER = "tokenizer"
"""The folder of the tokenizer's copy."""

FORMAT, VERSION = "quantshard-tokens", 1
_MOST = (1 << 63) - 1
_MOST_TOKENS = 1 << 24
_SHARD = re.compile(r"[0-9]{5,9}\.bin")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_HEADER_BYTES = 1024
_HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""Magic numbers of token files with a header, as in llm.c and modded-nanogpt, and the dtype of each."""


@dataclass(frozen=True)
class ShardEntry:
    """One file of tokens: name, number of tokens, number of documents, SHA-256."""

    file: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """The index of a folder of shards.

    `key`: digest of all inputs: sources, tokenizer and options. `tokenizer`: digest of the tokenizer. `end_text`: text
    of the token that ends documents; "" for bytes.
    """

    key: str
    tokenizer: str
    vocabulary: int
    end_of_document: int
    end_text: str
    dtype: str
    shards: tuple[ShardEntry, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    def content(self) -> dict[str, Any]:
        """Return the index as a JSON object."""
        total = {"tokens": self.tokens, "documents": self.documents}
        return {"format": FORMAT, "version": VERSION, **total, **asdict(self)}

    def sizes(self, folder: Path) -> tuple[tuple[Path, int], ...]:
        """Return the non-empty shards with their lengths on disk.

        Raises:
            ConfigurationError: a shard is missing, or its length differs from the index.
        """
        result = []
        for shard in self.shards:
            path, expected = folder / shard.file, shard.tokens * TOKEN_DTYPES[self.dtype].itemsize
            try:
                size = regular_size(path)
            except OSError as error:
                raise unreadable(path, error) from None
            if size != expected:
                raise ConfigurationError(
                    f"{path} has {size} bytes, but {INDEX} says {shard.tokens} tokens of {self.dtype}, which are "
                    f"{expected}; make the shards anew by quantshard tokenize"
                )
            if size:
                result.append((path, size))
        return tuple(result)


def read_index(folder: Path) -> ShardIndex:
    """Read the index of a folder of token shards.

    Raises:
        ConfigurationError: the index is invalid; the message names the field.
    """
    where = folder / INDEX
    content = foreign.read_json(where, FILE_BYTES["index"])
    fields = FieldReader(content, str(where))
    if content.get("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT))
    if content.get("version") != VERSION:
        raise fields.wrong("version", f"{VERSION}, the only one that this release reads")
    if (fields.text("dtype") or "") not in TOKEN_DTYPES:
        raise fields.wrong("dtype", " or ".join(TOKEN_DTYPES))
    vocabulary = _number(fields, "vocabulary", 1, _MOST_TOKENS)
    listed = content.get("shards")
    if not isinstance(listed, list) or not listed:
        raise fields.wrong("shards", "a list of files")
    index = ShardIndex(
        _digest(fields, "key"),
        _digest(fields, "tokenizer"),
        vocabulary,
        _number(fields, "end_of_document", 0, vocabulary - 1),
        fields.text("end_text") or "",
        content["dtype"],
        tuple(shard_entry(entry, f"{where}: shards[{number}]") for number, entry in enumerate(listed)),
    )
    names = [shard.file for shard in index.shards]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"{where}: two shards have one name")
    for name in ("tokens", "documents"):
        if content.get(name) != getattr(index, name):
            raise fields.wrong(name, f"{getattr(index, name)}, the sum over the shards")
    return index


def shard_entry(entry: object, where: str) -> ShardEntry:
    """Parse a shard's entry in an index or a journal.

    Raises:
        ConfigurationError: the entry is invalid.
    """
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not an object")
    fields = FieldReader(entry, where)
    file = fields.text("file") or ""
    if not _SHARD.fullmatch(file):
        raise fields.wrong("file", "the name of a shard, as 00000.bin")
    return ShardEntry(
        file, _number(fields, "tokens", 0, _MOST), _number(fields, "documents", 0, _MOST), _digest(fields, "sha256")
    )


def _number(fields: FieldReader, name: str, least: int, most: int) -> int:
    value = fields.integer(name, least, most)
    if value is None:
        raise fields.wrong(name, "given")
    return value


def _digest(fields: FieldReader, name: str) -> str:
    digest = fields.text(name) or ""
    if not _SHA256.fullmatch(digest):
        raise fields.wrong(name, "a SHA-256")
    return digest


def raw_layout(path: Path, size: int, dtype: str) -> tuple[str, int]:
    """Return the dtype and the header length of a token file without an index. Files of llm.c have a header, those of
    nanoGPT do not.

    `dtype`: dtype that follows from the vocabulary, for files without a header.

    Raises:
        ConfigurationError: the length is not a whole number of tokens, or contradicts the header.
    """
    header = 0
    try:
        with open_regular(path, follow=True) as file:
            first, _, count = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
    except OSError as error:
        raise unreadable(path, error) from None
    if first in _HEADERS and size >= _HEADER_BYTES:
        dtype, header = _HEADERS[first], _HEADER_BYTES
    if (size - header) % TOKEN_DTYPES[dtype].itemsize:
        raise ConfigurationError(
            f"{path} has {size} bytes, which is no whole number of tokens of {dtype}; say how many tokens there are "
            "with --vocabulary (more than 65536: uint32), or --data-format text if it is no file of tokens"
        )
    actual = (size - header) // TOKEN_DTYPES[dtype].itemsize
    if header and count != actual:
        raise ConfigurationError(
            f"{path}: the header counts {count} tokens, the file has {actual}; is it cut off? make it again"
        )
    return dtype, header


def tokenizer_copy(folder: Path) -> str:
    """Return the path of the tokenizer's copy; "" if there is no copy."""
    copy = folder / TOKENIZER
    return str(copy) if os.path.isdir(copy) and not os.path.islink(copy) else ""
