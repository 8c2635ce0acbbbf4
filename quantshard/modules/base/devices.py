"""The default device of a module's parameters."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """PyTorch's default device if one was set, else the current GPU, else the CPU."""
    device = torch.get_default_device()  # set by "with torch.device('meta'):" or torch.set_default_device
    if device.type != "cpu":
        return device
    return current_device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def current_device(kind: str) -> torch.device:
    """The current device of a device type, with its index."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
