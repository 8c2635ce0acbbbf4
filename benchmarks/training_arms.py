"""The arms of `train_step.py`: a model, its recipe, how it runs, and the optimizer's states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from benchmarks.block_step import GRADIENTS_IN_FP8, Ours, Plain, Shape, fill, graph_layers, make_data
from benchmarks.harness import capture, to_float8
from quantshard.optimizers import FusedAdam

STATES: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "lean": {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "masterless": {"master_weights": False, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}
"""Arguments of `FusedAdam`, with 12, 8, 4 and 2 bytes of states per parameter. By default all are float32."""

RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", *GRADIENTS_IN_FP8)
COMPILED, REDUCED, GRAPHED, CAPTURED = "compiled", "reduce-overhead", "graphed", "captured-step"
MODES = ("", COMPILED, REDUCED, GRAPHED, CAPTURED)
"""Eager; each layer compiled; the same with Inductor's CUDA graphs; each layer by `make_graphed_callables`; one graph
of the whole step with its optimizer."""
TORCHAO = ("tensorwise", "rowwise")

WARMUP = 3


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        family: "bf16", "torchao" or "ours".
        states: a key of `STATES`.
        mode: one of `MODES`.
        recomputes: recompute_activation=True.
        ddp: replicas on several GPUs instead of FSDP2.
        stores: activation_storage="fp8".
        bf16_reduction: FSDP2 reduces gradients in BF16, its default, instead of float32.
    """

    family: str
    recipe: str = ""
    states: str = ""
    mode: str = ""
    recomputes: bool = False
    ddp: bool = False
    stores: bool = False
    bf16_reduction: bool = False

    @property
    def name(self) -> str:
        mode = "" if self.family != "ours" and self.mode == COMPILED else self.mode
        suffixes = (
            "recomputed" * self.recomputes,
            "ddp" * self.ddp,
            "fp8-activations" * self.stores,
            "bf16-reduction" * self.bf16_reduction,
        )
        return "-".join(filter(None, (self.family, self.recipe, self.states, mode, *suffixes)))

    def why_not(self, ranks: int) -> str:
        """Return why the arm cannot run on this many GPUs; "" if it can."""
        if self.ddp and ranks == 1:
            return "one GPU has no replicas"
        if self.bf16_reduction and (ranks == 1 or self.ddp):
            return "only FSDP2 over several GPUs reduces in another dtype"
        if ranks > 1 and not self.ddp and self.mode in (GRAPHED, REDUCED):
            return "under FSDP2 each pass has its gathered weights at another address"
        if self.mode == CAPTURED and self.states == "masterless":
            return "capturable steps of quantized weights need masters"
        if self.ddp and self.mode == CAPTURED:
            return "captured steps are implemented for FSDP2 and one GPU"
        return ""


def _arms() -> Iterator[Arm]:
    for ddp, mode in product((False, True), (COMPILED, REDUCED)):
        yield Arm("bf16", mode=mode, ddp=ddp)
        yield from (Arm("torchao", recipe, mode=mode, ddp=ddp) for recipe in TORCHAO)
    yield Arm("bf16", mode=COMPILED, bf16_reduction=True)
    yield from (Arm("torchao", recipe, mode=COMPILED, bf16_reduction=True) for recipe in TORCHAO)
    for options in product(RECIPES, STATES, MODES, (False, True), (False, True), (False, True), (False, True)):
        yield Arm("ours", *options)


ARMS = {arm.name: arm for arm in _arms()}
NAMES = (
    f"bf16, torchao-{{{','.join(TORCHAO)}}} [-{REDUCED}] [-ddp] [-bf16-reduction]; "
    f"ours-{{{','.join(RECIPES)}}} [-{{{','.join(filter(None, STATES))}}}] [-{{{','.join(filter(None, MODES))}}}] "
    "[-recomputed] [-ddp] [-fp8-activations] [-bf16-reduction]"
)


class TrainingArm:
    """An arm that is ready to step, sharded or replicated over a mesh if there is one."""

    def __init__(self, arm: Arm, shape: Shape, mesh: DeviceMesh | None) -> None:
        self.arm, self.shape, self.mesh = arm, shape, mesh
        # The RNG keys of weights and optimizer must be equal on all ranks.
        torch.manual_seed(0)
        if arm.family == "ours":
            self.model: nn.Module = Ours(shape, arm.recipe, None, arm.recomputes, arm.stores)
        else:
            self.model = Plain(shape, None)
        fill(self.model, shape)
        self.x, self.dy = make_data(shape)
        self.gathers_fp8 = arm.family == "torchao" and arm.recipe == "tensorwise" and mesh is not None and not arm.ddp
        if arm.family == "torchao":
            to_float8(self.model, arm.recipe, shape.device, enable_fsdp_float8_all_gather=self.gathers_fp8)
        if arm.mode in (COMPILED, REDUCED):
            # The limit is per function, which all layers share.
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.layers:
                layer.compile(mode=REDUCED if arm.mode == REDUCED else None)
        elif arm.mode == GRAPHED:
            graph_layers(self.model, self.x, arm.recipe)
        self.call: nn.Module = self.model if mesh is None else self._distribute(mesh)
        self.optimizer = self._make_optimizer()
        self.run: Callable[[], None] = self.step

    def _distribute(self, mesh: DeviceMesh) -> nn.Module:
        if self.arm.ddp:
            return DistributedDataParallel(self.model, init_sync=False)
        layers: Any = self.model.layers
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if self.arm.bf16_reduction else torch.float32)
        for module in (*layers, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
        return self.model

    def _make_optimizer(self) -> torch.optim.Optimizer:
        if self.arm.family != "ours":
            return torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.shape.device == "cuda")
        capturable = self.arm.mode == CAPTURED
        states = STATES[self.arm.states]
        return FusedAdam(self.model.named_parameters(), lr=1e-5, capturable=capturable, **states)

    def step(self) -> None:
        """Run forward, backward and optimizer."""
        with qs.autocast(recipe=self.arm.recipe) if self.arm.family == "ours" else nullcontext():
            y = self.call(self.x)
        y.backward(self.dy)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        if self.gathers_fp8:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)

    def warm_up(self) -> None:
        """Compile kernels and functions."""
        if self.arm.mode == CAPTURED:
            qs.capturable_(self.model)
        for _ in range(WARMUP):
            self.step()

    def record(self) -> None:
        """Make `run` replay a CUDA graph of a whole step, if that is the arm's mode."""
        if self.arm.mode == CAPTURED:
            self.run = capture(self.step)
