"""Loads of the experts of a mixture: figures and rows of a step, and an alarm for experts that get few tokens."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from quantshard.tools.statistics.rows import Alarm

SPAN: Final = 50
"""Steps over which the loads of an alarm are summed."""


class ExpertLoads:
    """Loads of the experts of each layer, relative to the layer's mean: 1 is an even load.

    `limit`: load over `SPAN` steps below which an expert raises an alarm, once until it recovers; 0: off.
    `figures`: the largest load of the last step, and the share of rows that were dropped.
    `rows`: the loads of the last step, as rows of `statistics.jsonl`.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.figures, self.rows = limit, dict[str, float](), list[dict[str, Any]]()
        self._history, self._dead = list[Tensor](), set[tuple[int, int]]()

    def add(self, step: int, layers: int, counts: Sequence[float]) -> Alarm | None:
        """Add a step. `counts`: of each layer, the rows of each expert and then the number of dropped rows."""
        table = torch.tensor(counts, dtype=torch.float64, device="cpu").view(layers, -1)
        rows, dropped = table[:, :-1], table[:, -1] / table[:, :-1].sum(1)
        loads = rows / rows.mean(1, keepdim=True)
        figures = {"expert_load_max": loads.max().item(), "dropped_rows": dropped.mean().item()}
        self.figures = {name: figure for name, figure in figures.items() if figure}
        self.rows = [
            {"name": f"layers.{layer}.mlp", "role": "experts", "load": [round(load, 4) for load in of_layer],
             "load_max": max(of_layer), "load_min": min(of_layer), "dropped": share}
            for layer, (of_layer, share) in enumerate(zip(loads.tolist(), dropped.tolist(), strict=True))
        ]  # fmt: skip
        self._history.append(loads)
        if len(self._history) < SPAN:
            return None
        # every step has the same number of rows
        loads, self._history = torch.stack(self._history).mean(0), []
        dead = {(layer, expert) for layer, expert in (loads < self.limit).nonzero().tolist()}
        new, self._dead = sorted(dead - self._dead), dead
        if not new:
            return None
        layer, expert = min(new, key=lambda place: loads[place].item())
        name, load = f"layers.{layer}.mlp", loads[layer, expert].item()
        text = f"expert {expert} of {name} got {load:.1%} of the mean load in {SPAN} steps, less than {self.limit:.1%}"
        more = f"; {len(new) - 1} more are below" if len(new) > 1 else ""
        return Alarm("dead expert", f"{name}.{expert}", load, f"step {step}: {text}{more}")
