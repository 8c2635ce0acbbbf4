"""The cells of the ledger: a small model, an optimizer, a wrapping and a backend, trained for three steps.

Inputs are multiples of 1/4, and the gradients that the optimizer steps by are multiples of 1/64 instead of those of
backward. So weights and optimizer states do not depend on the order in which a GEMM sums; losses and the recorded
gradients of backward do.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

import quantshard as qs
from quantshard.errors import QuantshardError
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, Muon, muon_groups
from tests.distributed.models import RECIPES as BY_NAME, content
from tests.interpreter import kernels_on, prepared_once

HIDDEN, FFN, TOKENS, STEPS = 40, 88, 7, 3
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.uint8

QUANTIZED: dict[str, Any] = {name.replace(" ", "-"): recipe for name, recipe in BY_NAME.items()}
RECIPES = {"bf16": "bf16", **QUANTIZED}
MIXED = "nvfp4/wgrad:current"

adam, lion = partial(FusedAdam, lr=1e-2, weight_decay=0.1), partial(Lion, lr=1e-2, weight_decay=0.1)
OPTIMIZERS: dict[str, Any] = {
    "adam": adam,
    "adam-lean8": partial(adam, preset="lean8"),
    "adam-lean6": partial(adam, preset="lean6"),
    "adam-fp16": partial(adam, master_weight_dtype=FP16, exp_avg_dtype=FP16, exp_avg_sq_dtype=FP16),
    "adam-bf16": partial(adam, master_weight_dtype=BF16, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16),
    "adam-no-masters": partial(adam, master_weights=False, exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8),
    "adam-remainders": partial(adam, store_param_remainders=True),
    "adam-capturable-ema": partial(adam, capturable=True, ema_decay=0.5),
    "lion-lean8": partial(lion, preset="lean8"),
    "muon": partial(Muon, lr=1e-2, momentum_buffer_dtype=BF16),
    "master-weights": partial(MasterWeights, AdamW, lr=1e-2, foreach=False),
    "adamw": partial(AdamW, lr=1e-2, foreach=False),
}
MORE_OPTIMIZERS = {"lion": lion, "muon-lean6": partial(Muon, lr=1e-2, preset="lean6")}


def rounded_sqrt(x: Tensor) -> Tensor:
    values = x.float() if x.itemsize < 4 else x
    return torch.from_numpy(np.asarray(np.sqrt(values.numpy()))).to(x.dtype)


# MKL's square root, which torch.optim uses, has other bits on Intel's CPUs than on AMD's.
_ATEN = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _ATEN.impl("sqrt", rounded_sqrt, "CPU")

WRAPPINGS = {"alone": 1, "fsdp1": 1, "fsdp2": 2, "fsdp3": 3, "tp2": 2, "hsdp": 4}
"""Wrapping -> number of ranks."""


class Cell(NamedTuple):
    backend: str
    model: str
    recipe: str
    optimizer: str
    wrapping: str

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "gpu" else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Float32 for plain AdamW, which rounds the last elements of a BF16 tensor by another kernel."""
        return torch.float32 if self.optimizer == "adamw" else BF16

    @property
    def recipe_object(self) -> Any:
        return RECIPES.get(self.recipe, self.recipe)


# Models


class Dense(nn.Sequential):
    """Every fused path; no width is a multiple of a block, and three ranks share 5 rows."""

    def __init__(self, tp_mesh: DeviceMesh | None, **options: Any) -> None:
        both = {**options, "tp_mesh": tp_mesh}
        gated = {"activation": "swiglu", "normalization": "RMSNorm", "set_parallel_mode": True}
        super().__init__(
            qs.LayerNormLinear(HIDDEN, 72, parallel_mode="column", **both),
            qs.Linear(72, HIDDEN, parallel_mode="row", **both),
            qs.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **both),
            qs.TransformerLayer(HIDDEN, FFN, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, **gated, **both),
        )
        self.head = qs.Linear(HIDDEN, 5, bias=False, **options)


class Experts(nn.Module):
    def __init__(self, tp_mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.experts = qs.GroupedLinear(3, HIDDEN, 33, **options)
        self.head = qs.Linear(33, 5, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(x.flatten(0, 1), [9, 0, 5]))


class Llama(nn.Module):
    """Hugging Face's Llama with multiples of 1/64 for weights, converted."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        import transformers  # takes seconds, and few cells need it

        sizes = {"vocab_size": 33, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            **sizes, hidden_size=HIDDEN, intermediate_size=FFN, attn_implementation="eager"
        )
        self.llama = transformers.LlamaForCausalLM(config).to(cell.device, BF16)
        for index, param in enumerate(self.llama.parameters()):
            param.data.copy_(dyadic(param.shape, index))
        torch.manual_seed(3)  # transformers may have drawn numbers
        qs.convert(self.llama, cell.recipe_object)

    def forward(self, x: Tensor) -> Tensor:
        return self.llama(inputs_embeds=x.transpose(0, 1)).logits


def mesh_of(cell: Cell) -> DeviceMesh | None:
    if cell.wrapping == "alone":
        return None
    if cell.wrapping == "hsdp":
        return init_device_mesh(cell.device, (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(cell.device, (WRAPPINGS[cell.wrapping],), mesh_dim_names=("ranks",))


def built(cell: Cell, mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(3)
    if cell.model == "llama":
        return Llama(cell)
    with qs.quantized_model_init(recipe=cell.recipe_object, preserve_high_precision_init_val=True):
        made = Dense if cell.model == "dense" else Experts
        model = made(mesh if cell.wrapping == "tp2" else None, params_dtype=cell.dtype, device=cell.device)
    if cell.wrapping in ("fsdp1", "fsdp2", "fsdp3", "hsdp"):
        for module in [*(model if cell.model == "dense" else ()), model]:
            fully_shard(module, mesh=mesh)
    return model


def optimizer_of(cell: Cell, model: nn.Module) -> Optimizer:
    params = muon_groups(model, head="*head*", adamw={"lr": 1e-2}) if "muon" in cell.optimizer else None
    return (OPTIMIZERS | MORE_OPTIMIZERS)[cell.optimizer](params or model.named_parameters())


# Training


def dyadic(shape: Any, seed: int) -> Tensor:
    """Multiples of 1/64 between -1/8 and 1/8."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def set_gradients(model: nn.Module, step: int) -> None:
    for index, param in enumerate(model.parameters()):
        grad = dyadic(param.shape, 1000 * step + index).to(param.device, param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def kind_in_model(name: str) -> str:
    if name.endswith(("_key", "_draws")):
        return "rng"
    if name.endswith("history"):
        return "histories"
    return "scales" if "scale" in name or name.endswith("amax") else "weights"


def trained(cell: Cell, mesh: DeviceMesh | None) -> Iterator[tuple[str, str, Any]]:
    """(kind, name, value) of all that training yields on this rank."""
    model = built(cell, mesh)
    optimizer = optimizer_of(cell, model)
    rank = 0 if cell.wrapping == "tp2" else dist.get_rank()
    for step in range(STEPS):
        x = (dyadic((TOKENS, 2, HIDDEN), 10 * step + rank) * 16).to(cell.device, cell.dtype)
        with qs.autocast(recipe=cell.recipe_object):
            out = model(x)
        # a sum of more than two gradients would depend on the order of ranks
        loss = out.float().square().mean() * (rank < 2)
        loss.backward()
        yield "losses", str(step), loss.detach()
        for name, param in model.named_parameters():
            yield "gradients", f"{step} {name}", param.grad
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        yield kind_in_model(name), name, value
    state = optimizer.state_dict()
    for index, entries in state["state"].items():
        for name, value in entries.items():
            yield "masters" if "master" in name else "moments", f"{index} {name}", value
    for group in state["param_groups"]:
        counters = {name: int(group[name]) for name in ("step", "rounding_seed") if name in group}
        yield "rng", "optimizer", counters


def data_of(name: str, value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    local = value._local_tensor if isinstance(value, DTensor) else value
    return f"{name} {local.dtype} {tuple(local.shape)}".encode() + content(local).tobytes()


def row(cell: Cell, mesh: DeviceMesh | None) -> dict[str, str]:
    """Kind of value -> hash of this rank's values; the error if the cell is refused."""
    hashes: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if cell.backend == "interpreter":
            stack.enter_context(prepared_once())
            stack.enter_context(kernels_on("cpu"))
        try:
            for kind, name, value in trained(cell, mesh):
                hashes.setdefault(kind, hashlib.sha256()).update(data_of(name, value))
        except QuantshardError as error:
            return {"refused": type(error).__name__}
    return {kind: value.hexdigest() for kind, value in hashes.items()}


def rows(cells: list[Cell]) -> list[dict[str, str]]:
    """The rows of this rank; every rank of a process group calls this with the same cells."""
    torch.backends.mkldnn.set_flags(_enabled=False)
    firsts = {(cell.device, cell.wrapping): cell for cell in cells}
    meshes = {key: mesh_of(cell) for key, cell in firsts.items()}
    return [row(cell, meshes[cell.device, cell.wrapping]) for cell in cells]


def save_checkpoint(folder: str, cell: Cell) -> None:
    model = built(cell, mesh_of(cell))
    optimizer = optimizer_of(cell, model)
    set_gradients(model, 0)
    optimizer.step()
    qs.checkpoints.save(folder, model, optimizer, {"step": 1})


# The choice


def cells_of(backend: str, devices: int = 0) -> list[Cell]:
    """All cells of a backend; on GPUs those whose ranks have one of the `devices` each."""
    if backend == "interpreter":
        dense = [("delayed", "adam"), ("mxfp8", "adam-lean8"), ("nvfp4", "muon")]  # a quarter of a minute each
        cells = [Cell(backend, "dense", *names, "alone") for names in dense]
        cells += [Cell(backend, "experts", *names, "alone") for names in product(RECIPES, ("adam", "adam-lean8"))]
        return cells + [Cell(backend, "experts", name, "lion-lean8", "fsdp2") for name in RECIPES]
    cells = [Cell(backend, "dense", *names) for names in product(RECIPES, OPTIMIZERS, WRAPPINGS)]
    cells += [Cell(backend, "dense", MIXED, "adam", wrapping) for wrapping in WRAPPINGS]
    cells += [Cell(backend, "dense", *names, "fsdp3") for names in product(RECIPES, MORE_OPTIMIZERS)]
    cells += [Cell(backend, "experts", name, "adam-lean8", to) for name, to in product(RECIPES, ("alone", "fsdp2"))]
    cells += [Cell(backend, "llama", name, "adam", "alone") for name in QUANTIZED]
    if backend == "oracle":
        return cells
    # each cell compiles its kernels for some ten seconds: every recipe, and every optimizer, with a few of the others
    alone = [
        cell for cell in cells if cell.wrapping == "alone" and cell.recipe in RECIPES and cell.optimizer in OPTIMIZERS
    ]
    places = [list(RECIPES).index(cell.recipe) + list(OPTIMIZERS).index(cell.optimizer) for cell in alone]
    chosen = [cell for cell, place in zip(alone, places, strict=True) if cell.model != "dense" or place % 4 == 0]
    return chosen + [cell for cell in cells if 1 < WRAPPINGS[cell.wrapping] <= devices]


def quick(cells: list[Cell]) -> list[Cell]:
    """Every pair of recipe and optimizer, and of recipe and wrapping; the last cell of each other model and backend."""
    axes = [list(RECIPES), list(OPTIMIZERS), list(WRAPPINGS)]
    places = {names: sum(axis.index(name) for axis, name in zip(axes, names, strict=True)) for names in product(*axes)}
    chosen = {cell[:2]: cell for cell in cells}
    chosen.pop(("oracle", "dense"), None)
    dense = [cell for cell in cells if cell[:2] == ("oracle", "dense") and cell[2:] in places]
    return [*chosen.values(), *(cell for cell in dense if places[cell[2:]] % len(WRAPPINGS) == 0)]


def few(cells: list[Cell]) -> list[Cell]:
    """Every recipe and every optimizer of the oracle at least once, on one process and on 2 ranks."""
    axes = [list(RECIPES), list(OPTIMIZERS), ["alone", "fsdp2"]]
    names = {tuple(axis[turn % len(axis)] for axis in axes) for turn in range(max(map(len, axes)))}
    return [cell for cell in cells if cell[:2] == ("oracle", "dense") and cell[2:] in names]


CHOICES = {"quick": quick, "few": few}
