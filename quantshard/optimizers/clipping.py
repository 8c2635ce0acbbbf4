"""Clipping the norm of a gradient whose parameters lie on several meshes, as where experts are spread over ranks.

PyTorch's `clip_grad_norm_` takes parameters of one mesh, and knows nothing of experts that other ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.argument_kinds import NUMBER, check_arguments, suggests_names
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.optimizers import guards


@suggests_names
@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of a model so that their common norm is at most `max_norm`. A collective call.

    Each element of a gradient counts once, on whichever rank it is: parameters may be plain, or DTensors on any meshes,
    and experts those that this rank holds of an `ep_mesh`. Gradients must be reduced already, as they are after
    `backward` under FSDP2. Where a parameter has a `decoupled_grad`, that is its gradient.

    Sums are taken in float64: squares of finite gradients do not overflow, and the norm hardly depends on the mesh.

    Args:
        model: the outermost module, whose parameters' gradients are scaled in place.
        max_norm: the largest norm that is left as it is.
        norm_type: of the p-norm; `math.inf` for the largest element.
        error_if_nonfinite: raise if the norm is infinite or NaN, instead of scaling by it.

    Returns:
        The norm before, float32 scalar on the device of the gradients, the same on every rank; infinite if it is beyond
        float32, while gradients are scaled by the true one.

    Raises:
        RuntimeError: the norm is not finite, under `error_if_nonfinite`; on every rank.
        ConfigurationError: a gradient is laid out otherwise than its parameter; or an argument means nothing, as a
            `max_norm` that is negative or NaN.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"clip_grad_norm_(model={type(model).__name__}): give the model itself, not its parameters, which do not "
            "tell on which ranks they are; torch.nn.utils.clip_grad_norm_ takes parameters of one mesh"
        )
    check_arguments("clip_grad_norm_", NUMBER, max_norm=max_norm, norm_type=norm_type)
    if not norm_type > 0:
        raise ConfigurationError(f"clip_grad_norm_(norm_type={norm_type}): use a number above 0, or math.inf")
    if not max_norm >= 0:
        raise ConfigurationError(
            f"clip_grad_norm_(max_norm={max_norm}): use a number, 0 or more; math.inf measures and scales nothing"
        )
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    grads = []
    for name, param, groups in _with_groups(model):
        mine = parts.setdefault(groups, [])  # ranks without gradients take part too
        grad = guards.gradient_of(param)
        if grad is not None:
            guards.check_alike(param, grad, name, "gradient")
            grads.append(private_torch.local_tensor(grad))
            if grads[-1].numel() > 0:  # the maximum of nothing is an error
                mine.append(torch.linalg.vector_norm(grads[-1], norm_type, dtype=torch.float64))
    device = grads[0].device if grads else torch.device("cpu")
    norms = [_over_ranks(mine, groups, norm_type, device) for groups, mine in parts.items()]
    total = torch.linalg.vector_norm(torch.stack(norms or [_zero(device)]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradient is {total.item()}, so it cannot be clipped to {max_norm}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for each in grads:
        each.mul_(scale.to(each.device))
    return total.float()


def _with_groups(model: nn.Module) -> Iterator[tuple[str, Tensor, tuple[dist.ProcessGroup, ...]]]:
    """Each parameter with its name and the ranks that hold other elements: those that it is sharded over, and other
    experts."""
    seen = set()
    for prefix, module in model.named_modules():
        axis = process_groups.expert_axis(module)
        spread = () if axis is None else (axis.get_group(),)
        for name, param in module.named_parameters(prefix, recurse=False):
            if param not in seen:
                seen.add(param)
                yield name, param, process_groups.united([process_groups.sharding_group(param), spread])


def _over_ranks(norms: list[Tensor], groups: tuple[dist.ProcessGroup, ...], p: float, device: torch.device) -> Tensor:
    """The norm of all elements behind local norms, of all ranks of the groups together; one collective for each."""
    found = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms] or [_zero(device)]), p)
    for group in groups:
        powers = (found if math.isinf(p) else found**p).to(process_groups.collective_device(group))
        dist.all_reduce(powers, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group)
        found = (powers if math.isinf(p) else powers ** (1 / p)).to(device)
    return found


def _zero(device: torch.device) -> Tensor:
    """The norm of no element."""
    return torch.zeros((), dtype=torch.float64, device=device)
