"""`quantshard tokenize`: converts texts to token shards, which several runs can share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantshard.errors import ConfigurationError
from quantshard.tools.cli.exchange import size
from quantshard.tools.terminal.screen import say
from quantshard.tools.trainer.data.shards import ShardedSource
from quantshard.tools.trainer.data.sources import RAW, SHARDS, TextOptions, find, joined
from quantshard.tools.trainer.data.tokenizer import load_tokenizer
from quantshard.tools.trainer.settings.config import KINDS
from quantshard.tools.trainer.settings.values import check_value


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("tokenize", no_args_is_help=True)(tokenize)


def tokenize(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="files or folders, as for train --data")],
    out: Annotated[
        Path, typer.Option(help="folder for the shards: new, or from an interrupted run of the same command")
    ],
    tokenizer: Annotated[str, typer.Option(metavar="DIR", help="tokenizer.json or its folder. Default: bytes")] = "",
    end_of_document: Annotated[
        str, typer.Option(metavar="TOKEN", help="token at the end of a document. Default: the tokenizer's eos_token")
    ] = "",
    text_field: Annotated[str, typer.Option(metavar="NAME", help="key or column with the text")] = "text",
    data_split: Annotated[str, typer.Option(metavar="NAME", help="split to use from a dataset folder")] = "train",
    data_format: Annotated[str, typer.Option(help="auto: by file name; text: read every file as text")] = "auto",
    shard_size: Annotated[str, typer.Option(help="approximate characters per shard")] = "100MB",
) -> None:
    """Tokenize texts into shards on all CPUs, for `quantshard train --data OUT`.

    A stopped call is gone on with by the same command.
    """
    text_options = {"text_field": text_field, "data_split": data_split, "data_format": data_format}
    for name, value in text_options.items():
        check_value(name, value, KINDS[name])
    sources = find(paths, data_format, data_split)
    loaded_tokenizer = load_tokenizer(tokenizer, end_of_document)
    source = joined(sources)
    if source.kind in (RAW, SHARDS):
        raise ConfigurationError(f"{source.path} holds tokens already; name it with quantshard train --data")
    sharded = ShardedSource(
        source, loaded_tokenizer, tokenizer, TextOptions(text_field, data_split), size(shard_size, "--shard-size")
    )
    index = sharded.write(out.absolute())
    say(
        f"wrote {out}: {index.documents:,} documents, {index.tokens:,} tokens of {index.vocabulary:,} in "
        f"{len(index.shards)} shards of {index.dtype}; train on them with quantshard train --data {out}"
    )
