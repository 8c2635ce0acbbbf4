"""`convert(modules="fused")`: gated MLPs as one step, beside their layers one by one; what is left, and why."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import quantshard as qs
from quantshard.errors import ConfigurationError, FallbackError
from quantshard.interop.conversion import fusion
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.modules.gemms import functional, linear_operands, shared_input
from quantshard.modules.layernorm_mlp import activate
from tests.covering import exhaustive
from tests.interpreter import kernels_on, prepared_once

SIZES = {
    "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"mlp_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 2}),
}
RECIPES = ["block", "mxfp8", "delayed", "nvfp4", "current"]
TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))


def born(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, config, own = FAMILIES[family]
    return kind(config(**SIZES, **own, **options)).to(dtype)


def trained(model: PreTrainedModel, steps: int = 2) -> dict[str, Tensor]:
    """Losses, gradients and the state dict behind some forwards and backwards."""
    found = {}
    for step in range(steps):
        model.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    found |= {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("family", "recipe"),
    exhaustive(
        itertools.product(FAMILIES, RECIPES),
        [("llama", "delayed"), ("qwen3", "mxfp8"), ("gemma3", "nvfp4"), ("mixtral", "block")],
    ),
)
def test_bits_in_float32(family: str, recipe: str) -> None:
    """Where the model's own code rounds nothing in between: losses, all gradients, histories, counts, names."""
    runs = []
    for modules in ("linear", "fused"):
        model = born(family)
        report = qs.convert(model, recipe, modules=modules)
        mlps = [each.name for each in report.fused if "gated MLP" in each.step]
        assert len(mlps) == (2 if modules == "fused" and family != "mixtral" else 0)
        inputs = [each.name for each in report.fused if "quantized once" in each.step]
        assert len(inputs) == (2 if modules == "fused" and recipe != "delayed" else 0)
        runs.append(trained(model))
    assert not differing(*runs)


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_bits_in_bfloat16(recipe: str) -> None:
    """Those of the layers and an activation that is rounded once; the two gradients of the input are added in float32.

    Each is rounded to bfloat16 where they are apart, and so is their sum: three roundings of 2**-8, against one.
    """
    found = []
    for modules in ("linear", "fused"):
        model = born(dtype=torch.bfloat16)
        qs.convert(model, recipe, modules=modules)
        mlp = model.model.layers[0].mlp
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        parts = [x]
        with qs.autocast(recipe=recipe):
            if modules == "fused":
                y = mlp(x)
            else:
                parts = [x.detach().clone().requires_grad_() for _ in range(2)]
                gate, up = mlp.gate_proj(parts[0]), mlp.up_proj(parts[1])
                y = mlp.down_proj(activate(gate, "swiglu", up))
        y.float().sin().sum().backward()
        found.append((y, [p.grad for p in mlp.parameters()], [part.grad.float() for part in parts]))
    (y, dws, (of_gate, of_up)), (fused_y, fused_dws, (dx,)) = found
    assert torch.equal(y, fused_y) and all(map(torch.equal, dws, fused_dws))
    room = 2**-8 * (of_gate.abs() + of_up.abs() + (of_gate + of_up).abs()) * (1 + 2**-7)
    assert ((dx - (of_gate + of_up)).abs() <= room).all() and not torch.equal(dx, of_gate + of_up)


class Doubled(nn.Module):
    """In the place of a layer, as PEFT's are."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * 2


def wrapped(mlp: nn.Module) -> None:
    mlp.up_proj = Doubled(mlp.up_proj)


def hooked(mlp: nn.Module) -> None:
    mlp.down_proj.register_forward_hook(lambda module, args, out: out * 2)


def seen_before(mlp: nn.Module) -> None:
    mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def seen_after(mlp: nn.Module) -> None:
    mlp.gate_proj.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))


def exchanged(mlp: nn.Module) -> None:
    mlp.act_fn = nn.Tanh()


def patched(mlp: nn.Module) -> None:
    own = mlp.up_proj.forward
    mlp.up_proj.forward = lambda x: own(x) * 2


@pytest.mark.parametrize("change", [wrapped, hooked, seen_before, seen_after, exchanged, patched])
def test_layers_with_more_to_do_are_called(change: Any) -> None:
    runs = []
    for modules in ("linear", "fused"):
        model = born()
        qs.convert(model, "mxfp8", modules=modules)
        plain = trained(copy.deepcopy(model), 1)
        change(model.model.layers[0].mlp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append(trained(model, 1))
        told = [str(each.message) for each in caught if "one by one" in str(each.message)]
        assert len(told) == (modules == "fused") and all("LlamaMLP: " in text for text in told)
        assert any(not torch.equal(plain[name], value) for name, value in runs[-1].items() if name in plain)
    assert not differing(*runs)


def test_hooks_of_all_modules_see_the_layers() -> None:
    model, seen = born(), []
    qs.convert(model, "mxfp8", modules="fused")
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        with pytest.warns(UserWarning, match="gate_proj has hooks"):
            model(input_ids=TOKENS)
    finally:
        handle.remove()
    assert sum(isinstance(module, ConvertedLinear) for module in seen) == 14


def test_strictly_it_is_an_error() -> None:
    model = born().model
    qs.convert(model, "mxfp8", modules="fused")
    hooked(model.layers[0].mlp)
    with pytest.raises(FallbackError, match=r"down_proj: an MLP of"), qs.autocast(recipe="mxfp8", strict=True):
        model.layers[0].mlp(torch.ones(1, 4, 64))


class OtherMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) + self.up_proj(x))


def test_what_is_left_and_why() -> None:
    model = nn.Sequential(OtherMLP(), *(born(hidden_act=act).model.layers[0].mlp for act in ("gelu", "silu", "silu")))
    model[3].forward = model[3].forward
    report = qs.convert(model, "mxfp8", modules="fused")
    assert {each.name: each.reason for each in report.unfused} == {
        "0": "tests.OtherMLP is not a known class",
        "1": "no kernel computes its act_fn (GELUActivation)",
        "3": "the forward of LlamaMLP was replaced",
    }
    shared = "gate_proj, up_proj: their input is quantized once"
    assert {each.name: each.step for each in report.fused} == {
        "0": shared, "1": shared, "2": "gated MLP, swiglu", "3": shared,
    }  # fmt: skip
    assert len(report.converted) == 12
    assert "fused: 4\n  2: gated MLP, swiglu\n" in str(report)
    assert "\nnot fused: 3\n  0: tests.OtherMLP is not a known class" in str(report)
    mixed = qs.convert(born(), {"*.0.*down_proj": "block", "*": "mxfp8"}, modules="fused")
    assert mixed.unfused[0].reason == "its layers have different recipes (mxfp8, mxfp8, block)"
    assert {"gated MLP, swiglu": 1, "q_proj, k_proj, v_proj: their input is quantized once": 2}.items() <= Counter(
        each.step for each in mixed.fused
    ).items()
    apart = qs.convert(born(), "mxfp8", filter="up_proj", modules="fused")
    assert apart.unfused[1].reason == "its gate_proj is not converted (not chosen by the filter)" and not apart.fused
    delayed = {each.name: each.reason for each in qs.convert(born(), "delayed", modules="fused").unfused}
    assert delayed["model.layers.1.self_attn"].endswith("delayed scaling keeps a history per layer")


def test_copies_files_and_the_way_back(tmp_path: Path) -> None:
    from quantshard.integrations import transformers as _  # noqa: F401

    model, linear, plain = born(), born(), born()
    qs.convert(model, "mxfp8", modules="fused")
    qs.convert(linear, "mxfp8")
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert model.state_dict().keys() == linear.state_dict().keys()
    other = born()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    qs.convert(other, "mxfp8", modules="fused")
    wanted = trained(copy.deepcopy(model))
    twin = copy.deepcopy(model)
    assert type(twin.model.layers[0].mlp) is type(model.model.layers[0].mlp)
    assert twin.model.layers[0].mlp._handle.data_ptr() != model.model.layers[0].mlp._handle.data_ptr()
    other.load_state_dict(linear.state_dict())
    assert not differing(trained(copy.deepcopy(other)), wanted)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.bias.zero_()
    qs.checkpoints.load_high_precision(other, plain.state_dict())
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    for each, folder in ((model, "fused"), (linear, "linear")):
        each.save_pretrained(tmp_path / folder)
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("fused", "linear")]
    assert files[0] == files[1]
    assert qs.revert(model) == qs.revert(linear) == 14
    assert type(model.model.layers[0].mlp) is type(plain.model.layers[0].mlp)
    assert not differing(trained(model), trained(linear)) and model.state_dict().keys() == plain.state_dict().keys()
    assert not any("_handle" in vars(module) for module in model.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*Function'> should not be instantiated")  # Dynamo's
def test_gate_and_up_may_be_kept_as_codes() -> None:
    """The loss of a step stays, gradients do not; compiled and copied as eager; told in the report, gone by revert."""
    models = {name: born() for name in ("plain", "stored", "compiled")}
    for name, model in models.items():
        storage = "high_precision" if name == "plain" else "fp8"
        report = qs.convert(model, "block", modules="fused", activation_storage=storage)
        assert str(report).count("gate and up saved as fp8") == (name != "plain")
    models["compiled"].model.layers[0].mlp.compile(backend="aot_eager")
    plain, stored, compiled = (trained(model, 1) for model in models.values())
    copied = trained(copy.deepcopy(models["stored"]), 1)
    assert not differing(stored, compiled) and not differing(stored, copied)
    changed = differing(plain, stored)
    assert "loss 0" not in changed and "d model.layers.1.mlp.gate_proj.weight" in changed
    assert "d model.layers.1.mlp.down_proj.weight" not in changed
    qs.revert(models["stored"])
    assert not any("_activation_storage" in vars(module) for module in models["stored"].modules())


def test_codes_are_refused_where_no_mlp_keeps_any() -> None:
    for arguments, says in (
        ({}, "and modules='fused'"),
        ({"modules": "fused", "filter": "q_proj"}, r"model.layers.0.mlp: its gate_proj is not converted"),
        ({"modules": "fused", "activation_storage": "fp4"}, "use one of: high_precision, fp8"),
    ):
        model = born()
        before = model.state_dict().keys()
        with pytest.raises(ConfigurationError, match=says):
            qs.convert(model, "block", **{"activation_storage": "fp8", **arguments})
        assert model.state_dict().keys() == before
    model = born()
    qs.convert(model, "mxfp8", modules="fused", activation_storage="fp8")
    hooked(model.model.layers[0].mlp)
    with pytest.warns(UserWarning, match="without activation_storage=.fp8."):
        trained(model, 1)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*Function'> should not be instantiated")  # Dynamo's
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_compiled_and_checkpointed(recipe: str) -> None:
    """Each layer compiled as one graph, or computed again in backward: losses, gradients, histories and counts."""
    runs = []
    for run in ("eager", "compiled", "checkpointed"):
        model = born()
        qs.convert(model, recipe, modules="fused")
        if run == "compiled":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        elif run == "checkpointed":
            for index, layer in enumerate(model.model.layers):
                model.model.layers[index] = checkpoint_wrapper(layer)
        with prepared_once(), kernels_on("cpu"):
            values = trained(model.train())
        runs.append({name.replace("_checkpoint_wrapped_module.", ""): value for name, value in values.items()})
    assert not differing(runs[0], runs[1]) and not differing(runs[0], runs[2])


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that were quantized since the test began."""
    made: list[Tensor] = []
    real = linear_operands.gemm_operands
    for module in (functional, shared_input):
        monkeypatch.setattr(module, "gemm_operands", lambda *a, **options: made.append(a[0]) or real(*a, **options))
    return made


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*Function'> should not be instantiated")  # Dynamo's
def test_a_hook_in_a_graph_is_called_and_told() -> None:
    model = born()
    qs.convert(model, "mxfp8", modules="fused")
    hooked(mlp := model.model.layers[0].mlp)
    with pytest.warns(UserWarning, match="LlamaMLP: down_proj has hooks"), qs.autocast(recipe="mxfp8"):
        found = torch.compile(mlp, backend="aot_eager")(torch.ones(1, 4, 64))
    with qs.autocast(recipe="mxfp8"):
        assert torch.equal(found, mlp(torch.ones(1, 4, 64)))


def test_one_input_is_quantized_once(quantized: list[Tensor]) -> None:
    """For gate and up; for queries, keys and values, whose backwards keep one and the same copy."""
    counts = []
    for modules in ("linear", "fused"):
        model = born()
        qs.convert(model, "mxfp8", modules=modules)
        quantized.clear()
        model(input_ids=TOKENS)
        counts.append(len(quantized))
    assert counts == [2 * 7, 2 * 4]


def test_only_the_very_same_input_is_shared(quantized: list[Tensor]) -> None:
    """Not one that was changed in between, nor one of a layer that keeps it for backward where another does not."""
    linear, fused = born().model.layers[0].self_attn, born().model.layers[0].self_attn
    for attention, modules in ((linear, "linear"), (fused, "fused")):
        qs.convert(attention, "mxfp8", modules=modules)
        attention.q_proj.weight.requires_grad_(False)
    layers = [(getattr(linear, name), getattr(fused, name)) for name in ("q_proj", "k_proj", "v_proj")]
    x = torch.randn(1, 4, 64)
    counts = []
    for one, other in layers:
        assert torch.equal(one(x), other(x))
        counts.append(len(quantized))
    assert counts == [2, 4, 5]  # queries by themselves, keys, and values as keys
    x.mul_(2)
    assert torch.equal(layers[2][0](x), layers[2][1](x)) and len(quantized) == 7
    with torch.inference_mode():
        other = torch.randn(1, 4, 64)
        assert all(torch.equal(one(other), two(other)) for one, two in layers)
    linear.q_proj.weight.requires_grad_(True)
    fused.q_proj.weight.requires_grad_(True)
    x = torch.randn(1, 4, 64)
    for _ in range(2):
        quantized.clear()
        assert all(torch.equal(one(x), two(x)) for one, two in layers) and len(quantized) == 4
        x.data.add_(1)  # which nothing counts, as a CUDA graph's change of its input
    twin, shared = copy.deepcopy(fused), fused.q_proj.shared_input.shared
    assert twin.q_proj.shared_input.shared is twin.v_proj.shared_input.shared is not shared
    assert shared.last is not None
    quantized.clear()  # views of it
    del x
    assert shared.last is None


def test_classes_are_those_of_transformers() -> None:
    """Each name in the table is a class whose forward is the one that is computed."""
    formula = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
    for name, family in fusion.FAMILIES.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        lines = [line.strip() for line in inspect.getsource(getattr(module, name).forward).splitlines()]
        assert lines == ["def forward(self, x):", formula, "return down_proj"], name
