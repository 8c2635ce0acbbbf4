"""The kernels over many tensors: steps of `FusedAdam`, amax histories, and gradients that are too large.

Each function returns whether they give what plain PyTorch gives, bit for bit. Imported only where `kernels.USABLE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import kernel_dispatch, numerics
from quantshard import recipe as recipes
from quantshard.collectives import delayed_scaling
from quantshard.doctor.cases import same_bits
from quantshard.kernels.optimizer import multi_tensor
from quantshard.optimizers import FusedAdam
from quantshard.tensor.quantized_tensor import QuantizedTensor, quantize_weight

Shape = tuple[int, int]


def weights(shapes: Sequence[Shape], device: str) -> Iterator[Tensor]:
    """Random float32 matrices."""
    generator = torch.Generator(device).manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, dtype=torch.float32, device=device, generator=generator).mul_(0.02)


def with_gradients(params: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """The same, each with a random gradient of a dtype."""
    generator = torch.Generator(params[0].device).manual_seed(1)
    for param in params:
        grad = torch.randn(param.shape, dtype=torch.float32, device=param.device, generator=generator).mul_(1e-3)
        param.grad = grad.to(dtype)
    return params


def fused_adam(
    recipe: str, shapes: Sequence[Shape], device: str, **options: Any
) -> tuple[list[nn.Parameter], FusedAdam]:
    """Weights as a recipe stores them (bfloat16, if it stores none), with bfloat16 gradients, and their optimizer."""
    torch.manual_seed(0)  # for the keys of random words
    cell = recipes.resolve(recipe).weight
    params = [
        nn.Parameter(w.bfloat16() if cell is None else quantize_weight(w, cell, dtype=torch.bfloat16))
        for w in weights(shapes, device)
    ]
    return with_gradients(params, torch.bfloat16), FusedAdam(params, lr=1e-5, weight_decay=0.1, **options)


def has_oracles_bits(recipe: str, shapes: Sequence[Shape], device: str, **options: Any) -> bool:
    """Whether two steps give what they give without kernels: weights and states."""
    found = []
    for types in ((device,), ()):
        params, optimizer = fused_adam(recipe, shapes, device, **options)
        with kernel_dispatch.kernels_only_on(*types):
            optimizer.step()
            optimizer.step()
        states = chain.from_iterable(state.values() for state in optimizer.state.values())
        found.append([*chain.from_iterable(map(_stored, params)), *chain.from_iterable(map(_stored, states))])
    return all(same_bits(a, b) for a, b in zip(*found, strict=True))


def _stored(tensor: Tensor) -> list[Tensor]:
    held = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return list(held.quantized_storage.components.values()) if isinstance(held, QuantizedTensor) else [held]


def histories(shape: Shape, device: torch.device) -> bool:
    """As many histories as the shape has rows, of two lengths; amaxes with zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = [*(16 + number % 2 * 5 for number in range(shape[0])), shape[0]]
    *kept, amaxes = (torch.rand(n, dtype=torch.float32, generator=generator).to(device) for n in lengths)
    for at, odd in enumerate((0.0, float("inf"), float("nan"))):
        amaxes[at::7] = odd
    expected = [history.clone() for history in kept]
    with kernel_dispatch.kernels_only_on():
        delayed_scaling.record_amaxes_(expected, amaxes)
    with kernel_dispatch.kernels_only_on(device.type):
        delayed_scaling.record_amaxes_(kept, amaxes)
    return all(same_bits(one, other) for one, other in zip(kept, expected, strict=True))


def too_large(shape: Shape, device: torch.device) -> bool:
    """Which of some tensors, of all dtypes that kernels read, have a number beyond a limit or none at all."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, dtype=torch.float32, generator=generator).to(dtype).to(device)
        for dtype in kernel_dispatch.KERNEL_DTYPES
        for _ in range(3)
    ]
    for tensor, odd in zip(tensors, (2e4, float("nan"), 1.0, float("inf"), 1.0, -2e4, 1.0, 2e4, 1.0), strict=True):
        tensor[-1, -1] = odd
    expected = [float(numerics.exceeds(tensor, 1e4)) for tensor in tensors]
    amaxes = multi_tensor.tensor_amaxes(tensors)
    largest = torch.stack([tensor.abs().amax().float() for tensor in tensors])
    nan = amaxes.isnan() & largest.isnan()
    right = torch.equal(amaxes.masked_fill(nan, 0), largest.masked_fill(nan, 0))
    return right and multi_tensor.exceeding(tensors, 1e4).tolist() == expected
