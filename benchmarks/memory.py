"""What a transformer layer keeps for backward, tensor by tensor, and the most memory of a forward and backward.

    python benchmarks/memory.py [--recipes delayed,current,block] [--layers 4] [--hidden 256] [--ffn 896] [--heads 8]
        [--kv-heads 2] [--tokens 1024] [--capability 9.0]
    python benchmarks/memory.py --against

Needs no GPU and no memory: modules run on the meta device as on a GPU of the compute capability
(`quantshard.tools.planning`), which says what products are emulated. Sizes are bytes for a token, of the storages of
tensors, without weights, their gradients, and the input of the first layer. Layers are those of block_step.py, and
taken for large ones (`operands.LARGE`); "recomputed" is with recompute_activation=True, "stored" with
activation_storage="fp8".

With --against, instead: the peaks that RESULTS.md has of GPUs, beside what `quantshard.plan` says of the same steps.
"""

from __future__ import annotations

import argparse
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
from benchmarks.block_step import GIB, Ours, Shape
from benchmarks.train_step import SHAPES
from benchmarks.training_arms import ARMS, STATES, Arm
from quantshard.gemm import operands
from quantshard.gemm.described_gpu import described_gpu
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.observe.costs import StepMemory
from quantshard.tools.planning.timeline import MemoryTimeline, gpu_attention

SMALL = Shape(layers=4, hidden=256, ffn=896, heads=8, kv_heads=2, batch=1, tokens=1024, device="meta")
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
SCALARS = 1024
"""Storages up to so many bytes are not counted: scales, and amaxes, of whole tensors."""
HOPPER = (9, 0)


class Kept(NamedTuple):
    """A storage that backward will read: which function of the library saved it, its dtype, and bytes for a token."""

    step: str
    dtype: torch.dtype
    bytes: float


class Peak(NamedTuple):
    """Bytes for a token of all layers: when forward is through, and the most while backward runs."""

    kept: float
    most: float


@contextmanager
def running(timeline: MemoryTimeline, recipe: str, capability: tuple[int, int]) -> Iterator[None]:
    """Within it layers run as on a GPU, by a recipe."""
    with described_gpu(capability), gpu_attention(), timeline.recorded(), qs.autocast(recipe=recipe):
        yield


@mock.patch.object(operands, "LARGE", 0)
def kept(
    recipe: str,
    recomputes: bool = False,
    stores: bool = False,
    shape: Shape = SMALL,
    capability: tuple[int, int] = HOPPER,
) -> list[Kept]:
    """What the second of two layers keeps, in the order in which it is saved, but for scalars and the angles."""
    model, x, _ = _made(recipe, recomputes, stores, dataclasses.replace(shape, layers=2))
    found: dict[int, Kept] = {}
    held: list[Any] = []  # so that no id is another's

    def pack(tensor: Tensor) -> Tensor:
        storage = None if isinstance(tensor, QuantizedTensor) else tensor.untyped_storage()
        if storage is not None and storage.nbytes() > SCALARS and id(storage) not in found:
            size = storage.nbytes() / (shape.batch * shape.tokens)
            found[id(storage)] = Kept(_saving_step(), tensor.dtype, size)
            held.append(storage)
        return tensor

    first, second = model.layers
    with running(MemoryTimeline(), recipe, capability):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = first(x, rotary_pos_emb=model.angles)
            before = len(found)
            second(y, rotary_pos_emb=model.angles)
    return list(found.values())[before:]


def _saving_step() -> str:
    """The function of the library, or of PyTorch's attention, that calls the operation whose tensors are saved."""
    frame: Any = sys._getframe(2)
    while "quantshard/modules" not in frame.f_code.co_filename:
        frame = frame.f_back
    name: str = frame.f_code.co_name
    return name


@mock.patch.object(operands, "LARGE", 0)
def peak(
    recipe: str,
    recomputes: bool = False,
    stores: bool = False,
    shape: Shape = SMALL,
    capability: tuple[int, int] = HOPPER,
) -> Peak:
    """Of one step."""
    model, x, dy = _made(recipe, recomputes, stores, shape)
    weights = [part for p in model.parameters() for part in _parts(p)]
    timeline = MemoryTimeline([x, dy, *weights, *model.buffers()])
    with running(timeline, recipe, capability):
        y = model(x)
        forward = timeline.tick()
        y.backward(dy)
    for param in model.parameters():
        if param.grad is not None:
            timeline.label(param.grad, "gradients")
    timeline.allocations = [each for each in timeline.allocations if each.kind == "" and each.bytes > SCALARS]
    tokens = shape.batch * shape.tokens
    after_forward, peak = (
        sum(allocation.bytes for allocation in timeline.allocations if allocation.lives(moment))
        for moment in (forward, timeline.highest(forward, timeline.now))
    )
    return Peak(after_forward / tokens, peak / tokens)


def _parts(param: Tensor) -> Iterable[Tensor]:
    return param.quantized_storage.components.values() if isinstance(param, QuantizedTensor) else [param]


def _made(recipe: str, recomputes: bool, stores: bool, shape: Shape) -> tuple[Ours, Tensor, Tensor]:
    model = Ours(shape, recipe, None, recomputes, stores)
    size = (shape.batch, shape.tokens, shape.hidden)
    x, dy = (torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in range(2))
    return model, x.requires_grad_(), dy


def tables(recipes: list[str], shape: Shape, capability: tuple[int, int]) -> Iterator[str]:
    """In Markdown."""
    ways = list(product(recipes, (False, True), (False, True)))
    yield "| recipe | kept by a layer: function, dtype, bytes for a token | together |"
    yield "|---|---|---|"
    for recipe, recomputes, stores in ways:
        found = kept(recipe, recomputes, stores, shape, capability)
        told = "; ".join(f"{each.step} {str(each.dtype)[6:]} {each.bytes:g}" for each in found)
        more = ", recomputed" * recomputes + ", stored" * stores
        yield f"| {recipe}{more} | {told} | {sum(each.bytes for each in found):g} |"
    yield ""
    yield f"| recipe | bytes for a token kept by {shape.layers} layers | most in backward |"
    yield "|---|---|---|"
    for recipe, recomputes, stores in ways:
        found_peak = peak(recipe, recomputes, stores, shape, capability)
        more = ", recomputed" * recomputes + ", stored" * stores
        yield f"| {recipe}{more} | {found_peak.kept:g} | {found_peak.most:g} |"


# Beside measured peaks -----------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A peak in RESULTS.md: of which arm, on which day on H200s or H100s, and GiB."""

    subject: str
    arm: str
    day: str
    gib: float


BLOCKS = {
    "4 blocks of Llama-3-8B, 2 x 8192": Shape(device="meta"),
    "16 layers of Llama-3.2-1B, 4 x 2048": Shape(16, 2048, 8192, 32, 8, 4, 2048, "meta"),
}
"""Of block_step.py: forward and backward, without an optimizer."""
_EIGHT, _ONE = BLOCKS
STEPS = {"8 blocks of Llama-3-8B, 2 x 8192 a GPU": 1, "8 blocks of Llama-3-8B, 2 x 8192 a GPU, FSDP2": 2}
"""Of train_step.py, with the optimizer: how many GPUs there were. Arms are those of training_arms.py."""
_ALONE, _SHARDED = STEPS
MEASURED = [
    *(Measured(_ALONE, f"ours-{arm}", "2026-11-24", gib) for arm, gib in (("delayed", 35.89), ("delayed-lean", 23.06))),
    *(Measured(_SHARDED, f"ours-{arm}", "2026-11-24", gib) for arm, gib in (
        ("delayed", 25.73), ("current", 25.70), ("block", 25.78), ("delayed-lean", 19.31), ("current-lean", 19.28),
        ("block-lean", 19.35), ("mxfp8-lean", 19.36), ("nvfp4-lean", 18.56),
    )),
    *(Measured(_EIGHT, arm, "2026-11-24", gib) for arm, gib in (
        ("delayed", 8.91), ("delayed, recomputed", 7.88), ("current", 8.91), ("current, recomputed", 7.88),
        ("block", 8.96), ("block, recomputed", 7.90),
    )),
    *(Measured(_ONE, arm, "2026-11-24", 8.58) for arm in ("delayed", "current")),
    *(Measured("llama-1b", arm, "2026-11-24", gib) for arm, gib in (
        ("bf16", 32.1), ("current fused", 28.1), ("block fused", 28.1), ("delayed", 30.8),
    )),
    *(Measured("llama-1b", arm, "2026-11-23", gib) for arm, gib in (
        ("current", 30.8), ("delayed", 30.8), ("block", 30.9),
    )),
    *(Measured("qwen3-8b", arm, "2026-11-23", gib) for arm, gib in (("bf16", 62.2), ("current", 56.5))),
]  # fmt: skip
"""Of eager steps. Those of Llama-3.2-1B and Qwen3-8B are models of transformers (convert_models.py), with optimizer."""


def planned(subject: str, arm: str) -> float:
    """The peak of the same step, in GiB."""
    if subject in BLOCKS:
        recipe, *more = arm.split(", ")
        return _blocks(BLOCKS[subject], recipe, "recomputed" in more, "stored" in more) / GIB
    if subject in STEPS:
        return _trained(ARMS[arm], STEPS[subject]) / GIB
    model = convert_models.build(known := convert_models.MODELS[subject], arm, "meta")
    step = qs.TrainingStep(known.batch, known.length)
    fp8 = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    report = qs.plan(model, {}, layers=model.model.layers, step=step, **({} if arm == "bf16" else fp8))
    elements = report.totals.parameters
    # convert_models.py: AdamW with two states of bfloat16; FusedAdam with masters of 16 bits, where plan has 32
    states = 4 * elements if arm == "bf16" else report.totals.optimizer_bytes - 2 * elements
    return (_without_states(report.memory) + states) / GIB


def _blocks(shape: Shape, recipe: str, recomputes: bool, stores: bool) -> int:
    model = Ours(shape, recipe, None, recomputes, stores)
    return _without_states(qs.plan(model, {}, layers=model.layers, step=_step_of(shape, recipe)).memory)


def _trained(arm: Arm, gpus: int) -> int:
    shape = dataclasses.replace(SHAPES["llama-8b"], batch=2, tokens=8192, device="meta")
    model, mesh = Ours(shape, arm.recipe, None), {"dp_shard": gpus} if gpus > 1 else {}
    report = qs.plan(model, mesh, layers=model.layers, step=_step_of(shape, arm.recipe), **STATES[arm.states])
    assert report.memory is not None
    return report.memory.peak


def _step_of(shape: Shape, recipe: str) -> qs.TrainingStep:
    def forward(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.empty(*tokens.shape, shape.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        found: Tensor = model(x)
        return found

    return qs.TrainingStep(shape.batch, shape.tokens, recipe=recipe, loss=forward)


def _without_states(memory: StepMemory | None) -> int:
    assert memory is not None
    return max(phase.total - phase.bytes["optimizer states"] for phase in memory.phases)


def against() -> Iterator[str]:
    """In Markdown."""
    yield "| step | arm | measured on | GiB | planned | difference |"
    yield "|---|---|---|---|---|---|"
    for subject, arm, day, gib in MEASURED:
        found = planned(subject, arm)
        yield f"| {subject} | {arm} | {day} | {gib:.2f} | {found:.2f} | {found / gib - 1:+.1%} |"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--capability", default="9.0", help="compute capability of the GPU")
    parser.add_argument("--against", action="store_true", help="peaks that were measured beside those planned")
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(SMALL, name))
    asked = vars(parser.parse_args(given))
    recipes, capability = asked.pop("recipes").split(","), asked.pop("capability").split(".")
    compares = asked.pop("against")
    major, minor = map(int, capability)
    found = against() if compares else tables(recipes, dataclasses.replace(SMALL, **asked), (major, minor))
    for line in found:
        print(line, flush=True)


if __name__ == "__main__":
    main()
