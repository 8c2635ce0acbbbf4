"""Moments of every pair of dtypes beside Adam in float64: the largest update, and how far updates are off.

    python benchmarks/moments.py

One parameter of 16 x 256 elements, each of which has gradients of its own size: two blocks of a row share a scale in
moments of 16 and 8 bits with scales. 300 steps of each kind of gradient; the parameter is put back to zero before each,
so what it is after it is the update. Prints the table of benchmarks/RESULTS.md; a few minutes on one core.
"""

from __future__ import annotations

import datetime
import itertools
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

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


class Found(NamedTuple):
    """`largest`: update in learning rates. `error`: of all updates, root mean square beside that of the updates."""

    largest: float
    error: float


def gradients(kind: str, step: int) -> Tensor:
    """Of one step, float32."""
    drawn = torch.Generator().manual_seed(1000 + step)
    normal = torch.randn(SHAPE, generator=drawn, dtype=torch.float32)
    now, own = (
        10 ** (18 * torch.rand(SHAPE, generator=g, dtype=torch.float32) - 12)
        for g in (drawn, torch.Generator().manual_seed(5))
    )
    if kind in ("1e4", "1e6"):
        normal[:, ::128] *= float(kind)
    rare = torch.rand(SHAPE, generator=drawn, dtype=torch.float32) < 0.02
    of_kind = {
        "decades": normal * own, "rare": normal * own * rare, "bursts": normal * now, "constant": own,
        "signs": own * (-1) ** (step // 7), "late": own * (step > 100),
    }  # fmt: skip
    return of_kind.get(kind, normal)


def measure(first: str, second: str, kind: str) -> Found:
    """Steps of FusedAdam beside those of Adam in float64 on the same gradients."""
    param = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float32))
    torch.manual_seed(0)
    optimizer = FusedAdam(
        [param], lr=1.0, betas=BETAS, eps=EPS, exp_avg_dtype=DTYPES[first], exp_avg_sq_dtype=DTYPES[second]
    )
    beta1, beta2 = torch.tensor(BETAS, dtype=torch.float32).double().tolist()
    m = v = torch.zeros(SHAPE, dtype=torch.float64)
    largest = off = of_all = 0.0
    for step in range(1, STEPS + 1):
        grad = gradients(kind, step)
        param.data.zero_()
        param.grad = grad
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * grad.double(), beta2 * v + (1 - beta2) * grad.double() ** 2
        exact = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + EPS)
        update = -param.detach().double()
        largest = max(largest, update.abs().max().item())
        off += (update - exact).square().sum().item()
        of_all += exact.square().sum().item()
    return Found(largest, (off / of_all) ** 0.5)


def main() -> None:
    torch.set_num_threads(1)
    print(f"CPU, {datetime.date.today()}, torch {torch.__version__}\n")
    print("| exp_avg | exp_avg_sq |", " | ".join(KINDS), "|")
    print("|---" * (2 + len(KINDS)) + "|")
    for first, second in itertools.product(DTYPES, DTYPES):
        cells = [measure(first, second, kind) for kind in KINDS]
        print(f"| {first} | {second} |", " | ".join(f"{c.largest:.3g} / {c.error:.1g}" for c in cells), "|", flush=True)
    print("\n" + "; ".join(f"*{kind}*: {words}" for kind, words in KINDS.items()))


if __name__ == "__main__":
    main()
