"""The arms of `train_step.py`: which model is trained, by which recipe, how it runs, and with what optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from benchmarks.block_step import GRADIENTS_IN_FP8, Ours, Plain, Shape, capture, data, fill
from quantshard.optimizers import FusedAdam

STATES: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "lean": {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "masterless": {"master_weights": False, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}
"""Arguments of `FusedAdam`: 12, 8, 4 and 2 bytes for a parameter. By default all states are float32."""

RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", *GRADIENTS_IN_FP8)
COMPILED, REDUCED, GRAPHED, CAPTURED = "compiled", "reduce-overhead", "graphed", "captured-step"
WAYS = ("", COMPILED, REDUCED, GRAPHED, CAPTURED)
"""Eagerly; each layer compiled; by Inductor's CUDA graphs; each layer by `make_graphed_callables`; a whole step in one
graph, optimizer included."""
TORCHAO = ("tensorwise", "rowwise")

WARMUP = 3


@dataclass(frozen=True)
class Arm:
    """`recomputes`: with recompute_activation=True. `ddp`: replicas on several GPUs, in place of FSDP2. `stores`: with
    activation_storage="fp8". `bf16_reduction`: FSDP2 reduces gradients in bfloat16, its default, instead of float32."""

    family: str
    recipe: str = ""
    states: str = ""
    way: str = ""
    recomputes: bool = False
    ddp: bool = False
    stores: bool = False
    bf16_reduction: bool = False

    @property
    def name(self) -> str:
        way = "" if self.family != "ours" and self.way == COMPILED else self.way
        more = (
            "recomputed" * self.recomputes,
            "ddp" * self.ddp,
            "fp8-activations" * self.stores,
            "bf16-reduction" * self.bf16_reduction,
        )
        return "-".join(filter(None, (self.family, self.recipe, self.states, way, *more)))

    def why_not(self, ranks: int) -> str:
        """Why it isn't run on so many GPUs; "" where it is."""
        if self.ddp and ranks == 1:
            return "one GPU has no replicas"
        if self.bf16_reduction and (ranks == 1 or self.ddp):
            return "only FSDP2 over several GPUs reduces in another dtype"
        if ranks > 1 and not self.ddp and self.way in (GRAPHED, REDUCED):
            return "under FSDP2 gathered weights lie elsewhere in each pass"
        if self.way == CAPTURED and self.states == "masterless":
            return "capturable steps of quantized weights need masters"
        if self.ddp and self.way == CAPTURED:
            return "not written: a captured step is FSDP2's, or of one GPU"
        return ""


def _arms() -> Iterator[Arm]:
    for ddp, way in product((False, True), (COMPILED, REDUCED)):
        yield Arm("bf16", way=way, ddp=ddp)
        yield from (Arm("torchao", recipe, way=way, ddp=ddp) for recipe in TORCHAO)
    yield Arm("bf16", way=COMPILED, bf16_reduction=True)
    yield from (Arm("torchao", recipe, way=COMPILED, bf16_reduction=True) for recipe in TORCHAO)
    for options in product(RECIPES, STATES, WAYS, (False, True), (False, True), (False, True), (False, True)):
        yield Arm("ours", *options)


ARMS = {arm.name: arm for arm in _arms()}
NAMES = (
    f"bf16, torchao-{{{','.join(TORCHAO)}}}, ours-{{{','.join(RECIPES)}}}, behind which come: of ours "
    f"[-{{{','.join(filter(None, STATES))}}}] states, [-{{{','.join(filter(None, WAYS))}}}], of others "
    f"[-{REDUCED}]; of ours [-recomputed]; [-ddp]; of ours [-fp8-activations]; [-bf16-reduction]"
)


class TrainingArm:
    """One arm on one shape, ready to step; sharded over a mesh, or replicated on it, if there is one."""

    def __init__(self, arm: Arm, shape: Shape, mesh: DeviceMesh | None) -> None:
        self.arm, self.shape, self.mesh = arm, shape, mesh
        torch.manual_seed(0)  # the random keys of weights and optimizer are the same on all processes
        ours = arm.family == "ours"
        self.model: nn.Module = Plain(shape, None)
        if ours:
            self.model = Ours(shape, arm.recipe, None, arm.recomputes, arm.stores)
        fill(self.model, shape)
        self.x, self.dy = data(shape)
        self.gathers = arm.family == "torchao" and arm.recipe == "tensorwise" and mesh is not None and not arm.ddp
        if arm.family == "torchao":
            _to_float8(self.model, arm.recipe, shape, self.gathers)
        if arm.way in (COMPILED, REDUCED):
            torch._dynamo.config.recompile_limit = 64  # of one function, which all layers share
            for layer in self.model.layers:
                layer.compile(mode=REDUCED if arm.way == REDUCED else None)
        elif arm.way == GRAPHED:
            capture(self.model, self.x, arm.recipe)
        self.call: nn.Module = self.model if mesh is None else self._spread(mesh)
        self.optimizer = self._optimizer()
        self.run: Callable[[], None] = self.step

    def _spread(self, mesh: DeviceMesh) -> nn.Module:
        """Over ranks."""
        if self.arm.ddp:
            return DistributedDataParallel(self.model, init_sync=False)
        layers: Any = self.model.layers
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if self.arm.bf16_reduction else torch.float32)
        for module in (*layers, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
        return self.model

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.arm.family != "ours":
            return torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.shape.device == "cuda")
        capturable = self.arm.way == CAPTURED
        states = STATES[self.arm.states]
        return FusedAdam(self.model.named_parameters(), lr=1e-5, capturable=capturable, **states)

    def step(self) -> None:
        """Forward, backward and optimizer."""
        with qs.autocast(recipe=self.arm.recipe) if self.arm.family == "ours" else nullcontext():
            y = self.call(self.x)
        y.backward(self.dy)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        if self.gathers:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)

    def warm_up(self) -> None:
        """Compile kernels and functions."""
        if self.arm.way == CAPTURED:
            qs.capturable_(self.model)
        for _ in range(WARMUP):
            self.step()

    def record(self) -> None:
        """From now on, run a whole step as a graph, if that is the arm's way."""
        if self.arm.way == CAPTURED:
            self.run = recorded(self.step)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a CUDA graph of a step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _to_float8(model: nn.Module, recipe: str, shape: Shape, gathers: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model, config=replace(config, emulate=shape.device == "cpu", enable_fsdp_float8_all_gather=gathers)
    )
