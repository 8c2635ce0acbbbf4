"""Write the table of docs/hardware.md from the reports of `quantshard doctor --json > FILE` in benchmarks/doctor/.

    python benchmarks/hardware.py

The table has one row per report. Hardware without a report has a row marked "not run", with the
paths that quantshard would choose there, according to its table of native GEMMs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import table_head, table_row
from quantshard.gemm import predictions
from quantshard.recipe import resolve
from quantshard.tools.cli.doctor import OK, WRONG, recipe_names

ROOT = Path(__file__).parents[1]
REPORTS, PAGE = ROOT / "benchmarks" / "doctor", ROOT / "docs" / "hardware.md"

BEGIN, END = "<!-- made by benchmarks/hardware.py from benchmarks/doctor/ -->", "<!-- end of what is made -->"
COLUMNS = ("device", "software, date", "native GEMMs", "emulated", "self-test")
NOT_RUN = "not run"


class Hardware(NamedTuple):
    """Hardware with a row in the table: title, words of its device names, and compute capability (None: a CPU)."""

    title: str
    words: tuple[str, ...]
    capability: tuple[int, int] | None


HARDWARE = (
    Hardware("CPU", (), None),
    Hardware("NVIDIA A100", ("A100",), (8, 0)),
    Hardware("NVIDIA L4, L40S, RTX 40", ("L4", "L40S", "RTX 40"), (8, 9)),
    Hardware("NVIDIA H100", ("H100",), (9, 0)),
    Hardware("NVIDIA H200", ("H200",), (9, 0)),
    Hardware("NVIDIA B200, GB200", ("B200",), (10, 0)),
    Hardware("NVIDIA RTX 50, RTX PRO", ("RTX 50", "RTX PRO"), (12, 0)),
)


def reports(folder: Path = REPORTS) -> list[dict[str, Any]]:
    """Read all reports, in the order of their file names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def is_report_of(report: dict[str, Any], hardware: Hardware) -> bool:
    device = report["device"]
    if hardware.capability is None or device["type"] == "cpu":
        return hardware.capability is None and device["type"] == "cpu"
    return any(word in device["name"] for word in hardware.words)


def table(doctor_reports: Iterable[dict[str, Any]]) -> str:
    """Format a row for each report, then one for each kind of hardware without a report."""
    doctor_reports = list(doctor_reports)
    rows = [report_row(report) for report in doctor_reports]
    rows += [
        untested_row(hardware)
        for hardware in HARDWARE
        if not any(is_report_of(report, hardware) for report in doctor_reports)
    ]
    rows.append(["AMD and Intel GPUs, several hosts", NOT_RUN, *[""] * (len(COLUMNS) - 2)])
    return "\n".join([table_head(COLUMNS), *map(table_row, rows)])


def report_row(report: dict[str, Any]) -> list[str]:
    device, gemms = report["device"], report["recipes"]
    name = device["name"] if device["type"] == "cpu" else f"{device['count']} x {device['name']}"
    if "capability" in device:
        name += f" ({'.'.join(map(str, device['capability']))})"
    software = f"torch {report['torch']}" + (f", Triton {report['triton']}" if report["triton"] else "")
    states = [check["state"] for check in report["checks"]]
    wrong = [check["name"] for check in report["checks"] if check["state"] == WRONG]
    result = f"{states.count(OK)} of {states.count(OK) + len(wrong)} right" if OK in states or wrong else "no kernels"
    result += f"; WRONG: {', '.join(wrong)}" if wrong else ""
    native, emulated = (
        ", ".join(name for name, path in gemms.items() if path == kind and predictions.quantized_gemms(resolve(name)))
        or "none"
        for kind in ("native", "emulated")
    )
    return [name, f"{software}, {report['date']}", native, emulated, result]


def untested_row(hardware: Hardware) -> list[str]:
    """List the recipes with native GEMMs on this hardware, marking GEMMs that have never run anywhere."""
    native, unconfirmed, emulated = [], [], []
    for name in recipe_names():
        cell = resolve(name).weight
        if cell is None or not predictions.quantized_gemms(resolve(name)):
            continue
        gemms = [p for p in predictions.products_of(cell) if hardware.capability and p.is_of(hardware.capability)]
        (emulated if not gemms else native if any(p.seen for p in gemms) else unconfirmed).append(name)
    parts = [", ".join(native)] if native else []
    if unconfirmed:
        parts.append(f"written and guarded, run on no hardware: {', '.join(unconfirmed)}")
    capability = f" ({'.'.join(map(str, hardware.capability))})" if hardware.capability else ""
    title = hardware.title + capability
    return [title, NOT_RUN, "; ".join(parts) or "none", ", ".join(emulated) or "none", NOT_RUN]


def insert_table(text: str, markdown: str) -> str:
    """Replace the part of a page between the two marks."""
    assert text.count(BEGIN) == text.count(END) == 1, "the page needs both marks once"
    return re.sub(f"(?s)({re.escape(BEGIN)}).*?({re.escape(END)})", lambda m: f"{m[1]}\n\n{markdown}\n\n{m[2]}", text)


def main() -> None:
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8"), table(reports())), encoding="utf-8")


if __name__ == "__main__":
    main()
