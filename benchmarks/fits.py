"""Plan the peak memory of fine-tuning whole models on one GPU: the table of docs/memory.md.

    python -m benchmarks.fits [--models 'Llama*'] [--seq-length 8192]

Models are built on the meta device with their published sizes, converted to `current`, and planned with each layer
recomputed. No GPU is needed.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

import quantshard as qs
from benchmarks.convert_models import LLAMA_1B, LLAMA_3B, LLAMA_8B, QWEN_8B, config_sizes
from benchmarks.harness import GIB, add_sizes, make_parser, matches, table_head, table_row

QWEN_14B = config_sizes(5120, 17408, 40, 40, 8, 128, 151936)
QWEN_32B = config_sizes(5120, 25600, 64, 64, 8, 128, 151936)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("llama", LLAMA_1B),
    "Llama-3.2-3B": ("llama", LLAMA_3B),
    "Llama-3.1-8B": ("llama", LLAMA_8B),
    "Qwen3-8B": ("qwen3", QWEN_8B),
    "Qwen3-14B": ("qwen3", QWEN_14B),
    "Qwen3-32B": ("qwen3", QWEN_32B),
}
SETUPS: dict[str, dict[str, Any]] = {
    "float32 states": {},
    "`lean8`": {"preset": "lean8"},
    "`lean8`, gradients released": {"preset": "lean8", "release": True},
}
GPUS = (24, 48, 80, 141)
COLUMNS = ("model", *(f"{setup}, GiB" for setup in SETUPS), *(f"{size} GB" for size in GPUS))


def planned(name: str, seq_length: int, preset: str | None = None, release: bool = False, gpu: int = 0) -> Any:
    """Plan the memory of a step with one sequence. `gpu`: GB for which to look for the most sequences."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[name]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).bfloat16()
        qs.convert(model, "current")
        step = qs.TrainingStep(1, seq_length, checkpoint_activations=True, release_gradients=release)
        layers = list(model.model.layers)
        return qs.plan(model, {}, layers=layers, preset=preset, step=step, memory=gpu * 10**9 or None).memory


def row(name: str, seq_length: int) -> tuple[str, ...]:
    """A model's row: the peak of each setup, and how many sequences fit on each GPU with the last setup."""
    peaks = [f"{planned(name, seq_length, **setup).peak / GIB:.1f}" for setup in SETUPS.values()]
    counts = []
    for size in GPUS:
        text = planned(name, seq_length, **[*SETUPS.values()][-1], gpu=size).fits
        count = re.match(r"(?:at least )?(\d+) x", text)
        counts.append(count.group(1) if count else "-")
    return (name, *peaks, *counts)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="*")
    add_sizes(parser, {"seq_length": 8192})
    options = parser.parse_args()
    print(table_head(COLUMNS))
    for name in MODELS:
        if matches(name, options.models):
            print(table_row(row(name, options.seq_length)), flush=True)


if __name__ == "__main__":
    main()
