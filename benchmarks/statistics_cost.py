"""What `quantshard.Statistics` costs: milliseconds of a training step without, at every 10 steps, and at every step.

    python benchmarks/statistics_cost.py [--layers 4] [--hidden 2048] [--ffn 8192] [--tokens 4096]
        [--recipes mxfp8,delayed] [--rounds 3]

A step is forward, backward and FusedAdam of some TransformerLayers in bfloat16. One process measures all three, in
turns, so that what slows the machine slows all: of each round the mean of 10 steps, and of the rounds the median.
Prints a table; ratios are to the steps without.
"""

from __future__ import annotations

import argparse
import datetime
import time
from statistics import median

import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.optimizers import FusedAdam

STEPS = 10
EVERY = {"off": 0, "every 10 steps": 10, "every step": 1}


class TimedTraining:
    """A model that is trained, with statistics or without."""

    def __init__(self, arguments: argparse.Namespace, recipe: str, device: str) -> None:
        torch.manual_seed(0)
        self.recipe, heads = recipe, max(1, arguments.hidden // 64)
        with qs.quantized_model_init(recipe=recipe):
            self.model = nn.Sequential(
                *(
                    qs.TransformerLayer(
                        arguments.hidden, arguments.ffn, heads, layer_number=number + 1, normalization="RMSNorm",
                        activation="swiglu", bias=False, self_attn_mask_type="causal", attn_input_format="bshd",
                        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device=device,
                    )
                    for number in range(arguments.layers)
                )
            )  # fmt: skip
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(1, arguments.tokens, arguments.hidden, dtype=torch.float32, device=device).bfloat16()

    def step(self) -> Tensor:
        """Train a step."""
        with qs.autocast(recipe=self.recipe):
            loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def milliseconds(self, every: int) -> float:
        """Of a step, the mean of `STEPS`."""
        with qs.Statistics(self.model, self.optimizer, every=every, saturation=1) as statistics:
            _wait()
            began = time.perf_counter()
            for _ in range(STEPS):
                self.step()
                statistics.step()
            _wait()
            return (time.perf_counter() - began) * 1000 / STEPS


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows(arguments: argparse.Namespace) -> list[tuple[str, dict[str, float]]]:
    """Milliseconds by recipe and by how often is sampled."""
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for recipe in arguments.recipes.split(","):
        training = TimedTraining(arguments, recipe, device)
        for every in EVERY.values():
            training.milliseconds(every)  # compiles kernels, and fills histories
        times: dict[str, list[float]] = {name: [] for name in EVERY}
        for _ in range(arguments.rounds):
            for name, every in EVERY.items():
                times[name].append(training.milliseconds(every))
        found.append((recipe, {name: median(of) for name, of in times.items()}))
    return found


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 2048), ("ffn", 8192), ("tokens", 4096), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", default="mxfp8,delayed")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{where}, {datetime.date.today()}, torch {torch.__version__}: {arguments.layers} layers of "
        f"{arguments.hidden} x {arguments.ffn}, {arguments.tokens} tokens\n"
    )
    print("| recipe |", " | ".join(f"{name}, ms" for name in EVERY), "| ratio, every 10 | ratio, every step |")
    print("|---" * (len(EVERY) + 3) + "|")
    for recipe, times in rows(arguments):
        off, *others = times.values()
        ratios = [f"{other / off:.3f}" for other in others]
        print(f"| {recipe} |", " | ".join([*(f"{value:.1f}" for value in times.values()), *ratios]), "|")


if __name__ == "__main__":
    main()
