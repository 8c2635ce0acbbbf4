"""The Trainer of transformers over quantized weights: 1 process, DDP and FSDP2 on 2, against loops by hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.integrations import transformers as qt
from quantshard.optimizers import FusedAdam
from quantshard.state_storage import PRESETS
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import hf_trainer
import plain_fsdp2_llama

from tests.interop.frameworks.test_transformers import CELLS, but, load, quantized, tiny

pytestmark = pytest.mark.distributed
LAYERS, STEPS, ROWS = 7, 3, 4
CLIP = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bf16")
    small().save_pretrained(path)
    return path


def small() -> PreTrainedModel:
    return tiny(num_hidden_layers=1)


def data() -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(3, 101, (64, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(out: Path, **options: Any) -> TrainingArguments:
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "logging_strategy": "no", "save_strategy": "no", "max_grad_norm": CLIP,
        "log_level": "error", "weight_decay": 0.1, "dataloader_num_workers": 0,
    }  # fmt: skip
    return TrainingArguments(str(out), **{**given, **options})


class LossTrainer(Trainer):
    """transformers' own, which notes the losses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.losses: list[float] = []
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate itself offers FSDP only where there are GPUs; so its state is told what it would find there."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        self.losses.append(loss.item())
        return loss


class QuantizedLossTrainer(qt.QuantizedTraining, LossTrainer):
    pass


def by_hand(model: PreTrainedModel, out: Path, wrap: Any = None) -> list[float]:
    """The losses of the same loop without the Trainer: its batches, its optimizer, its clipping, its schedule."""
    set_seed(42)
    batches = LossTrainer(small(), arguments(out), train_dataset=data()).get_train_dataloader()
    trained = model if wrap is None else wrap(model)
    named = list(trained.named_parameters())
    groups = [[pair for pair in named if (pair[1].ndim > 1) == decays] for decays in (True, False)]
    optimizer = FusedAdam(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)], lr=1e-2
    )
    schedule = transformers.get_scheduler("linear", optimizer, 0, STEPS)
    losses = []
    trained.train()
    for batch, _ in zip(batches, range(STEPS), strict=False):
        count = (batch["labels"][:, 1:] != -100).sum() * (dist.get_world_size() if dist.is_initialized() else 1)
        loss = trained(**batch, num_items_in_batch=count).loss
        if wrap is not None:
            loss = loss * dist.get_world_size()  # the Trainer's: gradients are averaged over ranks
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", but("mxfp8", of=CELLS))
def test_the_trainer_trains_all_weights_as_a_loop_by_hand(recipe: str, folder: Path, tmp_path: Path) -> None:
    """Its default optimizer is ours; resumed training has the bits of training that went on."""
    model = load(folder, recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = QuantizedLossTrainer(
        model, arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=data()
    )
    trainer.train()
    names = quantized(model).keys()
    after = model.state_dict()
    assert type(trainer.optimizer.optimizer) is FusedAdam
    held = {id(param) for group in trainer.optimizer.param_groups for param in group["params"]}
    changed = sum(not torch.equal(before[name], after[name]) for name in names)
    assert (len(names), changed, sum(id(p) in held for p in quantized(model).values())) == (LAYERS, LAYERS, LAYERS)
    assert trainer.losses == by_hand(load(folder, recipe), tmp_path)
    other = load(folder, recipe)
    resumed = QuantizedLossTrainer(other, arguments(tmp_path), train_dataset=data())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.losses == trainer.losses[2:]
    assert bits(other, resumed.optimizer.optimizer) == bits(model, trainer.optimizer.optimizer)


# On 2 ranks


@contextmanager
def fresh_state() -> Iterator[None]:
    """accelerate keeps what it found in singletons, and the processes run other cases."""
    kinds = (AcceleratorState, PartialState, GradientState)
    for kind in kinds:
        kind._reset_state()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    with patch.dict(os.environ, group):  # asked for, not used: the processes have a group
        yield
    for kind in kinds:
        kind._reset_state()


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """As accelerate does it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.model.layers, model.model.embed_tokens):
        fully_shard(layer, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"},
}


def on_ranks(kind: str, recipe: str, folder: Path, out: Path) -> dict[str, Any]:
    options = FSDP2 if kind == "fsdp2" else {}
    with fresh_state():
        model = load(folder, recipe)
        trainer = QuantizedLossTrainer(
            model, arguments(out, save_strategy="steps", save_steps=2, **options), train_dataset=data()
        )
        before = bits(model)
        trainer.train()
        optimizer = trainer.optimizer.optimizer
        after = bits(trainer.model, optimizer)
        names = list(quantized(trainer.model))
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        counted = (
            len(names), sum(before[name] != after[name] for name in names),
            sum(id(param) in held for param in quantized(trainer.model).values()),
        )  # fmt: skip
    with fresh_state():
        other = load(folder, recipe)
        resumed = QuantizedLossTrainer(other, arguments(out, **options), train_dataset=data())
        resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        again = bits(resumed.model, resumed.optimizer.optimizer)
        resumed.save_model(str(out / "whole"))
    dist.barrier()
    with fresh_state():
        wrap = shard if kind == "fsdp2" else lambda model: DistributedDataParallel(model, init_sync=False)
        hand = by_hand(load(folder, recipe), out, wrap)
    return {
        "counted": counted, "losses": trainer.losses, "hand": hand, "resumed": resumed.losses, "same": again == after,
        "saved": {name: after[name] for name in bits(model)} == bits(load(out / "whole")),
        "model": type(trainer.model).__name__,
    }  # fmt: skip


NAMES = {"ddp": "LlamaForCausalLM", "fsdp2": "FSDPLlamaForCausalLM"}


QUICK = [("ddp", "nvfp4"), ("fsdp2", "mxfp8")]
SLOW = [("ddp", "mxfp8"), ("ddp", "current"), ("fsdp2", "current"), ("fsdp2", "nvfp4")]


@pytest.mark.parametrize(
    ("kind", "recipe"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SLOW)]
)
def test_two_ranks_train_and_resume_as_loops_by_hand(kind: str, recipe: str, folder: Path, tmp_path: Path) -> None:
    """2 ranks: all quantized weights change; resumed training has the same bits; the whole model is saved, and loaded
    again."""
    for found in run_ranks(2, on_ranks, kind, recipe, folder, tmp_path):
        assert found["counted"] == (LAYERS, LAYERS, LAYERS) and found["model"] == NAMES[kind]
        assert found["losses"] == found["hand"] and found["resumed"] == found["losses"][2:]
        assert found["same"] and found["saved"]


def refusals(folder: Path, out: Path) -> list[str]:
    """DDP of the Trainer as it is; ranks that differ, under DDP and FSDP2; checkpoints of FSDP2 that cannot be
    resumed."""
    said = []
    whole = {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    for kind, other, options in (
        (LossTrainer, False, {}), (QuantizedLossTrainer, True, {}), (QuantizedLossTrainer, True, FSDP2),
        (QuantizedLossTrainer, False, {**whole, "save_strategy": "epoch"}),
    ):  # fmt: skip
        with fresh_state():
            model = load(folder, "mxfp8")
            if other and dist.get_rank():
                model.model.layers[0].mlp.up_proj.weight.quantize_(torch.ones(160, 64))
            given = arguments(out, **options)
            trainer = kind(model, given, train_dataset=data(), optimizer_cls_and_kwargs=qt.adam(given))
            with pytest.raises(Exception) as caught:
                trainer.train()
            said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_what_the_trainer_refuses_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    """2 ranks."""
    for plain, differs, sharded, whole in run_ranks(2, refusals, folder, tmp_path):
        assert "DDP(init_sync=False)" in plain
        for told in (differs, sharded):
            assert told.startswith("RankMismatchError: ") and "up_proj.weight" in told
        assert whole.startswith("ConfigurationError: ") and "'SHARDED_STATE_DICT'" in whole


def best(folder: Path, out: Path) -> tuple[str | None, int, bool]:
    """The folder and the step of the best model under FSDP2, and whether its bits are those at the end."""
    with fresh_state():
        options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        given = arguments(
            out, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
            save_total_limit=1, **options, **FSDP2,
        )  # fmt: skip
        trainer = QuantizedLossTrainer(load(folder, "mxfp8"), given, train_dataset=data(), eval_dataset=data()[:8])
        kept: dict[int, dict[str, str]] = {}

        class Keep(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
                kept[state.global_step] = bits(trainer.model)

        trainer.add_callback(Keep())
        trainer.train()
        found = trainer.state.best_model_checkpoint
        return found and Path(found).name, trainer.state.best_global_step, bits(trainer.model) == kept[STEPS]


def test_the_best_model_under_fsdp2_is_the_same_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    """2 ranks: the last step's, whose files are written after the Trainer has looked for their folder."""
    assert run_ranks(2, best, folder, tmp_path) == [(f"checkpoint-{STEPS}", STEPS, True)] * 2


# 1 process


def test_the_trainer_as_it_is_with_our_optimizer(folder: Path, tmp_path: Path) -> None:
    """And with activation checkpointing, which changes no bit."""
    wanted = by_hand(load(folder, "nvfp4"), tmp_path)
    for options in ({}, {"activation_checkpointing": True}):
        given = arguments(tmp_path, **options)
        model = load(folder, "nvfp4")
        trainer = LossTrainer(model, given, train_dataset=data(), optimizer_cls_and_kwargs=qt.adam(given))
        trainer.train()
        assert trainer.losses == wanted and model.model.layers[0].gradient_checkpointing == bool(options)


def test_a_preset_of_our_optimizer(folder: Path, tmp_path: Path) -> None:
    """As its options spelled out: the same losses and states."""
    found = []
    for options in ({"preset": "lean6"}, PRESETS["lean6"].arguments(), {}):
        given = arguments(tmp_path)
        trainer = QuantizedLossTrainer(
            load(folder, "block"), given, train_dataset=data(), optimizer_cls_and_kwargs=qt.adam(given, **options)
        )
        trainer.train()
        found.append((trainer.losses, bits(trainer.model, trainer.optimizer.optimizer)))
    assert found[0] == found[1] and found[0][1] != found[2][1]
    with pytest.raises(ConfigurationError, match=r"preset='lean6', exp_avg_dtype=torch.float32\): the preset has"):
        given = arguments(tmp_path)
        wrong = qt.adam(given, preset="lean6", exp_avg_dtype=torch.float32)
        LossTrainer(load(folder, "block"), given, train_dataset=data(), optimizer_cls_and_kwargs=wrong).train()


def test_optimizers_that_are_refused(folder: Path, tmp_path: Path) -> None:
    """By name, where ours stands in front; else PyTorch's fused kernel, the default, by us."""
    with pytest.raises(ConfigurationError, match=r"optim='adafactor'\) is not supported; keep the default"):
        QuantizedLossTrainer(
            load(folder, "mxfp8"), arguments(tmp_path, optim="adafactor"), train_dataset=data()
        ).train()
    with pytest.raises(qs.errors.UnsupportedOperationError, match=r"fused=True .* quantshard.optimizers.FusedAdam"):
        LossTrainer(load(folder, "mxfp8"), arguments(tmp_path), train_dataset=data()).train()


# Examples


def test_the_example_of_the_trainer(tmp_path: Path) -> None:
    """It trains, resumes with the same bits, and what it saves is loaded."""
    first = hf_trainer.main(["--out", str(tmp_path)])
    assert [file.name for file in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-10", "checkpoint-5"]
    logged = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert float(logged[-1]) < float(logged[0])
    resumed = hf_trainer.main(["--out", str(tmp_path), "--resume", str(tmp_path / "checkpoint-5")])
    assert bits(resumed.model) == bits(first.model) == bits(load(tmp_path / "trained"))


def fsdp2_example(out: Path) -> tuple[list[float], list[int], bool]:
    model, losses, generated = plain_fsdp2_llama.main(["--out", str(out), "--recipe", "block", "--steps", "4"])
    again = plain_fsdp2_llama.sharded(out / "model", "block", torch.device("cpu"))
    qs.checkpoints.load(out / "checkpoint", again)
    with pytest.raises(
        ConfigurationError, match=r"embed_tokens.weight is sharded; pass state_dict=get_model_state_dict"
    ):
        again.save_pretrained(out / "parts")
    return losses, generated[0].tolist(), bits(again) == bits(model)


def test_the_example_of_a_plain_loop(tmp_path: Path) -> None:
    """2 ranks: losses fall, tokens are generated, the checkpoint is loaded, and the export has the same weights."""
    one, two = run_ranks(2, fsdp2_example, tmp_path)
    assert one[1] == two[1] and len(one[1]) == 16 and one[2] and two[2]
    assert one[0][-1] < one[0][0] and two[0][-1] < two[0][0]
    served = AutoModelForCausalLM.from_pretrained(
        tmp_path / "served", config=qt.training_config(tmp_path / "served", "block")
    )
    tokens = torch.tensor([one[1][:8]])
    wanted = served.generate(tokens, max_new_tokens=8, do_sample=False)
    assert wanted[0].tolist() == one[1]
