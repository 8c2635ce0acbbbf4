"""Curves of a million points as some thousand, and rows of a thousand columns as some hundred, no peak lost.

A curve keeps the smallest and the largest value of each of equally many steps (and the first and the last point): a
spike of one step stays as high as it is, which means and every n-th point would hide.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def thinned(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """The indices of the points of a curve [N] that are drawn, ascending, `most` of them at most (4 at least)."""
    count = len(values)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    buckets = max(1, (most - 2) // 2)
    width = -(-count // buckets)
    full = count // width * width
    grid = values[:full].reshape(-1, width)
    starts = np.arange(0, full, width)
    kept = [starts + grid.argmin(1), starts + grid.argmax(1), np.array([0, count - 1])]
    if full < count:
        kept.append(np.array([full + values[full:].argmin(), full + values[full:].argmax()]))
    return np.unique(np.concatenate(kept)).astype(np.int64)
