"""List what a transformer layer saves for backward, and the peak memory of forward and backward.

    python benchmarks/memory.py [--recipes delayed,current,block] [--layers 4] [--hidden 256] [--ffn 896] [--heads 8]
        [--kv-heads 2] [--tokens 1024] [--capability 9.0]
    python benchmarks/memory.py --against

Needs neither a GPU nor memory: modules run on the meta device as on a GPU of the compute capability
(`quantshard.tools.planning`), which decides which GEMMs are emulated. Sizes are bytes of storages per token, without
weights, weight gradients, and the input of the first layer. Layers are the blocks of block_step.py, on the code path
of large layers (`operands.LARGE`). "recomputed" is recompute_activation=True, "stored" activation_storage="fp8".

With --against: compares `quantshard.plan` with the peaks that RESULTS.md has of the same steps on GPUs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import quantshard as qs
from benchmarks import convert_models
from benchmarks.block_step import Ours, Shape
from benchmarks.harness import GIB, add_sizes, make_parser, table_head, table_row
from benchmarks.train_step import SHAPES
from benchmarks.training_arms import ARMS, STATES, Arm
from quantshard.gemm import operands
from quantshard.gemm.predictions import described_gpu
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.observe.costs import StepMemory
from quantshard.tools.planning.timeline import MemoryTimeline, gpu_attention

SMALL = Shape(layers=4, hidden=256, ffn=896, heads=8, kv_heads=2, batch=1, tokens=1024, device="meta")
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
SMALLEST = 1024
"""Smaller storages, such as the scales and amaxes of whole tensors, are not counted."""
HOPPER = (9, 0)


class SavedStorage(NamedTuple):
    """A storage that backward reads: the library function that saved it, its dtype, and bytes per token."""

    function: str
    dtype: torch.dtype
    bytes: float


class Peak(NamedTuple):
    """Bytes per token of all layers: after forward, and at the peak of backward."""

    after_forward: float
    in_backward: float


@contextmanager
def recording(timeline: MemoryTimeline, recipe: str, capability: tuple[int, int]) -> Iterator[None]:
    """Run layers as on a GPU, with a recipe."""
    with described_gpu(capability), gpu_attention(), timeline.recorded(), qs.autocast(recipe=recipe):
        yield


@mock.patch.object(operands, "LARGE", 0)
def saved_storages(
    recipe: str,
    recomputes: bool = False,
    stores: bool = False,
    shape: Shape = SMALL,
    capability: tuple[int, int] = HOPPER,
) -> list[SavedStorage]:
    """List what the second of two layers saves, in order, except scalars and the rotary angles."""
    model, x, _ = _make_model(recipe, recomputes, stores, dataclasses.replace(shape, layers=2))
    storages: dict[int, SavedStorage] = {}
    alive: list[Any] = []  # keeps ids unique

    def pack(tensor: Tensor) -> Tensor:
        storage = None if isinstance(tensor, QuantizedTensor) else tensor.untyped_storage()
        if storage is not None and storage.nbytes() > SMALLEST and id(storage) not in storages:
            size = storage.nbytes() / (shape.batch * shape.tokens)
            storages[id(storage)] = SavedStorage(_saving_function(), tensor.dtype, size)
            alive.append(storage)
        return tensor

    first, second = model.layers
    with recording(MemoryTimeline(), recipe, capability):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = first(x, rotary_pos_emb=model.angles)
            count = len(storages)
            second(y, rotary_pos_emb=model.angles)
    return list(storages.values())[count:]


def _saving_function() -> str:
    """Return the name of the library's function that called the saving operation."""
    frame: Any = sys._getframe(2)
    while "quantshard/modules" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name


@mock.patch.object(operands, "LARGE", 0)
def peak(
    recipe: str,
    recomputes: bool = False,
    stores: bool = False,
    shape: Shape = SMALL,
    capability: tuple[int, int] = HOPPER,
) -> Peak:
    """Return the activation memory of one step."""
    model, x, dy = _make_model(recipe, recomputes, stores, shape)
    weights = [part for p in model.parameters() for part in _components(p)]
    timeline = MemoryTimeline([x, dy, *weights, *model.buffers()])
    with recording(timeline, recipe, capability):
        y = model(x)
        forward = timeline.tick()
        y.backward(dy)
    for param in model.parameters():
        if param.grad is not None:
            timeline.label(param.grad, "gradients")
    timeline.allocations = [a for a in timeline.allocations if a.kind == "" and a.bytes > SMALLEST]
    tokens = shape.batch * shape.tokens
    after_forward, in_backward = (
        sum(allocation.bytes for allocation in timeline.allocations if allocation.lives(moment))
        for moment in (forward, timeline.highest(forward, timeline.now))
    )
    return Peak(after_forward / tokens, in_backward / tokens)


def _components(param: Tensor) -> Iterable[Tensor]:
    return param.quantized_storage.components.values() if isinstance(param, QuantizedTensor) else [param]


def _make_model(recipe: str, recomputes: bool, stores: bool, shape: Shape) -> tuple[Ours, Tensor, Tensor]:
    model = Ours(shape, recipe, None, recomputes, stores)
    size = (shape.batch, shape.tokens, shape.hidden)
    x, dy = (torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in range(2))
    return model, x.requires_grad_(), dy


def tables(recipes: list[str], shape: Shape, capability: tuple[int, int]) -> Iterator[str]:
    """Format the two tables of saved storages and peaks in Markdown."""
    cases = {
        recipe + ", recomputed" * recomputes + ", stored" * stores: (recipe, recomputes, stores, shape, capability)
        for recipe, recomputes, stores in product(recipes, (False, True), (False, True))
    }
    yield table_head(("recipe", "kept by a layer: function, dtype, bytes for a token", "together"))
    for name, case in cases.items():
        storages = saved_storages(*case)
        text = "; ".join(f"{s.function} {str(s.dtype).removeprefix('torch.')} {s.bytes:g}" for s in storages)
        yield table_row((name, text, f"{sum(s.bytes for s in storages):g}"))
    yield ""
    yield table_head(("recipe", f"bytes for a token kept by {shape.layers} layers", "most in backward"))
    for name, case in cases.items():
        memory = peak(*case)
        yield table_row((name, f"{memory.after_forward:g}", f"{memory.in_backward:g}"))


# Comparison with measured peaks ---------------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """A peak of RESULTS.md: the step, the arm, the day on H200s or H100s, and GiB."""

    subject: str
    arm: str
    day: str
    gib: float


BLOCKS = {
    "4 blocks of Llama-3-8B, 2 x 8192": Shape(device="meta"),
    "16 layers of Llama-3.2-1B, 4 x 2048": Shape(16, 2048, 8192, 32, 8, 4, 2048, "meta"),
}
"""Steps of block_step.py: forward and backward, without an optimizer."""
_EIGHT, _ONE = BLOCKS
STEPS = {"8 blocks of Llama-3-8B, 2 x 8192 a GPU": 1, "8 blocks of Llama-3-8B, 2 x 8192 a GPU, FSDP2": 2}
"""Steps of train_step.py, with the optimizer: number of GPUs. Arms are from training_arms.py."""
_ALONE, _SHARDED = STEPS
MEASURED = [
    *(Measurement(_ALONE, f"ours-{arm}", "2026-11-24", gib) for arm, gib in (
        ("delayed", 35.89), ("delayed-lean", 23.06),
    )),
    *(Measurement(_SHARDED, f"ours-{arm}", "2026-11-24", gib) for arm, gib in (
        ("delayed", 25.73), ("current", 25.70), ("block", 25.78), ("delayed-lean", 19.31), ("current-lean", 19.28),
        ("block-lean", 19.35), ("mxfp8-lean", 19.36), ("nvfp4-lean", 18.56),
    )),
    *(Measurement(_EIGHT, arm, "2026-11-24", gib) for arm, gib in (
        ("delayed", 8.91), ("delayed, recomputed", 7.88), ("current", 8.91), ("current, recomputed", 7.88),
        ("block", 8.96), ("block, recomputed", 7.90),
    )),
    *(Measurement(_ONE, arm, "2026-11-24", 8.58) for arm in ("delayed", "current")),
    *(Measurement("llama-1b", arm, "2026-11-24", gib) for arm, gib in (
        ("bf16", 32.1), ("current fused", 28.1), ("block fused", 28.1), ("delayed", 30.8),
    )),
    *(Measurement("llama-1b", arm, "2026-11-23", gib) for arm, gib in (
        ("current", 30.8), ("delayed", 30.8), ("block", 30.9),
    )),
    *(Measurement("qwen3-8b", arm, "2026-11-23", gib) for arm, gib in (("bf16", 62.2), ("current", 56.5))),
]  # fmt: skip
"""Peaks of eager steps. Llama-3.2-1B and Qwen3-8B are steps of convert_models.py, with the optimizer."""


def planned_gib(subject: str, arm: str) -> float:
    """Plan the peak of a measured step."""
    if subject in BLOCKS:
        recipe, *options = arm.split(", ")
        return _blocks_peak(BLOCKS[subject], recipe, "recomputed" in options, "stored" in options) / GIB
    if subject in STEPS:
        return _training_peak(ARMS[arm], STEPS[subject]) / GIB
    transformers_model = convert_models.MODELS[subject]
    model = convert_models.build(transformers_model, arm, "meta")
    step = qs.TrainingStep(transformers_model.batch, transformers_model.length)
    fp8 = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    report = qs.plan(model, {}, layers=model.model.layers, step=step, **({} if arm == "bf16" else fp8))
    elements = report.totals.parameters
    # convert_models.py uses AdamW with two BF16 states, or FusedAdam with 16-bit masters, where the plan has 32 bits.
    states = 4 * elements if arm == "bf16" else report.totals.optimizer_bytes - 2 * elements
    return (_peak_without_states(report.memory) + states) / GIB


def _blocks_peak(shape: Shape, recipe: str, recomputes: bool, stores: bool) -> int:
    model = Ours(shape, recipe, None, recomputes, stores)
    return _peak_without_states(qs.plan(model, {}, layers=model.layers, step=_training_step(shape, recipe)).memory)


def _training_peak(arm: Arm, gpus: int) -> int:
    shape = dataclasses.replace(SHAPES["llama-8b"], batch=2, tokens=8192, device="meta")
    model, mesh = Ours(shape, arm.recipe, None), {"dp_shard": gpus} if gpus > 1 else {}
    step = _training_step(shape, arm.recipe)
    report = qs.plan(model, mesh, layers=model.layers, step=step, **STATES[arm.states])
    assert report.memory is not None
    return report.memory.peak


def _training_step(shape: Shape, recipe: str) -> qs.TrainingStep:
    def forward(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.empty(*tokens.shape, shape.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        return model(x)

    return qs.TrainingStep(shape.batch, shape.tokens, recipe=recipe, loss=forward)


def _peak_without_states(memory: StepMemory | None) -> int:
    assert memory is not None
    return max(phase.total - phase.bytes["optimizer states"] for phase in memory.phases)


def comparison() -> Iterator[str]:
    """Format planned and measured peaks in Markdown."""
    yield table_head(("step", "arm", "measured on", "GiB", "planned", "difference"))
    for subject, arm, day, gib in MEASURED:
        planned = planned_gib(subject, arm)
        yield table_row((subject, arm, day, f"{gib:.2f}", f"{planned:.2f}", f"{planned / gib - 1:+.1%}"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--capability", default="9.0", help="compute capability of the GPU")
    parser.add_argument("--against", action="store_true", help="compare planned peaks with measured ones")
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "tokens")
    add_sizes(parser, {name: getattr(SMALL, name) for name in names})
    options = parser.parse_args()
    major, minor = map(int, options.capability.split("."))
    shape = dataclasses.replace(SMALL, **{name: getattr(options, name) for name in names})
    lines = comparison() if options.against else tables(options.recipes.split(","), shape, (major, minor))
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
