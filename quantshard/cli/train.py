"""`quantshard train` and `quantshard resume`: from flags to processes.

What can be refused is refused here, in one process and before a file is written: unknown recipes, sizes that do not
fit, missing data, a folder that exists. Only then are the processes started; each of them goes to `trainer.worker`.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from dataclasses import Field, asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quantshard.errors import ConfigurationError
from quantshard.terminal import inputs
from quantshard.trainer import initialization, launch, worker
from quantshard.trainer.config import TYPES, merge, setting_fields
from quantshard.trainer.run_dir import RunDir
from quantshard.trainer.worker import WorkerJob

_ANNOTATIONS: dict[type, Any] = {
    tuple: list[str] | None, str: str | None, int: int | None, float: float | None
}  # fmt: skip

_PROCESSES = "processes to start here. Default: the product of the mesh, or "


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("train", no_args_is_help=True)(_with_flags(train))
    app.command("resume", no_args_is_help=True)(resume)
    app.command("worker", hidden=True)(work)


def train(
    run: Annotated[
        Path, typer.Option("--run", "--run-dir", metavar="DIR", help="folder of the run; must be new")
    ],  # torchrun takes --run for its own --run-path on Python 3.11 and before
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=_PROCESSES + "one for each GPU, or 1")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file of settings; flags go first")] = None,
    more_data: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", rich_help_panel="Data", help="more data, after --data: texts/*.txt"),
    ] = None,
    **flags: Any,
) -> None:
    """Train a byte-level language model with quantized weights, sharded over processes, into a new folder.

    Without --data it learns the source text of Python's standard library. Under torchrun it starts no processes.
    """
    if more_data:  # the shell's own expansion: --data texts/*.txt
        if not flags["data"]:
            raise ConfigurationError(f"unexpected argument {more_data[0]!r}; data are named with --data")
        flags["data"] = [*flags["data"], *more_data]
    if flags["data"] is not None:
        flags["data"] = tuple(flags["data"])
    if config is not None:
        inputs.existing(config, "a TOML file of settings")
    settings = merge(flags, config)
    if settings.init_from:
        settings = merge(flags, config, initialization.sizes(settings.init_from))
    settings.check()
    settings = settings.resolved()
    if launch.is_worker():
        worker.main(run, WorkerJob(resume=False, launched=False, new=asdict(settings)))
    processes = nproc_per_node or worker.of_mesh(settings) or launch.default_processes()
    launch.check_processes(processes)
    worker.create_run(RunDir(run), settings, processes)
    _launch(processes, run, WorkerJob(resume=False, launched=True))


def resume(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the run")],
    nproc_per_node: Annotated[int | None, typer.Option(min=1, metavar="N", help=_PROCESSES + "as before")] = None,
    steps: Annotated[int | None, typer.Option(metavar="S", help="train up to this step instead")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="go on with another mesh, as in train. Default: as before, or all in dp_shard")
    ] = None,
    dp_replicate: Annotated[int | None, typer.Option(metavar="R", help="copies of the model (HSDP) instead")] = None,
    keep_last: Annotated[int | None, typer.Option(metavar="K", help="newest checkpoints that are kept instead")] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="N", help="checkpoints that are kept too instead")] = None,
    async_save: Annotated[
        bool | None, typer.Option(help="save in the background or not. Default: as before", show_default=False)
    ] = None,
    deterministic: Annotated[
        bool | None, typer.Option(help="turn deterministic mode on or off. Default: as before", show_default=False)
    ] = None,
    data_: Annotated[
        list[str] | None, typer.Option("--data", metavar="PATH", help="where the data are now, unchanged; repeatable")
    ] = None,
    recipe_: Annotated[
        str | None,
        typer.Option("--recipe", metavar="NAME", help="go on with weights of another recipe, made of the masters"),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="with --recipe: made of the codes where there are no masters")
    ] = False,
    copy_to: Annotated[
        str, typer.Option(metavar="CKPT", help="save what was loaded there too, from this mesh: diff finds it equal")
    ] = "",
) -> None:
    """Go on with a run from its last complete checkpoint, on the mesh and processes of before or on others."""
    folder = RunDir(run)
    given: dict[str, Any] = {"steps": steps, "mesh": mesh, "dp_replicate": dp_replicate}
    given |= {"deterministic": deterministic, "keep_last": keep_last, "keep_every": keep_every}
    given |= {"async_save": async_save, "recipe": recipe_}
    if lossy and recipe_ is None:
        raise ConfigurationError("--lossy is about --recipe, which is not given; name a recipe or leave it out")
    if data_:
        given["data"] = [str(Path(path).absolute()) for path in data_]
    overrides = {name: value for name, value in given.items() if value is not None}
    order = WorkerJob(resume=True, launched=not launch.is_worker(), overrides=overrides, copy_to=copy_to, lossy=lossy)
    if launch.is_worker():
        worker.main(run, order)
    folder.check_ours()
    settings, launched, corpus = folder.read_config()
    processes = nproc_per_node or worker.of_mesh(worker.changed(settings, overrides)) or int(launched["processes"])
    launch.check_processes(processes)
    settings = worker.changed(settings, overrides, processes)
    settings.check_ranks(processes)
    worker.check_logs(settings)
    folder.last_complete()
    worker.check_copy(copy_to)
    if worker.recorded_data(settings, corpus).table() != corpus:  # under other names, where the workers look, too
        order = replace(order, overrides=overrides | {"data": list(settings.data)})
    _launch(processes, run, order)


def work(run: Path, order: str) -> None:
    """One process of a run, as `train` and `resume` start it."""
    worker.main(run, WorkerJob(**json.loads(order)))


def _launch(processes: int, run: Path, order: WorkerJob) -> None:
    try:
        launch.launch(processes, ["-m", "quantshard", "worker", str(run), json.dumps(asdict(order))])
    except launch.LaunchError as error:
        if error.crashed and RunDir(run).saved_steps()[0]:
            way_out = f"{error}. Go on from the last checkpoint with: quantshard resume {run}"
            raise launch.LaunchError(way_out, crashed=True) from None
        raise


def _help(setting: Field[Any]) -> str:
    """What a setting is, and its default: the option's own is None, for the file goes before the default."""
    said, default = setting.metadata["help"], setting.default
    if isinstance(default, bool):
        return f"turn off: {said}" if default else str(said)
    return str(said) if default in ((), "") else f"{said}. Default: {default}"


def _flags(setting: Field[Any]) -> Iterator[inspect.Parameter]:
    """The parameters of a setting. One that is on or off has two, `--x` and `--no-x`, of which the one is shown that
    changes the default: both would leave no room for what they mean."""
    name, about = setting.name, {"help": _help(setting), "rich_help_panel": setting.metadata["panel"]}
    if isinstance(setting.default, bool):
        for key, hidden in ((name, setting.default), (f"no_{name}", not setting.default)):
            option = typer.Option(f"--{key.replace('_', '-')}", hidden=hidden, show_default=False, **about)
            yield inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
            )
    else:
        annotation: Any = _ANNOTATIONS[TYPES[name]]
        option = typer.Option(show_default=False, **about)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
        )


def _with_flags(command: Any) -> Any:
    """`command` with the flags of each setting in place of its `**flags`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    switches = [setting.name for setting in setting_fields() if isinstance(setting.default, bool)]

    @functools.wraps(command)
    def flagged(**arguments: Any) -> None:
        for name in switches:
            on, off = arguments[name], arguments.pop(f"no_{name}")
            if on and off:
                raise ConfigurationError(f"--{name} and --no-{name} are both given; leave one out".replace("_", "-"))
            arguments[name] = True if on else False if off else None
        command(**arguments)

    flags = [parameter for setting in setting_fields() for parameter in _flags(setting)]
    flagged.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]  # what typer reads
    return flagged
