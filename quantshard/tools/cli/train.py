"""`quantshard train` and `resume`: parse flags and launch processes. `quantshard tokenize`: make token shards.

Invalid input (unknown recipes, incompatible sizes, missing data, an existing folder) is rejected here, in one process
and before any file is written. Then the processes are started; each of them runs `trainer.worker`.
"""

import functools
import inspect
import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from quantshard.errors import ConfigurationError
from quantshard.tools.cli.exchange import size
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import say
from quantshard.tools.trainer import launch, worker
from quantshard.tools.trainer.data.shards import ShardedSource
from quantshard.tools.trainer.data.sources import RAW, SHARDS, TextOptions, distinct, find, joined
from quantshard.tools.trainer.data.tokenizer import load_tokenizer
from quantshard.tools.trainer.models import initialization
from quantshard.tools.trainer.run_dir import RunDir, recorded_processes
from quantshard.tools.trainer.settings.config import (
    KINDS,
    TrainSettings,
    from_mapping,
    merged_values,
    read_settings_file,
)
from quantshard.tools.trainer.settings.values import AUTO, FLOAT32_STATES, STATE_SETTINGS, check_value, named_preset
from quantshard.tools.trainer.worker import WorkerJob

_COMMON = frozenset(
    "model recipe init_from seq_length data steps global_batch lr schedule warmup save_every eval_every recompute "
    "mesh".split()
)
"""Settings that `--help` shows; `--help-all` shows all."""


def _show_all(context: typer.Context, asked: bool) -> None:
    if not asked:
        return
    for option in context.command.params:
        if option.name in KINDS:
            option.hidden = False  # type: ignore[attr-defined]  # attribute of options
    if text := context.get_help():  # empty if typer has already printed the help
        say(text)
    raise typer.Exit


def train(
    run: Path = Option(
        ..., "--run", "--run-dir", metavar="DIR", help="new folder of the run", show_default=False
    ),  # torchrun takes --run for its own --run-path on Python 3.11 and before
    nproc_per_node: int | None = Option(
        None,
        min=1,
        metavar="N",
        help="number of processes. Default: mesh size or as in FILE, one per GPU, or 1",
    ),
    config: Path | None = Option(None, metavar="FILE", help="TOML settings; flags take precedence"),
    auto_resume: bool = Option(False, "--auto-resume", help="resume DIR if it exists", show_default=False),
    help_all: bool = Option(
        False, "--help-all", is_eager=True, callback=_show_all, help="show every setting", show_default=False
    ),
    more_data: list[str] | None = Argument(
        None, metavar="PATH", rich_help_panel="Data", help="more data after --data, such as texts/*.txt"
    ),
    **flags: Any,
) -> None:
    """Train a language model with quantized weights on several processes, into a new folder."""
    if more_data:  # the shell expanded --data texts/*.txt
        if not flags["data"]:
            raise ConfigurationError(f"unexpected argument {more_data[0]!r}; data are named with --data")
        flags["data"] = [*flags["data"], *more_data]
    flag_values = {
        name: tuple(flag) if isinstance(flag, list) else flag for name, flag in flags.items() if flag is not None
    }
    content = {}
    if config is not None:
        content = read_settings_file(outputs.existing(config, "a TOML file of settings"), follow=True)
    folder = RunDir(run)
    # only rank 0 of a launcher creates the run
    exists = auto_resume and (folder.is_begun() or os.environ.get("RANK", "0") != "0")
    values = merged_values(flag_values, from_mapping(content, str(config)))
    if exists:  # the settings of the existing run are checked, with the changes
        settings = TrainSettings(**values)
    else:
        file_values = {name: value for name, value in values.items() if name not in flag_values}
        model_values = initialization.chosen(flag_values, file_values)
        defaults = initialization.fine_tuning_defaults(model_values)
        if defaults and not launch.is_worker():
            say("defaults for fine-tuning: " + ", ".join(f"{name} = {value}" for name, value in defaults.items()))
        settings = TrainSettings(**(defaults | model_values))
        settings.check()
    settings = settings.resolved()
    decided = (*values, *(STATE_SETTINGS if values.get("preset") == FLOAT32_STATES else ()))
    order = WorkerJob(resume=False, launched=not launch.is_worker(), restart=auto_resume)
    if launch.is_worker():
        worker.main(run, replace(order, new=asdict(settings), given=decided))
    processes = nproc_per_node or worker.of_mesh(settings) or recorded_processes(content, str(config))
    processes = processes or launch.default_processes()
    launch.check_processes(processes)
    if auto_resume and folder.is_begun():
        changed = worker.changes(folder, settings, decided, processes)
        _go_on(folder, replace(order, resume=True, overrides=changed), processes)
        return
    worker.create_run(folder, settings, processes)
    _launch(processes, folder, replace(order, restart=False))


def resume(
    run: Path = Argument(..., metavar="DIR", help="folder of the run"),
    nproc_per_node: int | None = Option(
        None, min=1, metavar="N", help="number of processes. Default: mesh size, or as before"
    ),
    steps: int | None = Option(None, metavar="S", help="new number of steps"),
    mesh: str | None = Option(None, help="new mesh. Default: as before, or all in dp_shard"),
    data_: list[str] | None = Option(None, "--data", metavar="PATH", help="new place of the same data; repeatable"),
    heldout_data: list[str] | None = Option(
        None, metavar="PATH", help="new place of the same held-out data; repeatable"
    ),
    tokenizer: str | None = Option(None, metavar="DIR", help="new place of the same tokenizer"),
    recipe_: str | None = Option(
        None, "--recipe", metavar="NAME", help="requantize the weights from the masters by another recipe"
    ),
    preset: str | None = Option(
        None, metavar="NAME", help=f"new preset for masters and moments, or {FLOAT32_STATES}: float32"
    ),
    lossy: bool = Option(False, "--lossy", help="with --recipe: requantize from the codes if there are no masters"),
    checkpoints: str | None = Option(None, metavar="PLACE", help="new folder or URL of the run's checkpoints"),
    copy_to: str = Option("", metavar="CKPT", help="also save what was loaded to CKPT, from the new mesh"),
) -> None:
    """Resume a run from its last complete checkpoint, on the same or another mesh."""
    folder = RunDir(run)
    changes: dict[str, Any] = {"steps": steps, "mesh": mesh, "recipe": recipe_, "checkpoints": checkpoints}
    if lossy and recipe_ is None:
        raise ConfigurationError("--lossy needs --recipe; name a recipe, or leave --lossy out")
    if preset is not None:
        changes |= dict.fromkeys(STATE_SETTINGS, AUTO) | {"preset": named_preset(preset), "master_weights": True}
    for name, paths in (("data", data_), ("heldout_data", heldout_data)):
        if paths:
            changes[name] = [str(Path(path).absolute()) for path in paths]
    if tokenizer:
        changes["tokenizer"] = str(Path(tokenizer).absolute())
    overrides = {name: value for name, value in changes.items() if value is not None}
    order = WorkerJob(resume=True, launched=not launch.is_worker(), overrides=overrides, copy_to=copy_to, lossy=lossy)
    if launch.is_worker():
        worker.main(run, order)
    _go_on(folder, order, nproc_per_node)


def _go_on(folder: RunDir, order: WorkerJob, processes: int | None) -> None:
    folder.check_ours()
    settings, launched, corpus = folder.read_config()
    mesh_processes = worker.of_mesh(worker.changed(settings, order.overrides))
    processes = processes or mesh_processes or int(launched["processes"])
    launch.check_processes(processes)
    settings = worker.check_resumed(folder, order, settings, processes)
    # If the data have moved, the workers get the new paths.
    if worker.recorded_data(settings, corpus).table() != corpus:
        places = {"data": list(settings.data), "heldout_data": list(settings.heldout_data)}
        order = replace(order, overrides=order.overrides | places)
    _launch(processes, folder, order)


def work(run: Path, order: str) -> None:
    """One process of a run, as `train` and `resume` start it."""
    worker.main(run, WorkerJob(**json.loads(order)))


def _launch(processes: int, folder: RunDir, order: WorkerJob) -> None:
    # The workers print nothing until they have a model.
    say(f"starting {processes} process{'es' * (processes > 1)}")
    try:
        arguments = ["worker", str(folder.path), json.dumps(asdict(order))]
        launch.launch(processes, [launch.command_script(), *arguments])
    except launch.LaunchError as error:
        if error.crashed and folder.saved_steps():
            way_out = f"{error}. To resume from the last checkpoint: quantshard resume {folder.path}"
            raise launch.LaunchError(way_out, crashed=True) from None
        raise


def with_flags(command: Any) -> Any:
    """Replace the `**flags` of a command by the options of all settings; those that are not given are None."""
    signature = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in signature if parameter.kind is not parameter.VAR_KEYWORD]
    for setting in fields(TrainSettings):
        name, default, text = setting.name, setting.default, setting.metadata["help"]
        option = Option(
            help=text if default in ((), "") else f"{text}. Default: {default}",
            rich_help_panel=setting.metadata["panel"],
            hidden=name not in _COMMON,
            show_default=False,
        )
        kind: Any = list[str] if default == () else type(default)
        annotation = Annotated[kind | None, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:
        command(**arguments)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    return with_options


def tokenize(
    paths: list[str] = Argument(..., metavar="PATH...", help="files or folders, as for train --data"),
    out: Path = Option(..., help="folder for the shards: new, or from an interrupted run of the same command"),
    tokenizer: str = Option("", metavar="DIR", help="tokenizer.json or its folder. Default: bytes"),
    end_of_document: str = Option(
        "", metavar="TOKEN", help="token at the end of a document. Default: the tokenizer's eos_token"
    ),
    text_field: str = Option("text", metavar="NAME", help="key or column with the text"),
    data_split: str = Option("train", metavar="NAME", help="split to use from a dataset folder"),
    data_format: str = Option("auto", help="auto: by file name; text: read every file as text"),
    shard_size: str = Option("100MB", help="approximate characters per shard"),
) -> None:
    """Tokenize texts into shards on all CPUs, for `quantshard train --data OUT`.

    The same command continues an interrupted call.
    """
    for name, value in {"text_field": text_field, "data_split": data_split, "data_format": data_format}.items():
        check_value(name, value, KINDS[name])
    source = joined(distinct(find(paths, data_format, data_split)))
    loaded_tokenizer = load_tokenizer(tokenizer, end_of_document)
    if source.kind in (RAW, SHARDS):
        raise ConfigurationError(f"{source.path} holds tokens already; pass it to quantshard train --data")
    sharded = ShardedSource(
        source, loaded_tokenizer, tokenizer, TextOptions(text_field, data_split), size(shard_size, "--shard-size")
    )
    index = sharded.write(out.absolute())
    say(
        f"wrote {out}: {index.documents:,} documents, {index.tokens:,} tokens of {index.vocabulary:,} in "
        f"{len(index.shards)} shards of {index.dtype}; to train on them: quantshard train --data {out}"
    )
