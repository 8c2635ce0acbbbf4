"""Sends the weights of a model in training to an inference engine, in a layout that the engine loads.

| question | answer |
|---|---|
| what to send | `LiveWeights` |
| how, over NCCL or CUDA IPC | vLLM's own trainer engines, which get `weight_source(weights)` |
| how, through files in shared memory | `publish` in the trainer, `VLLMReceiver.update` in the engine's process |
| whether the engine may serve | `VLLMReceiver.generate`: not between the first and the last stamp of a transfer |
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import why
from quantshard.errors import CheckpointError, ConfigurationError, shown
from quantshard.interop.layouts import files, table, writing
from quantshard.interop.layouts.files import CONFIGURATION, TensorBatch
from quantshard.interop.layouts.live import LiveModel, class_name, unwrapped
from quantshard.interop.layouts.names import Names, default_names, names_in_files
from quantshard.interop.layouts.writing import Export, ExportPlan
from quantshard.optimizers import averaging
from quantshard.tensor import components

INCOMPLETE: Final = "incomplete"
"""vLLM's weight version while weights are being replaced."""

_FILE_BYTES: Final = 256 << 20

_MARK: Final = ".published"
"""File in every folder that `publish` wrote; it removes no others."""

TensorSpec = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor that is sent."""


class LiveWeights:
    """The weights of a model in training as named tensors, equal bit for bit to what `layouts.export` writes.

        weights = LiveWeights(model, "hf-fp8-block")
        for name, tensor in weights:  # on every rank
            ...

    Every iteration reads the present weights: codes and scales, or in a plain layout the values. It first checks on all
    ranks that the layout is exact for them. A rank holds one decoder layer, or 32 MiB of it, in addition to its shards;
    a tensor is valid until the next one is requested, and until the model changes. All calls are collective.

    Attributes:
        report: what the last iteration sent, as `layouts.export` reports it, with the errors of requantized weights.

    Args:
        model: plain, or under DDP, FSDP2, HSDP, tensor or expert parallelism; converted, or of our modules.
        layout: a name or family in `layouts.LAYOUTS`.
        config: Hugging Face configuration, or its directory. Default: the model's own `config`.
        names: map from the model's names to the engine's. Default: as in `layouts.export`.
        lossy: requantize weights that the layout cannot represent exactly, or that the engine fuses under one scale.
        held_only: yield None for experts that are on other ranks, instead of gathering them.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: str,
        *,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        names: Names | None = None,
        lossy: bool = False,
        held_only: bool = False,
    ) -> None:
        self.model, self.lossy, self.held_only = unwrapped(model), lossy, held_only
        model_config = getattr(self.model, "config", None)
        to_dict = getattr(model_config, "to_dict", dict[str, Any])
        self.config = {**to_dict(), **files.read_config(config)}
        if model_config is not None and not self.config.get("architectures"):
            self.config["architectures"] = [class_name(self.model)]
        self._names = names
        self._source = agreement.run_on_all_ranks(self._read_structure)
        tags = {weight.tag for weight in self._source.weights.values() if weight.tag is not None}
        self.layout = table.find(layout, tags)
        self._make_plan(self._source)
        self._begin()

    def metadata(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor of the whole model, in the order of iteration."""
        return list(self._metadata)

    def held_names(self) -> set[str] | None:
        """Return the names of the tensors that this rank yields; None for all."""
        return set(self._held) if self.held_only else None

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        if not all(agreement.exchange_results(self._source.is_current, lambda same: same and self._is_reusable)[1]):
            # an error leaves no plan to reuse
            self._is_reusable = False
            self._source = agreement.run_on_all_ranks(self._read_structure)
            self._make_plan(self._source)
        self._begin()
        return self._tensors(self.report)

    def _begin(self) -> None:
        """Start a report of the weights to send, and forget what an unfinished iteration gathered."""
        averages = len(self._source.weights) if averaging.has_averages(self.model) else 0
        self.report = replace(self._plan.report, rounded=[], errors={}, averages=averages)
        self.report.bytes = sum(batch.nbytes for batch in self._batches)
        self._plan.report = self.report
        self._source.free()

    def _tensors(self, report: Export) -> Iterator[tuple[str, Tensor | None]]:
        tensors = (entry for batch in self._batches for entry in batch.make().items())
        try:
            for name, _, _ in self._metadata:
                yield next(tensors) if name in self._held else (name, None)
        finally:
            # what a newer iteration gathered stays
            if self.report is report:
                self._source.free()

    def configuration(self) -> dict[str, Any]:
        """Return the content of config.json for an engine that loads these weights."""
        return self.report.configuration(self.config)

    def _read_structure(self) -> LiveModel:
        adapters = [name for name, _ in self.model.named_parameters() if ".base_layer." in name or ".lora_" in name]
        if adapters:
            raise ConfigurationError(f"{adapters[0]} belongs to a PEFT adapter; merge the adapters before a transfer")
        return LiveModel(self.model, self.held_only)

    def _make_plan(self, source: LiveModel) -> None:
        """Check every weight, on all ranks, and plan what this rank yields."""
        centered = components.zero_centered_gammas(self.model)
        self._plan = ExportPlan(
            source, self.layout, self._names_of(source), self.config, writing.WEIGHTS, self.lossy,
            Export(source.path, self.layout), set() if files.files_center_gamma(self.config) else set(centered),
            for_engine=True,
        )  # fmt: skip
        order = {name: number for number, name in enumerate(source.weights)}

        def summarize(batches: Sequence[TensorBatch]) -> list[tuple[int, TensorSpec]]:
            # of several ranks only if they send different tensors
            sent = batches if self.held_only or agreement.rank() == 0 else []
            return [(order[batch.weight], (name, *spec)) for batch in sent for name, spec in batch.tensors.items()]

        self._batches, by_rank = agreement.exchange_results(self._plan.groups, summarize)
        self._held = {name for batch in self._batches for name in batch.tensors}
        # ranks with other experts send other names: order them by parameter, then by rank
        merged = sorted((entry for specs in by_rank for entry in specs), key=lambda entry: entry[0])
        self._metadata = list(dict.fromkeys(spec for _, spec in merged))
        self._is_reusable = self.layout.input_scale is None and not source.has_read

    def _names_of(self, source: LiveModel) -> Names:
        weights = source.weights.values()
        if self._names is None:
            self._names = default_names(source.weights)
            if any(weight.spec is not None and weight.is_stack for weight in weights):
                shapes = {name: tuple(tensor.shape) for name, tensor in source.tensors.items()}
                self._names = names_in_files(self.model, shapes)
        return source.held_rows(self._names)


def weight_source(weights: LiveWeights) -> Any:
    """Wrap weights as a `WeightSource` for vLLM's trainer engines ("nccl", "ipc", ...). vLLM must be installed."""
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")

    class LiveWeightSource(base.WeightSource):  # type: ignore[misc]  # vLLM is not installed
        _announced: list[TensorSpec] | None = None

        def metadata(self) -> list[Any]:
            self._announced = weights.metadata()
            return [base.ParamMeta(*spec) for spec in self._announced]

        def _check_announced(self) -> None:
            if self._announced not in (None, weights.metadata()):
                raise ConfigurationError("weight_source: the model changed after metadata(); start the transfer again")

        def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
            tensors, stream = iter(weights), None
            agreement.run_on_all_ranks(self._check_announced)
            for _ in weights.metadata():
                if torch.cuda.is_initialized() and torch.cuda.current_stream() != stream:
                    # vLLM packs on streams that do not wait for each other, nor for the optimizer
                    torch.cuda.synchronize()
                    stream = torch.cuda.current_stream()
                yield next(tensors)
            next(tensors, None)

        def held_names(self) -> set[str] | None:
            return weights.held_names()

    return LiveWeightSource()


def publish(weights: LiveWeights, folder: str | os.PathLike[str], version: int, *, keep: int = 2) -> Path:
    """Write the present weights to `folder/version` as a model that engines load, and return this path.

    A collective call; rank 0 writes. The path appears when all files are complete, so a trainer that dies leaves the
    versions before. Use a folder in memory, as in /dev/shm.

    Args:
        version: an integer above all published versions.
        keep: number of newest versions to keep, at least 1. An engine can read a version until it is removed.
    """
    target = Path(folder) / str(version)
    if not isinstance(weights, LiveWeights) or weights.held_only:
        raise ConfigurationError("publish: pass LiveWeights of all experts, without held_only")
    agreement.run_on_all_ranks(lambda: _check_version(folder, version, keep))
    tensors: Iterator[Any] = ({name: tensor} for name, tensor in weights)

    def write() -> None:
        partial_folder = target.with_name(f".{version}.partial")
        try:
            for stale in target.parent.glob(".*.partial"):
                if stale.name[1:].partition(".")[0].isdecimal():
                    shutil.rmtree(stale)
            partial_folder.mkdir(parents=True)
            groups = [TensorBatch(spec[0], {spec[0]: spec[1:]}, tensors.__next__) for spec in weights.metadata()]
            files.write_safetensors(partial_folder, groups, _FILE_BYTES, {})
            files.write_json(partial_folder / CONFIGURATION, weights.configuration())
            (partial_folder / _MARK).touch()
            os.rename(partial_folder, target)
            for old in published(folder)[:-keep]:
                shutil.rmtree(old)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {why(error)}") from None
        finally:
            # the other ranks wait for the rest
            for _ in tensors:
                pass

    agreement.run_on_all_ranks(write if agreement.rank() == 0 else lambda: [None for _ in tensors])
    return target


def _check_version(folder: str | os.PathLike[str], version: int, keep: int) -> None:
    for name, value, least in (("version", version, 0), ("keep", keep, 1)):
        if type(value) is not int or value < least:
            raise ConfigurationError(f"publish({name}={value!r}): use an integer of at least {least}")
    newest = max((int(path.name) for path in published(folder)), default=-1)
    if version <= newest:
        raise ConfigurationError(f"publish(version={version}): {folder} has version {newest}; use a new folder")


def published(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete versions that `publish` wrote to a folder, oldest first."""
    versions = [path for path in Path(folder).glob("*") if path.name.isdecimal() and (path / _MARK).exists()]
    return sorted(versions, key=lambda path: int(path.name))


class VLLMReceiver:
    """Replaces the weights of a vLLM `LLM` in this process, and generates only from complete weights.

    It is a client for vLLM's trainer engines (`VLLMWeightSyncClient`) where trainer and engine share a process, and
    `update` reads what `publish` wrote. vLLM's weight version, which every output has, is the version of the trainer.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._config = files.read_config(llm.llm_engine.vllm_config.model_config.model)
        self._is_in_session = False

    @property
    def version(self) -> str:
        return str(self.llm.get_weight_version())

    def update(self, folder: str | os.PathLike[str]) -> str:
        """Load the newest published version, unless the engine has it, and return its name."""
        versions = published(folder)
        if not versions:
            raise CheckpointError(f"{os.fspath(folder)} holds no complete version; publish one first")
        newest = versions[-1]
        if newest.name != self.version:
            self._check(newest)
            if self._is_in_session:
                # of a trainer that died; vLLM begins no other before its end
                self.finish_weight_update(INCOMPLETE)
            self.llm.update_weight_version(INCOMPLETE)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(newest)})
            self._complete(newest.name)
        return self.version

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `LLM.generate`, or raise if a transfer has not completed."""
        if self.version == INCOMPLETE:
            raise ConfigurationError("the engine holds parts of two versions of the weights; complete a transfer first")
        return self.llm.generate(*args, **kwargs)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.update_weight_version(INCOMPLETE)
        self.llm.start_weight_update()
        self._is_in_session = True

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update()
        self._is_in_session = False
        self._complete(weight_version or "default")

    def _complete(self, version: str) -> None:
        self.llm.reset_prefix_cache()  # it has keys and values of the weights before
        self.llm.update_weight_version(version)

    def _check(self, path: Path) -> None:
        config = files.read_config(path)
        changed = [key for key in self._config.keys() | config.keys() if self._config.get(key) != config.get(key)]
        if changed:
            key = min(changed)
            values = f"{key} is {shown(config.get(key))}, the engine's {shown(self._config.get(key))}"
            raise ConfigurationError(f"{path} is of another model: {values}; start another engine")
