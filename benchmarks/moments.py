"""Compare FusedAdam with moments of every pair of dtypes with Adam in float64 on the same gradients.

    python benchmarks/moments.py

One parameter of 16 x 256 elements takes 300 steps for each kind of gradients; two blocks of a row have separate scales
in moments with scales. The parameter is reset to zero before each step, so its value after the step is the update.
Prints a Markdown table in a few minutes on one core: rows are pairs of dtypes, columns kinds of gradients, and cells
`largest update in learning rates / error of all updates` (root mean square, relative to the updates).
"""

from __future__ import annotations

import datetime
import itertools
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import table_head, table_row
from quantshard.optimizers import FusedAdam

DTYPES: Final = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16, "FP8": torch.uint8}
SHAPE, STEPS, BETAS, EPS = (16, 256), 300, (0.9, 0.999), 1e-8

KINDS: Final = {
    "alike": "all of one size",
    "1e4": "one in 128 larger by 1e4",
    "1e6": "one in 128 larger by 1e6",
    "decades": "each element of its own size, from 1e-12 to 1e6",
    "rare": "the same, in 2 % of the steps",
    "bursts": "of another size in each step, from 1e-12 to 1e6",
    "constant": "each element of its own size, always the same",
    "signs": "the same, of another sign every 7 steps",
    "late": "the same, zero in the first 100 steps",
}


class UpdateErrors(NamedTuple):
    """`largest`: largest update in learning rates. `error`: root mean square error relative to the exact updates."""

    largest: float
    error: float


def gradients(kind: str, step: int) -> Tensor:
    """Draw the float32 gradients of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    normal = torch.randn(SHAPE, generator=generator, dtype=torch.float32)
    step_sizes, element_sizes = (
        10 ** (18 * torch.rand(SHAPE, generator=g, dtype=torch.float32) - 12)
        for g in (generator, torch.Generator().manual_seed(5))
    )
    if kind in ("1e4", "1e6"):
        normal[:, ::128] *= float(kind)
    is_rare = torch.rand(SHAPE, generator=generator, dtype=torch.float32) < 0.02
    by_kind = {
        "decades": normal * element_sizes, "rare": normal * element_sizes * is_rare, "bursts": normal * step_sizes,
        "constant": element_sizes, "signs": element_sizes * (-1) ** (step // 7), "late": element_sizes * (step > 100),
    }  # fmt: skip
    return by_kind.get(kind, normal)


def measure(exp_avg: str, exp_avg_sq: str, kind: str) -> UpdateErrors:
    """Compare the updates of FusedAdam with Adam in float64."""
    param = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float32))
    torch.manual_seed(0)
    optimizer = FusedAdam(
        [param], lr=1.0, betas=BETAS, eps=EPS, exp_avg_dtype=DTYPES[exp_avg], exp_avg_sq_dtype=DTYPES[exp_avg_sq]
    )
    beta1, beta2 = torch.tensor(BETAS, dtype=torch.float32).double().tolist()
    m = v = torch.zeros(SHAPE, dtype=torch.float64)
    largest = squared_errors = squares = 0.0
    for step in range(1, STEPS + 1):
        grad = gradients(kind, step)
        param.data.zero_()
        param.grad = grad
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * grad.double(), beta2 * v + (1 - beta2) * grad.double() ** 2
        exact = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + EPS)
        update = -param.detach().double()
        largest = max(largest, update.abs().max().item())
        squared_errors += (update - exact).square().sum().item()
        squares += exact.square().sum().item()
    return UpdateErrors(largest, (squared_errors / squares) ** 0.5)


def main() -> None:
    torch.set_num_threads(1)
    print(f"CPU, {datetime.date.today()}, torch {torch.__version__}\n")
    print(table_head(["exp_avg", "exp_avg_sq", *KINDS]))
    for exp_avg, exp_avg_sq in itertools.product(DTYPES, DTYPES):
        errors = [measure(exp_avg, exp_avg_sq, kind) for kind in KINDS]
        cells = [f"{e.largest:.3g} / {e.error:.1g}" for e in errors]
        print(table_row([exp_avg, exp_avg_sq, *cells]), flush=True)
    print("\n" + "; ".join(f"*{kind}*: {description}" for kind, description in KINDS.items()))


if __name__ == "__main__":
    main()
