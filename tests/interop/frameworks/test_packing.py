"""Packed sequences in converted transformers models: outputs and gradients are those of separate sequences.

A sequence attends to itself alone if its positions restart. What a recipe quantizes by must then be the same: tokens in
the same order (blocks over tokens, as in wgrad) and in one call (scales per tensor). A batch of rows and the same rows
end to end have both, so they agree for every recipe without stochastic rounding. Sequences on their own do for formats
whose blocks lie within a token, except in gradients of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import quantshard as qs
from quantshard.integrations.transformers import QuantizedTraining
from quantshard.optimizers import FusedAdam
from tests.distributed.pool import run_ranks
from tests.interop.frameworks import test_trl

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, tuple[Any, Any, str]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, "sdpa"),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, "quantshard"),
}
LENGTHS = (5, 9, 3, 15, 1, 31)
pytestmark = test_trl.pytestmark


def made(kind: str, recipe: str | None) -> Any:
    torch.manual_seed(0)
    config, model_class, implementation = KINDS[kind]
    model = model_class(config(**SIZES, dtype=torch.float32))
    model.set_attn_implementation(implementation)
    if recipe is not None:
        qs.convert(model, recipe)
    return model


def sequences(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 101, (length,), generator=generator).tolist() for length in lengths]


def flattened(rows: list[list[int]]) -> dict[str, Tensor]:
    """What the collator of transformers makes of sequences: positions restart, first tokens have no loss."""
    batch = DataCollatorWithFlattening()([{"input_ids": row} for row in rows])
    assert batch["position_ids"].tolist() == [[at for row in rows for at in range(len(row))]]
    return dict(batch)


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def results(model: Any, batches: list[dict[str, Tensor]], count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits token by token, the loss, and gradients of all parameters, summed over batches."""
    model.zero_grad()
    logits, losses = [], []
    for batch in batches:
        # before backward, after which FSDP2 shards the weights again
        with torch.no_grad():
            logits.append(model(**batch, use_cache=False).logits.flatten(0, 1))
        out = model(**batch, use_cache=False, num_items_in_batch=count)
        out.loss.backward()
        losses.append(out.loss.detach())
    gradients = {name: whole(param.grad) for name, param in model.named_parameters()}
    return torch.cat(logits), torch.stack(losses).sum(), gradients


def assert_same(one: Tensor, other: Tensor, what: str) -> None:
    """Up to the rounding of attention: float32 sums of at most 64 terms, through two layers and back."""
    bound = 64 * torch.finfo(torch.float32).eps * float(other.abs().max())
    assert float((one - other).abs().max()) <= bound, what


def rows_and_packed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Four rows of 16 tokens as a batch, and end to end."""
    rows = sequences((16,) * 4)
    tokens = torch.tensor(rows)
    labels = tokens.clone()
    labels[:, 0] = -100
    return {"input_ids": tokens, "labels": labels}, flattened(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [None, "current", "mxfp8", "block", "rowwise"])
def test_rows_end_to_end_are_rows(kind: str, recipe: str | None) -> None:
    model = made(kind, recipe)
    batch, packed = rows_and_packed()
    expected, found = results(model, [batch], 60), results(model, [packed], 60)
    assert_same(found[0], expected[0], "logits")
    assert_same(found[1], expected[1], "loss")
    for name, gradient in expected[2].items():
        assert_same(found[2][name], gradient, name)
    # without positions the rows see each other
    mixed = results(model, [{**packed, "position_ids": torch.arange(64)[None]}], 60)
    assert float((mixed[0] - expected[0]).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_packed_sequences_are_separate_sequences(kind: str, recipe: str | None) -> None:
    """Of any length; a sequence of one token has no loss."""
    model, rows = made(kind, recipe), sequences(LENGTHS)
    count = sum(LENGTHS) - len(LENGTHS)
    separate = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in rows]
    expected, found = results(model, separate, count), results(model, [flattened(rows)], count)
    assert_same(found[0], expected[0], "logits")
    assert_same(found[1], expected[1], "loss")
    # blocks of wgrad lie along tokens: only gradients that no quantized wgrad made are the same
    names = [name for name in expected[2] if recipe is None or "embed" in name or "lm_head" in name or "norm" in name]
    assert len(names) >= 7
    for name in names:
        assert_same(found[2][name], expected[2][name], name)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_other_sequences_leave_no_trace(recipe: str | None) -> None:
    """Logits of a sequence have the same bits whatever is packed before and after it."""
    model, rows = made("llama", recipe), sequences(LENGTHS)
    others = sequences(LENGTHS, seed=2)
    others[3] = rows[3]
    first = sum(LENGTHS[:3])
    with torch.no_grad():
        one, other = (model(**flattened(each), use_cache=False).logits[0] for each in (rows, others))
    assert torch.equal(one[first : first + LENGTHS[3]], other[first : first + LENGTHS[3]])
    assert not torch.equal(one[:first], other[:first])


def sharded(recipe: str) -> dict[str, tuple[float, float]]:
    """Largest difference, and largest value, of packed rows and a batch of them in a model sharded by FSDP2."""
    model = made("qwen3", recipe)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch, packed = rows_and_packed()
    expected, found = results(model, [batch], 60), results(model, [packed], 60)
    pairs = {"logits": (found[0], expected[0])} | {name: (found[2][name], g) for name, g in expected[2].items()}
    return {name: (float((a - b).abs().max()), float(b.abs().max())) for name, (a, b) in pairs.items()}


@pytest.mark.distributed
def test_under_fsdp2() -> None:
    for found in run_ranks(2, sharded, "mxfp8"):
        assert len(found) == 1 + len(list(made("qwen3", None).parameters()))
        for name, (difference, largest) in found.items():
            assert difference <= 64 * torch.finfo(torch.float32).eps * largest, name


# Trainers


@pytest.mark.parametrize("options", [{"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_sft_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """The loss of a packed step is that of the sequences on their own; attention gets positions and no mask."""
    from datasets import Dataset

    config, trainer_class = test_trl.trl()
    rows = sequences(LENGTHS[:4] + LENGTHS[5:])
    settings = config(
        str(tmp_path), per_device_train_batch_size=8, max_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, logging_steps=1, **{"max_length": 32} | options,
    )  # fmt: skip
    model, calls = made("llama" if "packing" in options else "qwen3", "mxfp8"), []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    count = sum(map(len, rows)) - len(rows)
    separate = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in rows]
    expected = results(model, separate, count)[1]
    calls.clear()

    class Packed(QuantizedTraining, trainer_class):  # type: ignore[misc]
        pass

    data = Dataset.from_list([{"input_ids": row} for row in rows])
    trainer = Packed(model, args=settings, train_dataset=data, processing_class=test_trl.tokenizer())
    trainer.train()
    [call] = calls
    assert call["input_ids"].shape == (1, sum(map(len, rows))) and call.get("attention_mask") is None
    assert (call["position_ids"] == 0).sum() == len(rows)
    [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(float(expected), rel=1e-5)


class PackedModule(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = made("qwen3", "mxfp8"), list[float]()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return FusedAdam(self.model.named_parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        rows = [{"input_ids": row} for row in sequences((16,) * 12)]
        return torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=DataCollatorWithFlattening())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    """Steps on packed rows are those on batches of rows, until a code of a weight rounds the other way."""
    module = PackedModule()
    lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=3, default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module)  # fmt: skip
    model = made("qwen3", "mxfp8")
    optimizer, expected = FusedAdam(model.named_parameters(), lr=1e-2), []
    for tokens in torch.tensor(sequences((16,) * 12)).split(4):
        labels = tokens.clone()
        labels[:, 0] = -100
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert module.losses == pytest.approx(expected, rel=1e-4) and expected[2] < expected[0]
