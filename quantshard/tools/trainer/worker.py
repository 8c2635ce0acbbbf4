"""One rank of a run: `quantshard worker RUN ORDER`, started by `launch` or by torchrun.

ORDER is the JSON of a `WorkerJob`. Rank 0 reads the run's folder (or creates it, under torchrun) and broadcasts the
result, so that all ranks train the same run or fail with the same message.
"""

import logging
import os
import random
import signal
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from os import _exit as end_at_once
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from quantshard import checkpoints
from quantshard.checkpoints import Restored
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import is_taken
from quantshard.determinism import deterministic
from quantshard.errors import ConfigurationError, QuantshardError
from quantshard.tools.observe import explain
from quantshard.tools.terminal import outputs, screen
from quantshard.tools.trainer import data, launch, progress, restarts, trackers
from quantshard.tools.trainer.data.corpus import Preparation
from quantshard.tools.trainer.data.packing import describe_rows
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer, describe_run
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.model import ModelSpec
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings, from_mapping
from quantshard.tools.trainer.settings.values import STREAM, MeshSpec

_log = logging.getLogger(__name__)

_DATA = ("data", "heldout_data")
_PREPARED = frozenset((*_DATA, "tokenizer", "end_of_document", "vocabulary"))
"""Settings that a run records with their detected values."""
_MAX_SHOWN = 10


@dataclass(frozen=True)
class WorkerJob:
    """The task of a worker.

    Args:
        resume: continue from the last complete checkpoint.
        launched: `launch` started this worker, so exit when the launcher is gone.
        new: settings of a run that rank 0 creates first.
        overrides: settings that `resume` changes; a new "recipe" or "preset" converts what is loaded.
        copy_to: where to save the loaded state again; "" for nowhere.
        lossy: also requantize weights without masters.
        restart: create the run or, if it exists, resume it with those settings of `new` that are in `given`.
        given: names of the settings that the user gave.
    """

    resume: bool
    launched: bool
    new: dict[str, Any] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    copy_to: str = ""
    lossy: bool = False
    restart: bool = False
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSetup:
    """The setup that rank 0 reads and broadcasts to all ranks.

    Args:
        launched, corpus: tables [launch] and [corpus] of `config.toml`.
        configuration: configuration of a transformers model, or None.
        existed, restores: whether the run existed before, and whether a checkpoint is loaded.
        requantize, lossy: whether to requantize weights of another recipe, and whether also those without masters.
    """

    settings: TrainSettings
    launched: dict[str, Any]
    corpus: dict[str, Any]
    configuration: dict[str, Any] | None = None
    existed: bool = False
    restores: bool = False
    requantize: bool = False
    lossy: bool = False
    notes: tuple[str, ...] = ()


def create_run(run: RunDir, settings: TrainSettings, processes: int) -> None:
    """Validate the settings of a new run and create its folder. Tokens stay even if a later check fails."""
    run.check_new()
    settings.check_ranks(processes)
    kind = device_kind(settings.device)
    # under torchrun some ranks are on other machines
    if kind == "cuda" and not launch.is_worker():
        check_local_gpu(processes - 1)
    check_requirements(settings)
    configuration = None if settings.is_by_sizes else huggingface.read_configuration(settings.model)
    prepared = Preparation(settings)
    check_sampling(prepared.settings, prepared.described)
    spec = ModelSpec(prepared.settings, configuration)
    spec.check()
    model, report = spec.converted()
    if report is not None:
        screen.say(*report.high_precision())
    if configuration is not None and prepared.settings.packing != STREAM:
        huggingface.check_documents(model, settings.model)
    settings, corpus = prepared.collected(run.tokens)
    if warning := corpus.leaks():
        screen.say(warning)
    data.Windows(corpus, settings.seq_length, settings.heldout, settings.packing)
    run.create(settings, how_started(settings, processes), corpus.table(), configuration)


def how_started(settings: TrainSettings, processes: int) -> dict[str, Any]:
    # "4,2": 4 on the outermost level
    openmp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    default = int(openmp) if openmp.isdecimal() else 1 if processes > 1 else os.cpu_count() or 1
    return {"processes": processes, "mesh": str(settings.axes(processes)), "threads": settings.threads or default}


def of_mesh(settings: TrainSettings) -> int:
    """Return the number of ranks of the mesh in the settings; 0 if the settings name no mesh."""
    return MeshSpec.parse(settings.mesh).processes if settings.mesh else 0


def changed(settings: TrainSettings, overrides: dict[str, Any], processes: int = 0) -> TrainSettings:
    """Return a resumed run's settings with `overrides`. A mesh of another size is replaced by one of dp_shard only."""
    updates = from_mapping(overrides, "resume")
    if "mesh" not in updates and processes and of_mesh(settings) not in (0, processes):
        settings = replace(settings, mesh="")
    result = replace(settings, **updates)
    result.check()
    return result.resolved()


def changes(run: RunDir, new: TrainSettings, given: Collection[str], processes: int) -> dict[str, Any]:
    """Return the settings that `train --auto-resume` changes in an existing run; see `restarts.overrides`."""
    before, compared = run.read_config()[0], set(given)
    # tokens made from texts that the same command names; its data_format describes the texts
    folders = [folder for folder in (run.tokens.absolute(), before.token_cache) if folder]
    for name in _DATA:
        if any(Path(path).is_relative_to(folder) for path in getattr(before, name) for folder in folders):
            compared -= {name, "data_format"}
    if not new.vocabulary:
        # derived from the tokenizer, or by another release's rule
        compared.discard("vocabulary")
    prepared = Preparation(new).settings if _PREPARED & compared else new
    result = restarts.overrides(str(run.path), before, prepared, compared, processes)
    if new.checkpoints and "checkpoints" in given:
        # named explicitly, even if unchanged
        result["checkpoints"] = new.checkpoints
    return result


def check_resumed(run: RunDir, order: WorkerJob, before: TrainSettings, processes: int) -> TrainSettings:
    """Check that an existing run can continue on `processes` ranks; return its new settings."""
    settings = changed(before, order.overrides, processes)
    settings.check_ranks(processes)
    check_requirements(settings)
    if order.copy_to and is_taken(order.copy_to):
        raise ConfigurationError(f"{order.copy_to} exists; name another folder with --copy-to")
    run.follow(settings)
    run.check_place("checkpoints" in order.overrides)
    if not order.restart:
        # raises with advice if there is no checkpoint
        run.last_complete()
    if (last := max(run.saved_steps(), default=0)) > settings.steps:
        steps = f"steps = {settings.steps} would end before it"
        raise ConfigurationError(f"{run.path} has a checkpoint of step {last}, and {steps}; give at least {last}")
    return settings


def check_requirements(settings: TrainSettings) -> None:
    """Check that the machine has what the trackers, the log level and CUDA graphs of a run need."""
    trackers.check_trackers(settings)
    progress.explicit_level(settings)
    if settings.cuda_graphs and device_kind(settings.device) != "cuda":
        raise ConfigurationError("cuda_graphs = true needs a GPU; give --no-cuda-graphs")


def check_sampling(settings: TrainSettings, corpus: data.Corpus) -> None:
    """Check that a run that generates samples has the tokenizer of its data."""
    if not settings.sample_tokens:
        return
    is_of_bytes = not corpus.tokenizer and corpus.end_of_document == data.END_OF_DOCUMENT
    if not settings.tokenizer and not is_of_bytes:
        raise ConfigurationError("--sample-tokens needs the tokenizer of the data; name it with --tokenizer")
    data.load_tokenizer(settings.tokenizer, settings.end_of_document, corpus.tokenizer)


def recorded_data(settings: TrainSettings, recorded: dict[str, Any]) -> data.Corpus:
    """Find the data of a resumed run at the paths in its settings, and check that they are unchanged."""
    corpus = data.from_table(recorded)
    check_sampling(settings, corpus)
    if settings.data:
        screen.say(f"reading the data of the run: {', '.join(settings.data[:_MAX_SHOWN])}")
    return data.collect_recorded(settings.data, corpus, settings.heldout_data)


def _read(run: RunDir, order: WorkerJob, place: ProcessInfo) -> RunSetup:
    if order.new is not None:
        new = TrainSettings(**from_mapping(order.new, "train"))
        if order.restart and run.is_begun():
            order = replace(order, resume=True, overrides=changes(run, new, order.given, place.ranks))
        else:
            create_run(run, new, place.ranks)
    run.check_ours()
    run.lock()
    settings, launched, corpus = run.read_config()
    setup = RunSetup(settings, launched, corpus, run.read_model(settings))
    return _read_resumed(run, order, place, setup) if order.resume else setup


def _read_resumed(run: RunDir, order: WorkerJob, place: ProcessInfo, before: RunSetup) -> RunSetup:
    settings = check_resumed(run, order, before.settings, place.ranks)
    started = how_started(settings, place.ranks)
    if not settings.threads and before.launched["processes"] == place.ranks and "threads" in before.launched:
        # the order of CPU sums depends on the number of threads
        started["threads"] = before.launched["threads"]
    complete = run.saved_steps()
    corpus = before.corpus
    # otherwise the launcher has just checked the data
    if not order.launched or "data" in order.overrides:
        corpus = recorded_data(settings, corpus).table()
    later = [step for step in run.incomplete_steps() if not complete or step > complete[-1]]
    notes = [f"skipped the incomplete checkpoint {run.checkpoint(step)}" for step in later]
    if before.settings.mesh and not settings.mesh:
        old, now = before.settings.mesh, settings.axes(place.ranks)
        notes.append(f"the run had mesh = {old}, which is not of {place.ranks} processes; now {now}")
    if not complete:
        notes.append(f"{run.path} has no complete checkpoint, so it begins again")
    requantize, lossy = _requantization(run, order)
    return RunSetup(
        settings, started, corpus, before.configuration, existed=True, restores=bool(complete),
        requantize=requantize, lossy=lossy, notes=tuple(notes),
    )  # fmt: skip


def _requantization(run: RunDir, order: WorkerJob) -> tuple[bool, bool]:
    """Return whether to requantize weights or round states, and whether also without masters. Without such an override
    the run's earlier starts decide, because checkpoints keep the old format until the next save."""
    if not {"recipe", "preset"} & order.overrides.keys():
        return run.requantized()
    last_step = run.saved_steps()[-1:]
    # a lossy start that has not saved since
    allowed = [start for start in run.read_starts() if start.get("lossy") is True and [start.get("step")] == last_step]
    return True, order.lossy or bool(allowed)


def train_run(run: RunDir, order: WorkerJob) -> None:
    """Train until the run is finished or a stop signal arrives."""
    stop = StopFlag()
    for number in launch.STOP_SIGNALS:
        signal.signal(number, lambda number, frame: stop.set())
    if order.launched or "TORCHELASTIC_RUN_ID" in os.environ:
        launch.die_with_parent()
    raw_settings = (order.new or asdict(run.read_config()[0])) | order.overrides
    # before the first use of the GPU and NCCL
    deterministic(raw_settings["deterministic"])
    process = _join(raw_settings["device"])
    setup = agreement.from_rank0(lambda: _read(run, order, process))
    if process.device.type == "cpu":
        torch.set_num_threads(setup.launched.get("threads", 1))
    try:
        with progress.logged(setup.settings, process.rank, run.path):
            _train(run, order, process, setup, stop)
    except QuantshardError:
        run.withdraw()
        raise


def _train(run: RunDir, order: WorkerJob, place: ProcessInfo, setup: RunSetup, stop: StopFlag) -> None:
    settings = setup.settings
    _log.info("process %d is rank %d of %d, on %s", os.getpid(), place.rank, place.ranks, place.device)
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    init_from = None if setup.restores else settings.init_from
    trainer = Trainer(settings, data.from_table(setup.corpus), run, place, stop, init_from, setup.configuration)
    with trainer.manager:
        restored = trainer.restore(requantize=setup.requantize, lossy=setup.lossy) if setup.restores else None
        done = 0 if restored is None else restored.step
        if place.rank == 0:
            if setup.existed:
                # late, so that a failed start leaves the records alone
                run.forget_after(done)
            _record_start(run, setup, trainer, restored)
            if setup.existed:
                # after the record, so that a kill in between loses nothing
                run.write_config(settings, setup.launched, setup.corpus)
        table = explain(trainer.model, trainer.optimizer)
        if place.rank == 0:
            outputs.write_file(run.parameters, table.to_json(), within=run.path)
        trainer.progress.report(table.summary())
        _announce(setup, trainer, restored, saves=done < settings.steps or bool(order.copy_to))
        if order.copy_to:
            checkpoints.save(order.copy_to, trainer.model, trainer.optimizer, trainer.extra(done))
            trainer.progress.note(f"saved again, from this mesh, in {order.copy_to}")
        if settings.tensorboard or settings.wandb:
            # if a tracker fails to open, every rank raises
            agreement.from_rank0(lambda: trainer.trackers.extend(trackers.open_trackers(settings, run, done)))
        try:
            trainer.train(done)
        finally:
            for tracker in trainer.trackers:
                tracker.close(failed=sys.exc_info()[0] is not None)


def _record_start(run: RunDir, setup: RunSetup, trainer: Trainer, restored: Restored | None) -> None:
    """Record this start and the environment that determines its bits; warn if the environment changed. Rank 0 only."""
    done, place = 0 if restored is None else restored.step, trainer.place
    now = restarts.current_environment(setup.settings, place.device)
    previous = run.read_starts()[-1:] if done else []
    if previous and (changes := restarts.differences(previous[0].get("environment"), now)):
        reasons = f"{'; '.join(changes[:_MAX_SHOWN])} (starts.jsonl has both)"
        text = f"WARNING: from here on losses may differ from those of the run without a stop, because {reasons}"
        trainer.progress.note(text, logging.WARNING)
    start = {"step": done, "processes": place.ranks, "mesh": str(trainer.axes), "recipe": setup.settings.recipe}
    if trainer.windows.rows:
        start["packing"] = describe_rows(trainer.windows.rows)
    if restored is not None and restored.requantized:
        start |= {"requantized": restored.requantized, "lossy": setup.lossy}
    run.append(run.starts, start | {"settings": restarts.recorded(setup.settings), "environment": now})


def _announce(setup: RunSetup, trainer: Trainer, restored: Restored | None, *, saves: bool) -> None:
    """Show what is trained and from where. `saves`: the loaded state will be saved again."""
    note = trainer.progress.note
    note(describe_run(setup.settings, trainer.corpus, trainer.place))
    if trainer.windows.rows:
        note(describe_rows(trainer.windows.rows))
    for text in setup.notes:
        note(text)
    if trainer.begun:
        note(trainer.begun)
    if restored is not None:
        note(f"resumed after step {restored.step}, from {restored.path}")
        if restored.requantized:
            unsaved = "no step is left that would save it: ask for more with --steps, or pass --copy-to"
            note(f"{restored.requantized}; {'losses go on from these' if saves else unsaved}")


def _join(wanted: str) -> ProcessInfo:
    rank, ranks, local = launch.process_numbers()
    if device_kind(wanted) == "cpu":
        dist.init_process_group("gloo")
        return ProcessInfo(rank, ranks, torch.device("cpu"))
    check_local_gpu(local)
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return ProcessInfo(rank, ranks, device)


def device_kind(wanted: str) -> str:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and kind == "cpu":
        raise ConfigurationError("device = 'cuda', but torch sees no GPU here; use --device cpu or auto")
    return kind if wanted == "auto" else wanted


def check_local_gpu(local: int) -> None:
    count = torch.cuda.device_count()
    if local >= count:
        raise ConfigurationError(f"process {local} here has no GPU: there are {count}; start fewer, or set LOCAL_RANK")


def main(run: Path, order: WorkerJob) -> NoReturn:
    """Run the worker and end the process: exit code 0, or 1 after reporting one line to the launcher."""
    folder = RunDir(run)
    try:
        train_run(folder, order)
        dist.destroy_process_group()
        code = 0
    # report every failure, whatever its type
    except BaseException as error:
        line = launch.report_failure(error, folder.logs)
        if line and not order.launched:
            screen.complain(f"process {os.environ.get('RANK')}: {line}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # no destructor may wait for ranks that are gone
    end_at_once(code)
