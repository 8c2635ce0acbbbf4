"""Registry rows for `kernels/optimizer/`: optimizer steps, amax histories, and checks of gradients.

These kernels process many tensors in one launch and have the bits of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import kernel_dispatch, kernels, numerics, recipe as recipes
from quantshard.collectives import delayed_scaling
from quantshard.optimizers import ElementwiseOptimizer, FusedAdam, Lion, Muon
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.cli.doctor import recipe_names
from tests.kernels.cases.base import KernelCase, KernelRow, Shape, bytes_of
from tests.weights import quantize_weight

if kernels.USABLE:
    from quantshard.kernels.optimizer import multi_tensor

SMALL: tuple[Shape, ...] = ((16, 32), (3, 34))
"""Shapes of additional weights in each step."""
LIMIT = 1e4
"""Magnitude above which a gradient counts as too large."""


_OPTIMIZERS: Mapping[str, Callable[..., ElementwiseOptimizer]] = {"Adam": FusedAdam, "Lion": Lion, "Muon": Muon}


def weights(shapes: Sequence[Shape], device: str) -> Iterator[Tensor]:
    """Iterate over random float32 matrices."""
    generator = torch.Generator(device).manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, dtype=torch.float32, device=device, generator=generator).mul_(0.02)


def with_gradients(params: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Give each parameter a random gradient of `dtype`, and return the parameters."""
    generator = torch.Generator(params[0].device).manual_seed(1)
    for param in params:
        grad = torch.randn(param.shape, dtype=torch.float32, device=param.device, generator=generator).mul_(1e-3)
        param.grad = grad.to(dtype)
    return params


def stepped(
    recipe: str, shapes: Sequence[Shape], device: str, by: str = "Adam", **options: Any
) -> tuple[list[nn.Parameter], ElementwiseOptimizer]:
    """Weights as a recipe stores them (by default bfloat16), with bfloat16 gradients, and their optimizer."""
    # Keys of random words come from torch's generator.
    torch.manual_seed(0)
    cell = recipes.resolve(recipe).weight
    params = [
        nn.Parameter(w.bfloat16() if cell is None else quantize_weight(w, cell, dtype=torch.bfloat16))
        for w in weights(shapes, device)
    ]
    optimizer = _OPTIMIZERS[by](params, **{"lr": 1e-5, "weight_decay": 0.1, **options})
    return with_gradients(params, torch.bfloat16), optimizer


def step_case(recipe: str, shapes: Sequence[Shape], device: str, **options: Any) -> KernelCase:
    """Second step of an optimizer: weights and states."""
    (params, optimizer), (oracle_params, oracle_optimizer) = (
        stepped(recipe, shapes, device, **options) for _ in range(2)
    )

    def launch() -> list[Tensor]:
        with kernel_dispatch.kernels_only_on(device):
            optimizer.step()
        return _held(params, optimizer)

    def oracle() -> list[Tensor]:
        with kernel_dispatch.kernels_only_on():
            oracle_optimizer.step()
            oracle_optimizer.step()
        return _held(oracle_params, oracle_optimizer)

    weights = [part for param in params for part in _stored(param)]
    states = launch()[len(weights) :]
    moved = 2 * bytes_of(*states) + bytes_of(*weights, *(param.grad for param in params))
    return KernelCase(launch, oracle, moved)


def _held(params: Iterable[nn.Parameter], optimizer: ElementwiseOptimizer) -> list[Tensor]:
    """Storage tensors of all weights, then of all states."""
    states = chain.from_iterable(state.values() for state in optimizer.state.values())
    return [part for tensor in (*params, *states) for part in _stored(tensor)]


def _stored(tensor: Tensor) -> list[Tensor]:
    value = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return list(value.quantized_storage.components.values()) if isinstance(value, QuantizedTensor) else [value]


def _step_of(x: Tensor, recipe: str, options: dict[str, Any]) -> KernelCase:
    return step_case(recipe, [(x.shape[0], x.shape[1]), *SMALL], x.device.type, **options)


def histories_case(x: Tensor) -> KernelCase:
    """Histories of two lengths, one for each row of x, that record amaxes with zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = [*(16 + number % 2 * 5 for number in range(x.shape[0])), x.shape[0]]
    *kernel_histories, amaxes = (
        torch.rand(n, dtype=torch.float32, generator=generator, device="cpu").to(x.device) for n in lengths
    )
    for offset, special in enumerate((0.0, float("inf"), float("nan"))):
        amaxes[offset::7] = special
    oracle_histories = [history.clone() for history in kernel_histories]

    def record(histories: list[Tensor], *types: str) -> list[Tensor]:
        with kernel_dispatch.kernels_only_on(*types):
            delayed_scaling.record_amaxes_(histories, amaxes)
            amaxes_to_scale_by = [
                delayed_scaling.history_amaxes(histories, most_recent) for most_recent in (False, True)
            ]
        return [*histories, *amaxes_to_scale_by]

    return KernelCase(
        lambda: record(kernel_histories, x.device.type),
        lambda: record(oracle_histories),
        3 * bytes_of(*kernel_histories) + 3 * bytes_of(amaxes),
    )


def too_large_case(x: Tensor) -> KernelCase:
    """Flags of tensors that exceed a limit or have NaN, and amaxes; tensors of all dtypes that kernels read."""
    generator = torch.Generator(x.device).manual_seed(0)
    shape = (x.shape[0], x.shape[1])
    tensors = [
        torch.randn(shape, dtype=torch.float32, device=x.device, generator=generator).to(dtype)
        for dtype in kernel_dispatch.KERNEL_DTYPES
        for _ in range(3)
    ]
    for tensor, last_value in zip(
        tensors, (2e4, float("nan"), 1.0, float("inf"), 1.0, -2e4, 1.0, 2e4, 1.0), strict=True
    ):
        tensor[-1, -1] = last_value

    def oracle() -> list[Tensor]:
        is_too_large = torch.stack([numerics.exceeds(tensor, LIMIT) for tensor in tensors])
        return [is_too_large, torch.stack([tensor.abs().amax().float() for tensor in tensors]).nan_to_num()]

    return KernelCase(
        lambda: [multi_tensor.exceeding(tensors, LIMIT), multi_tensor.exceeding(tensors, None).nan_to_num()],
        oracle, 2 * bytes_of(*tensors),
    )  # fmt: skip


MOMENTS: dict[str, dict[str, Any]] = {
    "": {},
    ", FP8 moments": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ", FP16 moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    ", lean8": {"preset": "lean8"},
    ", no masters": {"master_weights": False},
}
"""Options of `FusedAdam` to check."""

STEPS: dict[str, dict[str, Any]] = {
    "Adam, current, capturable": {"recipe": "current", "options": {"capturable": True}},
    "Adam, bf16, remainders": {"recipe": "bf16", "options": {"store_param_remainders": True}},
    "Lion, current": {"recipe": "current", "options": {"by": "Lion"}},
    "Muon, current": {"recipe": "current", "options": {"by": "Muon"}},
    "Muon, current, lean8": {"recipe": "current", "options": {"by": "Muon", "preset": "lean8"}},
}
STEPS |= {
    f"Adam, {name}{words}": {"recipe": name, "options": options}
    for name in recipe_names()
    for words, options in MOMENTS.items()
}

STEP_KERNELS = (
    "step_kernel", "momentum_kernel", "requantize_kernel", "tensor_scales_kernel", "tensor_past_kernel",
    "tensor_record_kernel", "corrections_kernel",
)  # fmt: skip

ROWS = (
    KernelRow(
        {"tensor_amax_kernel"}, too_large_case, {"gradients that are not finite": {}},
        ["gradients that are not finite"], (33, 2081),
    ),
    KernelRow(
        {"record_kernel", "past_kernel"}, histories_case, {"amax histories": {}}, ["amax histories"], (5, 3)
    ),
    KernelRow(
        STEP_KERNELS, _step_of, STEPS, [*(f"Adam, {name}" for name in recipe_names()), "Muon, current"], (5, 34)
    ),
)  # fmt: skip
