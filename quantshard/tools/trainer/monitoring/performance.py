"""The speed of a run: model FLOPs utilization, and traces of steps.

MFU (Chowdhery et al., 2022, arXiv:2204.02311, appendix B) is the share of the device's peak that the model needs;
recomputation in backward does not count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from quantshard import private_torch
from quantshard.errors import QuantshardError
from quantshard.foreign import FieldReader
from quantshard.modules import GroupedLinear
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import complain
from quantshard.tools.trainer.models.model import Embedding
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings

_MOST: Final = 1 << 40

BF16_PEAKS: Final[Mapping[str, float]] = MappingProxyType(
    {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "B300": 2250e12}
)
"""Dense BF16 FLOP/s by part of the GPU's name, from NVIDIA's data sheets; the first match counts."""


def flops_of_token(model: nn.Module, settings: TrainSettings, configuration: Mapping[str, Any] | None) -> float | None:
    """Return the FLOP of forward and backward per token: 6 per matrix weight, plus 12 L H D T for attention over T
    tokens in L layers of H heads of D features. None if unknown, as for stacked experts of transformers."""
    heads = _heads(settings, configuration)
    params = list(model.parameters())
    if heads is None or any(param.ndim > 2 for param in params):
        return None
    tables, matrices = set[int](), set[int]()
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            # a token passes through some experts only, and other ranks may hold some
            continue
        (tables if isinstance(module, nn.Embedding | Embedding) else matrices).update(
            id(param) for param in module.parameters(recurse=False)
        )
    if settings.tied and configuration is None:
        # the embedding, which is also the head
        matrices.add(id(params[0]))
    weights = float(sum(param.numel() for param in params if param.ndim == 2 and id(param) in matrices))
    if settings.experts and configuration is None:
        weights += 3 * settings.layers * settings.experts_per_token * settings.hidden * settings.ffn
    return 6.0 * weights + 12.0 * heads * settings.seq_length


def _heads(settings: TrainSettings, configuration: Mapping[str, Any] | None) -> int | None:
    """Return the number of features over all heads of all layers; None if the configuration lacks a size."""
    if configuration is None:
        return settings.layers * settings.heads * settings.head_size
    fields = FieldReader(configuration, settings.model)
    names = (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
    layers, heads, hidden = (fields.integer(a, 1, _MOST) or fields.integer(b, 1, _MOST) for a, b in names)
    if layers is None or heads is None or hidden is None:
        return None
    return layers * heads * (fields.integer("head_dim", 1, _MOST) or hidden // heads)


def peak_of(device: torch.device, settings: TrainSettings) -> float | None:
    """Return the peak FLOP/s of the device: from the settings, or of a known GPU; None for any other device."""
    if settings.peak_tflops:
        return settings.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)


WARM_UP: Final = 3
"""Steps before the trace, which compile kernels and allocate memory."""


class StepProfile:
    """Traces `steps` steps of this rank after the first `WARM_UP` steps; 0 disables tracing.

    The trace RUN/profile/rank-N.json opens in Perfetto (ui.perfetto.dev) or chrome://tracing, the GPU memory snapshot
    memory-rank-N.pickle in pytorch.org/memory_viz. `note` reports a missing snapshot (on a CPU) and a training that
    ended before the first traced step; a shorter trace is written as it is.

    If a file cannot be written (e.g. on a host without the run's folder), a warning is shown and training continues,
    because other ranks wait for this one.
    """

    def __init__(self, run: RunDir, rank: int, device: torch.device, steps: int, note: Callable[[str], object]) -> None:
        self._run, self._rank, self._device, self._steps, self._note = run, rank, device, steps, note
        self._done = 0
        self._trace: profile | None = None
        self._notes_memory = False

    def __enter__(self) -> StepProfile:
        return self

    def step(self) -> None:
        """Count a finished step; start or write the trace when due."""
        self._done += 1
        if self._steps and self._done == WARM_UP:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            self._begin_memory()
            self._trace = profile(activities=kinds, record_shapes=True, profile_memory=True)
            self._trace.start()
        elif self._done == WARM_UP + self._steps:
            self._write()

    def _begin_memory(self) -> None:
        if self._device.type != "cuda":
            self._note("no snapshot of memory is written: PyTorch makes one of a GPU alone, and not of a CPU")
            return
        try:
            private_torch.begin_memory_history(self._device)
            self._notes_memory = True
        except (QuantshardError, RuntimeError) as error:
            complain(f"[rank {self._rank}] WARNING: {error}; this process writes no snapshot of memory")

    def _write(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        with self._warned("the trace"):
            trace.stop()
            if self._done > WARM_UP:
                self._export(trace.export_chrome_trace, f"rank-{self._rank}.json")
        if self._notes_memory:
            self._notes_memory = False
            with self._warned("the snapshot of the memory"):
                if self._done > WARM_UP:
                    self._export(private_torch.end_memory_history, f"memory-rank-{self._rank}.pickle")
                else:
                    private_torch.end_memory_history(None)

    @contextmanager
    def _warned(self, what: str) -> Iterator[None]:
        try:
            yield
        except (QuantshardError, OSError, RuntimeError) as error:
            complain(f"[rank {self._rank}] WARNING: {error}; {what} of this process is lost")

    def _export(self, write: Callable[[str], object], name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, name)
            write(str(file))
            outputs.write_file(self._run.profile / name, file.read_bytes(), within=self._run.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        if self._steps and self._done <= WARM_UP and error is None:
            self._note(
                f"no step was traced: --profile {self._steps} begins after {WARM_UP} steps, and {self._done} were "
                "trained"
            )
