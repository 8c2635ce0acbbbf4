"""Gradient clipping by norm for parameters on several meshes. PyTorch's ignores the experts of other ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.optimizers.base import check_alike
from quantshard.optimizers.guards import gradient_of, gradient_parts


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of a model so that their total norm is at most `max_norm`. A collective call.

    Every element counts once, no matter which rank holds it: parameters can be plain tensors, DTensors on any mesh, or
    this rank's experts of an `ep_mesh`. Gradients must already be reduced, as FSDP2 does in `backward`. If a parameter
    has a `decoupled_grad`, it is used as the gradient; a `main_grad` counts, with `grad` if there is one.

    Args:
        model: the outermost module, not its parameters.
        max_norm: the largest norm that is not scaled down.
        norm_type: p of the p-norm; `math.inf` for the largest element.
        error_if_nonfinite: raise if the norm is infinite or NaN, instead of scaling by it.

    Returns:
        The norm before scaling, a sum in float64: a float32 scalar on the gradients' device, equal on every rank.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"clip_grad_norm_(model={type(model).__name__}): pass the model, not its parameters")
    if not (norm_type > 0 and max_norm >= 0):
        raise ConfigurationError(f"clip_grad_norm_({max_norm=}, {norm_type=}): use max_norm >= 0 and norm_type > 0")
    hooks = [hook for param in model.parameters() for hook in private_torch.accumulate_grad_hooks(param)]
    if any(getattr(hook, "releases_gradients", False) for hook in hooks):
        raise ConfigurationError("clip_grad_norm_: an optimizer has released gradients; use its max_grad_norm instead")
    norms_by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    grads: list[Tensor] = []
    for name, param, groups in _with_groups(model):
        # Ranks without gradients must join the collectives too.
        local_norms = norms_by_groups.setdefault(groups, [])
        grad = gradient_of(param)
        if grad is not None:
            check_alike(param, grad, name, "gradient")
            grads += map(private_torch.local_tensor, gradient_parts(param))
            if (local := private_torch.local_tensor(grad)).numel() > 0:  # vector_norm(inf) fails on empty tensors
                local_norms.append(torch.linalg.vector_norm(local, norm_type, dtype=torch.float64))
    total = total_norm(norms_by_groups, norm_type, grads[0].device if grads else torch.device("cpu"))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradient is {total.item()}, so it cannot be clipped to {max_norm}")
    scale = scale_to(total, max_norm)
    for local_grad in grads:
        local_grad.mul_(scale.to(local_grad.device))
    return total.float()


def scale_to(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that reduces a norm to at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def total_norm(
    norms_by_groups: Mapping[tuple[dist.ProcessGroup, ...], Sequence[Tensor]], norm_type: float, device: torch.device
) -> Tensor:
    """Combine the norms of local tensors, by the groups that hold other parts of them, float64. A collective call."""
    norms = []
    for groups, local_norms in norms_by_groups.items():
        norm = _norm(local_norms, norm_type, device)
        for group in groups:
            is_max = math.isinf(norm_type)
            powers = (norm if is_max else norm**norm_type).to(process_groups.collective_device(group))
            dist.all_reduce(powers, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
            norm = (powers if is_max else powers ** (1 / norm_type)).to(device)
        norms.append(norm)
    return _norm(norms, norm_type, device)


def _with_groups(model: nn.Module) -> Iterator[tuple[str, Tensor, tuple[dist.ProcessGroup, ...]]]:
    """Yield each parameter with its name and the process groups whose ranks hold other shards or other experts."""
    visited = set()
    for prefix, module in model.named_modules():
        axis = process_groups.expert_axis(module)
        expert_groups = () if axis is None else (axis.get_group(),)
        for name, param in module.named_parameters(prefix, recurse=False):
            if param not in visited:
                visited.add(param)
                yield name, param, process_groups.united([process_groups.sharding_group(param), expert_groups])


def _norm(norms: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms] or [zero]), p)
