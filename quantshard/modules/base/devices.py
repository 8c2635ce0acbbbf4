"""The device that a module's parameters are made on where none is named."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """PyTorch's default device if one was set, else the current GPU, else the CPU."""
    asked = torch.get_default_device()  # "with torch.device('meta'):" and torch.set_default_device
    if asked.type != "cpu":
        return asked
    return current_device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def current_device(kind: str) -> torch.device:
    """The device of this process of a kind, with its index."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
