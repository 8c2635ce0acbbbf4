"""Converts texts to tokens and back: bytes by default, or a tokenizer of `tokenizers` or `transformers`.

Tokenizer files are untrusted: a resumed run parses nothing before the digest is checked, no code from a folder runs,
and nothing is downloaded. Special tokens in a text are encoded as plain text.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from quantshard import foreign
from quantshard.errors import ConfigurationError, meant
from quantshard.foreign import FILE_BYTES, read_regular
from quantshard.interop.layouts.files import companions
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer.data.sources import library

END_OF_DOCUMENT = 256
VOCABULARY = 257

BYTES_DIGEST = hashlib.sha256(b"bytes").hexdigest()
"""Digest of the byte tokenizer in the index of token shards."""

FAST = "tokenizer.json"
SPECIAL = ("tokenizer_config.json", "special_tokens_map.json")


class ByteTokenizer:
    """Tokens are UTF-8 bytes, plus END_OF_DOCUMENT."""

    vocabulary, end_of_document, digest = VOCABULARY, END_OF_DOCUMENT, BYTES_DIGEST

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode("utf-8") for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens for display: invalid characters are replaced, and END_OF_DOCUMENT becomes a line."""
        out = bytearray()
        for token in tokens:
            out += b"\n<end of document>\n" if token == END_OF_DOCUMENT else bytes([token]) if token < 256 else b"\xff"
        return _shown(out.decode("utf-8", errors="replace"))


def _shown(decoded: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        backend: a `tokenizers.Tokenizer`.
        end_of_document: text of the token that ends a document.
    """

    def __init__(self, backend: Any, end_of_document: str, digest: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend, self.digest = backend, digest
        entries = backend.get_vocab(with_added_tokens=True)
        self.vocabulary = max(entries.values(), default=-1) + 1
        if end_of_document not in entries:
            hint = f"to end documents with; {meant(end_of_document, entries)}"
            raise ConfigurationError(f"the tokenizer has no token {end_of_document[:80]!r} {hint}")
        self.end_of_document = entries[end_of_document]

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        parts: list[list[int]] = [[]]
        for token in tokens:
            if token == self.end_of_document:
                parts.append([])
            elif token < self.vocabulary:
                parts[-1].append(token)
        decoded = (self.backend.decode(part, skip_special_tokens=False) for part in parts)
        return _shown("\n<end of document>\n".join(decoded))


Tokenizer: TypeAlias = ByteTokenizer | LibraryTokenizer

BYTES: Final = ByteTokenizer()


def tokenizer_digest(contents: Mapping[str, bytes]) -> str:
    lines = "".join(f"{hashlib.sha256(content).hexdigest()} {name}\n" for name, content in sorted(contents.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def tokenizer_contents(path: str) -> dict[str, bytes]:
    """Read the files of a tokenizer, by name: the tokenizer.json itself, or the tokenizer files of a folder."""
    location, contents, files = Path(outputs.existing(path, f"a folder with {FAST}")), {}, [Path(path)]
    if location.is_dir():
        files = [file for file in companions(location, "*.model") if file.name != "generation_config.json"]
    if not files:
        raise ConfigurationError(f"--tokenizer {path} is a folder without {FAST} or the files of another tokenizer")
    for file in files:
        is_named = file == Path(path)
        contents[FAST if is_named else file.name] = read_regular(file, FILE_BYTES["tokenizer"], follow=is_named)
    return contents


def load_tokenizer(path: str, end_of_document: str = "", digest: str = "") -> Tokenizer:
    """Load the tokenizer of a folder or a tokenizer.json; "" is the byte tokenizer.

    `end_of_document`: text of the token that follows a document, if it is not the folder's eos_token. `digest`:
    expected digest, if known; nothing is parsed if it differs.
    """
    if not path:
        if end_of_document:
            raise ConfigurationError(f"--end-of-document {end_of_document[:80]!r} is about --tokenizer; give both")
        return BYTES
    contents = tokenizer_contents(path)
    actual = tokenizer_digest(contents)
    if digest not in ("", actual):
        raise ConfigurationError(f"{path} is not the tokenizer of the data (SHA-256 {digest[:12]}...); name that one")
    return LibraryTokenizer(_backend(path, contents), end_of_document or end_token(path, contents), actual)


def end_token(path: str, contents: Mapping[str, bytes]) -> str:
    for name in SPECIAL:
        content = foreign.json_object(contents[name], f"{path}: {name}") if name in contents else {}
        token = content.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    raise ConfigurationError(f"--tokenizer {path} has no eos_token in {SPECIAL[0]}; give --end-of-document TOKEN")


def end_text(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        return ""
    return str(tokenizer.backend.id_to_token(tokenizer.end_of_document))


def transformers_tokenizer(path: str, what: str) -> Any:
    """Load the tokenizer of a folder by transformers. `what`: what needs transformers, for an error."""
    transformers = library("transformers", what)
    with foreign.hub_offline():
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _backend(path: str, contents: Mapping[str, bytes]) -> Any:
    with foreign.errors_in_one_line(f"--tokenizer {path} cannot be read as a tokenizer"):
        if FAST not in contents:
            return transformers_tokenizer(path, f"the tokenizer of {path}, which has no {FAST}").backend_tokenizer
        # reject malformed or deeply nested JSON before the library parses it
        json.loads(contents[FAST])
        return library("tokenizers", f"the tokenizer {path}").Tokenizer.from_str(contents[FAST].decode("utf-8"))
