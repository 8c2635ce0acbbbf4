"""Tensor parallelism with parameters of 16 bits: how far it is from one process.

Outputs and gradients are within the tolerances that TransformerEngine's own test has for its modules, by its own
measure: it looks at the element that differs most. Gradients of parameters that ranks share are rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import quantshard as qs
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

DTYPES = (torch.float16, torch.bfloat16)
RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""TransformerEngine's, beside 1e-5 absolute: about one step of each dtype, and two."""

SEQUENCE, BATCH, FEATURES, HEAD = 16, 16, 32, 16
"""Rows of a rank, sequences, and features for each rank."""

MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear row": lambda size, **o: qs.Linear(size, size, parallel_mode="row", **o),
    "Linear column": lambda size, **o: qs.Linear(size, size, parallel_mode="column", **o),
    "LayerNormLinear": lambda size, **o: qs.LayerNormLinear(size, size, parallel_mode="column", **o),
    "LayerNormMLP": lambda size, **o: qs.LayerNormMLP(size, size // 2, set_parallel_mode=True, **o),
    "TransformerLayer": lambda size, **o: qs.TransformerLayer(
        size, size // 2, size // HEAD, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, **o
    ),
}


def differs(found: Tensor, wanted: Tensor) -> bool:
    """TransformerEngine's measure."""
    difference = (found - wanted).abs().flatten()
    at = difference.argmax()
    relative = difference[at] / wanted.flatten()[at].abs().clamp(min=1e-5)
    return bool(relative > RELATIVE[wanted.dtype] and difference[at] > 1e-5)


def joined(x: Tensor, dim: int | None) -> Tensor:
    """What is cut along a dim, from all ranks."""
    if dim is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, dim)


def part(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def compared(kind: str, dtype: torch.dtype, sequence_parallel: bool, device: str, mesh: DeviceMesh) -> list[str]:
    """What differs from one process."""
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(12345)
    x, target = (
        torch.randn(SEQUENCE * ranks, BATCH, FEATURES * ranks, generator=generator).to(device, dtype) for _ in range(2)
    )
    runs = []
    for cut in (False, True):
        torch.manual_seed(1)
        options = {"tp_mesh": mesh, "sequence_parallel": sequence_parallel} if cut else {}
        module = MODULES[kind](FEATURES * ranks, params_dtype=dtype, device=device, **options)
        rows = 0 if sequence_parallel else None
        into = (-1 if kind == "Linear row" else rows) if cut else None
        out = (-1 if kind in ("Linear column", "LayerNormLinear") else rows) if cut else None
        inp = part(x, into).clone().requires_grad_()
        y = module(inp)
        whole = joined(y, out).detach().requires_grad_()
        F.mse_loss(whole, target).backward()
        y.backward(part(whole.grad, out))
        grads = {name: param.grad for name, param in module.named_parameters()}
        grads = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        runs.append({"output": whole.detach(), "gradient": joined(inp.grad, into), **grads})
    single, cut = runs
    return [f"{kind} {dtype} {sequence_parallel} {key}" for key in single if differs(cut[key], single[key])]


EVERY = list(itertools.product(DTYPES, (False, True)))
HALF = [(torch.float16, False), (torch.bfloat16, True)]
"""Of dtypes, and whether sequences are cut too."""


def all_compared(device: str, settings: Sequence[tuple[torch.dtype, bool]] = EVERY, reduced: bool = True) -> list[str]:
    """`reduced`: what PyTorch allows its matrix products on GPUs, sums in 16 bits; it does by default."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return [
        wrong
        for kind in MODULES
        for dtype, sequence_parallel in settings
        for wrong in compared(kind, dtype, sequence_parallel, device, mesh)
    ]


@pytest.mark.parametrize(
    ("ranks", "settings"), [(3, HALF), *(pytest.param(n, EVERY, marks=pytest.mark.exhaustive) for n in (2, 3))]
)
def test_within_the_tolerances_of_transformer_engine(ranks: int, settings: list[tuple[torch.dtype, bool]]) -> None:
    for wrong in run_ranks(ranks, all_compared, "cpu", settings):
        assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("reduced", [False, True])
def test_within_them_on_gpus(reduced: bool) -> None:
    for wrong in run_ranks(2, all_compared, "cuda", EVERY, reduced):
        assert wrong == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_gradients_are_rounded_once(ranks: int) -> None:
    run_ranks(ranks, rounded_once)


def rounded_once() -> None:
    """Of norms and of biases of row-parallel layers, under sequence parallelism: each rank has a part of the sum."""
    ranks, size = dist.get_world_size(), 64 * dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        options = {"params_dtype": dtype, "tp_mesh": mesh, "sequence_parallel": True, "device": "cpu"}
        x, dy = (torch.randn(5 * ranks, 3, size, generator=generator).to(dtype) for _ in range(2))
        wide, of_rows = x.double(), dy.double()
        sums = {"bias": of_rows.sum((0, 1))}
        for module in (qs.LayerNorm(size, **options), qs.RMSNorm(size, **options)):
            centered = wide - wide.mean(-1, keepdim=True) if isinstance(module, qs.LayerNorm) else wide
            unit = centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            module(part(x, 0)).backward(part(dy, 0))
            check(module, {"weight": (unit * of_rows).sum((0, 1)), **sums})
        linear = qs.Linear(size, size, parallel_mode="row", **options)
        with torch.no_grad():
            linear.bias.to_local().copy_(x[0, 0])
        out = linear(part(x, -1))
        plain = qs.Linear(size, size, parallel_mode="row", bias=False, **options)
        with torch.no_grad():
            plain.weight.to_local().copy_(linear.weight.to_local())
        assert torch.equal(out, plain(part(x, -1)) + x[0, 0])
        out.backward(part(dy, 0))
        check(linear, sums)


def check(module: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, param in module.named_parameters():
        if name in wanted and param.ndim == 1:
            assert param.grad is not None
            found, half_a_step = param.grad.to_local(), torch.finfo(param.dtype).eps / 2
            assert found.dtype == param.dtype
            room = half_a_step * wanted[name].abs() * 1.001 + 1e-5  # and float32's, of terms of size one
            assert ((found.double() - wanted[name]).abs() <= room).all(), (type(module).__name__, name, param.dtype)
