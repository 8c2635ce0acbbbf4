"""The language model: its parameters, its birth, its causality, what it generates, and when it gathers weights."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from quantshard import QuantizedTensor, private_torch, recipe
from quantshard.errors import ConfigurationError
from quantshard.modules import chunked_loss
from quantshard.modules.base.module import QuantizedModule
from quantshard.numerics import cross_entropy
from quantshard.tools.trainer.data import VOCABULARY
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.models.decoder import LanguageModel, linear_names
from quantshard.tools.trainer.models.model import generate
from quantshard.tools.trainer.optimizer import learning_rate, make_optimizer
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.distributed.pool import run_ranks

SMALL = replace(TrainSettings(), recipe="mxfp8", hidden=96, heads=3, ffn=200, layers=2, seq_length=32).resolved()


def build(settings=SMALL, device="cpu"):
    torch.manual_seed(settings.seed)
    return LanguageModel(settings, recipe.resolve(settings.recipe), device)


def values(model):
    return {n: p.dequantize() if isinstance(p, QuantizedTensor) else p for n, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_dtype_and_quantized_layers(architecture, tied):
    model = build(replace(SMALL, architecture=architecture, tied=tied, kv_heads=1))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    quantized = {n for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert quantized == {n for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2}
    assert (model.head is None) == tied and (model.positions is None) == (architecture == "llama")
    logits = model(torch.randint(VOCABULARY, (2, 32)))
    assert logits.shape == (2, 32, VOCABULARY) and logits.dtype == torch.bfloat16


def test_the_optimizer_of_a_run_is_told_by_its_settings():
    """Muon has the layers' matrices at AdamW's rate, and no embedding, head or vector."""
    settings = replace(SMALL, beta2=0.9, momentum=0.8, momentum_dtype="fp8", ema=0.5, weight_decay=0.3)
    for architecture, hidden in (("llama", 7), ("gpt", 4)):
        model = build(replace(settings, architecture=architecture))
        optimizer = make_optimizer(model, replace(settings, optimizer="muon"))
        matrices, others, _ = optimizer.param_groups
        assert all(name.startswith("layers.") for name in matrices["param_names"]) and len(matrices["params"]) >= hidden
        assert {name.split(".")[0] for name in others["param_names"]} >= {"embedding", "head"}
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
        assert (matrices["momentum"], matrices["adjust_lr_fn"]) == (0.8, "match_rms_adamw")
        assert others["betas"] == (0.9, 0.9) and {group["lr"] for group in optimizer.param_groups} == {settings.lr}
        assert optimizer.state[matrices["params"][0]]["momentum_buffer"].dtype is torch.uint8
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    lean = TrainSettings(hidden=96, heads=3, layers=1, seq_length=32, optimizer="muon", preset="lean8").resolved()
    optimizer = make_optimizer(build(lean), lean)
    [matrix, other] = [optimizer.state[group["params"][0]] for group in optimizer.param_groups[:2]]
    assert matrix["momentum_buffer"].dtype is torch.bfloat16 and "master_param" not in matrix
    assert matrix["master_param_low"].dtype is torch.uint8
    assert other["exp_avg"].dtype == other["exp_avg_sq"].dtype == torch.uint8
    optimizer = make_optimizer(build(), replace(settings, optimizer="lion"))
    assert type(optimizer).__name__ == "Lion" and optimizer.param_groups[0]["betas"] == (0.9, 0.9)
    assert "ema_param" in optimizer.state[optimizer.param_groups[0]["params"][0]]


@pytest.mark.parametrize("name", ["mxfp8", "delayed", "bf16"])
def test_born_the_same_by_way_of_meta(name):
    settings = replace(SMALL, recipe=name)
    direct, described = build(settings), build(settings, "meta")
    assert all(p.is_meta for p in described.parameters())
    for module in described.modules():
        if isinstance(module, QuantizedModule):
            module.reset_parameters()
    expected, found = values(direct), values(described)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert not torch.equal(
        expected["layers.0.self_attention.proj.weight"], expected["layers.1.self_attention.proj.weight"]
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_causal(architecture):
    model = build(replace(SMALL, architecture=architecture)).eval()
    tokens = torch.randint(VOCABULARY, (1, 32))
    later = tokens.clone()
    later[0, 20:] = 0
    with torch.no_grad():
        one, other = model(tokens), model(later)
    assert torch.equal(one[0, :20], other[0, :20]) and not torch.equal(one[0, 20:], other[0, 20:])


def test_learns():
    model = build()
    optimizer = make_optimizer(model, replace(SMALL, lr=3e-3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    tokens = torch.arange(33).repeat(4, 1) + 60
    losses = []
    for _ in range(8):
        loss = models.loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.5 and losses[-1] < 0.5 * losses[0]


def test_generate_is_repeatable():
    model = build()
    first = generate(model, SMALL, b"abc", 40, seed=5)  # longer than the model reads at once
    assert len(first) == 40 and all(0 <= token < VOCABULARY for token in first)
    assert generate(model, SMALL, b"abc", 40, seed=5) == first != generate(model, SMALL, b"abc", 40, seed=6)
    assert model.training


def test_learning_rate_is_of_the_step():
    settings = replace(SMALL, lr=1.0, warmup=4, steps=12, decay_steps=12, lr_floor=0.1)
    rates = [learning_rate(settings, step) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates == [*rates[:4], *sorted(rates[4:], reverse=True)]
    assert rates[7] == pytest.approx(0.55) and rates[11:] == pytest.approx([0.1] * 9)
    assert learning_rate(replace(settings, schedule="constant"), 9) == 1.0
    assert learning_rate(replace(settings, warmup=0), 12) == pytest.approx(0.1)
    linear = replace(settings, schedule="linear")
    assert [learning_rate(linear, step) for step in (4, 6, 8, 12, 13)] == pytest.approx([1.0, 0.775, 0.55, 0.1, 0.1])
    stable = replace(settings, schedule="wsd", decay_share=0.25)  # falls in the last 3 of 12 steps
    assert [learning_rate(stable, step) for step in (3, 4, 9, 10, 12, 99)] == pytest.approx([0.75, 1, 1, 0.7, 0.1, 0.1])
    assert learning_rate(replace(stable, decay_share=1.0), 8) == learning_rate(linear, 8)


def order_of_gathers() -> list[str]:
    """What a forward of three layers begins, in order: to gather a layer's weights, and to compute a layer."""
    seen: list[str] = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    settings = replace(SMALL, layers=3)
    model = models.build(models.ModelSpec(settings), mesh)
    layer_of = {
        id(private_torch.local_tensor(param).quantized_storage): f"gather {number}"
        for number, layer in enumerate(model.layers)
        for param in layer.parameters()
        if isinstance(private_torch.local_tensor(param), QuantizedTensor)
    }
    for number, layer in enumerate(model.layers):
        layer.self_attention.register_forward_pre_hook(lambda *_, number=number: seen.append(f"compute {number}"))
    gather = QuantizedTensor.fsdp_pre_all_gather

    def noted(tensor, mesh):
        seen.append(layer_of[id(tensor.quantized_storage)])
        return gather(tensor, mesh)

    with mock.patch.object(QuantizedTensor, "fsdp_pre_all_gather", noted), torch.no_grad():
        model(torch.zeros((1, settings.seq_length), dtype=torch.int64))
    return list(dict.fromkeys(seen))


@pytest.mark.distributed
def test_the_next_layer_is_gathered_before_a_layer_computes():
    """2 ranks."""
    in_order = ["gather 0", "gather 1", "compute 0", "gather 2", "compute 1", "compute 2"]
    assert run_ranks(2, order_of_gathers) == [in_order] * 2


def test_routers_are_for_adamw():
    settings = replace(SMALL, experts=4, optimizer="muon")
    torch.manual_seed(0)
    optimizer = make_optimizer(LanguageModel(settings, recipe.resolve("bf16"), "cpu"), settings)
    algorithms = {name: group["algorithm"] for group in optimizer.param_groups for name in group["param_names"]}
    routers = [algorithm for name, algorithm in algorithms.items() if "router" in name]
    assert routers == ["adamw"] * settings.layers and "muon" in algorithms.values()


class _Float32(TorchDispatchMode):
    """The most elements of a float32 tensor that an operation gave."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("at_once", [1 << 25, 1000, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_their_gradient_are_those_of_float64(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows at a time, without a float32 copy of all; the gradient is within a rounding to the logits' dtype."""
    monkeypatch.setattr(cross_entropy, "ELEMENTS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 50, 301, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 301, (3, 50), generator=generator)
    with _Float32() as seen:
        found = models.token_losses(logits, targets)
        (found.cross_entropy / 2 + found.z_loss / 10).backward()
    assert dtype == torch.float32 or seen.most <= max(at_once, 301)
    exact = logits.detach().double().requires_grad_()
    entropy = nn.functional.cross_entropy(exact.flatten(0, 1), targets.flatten())
    z_loss = exact.logsumexp(-1).square().mean()
    (entropy / 2 + z_loss / 10).backward()
    assert found.cross_entropy.item() == pytest.approx(entropy.item(), rel=1e-6)
    assert found.z_loss.item() == pytest.approx(z_loss.item(), rel=1e-5)
    assert exact.grad is not None and logits.grad is not None and logits.grad.dtype == dtype
    step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=step + 1e-5, atol=1e-9)
    with torch.no_grad():
        assert models.token_losses(logits, targets).cross_entropy == found.cross_entropy


def test_a_loss_keeps_its_digits_where_all_logits_are_large() -> None:
    """log(Z) less a logit would be off by a rounding of both, 0.008 at 1e5."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).round(decimals=2) + 1e5
    targets = torch.arange(64)
    found = models.token_losses(logits, targets).cross_entropy.item()
    assert found == pytest.approx(nn.functional.cross_entropy(logits.double(), targets).item(), rel=1e-6)


@pytest.mark.parametrize(
    "rows",
    [
        [[0.0, 1.0, -math.inf], [1.0, 2.0, 3.0]],  # a target that is masked, and another row beside
        [[0.0, 3e38, -3e38]],  # whose log p is beyond float32
        [[-math.inf, -math.inf, -math.inf]],
        [[0.0, math.inf, 1.0]],
        [[0.0, math.nan, 1.0]],
    ],
)
@pytest.mark.parametrize("at_once", [1, cross_entropy.ELEMENTS_AT_ONCE])
def test_losses_of_logits_that_are_not_finite_are_those_of_torch(monkeypatch, rows, at_once):
    monkeypatch.setattr(cross_entropy, "ELEMENTS_AT_ONCE", at_once)
    targets = torch.tensor([2, 0])[: len(rows)]
    ours, other = (torch.tensor(rows, requires_grad=True) for _ in range(2))
    loss, expected = models.token_losses(ours, targets).cross_entropy, nn.functional.cross_entropy(other, targets)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(ours.grad, other.grad, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_in_the_place_of_the_logits_has_the_same_bits(dtype: torch.dtype) -> None:
    """In their memory; who needs the logits afterwards is told by PyTorch."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, 37, generator=generator).to(dtype)
    targets = torch.randint(0, 37, (2, 5), generator=generator)
    gradients, places = [], []
    for overwrites in (False, True):
        leaf = values.clone().requires_grad_()
        logits = leaf * 2
        logits.register_hook(lambda grad: places.append(grad.data_ptr()))
        found = models.token_losses(logits, targets, overwrites)
        loss = found.cross_entropy + found.z_loss / 10
        loss.backward(retain_graph=True)
        gradients.append(leaf.grad)
        assert (places[-1] == logits.data_ptr()) == overwrites
    assert torch.equal(*gradients)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    bounded = values.clone().requires_grad_().tanh()  # its backward reads its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        models.token_losses(bounded, targets, True).cross_entropy.backward()


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_with_many_logits_has_the_losses_of_fewer_at_a_time(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of head or table is a sum of products of other chunks: within a few roundings of bfloat16."""
    settings = replace(SMALL, tied=tied, z_loss=0.01, recipe="bf16")
    model = build(settings)
    tokens = torch.randint(VOCABULARY, (10, 33), generator=torch.Generator().manual_seed(0))
    results = []
    for at_once in (chunked_loss.LOGITS_AT_ONCE, 128 * VOCABULARY):
        monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", at_once)
        model.zero_grad()
        losses = models.losses(model, tokens[:, :-1], tokens[:, 1:], settings.z_loss)
        models.trained_loss(model, losses, settings).backward()
        weight = model.embedding.weight if model.head is None else model.head.weight
        results.append((losses.cross_entropy.item(), losses.z_loss.item(), weight.grad.float()))
    (entropy, z_loss, grad), (chunked_entropy, chunked_z_loss, chunked_grad) = results
    assert chunked_entropy == pytest.approx(entropy, rel=1e-5)
    assert chunked_z_loss == pytest.approx(z_loss, rel=1e-5)
    assert (chunked_grad - grad).norm() <= 2**-7 * grad.norm()


PARTS = {
    "dense": ("layers.0=current,*=delayed", "layers.0.*=current,*=delayed", {}),
    "recomputed": ("layers.1=bf16,*=nvfp4", "layers.1.*=bf16,*=nvfp4", {"recompute": "layer"}),
    "experts": ("layers.0=mxfp8,*=current", "layers.0.*=mxfp8,*=current", {"experts": 4, "experts_per_token": 2}),
}  # fmt: skip


def bits_by_parts(name: str) -> None:
    """The model with recipes by layer, and by its linear layers: born, computed and trained to the same bits."""
    *texts, options = PARTS[name]
    found = []
    for text in texts:
        settings = replace(
            TrainSettings(), hidden=96, heads=3, ffn=224, layers=2, seq_length=32, recipe=text, **options
        )
        settings = settings.resolved()
        model = models.build(
            models.ModelSpec(settings), settings.axes(torch.distributed.get_world_size()).device_mesh("cpu")
        )
        optimizer, losses_ = make_optimizer(model, settings), []
        for _ in range(2):
            tokens = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(7))
            loss = models.loss(models.logits(model, tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses_.append(loss.detach())
        state = {key: private_torch.local_tensor(value) for key, value in model.state_dict().items()}
        found.append((torch.stack(losses_), state))
    (losses_of_layers, by_layer), (losses_of_parts, by_part) = found
    assert torch.equal(losses_of_layers, losses_of_parts) and by_layer.keys() == by_part.keys()
    assert all(torch.equal(value, by_part[key]) for key, value in by_layer.items())


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) == ("recomputed", 3) else pytest.mark.exhaustive)
        for name in PARTS
        for ranks in (1, 3)
    ],
)
def test_recipes_of_a_layers_parts_are_those_of_the_layer(name, ranks):
    """1 and 3 ranks."""
    run_ranks(ranks, bits_by_parts, name)


def test_recipes_by_linear_layer():
    text = "layers.0=bf16,self_attention=current,layers.2.layernorm_mlp=block,*=mxfp8"
    settings = replace(SMALL, layers=3, recipe=text)
    model = LanguageModel(settings, models.recipes_of(settings), "meta")
    parts = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp")
    assert linear_names(settings) == [f"layers.{number}.{part}" for number in range(3) for part in parts]
    expected = ["bf16"] * 3 + ["current", "current", "mxfp8", "current", "current", "block"]
    own = [model.get_submodule(name).recipe for name in linear_names(settings)]
    assert own == expected and [each.name for each in model.recipes] == ["bf16", "current", "current"]
    both = replace(settings, recipe="*1=bf16,proj=current,*=mxfp8")  # the end of a layer's name, and of all of a part's
    assert dict(models.recipes_of(both).patterns) == {"*1.*": "bf16", "proj": "current", "*": "mxfp8"}
    mixture = replace(settings, experts=4, experts_per_token=2, recipe="layers.*.proj=bf16,*=mxfp8")
    names = linear_names(mixture)
    assert len(names) > 6 and any("mlp" in name for name in names) and not any("router" in name for name in names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "layers.0.atention=bf16,*=mxfp8",
            r"'layers\.0\.atention' matches no layer.*layernorm_qkv to layers",
        ),
        ("layers.7=bf16,*=mxfp8", r"'layers\.7' matches no layer"),
        ("layers.0=current,layers.0.self_attention=bf16,*=mxfp8", r"'layers\.0\.self_attention' matches no layer, or"),
        ("layers.0=current,layers.0.*=bf16,*=mxfp8", r"'layers\.0\.\*' matches no layer, or"),
        ("layers.*=current,layers.0=bf16", r"match all layers of 'layers\.0'"),
    ],
)
def test_patterns_that_do_nothing_are_refused(text, says):
    with pytest.raises(ConfigurationError, match=says):
        models.recipes_of(replace(SMALL, recipe=text))
