"""Examples of integrations, and the snippets of docs/frameworks.md#accelerate-peft-and-trl, run as they stand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from quantshard import convert
from tests.distributed.pool import run_ranks
from tests.interop.frameworks.accelerators import LINEAR_LAYERS, accelerator, codes, plain, quantized
from tests.pages import snippets

# TRL and PEFT ask transformers for what that has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* is deprecated:FutureWarning")
ROOT = Path(__file__).parents[3]
CHAPTER = "docs/frameworks.md#accelerate-peft-and-trl"


def example(name: str) -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accelerate_fsdp2(kind: str, folder: Path) -> list[float]:
    with accelerator(kind) as made:
        return example("accelerate_fsdp2").main(made, folder=folder)


# test_accelerate.py has what it shows
@pytest.mark.exhaustive
@pytest.mark.distributed
def test_accelerate_fsdp2(tmp_path: Path) -> None:
    """2 ranks: what was saved goes on with the losses of the run that never stopped."""
    for losses in run_ranks(2, accelerate_fsdp2, "fsdp2", tmp_path):
        first, second, again = losses[:5], losses[5:10], losses[10:]
        assert again == second and sum(second) < sum(first)


def test_peft_lora(tmp_path: Path) -> None:
    """And the export is a plain model of transformers, whose values are those of the merged one."""
    losses = example("peft_lora").main(folder=tmp_path, dora=True)
    assert len(losses) == 15 and losses[9] < losses[0] and losses[-1] < losses[10]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert not quantized(model) and all(bool(param.isfinite().all()) for param in model.parameters())


def test_examples_are_a_screen_and_a_half() -> None:
    for name in ("accelerate_fsdp2", "peft_lora"):
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 75


def test_the_snippets_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel  # here, since the ranks of the test above import this file

    from tests.interop.frameworks import test_peft, test_trl

    monkeypatch.chdir(tmp_path)
    first, second, third = snippets(CHAPTER)
    model = plain()
    names: dict[str, Any] = {"model": model, "data": DataLoader(torch.randint(101, (8, 12)), batch_size=4)}
    with accelerator("none"):
        exec(first, names)
    assert len(quantized(names["model"])) == LINEAR_LAYERS and (tmp_path / "state").is_dir()

    base = plain()
    convert(base, "mxfp8")
    before = list(codes(base).values())
    names = {
        "model": plain(),
        "new_base": base,
        "train": lambda model: test_peft.train(model, test_peft.optimizer_of(model), 1),
    }
    exec(second, names)
    assert isinstance(names["model"], PeftModel) and names["model"].base_model.model is base
    after = list(codes(base).values())  # merged and unmerged
    assert len(after) == LINEAR_LAYERS and all(map(same_parts, before, after))

    names = {"model": plain(), "arguments": test_trl.arguments(tmp_path)}
    before_trl, from_lora = third.split("trainer = SFTTrainer(model, peft_config")
    exec(before_trl, names)
    assert names["trainer"].optimizer is names["optimizer"]
    exec("trainer = SFTTrainer(model, peft_config" + from_lora, names)
    assert isinstance(names["trainer"].model, PeftModel)


def same_parts(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))
