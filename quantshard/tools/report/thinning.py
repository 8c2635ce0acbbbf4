"""Downsampling of long curves without losing peaks.

A curve keeps the minimum and maximum of each bucket of equally many steps, plus the first and last points. A spike of
one step therefore keeps its height, which averaging or taking every n-th point would hide.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def thinned(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Ascending int64 indices of at most `most` points (>= 4) that represent a curve [N]."""
    count = len(values)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    buckets = max(1, (most - 2) // 2)
    width = -(-count // buckets)
    full = count // width * width
    grid = values[:full].reshape(-1, width)
    starts = np.arange(0, full, width)
    indices = [starts + grid.argmin(1), starts + grid.argmax(1), np.array([0, count - 1])]
    if full < count:
        indices.append(np.array([full + values[full:].argmin(), full + values[full:].argmax()]))
    return np.unique(np.concatenate(indices)).astype(np.int64)
