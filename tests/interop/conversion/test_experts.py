"""convert on transformers' mixtures of experts: the stacked weights are quantized, under their own names."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch

import quantshard as qs
from quantshard.errors import ConfigurationError, FallbackError, RecipeMismatchError
from quantshard.interop.conversion.experts import ConvertedExperts
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.weights import quantize_weight

pytest.importorskip("transformers", "5.0")

from tests.interop.conversion.mixtures import CONFIGS, mixture, stacks, tokens


def loss_of(model: Any) -> torch.Tensor:
    ids = tokens()
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(name: str) -> None:
    """All stacks are quantized and get gradients; the loss is near that of BF16."""
    model, plain = mixture(name), mixture(name)
    report = qs.convert(model, "current")
    converted = [layer for layer in report.converted if len(layer.shape) == 3]
    assert {layer.name for layer in converted} == stacks(plain).keys() and converted
    assert f"and {len(converted)} stacks of experts" in str(report)
    assert [layer.name for layer in report.left if ".experts." in layer.name] == []
    for layer in converted:
        assert layer.format == "fp8_e4m3" and layer.bytes_after == layer.bytes_before // 2 + 4 * layer.shape[0]
    loss = loss_of(model)
    loss.backward()
    # E4M3 rounds values by at most 2**-4, and an error of the logits of this size changes the loss less
    assert abs(loss.item() - loss_of(plain).item()) < 2**-4
    for param in stacks(model).values():
        assert type(param.detach()) is QuantizedTensor and param.grad.shape == param.shape and param.grad.any()


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4", "rowwise"])
def test_training_changes_every_stack(recipe: str) -> None:
    model = mixture("Qwen3-MoE")
    qs.convert(model, recipe)
    before = {name: param.detach().clone() for name, param in stacks(model).items()}
    optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert all(not torch.equal(before[name].dequantize(), p.dequantize()) for name, p in stacks(model).items())


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
def test_state_dict_copies_and_revert(name: str) -> None:
    model, other = mixture(name), mixture(name, seed=1)
    plain_keys = model.state_dict().keys()
    for each in (model, other):
        qs.convert(each, "mxfp8")
    state = model.state_dict()
    assert plain_keys <= state.keys()
    other.load_state_dict(state)
    ids = tokens()
    wanted = model(input_ids=ids).logits
    for same in (other, copy.deepcopy(model)):
        assert torch.equal(same(input_ids=ids).logits, wanted)
    values = {key: param.detach().dequantize() for key, param in stacks(model).items()}
    qs.revert(model)
    assert not any(isinstance(module, ConvertedExperts) for module in model.modules())
    assert model.state_dict().keys() == plain_keys
    assert all(torch.equal(param, values[key]) for key, param in stacks(model).items())
    loss_of(model).backward()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_the_configuration_cannot_turn_quantization_off(implementation: str) -> None:
    model = mixture("Qwen3-MoE")
    qs.convert(model, "current")
    wanted = loss_of(model)
    model.set_experts_implementation(implementation)
    assert torch.equal(loss_of(model), wanted)


def test_recomputation_has_the_same_bits() -> None:
    gradients = []
    for recomputes in (False, True):
        model = mixture("Qwen3-MoE")
        qs.convert(model, "nvfp4")
        if recomputes:
            for layer in model.model.layers:
                layer.forward = functools.partial(qs.checkpoint, layer.forward)
        model.train()
        loss_of(model).backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def trained(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "Lion": lambda params: qs.optimizers.Lion(params, lr=1e-3),
    "MasterWeights": lambda params: qs.optimizers.MasterWeights(torch.optim.AdamW, params, lr=3e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
    "split masters": lambda params: qs.optimizers.FusedAdam(params, lr=3e-3, preset="lean8"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:torch.optim trains quantized weights without masters")
def test_optimizers(name: str) -> None:
    model = mixture("Qwen3-MoE")
    qs.convert(model, "current")
    losses = trained(model, OPTIMIZERS[name](model.parameters()))
    assert losses == sorted(losses, reverse=True)


def test_muon_orthogonalizes_each_expert() -> None:
    """The step of a stack is that of its matrices as parameters."""
    model = mixture("Qwen3-MoE")
    qs.convert(model, "mxfp8")
    groups = qs.optimizers.muon_groups(model, adamw={"lr": 1e-3})
    assert stacks(model).keys() <= {name for name, _ in groups[0]["params"]}
    losses = trained(model, qs.optimizers.Muon(groups, lr=0.02))
    assert losses == sorted(losses, reverse=True)
    spec = qs.recipe.resolve("mxfp8").weight
    values = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    stack = torch.nn.Parameter(quantize_weight(values, spec))
    singles = [torch.nn.Parameter(quantize_weight(part, spec)) for part in values]
    stack.grad = values.flip(0)
    for single, grad in zip(singles, stack.grad, strict=True):
        single.grad = grad
    qs.optimizers.Muon([stack], lr=0.02).step()
    qs.optimizers.Muon(singles, lr=0.02).step()
    assert torch.equal(stack.dequantize(), torch.stack([single.dequantize() for single in singles]))


def test_averages() -> None:
    model = mixture("Qwen3-MoE")
    qs.convert(model, "current")
    optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2, ema_decay=0.9)
    trained(model, optimizer)
    last = [param.dequantize() for param in stacks(model).values()]
    with qs.optimizers.averaged_weights(model, optimizer):
        averages = [param.dequantize() for param in stacks(model).values()]
    assert not any(torch.equal(a, b) for a, b in zip(last, averages, strict=True))
    assert all(torch.equal(a, b.dequantize()) for a, b in zip(last, stacks(model).values(), strict=True))
    (stack, *_) = stacks(model).values()
    values = optimizer.get_unscaled_state(stack, "exp_avg") + 1
    assert values.shape == stack.shape
    optimizer.set_scaled_state(stack, "exp_avg", values)
    assert torch.equal(optimizer.get_unscaled_state(stack, "exp_avg"), values)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_of_peft() -> None:
    """The quantized weights of experts stay as they are; their adapters train."""
    peft = pytest.importorskip("peft")
    model = mixture("Qwen3-MoE")
    qs.convert(model, "current")
    before = {name: param.detach().dequantize() for name, param in stacks(model).items()}
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    optimizer = qs.optimizers.FusedAdam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = trained(adapted, optimizer)
    assert losses == sorted(losses, reverse=True)
    after = [param for param in adapted.parameters() if isinstance(param, QuantizedTensor) and param.ndim == 3]
    assert [tuple(param.shape) for param in after] and not any(param.requires_grad for param in after)
    unchanged = [any(torch.equal(param.dequantize(), value) for value in before.values()) for param in after]
    assert len(unchanged) == len(before) and all(unchanged)


def test_compiled() -> None:
    """Experts run between graphs, with the bits of eager code. PyTorch keeps the bits of other layers in one dtype."""
    losses, dtype = [], torch.bfloat16 if torch.__version__ >= (2, 13) else torch.float32
    for compiles in (False, True):
        model = mixture("Qwen3-MoE", num_hidden_layers=1).to(dtype)
        qs.convert(model, "current")
        optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2)
        losses.append(trained(torch.compile(model, backend="aot_eager") if compiles else model, optimizer, steps=2))
    assert losses[0] == losses[1]


def test_experts_that_cannot_be_replaced_are_left() -> None:
    model = mixture("Qwen3-MoE", num_hidden_layers=4)
    tied, hooked, replaced, fp8 = (layer.mlp.experts for layer in model.model.layers)
    tied.down_proj = hooked.down_proj
    hooked.gate_up_proj.register_hook(lambda grad: grad)
    replaced.forward = replaced.forward
    fp8.down_proj = torch.nn.Parameter(fp8.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    reasons = {layer.name: layer.reason for layer in qs.convert(model, "current").left}
    for number, reason in enumerate(("also that of", "also that of", "forward was replaced", "float8_e4m3fn")):
        assert reason in reasons[f"model.layers.{number}.mlp.experts.down_proj"]


def test_revert_keeps_what_users_set() -> None:
    model = mixture("Qwen3-MoE")
    qs.convert(model, "current")
    experts = model.model.layers[0].mlp.experts
    experts.note = 5
    qs.revert(model)
    assert experts.note == 5 and not hasattr(experts, "gemm_plans")


def test_reset_parameters() -> None:
    """From meta, to values that depend on the seed of each weight only."""
    found = []
    for _ in range(2):
        with torch.device("meta"):
            model = mixture("gpt-oss")
        qs.convert(model, "mxfp8")
        experts = model.model.layers[0].mlp.experts
        experts.reset_parameters()
        assert not experts.gate_up_proj_bias.any()
        found.append(experts.gate_up_proj.dequantize())
    assert torch.equal(*found) and 0.01 < found[0].std().item() < 0.04


def test_recipes_by_name() -> None:
    model = mixture("Qwen3-MoE")
    report = qs.convert(model, {"layers.0.mlp.experts": "mxfp8", "*.experts": "bf16", "*": "current"})
    recipes = {layer.name: layer.recipe for layer in report.converted}
    assert recipes["model.layers.0.mlp.experts.gate_up_proj"] == "mxfp8"
    assert recipes["model.layers.1.self_attn.q_proj"] == "current"
    assert [layer.name for layer in report.left if ".experts." in layer.name] == [
        "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj",
    ]  # fmt: skip
    loss_of(model).backward()


WRONG_WIDTH = torch.zeros(3, 63).bfloat16(), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)

LEFT = {
    "delayed": ("Qwen3-MoE", "delayed", "no amax histories"),
    "blocks across experts": (
        "Qwen3-MoE",
        "block",
        "fp8_128x128 would cross from one expert into the next, of 64 rows",
    ),
    "rows of a transposed weight": ("gpt-oss", "rowwise", "stored transposed, which fp8_1xrow cannot be"),
}


@pytest.mark.parametrize(("name", "recipe", "reason"), LEFT.values(), ids=LEFT)
def test_recipes_that_do_not_fit_leave_the_experts(name: str, recipe: str, reason: str) -> None:
    model = mixture(name)
    report = qs.convert(model, recipe)
    reasons = {layer.reason for layer in report.left if ".experts." in layer.name}
    assert len(reasons) == 1 and re.search(reason, reasons.pop())
    loss_of(model).backward()


def test_bad_input() -> None:
    model = mixture("Qwen3-MoE")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 5, 7] = float("nan")
    with pytest.raises(
        ConfigurationError, match=r"layers\.1\.mlp\.experts\.down_proj: 1 of 8192 values .* \[2, 5, 7\]"
    ):
        qs.convert(model, "current")
    model = mixture("Qwen3-MoE")
    with pytest.raises(ConfigurationError, match="one axis of a device mesh"):
        qs.distribute_experts(model, None)
    qs.convert(model, "current")
    with pytest.raises(Exception, match="63"):
        model.model.layers[0].mlp.experts(*WRONG_WIDTH)
    experts = model.model.layers[0].mlp.experts
    with qs.autocast(recipe="mxfp8"), pytest.raises(RecipeMismatchError, match=r"experts.gate_up_proj.*mxfp8"):
        experts(torch.zeros(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    with qs.autocast(enabled=False), torch.no_grad():
        assert loss_of(model).isfinite()
    alone = mixture("Qwen3-MoE")
    qs.convert(alone, "current", filter="experts", autocast=False)
    with pytest.warns(UserWarning, match=r"experts\.gate_up_proj.*autocast"):
        loss_of(alone.train())
    with qs.autocast(recipe="current", strict=True), pytest.raises(FallbackError):
        loss_of(model)
