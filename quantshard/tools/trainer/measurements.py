"""What a run measures: statistics and alarms, model FLOPs utilization, and traces of steps.

MFU (Chowdhery et al., 2022, arXiv:2204.02311, appendix B) is the share of the device's peak that the model needs;
recomputation in backward does not count.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from quantshard import private_torch
from quantshard.errors import QuantshardError
from quantshard.modules import GroupedLinear
from quantshard.optimizers import ElementwiseOptimizer
from quantshard.optimizers.guards import too_large
from quantshard.tools.statistics.nonfinite import first_nonfinite
from quantshard.tools.statistics.recorder import Statistics
from quantshard.tools.statistics.rows import Alarm, ExpertLoads, StatisticsSample
from quantshard.tools.statistics.step_sample import StepSample
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import complain
from quantshard.tools.trainer.models.decoder import Embedding
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings

BF16_PEAKS: Final = {
    "A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "B300": 2250e12,
}  # fmt: skip
"""Dense BF16 FLOP/s by part of the GPU's name, from NVIDIA's data sheets; the first match counts."""


def flops_of_token(model: nn.Module, settings: TrainSettings) -> float | None:
    """Return the FLOP per token: 6 per matrix weight, and 12 L H D T for attention over T tokens in L layers of
    H heads of D features. None if unknown, as for stacked experts of transformers."""
    params, head_features = list(model.parameters()), settings.layers * settings.heads * settings.head_size
    if not settings.is_by_sizes:
        config: Any = model.config
        names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
        sizes: list[Any] = [getattr(config, name, None) for name in names]
        if None in sizes:
            return None
        layers, heads, hidden = sizes
        head_features = layers * heads * (getattr(config, "head_dim", None) or hidden // heads)
    if any(param.ndim > 2 for param in params):
        return None
    # a token passes through some experts only, and other ranks may hold some
    modules = [part for part in model.modules() if not isinstance(part, GroupedLinear | nn.Embedding | Embedding)]
    matrices = {id(param) for part in modules for param in part.parameters(recurse=False)}
    if settings.tied and settings.is_by_sizes:
        # the embedding, which is also the head
        matrices.add(id(params[0]))
    weights = float(sum(param.numel() for param in params if param.ndim == 2 and id(param) in matrices))
    if settings.experts and settings.is_by_sizes:
        weights += 3 * settings.layers * settings.experts_per_token * settings.hidden * settings.ffn
    return 6.0 * weights + 12.0 * head_features * settings.seq_length


def peak_of(device: torch.device) -> float | None:
    """Return the BF16 peak FLOP/s of a known GPU; None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)


WARM_UP: Final = 3
"""Steps before the trace, which compile kernels and allocate memory."""


@contextmanager
def traced_steps(run: RunDir, rank: int, device: torch.device, steps: int) -> Iterator[Callable[[], object]]:
    """Trace `steps` steps of this rank after the first `WARM_UP` steps; 0: none. Yields a function to call after each
    step.

    The trace RUN/profile/rank-N.json opens in Perfetto (ui.perfetto.dev) or chrome://tracing, the GPU memory snapshot
    memory-rank-N.pickle in pytorch.org/memory_viz. If a file cannot be written (e.g. on a host without the run's
    folder), a warning is shown and training continues, because other ranks wait for this one.
    """
    if not steps:
        yield lambda: None
        return
    activities, memory_files = [ProfilerActivity.CPU], list[str]()

    @contextmanager
    def warned(name: str) -> Iterator[None]:
        try:
            yield
        except (QuantshardError, OSError, RuntimeError) as error:
            complain(f"[rank {rank}] WARNING: {error}; {name} is lost")

    def export(write: Callable[[str], object], name: str) -> None:
        with warned(name), tempfile.TemporaryDirectory() as folder:
            file = Path(folder, name)
            write(str(file))
            outputs.write_file(run.profile / name, file.read_bytes(), within=run.path)

    def write(trace: profile) -> None:
        export(trace.export_chrome_trace, f"rank-{rank}.json")
        for name in memory_files:
            export(private_torch.end_memory_history, name)

    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with warned("the memory snapshot"):
            private_torch.begin_memory_history(device)
            memory_files.append(f"memory-rank-{rank}.pickle")
    plan = schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1)
    options: dict[str, Any] = {"on_trace_ready": write, "record_shapes": True, "profile_memory": True}
    with profile(activities=activities, schedule=plan, **options) as trace:
        yield trace.step
    if trace.step_num <= WARM_UP and rank == 0:
        complain(f"no step was traced: --profile begins after {WARM_UP} steps, and {trace.step_num} were trained")


class RunStatistics(Statistics):
    """Passes statistics of a run to `record`, and alarms to `note`, from the step after `done` on. Collective.

    An alarm is shown as soon as it is known and recorded with its step. Alarms about the loss and skipped steps are
    known at once, others one step later, with the sample.

    Only the first of several skipped steps in a row is diagnosed. If its gradients were finite but too large, the
    optimizer knows the parameter. Otherwise the step's passes run again to locate the first non-finite value
    (`first_nonfinite`), if it recurs. The diagnosis changes no state, so losses are the same as without alarms.
    """

    def __init__(
        self,
        settings: TrainSettings,
        model: nn.Module,
        optimizer: ElementwiseOptimizer,
        record: Callable[[Mapping[str, Any]], None],
        note: Callable[[str, int], None],
        done: int,
    ) -> None:
        self._model, self._optimizer, self._record = model, optimizer, record
        self._skipped, self._skips = optimizer.skipped_steps, False
        self._captured: StepSample | None = None
        self._layers, self._sampled_loads = settings.layers, list[dict[str, Any]]()
        self.experts = ExpertLoads(settings.alarm_dead_experts)
        super().__init__(
            model,
            optimizer,
            every=settings.statistics_every,
            step=done,
            saturation=settings.alarm_saturation,
            loss_spike=settings.alarm_loss_spike,
            on_alarm=lambda alarm: note(f"ALARM ({alarm.kind}): {alarm.text}", logging.WARNING),
        )

    @contextmanager
    def whole_step(self) -> Iterator[StepSample]:
        """See `Statistics`. Replays of a step's CUDA graph use the sample of the capture."""
        with super().whole_step() as sample:
            self._captured = sample
            yield sample

    def add_counts(self, counts: Sequence[float]) -> None:
        """Add the counts of all experts in the current step; see `ExpertLoads`."""
        alarm = self.experts.add(self.done + 1, self._layers, counts)
        if alarm is not None:
            self.add_alarm(alarm)
        if self.is_sampling:
            self._sampled_loads = self.experts.rows

    def stepped(self, loss: float, again: Callable[[], object]) -> None:
        """Finish a step, sampled or not. Collective. `again`: repeats the step's forward and backward."""
        skipped = self._optimizer.skipped_steps
        is_first, self._skips, self._skipped = not self._skips, skipped > self._skipped, skipped
        if self._skips and is_first:
            if name := self._optimizer.large_gradient:
                kind, text = "large gradient", too_large(name)
            elif (source := first_nonfinite(self._model, again)) is not None:
                kind, name, text = "nan", source.name, source.text
            else:
                kind, name = "nan", "gradient"
                text = "a gradient was infinite or NaN; in the same pass made once more, none is"
            self.add_alarm(Alarm(kind, name, 1.0, f"step {self.done + 1} was skipped: {text}"))
        for sample in self.step(loss, self._captured if self.is_sampling else None):
            self._record(sample.to_dict())

    def settle(self) -> list[StatisticsSample]:
        """Record the pending sample. If a checkpoint were saved before, a resume from it would lose the sample."""
        for sample in super().settle():
            record = sample.to_dict()
            self._record(record | {"rows": record["rows"] + self._sampled_loads})
        return []
