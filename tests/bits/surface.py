"""What users and files see: signatures, texts of `--help`, keys and dtypes of state dicts, files of checkpoints."""

from __future__ import annotations

import enum
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import typer
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

import quantshard
from quantshard.tools.cli import app
from tests.bits.cells import MORE_OPTIMIZERS, OPTIMIZERS, RECIPES, WRAPPINGS, Cell, built, optimizer_of, save_checkpoint
from tests.distributed.pool import run_ranks

INTERNAL = tuple(f"quantshard.{name}" for name in ("foreign", "interop", "kernels", "private_torch", "tools"))
"""Modules that only the library imports, though some have an `__all__`."""
WITHOUT_ALL = ("quantshard.errors", "quantshard.recipe")


def public_modules() -> Iterator[Any]:
    yield quantshard
    paths = [info.name for info in pkgutil.walk_packages(quantshard.__path__, "quantshard.")]
    for path in sorted(paths, key=lambda path: (path.startswith("quantshard.compat"), path)):
        if not path.startswith(INTERNAL):
            module = importlib.import_module(path)
            if hasattr(module, "__all__") or path in WITHOUT_ALL:
                yield module


def names_of(module: Any) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(name for name in getattr(module, "__all__", own) if not name.startswith("_"))


def signature(value: Any) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):  # of some built-in classes
        return "(...)"


def class_lines(owner: type) -> Iterator[str]:
    """The signatures of a class and of its public methods, and the names of those inherited from quantshard's."""
    if issubclass(owner, enum.Enum):
        yield f": {', '.join(f'{item.name}={item.value!r}' for item in owner)}"
        return
    yield signature(owner)
    inherited = set()
    for base in owner.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("quantshard") else ():
            function = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if base is owner:
                yield f".{name}{signature(function)}{'' if function is value else f' {type(value).__name__}'}"
            else:
                inherited.add(name)
    if inherited:
        yield f" inherits {' '.join(sorted(inherited))}"


def signatures() -> Iterator[str]:
    """Every public name; a name of what another public name stands for says so."""
    places: dict[int, str] = {}
    for module in public_modules():
        for name in names_of(module):
            value, path = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.ismodule(value) or not callable(value):
                yield f"{path}: {type(value).__name__}"
            elif id(value) in places:
                yield f"{path} is {places[id(value)]}"
            else:
                places[id(value)] = path
                yield from (path + line for line in (class_lines if inspect.isclass(value) else lines_of)(value))


def lines_of(function: Any) -> list[str]:
    return [signature(function)]


def help_texts() -> Iterator[str]:
    line = app()
    calls = [["--help"], *([name, "--help"] for name in sorted(typer.main.get_command(line).commands))]
    for call in [*calls, ["train", "--help-all"]]:
        yield f"$ quantshard {' '.join(call)}"
        yield from map(str.rstrip, CliRunner().invoke(line, call, prog_name="quantshard").output.splitlines())


def entries(state: dict[str, Any]) -> str:
    return " ".join(f"{name}:{value.dtype}" for name, value in sorted(state.items()) if isinstance(value, Tensor))


def state_dicts() -> Iterator[str]:
    """A model's entries by recipe; those of any parameter's states by recipe and optimizer, and those of groups."""
    for model, recipe in [*(("dense", name) for name in RECIPES), ("experts", "mxfp8"), ("llama", "mxfp8")]:
        for name, value in built(Cell("oracle", model, recipe, "adam", "alone")).state_dict().items():
            yield f"{model} {recipe}: {name} {value.dtype} {tuple(value.shape)}"
    for recipe, optimizer in product(RECIPES, OPTIMIZERS | MORE_OPTIMIZERS):
        cell = Cell("oracle", "experts", recipe, optimizer, "alone")
        state = optimizer_of(cell, built(cell)).state_dict()
        kinds = sorted({entries(states) for states in state["state"].values()})
        yield f"{recipe} {optimizer}: {' | '.join([*kinds, *sorted(set().union(*state['param_groups']))])}"


def content_of(path: Path) -> bytes:
    """A file of a checkpoint without its path, its time and its random number."""
    if path.name == ".metadata":
        return str(replace(FileSystemReader(path.parent).read_metadata(), storage_meta=None)).encode()
    if path.name == "manifest.json":
        return " ".join(json.loads(path.read_text())).encode()
    return path.read_bytes()


def checkpoint_files() -> Iterator[str]:
    for recipe, wrapping in product(("bf16", "delayed", "mxfp8", "nvfp4"), ("fsdp1", "fsdp2")):
        cell = Cell("oracle", "experts", recipe, "adam-lean8", wrapping)
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(WRAPPINGS[wrapping], save_checkpoint, f"{folder}/checkpoint", cell)
            for path in sorted(Path(folder, "checkpoint").iterdir()):
                yield f"{recipe} {wrapping} {path.name}: {hashlib.sha256(content_of(path)).hexdigest()[:16]}"


FILES: dict[str, Callable[[], Iterator[str]]] = {
    "signatures.txt": signatures,
    "help.txt": help_texts,
    "state_dicts.txt": state_dicts,
    "checkpoints.txt": checkpoint_files,
}
