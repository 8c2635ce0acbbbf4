"""`quantshard debug`: ranks GEMM operands of a run by quantization error, and suggests layers to keep in BF16."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from quantshard.errors import ConfigurationError
from quantshard.tools.observe.table import FittedTable
from quantshard.tools.statistics.sensitivity import GemmError, RecipeSuggestion
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
    end_to_end: Annotated[
        bool,
        typer.Option("--end-to-end", help="also quantize one layer at a time, one pass each, and rank by the result"),
    ] = False,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="PLACE", help="folder or URL of the run's checkpoints")
    ] = None,
    remove: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="suggest the fewest layers that cause this share of the squared error"),
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="show every operand")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Compare a run's model with float32 on one batch, layer by layer, in one process.

    Each operand of each GEMM is quantized alone, and ranked by the error that it adds to the result. The last line says
    which layers stand out and should stay in BF16, as `train --recipe` takes it: those with errors above twice the
    median and above the median + 6 MAD.
    """
    if remove is not None and not 0 < remove < 1:
        raise ConfigurationError(f"--remove {remove}: give a share between 0 and 1")
    for path in data or ():
        inputs.existing(path, "text")
    debug_source = debugging.find(source, checkpoints)
    pair = ModelPair(debug_source, debugging.batch_of(debug_source, data or (), batch))
    report = pair.compare(end_to_end)
    suggestion = pair.suggestion(report, remove)
    if json_:
        say_whole(json.dumps(_as_json(debug_source, report, suggestion), indent=2))
        return
    _show(debug_source, report, suggestion, batch, wide)


def _show(source: DebugSource, report: DebugReport, suggestion: RecipeSuggestion, batch: int, wide: bool) -> None:
    screen = Screen(wide=wide)
    screen.lines(
        f"{source.checkpoint}: recipe {source.settings.recipe!r} beside float32, {batch} sequences of "
        f"{source.settings.seq_length}",
        f"loss {report.loss:.6f}, in float32 {report.exact_loss:.6f}; error of the gradient {report.gradient:.2%}",
    )
    if report.layers:
        screen.lines("", "quantized alone, by the error of the whole gradient:")
        rows = report.layers if wide else report.layers[:_SHOWN]
        columns: dict[str, Any] = {"layer": "left", "gradient": "right", "loss": "right"}
        screen.print(FittedTable(columns, [[row.layer, f"{row.gradient:.3%}", f"{row.loss:+.2e}"] for row in rows], []))
    screen.lines("", "operands quantized alone, by the error of their GEMM:")
    screen.print(_gemm_table(report.gemms if wide else report.gemms[:_SHOWN]))
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


def _gemm_table(rows: Sequence[GemmError]) -> FittedTable:
    columns: dict[str, Any] = dict.fromkeys(("weight", "GEMM", "operand"), "left")
    columns |= dict.fromkeys(("error", "Gaussian", "SQNR"), "right")
    cells = [
        [row.weight, row.gemm, row.operand, f"{row.error:.3%}", f"{row.gaussian:.3%}", _decibels(row.error)]
        for row in rows
    ]
    return FittedTable(columns, cells, [])


def _decibels(error: float) -> str:
    return f"{-20 * math.log10(error):.1f} dB" if 0 < error < math.inf else ""


def _as_json(source: DebugSource, report: DebugReport, suggestion: RecipeSuggestion) -> dict[str, Any]:
    return {
        "checkpoint": source.checkpoint,
        "recipe": source.settings.recipe,
        "loss": report.loss if math.isfinite(report.loss) else str(report.loss),
        "float32_loss": report.exact_loss,
        "gradient_error": report.gradient if math.isfinite(report.gradient) else str(report.gradient),
        "gemms": [asdict(entry) for entry in report.gemms],
        "layers": [asdict(entry) for entry in report.layers],
        "suggestion": {
            "keep": list(suggestion.kept),
            "removed": suggestion.removed,
            "layers": suggestion.layers,
            "recipe": suggestion.recipes,
        },
    }
