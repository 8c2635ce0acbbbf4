"""A run's model twice in one process: as its recipe has it, and in float32, with one batch of its data."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantshard import checkpoints, recipe
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.errors import ConfigurationError
from quantshard.layouts.source import CheckpointModel
from quantshard.numerics.states import MASTER
from quantshard.recipe import HighPrecision, Recipe
from quantshard.statistics.sensitivity import (
    GemmError,
    LayerError,
    gemm_errors,
    gradient_error,
    gradients,
    layer_errors,
)
from quantshard.tensor import components
from quantshard.terminal import inputs
from quantshard.trainer import data
from quantshard.trainer.data import Corpus
from quantshard.trainer.data.preparation import Preparation
from quantshard.trainer.models import model as models
from quantshard.trainer.models.model import LanguageModel
from quantshard.trainer.optimizer import make_optimizer
from quantshard.trainer.run_dir import RunDir, run_of_checkpoint
from quantshard.trainer.settings.config import TrainSettings
from quantshard.trainer.settings.recipes import LayerRecipes


@dataclass(frozen=True)
class DebugSource:
    """The checkpoint that is looked at, and the settings of its run, the name of its one recipe, and its data."""

    checkpoint: str
    settings: TrainSettings
    recipe: str
    corpus: Corpus


def find(source: str, checkpoints: str | None = None) -> DebugSource:
    """The last complete checkpoint of a run, or a checkpoint of one.

    Args:
        checkpoints: where those of the run are, if the user says it.

    Raises:
        ConfigurationError: it is neither, or the recipe quantizes nothing.
        CheckpointError: the place of checkpoints cannot be looked at.
    """
    place = Path(inputs.existing(source, "a run, or a checkpoint of one"))
    is_run = "://" not in source and (place / "config.toml").is_file()
    if is_run:
        run = RunDir(place)
    elif checkpoints is not None:
        raise ConfigurationError(f"--checkpoints {checkpoints}: {source} is no run, of which it could be the place")
    elif "://" in source or (place.is_dir() and is_complete(source)):
        found = run_of_checkpoint(source)
        if found is None:
            raise ConfigurationError(
                f"{source} is not in a run's folder, so its model and data are not known; name RUN/checkpoints/step-..."
            )
        run = found
    else:
        raise ConfigurationError(f"{source} is no run (which has a config.toml), and no complete checkpoint of one")
    settings, _, corpus = run.read_config()
    single = LayerRecipes.parse(settings.recipe).single
    if not settings.is_by_sizes or settings.experts or single is None:
        what = "experts" if settings.experts else f"recipe = {settings.recipe!r}" if single is None else settings.model
        raise ConfigurationError(
            f"{source} is a run of {what}; debug looks at models built by sizes, without experts, by one recipe"
        )
    if not single.table:
        raise ConfigurationError(f"{source} was trained by recipe = {settings.recipe!r}, which quantizes nothing")
    if is_run:
        run.look_in(checkpoints)
        source = str(run.checkpoint(run.last_complete()[0]))
    return DebugSource(source, settings, single.name, _corpus_here(run, corpus))


def _corpus_here(run: RunDir, recorded: Mapping[str, Any]) -> Corpus:
    """The data as they were recorded, where they are now if the run's folder was moved."""
    corpus = data.from_table(recorded)
    return replace(
        corpus, documents=tuple(replace(each, path=Path(run.here(str(each.path)))) for each in corpus.documents)
    )


@dataclass(frozen=True)
class DebugReport:
    """What quantizing costs a model in one batch.

    `loss`, `exact_loss`: by the recipe and in float32; `gradient`: relative error of the gradient of all parameters.
    `layers`: empty unless they were asked for.
    """

    loss: float
    exact_loss: float
    gradient: float
    gemms: Sequence[GemmError]
    layers: Sequence[LayerError] = ()


class ModelPair:
    """The model of a checkpoint by its recipe, and the same in float32: with its masters, or else what codes stand for.

    Raises:
        CheckpointError: the weights do not fit.
    """

    def __init__(self, found: DebugSource, batch: Tensor) -> None:
        self.settings = replace(found.settings, recipe=found.recipe, dropout=0.0, mesh="", dp_replicate=1)
        self.recipe: Recipe = recipe.resolve(found.recipe)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.batch = batch.to(device)
        torch.manual_seed(self.settings.seed)
        self.model = LanguageModel(self.settings, self.recipe, device)
        self.exact = LanguageModel(replace(self.settings, params_dtype="float32"), HighPrecision(), device)
        self._load(found.checkpoint)
        self.layers = [
            name
            for name, module in self.model.named_modules()
            if any(components.quantized_local(param) is not None for param in module.parameters(recurse=False))
        ]

    @torch.no_grad()
    def _load(self, checkpoint: str) -> None:
        optimizer = make_optimizer(self.model, self.settings) if CheckpointModel(checkpoint).states() else None
        checkpoints.load(checkpoint, self.model, optimizer)
        targets = dict(self.exact.named_parameters())
        for name, param in self.model.named_parameters():
            quantized = components.quantized_local(param)
            if optimizer is not None and MASTER in optimizer.state.get(param, {}):
                values = optimizer.get_unscaled_state(param, MASTER)
            else:
                values = param.detach() if quantized is None else quantized.quantized_storage.dequantize()
            targets[name].copy_(values)

    def _pass(self, model: LanguageModel) -> Tensor:
        loss = models.loss(model(self.batch[:, :-1]), self.batch[:, 1:])
        loss.backward()
        return loss

    def compare(self, end_to_end: bool) -> DebugReport:
        """Make the passes. `end_to_end`: one more for each layer, which then is quantized alone.

        Raises:
            ConfigurationError: the loss is not finite in float32.
        """
        passes: list[tuple[float, dict[str, Tensor]]] = []
        gemms = gemm_errors(
            self.exact, self.layers, self.recipe,
            lambda: passes.append(gradients(self.exact, lambda: self._pass(self.exact))),
        )  # fmt: skip
        ((exact_loss, exact),) = passes
        if not math.isfinite(exact_loss):
            raise ConfigurationError(
                f"the loss of this batch is {exact_loss} in float32 too, so its errors say nothing; name an older "
                "checkpoint, or other text with --data"
            )
        loss, found = gradients(self.model, lambda: self._pass(self.model))
        layers: list[LayerError] = []
        if end_to_end:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that histories of a recipe with some are made late
                layers = layer_errors(self.exact, self.layers, self.recipe, lambda: self._pass(self.exact))
        return DebugReport(loss, exact_loss, gradient_error(found, exact), gemms, layers)


def batch_of(found: DebugSource, paths: Sequence[str], count: int) -> Tensor:
    """The first sequences of a run's first step, from its data or from others: int64 [count, seq_length + 1].

    Raises:
        ConfigurationError: data are missing, or too short.
    """
    settings = found.settings
    if not paths:
        windows = data.Windows(found.corpus, settings.seq_length, settings.heldout)
        return windows.batch(settings.seed, 1, 0, count)
    others = replace(settings, data=tuple(paths), heldout_data=(), data_weights="")
    with tempfile.TemporaryDirectory() as folder:
        _, corpus = Preparation(others).collected(Path(folder))
        return data.Windows(corpus, settings.seq_length, settings.heldout).batch(settings.seed, 1, 0, count)
