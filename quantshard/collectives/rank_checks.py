"""Checks that ranks hold equal values."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard.collectives.process_groups import Groups, collective_device, spanned
from quantshard.errors import RankMismatchError

_DIGEST = 0xFFFFFF  # 24 bits, which a float32 holds exactly: digests are reduced together with amaxes


def rank_digest(identity: object, device: torch.device) -> Tensor:
    """Return a digest of `repr(identity)`, which all ranks compare, and its complement: float32 [2], for `FlatMax`."""
    checksum = zlib.crc32(repr(identity).encode()) & _DIGEST  # not `hash`, which differs between processes
    # Filling on the device avoids a copy that the host would wait for.
    digest = torch.full((2,), checksum, dtype=torch.float32, device=device)
    digest[1].fill_(_DIGEST - checksum)
    return digest


def was_alike(highest: Any, complement: Any) -> Any:
    """True (a bool, or a tensor of one) if all ranks had the same `rank_digest`, given the maxima of its two numbers.
    If two ranks differ, one has the larger digest and the other the larger complement, so the maxima add up to more."""
    return highest + complement == _DIGEST


SEED_ALIKE = "seed torch alike on all ranks (torch.manual_seed(seed)) before the model is built, or load a checkpoint"


def check_equal_on_ranks(named: dict[str, Tensor], group: Groups, what: str, remedy: str = SEED_ALIKE) -> None:
    """Raise the same error on all ranks of `group` if int64 tensors [1] differ. One collective per process group."""
    if not spanned(group) or not named:
        return
    values = torch.cat([v.reshape(1) for v in named.values()])
    extremes = torch.stack([values, ~values])  # ~ reverses the order, also for the smallest int64
    for member in spanned(group):
        extremes = extremes.to(collective_device(member))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=member)
    highest, lowest = extremes[0].cpu(), ~extremes[1].cpu()
    for name, high, low in zip(named, highest.tolist(), lowest.tolist(), strict=True):
        if high != low:
            raise RankMismatchError(f"{what} of {name!r} differs between ranks ({low} and {high}); {remedy}")
