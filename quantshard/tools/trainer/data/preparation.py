"""Prepares a run's data: builds the corpus, and tokenizes texts that cannot be read at random positions.

The order of the data is a function of seed and step, so a run reads windows at any position: from text files (bytes are
tokens) or from token shards. Other sources are tokenized into shards before the run starts. The name of the shards'
folder ends in a digest of all inputs, and the run records that folder as its data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantshard.errors import ConfigurationError
from quantshard.tools.terminal import screen
from quantshard.tools.trainer.data.corpus import Corpus, collect
from quantshard.tools.trainer.data.shards import ShardedSource, ShardIndex, read_index, tokenizer_copy
from quantshard.tools.trainer.data.sources import RAW, SHARDS, TEXT, DataSource, TextOptions, find
from quantshard.tools.trainer.data.tokenizer import BYTES_DIGEST, Tokenizer, end_text, load_tokenizer
from quantshard.tools.trainer.settings.config import TrainSettings

_KEY_DIGITS = 16
_MULTIPLE = 128
"""Multiple for the vocabulary of built-in models. cuBLAS multiplies by a head of 50257 rows in kernels that read one
element at a time: 125 TFLOP/s on an H200, where large BF16 products reach 790 (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class TokenFacts:
    """Properties of the tokens of a run's data.

    Args:
        tokenizer: tokenizer; None if unknown.
        path: path of the tokenizer's files; "" for bytes.
        digest: digest of the tokenizer in the corpus.
        vocabulary: number of tokens.
        end_of_document: token that ends documents.
    """

    tokenizer: Tokenizer | None
    path: str
    digest: str
    vocabulary: int
    end_of_document: int


class Preparation:
    """The data of a new run.

    `settings`: settings with values from the tokenizer, before tokenization. `described`: corpus without documents.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._sources = find(settings.data, settings.data_format, settings.data_split)
        self._heldout = (
            find(settings.heldout_data, settings.data_format, settings.data_split) if settings.heldout_data else []
        )
        self._facts = facts = _facts(settings, [*self._sources, *self._heldout])
        tokens = settings.vocabulary or facts.vocabulary
        is_default = not settings.vocabulary and not facts.path and facts.tokenizer is not None
        self.settings = replace(
            settings,
            tokenizer=facts.path,
            end_of_document=end_text(facts.tokenizer) if facts.tokenizer is not None else "",
            vocabulary=0 if is_default else settings.vocabulary or _padded(facts, settings),
        )
        self.described = Corpus((), (), settings.weights, 0, facts.digest, tokens, facts.end_of_document)

    def collected(self, folder: Path) -> tuple[TrainSettings, Corpus]:
        """Tokenize the data where necessary; return the settings to record and the corpus. `folder`: destination of
        tokens if the settings name none.
        """
        settings, facts = self.settings, self._facts
        cache = Path(settings.token_cache) if settings.token_cache else folder
        readable = [_readable(source, facts, settings, cache) for source in self._sources]
        is_same = readable == [source.path for source in self._sources]
        data = settings.data if is_same else tuple(map(str, readable))
        heldout = tuple(str(_readable(source, facts, settings, cache)) for source in self._heldout)
        # shards are not text
        data_format = settings.data_format if is_same else "auto"
        corpus = collect(data, heldout, like=self.described, data_format=data_format)
        return replace(settings, data=data, heldout_data=heldout, data_format=data_format), corpus


def _padded(facts: TokenFacts, settings: TrainSettings) -> int:
    """Return the vocabulary of a model for a tokenizer, padded if that is faster. Byte vocabularies (257) and existing
    weights are not padded."""
    is_of_tokens = facts.tokenizer is None or bool(facts.digest)
    pads = is_of_tokens and settings.is_by_sizes and not settings.init_from
    return rounded_up(facts.vocabulary) if pads else facts.vocabulary


def rounded_up(vocabulary: int) -> int:
    """Round a vocabulary up to a multiple that is fast on GPUs."""
    return -(-vocabulary // _MULTIPLE) * _MULTIPLE


def _facts(settings: TrainSettings, sources: Sequence[DataSource]) -> TokenFacts:
    indices = [(source.path, read_index(source.path)) for source in sources if source.kind == SHARDS]
    facts = _named(settings, sources, indices)
    for path, index in indices:
        if index.tokenizer != (facts.digest or BYTES_DIGEST) or index.end_of_document != facts.end_of_document:
            raise ConfigurationError(
                f"{path} was made by another tokenizer, or with another end of documents, than "
                f"{settings.tokenizer or indices[0][0]}; make it anew by quantshard tokenize --tokenizer"
            )
    if settings.vocabulary and settings.vocabulary < facts.vocabulary:
        raise ConfigurationError(
            f"vocabulary = {settings.vocabulary}, but the tokenizer has {facts.vocabulary} tokens; leave it out, or "
            "make it larger"
        )
    is_of_bytes = facts.tokenizer is not None and not facts.digest
    if settings.init_from and is_of_bytes and settings.vocabulary not in (0, facts.vocabulary):
        raise ConfigurationError(
            f"--init-from {settings.init_from} is a model of {settings.vocabulary} tokens, and without --tokenizer "
            f"there are {facts.vocabulary}, which are bytes; name its tokenizer with --tokenizer"
        )
    return facts


def _named(
    settings: TrainSettings, sources: Sequence[DataSource], indices: Sequence[tuple[Path, ShardIndex]]
) -> TokenFacts:
    """Return the properties of the tokenizer from the settings, else from the shards, else unknown or bytes."""
    if settings.end_of_document and not settings.tokenizer:
        # raises with an explanation
        load_tokenizer("", settings.end_of_document)
    if settings.tokenizer:
        return _of(load_tokenizer(settings.tokenizer, settings.end_of_document), settings.tokenizer)
    if indices and indices[0][1].tokenizer != BYTES_DIGEST:
        folder, index = indices[0]
        copy = tokenizer_copy(folder)
        if copy:
            return _of(load_tokenizer(copy, index.end_text, index.tokenizer), copy)
        if all(source.kind == SHARDS for source in sources):
            return TokenFacts(None, "", index.tokenizer, index.vocabulary, index.end_of_document)
        raise ConfigurationError(f"{folder} has no copy of its tokenizer; name the tokenizer with --tokenizer")
    if not indices and any(source.kind == RAW for source in sources):
        raw = next(source.path for source in sources if source.kind == RAW)
        if not settings.vocabulary:
            raise ConfigurationError(
                f"{raw} holds tokens, and nothing says of which tokenizer; name it with --tokenizer, or how many "
                "tokens there are with --vocabulary N"
            )
        if any(source.kind != RAW for source in sources):
            raise ConfigurationError(
                f"{raw} holds tokens, and other data are texts; name the tokenizer of both with --tokenizer"
            )
        return TokenFacts(None, "", "", settings.vocabulary, 0)
    return _of(load_tokenizer(""), "")


def _of(tokenizer: Tokenizer, path: str) -> TokenFacts:
    digest = tokenizer.digest if path else ""
    return TokenFacts(tokenizer, path, digest, tokenizer.vocabulary, tokenizer.end_of_document)


def _readable(source: DataSource, facts: TokenFacts, settings: TrainSettings, cache: Path) -> Path:
    """Return the path that a run reads for a source: the source itself, or shards made from it."""
    if source.kind in (RAW, SHARDS) or (source.kind == TEXT and not facts.path):
        return source.path
    assert facts.tokenizer is not None, source
    options = TextOptions(settings.text_field, settings.data_split)
    sharded = ShardedSource(source, facts.tokenizer, facts.path, options)
    stem = re.sub(r"[^\w.-]", "_", source.path.name)[:80]
    folder = cache.absolute() / f"{stem}-{sharded.key[:_KEY_DIGITS]}"
    index = sharded.write(folder)
    screen.say(f"{source.path}: {index.documents:,} documents, {index.tokens:,} tokens, in {folder}")
    return folder
