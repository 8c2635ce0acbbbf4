"""TRL's SFTTrainer on a small converted model and a small local dataset: all weights, and LoRA. 1 process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from quantshard import checkpoints
from quantshard.integrations.peft import QuantizedLoraLinear, load_adapter, register
from quantshard.optimizers import FusedAdam
from tests.distributed.models import bits
from tests.interop.frameworks.accelerators import LINEAR_LAYERS, build, changed, codes, held, quantized
from tests.interop.frameworks.test_peft import RECIPES, logits

STEPS = 5
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found:UserWarning"),
    # TRL and PEFT ask transformers for what that has renamed
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* is deprecated:FutureWarning"),
]


def trl() -> tuple[Any, Any]:
    """SFTConfig and SFTTrainer. They and their datasets take seconds to import, and who collects tests runs none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL's own imports
        from trl import SFTConfig, SFTTrainer
    return SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(99))])}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def arguments(folder: Path) -> dict[str, Any]:
    """Of an SFTTrainer that takes five steps over the same four texts."""
    from datasets import Dataset

    settings = trl()[0](
        str(folder), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, max_length=16,
    )  # fmt: skip
    texts = [" ".join(f"w{(7 * row + 3 * at) % 99}" for at in range(12)) for row in range(4)]
    data = Dataset.from_dict({"text": texts})
    return {"args": settings, "train_dataset": data, "processing_class": tokenizer()}


def trained(folder: Path, model: nn.Module, **options: Any) -> tuple[Any, list[float]]:
    """The trainer, and the losses that it logged."""
    trainer = trl()[1](model, **arguments(folder), **options)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def only(recipe: str) -> pytest.MarkDecorator:
    """The other recipes are left to `make test-all`."""
    others = [pytest.param(other, marks=pytest.mark.exhaustive) for other in RECIPES if other != recipe]
    return pytest.mark.parametrize("recipe", [recipe, *others])


@only("mxfp8")
def test_all_weights(recipe: str, tmp_path: Path) -> None:
    """Every quantized weight is in the optimizer, and changes; saved with its optimizer, and loaded to go on."""
    model = build(recipe)
    optimizer, before = FusedAdam(model.named_parameters(), lr=3e-3), codes(model)
    _, losses = trained(tmp_path, model, optimizers=(optimizer, None))
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert len(quantized(model)) == changed(before, model) == held(model, optimizer) == LINEAR_LAYERS
    assert optimizer.param_groups[0]["step"] == STEPS
    checkpoints.save(tmp_path / "saved", model, optimizer)
    model, kept = build(recipe), bits(model, optimizer)
    optimizer = FusedAdam(model.named_parameters(), lr=3e-3)
    checkpoints.load(tmp_path / "saved", model, optimizer)
    assert bits(model, optimizer) == kept
    _, later = trained(tmp_path, model, optimizers=(optimizer, None))
    assert later[-1] < losses[-1]


@only("current")
def test_lora(recipe: str, tmp_path: Path) -> None:
    """The base keeps its bits; TRL takes the configuration and adds the adapters, which it saves."""
    model = build(recipe)
    before = codes(model)
    trainer, losses = trained(
        tmp_path, model, peft_config=register(LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    )
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert changed(before, trainer.model.base_model.model) == 0
    layers = [module for module in trainer.model.modules() if isinstance(module, QuantizedLoraLinear)]
    assert len(layers) == LINEAR_LAYERS and all(bool((each.lora_B["default"].weight != 0).any()) for each in layers)
    assert not any(param.requires_grad for param in quantized(trainer.model).values())
    trainer.save_model(str(tmp_path / "adapter"))
    assert torch.equal(logits(load_adapter(build(recipe), tmp_path / "adapter")), logits(trainer.model))
