"""Hashes of tensors, for processes of several virtual environments."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def sha(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
