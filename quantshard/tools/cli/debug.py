"""`quantshard debug`: ranks GEMM operands of a run by quantization error, and suggests layers to keep in BF16."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer

from quantshard.tools.observe.table import plain_table
from quantshard.tools.statistics.sensitivity import RecipeSuggestion
from quantshard.tools.terminal import inputs
from quantshard.tools.terminal.screen import Screen, say_whole
from quantshard.tools.trainer import debugging
from quantshard.tools.trainer.debugging import DebugReport, DebugSource, ModelPair

_SHOWN = 20
"""Maximum number of table rows without --wide."""


def debug(
    source: Annotated[str, typer.Argument(metavar="X", help="a run, or a checkpoint of one")],
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="PATH", help="text to use instead of the run's; repeatable")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=1 << 16, metavar="N", help="sequences in the batch")] = 4,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="PLACE", help="folder or URL of the run's checkpoints")
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="show every operand")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Compare a run's model with float32 on one batch, layer by layer, in one process.

    Each operand of each GEMM is quantized alone, and ranked by the error that it adds to the result. The last line says
    which layers stand out and should stay in BF16, as `train --recipe` takes it: those with errors above twice the
    median and above the median + 6 MAD.
    """
    for path in data or ():
        inputs.existing(path, "text")
    debug_source = debugging.find(source, checkpoints)
    pair = ModelPair(debug_source, debugging.batch_of(debug_source, data or (), batch))
    report = pair.compare()
    suggestion = pair.suggestion(report)
    if json_:
        result = {"checkpoint": debug_source.checkpoint, "recipe": debug_source.settings.recipe, **asdict(report)}
        say_whole(json.dumps(result | {"suggestion": asdict(suggestion)}, indent=2))
        return
    _show(debug_source, report, suggestion, batch, wide)


def _show(source: DebugSource, report: DebugReport, suggestion: RecipeSuggestion, batch: int, wide: bool) -> None:
    screen = Screen(wide=wide)
    screen.lines(
        f"{source.checkpoint}: recipe {source.settings.recipe!r} beside float32, {batch} sequences of "
        f"{source.settings.seq_length}",
        f"loss {report.loss:.6f}, in float32 {report.exact_loss:.6f}; error of the gradient {report.gradient:.2%}",
    )
    screen.lines("", "operands quantized alone, by the error of their GEMM:")
    cells = (
        [row.weight, row.gemm, row.operand, f"{row.error:.3%}", f"{row.gaussian:.3%}", _decibels(row.error)]
        for row in (report.gemms if wide else report.gemms[:_SHOWN])
    )
    screen.print(plain_table(("weight", "GEMM", "operand", "error", "Gaussian", "SQNR"), cells, texts=3, edge=False))
    if not wide and len(report.gemms) > _SHOWN:
        screen.lines(f"and {len(report.gemms) - _SHOWN} more: --wide or --json has them")
    screen.lines("Gaussian: the error of independent normal values in the same format")
    if not suggestion.kept:
        screen.lines(
            f"No layer stands out: the largest error is {suggestion.ratio:.2g} times the median of {suggestion.layers} "
            "layers. Keep the recipe."
        )
        return
    screen.lines(
        f"{len(suggestion.kept)} of {suggestion.layers} layers have {suggestion.removed:.0%} of the squared errors. To "
        "keep them in BF16:",
        "",
    )
    screen.print(f"--recipe '{suggestion.recipes}'", soft_wrap=True)


def _decibels(error: float) -> str:
    return f"{-20 * math.log10(error):.1f} dB" if 0 < error < math.inf else ""
