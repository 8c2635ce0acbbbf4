"""The state that a parameter has in addition to its values: its random key, a count of draws and an amax history."""

import torch
from torch import Tensor

from quantshard import kernel_dispatch, limits
from quantshard.errors import UnsupportedOperationError
from quantshard.numerics import RandomBits
from quantshard.recipe import QuantSpec
from quantshard.sharding import Shard

RNG_KEY, RNG_DRAWS, AMAX_HISTORY = "key", "draws", "amax_history"
"""Names in a state dict: Philox's key, the number of draws under this key, and past amaxes of a weight."""

INIT_STREAM, GRADIENT_STREAM, WEIGHT_STREAM, SEED_STREAM, STREAMS_PER_RANK = 0, 1, 3, 4, 16
"""Streams of `numerics.random_words` under a parameter's key: one per use of the random words of a draw. A tensor that
differs between ranks adds rank * STREAMS_PER_RANK."""


def weight_state(spec: QuantSpec | None, device: torch.device | str) -> dict[str, Tensor]:
    """New state of a parameter, small tensors that are equal on all ranks.
    The key is drawn on the CPU for every device, "meta" included, so that equally seeded ranks get equal keys."""
    state = {RNG_KEY: random_key(), RNG_DRAWS: torch.zeros(1, dtype=torch.int64, device="cpu")}
    if spec is not None and spec.scaling.history:
        state[AMAX_HISTORY] = torch.zeros(spec.scaling.history, dtype=torch.float32, device=device)
    return state


def random_key() -> Tensor:
    """A key for Philox: int64 [1] on the CPU, from torch's CPU generator."""
    info = torch.iinfo(torch.int64)
    return torch.randint(info.min, info.max, (1,), dtype=torch.int64, device="cpu")


def moved_state(state: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
    """A copy of a state for a weight on `device` (None: the same one). The key stays on the CPU."""
    copied = {name: value.clone() for name, value in state.items()}
    if AMAX_HISTORY in copied:
        copied[AMAX_HISTORY] = copied[AMAX_HISTORY].to(device)
    move_draws(copied, device)
    return copied


def state_of_matrix(state: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """State of one matrix of a stack: a key of its own, and the shared number of draws."""
    return {RNG_KEY: state[RNG_KEY] + index, RNG_DRAWS: state[RNG_DRAWS]}


def counts_on_host(state: dict[str, Tensor]) -> bool:
    """True if the host counts a parameter's draws: the default, until `modules.capturable_` is called."""
    return state[RNG_DRAWS].is_cpu


def move_draws(state: dict[str, Tensor], device: torch.device | None) -> None:
    """Move the count of draws to a weight's new device (from meta to the CPU), unless the host counts them."""
    if device is not None and RNG_DRAWS in state and not counts_on_host(state):
        state[RNG_DRAWS] = state[RNG_DRAWS].to("cpu" if device.type == "meta" else device)


def next_draw(state: dict[str, Tensor]) -> int | Tensor:
    """Count one more draw of a parameter and return its number, as an int64 scalar if a GPU counts them."""
    draws = state[RNG_DRAWS]
    if not counts_on_host(state):
        number: int | Tensor = draws.view(()).clone()  # `add_` below would change a view
    elif kernel_dispatch.is_capturing():
        raise UnsupportedOperationError(limits.refusal("captured rounding", "stochastic rounding"))
    else:
        number = int(draws)
    draws.add_(1)
    return number


def rounding_words(state: dict[str, Tensor], shard: Shard) -> RandomBits:
    """Random words for the stochastic rounding of a weight's new values. Every rank that holds a piece must call."""
    draw = next_draw(state)
    return RandomBits(int(state[RNG_KEY]), draw, WEIGHT_STREAM, shard.global_shape, shard.origin, shard.shape)
