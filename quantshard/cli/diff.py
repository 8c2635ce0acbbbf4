"""`quantshard diff`: compare two checkpoints bit by bit."""

from __future__ import annotations

from typing import Annotated

import typer

from quantshard.checkpoints.inspect.compare import Comparison, compare
from quantshard.errors import CheckpointError
from quantshard.terminal.screen import complain, say

UNEQUAL, UNREADABLE = 1, 2
"""Exit codes, as those of the diff that compares texts."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("diff", no_args_is_help=True)(diff)


def diff(
    checkpoint_a: Annotated[
        str, typer.Argument(metavar="CKPT_A", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
    ],
    checkpoint_b: Annotated[str, typer.Argument(metavar="CKPT_B", help="the one to compare it with")],
) -> None:
    """Compare two checkpoints bit by bit, whatever processes and meshes wrote them.

    Names the first difference and counts them by entry. Exit code 0: equal; 1: different; 2: one cannot be read.
    """
    try:
        comparison = compare(checkpoint_a, checkpoint_b)
    except CheckpointError as error:
        complain(str(error))
        raise typer.Exit(UNREADABLE) from None
    say(*comparison_lines(comparison))
    if not comparison.equal:
        raise typer.Exit(UNEQUAL)


def comparison_lines(comparison: Comparison) -> list[str]:
    """What a comparison found, as lines."""
    also = f", {comparison.others} other entries" if comparison.others else ""
    size = f"{comparison.tensors} tensors, {comparison.bytes} bytes{also}"
    if comparison.first is None:
        return [f"equal: {size}"]
    lines = [f"first difference: {comparison.first}", ""]
    lines.append(f"different: {len(comparison.differences)} entries (both have {size})")
    for found in comparison.differences:
        lines.append(f"  {found.key}: {f'{found.count} of {found.elements} elements' if found.count else found.what}")
    return lines
