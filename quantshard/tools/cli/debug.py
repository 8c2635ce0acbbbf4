"""`quantshard debug`: compares a run's model with float32 on one batch, and ranks GEMM operands by their errors."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from typer import Argument, Option

from quantshard import checkpoints
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion.convert import show_linears
from quantshard.modules.base.module import QuantizedModule
from quantshard.recipe import HighPrecision
from quantshard.tensor import components
from quantshard.tools.observe.table import plain_table
from quantshard.tools.statistics import sensitivity
from quantshard.tools.statistics.sensitivity import GemmError, RecipeSuggestion
from quantshard.tools.statistics.step_sample import trained_values
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import Screen, say_whole
from quantshard.tools.trainer import data
from quantshard.tools.trainer.data import Corpus
from quantshard.tools.trainer.data.corpus import Preparation
from quantshard.tools.trainer.data.packing import IGNORED, split
from quantshard.tools.trainer.models import huggingface, model as models
from quantshard.tools.trainer.models.decoder import LanguageModel, linear_names, recipes_of
from quantshard.tools.trainer.optimizer import make_optimizer
from quantshard.tools.trainer.run_dir import RunDir, run_of_checkpoint
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import LayerRecipes

_SHOWN = 20


def debug(
    source: str = Argument(..., metavar="X", help="a run, or a checkpoint of one"),
    data_: list[str] | None = Option(
        None, "--data", metavar="PATH", help="text to use instead of the run's; repeatable"
    ),
    batch: int = Option(4, min=1, max=1 << 16, metavar="N", help="sequences in the batch"),
    place: str | None = Option(None, "--checkpoints", metavar="PLACE", help="folder or URL of the run's checkpoints"),
    wide: bool = Option(False, "--wide", help="show every operand"),
    json_: bool = Option(False, "--json", help="print everything as JSON"),
) -> None:
    """Compare a run's model with float32 on one batch, layer by layer, in one process.

    Each operand of each GEMM is quantized alone, and ranked by the error that it adds to the result. The last line says
    which layers stand out and should stay in BF16, as `train --recipe` takes it: those with errors above twice the
    median and above the median + 6 MAD.
    """
    for path in data_ or ():
        outputs.existing(path, "text")
    debug_source = find(source, place)
    pair = ModelPair(debug_source, batch_of(debug_source, data_ or (), batch))
    report = pair.compare()
    suggestion = pair.suggestion(report)
    recipe = debug_source.settings.recipe
    if json_:
        result = {"checkpoint": debug_source.checkpoint, "recipe": recipe, **asdict(report)}
        say_whole(json.dumps(result | {"suggestion": asdict(suggestion)}, indent=2))
        return
    screen = Screen(wide=wide)
    screen.lines(
        f"{debug_source.checkpoint}: recipe {recipe!r} beside float32, {batch} sequences of "
        f"{debug_source.settings.seq_length}",
        f"loss {report.loss:.6f}, in float32 {report.exact_loss:.6f}; error of the gradient {report.gradient:.2%}",
        "",
        "operands quantized alone, by the error of their GEMM:",
    )
    rows = report.gemms if wide else report.gemms[:_SHOWN]
    screen.print(_table(rows))
    if len(rows) < len(report.gemms):
        screen.lines(f"and {len(report.gemms) - len(rows)} more: --wide or --json has them")
    screen.lines("Gaussian: the error of independent normal values in the same format")
    if suggestion.kept:
        share = f"{len(suggestion.kept)} of {suggestion.layers} layers have {suggestion.removed:.0%}"
        screen.lines(f"{share} of the squared errors. To keep them in BF16:", "")
        screen.print(f"--recipe '{suggestion.recipes}'", soft_wrap=True)
    else:
        ratio = f"{suggestion.ratio:.2g} times the median of {suggestion.layers} layers"
        screen.lines(f"No layer stands out: the largest error is {ratio}. Keep the recipe.")


def _table(rows: Sequence[GemmError]) -> Table:
    cells = []
    for row in rows:
        decibels = f"{-20 * math.log10(row.error):.1f} dB" if 0 < row.error < math.inf else ""
        cells.append([row.weight, row.gemm, row.operand, f"{row.error:.3%}", f"{row.gaussian:.3%}", decibels])
    return plain_table(("weight", "GEMM", "operand", "error", "Gaussian", "SQNR"), cells, texts=3, edge=False)


@dataclass(frozen=True)
class DebugSource:
    """The checkpoint to examine, with its run's settings, data, and configuration if it is a transformers model."""

    checkpoint: str
    settings: TrainSettings
    configuration: Mapping[str, Any] | None
    corpus: Corpus


def find(source: str, checkpoints: str | None = None) -> DebugSource:
    """Resolve a run to its last complete checkpoint (in `checkpoints`, if given), or a checkpoint to its run."""
    location = Path(outputs.existing(source, "a run, or a checkpoint of one"))
    is_run = "://" not in source and (location / "config.toml").is_file()
    run = RunDir(location) if is_run else run_of_checkpoint(source)
    if run is None or not (is_run or "://" in source or is_complete(source)):
        raise ConfigurationError(f"{source} is no run or complete checkpoint of one; name RUN/checkpoints/step-...")
    settings, _, corpus = run.read_config()
    if not any(layer_recipe.table for layer_recipe in LayerRecipes.parse(settings.recipe).recipes.values()):
        raise ConfigurationError(f"{source} was trained by recipe = {settings.recipe!r}, which quantizes nothing")
    if is_run:
        run.look_in(checkpoints)
        source = str(run.checkpoint(run.last_complete()))
    recorded = data.from_table(corpus)
    # the run's folder may have been moved
    documents = tuple(replace(document, path=Path(run.here(str(document.path)))) for document in recorded.documents)
    return DebugSource(source, settings, run.read_model(settings), replace(recorded, documents=documents))


def batch_of(source: DebugSource, paths: Sequence[str], count: int) -> Tensor:
    """Return the first sequences of a run's first step, from its data or `paths`: int64 [count, seq_length + 1]."""
    settings, corpus = source.settings, source.corpus
    with tempfile.TemporaryDirectory() as folder:
        if paths:
            changed_settings = replace(settings, data=tuple(paths), heldout_data=(), data_weights="")
            corpus = Preparation(changed_settings).collected(Path(folder))[1]
        windows = data.Windows(corpus, settings.seq_length, settings.heldout, settings.packing)
        return windows.batch(settings.seed, 1, 0, count)


@dataclass(frozen=True)
class DebugReport:
    """Losses under the recipe and in float32, relative error of the gradient of all parameters, errors of GEMMs."""

    loss: float
    exact_loss: float
    gradient: float
    gemms: Sequence[GemmError]


class ModelPair:
    """A checkpoint's model under its recipes, and in float32 with the masters (or dequantized weights) as values."""

    def __init__(self, source: DebugSource, batch: Tensor) -> None:
        self.settings = replace(source.settings, dropout=0.0, mesh="")
        self._patterns = LayerRecipes.parse(self.settings.recipe)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.batch = batch.to(device)
        torch.manual_seed(self.settings.seed)
        if source.configuration is None:
            recipes = recipes_of(self.settings)
            self._names = [f"layers.{number}" for number in range(self.settings.layers)]
            if isinstance(recipes, LayerRecipes):
                self._patterns, self._names = recipes, linear_names(self.settings)
            in_float32 = replace(self.settings, params_dtype="float32")
            self.model: nn.Module = LanguageModel(self.settings, recipes, device)
            self.exact: nn.Module = LanguageModel(in_float32, HighPrecision(), device)
        else:
            self.model, self.exact = _of_transformers(source.configuration, self.settings.model, self._patterns, device)
            self._names = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        self._load(source.checkpoint)
        self.recipes = {name: self._patterns.of_layer(self._whole(name)) for name in _quantized_modules(self.model)}

    def _whole(self, name: str) -> str:
        """Return the unit that shares a recipe with a module: itself, or its layer of the built-in decoder."""
        return name if name in self._names else ".".join(name.split(".")[:2])

    @torch.no_grad()
    def _load(self, checkpoint: str) -> None:
        optimizer = make_optimizer(self.model, self.settings)
        checkpoints.load(checkpoint, self.model, optimizer)
        targets = dict(self.exact.named_parameters())
        for name, param in self.model.named_parameters():
            targets[name].copy_(trained_values(optimizer, param))
        for name, module in self.exact.named_modules():
            # e.g. a router's bias, which is a buffer
            if not isinstance(module, QuantizedModule):
                for leaf, buffer in module.named_buffers(recurse=False):
                    buffer.copy_(self.model.get_submodule(name).get_buffer(leaf))

    def _pass(self, model: nn.Module) -> float:
        tokens, targets, documents = split(self.batch)
        trained = (targets != IGNORED).sum()
        count = None if trained == targets.numel() else trained.clamp(min=1)
        loss = models.loss(models.logits(model, tokens, documents), targets, count)
        loss.backward()
        return float(loss.detach())

    def compare(self) -> DebugReport:
        losses: list[float] = []
        gemms = sensitivity.gemm_errors(self.exact, self.recipes, lambda: losses.append(self._pass(self.exact)))
        if not math.isfinite(losses[0]):
            raise ConfigurationError(f"the loss of this batch is {losses[0]} in float32 too; name other --data")
        losses.append(self._pass(self.model))
        params = dict(self.model.named_parameters())
        difference = norm = 0.0
        for name, exact in self.exact.named_parameters():
            grad = params[name].grad
            if grad is not None and exact.grad is not None:
                difference += float(torch.linalg.vector_norm(grad.float() - exact.grad, dtype=torch.float64)) ** 2
                norm += float(torch.linalg.vector_norm(exact.grad, dtype=torch.float64)) ** 2
        return DebugReport(losses[1], losses[0], math.sqrt(difference / norm) if norm else 0.0, gemms)

    def suggestion(self, report: DebugReport) -> RecipeSuggestion:
        errors: dict[str, list[float]] = {self._whole(name): [] for name in self.recipes}
        for row in report.gemms:
            errors[self._whole(row.layer)].append(row.error)
        return sensitivity.suggest(errors, self._patterns.patterns)


def _of_transformers(
    configuration: Mapping[str, Any], where: str, recipes: LayerRecipes, device: torch.device
) -> tuple[nn.Module, nn.Module]:
    """Build a transformers model under its recipes, and in float32, both without values and dropout."""
    model, _ = huggingface.converted(configuration, where, recipes, causal=True)
    plain = LayerRecipes.parse(HighPrecision.name)
    exact, _ = huggingface.converted({**configuration, "dtype": "float32"}, where, plain, causal=True)
    layers = _quantized_modules(model)
    show_linears(exact, layers)
    for whole in (model, exact):
        huggingface.leave_meta(whole, device)
        whole.eval()
        for name in layers:
            whole.get_submodule(name).train()
    return model, exact


def _quantized_modules(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if any(components.quantized_local(param) is not None for param in module.parameters(recurse=False))
    ]
