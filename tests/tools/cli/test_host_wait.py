"""A run whose GPU waits for the host is told of `--cuda-graphs`, once, and no other one is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantshard.tools.trainer.monitoring.host_wait import HostWait
from quantshard.tools.trainer.settings.config import TrainSettings

SETTINGS = TrainSettings(recipe="current").resolved()


def told(launching: float, waiting: float, settings: TrainSettings = SETTINGS, steps: int = 60) -> list[str]:
    found: list[str] = []
    wait = HostWait(settings, lambda text, level: found.append(text))
    for step in range(steps):
        wait.add(9.0 if step < 3 else launching, waiting)  # the first steps compile
    return found


def test_a_gpu_that_waits_for_the_host_is_told_once() -> None:
    [text] = told(0.0962, 0.0003)
    assert text.startswith("the GPU waits for the host: a step takes 96 ms") and "--cuda-graphs" in text
    assert not told(0.0962, 0.0003, steps=20)


@pytest.mark.parametrize(
    ("launching", "waiting"),
    [(0.060, 0.070), (0.200, 0.008), (0.010, 0.0004)],
    ids=["launched ahead", "a full queue behind", "a few ms are no matter"],
)
def test_a_gpu_that_is_busy_is_not(launching: float, waiting: float) -> None:
    assert not told(launching, waiting)


@pytest.mark.parametrize("changes", [{"cuda_graphs": True}, {"dropout": 0.1}, {"master_weights": False}])
def test_nor_is_a_run_that_replays_or_cannot(changes: dict[str, object]) -> None:
    assert not told(0.0962, 0.0003, replace(SETTINGS, **changes))  # type: ignore[arg-type]
