"""The table of docs/hardware.md, from the reports that `quantshard doctor --json > FILE` wrote on each machine.

    python benchmarks/hardware.py          write the table into docs/hardware.md

Reports are kept in benchmarks/doctor/, one a machine. Hardware that no report is of has a line that says "not run", and
what `hardware.NATIVE` would do there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from quantshard import recipe
from quantshard.gemm import predictions
from quantshard.tools.cli.doctor import OK, WRONG, recipe_names

ROOT = Path(__file__).parents[1]
REPORTS, PAGE = ROOT / "benchmarks" / "doctor", ROOT / "docs" / "hardware.md"

BEGIN, END = "<!-- made by benchmarks/hardware.py from benchmarks/doctor/ -->", "<!-- end of what is made -->"
COLUMNS = ("device", "software, date", "native GEMMs", "emulated", "self-test")


class Kind(NamedTuple):
    """Hardware that the table has a line for, with or without a report: words of its name, and its capability."""

    title: str
    words: tuple[str, ...]
    capability: tuple[int, int] | None


KINDS = (
    Kind("CPU", (), None),
    Kind("NVIDIA A100", ("A100",), (8, 0)),
    Kind("NVIDIA L4, L40S, RTX 40", ("L4", "L40S", "RTX 40"), (8, 9)),
    Kind("NVIDIA H100", ("H100",), (9, 0)),
    Kind("NVIDIA H200", ("H200",), (9, 0)),
    Kind("NVIDIA B200, GB200", ("B200",), (10, 0)),
    Kind("NVIDIA RTX 50, RTX PRO", ("RTX 50", "RTX PRO"), (12, 0)),
)


def reports(folder: Path = REPORTS) -> list[dict[str, Any]]:
    """In the order of the names of their files."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def is_of(report: dict[str, Any], kind: Kind) -> bool:
    device = report["device"]
    if kind.capability is None or device["type"] == "cpu":
        return kind.capability is None and device["type"] == "cpu"
    return any(word in device["name"] for word in kind.words)


def table(found: Iterable[dict[str, Any]]) -> str:
    """A line for each report, then one for each kind of hardware without any."""
    found = list(found)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    cells = [seen(report) for report in found]
    cells += [not_run(kind) for kind in KINDS if not any(is_of(report, kind) for report in found)]
    cells.append(["AMD and Intel GPUs, several hosts", "not run", *[""] * (len(COLUMNS) - 2)])
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def seen(report: dict[str, Any]) -> list[str]:
    """A line of the table."""
    device, paths = report["device"], report["recipes"]
    name = device["name"] if device["type"] == "cpu" else f"{device['count']} x {device['name']}"
    if "capability" in device:
        name += f" ({'.'.join(map(str, device['capability']))})"
    software = f"torch {report['torch']}" + (f", Triton {report['triton']}" if report["triton"] else "")
    states = [check["state"] for check in report["checks"]]
    wrong = [check["name"] for check in report["checks"] if check["state"] == WRONG]
    tested = f"{states.count(OK)} of {states.count(OK) + len(wrong)} right" if OK in states or wrong else "no kernels"
    tested += f"; WRONG: {', '.join(wrong)}" if wrong else ""
    return [
        name, f"{software}, {report['date']}", *(_with(paths, path) for path in ("native", "emulated")), tested
    ]  # fmt: skip


def _with(paths: dict[str, str], wanted: str) -> str:
    return ", ".join(name for name, path in paths.items() if path == wanted and name != "bf16") or "none"


def not_run(kind: Kind) -> list[str]:
    """A line that says what the table of scaled products would do, and which of them no hardware has confirmed."""
    native, unseen, emulated = [], [], []
    for name in recipe_names():
        cell = recipe.resolve(name).weight
        if cell is None:
            continue
        products = [p for p in predictions.products_of(cell) if kind.capability and p.is_of(kind.capability)]
        (emulated if not products else native if any(p.seen for p in products) else unseen).append(name)
    told = [", ".join(native)] if native else []
    if unseen:
        told.append(f"written and guarded, run on no hardware: {', '.join(unseen)}")
    capability = f" ({'.'.join(map(str, kind.capability))})" if kind.capability else ""
    return [
        kind.title + capability, "not run", "; ".join(told) or "none", ", ".join(emulated) or "none",
        *["not run"] * (len(COLUMNS) - 4),
    ]  # fmt: skip


def written(text: str, made: str) -> str:
    """PAGE's text with this table between the marks."""
    assert text.count(BEGIN) == text.count(END) == 1, "PAGE needs both marks once"
    return re.sub(f"(?s)({re.escape(BEGIN)}).*?({re.escape(END)})", lambda m: f"{m[1]}\n\n{made}\n\n{m[2]}", text)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(reports())), encoding="utf-8")


if __name__ == "__main__":
    main()
