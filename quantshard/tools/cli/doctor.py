"""`quantshard doctor`: describes this machine and tests its kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from quantshard.tools.doctor import diagnose
from quantshard.tools.terminal.screen import Screen, say_whole

WRONG = 1
"""Exit code if anything is wrong."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(json_: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False) -> None:
    """Describe this machine, and compare its kernels and GEMMs with the reference implementation for each recipe.

    On a GPU this compiles kernels, which takes a few minutes. The report has no names of hosts, users or files. The
    exit code is 1 if a line says WRONG.
    """
    with Screen(stderr=True, soft_wrap=True).status("testing") as status:
        report = diagnose(on_check=status.update)
    if json_:
        say_whole(report.to_json())
    else:
        Screen().print(report)
    if not report.ok:
        raise typer.Exit(WRONG)
