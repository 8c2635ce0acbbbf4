"""PEFT over frozen quantized weights: LoRA and DoRA train, merge in one rounding, unmerge to the same bits, are saved
and loaded; on 1 process, and under FSDP2 on 2 ranks.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import quantshard as qs
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.integrations.accelerate import prepare
from quantshard.integrations.peft import QuantizedLoraLinear, load_adapter, register, save_adapter
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.interop.frameworks.accelerators import LINEAR_LAYERS, accelerator, batches, build, plain, quantized
from tests.interop.frameworks.alone import run_alone

# PEFT asks transformers for what that has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
RECIPES = ["mxfp8", "current", "nvfp4"]
BY_NAME = ["q_proj", "down_proj"]


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options})


def with_adapters(recipe: str, **options: Any) -> Any:
    """On a seed: adapters begin with random numbers."""
    model = build(recipe)
    torch.manual_seed(1)
    return get_peft_model(model, register(config(**options)))


def test_a_model_within_adapters_is_not_written(tmp_path: Path) -> None:
    """Its layers have other names there, and transformers would write their codes as values."""
    model = with_adapters("mxfp8", target_modules=["q_proj"])
    for options in ({}, {"layout": "plain-bf16"}):
        with pytest.raises(ConfigurationError, match=r"model.layers.0.self_attn.q_proj has a PEFT adapter"):
            model.get_base_model().save_pretrained(tmp_path / "base", **options)
    model.unload().save_pretrained(tmp_path / "unloaded")
    assert base_bits(LlamaForCausalLM.from_pretrained(tmp_path / "unloaded")) == base_bits(build("mxfp8"))


@pytest.mark.parametrize(("trained", "loaded"), [("mxfp8", None), (None, "mxfp8")])
def test_whole_layers_of_an_adapter_are_quantized_as_in_the_model(
    trained: str | None, loaded: str | None, tmp_path: Path
) -> None:
    def model(recipe: str | None) -> Any:
        return plain() if recipe is None else build(recipe)

    wrapped = get_peft_model(model(trained), register(config(target_modules=["q_proj"], modules_to_save=["down_proj"])))
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    load_adapter(model(trained), tmp_path / "adapter")
    with pytest.raises(ConfigurationError, match=r"model.layers.0.mlp.down_proj.weight \(modules_to_save\) is \w+ in"):
        load_adapter(model(loaded), tmp_path / "adapter")


def optimizer_of(model: nn.Module) -> FusedAdam:
    return FusedAdam([(name, p) for name, p in model.named_parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    (tokens,) = batches()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=batches()[0]).logits.float()


def base_bits(model: nn.Module) -> dict[str, str]:
    """But for the counts of draws: gradients of NVFP4 are rounded stochastically by the words of their weight."""
    found = {name.replace(".base_layer", ""): value for name, value in bits(model).items() if "lora_" not in name}
    return {name: value for name, value in found.items() if not name.endswith("_draws")}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("mxfp8", {"target_modules": BY_NAME}),
        ("current", {"use_dora": True}),
        ("nvfp4", {}),
        ("nvfp4-weights", {}),
        pytest.param("mxfp8", {"use_dora": True, "lora_dropout": 0.1}, marks=pytest.mark.exhaustive),
        pytest.param("current", {}, marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", {"use_dora": True, "target_modules": BY_NAME}, marks=pytest.mark.exhaustive),
    ],
    ids=["LoRA-by-name", "DoRA", "LoRA", "LoRA-weights", "DoRA-dropout", "LoRA-current", "DoRA-by-name"],
)
def test_adapters_train_merge_unmerge_and_are_saved(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The base keeps its bits through training, merging and unmerging."""
    model = with_adapters(recipe, **options)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLoraLinear)]
    assert len(layers) == (2 * len(BY_NAME) if options.get("target_modules") else LINEAR_LAYERS)
    assert not any(param.requires_grad for param in quantized(model).values())
    base = base_bits(model)
    losses = train(model, optimizer_of(model))
    assert losses[-1] < losses[0] and base_bits(model) == base

    before = logits(model)
    model.save_pretrained(tmp_path)
    again = load_adapter(build(recipe), tmp_path)
    assert torch.equal(logits(again), before)
    again = load_adapter(build(recipe), tmp_path, is_trainable=True)
    losses = train(again, optimizer_of(again))
    assert losses[-1] < losses[0]

    model.merge_adapter(safe_merge=True)
    merged = base_bits(model)
    assert sum(merged[name] != value for name, value in base.items()) >= len(layers)
    coarse = {"mxfp8": 0.1, "current": 0.1, "nvfp4": 0.6, "nvfp4-weights": 0.6}[recipe]  # of what merging rounds again
    assert (logits(model) - before).norm() <= coarse * before.norm()
    model.unmerge_adapter()
    assert base_bits(model) == base and torch.equal(logits(model), before)
    assert len(quantized(model.merge_and_unload())) == LINEAR_LAYERS
    assert base_bits(model.model) == {name.removeprefix("base_model.model."): value for name, value in merged.items()}


def one_layer(**options: Any) -> tuple[Any, QuantizedLoraLinear, Tensor]:
    """A layer with two adapters that are not zero, and the values of its base."""
    model = with_adapters("mxfp8", target_modules=["q_proj"], **options)
    model.add_adapter("other", register(config(target_modules=["q_proj"], **options)))
    layer = next(module for module in model.modules() if isinstance(module, QuantizedLoraLinear))
    for adapter in layer.lora_B.values():
        nn.init.normal_(adapter.weight, std=0.1)
    return model, layer, layer.base_layer.weight.detach().dequantize(dtype=torch.float32)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_merging_is_one_rounding_of_the_sum(dora: bool) -> None:
    """Of both adapters at once, and one after the other; the codes are those of `quantize_` of the sum."""
    _, layer, values = one_layer(use_dora=dora)
    expected = values
    for name in ("default", "other"):
        delta = (layer.lora_B[name].weight @ layer.lora_A[name].weight * layer.scaling[name]).detach()
        expected = expected + delta
        if dora:
            factor = layer.lora_magnitude_vector[name].weight / torch.linalg.norm(values + delta, dim=1)
            expected = expected * factor.detach().unsqueeze(1)
    reference = layer.base_layer.weight.detach().clone().quantize_(expected)
    start = layer.base_layer.weight.detach().clone()
    layer.merge(adapter_names=["default", "other"])
    assert same(layer.base_layer.weight, reference) and not same(layer.base_layer.weight, start)
    draws = components.storage_of(layer.base_layer.weight).state["draws"]
    draws.add_(3)  # random words that were used while it was merged
    layer.unmerge()
    assert same(layer.base_layer.weight, start) and int(draws) >= 3
    layer.merge(adapter_names=["default"])
    with pytest.warns(UserWarning, match="additionally merging other"):
        layer.merge(adapter_names=["default", "other"])
    assert same(layer.base_layer.weight, reference) and layer.merged_adapters == ["default", "other"]
    layer.unmerge()
    assert same(layer.base_layer.weight, start) and not layer.merged
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer.unmerge()


def same(one: Any, other: Any) -> bool:
    pairs = zip(*(components.storage_of(each).components.values() for each in (one, other)), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def test_adapters_that_are_not_finite_are_not_merged() -> None:
    """And leave the weight as it was, merged or not."""
    _, layer, _ = one_layer()
    layer.merge(adapter_names=["default"])
    merged = layer.base_layer.weight.detach().clone()
    with torch.no_grad():
        layer.lora_B["other"].weight[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already following adapters were merged")
        with pytest.raises(ValueError, match="merged values of default, other are infinite or NaN; nothing was merged"):
            layer.merge(safe_merge=True, adapter_names=["other"])
        with pytest.raises(ConfigurationError, match="infinite or NaN"):
            layer.merge(adapter_names=["other"])
    assert same(layer.base_layer.weight, merged) and layer.merged_adapters == ["default"]


def test_biases_are_merged_and_come_back() -> None:
    model = nn.ModuleDict({"up": nn.Linear(64, 96, dtype=torch.bfloat16)})
    qs.convert(model, "mxfp8")
    tuned = get_peft_model(model, register(config(target_modules=["up"], lora_bias=True, task_type=None)))
    layer = tuned.base_model.model["up"]
    nn.init.ones_(layer.lora_B["default"].bias)
    bias = layer.base_layer.bias.detach().clone()
    layer.merge()
    assert torch.equal(layer.base_layer.bias, bias + 2)
    layer.unmerge()
    assert torch.equal(layer.base_layer.bias, bias)


def test_bytes_of_a_frozen_base(show: Any) -> None:
    """Counted, beside bfloat16 and QLoRA's 4 bit, computed: NF4 codes, and an 8-bit scale for 64 of them whose own
    float32 scales stand for 256 (Dettmers et al., 2023, arXiv:2305.14314)."""
    rows = {}
    for recipe in RECIPES:
        model = with_adapters(recipe)
        base = quantized(model).values()
        held = sum(part.nbytes for p in base for part in components.storage_of(p).components.values())
        rows[recipe] = held * 8 / sum(param.numel() for param in base)
    rows |= {"bf16": 16.0, "QLoRA": 4 + 8 / 64 + 32 / (64 * 256)}
    show("\n".join(f"{name:6} {width:.3f} bits a parameter" for name, width in rows.items()))
    assert rows["nvfp4"] < rows["QLoRA"] < 4.2 and 8 < rows["current"] < rows["mxfp8"] < 8.1


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def sharded(options: dict[str, Any], folder: Path) -> list[Any]:
    """Losses, which are accelerate's too, bits of the base before and after, what merging says; and the adapters are
    written."""
    model = with_adapters("mxfp8", **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = base_bits(model)
    losses = train(model, optimizer_of(model))
    with pytest.raises(UnsupportedOperationError) as caught:
        model.merge_adapter()
    save_adapter(model, folder)
    dist.barrier()
    adapters = {name: value for name, value in bits(model).items() if "lora_" in name}
    with accelerator() as accelerate:
        prepared, optimizer = prepare(accelerate, with_adapters("mxfp8", **options), partial(FusedAdam, lr=1e-2))
        assert train(prepared, optimizer) == losses
    with pytest.raises(ConfigurationError) as late:
        wrapped = build("mxfp8")
        fully_shard(wrapped, mesh=mesh)
        get_peft_model(wrapped, register(config()))
    return [losses, before == base_bits(model), str(caught.value), str(late.value), adapters]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [{"use_dora": True}, pytest.param({}, marks=pytest.mark.exhaustive)], ids=["DoRA", "LoRA"]
)
def test_under_fsdp2(options: dict[str, Any], tmp_path: Path) -> None:
    """1 and 2 ranks; the adapters that 2 wrote are loaded by one process, and merged."""
    for ranks in (1, 2):
        start = run_ranks if ranks > 1 else lambda _, *given: [run_alone(*given)]
        found = start(ranks, sharded, options, tmp_path / str(ranks))
        for losses, untouched, merging, late, _ in found:
            assert losses[-1] < losses[0] and untouched
            assert "the weight is sharded; use save_adapter" in merging
            assert "call fully_shard after get_peft_model or load_adapter" in late
    model = load_adapter(build("mxfp8"), tmp_path / "2")
    assert {name: value for name, value in bits(model).items() if "lora_" in name} == found[0][-1]
    model.merge_adapter(safe_merge=True)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: register(IA3Config()), "IA3Config) is not supported; use a LoraConfig"),
        (lambda: register(config(init_lora_weights="pissa")), "changes the base weights"),
        (
            lambda: register(config(alora_invocation_tokens=[1])),
            "alora_invocation_tokens=...) is not supported; use LoRA or DoRA",
        ),
    ],
)
def test_wrong_use_is_said_in_one_line(call: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_layers_without_a_quantized_weight_are_named() -> None:
    model = nn.ModuleDict({"up": qs.Linear(64, 96)})
    with pytest.raises(ConfigurationError, match=r"Linear.*has no quantized weight for an adapter"):
        get_peft_model(model, register(config(target_modules=["up"], task_type=None)))


def test_plain_layers_beside_quantized_ones_are_pefts_own() -> None:
    """The head of a converted model is one."""
    model = get_peft_model(build("mxfp8"), register(config(target_modules=["lm_head", "q_proj"])))
    kinds = [type(module).__name__ for name, module in model.named_modules() if name.endswith(("lm_head", "q_proj"))]
    assert sorted(kinds) == ["Linear", "QuantizedLoraLinear", "QuantizedLoraLinear"]
    plain_model = get_peft_model(plain(), register(config()))
    assert not any(isinstance(module, QuantizedLoraLinear) for module in plain_model.modules())


def test_quantized_adapters_are_not_saved_as_values(tmp_path: Path) -> None:
    """PEFT writes them by itself, and reads them into plain layers."""
    import quantshard.integrations.transformers  # noqa: F401  (which takes over save_pretrained)

    tiny = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    model = get_peft_model(LlamaForCausalLM(tiny), LoraConfig(target_modules="all-linear"))
    qs.convert(model, "mxfp8", filter="*.lora_A.*")
    with pytest.raises(ConfigurationError, match=r"the codes of base_model\.model\..*lora_A.* as values"):
        model.save_pretrained(tmp_path)
