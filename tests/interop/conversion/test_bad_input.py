"""What cannot be converted, or not trained as it is, is said in a line, and the model is then as it was."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion import linear
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.optimizers import FusedAdam, MasterWeights


@pytest.fixture(autouse=True)
def _no_optimizers_of_other_tests() -> None:
    gc.collect()


def born(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(32, 32, dtype=dtype) for _ in range(4)])


X = torch.arange(64, dtype=torch.float32).view(2, 32).bfloat16() / 64


def said(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


# All or nothing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_leave_the_model_as_it_was(value: float) -> None:
    model = born()
    with torch.no_grad():
        model[2].weight[3, 5] = value
        model[3].weight[1, 1] = value
    layers, weights = list(model), [layer.weight for layer in model]
    words = r"2\.weight: 1 of 1024 values are infinite or NaN, the first, .*at \[3, 5\]"
    with pytest.raises(ConfigurationError, match=words) as caught:
        qs.convert(model, "mxfp8")
    assert "\n" not in str(caught.value)
    assert type(model) is nn.Sequential and all(a is b for a, b in zip(model, layers, strict=True))
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    assert qs.convert(model, "mxfp8", filter=["0", "1"]).bytes_after  # nobody looks at what is not converted


def test_what_is_refused_later_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the constructor of the last layer says."""
    made = linear.empty_linear

    def fails(old: nn.Linear, name: str, *others: object) -> ConvertedLinear:
        if name == "3":
            raise ConfigurationError("of the last")
        return made(old, name, *others)

    monkeypatch.setattr(linear, "empty_linear", fails)
    model = born()
    with pytest.raises(ConfigurationError, match="of the last"):
        qs.convert(model, "mxfp8")
    assert type(model) is nn.Sequential and all(type(layer) is nn.Linear for layer in model)


def test_the_old_weights_go_as_the_new_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    model = born()
    old, alive = [weakref.ref(layer.weight) for layer in model], []
    fill = linear.fill_linear

    def counted(*args: object) -> None:
        fill(*args)
        alive.append(sum(each() is not None for each in old))

    monkeypatch.setattr(linear, "fill_linear", counted)
    qs.convert(model, "mxfp8")
    assert alive == [4, 3, 2, 1] and not any(each() is not None for each in old)


def test_float16_that_overflowed_is_told() -> None:
    model = born(torch.float32)
    with torch.no_grad():
        model[1].weight[0, 0] = 70000
    with pytest.raises(ConfigurationError, match=r"1\.weight: 1 of 1024 .*load the model in bfloat16"):
        qs.convert(model.half(), "mxfp8")


# Models of other libraries -------------------------------------------------------------------------------------------


class Params4bit(nn.Parameter):
    """As of bitsandbytes, whose Linear4bit keeps two codes in each byte of it."""

    __module__ = "bitsandbytes.nn.modules"


class Linear4bit(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.weight = Params4bit(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)


def quantized_by_torchao() -> nn.Module:
    model = born()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def of_one_byte() -> nn.Module:
    model = born()
    model[1].weight = nn.Parameter(model[1].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return model


FOREIGN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bitsandbytes": (
        lambda: nn.Sequential(nn.Linear(32, 32), Linear4bit()),
        r"1 .*: a bitsandbytes\.Linear4bit",
    ),
    "torchao": (quantized_by_torchao, "its weight is a Int8Tensor; load it in bfloat16"),
    "float8 values": (of_one_byte, r"1 .*: its weight is torch.float8_e4m3fn; load it in bfloat16"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_layers_that_others_quantized_are_left(case: str) -> None:
    make, words = FOREIGN[case]
    model = make()
    before = model[1]
    try:
        text = str(qs.convert(model, "mxfp8"))
    except ConfigurationError as error:
        text = str(error)
    assert re.search(words, text) and model[1] is before


def test_state_dicts_of_another_program_are_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    qs.convert(model, "block")
    codes = torch.ones(32, 32).to(torch.float8_e4m3fn)
    for scale in ("weight_scale", "weight_scale_inv"):
        with pytest.raises(RuntimeError, match="float8_e4m3fn tensor cannot be loaded as"):
            model.load_state_dict({"0.weight": codes, f"0.{scale}": torch.ones(1, 1)}, strict=False)


def test_models_that_transformers_loaded_quantized_are_refused() -> None:
    model = born()
    model.quantization_method = "gptq"
    with pytest.raises(ConfigurationError, match=r"already quantized \(gptq\); load it in bfloat16"):
        qs.convert(model, "mxfp8")


def test_layers_that_torchao_trains_are_named() -> None:
    model = born()
    convert_to_float8_training(model)
    with pytest.raises(ConfigurationError, match=r"a torchao\.Float8Linear, which computes in its own way"):
        qs.convert(model, "mxfp8")


# Models on the meta device -------------------------------------------------------------------------------------------


def meta() -> nn.Sequential:
    model = born(device="meta")
    qs.convert(model, "mxfp8")
    return model


def emptied() -> nn.Sequential:
    return meta().to_empty(device="cpu")


def stepped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = meta()
    make(model).step()


UNLOADED: dict[str, tuple[Callable[[], object], str]] = {
    "forward": (lambda: meta()(X), r"0\.weight is on the meta device and holds no values; call to_empty"),
    "forward of uninitialized memory": (
        lambda: emptied()(X),
        r"0\.weight was never given values",
    ),
    "to_empty and forward in inference mode": (
        lambda: torch.inference_mode()(lambda: emptied()(X))(),
        r"0\.weight was never given values",
    ),
    "forward of a norm in inference mode": (
        lambda: torch.inference_mode()(lambda: qs.RMSNorm(8, device="meta")(X.new_ones(2, 8)))(),
        r"RMSNorm\.weight is on the meta device and holds no values; call to_empty",
    ),
    "its FusedAdam": (
        lambda: stepped(lambda model: FusedAdam(model.named_parameters())),
        r"FusedAdam: 0\.weight is on the meta device",
    ),
    "its MasterWeights": (
        lambda: stepped(lambda model: MasterWeights(torch.optim.AdamW, model.named_parameters())),
        r"0\.weight is on the meta device",
    ),
}


@pytest.mark.parametrize("case", UNLOADED)
def test_a_model_without_values_is_not_trained(case: str) -> None:
    run, words = UNLOADED[case]
    with pytest.raises(ConfigurationError, match=words) as caught:
        run()
    assert "\n" not in str(caught.value)


def values() -> dict[str, Tensor]:
    return {name: value.float() for name, value in born().state_dict().items()}


def fill_in_place(model: nn.Module) -> None:
    """As `dcp.load` does with the tensors of a state dict."""
    source = born()
    qs.convert(source, "mxfp8")
    state = source.state_dict()
    for name, value in model.state_dict().items():
        value.copy_(state[name])


LOADED: dict[str, Callable[[nn.Module], object]] = {
    "load_high_precision": lambda model: qs.checkpoints.load_high_precision(model, values()),
    "reset_parameters": lambda model: [layer.reset_parameters() for layer in model],
    "in place": fill_in_place,
    "in place, then moved": lambda model: [fill_in_place(model), model.to(torch.float32), model.to(torch.bfloat16)],
}


@pytest.mark.parametrize("case", LOADED)
def test_one_with_values_is(case: str) -> None:
    model = emptied()
    LOADED[case](model)
    assert model(X).isfinite().all()


# Optimizers ----------------------------------------------------------------------------------------------------------


def test_explain_warns_of_parameters_that_the_optimizer_lacks() -> None:
    model = born()
    qs.convert(model, "mxfp8")
    optimizer = FusedAdam([(n, p) for n, p in model.named_parameters() if n not in ("1.weight", "2.bias")])
    (text,) = said(lambda: qs.explain(model, optimizer))
    assert text.startswith("1.weight, 2.bias: trained, but not in this FusedAdam")
    for name in ("1.weight", "2.bias"):
        model.get_parameter(name).requires_grad_(False)
    assert said(lambda: qs.explain(model, optimizer)) == said(lambda: qs.explain(model)) == []


def test_explain_warns_of_an_optimizer_of_another_model() -> None:
    model, other = born(), born()
    (text,) = said(lambda: qs.explain(model, FusedAdam(other.named_parameters())))
    assert text.startswith("8 of the 8 parameters of FusedAdam are not in this model")


class Adapted(nn.Module):
    """Named as PEFT names a layer and its adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)})


def test_adapters_are_left_unless_they_are_asked_for() -> None:
    """PEFT saves them by their values."""
    report = qs.convert(nn.Sequential(Adapted()), "mxfp8")
    assert [layer.name for layer in report.converted] == ["0.base_layer"]
    assert [(layer.name, layer.reason.split(";")[0]) for layer in report.left] == [("0.lora_A.default", "an adapter")]
    assert len(qs.convert(nn.Sequential(Adapted()), "mxfp8", filter="*").converted) == 2


@pytest.mark.parametrize("flag", ["autocast", "preserve_high_precision_init_val"])
def test_flags_are_true_or_false(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"convert\({flag}='no'\): it must be True or False"):
        qs.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8", **{flag: "no"})


def test_transposed_layers_of_transformers_are_told() -> None:
    """GPT-2 has little else."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(ConfigurationError, match=r"no layer of this model .*a Conv1D of transformers, whose weight"):
        qs.convert(model, "mxfp8")
