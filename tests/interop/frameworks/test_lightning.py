"""Fabric and the Trainer of Lightning train converted models under FSDP2; 2 ranks, and 1 that loads what 2 saved.

Their losses are bitwise those of a plain FSDP2 loop. Ranks of the pool are no processes that Lightning would start:
TorchElasticEnvironment takes them from the environment, as under torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    import lightning
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy
    from lightning.pytorch.strategies import DDPStrategy

    from quantshard.integrations.lightning import FabricStrategy, TrainerStrategy, convert_and_shard

import quantshard as qs
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.optimizers import FusedAdam
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.interop.frameworks import perceptron
from tests.interop.frameworks.alone import run_alone
from tests.interop.frameworks.perceptron import MORE, QUANTIZED, STEPS, Perceptron, batches, loss_of
from tests.pages import snippets

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import lightning_fsdp2

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Run:
    """How a model is trained."""

    recipe: str = "mxfp8"
    precision: str = "32-true"
    clip: float | None = None
    accumulate: int = 1


FABRIC = {
    "mxfp8": Run(),
    "current": Run("current", clip=0.5),
    "nvfp4": Run("nvfp4", accumulate=2),
    "bf16-true": Run(precision="bf16-true"),
    "bf16-mixed": Run(precision="bf16-mixed", clip=0.5, accumulate=2),
}
TRAINER = {
    "mxfp8": Run(),
    "current": Run("current", "bf16-mixed"),
    "nvfp4": Run("nvfp4", clip=0.5, accumulate=2),
    "bf16-true": Run(precision="bf16-true"),
}


def optimizer_of(model: nn.Module) -> FusedAdam:
    return FusedAdam(model.named_parameters(), lr=1e-2)


# The loop by hand ----------------------------------------------------------------------------------------------------


def forward_context(run: Run) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if run.precision == "bf16-mixed" else nullcontext()


def by_hand(run: Run, in_fabric: bool) -> list[float]:
    """The losses of all steps. Fabric casts inputs before `torch.autocast` and models before they are sharded."""
    model = Perceptron()
    is_true = run.precision == "bf16-true"
    if is_true and in_fabric:
        model.bfloat16()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    convert_and_shard(model, mesh, run.recipe)
    if is_true and not in_fabric:
        model.bfloat16()
    optimizer, losses = optimizer_of(model), []
    for number, (x, y) in enumerate(batches(0, (STEPS + MORE) * run.accumulate)):
        is_last = (number + 1) % run.accumulate == 0
        model.set_requires_gradient_sync(is_last or not in_fabric)
        with forward_context(run):
            out = model(x.bfloat16() if is_true or (in_fabric and run.precision == "bf16-mixed") else x)
            loss = loss_of(out, y) / run.accumulate
        loss.backward()
        losses.append(loss.item())
        if is_last:
            if run.clip:
                clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


# Fabric --------------------------------------------------------------------------------------------------------------


def fabric_of(run: Run, parallelize: Callable[..., nn.Module] | None = None, **options: Any) -> Fabric:
    parallelize = parallelize or functools.partial(convert_and_shard, recipe=run.recipe)
    strategy = FabricStrategy(parallelize, dist.get_world_size(), 1, **options)
    plugins, count = [TorchElasticEnvironment()], dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=count, strategy=strategy, precision=run.precision, plugins=plugins)
    fabric.launch()
    return fabric


def fabric_model(fabric: Fabric, seed: int = 0) -> tuple[Any, Any]:
    model = fabric.setup(Perceptron(seed))
    return model, fabric.setup_optimizers(optimizer_of(model))


def fabric_steps(fabric: Fabric, model: Any, optimizer: Any, run: Run, first: int, last: int) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(batches(first * run.accumulate, last * run.accumulate)):
        is_last = (number + 1) % run.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = loss_of(model(x), y) / run.accumulate
            fabric.backward(loss)
        losses.append(loss.item())
        if is_last:
            if run.clip:
                fabric.clip_gradients(model, optimizer, max_norm=run.clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def in_fabric(run: Run, folder: Path) -> dict[str, Any]:
    """What the tests compare."""
    fabric = fabric_of(run)
    model, optimizer = fabric_model(fabric)
    before = perceptron.quantized_bits(model.module)
    losses = fabric_steps(fabric, model, optimizer, run, 0, STEPS)
    found = {
        "weights": len(before),
        "changed": perceptron.changed(before, model.module),
        "held": perceptron.in_optimizer(model.module, optimizer.optimizer),
    }
    fabric.save(folder, {"model": model, "optimizer": optimizer, "step": STEPS})
    saved = bits(model.module, optimizer.optimizer)
    model, optimizer = fabric_model(fabric, seed=9)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder, state)
    found["loaded"] = state["step"] == STEPS and bits(model.module, optimizer.optimizer) == saved
    losses += fabric_steps(fabric, model, optimizer, run, STEPS, STEPS + MORE)
    return found | {"losses": losses, "by hand": by_hand(run, in_fabric=True), "saved": saved}


def all_in_fabric(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    logging.disable(logging.WARNING)
    return {name: in_fabric(FABRIC[name], folder / name) for name in names}


def loaded_by_one(folder: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Bits on one process of what more have saved."""
    found = {}
    for name in names:
        fabric = fabric_of(FABRIC[name])
        model, optimizer = fabric_model(fabric, seed=9)
        fabric.load(folder / name, {"model": model, "optimizer": optimizer})
        found[name] = bits(model.module, optimizer.optimizer)
    return found


def check(found: dict[str, Any], what: str) -> None:
    assert (found["weights"], found["changed"], found["held"]) == (QUANTIZED, QUANTIZED, QUANTIZED), what
    assert found["loaded"], what
    assert found["losses"] == found["by hand"], what
    assert found["losses"][-1] < found["losses"][1], what


@pytest.mark.parametrize(
    "names", [("nvfp4",), pytest.param(("mxfp8", "current", "bf16-true", "bf16-mixed"), marks=pytest.mark.exhaustive)]
)
def test_fabric(names: Sequence[str], tmp_path: Path) -> None:
    """2 ranks, then 1."""
    ranks = run_ranks(2, all_in_fabric, tmp_path, names)
    for rank in ranks:
        for name, found in rank.items():
            check(found, name)
    one = run_alone(loaded_by_one, tmp_path, names)
    assert one == {name: found["saved"] for name, found in ranks[0].items()}


# The Trainer ---------------------------------------------------------------------------------------------------------


class Classifier(lightning.LightningModule):
    """A LightningModule as users write it: its network is converted and sharded in `configure_model`."""

    def __init__(self, recipe: str, seed: int = 0, first: int = 0) -> None:
        super().__init__()
        self.model, self.recipe, self.first = Perceptron(seed), recipe, first
        self.losses: list[float] = []
        self.before: dict[str, str] = {}

    def configure_model(self) -> None:
        convert_and_shard(self.model, self.device_mesh, self.recipe)

    def configure_optimizers(self) -> FusedAdam:
        self.before = perceptron.quantized_bits(self.model)
        return optimizer_of(self)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = loss_of(self.model(x), y)
        self.losses.append(loss.item() / self.trainer.accumulate_grad_batches)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("validated", loss_of(self.model(x), y))

    def val_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(batches(0, 2), batch_size=None)

    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(batches(self.first, self.first + 100), batch_size=None)


def trainer_of(run: Run, steps: int, folder: Path, strategy: Any = None) -> lightning.Trainer:
    count = dist.get_world_size()
    return lightning.Trainer(
        accelerator="cpu", devices=count, strategy=strategy or TrainerStrategy(count, 1), precision=run.precision,
        plugins=[TorchElasticEnvironment()], max_steps=steps, gradient_clip_val=run.clip, default_root_dir=folder,
        accumulate_grad_batches=run.accumulate, use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, check_val_every_n_epoch=None, val_check_interval=1000,
    )  # fmt: skip


def in_trainer(run: Run, folder: Path) -> dict[str, Any]:
    model, trainer = Classifier(run.recipe), trainer_of(run, STEPS, folder)
    trainer.fit(model)
    found = {
        "weights": len(model.before),
        "changed": perceptron.changed(model.before, model.model),
        "held": perceptron.in_optimizer(model, trainer.optimizers[0]),
    }
    trainer.save_checkpoint(folder / "saved")
    saved = bits(model, trainer.optimizers[0])
    again, trainer = Classifier(run.recipe, seed=9), trainer_of(run, STEPS, folder)
    trainer.fit(again, ckpt_path=folder / "saved", weights_only=True)
    found["loaded"] = bits(again, trainer.optimizers[0]) == saved and again.losses == []
    further = Classifier(run.recipe, seed=9, first=STEPS * run.accumulate)
    trainer = trainer_of(run, STEPS + MORE, folder)
    trainer.fit(further, ckpt_path=folder / "saved", weights_only=True)
    losses = {"losses": model.losses + further.losses, "by hand": by_hand(run, in_fabric=False)}
    return found | losses | {"saved": {name: value for name, value in saved.items() if name.startswith("model.")}}


def evaluated_by_one(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Bits that one rank loads from checkpoints of several, by the Trainer and without it, as the docs say."""
    logging.disable(logging.WARNING)
    found = {}
    for name in names:
        run, model = TRAINER[name], Classifier(TRAINER[name].recipe, seed=9)
        (values,) = trainer_of(run, 0, folder).validate(
            model, ckpt_path=folder / name / "saved", weights_only=True, verbose=False
        )
        other = Classifier(run.recipe, seed=9)
        qs.convert(other.model, run.recipe)
        if run.precision == "bf16-true":
            other.bfloat16()
        state = {"state_dict": other.state_dict()}
        dcp.load(state, checkpoint_id=folder / name / "saved")
        other.load_state_dict(state["state_dict"])
        found[name] = [values["validated"] > 0, bits(model), bits(other)]
    return found


def all_in_trainer(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    logging.disable(logging.WARNING)
    return {name: in_trainer(TRAINER[name], folder / name) for name in names}


@pytest.mark.parametrize(
    "names", [("current",), pytest.param(("mxfp8", "nvfp4", "bf16-true"), marks=pytest.mark.exhaustive)]
)
def test_trainer(names: Sequence[str], tmp_path: Path) -> None:
    """2 ranks, then 1 that evaluates."""
    ranks = run_ranks(2, all_in_trainer, tmp_path, names)
    for rank in ranks:
        for name, found in rank.items():
            check(found, name)
    (evaluated,) = run_ranks(1, evaluated_by_one, tmp_path, names)
    for name, (is_evaluated, *loaded) in evaluated.items():
        assert is_evaluated and loaded == [ranks[0][name]["saved"]] * 2, name


class ReplicatedClassifier(Classifier):
    """Converted on every rank, with the bits of rank 0, as DistributedDataParallel needs it."""

    def configure_model(self) -> None:
        if not perceptron.quantized(self.model):
            qs.convert(self.model, self.recipe)
            qs.broadcast_(self.model)


def under_ddp(folder: Path) -> dict[str, Any]:
    """Of ranks that were born apart: bits and losses of a run that goes on, and of one that was resumed."""
    logging.disable(logging.WARNING)

    def fit(seed: int, first: int, last: int, **options: Any) -> tuple[ReplicatedClassifier, lightning.Trainer]:
        model = ReplicatedClassifier("mxfp8", seed=seed + dist.get_rank(), first=first)
        trainer = trainer_of(Run(clip=0.5), last, folder, DDPStrategy(init_sync=False))
        trainer.fit(model, **options)
        return model, trainer

    begun, trainer = fit(0, 0, STEPS)
    trainer.save_checkpoint(folder / "ddp.ckpt")
    resumed, trainer = fit(5, STEPS, STEPS + MORE, ckpt_path=folder / "ddp.ckpt", weights_only=True)
    whole, whole_trainer = fit(0, 0, STEPS + MORE)
    return {
        "changed": perceptron.changed(begun.before, resumed.model),
        "losses": [begun.losses + resumed.losses, whole.losses],
        "bits": [bits(resumed, trainer.optimizers[0]), bits(whole, whole_trainer.optimizers[0])],
    }


def test_trainer_under_ddp(tmp_path: Path) -> None:
    """2 ranks."""
    one, two = run_ranks(2, under_ddp, tmp_path)
    assert one["bits"] == two["bits"] and one["losses"] != two["losses"]
    for found in (one, two):
        assert found["changed"] == QUANTIZED
        assert found["bits"][0] == found["bits"][1] and found["losses"][0] == found["losses"][1]


# Wrong use -----------------------------------------------------------------------------------------------------------


def said(call: Callable[[], Any], error: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def converted(model: nn.Module, mesh: object = None) -> nn.Module:
    """And not sharded."""
    qs.convert(model, "mxfp8")
    return model


class WholeClassifier(Classifier):
    """Converted, and not sharded."""

    def configure_model(self) -> None:
        if not perceptron.quantized(self.model):
            converted(self.model)


def refused(folder: Path) -> dict[str, str]:
    """What is said."""
    logging.disable(logging.WARNING)
    found, count = {}, dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("data_parallel", "tensor_parallel"))
    found["tensor parallelism"] = said(lambda: convert_and_shard(Perceptron(), mesh, "mxfp8"))
    found["LightningModule"] = said(lambda: convert_and_shard(Classifier("mxfp8"), mesh, "mxfp8"))
    mesh = init_device_mesh("cpu", (count, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    found["no layer"] = said(lambda: convert_and_shard(nn.Sequential(nn.LayerNorm(4)), mesh, "mxfp8"))
    fabric = fabric_of(Run(), save_distributed_checkpoint=False)
    model = Perceptron()
    found["together"] = said(lambda: fabric.setup(model, optimizer_of(model)))
    model, optimizer = fabric_model(fabric)
    fabric.save(folder / "file", {"model": model})
    state = {"model": model, "optimizer": optimizer}
    found["a file"] = said(lambda: fabric.load(folder / "file", state), CheckpointError)
    found["a raw file"] = said(lambda: fabric.load_raw(folder / "file", model), CheckpointError)
    trainer = trainer_of(Run(), STEPS, folder)
    fit = functools.partial(trainer.fit, Classifier("mxfp8"), ckpt_path=folder / "file", weights_only=True)
    found["a file of the Trainer"] = said(fit, CheckpointError)
    found["whole in the Trainer"] = said(lambda: trainer_of(Run(), STEPS, folder).fit(WholeClassifier("mxfp8")))
    found["whole in Fabric"] = said(lambda: fabric_model(fabric_of(Run(), parallelize=converted)))
    return found


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    """2 ranks."""
    for found in run_ranks(2, refused, tmp_path):
        assert found["tensor parallelism"].endswith("only tensor_parallel_size=1 is supported; use data_parallel_size")
        assert "Classifier is a LightningModule" in found["LightningModule"]
        assert "it has no torch.nn.Linear" in found["no layer"]
        assert "FusedAdam has no parameter of a model from fabric.setup" in found["together"]
        for kind in ("a file", "a raw file", "a file of the Trainer"):
            assert "is a single file; save with" in found[kind]
        for kind, name in {"whole in the Trainer": "model.layers.0.0", "whole in Fabric": "layers.0.0"}.items():
            assert f"does not reduce gradients of unsharded weights ({name}.weight) over 2 ranks" in found[kind]
        assert not any("\n" in each for each in found.values())


def whole_in_one(folder: Path) -> tuple[int, int]:
    """How many steps each makes of what two ranks would train apart."""
    model = WholeClassifier("mxfp8")
    trainer_of(Run(), 2, folder).fit(model)
    _, optimizer = fabric_model(fabric_of(Run(), parallelize=converted))
    return len(model.losses), len(optimizer.optimizer.param_groups)


def test_a_model_that_one_process_holds_whole_is_trained(tmp_path: Path) -> None:
    """1 rank."""
    assert run_ranks(1, whole_in_one, tmp_path) == [(2, 1)]


# Other ways in and out -----------------------------------------------------------------------------------------------


def from_meta_and_out(folder: Path) -> dict[str, bool]:
    """A model that is empty until it is sharded; its file, loaded as the refusal says; its values, without codes."""
    logging.disable(logging.WARNING)
    fabric = fabric_of(Run("nvfp4"), save_distributed_checkpoint=False)
    with fabric.init_module(empty_init=True):
        model = Perceptron()
    assert all(param.is_meta for param in model.parameters())
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(optimizer_of(model))
    losses = fabric_steps(fabric, model, optimizer, Run("nvfp4"), 0, STEPS)
    fabric.save(folder / "file", {"model": model})
    saved, other = bits(model.module), fabric.setup(Perceptron(seed=9))
    state = torch.load(folder / "file", weights_only=True)["model"] if dist.get_rank() == 0 else None
    qs.checkpoints.load_from_rank0(other.module, state)
    values = qs.checkpoints.high_precision_state_dict(model.module, optimizer.optimizer, full=True)
    plain = Perceptron()
    plain.load_state_dict(values)
    master = optimizer.optimizer.state[model.module.layers[0][0].weight]["master_param"].full_tensor()
    return {
        "trained": losses[-1] < losses[1],
        "loaded": bits(other.module) == saved,
        "exported": torch.equal(plain.layers[0][0].weight, master),
    }


@pytest.mark.exhaustive
def test_meta_and_files(tmp_path: Path) -> None:
    """2 ranks."""
    for found in run_ranks(2, from_meta_and_out, tmp_path):
        assert all(found.values()), found


# The example ---------------------------------------------------------------------------------------------------------


def example(folder: Path) -> tuple[list[float], list[float], int]:
    """Losses up to a checkpoint, those behind it, and how many weights are quantized."""
    logging.disable(logging.WARNING)
    with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="pool"):  # as torchrun sets it
        first = lightning_fsdp2.train("mxfp8", dist.get_world_size(), 10, folder)
        second = lightning_fsdp2.train("mxfp8", dist.get_world_size(), 12, folder, resume=folder / "step-10")
    return first.losses, second.losses, len(perceptron.quantized_bits(second))


@pytest.mark.exhaustive
def test_the_example(tmp_path: Path) -> None:
    """2 ranks."""
    for first, second, quantized in run_ranks(2, example, tmp_path):
        assert len(first) == 10 and len(second) == 2 and quantized == 2 * lightning_fsdp2.LAYERS
        assert sum(second) / 2 < sum(first[:2]) / 2


# docs/frameworks.md#lightning-and-torchtitan --------------------------------------------------------------------------


def snippet(folder: Path) -> tuple[int, int, list[str]]:
    """The page's loop of Fabric's: quantized weights, those in the optimizer, and what it saved."""
    logging.disable(logging.WARNING)
    network = Perceptron()
    names: dict[str, Any] = {"network": network, "batches": batches(0, 2)}
    with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="pool"), contextlib.chdir(folder):
        exec(snippets("docs/frameworks.md#lightning-and-torchtitan")[0], names)
        saved = sorted(path.name for path in Path("step-100").iterdir())
    return len(perceptron.quantized(network)), perceptron.in_optimizer(network, names["optimizer"].optimizer), saved


@pytest.mark.exhaustive
def test_the_snippet(tmp_path: Path) -> None:
    """2 ranks."""
    for quantized, held, saved in run_ranks(2, snippet, tmp_path):
        assert quantized == held == QUANTIZED and ".metadata" in saved


def with_lightnings_own_strategy() -> tuple[int, list[str]]:
    """What an optimizer changes that was made too early, and what is said."""
    logging.disable(logging.WARNING)
    own = ModelParallelStrategy(functools.partial(convert_and_shard, recipe="mxfp8"), dist.get_world_size(), 1)
    plugins, count = [TorchElasticEnvironment()], dist.get_world_size()
    fabric = Fabric(accelerator="cpu", strategy=own, devices=count, plugins=plugins)
    fabric.launch()
    model = Perceptron()
    wrapped, optimizer = fabric.setup(model, optimizer_of(model))
    before = perceptron.quantized_bits(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric_steps(fabric, wrapped, optimizer, Run(), 0, 2)
    return perceptron.changed(before, model), [str(each.message) for each in caught]


@pytest.mark.exhaustive
def test_an_optimizer_made_too_early_under_lightnings_own_strategy() -> None:
    """2 ranks: it changes nothing, and says so."""
    for changed, warned in run_ranks(2, with_lightnings_own_strategy):
        assert changed == 0 and any("none of this optimizer's 12 parameters" in each for each in warned)
