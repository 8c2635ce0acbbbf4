"""What the private names of PyTorch that quantshard uses are in the installed version, beside what they were when the
tests passed with it: `python -m tests.private_names`, a part of `make check`; with `--record` it writes them down.

A name that is not there costs its own feature (`quantshard.private_torch.lookup`); one that takes other arguments, or
whose objects have other attributes, is what this finds before a test of a feature does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

import quantshard
from quantshard.private_torch import lookup

TABLE = Path(__file__).with_suffix(".json")

_FSDP = "torch.distributed.fsdp._fully_shard"
ATTRIBUTES = {
    "torch.Tensor": "_version _post_accumulate_grad_hooks",
    "torch.nn.Module": "_forward_pre_hooks _forward_hooks _parameters _buffers",
    "torch.autograd.Function": "maybe_clear_saved_tensors",
    "torch.autograd.Variable._execution_engine": "queue_callback",
    "torch.optim.Optimizer": "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks "
    "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
    "torch.utils.checkpoint._CheckpointFrame": "recompute_fn",
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.distributed.device_mesh.DeviceMesh": "_get_root_mesh",
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager": "stage close",
    "torch.distributed.fsdp.fully_shard": "state",
    f"{_FSDP}._fsdp_state.FSDPState": "_is_root _auto_reshard_after_forward _fsdp_param_group _fsdp_param_groups",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": "fsdp_params mesh_info post_forward_mesh_info _reshard_after_forward "
    "reshard_after_backward",
    f"{_FSDP}._fsdp_param.FSDPParam": "sharded_param _module_info sharded_state padded_sharded_param_size mp_policy",
    f"{_FSDP}._fsdp_param.ParamModuleInfo": "module param_name shared_modules shared_param_names",
    f"{_FSDP}._fsdp_common.FSDPMeshInfo": "shard_mesh_size",
}
"""Attributes of PyTorch's objects that private_torch reads, by class, module or function."""

FIELDS = ("torch.distributed.checkpoint.metadata.TensorProperties",)
"""Classes whose fields files are read by, though they are public."""

MISSING = "missing"


def installed() -> str:
    """The minor version of PyTorch that runs, e.g. "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])


def described() -> dict[str, str]:
    """Each name and attribute as it is in this version."""
    found = {name: _kind(_found(name)) for name in (*lookup.NAMES, *FIELDS)}
    for name, attributes in ATTRIBUTES.items():
        for attribute in attributes.split():
            found[f"{name}.{attribute}"] = "there" if _has(_found(name), attribute) else MISSING
    return dict(sorted(found.items()))


def _found(name: str) -> Any:
    try:
        return lookup.resolve_name(name)
    except (AttributeError, ImportError):
        return MISSING


def _kind(found: Any) -> str:
    """Names of arguments, without their types; of what is not called its kind."""
    if found is MISSING:
        return MISSING
    if isinstance(found, str):
        return repr(found)
    if isinstance(found, types.CodeType):
        return f"({', '.join(found.co_varnames[: found.co_argcount])})"
    if (schema := getattr(found, "_schema", None)) is not None:
        return str(schema)  # of an operator
    if isinstance(found, types.ModuleType) or not callable(found):
        return f"a {type(found).__name__}"
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return re.sub(r"\s+", " ", (found.__doc__ or "").strip().split("\n")[0]) or "built in"
    return f"({', '.join(_parameter(parameter) for parameter in parameters)})"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    only = " by name" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is inspect.Parameter.empty else "=..."
    return f"{stars}{parameter.name}{only}{default}"


def _has(owner: Any, attribute: str) -> bool:
    """Also where only methods set it, on `self`."""
    if owner is MISSING:
        return False
    if hasattr(owner, attribute):
        return True
    if not isinstance(owner, type):
        return False
    classes = [each for each in owner.__mro__ if each.__module__.startswith("torch")]
    fields = {name for each in classes for name in getattr(each, "__annotations__", ())}
    return attribute in fields or any(re.search(rf"\bself\.{attribute}\b", inspect.getsource(each)) for each in classes)


Table = dict[str, dict[str, str]]
"""By name, then by versions, e.g. "2.11, 2.13", what it was there."""


def of_version(table: Table, version: str) -> dict[str, str]:
    """What a version was recorded to have; empty for one that was not."""
    return {
        name: kind
        for name, kinds in table.items()
        for versions, kind in kinds.items()
        if version in versions.split(", ")
    }


def with_version(table: Table, version: str, found: dict[str, str]) -> Table:
    """The table with what a version has; names that are not used any more are left out."""
    result: Table = {}
    for name, kind in found.items():
        by_kind: dict[str, set[str]] = {kind: {version}}
        for versions, other in table.get(name, {}).items():
            by_kind.setdefault(other, set()).update(set(versions.split(", ")) - {version})
        ordered = sorted((sorted(versions, key=_number), other) for other, versions in by_kind.items() if versions)
        result[name] = {", ".join(versions): other for versions, other in ordered}
    return result


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def changes(table: Table, version: str, found: dict[str, str]) -> list[str]:
    """What is wrong with the installed version or the table, a line each."""
    recorded, since = of_version(table, version), version
    wrong = []
    if not recorded:
        versions = {each for kinds in table.values() for versions in kinds for each in versions.split(", ")}
        since = max(versions, key=_number, default="")
        recorded = of_version(table, since)
        wrong.append(
            f"torch {version} is not recorded in {TABLE.name}; if the tests pass with it, run python -m "
            f"tests.private_names --record. Since torch {since}:"
        )
    for name in sorted(recorded.keys() | found.keys()):
        was, now = recorded.get(name, "not recorded"), found.get(name, "not used any more")
        if was != now:
            wrong.append(f"{name}: with torch {since} it was {was}, with this torch {torch.__version__} it is {now}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write down what the installed version has")
    record = parser.parse_args().record
    table: Table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    found = described()
    if record:
        table = with_version(table, installed(), found)
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if wrong := changes(table, installed(), found):
        sys.exit("private names of PyTorch have changed:\n" + "\n".join(wrong))
    print(f"{len(found)} private names of torch {torch.__version__} are as recorded")


if __name__ == "__main__":
    assert quantshard.__file__  # which looks the names up
    main()
