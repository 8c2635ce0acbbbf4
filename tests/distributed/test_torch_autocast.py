"""torch.autocast over sharded models: FSDP2 with and without its own mixed precision, and tensor parallelism.

On 1 and 3 ranks; 2 for tensor parallelism. Bits are those of the same run whose inputs are cast by hand.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import quantshard as qs
from tests.distributed.models import sha
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

WIDTH = 24  # of blocks that ranks share
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16 compute": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "inputs as they are": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    "float32 outputs": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}


def trained(recipe: str, policy: str, autocast: bool, dtype: torch.dtype, reshard: bool) -> list[str]:
    """Losses, gradients and weights of two steps."""
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        layers = [qs.LayerNormMLP(WIDTH, 40, device="cpu"), qs.Linear(WIDTH, WIDTH, device="cpu")]
    model, mesh = nn.Sequential(*layers), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=POLICIES[policy], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    found = []
    for step in range(2):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with torch.autocast("cpu", dtype) if autocast else nullcontext(), qs.autocast(recipe=recipe):
            out = model(x if autocast else x.to(dtype))
        assert out.dtype == (torch.float32 if policy == "float32 outputs" else dtype)
        out.float().square().sum().backward()
        assert all(param.grad.dtype == torch.float32 for param in model.parameters())
        found += [sha(out), *(sha(param.grad.to_local()) for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_under_fsdp() -> None:
    cases = [
        ("nvfp4", "none", torch.float16, True),
        ("delayed", "bf16 compute", torch.bfloat16, True),
        ("block", "inputs as they are", torch.bfloat16, False),
        ("mxfp8", "float32 outputs", torch.bfloat16, True),
    ]
    run_ranks(3, all_alike, cases)


def all_alike(cases: list[tuple[str, str, torch.dtype, bool]]) -> None:
    for recipe, policy, dtype, reshard in cases:
        found = trained(recipe, policy, True, dtype, reshard)
        by_hand = trained(recipe, policy, False, dtype, reshard)
        assert found == by_hand, (recipe, policy)


def test_under_tensor_parallelism() -> None:
    run_ranks(2, cut_alike)


def cut_alike() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for recipe, sequence_parallel in (("bf16", True), ("mxfp8", False), ("current", True)):
        found = []
        for autocast in (True, False):
            torch.manual_seed(0)
            with qs.quantized_model_init(recipe=recipe):
                layer = qs.TransformerLayer(
                    32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, tp_mesh=mesh,
                    sequence_parallel=sequence_parallel, device="cpu",
                )  # fmt: skip
            x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(1))
            x = x.requires_grad_() if autocast else x.bfloat16().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), qs.autocast(recipe=recipe):
                out = layer(x)
            out.float().square().sum().backward()
            grads = [sha(param.grad.to_local()) for param in layer.parameters()]
            found.append([out.dtype, sha(out), sha(x.grad.float()), *grads])
        assert found[0] == found[1], recipe
