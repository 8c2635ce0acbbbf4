"""Folders of runs as `quantshard train` leaves them, of any number of steps, without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CONFIG = (
    'steps = {steps}\nglobal_batch = 16\nseq_length = 128\nlr = {lr}\nrecipe = "{recipe}"\n\n[launch]\nprocesses = 2\n'
)
NAMES = ("layers.0.proj.weight", "layers.1.proj.weight")


def entry(step: int, **more: Any) -> dict[str, Any]:
    """A record of `metrics.jsonl`; every tenth step has a held-out loss."""
    found = {"step": step, "loss": 2 + 3 * math.exp(-step / 100)}
    if step % 10 == 0:
        found["heldout_loss"] = 2.5 + 1 / step
    found |= {"lr": 1e-3, "grad_norm": 1.0, "skipped_steps": 0, "tokens_per_s": 2048.0, "memory_bytes": 1 << 30}
    return found | more


def sampled(step: int, alarms: tuple[dict[str, Any], ...] = (), **more: Any) -> dict[str, Any]:
    """A record of `statistics.jsonl`."""
    rows = [
        {"name": name, "role": role, "amax": 1.0 + step, "sqnr_db": 30.0 - step, **more}
        for name in NAMES
        for role in ("weight", "input")
    ]
    return {"step": step, "rows": rows, "alarms": list(alarms)}


def write(file: Path, records: list[dict[str, Any]], mode: str = "w") -> None:
    """Write records as lines, or with mode "a" add them."""
    with open(file, mode, encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def made_run(folder: Path, steps: int = 40, lr: float = 1e-3, recipe: str = "mxfp8", planned: int = 0) -> Path:
    """The folder of a run that was resumed after half of its steps, with one checkpoint that is whole and one not."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(steps=planned or steps, lr=lr, recipe=recipe))
    write(folder / "metrics.jsonl", [entry(step) for step in range(1, steps + 1)])
    environment = {"device": "CPU x86_64", "torch": "2.13.0", "variables": {"NCCL_ALGO": "Ring"}}
    starts = [
        {"step": step, "processes": 2, "mesh": "dp_shard=2", "environment": environment} for step in (0, steps // 2)
    ]
    write(folder / "starts.jsonl", starts)
    alarm = {"kind": "saturation", "name": NAMES[0], "value": 0.2, "text": "a fifth of the codes is the largest one"}
    write(folder / "statistics.jsonl", [sampled(step, (alarm,) if step == 3 else ()) for step in range(1, steps + 1)])
    row = {"shape": [64, 64], "format": f"{recipe}_32x32", "code_bytes": 4096, "scale_bytes": 4, "gemm": "emulated",
           "optimizer": {"exp_avg": "fp32"}, "fallbacks": []}  # fmt: skip
    totals = {"code_bytes": 8192, "scale_bytes": 8, "optimizer_bytes": 98304}
    (folder / "parameters.json").write_text(
        json.dumps({"rows": [{"name": name, **row} for name in NAMES], "totals": totals})
    )
    whole = folder / "checkpoints" / "step-000020"
    whole.mkdir(parents=True)
    (folder / "checkpoints" / "step-000040").mkdir()
    files = {"__0_0.distcp": {"bytes": 4096, "xxh3_128": "0" * 32}}
    manifest = {
        "quantshard": 1,
        "files": files,
        "world_size": 2,
        "torch": "2.13.0",
        "saved_at": "2026-11-24T04:00:00+00:00",
    }
    (whole / "manifest.json").write_text(json.dumps(manifest))
    (whole / "__0_0.distcp").write_bytes(bytes(4096))
    return folder
