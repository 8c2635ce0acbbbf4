"""Report of `quantshard doctor`: this machine, the self-test and the probes, as tables and as JSON.

The report contains no host name, no user name and no path.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from quantshard import kernels, recipe
from quantshard.formats import FORMATS, Orientation
from quantshard.gemm import hardware
from quantshard.readable import human_bytes
from quantshard.recipe import QuantSpec
from quantshard.tools.doctor import cases, checks, probes
from quantshard.tools.doctor.results import NOT_HERE, OK, WRONG, Result, Watch
from quantshard.version import __version__

VERSION = 1
"""Version of the JSON keys; it increases if a key changes its meaning."""

_TRITON = ("triton", "pytorch-triton", "triton-windows")
_STYLES = {OK: "green", WRONG: "bold red", NOT_HERE: "dim"}


@dataclass(frozen=True)
class MachineReport:
    """The result of `diagnose`; rich prints it as tables.

    `about`: the keys of the JSON before "checks". `probes`: None if the probes were skipped.
    """

    about: dict[str, Any]
    checks: tuple[Result, ...]
    probes: tuple[Result, ...] | None

    @property
    def ok(self) -> bool:
        """Whether no check or probe is `WRONG`."""
        return all(result.state != WRONG for result in (*self.checks, *(self.probes or ())))

    def to_json(self) -> str:
        """Return the whole report; docs/doctor.md documents the keys."""
        probe_results = None if self.probes is None else [asdict(result) for result in self.probes]
        check_results = [{key: asdict(result)[key] for key in ("name", "state", "reason")} for result in self.checks]
        return json.dumps({**self.about, "checks": check_results, "probes": probe_results, "ok": self.ok}, indent=1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _render(self)


def is_report(head: bytes) -> bool:
    """Whether a file with this beginning is empty or a JSON report."""
    return not head or re.match(rb'\{\s*"version": \d+,\s*"quantshard": "', head) is not None


def diagnose(folder: Path | None, watch: Watch | None = None, device: torch.device | None = None) -> MachineReport:
    """Describe this machine, run the self-test and, unless `folder` is None, the probes.

    Args:
        folder: folder on the disk to probe.
        watch: receives progress.
        device: default: the first GPU, or the CPU without a GPU.
    """
    device = device or (torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    about = describe_machine(device)
    check_results = tuple(checks.run_checks(device, watch))
    return MachineReport(
        about, check_results, None if folder is None else tuple(probes.run_probes(device, folder, watch))
    )


# ------------------------------------------------------------------------------------------------------------- machine


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the keys of the JSON that need no measurement."""
    no_kernels_reason = checks.why_no_kernels(device)
    return {
        "version": VERSION,
        "quantshard": __version__,
        "date": datetime.date.today().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version(*_TRITON),
        "device": _device(device),
        "collectives": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": _nccl(),
        },
        "kernels": {
            "run": "no" if no_kernels_reason else "interpreted" if kernels.INTERPRETED else "compiled",
            "reason": no_kernels_reason,
        },
        "formats": _formats(device),
        "recipes": {name: hardware.gemm_path(recipe.resolve(name).weight, device)[0] for name in cases.recipe_names()},
    }


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": _cpu_name(), "count": 1, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def _nccl() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _formats(device: torch.device) -> list[dict[str, str]]:
    """GEMM path and reason for each format that can be a GEMM operand."""
    rows = []
    for fmt in FORMATS.values():
        if fmt.copies[Orientation.ROWWISE].codes.encoding.bits <= 8:
            path, reason = hardware.gemm_path(QuantSpec(fmt), device)
            rows.append({"name": fmt.name, "gemm": path, "reason": reason})
    return rows


# ------------------------------------------------------------------------------------------------------------- printing


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _render(report: MachineReport) -> Group:
    parts: list[Any] = [_machine(report.about), _paths(report.about)]
    parts.append(_lines("self-test", report.checks))
    if report.probes is not None:
        parts.append(_speeds(report.probes))
    count = {state: sum(result.state == state for result in report.checks) for state in _STYLES}
    text = ", ".join(f"{number} {state}" for state, number in count.items())
    if not (count[OK] or count[WRONG]):
        text += "; nothing was tested, since " + (
            "there is no GPU here" if report.about["device"]["type"] == "cpu" else "no kernel runs here"
        )
    parts.append(Text(f"self-test: {text}", style=_STYLES[OK if report.ok else WRONG]))
    return Group(*parts)


def _machine(about: dict[str, Any]) -> Table:
    table, device, collectives = _table("this machine", ""), about["device"], about["collectives"]
    name = f"{device['count']} x {device['name']}" if device["type"] == "cuda" else device["name"]
    if "capability" in device:
        name += (
            f", compute capability {'.'.join(map(str, device['capability']))}, {human_bytes(device['memory_bytes'])}"
        )
    nccl = f"NCCL {collectives['nccl']}" if collectives["nccl"] else "no NCCL"
    rows = {
        "device": name,
        "system": about["system"],
        "Python": about["python"],
        "torch": f"{about['torch']} ({'CUDA ' + about['cuda'] if about['cuda'] else 'without CUDA'})",
        "Triton": about["triton"] or "not installed",
        "kernels": about["kernels"]["reason"] or about["kernels"]["run"],
        "collectives": f"{'gloo' if collectives['gloo'] else 'no gloo'}, {nccl}",
        "quantshard": about["quantshard"],
    }
    for key, value in rows.items():
        table.add_row(key, Text(value))
    return table


def _paths(about: dict[str, Any]) -> Table:
    table = _table("format", "GEMM", "why")
    for row in about["formats"]:
        table.add_row(row["name"], row["gemm"], Text(row["reason"]))
    return table


def _lines(title: str, results: tuple[Result, ...]) -> Table:
    """Table with one line per result; results that are `NOT_HERE` for the same reason share a line."""
    table, absent = _table(title, "", "reason"), dict[str, list[str]]()
    for result in results:
        if result.state == NOT_HERE:
            absent.setdefault(result.reason, []).append(result.name)
        else:
            table.add_row(result.name, Text(result.state, style=_STYLES[result.state]), Text(result.reason))
    for reason, names in absent.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        table.add_row(names[0] + more, Text(NOT_HERE, style=_STYLES[NOT_HERE]), Text(reason))
    return table


def _speeds(results: tuple[Result, ...]) -> Table:
    table = _table("probe", "", "")
    table.columns[1].justify = "right"
    for result in results:
        text = result.state if result.value is None else f"{result.value:.4g}"
        style = _STYLES[result.state] if result.value is None else ""
        table.add_row(result.name, Text(text, style=style), Text(result.reason or result.unit))
    return table
