"""What a run's data settings come to: its corpus, with tokens made of texts where a run cannot read them as they are.

Order is a function of seed and step, so a run reads windows at any place: from text files whose bytes are the tokens,
or from token shards. What is neither is made into shards here, before a run begins, in a folder whose name ends in the
digest of what they follow from; the settings that the run records name that folder instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantshard.errors import ConfigurationError
from quantshard.tools.terminal import screen
from quantshard.tools.trainer.data.collecting import collect
from quantshard.tools.trainer.data.documents import Corpus
from quantshard.tools.trainer.data.finding import DATASET, JSONL, PARQUET, RAW, SHARDS, TEXT, DataSource, find
from quantshard.tools.trainer.data.shards import ShardIndex, read_index, tokenizer_copy
from quantshard.tools.trainer.data.texts import TextOptions
from quantshard.tools.trainer.data.tokenization import ShardedSource
from quantshard.tools.trainer.data.tokenizer import BYTES_DIGEST, Tokenizer, end_text, load_tokenizer
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.schema import shown_value

_KEY_DIGITS = 16
_MULTIPLE = 128
"""Of the tokens of a model that is built here. cuBLAS multiplies by a head of 50257 rows in kernels that read one
element at a time: at 125 TFLOP/s on an H200, whose large BF16 products run at 790 (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class TokenFacts:
    """What is known of the tokens of a run's data.

    `tokenizer`: what makes them; None where nobody said. `path`: where its files are; "" of bytes. `digest`: of it, as
    the corpus says it.
    """

    tokenizer: Tokenizer | None
    path: str
    digest: str
    vocabulary: int
    end_of_document: int


class Preparation:
    """The data of a new run.

    `settings`: with what follows from the tokenizer, before tokens are made. `described`: a corpus without documents.

    Raises:
        ConfigurationError: data are missing, or do not go with the tokenizer or each other.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._sources = find(settings.data, settings.data_format)
        self._heldout = find(settings.heldout_data, settings.data_format) if settings.heldout_data else []
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

    def unused(self) -> list[str]:
        """Lines on settings of reading that nothing of these data asks for. No errors: a run's config.toml names the
        tokens that were made of its texts, beside the settings by which they were read."""
        settings, kinds = self.settings, {source.kind for source in [*self._sources, *self._heldout]}
        made = kinds - {RAW, SHARDS} - (set() if self._facts.path else {TEXT})
        needed = {
            "text_field": ("JSON lines, parquet or a dataset", kinds & {JSONL, PARQUET, DATASET}),
            "data_split": ("a dataset", kinds & {DATASET}),
            "token_cache": ("data that are made into tokens", made),
        }
        return [
            f"WARNING: {name} = {shown_value(getattr(settings, name))} does nothing: it is about {what}, and the data "
            f"are {' and '.join(sorted(kinds))}"
            for name, (what, found) in needed.items()
            if not found and getattr(settings, name) != getattr(TrainSettings, name)
        ]

    def collected(self, folder: Path) -> tuple[TrainSettings, Corpus]:
        """The settings that the run records, and its corpus. `folder`: for tokens, if the settings name none.

        Raises:
            ConfigurationError: data cannot be read, or hold what is no token.
        """
        settings, facts = self.settings, self._facts
        cache = Path(settings.token_cache) if settings.token_cache else folder
        readable = [_readable(source, facts, settings, cache) for source in self._sources]
        is_same = readable == [source.path for source in self._sources]
        data = settings.data if is_same else tuple(map(str, readable))
        heldout = tuple(str(_readable(source, facts, settings, cache)) for source in self._heldout)
        data_format = settings.data_format if is_same else "auto"  # for what became shards is no text any more
        corpus = collect(data, heldout, like=self.described, data_format=data_format)
        return replace(settings, data=data, heldout_data=heldout, data_format=data_format), corpus


def _padded(facts: TokenFacts, settings: TrainSettings) -> int:
    """The tokens of a model that is built for a tokenizer. Bytes stay 257, as few as they are; weights that are there
    already have the rows that they have."""
    is_of_tokens = facts.tokenizer is None or bool(facts.digest)
    pads = is_of_tokens and settings.is_by_sizes and not settings.init_from
    return rounded_up(facts.vocabulary) if pads else facts.vocabulary


def rounded_up(vocabulary: int) -> int:
    """The rows of a table of tokens that GPUs multiply by fast."""
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
    """The tokenizer that the settings name, or that shards were made with, or none where nobody said, or bytes."""
    if settings.end_of_document and not settings.tokenizer:
        load_tokenizer("", settings.end_of_document)  # says what is wrong with that
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
    """Where a run reads a source: where it is, or the shards that are made of it."""
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
