"""One process of a run: `quantshard worker RUN ORDER`, as `launch` starts it, or what torchrun started.

ORDER is the JSON of a `WorkerJob`. Rank 0 reads the run's folder (or, under torchrun, makes it) and tells the others,
so that all of them train the same thing, or fail with the same line.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import _exit as end_at_once
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from quantshard.checkpoints import Restored
from quantshard.checkpoints.disk.store import is_taken
from quantshard.determinism import deterministic
from quantshard.errors import ConfigurationError, QuantshardError
from quantshard.tools.observe import explain
from quantshard.tools.observe.table import MORE, Report
from quantshard.tools.terminal import screen
from quantshard.tools.trainer import data, environment, launch, restarts
from quantshard.tools.trainer.data.preparation import Preparation
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer, check_graphs, describe_run
from quantshard.tools.trainer.models import huggingface, initialization
from quantshard.tools.trainer.models.model import ModelSpec
from quantshard.tools.trainer.monitoring import logs, trackers
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.schedule import shortfalls
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.mesh import MeshSpec
from quantshard.tools.trainer.settings.settings_file import from_mapping

_log = logging.getLogger(__name__)

_CHANGES = 20
"""The most changes of the environment that a resume tells."""
_DATA = ("data", "heldout_data")
_PREPARED = frozenset((*_DATA, "tokenizer", "end_of_document", "vocabulary"))
"""Settings that a run records as it found them out."""
_PATHS = 5
"""The most paths of the data that a message names."""


@dataclass(frozen=True)
class WorkerJob:
    """What a worker is to do with its run.

    `resume`: go on from the last complete checkpoint. `launched`: by us, so end when the launcher is gone.
    `new`: the settings of a run that rank 0 is to make first. `overrides`: settings that `resume` changes; with "data"
    among them, the data are looked for there, with "recipe" the weights are quantized anew, with `lossy` also those
    that have no masters, and with "preset" masters and moments are rounded. `copy_to`: where to save what was loaded
    once more; "" for nowhere. `restart`: the run may be there or not, with a checkpoint or without; if it is there, of
    the settings `new` those that were `given` hold.
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
    """What rank 0 found out for all: the settings, how the run was started, its data, and the configuration of its
    model if that is one of transformers.

    `incomplete`: steps whose checkpoint is not complete. `left`: the run's mesh, if it is of another number of
    processes. `again`: it was there before; `restores`: from a checkpoint. `requantize`, `lossy`: whether weights of a
    checkpoint of another recipe are quantized anew, now or again. `edited`: what `config.toml` says anew, in words.
    """

    settings: TrainSettings
    launched: dict[str, Any]
    corpus: dict[str, Any]
    incomplete: tuple[int, ...] = ()
    left: str = ""
    again: bool = False
    restores: bool = False
    requantize: bool = False
    lossy: bool = False
    configuration: dict[str, Any] | None = None
    edited: tuple[str, ...] = ()


def create_run(run: RunDir, settings: TrainSettings, processes: int) -> None:
    """Make the folder of a new run, once nothing stands against it. Texts that cannot be read in any order are made
    into tokens first, in the folder, where they stay if something stands against the run after all.

    Raises:
        ConfigurationError: it exists, or the settings do not fit the processes or the data.
        CheckpointError: the weights to begin with are not those of this model.
    """
    run.check_new()
    settings.check_ranks(processes)
    kind = device_kind(settings.device)
    if kind == "cuda" and not launch.is_worker():  # else some are on other machines
        check_local_gpu(processes - 1)
    check_logs(settings)
    check_graphs(settings, torch.device(kind))
    configuration = None if settings.is_by_sizes else huggingface.read_configuration(settings.model)
    prepared = Preparation(settings)
    check_sampling(prepared.settings, prepared.described)
    spec = ModelSpec(prepared.settings, configuration)
    for warning in [*prepared.unused(), *spec.check()]:
        screen.say(warning)
    model, report = spec.converted()
    if report is not None:
        screen.say(*report.high_precision())
    if settings.init_from:
        initialization.check(prepared.settings, model)
    settings, corpus = prepared.collected(run.tokens)
    for warning in corpus.repeated():
        screen.say(warning)
    data.Windows(corpus, settings.seq_length, settings.heldout)
    run.create(settings, how_started(settings, processes), corpus.table(), configuration)


def how_started(settings: TrainSettings, processes: int) -> dict[str, Any]:
    """The table [launch] of a run that is started now."""
    of_openmp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": 4 on the outermost level
    if of_openmp and not (of_openmp.isdecimal() and 0 < int(of_openmp[:9]) <= 4096):
        raise ConfigurationError(f"OMP_NUM_THREADS = {of_openmp[:80]!r} is not a number of threads; unset it")
    threads = settings.threads or int(of_openmp or (1 if processes > 1 else os.cpu_count() or 1))
    return {
        "processes": processes,
        "mesh": str(settings.axes(processes)),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def of_mesh(settings: TrainSettings) -> int:
    """The processes of the mesh that the settings name; 0 if they name none."""
    return MeshSpec.parse(settings.mesh).processes if settings.mesh else 0


def changed(settings: TrainSettings, overrides: dict[str, Any], processes: int = 0) -> TrainSettings:
    """The settings of a run that is resumed with some of them changed, checked.

    `processes`: the size that the mesh will have. If the run's mesh has another and none is named, all are in dp_shard.
    """
    given = from_mapping(overrides, "resume")
    if settings.mesh and "dp_replicate" in given and "mesh" not in given:
        raise ConfigurationError(
            f"dp_replicate = {given['dp_replicate']} alone does not say what becomes of mesh = {settings.mesh}; name "
            "the whole mesh with --mesh"
        )
    if "mesh" in given:
        settings = replace(settings, dp_replicate=1)  # of the mesh that is left
    elif processes and of_mesh(settings) not in (0, processes):
        settings = replace(settings, mesh="", dp_replicate=1)
    result = replace(settings, **given)
    result.check()
    return result.resolved()


def check_logs(settings: TrainSettings) -> None:
    """See that a run can be logged as its settings say.

    Raises:
        ConfigurationError: a package or an account is missing, or a variable of the environment is none of its words.
    """
    trackers.check_trackers(settings)
    trackers.check_account(settings)
    logs.asked_level(settings)


def changes(run: RunDir, new: TrainSettings, given: Collection[str], processes: int) -> dict[str, Any]:
    """What `train --auto-resume` changes of a run that is there; see `restarts.overrides`."""
    before = run.read_config()[0]
    cache = before.token_cache
    made = [  # tokens, of texts that the same command names
        name
        for name in _DATA
        if any(run.holds_tokens(path) or (cache and Path(path).is_relative_to(cache)) for path in getattr(before, name))
    ]
    if made:
        made.append("data_format")  # of the texts; that of the tokens is recorded
    if not new.vocabulary:
        made.append("vocabulary")  # by the tokenizer, or by another release's rule
    kept = [name for name in given if name not in made]
    prepared = Preparation(new).settings if _PREPARED.intersection(kept) else new
    found = restarts.overrides(str(run.path), before, prepared, kept, processes)
    if new.checkpoints and "checkpoints" in given:
        found["checkpoints"] = new.checkpoints  # named now, though it may be the same
    return found


def check_copy(path: str) -> None:
    """Refuse to save over what exists.

    Raises:
        ConfigurationError: naming the path.
        CheckpointError: it cannot be reached.
    """
    if path and is_taken(path):
        raise ConfigurationError(f"{path} exists; name another folder with --copy-to")


def recorded_data(settings: TrainSettings, recorded: dict[str, Any]) -> data.Corpus:
    """The data of a run that is resumed, found where its settings say, and unchanged.

    Raises:
        ConfigurationError: a document is missing or differs.
    """

    def begun() -> None:
        if settings.data:
            more = len(settings.data) - _PATHS
            paths = ", ".join(settings.data[:_PATHS]) + (f" and {more} more" if more > 0 else "")
            screen.say(f"reading the data of the run: {paths}")

    corpus = data.from_table(recorded)
    if corpus.vocabulary > (settings.vocabulary or data.VOCABULARY):
        raise ConfigurationError(
            f"config.toml: vocabulary = {settings.vocabulary}, but [corpus] has {corpus.vocabulary} tokens; restore "
            "the file"
        )
    check_sampling(settings, corpus)
    return data.collect_recorded(settings.data, corpus, begun, settings.heldout_data)


def check_sampling(settings: TrainSettings, corpus: data.Corpus) -> None:
    """See that there is a tokenizer where texts are to be generated, the one that made the data.

    Raises:
        ConfigurationError: there is none, or it is another.
    """
    if settings.sample_prompt and not settings.sample_tokens:
        raise ConfigurationError("sample_prompt is given, but no text is generated; say how long with sample_tokens")
    if not settings.sample_tokens:
        return
    if not settings.tokenizer and not corpus.is_bytes:
        raise ConfigurationError(
            f"sample_tokens = {settings.sample_tokens}, but nothing says which tokenizer made the data; name it with "
            "--tokenizer, or leave sample_tokens out"
        )
    data.load_tokenizer(settings.tokenizer, settings.end_of_document, corpus.tokenizer)


def train_run(run: RunDir, order: WorkerJob) -> None:
    """Train until the run is done or told to stop."""
    stop = StopFlag()
    for number in launch.STOP_SIGNALS:
        signal.signal(number, lambda number, frame: stop.set())
    if order.launched or launch.is_of_torchrun():
        launch.die_with_parent()
    known = (order.new or asdict(run.read_config()[0])) | order.overrides
    deterministic(known["deterministic"])  # before the GPU is used, and before NCCL is
    place = _join(known["device"])
    task = _from_rank_0(lambda: _read(run, order, place), place)
    if place.device.type == "cpu":
        torch.set_num_threads(task.launched.get("threads", 1))
    try:
        with logs.logged(task.settings, place.rank, run.path):
            _train(run, order, place, task, stop)
    except QuantshardError:
        run.withdraw()
        raise


def _train(run: RunDir, order: WorkerJob, place: ProcessInfo, task: RunSetup, stop: StopFlag) -> None:
    _log.info("process %d is rank %d of %d, on %s", os.getpid(), place.rank, place.ranks, place.device)
    random.seed(task.settings.seed)
    np.random.seed(task.settings.seed % 2**32)
    init_from = None if task.restores else task.settings.init_from
    corpus = data.from_table(task.corpus)
    trainer = Trainer(task.settings, corpus, run, place, stop, init_from, task.configuration)
    with trainer.manager:
        restored = trainer.restore(requantize=task.requantize, lossy=task.lossy) if task.restores else None
        done = 0 if restored is None else restored.step
        if place.rank == 0 and task.again:  # only now, when nothing can fail any more
            run.forget_after(done)
        _record_start(run, task, place, trainer, restored)
        if place.rank == 0 and task.again:  # the record is there by now: a kill between the two loses nothing
            run.write_config(task.settings, task.launched, task.corpus)
        table = explain(trainer.model, trainer.optimizer)
        if place.rank == 0:
            run.write(run.parameters, table.to_json())
        _announce(run, task, place, trainer, table, restored, saves=done < task.settings.steps or bool(order.copy_to))
        if order.copy_to:
            trainer.save_to(order.copy_to, done)
            trainer.progress.note(f"saved again, from this mesh, in {order.copy_to}")
        with _tracked(run, task, place, trainer, done):
            trainer.train(done)


@contextmanager
def _tracked(run: RunDir, task: RunSetup, place: ProcessInfo, trainer: Trainer, done: int) -> Iterator[None]:
    """While it trains, rank 0 has the trackers that the settings ask for; if one cannot be had, all ranks are told."""

    def opened() -> None:
        trainer.trackers = trackers.open_trackers(task.settings, run, done)

    if task.settings.tensorboard or task.settings.wandb:
        _from_rank_0(opened, place)
    try:
        yield
    finally:
        for tracker in trainer.trackers:
            tracker.close(failed=sys.exc_info()[0] is not None)


def _record_start(run: RunDir, task: RunSetup, place: ProcessInfo, trainer: Trainer, restored: Restored | None) -> None:
    """Note what decides the bits from here on, and warn if it is not what did before."""
    if place.rank:
        return
    done = 0 if restored is None else restored.step
    now = environment.current_environment(task.settings, place.device)
    before = run.last_start() if done else {}
    if before and (changes := environment.differences(before.get("environment"), now)):
        more = f"; and {len(changes) - _CHANGES} more" if len(changes) > _CHANGES else ""
        trainer.progress.note(
            "WARNING: from here on losses may differ from those of the run without a stop, because "
            f"{'; '.join(changes[:_CHANGES])}{more} (starts.jsonl has both)",
            logging.WARNING,
        )
    start = {"step": done, "processes": place.ranks, "mesh": str(trainer.axes), "recipe": task.settings.recipe}
    if restored is not None and restored.requantized:
        start |= {"requantized": restored.requantized, "lossy": task.lossy}
    run.append(run.starts, start | {"settings": restarts.recorded(task.settings), "environment": now})


def _announce(
    run: RunDir,
    task: RunSetup,
    place: ProcessInfo,
    trainer: Trainer,
    table: Report,
    restored: Restored | None,
    *,
    saves: bool,
) -> None:
    note = trainer.progress.note
    trainer.progress.report(table.summary(f"{MORE}, and {run.parameters.name} in the run's folder has every parameter"))
    note(describe_run(task.settings, data.from_table(task.corpus), place))
    done = 0 if restored is None else restored.step
    for step in (step for step in task.incomplete if step > done):
        note(f"skipped the incomplete checkpoint {run.checkpoint(step)}; it is written anew when its step is reached")
    if task.left:
        now = task.settings.axes(place.ranks)
        note(f"the run had mesh = {task.left}, which is not of {place.ranks} processes; it goes on with mesh = {now}")
    if task.again and not task.restores:
        note(f"{run.path} has no complete checkpoint, so it begins again")
    lost = run.lost_steps(done) if place.rank == 0 else ""
    resumed_after = None if restored is None else done
    for text in filter(None, (*task.edited, lost, *shortfalls(task.settings, resumed_after))):
        note(text, logging.WARNING)
    if trainer.begun:
        note(trainer.begun)
    if restored is not None:
        note(f"resumed after step {done}, from {restored.path}")
        if restored.requantized:
            goes_on = "losses go on from other numbers than were saved"
            ends = "no step is left that would save it: ask for more with --steps, or save it elsewhere with --copy-to"
            note(f"{restored.requantized}; {goes_on if saves else ends}")


def _read(run: RunDir, order: WorkerJob, place: ProcessInfo) -> RunSetup:
    """On rank 0: make the run if it is new and not yet there, lock it, and read what all need."""
    if order.new is not None:
        new = TrainSettings(**from_mapping(order.new, "train"))
        if order.restart and run.is_begun():
            order = replace(order, resume=True, overrides=changes(run, new, order.given, place.ranks))
        else:
            create_run(run, new, place.ranks)
    check_copy(order.copy_to)
    run.check_ours()
    run.lock()
    settings, launched, corpus = run.read_config()
    configuration = run.read_model(settings)
    if not order.resume:
        return RunSetup(settings, launched, corpus, configuration=configuration)
    edited = restarts.edited(str(run.config), settings, run.read_starts())
    before, settings = settings, changed(settings, order.overrides, place.ranks)
    settings.check_ranks(place.ranks)
    check_logs(settings)
    run.follow(settings)
    run.check_place("checkpoints" in order.overrides)
    started = how_started(settings, place.ranks)
    if not settings.threads and launched["processes"] == place.ranks and "threads" in launched:
        started["threads"] = launched["threads"]  # the order of sums depends on them
    if not order.restart:
        run.last_complete()  # says what to do if there is none
    complete, incomplete = run.saved_steps()
    restarts.check_steps(str(run.path), settings.steps, complete)
    if not order.launched or "data" in order.overrides:  # else the launcher has just looked at them
        corpus = recorded_data(settings, corpus).table()
    left = before.mesh if not settings.mesh else ""
    there = (tuple(incomplete), left, True, bool(complete))
    return RunSetup(settings, started, corpus, *there, *_anew(run, order), configuration, edited)


def _anew(run: RunDir, order: WorkerJob) -> tuple[bool, bool]:
    """Whether weights of another recipe are quantized anew, and states of another preset rounded; and whether without
    masters too: as asked for now, or else as before, since until the first save the run's checkpoints are as before."""
    if not {"recipe", "preset"} & order.overrides.keys():
        return run.requantized()
    saved = run.saved_steps()[0][-1:]
    allowed = [start for start in run.read_starts() if start.get("lossy") is True and [start.get("step")] == saved]
    return True, order.lossy or bool(allowed)  # of what was not saved since


def _join(wanted: str) -> ProcessInfo:
    """Join the process group on a device: "cpu", "cuda" or "auto"."""
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
    """ "cpu" or "cuda", of "cpu", "cuda" or "auto".

    Raises:
        ConfigurationError: there is no GPU where one is wanted.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and kind == "cpu":
        raise ConfigurationError("device = 'cuda', but torch sees no GPU here; use --device cpu or auto")
    return kind if wanted == "auto" else wanted


def check_local_gpu(local: int) -> None:
    """See that a process of this machine has a GPU, by its number.

    Raises:
        ConfigurationError: there are fewer.
    """
    count = torch.cuda.device_count()
    if local >= count:
        raise ConfigurationError(
            f"process {local} of this machine has no GPU: there are {count}; start fewer processes, or set LOCAL_RANK"
        )


def _from_rank_0(read: Callable[[], Any], place: ProcessInfo) -> Any:
    """What `read` returns on rank 0, on all ranks; what it raises there, everywhere."""
    sent: list[Any] = [None, None]
    if place.rank == 0:
        try:
            sent = [read(), None]
        except QuantshardError as error:
            sent = [None, str(error)]
    dist.broadcast_object_list(sent, src=0)
    if sent[1] is not None:
        raise ConfigurationError(sent[1])
    return sent[0]


def main(run: Path, order: WorkerJob) -> NoReturn:
    """Do the work and end the process: with 0, or after one line to the launcher with 1."""
    folder = RunDir(run)
    try:
        train_run(folder, order)
        dist.destroy_process_group()
        code = 0
    except BaseException as error:  # a process that fails must say so and end, whatever it was
        line = launch.report_failure(error, folder.logs)
        if line and not order.launched:
            screen.complain(f"process {os.environ.get('RANK')}: {line}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    end_at_once(code)  # no destructor may wait for processes that are gone
