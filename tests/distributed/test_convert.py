"""Models of transformers that `convert` quantized: trained by plain FSDP2 loops, saved and loaded; 1 to 3 ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import errors
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.distributed.models import bits, set_gradients
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
SIZES = {
    "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
}
"""By name: transformers imports what it is asked for."""
LINEAR_LAYERS = 2 * 7


def build(family: str, recipe: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    kind, config = (getattr(transformers, name) for name in FAMILIES[family])
    return kind(config(**SIZES)).to(torch.bfloat16)


def sharded(family: str, recipe: str) -> transformers.PreTrainedModel:
    """On all ranks."""
    model = build(family, recipe)
    assert len(qs.convert(model, recipe).converted) == LINEAR_LAYERS
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(family: str, recipe: str, folder: Path) -> tuple[dict[str, str], list[float], int]:
    """Bits after a step of the same gradients on every mesh, saved; losses from there, and how many weights changed."""
    model = sharded(family, recipe)
    optimizer = FusedAdam(model.named_parameters(), lr=3e-3)
    set_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    stepped = bits(model, optimizer)
    qs.checkpoints.save(folder, model, optimizer)
    names = [name for name, each in model.named_parameters() if components.quantized_local(each) is not None]
    before = {name: value for name, value in bits(model).items() if name in names}
    tokens = torch.randint(101, (6, 12), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = bits(model)
    return stepped, losses, sum(after[name] != value for name, value in before.items())


def loaded(family: str, recipe: str, folder: Path) -> dict[str, str]:
    model = sharded(family, recipe)
    optimizer = FusedAdam(model.named_parameters(), lr=3e-3)
    qs.checkpoints.load(folder, model, optimizer)
    return bits(model, optimizer)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("qwen3", "block"),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("llama", "mxfp8"), ("gemma3", "nvfp4"))),
    ],
)
def test_a_model_of_transformers_trains_under_fsdp2(family: str, recipe: str, tmp_path: Path) -> None:
    """1 and 3 ranks: equal bits after a step, all quantized weights change, losses fall, and 1 loads what 3 saved."""
    one, three = (run_ranks(n, trained, family, recipe, tmp_path / str(n)) for n in (1, 3))
    for stepped, losses, changed in (*one, *three):
        assert stepped == one[0][0]
        assert losses[-1] < losses[0] and changed == LINEAR_LAYERS
    assert run_ranks(1, loaded, family, recipe, tmp_path / "3") == [one[0][0]]


def trained_alike(modules: str, recipe: str, where: str) -> tuple[dict[str, str], list[float], int]:
    """Bits and losses of two steps in float32, and how many times it was said that layers run one by one.

    `where`: what is sharded by itself, decoder layers, or the projections of an MLP too.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    errors._warned_topics.clear()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    qs.convert(model, recipe, modules=modules)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        if where == "projections":
            fully_shard(layer.mlp.up_proj, mesh=mesh)
        elif where == "mlps":
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdam(model.named_parameters(), lr=3e-3)
    tokens = torch.randint(101, (6, 12), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    told = [each for each in caught if "one by one" in str(each.message)]
    return bits(model, optimizer), losses, len(told)


@pytest.mark.parametrize(
    ("ranks", "recipe", "where"),
    [
        pytest.param(2, "mxfp8", "projections", marks=pytest.mark.exhaustive),
        (3, "delayed", "layers"),
        pytest.param(2, "nvfp4", "mlps", marks=pytest.mark.exhaustive),
        pytest.param(3, "block", "projections", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_computed_together(ranks: int, recipe: str, where: str) -> None:
    """2 and 3 ranks: those of `modules="linear"`; a projection that is sharded by itself is called, which is said."""
    linear, fused = (run_ranks(ranks, trained_alike, modules, recipe, where) for modules in ("linear", "fused"))
    for (bits_of, losses, told), (fused_bits, fused_losses, fused_told) in zip(linear, fused, strict=True):
        assert fused_bits == bits_of and fused_losses == losses
        assert (told, fused_told) == (0, 1 if where == "projections" else 0)


def test_stacked_experts_are_listed() -> None:
    """On the meta device too."""
    sizes = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48}
    for kind, config in (
        (transformers.MixtralForCausalLM, transformers.MixtralConfig),
        (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig),
    ):
        with torch.device("meta"):
            model = kind(config(**SIZES, **sizes)).to(torch.bfloat16)
        report = qs.convert(model, "mxfp8")
        assert len(report.converted) == 2 * (4 + 2)  # attention's and experts'
        experts = [layer for layer in report.converted if len(layer.shape) == 3]
        gate_up, down = experts[:2]
        inner = gate_up.shape[1] // 2
        assert gate_up.name == "model.layers.0.mlp.experts.gate_up_proj" and gate_up.shape == (4, 2 * inner, 64)
        assert down.name == "model.layers.0.mlp.experts.down_proj" and down.shape == (4, 64, inner)
        assert len(experts) == 4


def refused(_: object) -> list[str]:
    """What is said of a model that is sharded already."""
    model = build("llama", "mxfp8")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    said = []
    for call in (lambda: qs.convert(model, "mxfp8"), lambda: qs.revert(model)):
        with pytest.raises(ConfigurationError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_sharded_models_are_refused() -> None:
    """3 ranks."""
    for convert, revert in run_ranks(3, refused, None):
        assert "is sharded; call convert before fully_shard" in convert
        assert revert.startswith("revert: ")
