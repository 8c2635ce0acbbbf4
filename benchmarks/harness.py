"""Functions shared by the benchmarks: options, headings, Markdown tables, timing, and torchao's conversion."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

GIB = 2.0**30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Default device of the benchmarks."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser with a module's docstring as its --help."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_sizes(parser: argparse.ArgumentParser, sizes: dict[str, int]) -> None:
    """Add an integer option for each name, such as `--kv-heads` for `kv_heads`, with its default."""
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def matches(name: str, patterns: str) -> bool:
    """Whether a name matches one of several shell patterns, separated by commas."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


# Output ---------------------------------------------------------------------------------------------------------------


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def heading(device: str, *versions: str) -> str:
    """Format a Markdown heading with the device, the torch version, other versions, and the date."""
    parts = [device_name(device), f"torch {torch.__version__}", *versions, str(datetime.date.today())]
    return f"## {', '.join(parts)}"


def table_head(columns: Iterable[str]) -> str:
    """Format the first two lines of a Markdown table."""
    names = list(columns)
    return f"{table_row(names)}\n|{'---|' * len(names)}"


def table_row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def spread(times: list[float], digits: int) -> str:
    """Format times as `median (min, max)`."""
    middle, low, high = (f"{f(times):.{digits}f}" for f in (statistics.median, min, max))
    return f"{middle} ({low}, {high})"


def append_json(file: Path, row: dict[str, Any]) -> None:
    """Append a row to a JSON Lines file, on a new line if an earlier write was cut off."""
    is_cut_off = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" * is_cut_off + json.dumps(row) + "\n")


# Timing ---------------------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated_bytes(device: str) -> int:
    """Return the GPU memory allocated by tensors, and 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def milliseconds(call: Callable[[], Any], repeats: int, device: str, warmup: int = 3) -> list[float]:
    """Time `repeats` calls, after `warmup` untimed ones. On a GPU the times are from CUDA events."""
    for _ in range(warmup):
        call()
    if device != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return [start_event.elapsed_time(end_event) for start_event, end_event in events]


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """Record a call as a CUDA graph. The result replays the graph and returns the tensors of the recorded call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


# torchao --------------------------------------------------------------------------------------------------------------


def to_float8(
    model: nn.Module, recipe: str, device: str, skip: str = "", enable_fsdp_float8_all_gather: bool = False
) -> None:
    """Convert linear layers in place with torchao's `convert_to_float8_training`.

    Args:
        recipe: torchao's name of a recipe, such as "tensorwise".
        skip: layers with this word in their names are not converted.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device == "cpu",
        enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather,
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: not skip or skip not in name)
