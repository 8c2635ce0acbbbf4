"""The training loop that every rank of a run executes.

A step is a pure function of the state and the step number, counted from 1. The batch, the learning rate and the seed of
dropout follow from (settings, step); everything else is in the checkpoint. Killing a run and resuming it on as many
ranks therefore reproduces the losses of an uninterrupted run bit for bit.
"""

import math
import re
import resource
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard import checkpoints, private_torch
from quantshard.checkpoints.conversions import RequantizedWarning
from quantshard.errors import CheckpointError
from quantshard.modules import StepGraph
from quantshard.optimizers import averaged_weights
from quantshard.optimizers.averaging import reshard
from quantshard.optimizers.base import GRAD_NORM
from quantshard.tools.trainer.data import BatchLoader, Corpus, Windows, load_tokenizer
from quantshard.tools.trainer.data.packing import IGNORED, most_documents, split
from quantshard.tools.trainer.measurements import RunStatistics, flops_of_token, peak_of, traced_steps
from quantshard.tools.trainer.models import initialization, model as models
from quantshard.tools.trainer.optimizer import learning_rate, make_optimizer
from quantshard.tools.trainer.progress import Progress
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import BIAS, TP
from quantshard.tools.trainer.trackers import Tracker


@dataclass(frozen=True)
class ProcessInfo:
    """This process's rank, the number of ranks, and its device."""

    rank: int
    ranks: int
    device: torch.device


class StopFlag:
    """A flag that a signal sets in any process; all ranks read it together with the loss of the step."""

    raised = False

    def set(self) -> None:
        self.raised = True


class Trainer:
    """One rank's part of a run. `init_from`: initial weights; "": random ones; None: a checkpoint will be loaded."""

    def __init__(
        self,
        settings: TrainSettings,
        corpus: Corpus,
        run: RunDir,
        place: ProcessInfo,
        stop: StopFlag,
        init_from: str | None = "",
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        run.follow(settings)
        self.settings, self.run, self.place, self.stop = settings, run, place, stop
        self.corpus = corpus
        self.windows = Windows(corpus, settings.seq_length, settings.heldout, settings.packing, settings.global_batch)
        self.axes = settings.axes(place.ranks)
        mesh = self.axes.device_mesh(place.device.type)
        # the ranks of a tensor-parallel group compute the same tokens, those of cp others of the same sequences
        self.shares = self.axes.data_parallel
        self.columns, (self.column, self.tp_rank) = self.shares * self.axes.cp, divmod(place.rank, self.axes.tp)
        self.share, self.cp_rank = divmod(self.column, self.axes.cp)
        cp_mesh = self.axes.sequence_mesh(place.device.type)
        self._shared = partial(private_torch.shared_sequences, cp_mesh, settings.rotate_method)
        self.model = models.build(models.ModelSpec(settings, configuration), mesh, random=init_from == "")
        identity = {name: getattr(settings, name) for name in ("seed", "packing", "seq_length", "global_batch")}
        identity["corpus"] = corpus.sha256
        self.loader = BatchLoader(self._batch, place.device, settings.steps, identity)
        self.begun = initialization.load(init_from, self.model) if init_from else ""
        if init_from == "" and configuration is not None:
            self.begun = f"began with random weights of the model of {settings.model}"
        self.optimizer = make_optimizer(self.model, settings)
        # a constant for CUDA graphs and compiled layers
        sources = self.windows.sources if settings.cuda_graphs or settings.compile else []
        self._documents = max((source.most_documents() for source in sources), default=0)
        self._graph = StepGraph(self._forward_backward_step, self.model, self.optimizer, enabled=settings.cuda_graphs)
        self._flops = flops_of_token(self.model, settings)
        self._peak = peak_of(place.device)
        self.progress = Progress(settings, shown=place.rank == 0)
        self.trackers: list[Tracker] = []

    @cached_property
    def manager(self) -> checkpoints.Manager:
        """The run's checkpoint manager, created on first use. Collective."""
        return checkpoints.Manager(
            self.run.checkpoints,
            keep_last=self.settings.keep_last or None,
            keep_every=self.settings.keep_every,
            async_="thread" if self.settings.async_save else None,
        )

    def restore(
        self, step: int | None = None, *, requantize: bool = False, lossy: bool = False
    ) -> checkpoints.Restored:
        """Load the last good checkpoint, or that of `step`. The caller reports requantized weights."""
        with self.progress.moving("loading"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RequantizedWarning)
            restored = self.manager.restore(self.model, self.optimizer, step, requantize=requantize, lossy=lossy)
        if restored is None:
            raise CheckpointError(f"{self.run.path} has no complete checkpoint to go on from")
        if restored.extra.get("step") != restored.step:
            raise CheckpointError(f"{restored.path} is of step {restored.extra.get('step')!r:.100}; restore its name")
        self.loader.load_state_dict(restored.extra)
        return restored

    def train(self, done: int) -> None:
        """Train from the step after `done` to the last step, saving and evaluating as the settings say."""
        settings, last_saved, note = self.settings, done, self.progress.note
        statistics = RunStatistics(settings, self.model, self.optimizer, self.record_statistics, note, done)
        if done < settings.steps:
            self.sample(done)
        tracing = traced_steps(self.run, self.place.rank, self.place.device, settings.profile)
        with statistics, closing(self.loader), self._graph, tracing as trace_step:
            for step in range(done + 1, settings.steps + 1):
                start = time.perf_counter()
                loss, norm, stop = self.step(step, statistics)
                statistics.stepped(loss, partial(lambda n: self._passes(self._seeded_batch(n)), step))
                seconds = time.perf_counter() - start
                trace_step()
                last = stop or step == settings.steps
                heldout = self.evaluate_all() if _due(step, settings.eval_every) or step == settings.steps else {}
                self.record(step, loss, norm, seconds, heldout | statistics.experts.figures)
                if last or _due(step, settings.save_every):
                    statistics.settle()
                    self.save(step)
                    last_saved = step
                if stop:
                    break
        self.manager.wait()
        if last_saved < settings.steps:
            note(f"stopped at step {last_saved}, resume with: quantshard resume {self.run.path}")
            return
        if done < settings.steps:
            self.sample(last_saved)
        note(f"done: {last_saved} of {settings.steps} steps, saved in {self.run.checkpoint(last_saved)}")

    def step(self, step: int, statistics: RunStatistics | None = None) -> tuple[float, float, bool]:
        """Train one step; return its loss (mean over the global batch), the gradient norm, and whether to stop."""
        rate = learning_rate(self.settings, step)
        for group in self.optimizer.param_groups:
            # in place if it is the tensor that a CUDA graph reads
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        stop = torch.full((), float(self.stop.raised), dtype=torch.float64, device=self.place.device)
        batch = self._seeded_batch(step)
        sampled = statistics is not None and statistics.is_sampling
        context = statistics.whole_step if statistics is not None and sampled else nullcontext
        # per-expert statistics read the number of rows of each expert on the host, which a graph cannot do
        if sampled and self.settings.experts:
            with context():
                sums = self._forward_backward_step(batch, stop)
        else:
            sums = self._graph.within(context, batch, stop)
        if statistics is not None:
            # statistics of the previous step, while the device works on this one
            statistics.settle()
        # the only point where a step waits for the device, after all of its work is launched
        loss, squares, stops, *counts = sums.tolist()
        if statistics is not None and counts:
            statistics.add_counts(counts)
        return loss / self.columns, math.sqrt(squares / self.axes.dp_replicate), stops > 0

    def _forward_backward_step(self, batch: Tensor, stop: Tensor) -> Tensor:
        """Run a step's device work; return float64 sums of losses, squared gradients, `stop`, and expert counts."""
        (loss, counts), releases = self._passes(batch), self.settings.release_gradients
        squares = torch.zeros_like(loss) if releases else self._squares()
        sums = self._sum(loss * (self.tp_rank == 0), squares, stop)
        if self.settings.clip and not releases:
            norm = (sums[1] / self.axes.dp_replicate).sqrt().float()
            # expert-parallel weights are on another mesh than the rest
            by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
            for param in self.model.parameters():
                by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
            for params in by_mesh.values():
                torch.nn.utils.clip_grads_with_norm_(params, self.settings.clip, norm)
        self.optimizer.step()
        if releases:
            sums[1] = self.optimizer.param_groups[0][GRAD_NORM].double().square() * self.axes.dp_replicate
        self.optimizer.zero_grad(set_to_none=True)
        if counts is None:
            return sums
        dist.all_reduce(counts)
        if BIAS in self.settings.router_balance:
            models.move_biases(self.model, counts[:, :-1], self.settings.router_bias_rate)
        return torch.cat([sums, counts.flatten()])

    def _passes(self, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of a batch; return the mean loss of this rank's sequences, float64, and the counts
        of `models.expert_counts`. If targets are masked, the loss is the sum divided by the mean number of trained
        tokens per rank."""
        settings, count, counts = self.settings, None, None
        total = torch.zeros((), dtype=torch.float64, device=batch.device)
        parts = batch.chunk(settings.parts(self.axes))
        if self.windows.is_masked:
            # per micro-batch, so that each token of the global batch has the same weight
            trained = self._sum(_num_trained(batch[:, 1]) * (self.tp_rank == self.cp_rank == 0))[0]
            count = (trained.clamp(min=1) / (self.columns * len(parts))).float()
        for number, part in enumerate(parts):
            models.reduce_gradients(self.model, now=number == len(parts) - 1)
            tokens, targets, documents = split(part, self._documents or self.loader.documents)
            with self._shared(tokens, targets) as (tokens, targets):
                losses = models.losses(self.model, tokens, targets, settings.z_loss, documents, count)
                if (of_part := models.expert_counts(self.model)) is not None:
                    counts = of_part if counts is None else counts + of_part
                (models.trained_loss(self.model, losses, settings) / len(parts)).backward()
            total += (losses.cross_entropy.detach() / len(parts)).double()
        return total, counts

    def _seeded_batch(self, step: int) -> Tensor:
        """Return the batch of a step, after seeding the random numbers of that step."""
        settings, batch = self.settings, self.loader.batch(step)
        assert not self._documents or self.loader.documents <= self._documents
        # ranks that compute the same sequences (tensor parallelism) share one seed
        if settings.dropout or not settings.is_by_sizes:
            torch.manual_seed(settings.seed + step * self.columns + self.column)
        return batch

    def _batch(self, step: int) -> Tensor:
        count = self.settings.global_batch // self.shares
        return self.windows.batch(self.settings.seed, step, self.share * count, count)

    def _squares(self) -> Tensor:
        """Sum the squares of this rank's gradients, float64; those that a tp group replicates, on one rank only."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norms = [
            torch.linalg.vector_norm(grad.to_local() if isinstance(grad, DTensor) else grad, dtype=torch.float64)
            for grad in grads
            if self.tp_rank == 0 or _is_cut(grad)
        ]
        return torch.stack(norms).square().sum()

    def _sum(self, *values: Tensor) -> Tensor:
        flat = torch.stack(values)
        dist.all_reduce(flat)
        return flat

    def evaluate_all(self) -> dict[str, float]:
        """Evaluate the weights and their average (EMA), if there is one; also per source, if there are several."""
        losses = self.evaluate("heldout_loss")
        if self.settings.ema:
            with averaged_weights(self.model, self.optimizer):
                losses |= self.evaluate("heldout_loss_ema")
        return losses

    def evaluate(self, name: str) -> dict[str, float]:
        """Return the mean held-out loss per token as `name`, and of each source as "name/source", or {}."""
        sources: dict[str, list[Tensor]] = {}
        for document, tokens in self.windows.heldout(self.settings.eval_sequences):
            sources.setdefault(source_name(self.settings, document.path), []).append(tokens)
        sums = {source: self._heldout_sums(torch.stack(sequences)) for source, sequences in sources.items()}
        result = {name: [sum(values) for values in zip(*sums.values(), strict=True)]} if sums else {}
        if len(sums) > 1:
            result |= {f"{name}/{source}": pair for source, pair in sums.items()}
        return {key: loss / count for key, (loss, count) in result.items() if count}

    @torch.no_grad()
    def _heldout_sums(self, windows: Tensor) -> list[float]:
        """Return the sum of the losses of sequences, and the number of their trained tokens. Collective."""
        count, index = self.shares, self.share
        micro_batch = self.settings.sequences_at_once(self.axes)
        sums = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        self.model.eval()
        for first in range(0, len(windows), count * micro_batch):
            local = windows[first + index * micro_batch : first + (index + 1) * micro_batch].to(self.place.device)
            # every rank must take part in the all-gathers of every forward, even a rank without a window
            inputs = local if len(local) else windows[:1].to(self.place.device)
            padding = -len(inputs) % getattr(self.model, "batch_multiple", 1)
            sequences = torch.cat([inputs, inputs[-1:].expand(padding, -1, -1)])
            tokens, targets, documents = split(sequences, max(self._documents, most_documents(sequences)))
            with self._shared(tokens, targets) as (tokens, targets):
                logits, targets = models.logits(self.model, tokens, documents)[: len(inputs)], targets[: len(inputs)]
            trained = _num_trained(targets[: len(local)])
            divisor = trained.clamp(min=1).float() if self.windows.is_masked else None
            sums += torch.stack([models.loss(logits, targets, divisor).double() * trained, trained])
        self.model.train()
        reshard(self.model)
        return self._sum(*(sums * (self.tp_rank == 0))).tolist()

    def sample(self, step: int) -> None:
        """Generate, show and record a sample text, if the settings enable it. Collective."""
        settings = self.settings
        if not settings.sample_tokens:
            return
        tokenizer = load_tokenizer(settings.tokenizer, settings.end_of_document, self.corpus.tokenizer)
        [prompt] = tokenizer.encode([settings.sample_prompt])
        tokens = models.generate(self.model, settings, prompt, settings.sample_tokens, tokenizer, seed=settings.seed)
        if self.place.rank == 0:
            text = settings.sample_prompt + tokenizer.decode(tokens)
            self.run.append(self.run.samples, {"step": step, "text": text})
            self.progress.note(f"--- generated after {step} steps ---\n{text}\n---")

    def record(self, step: int, loss: float, norm: float, seconds: float, figures: Mapping[str, float]) -> None:
        """Append the record of a step to `metrics.jsonl` and show it. Rank 0 only."""
        if self.place.rank:
            return
        settings = self.settings
        tokens_per_s = settings.global_batch * settings.seq_length / seconds
        entry: dict[str, Any] = {
            "step": step,
            "loss": loss,
            **figures,
            "lr": learning_rate(settings, step),
            "grad_norm": norm,
            "skipped_steps": self.optimizer.skipped_steps,
            "tokens_per_s": tokens_per_s,
            "memory_bytes": memory_bytes(self.place.device),
            "data_wait_s": self.loader.waited,
        }
        if self._flops is not None and self._peak is not None:
            entry["mfu"] = tokens_per_s * self._flops / (self._peak * self.place.ranks)
        if self.windows.is_masked and loss == 0:
            self.progress.note(f"step {step} trained no token: all its targets are prompts or padding")
        self.run.append(self.run.metrics, entry)
        self.progress.step(entry)
        for tracker in self.trackers:
            tracker.metrics(entry)

    def record_statistics(self, record: Mapping[str, Any]) -> None:
        """Append a record {"step", "rows", "alarms"} to `statistics.jsonl`. Rank 0 only."""
        if self.place.rank:
            return
        self.run.append(self.run.statistics, record)
        for tracker in self.trackers:
            tracker.statistics(record)

    def save(self, step: int) -> None:
        """Save a checkpoint into the run's folder and log its cost."""
        with self.progress.moving("saving"):
            report = self.manager.save(step, self.model, self.optimizer, self.extra(step))
        suffix = ", written in the background" if self.settings.async_save else ""
        self.progress.note(
            f"saved step {step}: {report.bytes:,} bytes on the first process; training stood still for "
            f"{report.held_seconds:.2f} s{suffix}"
        )

    def extra(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint records in addition to the model and the optimizer."""
        tokens = step * self.settings.global_batch * self.settings.seq_length
        return {**self.loader.state_dict(), "step": step, "recipe": self.settings.recipe, "tokens": tokens}


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _is_cut(grad: Tensor) -> bool:
    """Return True if the ranks of a tensor-parallel group hold different parts of a gradient."""
    if not isinstance(grad, DTensor):
        return False
    axes = zip(grad.device_mesh.mesh_dim_names or (), grad.placements, strict=True)
    return any(name == TP and not placement.is_replicate() for name, placement in axes)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _num_trained(targets: Tensor) -> Tensor:
    """Count the targets that have a loss, float64."""
    return (targets != IGNORED).sum(dtype=torch.float64)


def source_name(settings: TrainSettings, file: Path) -> str:
    """Return the name of the data source of a file: that of its path in the settings, without the key of tokens."""
    paths = settings.heldout_data or settings.data
    names = [re.sub(r"-[0-9a-f]{16}$", "", Path(path).name) for path in paths]
    for number, (path, name) in enumerate(zip(paths, names, strict=True)):
        if file.is_relative_to(path):
            # numbers, because files of one name can lie in several folders
            return name if names.count(name) == 1 else f"{name}-{names[:number].count(name) + 1}"
    return "text"


def describe_run(settings: TrainSettings, corpus: Corpus, place: ProcessInfo) -> str:
    """Return one line about the model, the mesh and the data of a run."""
    axes, files = settings.axes(place.ranks), len(corpus.documents)
    model = settings.model or f"{settings.architecture} ({settings.layers} layers of {settings.hidden})"
    return (
        f"training {model} with {settings.recipe} weights on {place.ranks} x {place.device.type} ({axes}), {files} "
        f"file{'s' * (files > 1)} of {corpus.tokens} tokens; deterministic mode is "
        f"{'on' if settings.deterministic else 'off'}"
    )
