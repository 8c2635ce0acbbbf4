"""`load_state_dict(assign=True)`: a module takes the loaded tensors themselves, from the meta device or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY
from tests.distributed.models import RECIPES, bits, set_gradients, sha
from tests.distributed.pool import run_ranks
from tests.tensor.test_tensor import differing


def build(recipe: str, seed: int, device: str = "cpu", quantized: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    with qs.quantized_model_init(enabled=quantized, recipe=RECIPES[recipe]):
        return nn.Sequential(
            qs.Linear(32, 48, params_dtype=torch.bfloat16, device=device),
            qs.LayerNormLinear(48, 33, params_dtype=torch.bfloat16, device=device),
        )


def stepped(model: nn.Module, *steps: int) -> nn.Module:
    """Trained by stochastic rounding, which draws by keys and counts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
    return model


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_takes_the_tensors(recipe: str, device: str, quantized: bool) -> None:
    source = stepped(build(recipe, 3, quantized=quantized), 0)
    state = {key: value.clone() for key, value in source.state_dict().items()}
    model = build(recipe, 4, device, quantized)
    model[0].weight.requires_grad_(False)
    before = model[0].weight
    model.load_state_dict(state, assign=True)
    assert not differing(source.state_dict(), model.state_dict())
    assert model[0].weight is not before and isinstance(model[0].weight, nn.Parameter)
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    found = model.state_dict()
    own = (f"_{RNG_KEY}", f"_{RNG_DRAWS}", "weight_amax_history", "_format")  # what a module counts by itself
    for key, value in state.items():
        assert (found[key].data_ptr() == value.data_ptr()) is not key.endswith(own), key
    model[0].weight.requires_grad_(True)
    with qs.autocast(recipe=RECIPES[recipe]):
        outputs = [m(torch.ones(16, 32, dtype=torch.bfloat16)) for m in (source, model)]
    assert torch.equal(*outputs)
    assert not differing(stepped(source, 1, 2).state_dict(), stepped(model, 1, 2).state_dict())


def test_a_whole_weight_or_none_of_it() -> None:
    state = build("mxfp8", 3).state_dict()
    model = build("mxfp8", 4, "meta")
    del state["0.weight_scale_inv"]
    with pytest.raises(RuntimeError, match=r"lacks 0\.weight_scale_inv; load all components or none"):
        model.load_state_dict(state, assign=True)
    assert model[0].weight.is_meta and not model[1].weight.is_meta
    state = {key: value for key, value in state.items() if key.startswith("1.") or key == "0.bias"}
    model = build("mxfp8", 4, "meta")
    assert "0.weight" in model.load_state_dict(state, assign=True, strict=False).missing_keys
    assert model[0].weight.is_meta


def test_without_it_loading_onto_the_meta_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"to_empty\(\) first, or load_state_dict\(assign=True\)"):
        build("mxfp8", 4, "meta").load_state_dict(build("mxfp8", 3).state_dict())


def of_shards(recipe: str) -> list[dict[str, Any]]:
    """The bits of a sharded model, and of one from the meta device that took its tensors, each after further steps."""
    found = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    source, model = build(recipe, 3), build(recipe, 4, "meta")
    for part in (*source, *model):
        fully_shard(part, mesh=mesh)
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in source.state_dict().items()
    }
    cut = build(recipe, 5, "meta")
    for layer in cut:
        fully_shard(layer, mesh=mesh)
    layer = cut[0]
    layer.load_state_dict(
        {k.removeprefix("0."): v for k, v in whole.items() if k.startswith("0.weight")}, strict=False, assign=True
    )
    part = layer.state_dict()["weight"].to_local()
    assert part.untyped_storage().nbytes() == part.nbytes  # and does not keep the whole
    assert sha(layer.state_dict()["weight"]) == sha(whole["0.weight"])
    model.load_state_dict({key: value.clone() for key, value in source.state_dict().items()}, assign=True)
    for each in (source, model):
        optimizer = FusedAdam(each.named_parameters(), lr=1e-2)
        with qs.autocast(recipe=RECIPES[recipe]):
            each(torch.ones(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        found.append(bits(each, optimizer))
        assert components.quantized_local(each[0].weight) is not None
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "delayed"])
def test_shards(recipe: str) -> None:
    """3 ranks."""
    for one, other in run_ranks(3, of_shards, recipe):
        assert one == other
