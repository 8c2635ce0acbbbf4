"""`quantshard verify`: checks the integrity of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from quantshard.checkpoints.inspect.verify import Verification
from quantshard.checkpoints.inspect.verify import verify as verify_checkpoint
from quantshard.readable import human_bytes
from quantshard.tools.terminal import inputs
from quantshard.tools.terminal.progress import transfer_bar
from quantshard.tools.terminal.screen import say, say_whole

WRONG = 1
"""Exit code if anything is wrong."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("verify", no_args_is_help=True)(verify)


def verify(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
    ],
    json_: Annotated[bool, typer.Option("--json", help="what was found, as JSON")] = False,
) -> None:
    """Check that a checkpoint is whole: its files' checksums, its tensors' pieces, its weights' components.

    It may come from anybody: nothing in it is run. Exit code 0: nothing is wrong; 1: something is, a line each.
    """
    inputs.existing(checkpoint, "a checkpoint")
    with transfer_bar("reading"):
        result = verify_checkpoint(checkpoint)
    if json_:
        say_whole(json.dumps({**asdict(result), "ok": result.ok}, indent=1))
    else:
        say(*verification_lines(result))
    if not result.ok:
        raise typer.Exit(WRONG)


def verification_lines(found: Verification) -> list[str]:
    """Format a verification as lines of text."""
    lines = [f"wrong: {' '.join(line.split())}" for line in found.problems]
    if not found.checksums and found.tensors:
        lines.append("there is no manifest, so files were not compared with checksums; completeness was checked")
    if not found.tensors and not found.others:  # there is no readable checkpoint
        return lines or [f"not whole: {found.path} has no entries"]
    size = f"{found.tensors} tensors ({found.quantized} quantized), {found.others} other entries"
    count = len(found.problems)
    state = f"not whole: {count} problem{'s' if count > 1 else ''}" if count else "whole"
    return [*lines, f"{state}: {found.path}, {size}, {human_bytes(found.bytes)}"]
