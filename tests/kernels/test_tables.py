"""Tables on the device: one for the same numbers, and what launches read are those numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quantshard.kernels import workspace
from quantshard.kernels.workspace import device_table, lasting_table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_table_is_found_by_its_numbers() -> None:
    first = lasting_table(((1, 2, 3), (4, 5, 1 << 62)), DEVICE)
    assert first.tensor().tolist() == [[1, 2, 3], [4, 5, 1 << 62]] and first.tensor().dtype is torch.int64
    assert lasting_table(((1, 2, 3), (4, 5, 1 << 62)), DEVICE) is first
    other = lasting_table(((1, 2, 3), (4, 5, 6)), DEVICE)
    assert other is not first and other.tensor().tolist() == [[1, 2, 3], [4, 5, 6]]


def test_no_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_TABLES", {})
    monkeypatch.setattr(workspace, "MOST_TABLES", 3)
    found = [lasting_table(((number,),), DEVICE) for number in range(8)]
    assert len(workspace._TABLES) <= 3
    assert [table.tensor().item() for table in found] == list(range(8))


def test_a_table_without_rows_is_empty() -> None:
    assert device_table([], DEVICE).shape == (0,) and device_table([], DEVICE).dtype is torch.int64


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_another_stream_waits_for_the_copy() -> None:
    """1 process: the stream that copies is busy for long, and the reader is not."""
    busy, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(100_000_000)
        table = lasting_table(((7, 8, 9),), DEVICE)
    with torch.cuda.stream(reader):
        found = table.tensor() + 0
    reader.synchronize()
    assert found.tolist() == [[7, 8, 9]]
