"""The ways to save and load a model and its optimizer that the tests compare."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from quantshard import checkpoints, private_torch
from quantshard.optimizers import FusedAdam
from tests.distributed.models import Case, build, optimizer_of, sha, train
from tests.distributed.pool import GROUP_SECONDS

SHAPES = ((40, 150), (150, 33), (33, 1))
"""Blocks are cut, rows of 4-bit codes are odd, and some ranks hold nothing of the last layer."""

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Run:
    """A model in training, and a folder that all ranks share."""

    case: Case
    model: nn.Sequential
    optimizer: FusedAdam
    folder: Path

    def train(self, steps: int) -> list[float]:
        first = self.optimizer.param_groups[0]["step"]
        return train(self.model, self.optimizer, self.case, first, first + steps)

    def state(self) -> dict[str, Any]:
        """The plain idiom's."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def named_state(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def load_named(self, state: dict[str, Any], options: StateDictOptions | None = None) -> None:
        result = set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        assert not result.missing_keys and not result.unexpected_keys

    def held(self) -> dict[str, str]:
        """Hashes of all that this rank holds, and what no tensor says."""
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            tensors.update({f"optimizer.{index}.{name}": value for name, value in entries.items()})
        found = {name: sha(private_torch.local_tensor(value)) for name, value in tensors.items()}
        for index, group in enumerate(self.optimizer.param_groups):
            found.update({f"group {index}.{name}": repr(value) for name, value in group.items() if name != "params"})
        return found | {"torch's generator": sha(torch.get_rng_state())}


def new_run(case: Case, folder: str) -> Run:
    model = build(case)
    return Run(case, model, optimizer_of(model, case), Path(folder))


def to_all(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def on_rank_0(function: Callable[..., object], *args: object) -> None:
    if dist.get_rank() == 0:
        function(*args)
    dist.barrier()


# Ways to save and load ------------------------------------------------------------------------------------------------
# `save` returns what `load` gets; both run on every rank.

Save = Callable[[Run, Path], Any]
Load = Callable[[Run, Any], None]


def get(options: StateDictOptions | None = None) -> Save:
    return lambda run, path: run.named_state(options)


def set_(options: StateDictOptions | None = None) -> Load:
    return lambda run, state: run.load_named(state, options)


def get_apart(run: Run, path: Path) -> Any:
    return get_model_state_dict(run.model), get_optimizer_state_dict(run.model, run.optimizer)


def set_apart(run: Run, state: Any) -> None:
    set_model_state_dict(run.model, state[0])
    set_optimizer_state_dict(run.model, run.optimizer, state[1])


def broadcast_optimizer(run: Run, state: dict[str, Any]) -> None:
    assert bool(state["model"]) == (dist.get_rank() == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(run.model, to_all(state["model"]), options=FULL)
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=options)


def broadcast_both(run: Run, state: dict[str, Any]) -> None:
    mine = state["model"] if dist.get_rank() == 0 else None
    result = checkpoints.load_from_rank0(run.model, mine)
    assert not result.missing_keys and not result.unexpected_keys
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=options)


def get_loosely(run: Run, path: Path) -> Any:
    state = run.named_state()
    state["model"]["0.unknown"] = torch.ones(3)
    return state


def set_loosely(run: Run, state: dict[str, Any]) -> None:
    """A layer is missing and a key is unknown; then the layer comes."""
    last = {key: state["model"].pop(key) for key in list(state["model"]) if key.startswith("2.")}
    loosely = StateDictOptions(strict=False)
    result = set_model_state_dict(run.model, state["model"], options=loosely)
    assert sorted(result.missing_keys) == sorted(last) and result.unexpected_keys == ["0.unknown"]
    assert not set_model_state_dict(run.model, last, options=loosely).unexpected_keys
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=loosely)


class AppState(Stateful):
    """As PyTorch's tutorial on distributed checkpoints has it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return self.run.named_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.run.load_named(state_dict)


def save_app(run: Run, path: Path) -> Path:
    dcp.save({"app": AppState(run)}, checkpoint_id=path)
    return path


def load_app(run: Run, path: Path) -> None:
    dcp.load({"app": AppState(run)}, checkpoint_id=path)


def save_plain(run: Run, path: Path) -> Path:
    dcp.save(run.state(), checkpoint_id=path)
    return path


def load_plain(run: Run, path: Path) -> None:
    state = run.state()
    dcp.load(state, checkpoint_id=path)
    run.load(state)


def save_named(options: StateDictOptions | None = None) -> Save:
    def save(run: Run, path: Path) -> Path:
        dcp.save(run.named_state(options), checkpoint_id=path)
        return path

    return save


def load_named(options: StateDictOptions | None = None) -> Load:
    def load(run: Run, path: Path) -> None:
        state = run.named_state(options)
        dcp.load(state, checkpoint_id=path)
        run.load_named(state, options)

    return load


def save_ours(run: Run, path: Path) -> Path:
    checkpoints.save(path, run.model, run.optimizer)
    return path


def load_ours(run: Run, path: Path) -> None:
    checkpoints.load(path, run.model, run.optimizer)


def save_async(with_writer: bool) -> Save:
    """Nothing is written before the weights have changed."""

    def save(run: Run, path: Path) -> Path:
        trained, write = threading.Event(), FileSystemWriter.write_data
        waited = []

        def wait_and_write(*args: Any) -> Any:
            waited.append(trained.wait(GROUP_SECONDS))
            return write(*args)

        with mock.patch.object(FileSystemWriter, "write_data", wait_and_write):
            where = {"storage_writer": FileSystemWriter(path)} if with_writer else {"checkpoint_id": path}
            future = dcp.async_save(run.state(), process_group=dist.new_group(backend="gloo"), **where)
            before = run.held()
            run.train(1)
            assert before.items() - run.held().items()
            trained.set()
            future.result()
        assert waited == [True]
        return path

    return save


def save_torch(run: Run, path: Path) -> Path:
    """One file, by rank 0, of numbered optimizer states where there is one process, else of named ones."""
    state = run.state() if run.case.mesh is None else run.named_state(ON_RANK_0)
    on_rank_0(torch.save, state, path)
    return path


def load_torch(mmap: bool, assign: bool = False) -> Load:
    def load(run: Run, path: Path) -> None:
        state = torch.load(path, weights_only=True, mmap=mmap)
        if run.case.mesh is not None:
            run.load_named(state, FULL)
            return
        run.model.load_state_dict(state["model"], assign=assign)
        run.optimizer.load_state_dict(state["optimizer"])

    return load


def save_safetensors(run: Run, path: Path) -> Any:
    safetensors = importlib.import_module("safetensors.torch")
    state = run.named_state(ON_RANK_0)
    on_rank_0(safetensors.save_file, state["model"], path)
    return path, to_all(state["optimizer"])


def load_safetensors(run: Run, saved: Any) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=safetensors.load_file(saved[0]),
        optim_state_dict=saved[1],
        options=FULL,
    )


def save_dcp_to_torch(run: Run, path: Path) -> Path:
    dcp.save(run.state() if run.case.mesh is None else run.named_state(), checkpoint_id=path)
    file = path.with_suffix(".pt")
    on_rank_0(dcp_to_torch_save, path, file)
    return file


def save_torch_to_dcp(run: Run, path: Path) -> Path:
    file = path.with_suffix(".pt")
    on_rank_0(torch.save, run.named_state(ON_RANK_0), file)
    on_rank_0(torch_save_to_dcp, file, path)
    return path


SAFETENSORS = "safetensors (the model)"
WAYS: dict[str, tuple[Save, Load]] = {
    "get_state_dict, set_state_dict": (get(), set_()),
    "  the model and the optimizer apart": (get_apart, set_apart),
    "  cpu_offload": (get(StateDictOptions(cpu_offload=True)), set_(StateDictOptions(cpu_offload=True))),
    "  full_state_dict": (get(FULL), set_(FULL)),
    "  full_state_dict, cpu_offload: on rank 0": (
        get(ON_RANK_0),
        lambda run, state: run.load_named(to_all(state), FULL),
    ),
    "  optimizer: broadcast_from_rank0": (get(ON_RANK_0), broadcast_optimizer),
    "  and the model: load_from_rank0": (get(ON_RANK_0), broadcast_both),
    "  flatten_optimizer_state_dict": (get(FLAT), set_(FLAT)),
    "  flattened and full": (get(replace(FULL, flatten_optimizer_state_dict=True)), set_(FULL)),
    "  strict=False": (get_loosely, set_loosely),
    "dcp.save, dcp.load: state_dict()": (save_plain, load_plain),
    "  get_state_dict": (save_named(), load_named()),
    "  flattened": (save_named(FLAT), load_named(FLAT)),
    "  a Stateful": (save_app, load_app),
    "checkpoints.save, load": (save_ours, load_ours),
    "torch.save, torch.load": (save_torch, load_torch(mmap=False)),
    "  mmap": (save_torch, load_torch(mmap=True)),
    "  assign": (save_torch, load_torch(mmap=False, assign=True)),
    SAFETENSORS: (save_safetensors, load_safetensors),
    "dcp_to_torch_save": (save_dcp_to_torch, load_torch(mmap=False)),
    "torch_save_to_dcp": (save_torch_to_dcp, load_named()),
    "dcp.async_save while training": (save_async(with_writer=False), load_plain),
    "  with a FileSystemWriter": (save_async(with_writer=True), load_plain),
}
if importlib.util.find_spec("safetensors") is None:
    del WAYS[SAFETENSORS]
