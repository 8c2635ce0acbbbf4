"""The chunked loss of converted transformers models: same numbers as from all logits, and when it is not used."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion.head_loss import DeferredLogits, LossLinear
from quantshard.modules import chunked_loss

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(12) < 4, -100, TOKENS)
CHUNKED = "loss: in chunks of tokens, without all logits"


def model_of(
    loss: Any = "auto", kind: Any = LlamaForCausalLM, config: Any = LlamaConfig, **options: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options))
    qs.convert(model, "block", loss=loss)
    return model.train()


def trained(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Loss, and the gradient of the head."""
    model.zero_grad()
    loss = model(input_ids=TOKENS, **{"labels": LABELS, **inputs}).loss
    loss.backward()
    grad = model.get_output_embeddings().weight.grad
    assert grad is not None
    return loss.detach(), grad


def assert_alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"num_items_in_batch": torch.tensor(50)},
        {"ignore_index": 7, "labels": torch.where(LABELS == -100, 7, LABELS)},
        {"labels": None, "shift_labels": LABELS.roll(-1, 1)},
        {"logits_to_keep": 12},
    ],
)
def test_a_converted_model_has_the_loss_of_its_logits(inputs: dict[str, Any]) -> None:
    if "shift_labels" in inputs:
        inputs = {"labels": LABELS, "shift_labels": inputs["shift_labels"]}
    assert_alike(trained(model_of(), **inputs), trained(model_of("model"), **inputs))


def test_options_are_those_of_the_function_in_training_and_evaluation() -> None:
    options = {"label_smoothing": 0.2, "z_loss": 0.01}
    model = model_of(options)
    loss, _ = trained(model)
    logits = model.eval()(input_ids=TOKENS).logits[:, :-1].flatten(0, 1).double()
    labels = LABELS[:, 1:].flatten()
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2)
    expected = expected + 0.01 * logits.logsumexp(-1)[labels != -100].square().mean()
    evaluated = model(input_ids=TOKENS, labels=LABELS)
    assert type(evaluated.logits) is Tensor
    for found in (loss, evaluated.loss):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_logits_are_computed_when_something_reads_them() -> None:
    model = model_of()
    output = model(input_ids=TOKENS, labels=LABELS)
    logits = output.logits
    assert type(logits) is DeferredLogits
    expected = model(input_ids=TOKENS).logits
    assert type(expected) is Tensor
    assert logits.shape == expected.shape and logits.float().dtype == torch.float32
    assert torch.equal(logits[0, 1:3], expected[0, 1:3]) and torch.equal(2 / (logits + 1), 2 / (expected + 1))
    assert torch.equal(torch.cat([logits, expected]), torch.cat([expected, expected]))
    F.cross_entropy(logits.view(-1, 101), TOKENS.flatten()).backward()
    assert model.lm_head.weight.grad is not None
    later = model(input_ids=TOKENS, labels=LABELS).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="before backward"):
        later.float().argmax(-1)


@pytest.mark.parametrize("chunked", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_compiled(chunked: bool) -> None:
    model = model_of("auto" if chunked else "model", tie_word_embeddings=True)
    expected = trained(model)
    model.compile(backend="aot_eager")
    assert_alike(trained(model), expected)
    assert isinstance(model(input_ids=TOKENS, labels=LABELS).logits, DeferredLogits) == chunked
    with torch.no_grad():
        evaluated = model.eval()(input_ids=TOKENS, labels=LABELS)
    assert type(evaluated.logits) is Tensor and torch.equal(
        evaluated.loss, ForCausalLMLoss(evaluated.logits, LABELS, 101)
    )


SCALED: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "Gemma 2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 2.0}),
    "Gemma 3": (Gemma3ForCausalLM, Gemma3TextConfig, {"final_logit_softcapping": 3.0}),
    "Cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.3}),
    "Granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 3.0}),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_model_that_scales_or_caps_its_logits(name: str) -> None:
    kind, config, settings = SCALED[name]
    model, plain = (model_of(loss, kind, config, **settings) for loss in ("chunked", "model"))
    inputs = {"num_items_in_batch": torch.tensor(50), "ignore_index": 7, "labels": LABELS.where(LABELS != -100, 7)}
    assert_alike(trained(model, **inputs), trained(plain, **inputs))
    logits = model(input_ids=TOKENS, labels=LABELS).logits
    assert type(logits) is DeferredLogits and torch.equal(logits[:], plain(input_ids=TOKENS).logits)
    smoothed = trained(model_of({"label_smoothing": 0.2}, kind, config, **settings))
    loss = F.cross_entropy(
        plain(input_ids=TOKENS).logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), label_smoothing=0.2
    )
    plain.zero_grad()
    loss.backward()
    assert_alike(smoothed, (loss.detach(), plain.get_output_embeddings().weight.grad))


class Shifted(LlamaForCausalLM):
    """A model that changes its logits in a way that does not stay deferred."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state).tanh().tanh()
        return CausalLMOutput(self.loss_function(logits, labels, 101), logits)


def test_a_model_that_changes_its_logits_otherwise_has_its_own_loss() -> None:
    expected = trained(model_of("model", Shifted))
    with pytest.warns(UserWarning, match="changes its logits"):
        assert_alike(trained(model_of("auto", Shifted)), expected)


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_a_quantized_head(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of mxfp8 do not depend on their chunk, so the logits have equal bits, and only sums differ."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 0)
    tokens = torch.randint(101, (6, 64), generator=torch.Generator().manual_seed(1))
    found = []
    for loss in ("auto", "model"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        report = qs.convert(model.train(), {"lm_head": recipe, "*": "bf16"} if recipe == "mxfp8" else recipe,
                            filter=["lm_head"], loss=loss)  # fmt: skip
        for _ in range(2):
            model.zero_grad()
            output = model(input_ids=tokens, labels=torch.where(tokens < 30, -100, tokens))
            output.loss.backward()
        found.append((output.loss.detach(), model.lm_head.weight.grad))
        assert report.loss == ("" if loss == "model" else CHUNKED)
        assert isinstance(output.logits, DeferredLogits) == (loss == "auto")
    assert_alike(*found) if recipe == "mxfp8" else torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    model = copy.deepcopy(model)
    qs.revert(model)
    assert type(model.lm_head) is nn.Linear


def test_other_heads_and_losses_stay() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    own = copy.deepcopy(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert "its head has hooks" in qs.convert(model, "block").loss
    own.loss_function = lambda logits, labels, vocab_size, **rest: logits.sum()
    report = qs.convert(own, "block")
    assert "its loss is not transformers'" in report.loss and report.loss in str(report)
    assert report.loss in str(qs.explain(own))
    assert qs.convert(nn.Sequential(nn.Linear(32, 32)), "block").loss == ""
    with pytest.raises(ConfigurationError, match="no transformers model"):
        qs.convert(nn.Sequential(nn.Linear(32, 32)), "block", loss="chunked")
    with pytest.raises(ConfigurationError, match="use one of"):
        qs.convert(nn.Sequential(nn.Linear(32, 32)), "block", loss={"z": 0.1})


def test_a_loss_function_that_is_set_later_gets_logits() -> None:
    model = model_of()
    model.loss_function = lambda logits, labels, vocab_size, **rest: logits.float().mean()
    output = model(input_ids=TOKENS, labels=LABELS)
    assert type(output.logits) is Tensor and torch.equal(output.loss, output.logits.mean())


def test_copies_and_reverted_models() -> None:
    model = model_of(tie_word_embeddings=True)
    expected = trained(model)
    other = copy.deepcopy(model)
    assert_alike(trained(other), expected)
    assert type(other.lm_head) is LossLinear and CHUNKED in str(qs.explain(other))
    qs.revert(other)
    assert type(other.lm_head) is nn.Linear and other.loss_function is ForCausalLMLoss
    assert type(other(input_ids=TOKENS, labels=LABELS).logits) is Tensor
    assert CHUNKED not in str(qs.explain(other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(other)


def test_hooks_of_the_head_get_logits() -> None:
    models = model_of(), model_of("model")
    for model in models:
        model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)
    assert_alike(*map(trained, models))


def test_a_model_whose_forward_computes_its_own_loss_keeps_it() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))
    with pytest.raises(ConfigurationError, match="does not call loss_function"):
        qs.convert(model, "block", loss={"z_loss": 0.1})


def test_mixed_precision_of_accelerate_leaves_logits_deferred() -> None:
    convert_to_fp32 = pytest.importorskip("accelerate.utils").convert_to_fp32
    output = convert_to_fp32(model_of()(input_ids=TOKENS, labels=LABELS))
    assert isinstance(output.logits, DeferredLogits) and output.logits._logits is None
    assert output.logits.contiguous()[0].dtype == torch.float32


def test_a_forward_that_fails_leaves_the_head_as_it_is() -> None:
    model = model_of()
    with pytest.raises(IndexError):
        model(input_ids=TOKENS + 1000, labels=LABELS)
    assert type(model.lm_head(torch.zeros(1, 64))) is Tensor
