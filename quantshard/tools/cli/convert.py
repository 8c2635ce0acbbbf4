"""`quantshard convert-te`: converts a checkpoint of a TransformerEngine model to quantshard's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantshard.interop import transformer_engine
from quantshard.tools.terminal import inputs
from quantshard.tools.terminal.screen import say


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("convert-te", no_args_is_help=True)(convert_te)


def convert_te(
    source: Annotated[
        Path, typer.Argument(metavar="CKPT", help="of torch.distributed.checkpoint, with TE 2.17 or later")
    ],
    like: Annotated[Path, typer.Option(metavar="CKPT", help="of the model that is to go on, saved when it is new")],
    out: Annotated[Path, typer.Option(help="the checkpoint to write, a folder that does not exist")],
    model: Annotated[str, typer.Option(help="where the model's state dict is; '': at the top")] = "model",
    optimizer: Annotated[str, typer.Option(help="where the optimizer's is")] = "optimizer",
    lossy: Annotated[
        bool, typer.Option("--lossy", help="quantize anew or round what does not go over exactly")
    ] = False,
) -> None:
    """Write a TransformerEngine checkpoint (model, FusedAdam) as one of ours, and list what is not exact."""
    for checkpoint in (source, like):
        inputs.existing(checkpoint, "a checkpoint")
    result = transformer_engine.convert(source, like, out, model=model, optimizer=optimizer, lossy=lossy)
    say(*result.lines())
    say(f"wrote {out}")
