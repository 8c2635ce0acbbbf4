"""The table of private names: it has all that private_torch uses, of every tested version, and tells changes."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from quantshard import private_torch
from quantshard.private_torch import lookup
from tests import private_names
from tests.private_names import ATTRIBUTES, TABLE, changes, described, installed, of_version, with_version
from tests.test_house import defined, is_private

VERSIONS = ("2.11", "2.13", "2.14", "2.15")


def table() -> private_names.Table:
    found: private_names.Table = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def test_every_tested_version_is_recorded_with_every_name() -> None:
    minors = [tuple(map(int, version.split("."))) for version in VERSIONS]
    assert (minors[0], minors[-1]) == (lookup.FIRST_TORCH, lookup.LAST_TORCH)
    for version in VERSIONS:
        recorded = of_version(table(), version)
        assert recorded.keys() == described().keys()
        assert {name for name, kind in recorded.items() if kind == "missing"} <= {
            "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups"
        }


def test_every_private_attribute_of_private_torch_is_listed() -> None:
    listed = {
        part for name in (*lookup.NAMES, *ATTRIBUTES, *ATTRIBUTES.values()) for part in name.replace(".", " ").split()
    }
    used, own = set(), set()
    for path in Path(private_torch.__file__).parent.glob("*.py"):
        parsed = ast.parse(path.read_text(encoding="utf-8"))
        own |= defined(parsed)
        used |= {node.attr for node in ast.walk(parsed) if isinstance(node, ast.Attribute) and is_private(node.attr)}
        imports = [node for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom | ast.Import)]
        names = {name for node in imports for alias in node.names for name in alias.name.split(".")}
        names |= {
            name for node in imports if isinstance(node, ast.ImportFrom) for name in (node.module or "").split(".")
        }
        assert not [name for name in names if is_private(name)], f"{path.name}: look private names up with private_name"
    own |= {"_dynamo_marked_constant", "_getframe"}  # a quantized tensor's; a mark that is set; Python's
    assert used - own - listed == set()


def test_what_changed_is_named() -> None:
    found = {"torch.a": "(x, y)", "torch.b.c": "there"}
    old: private_names.Table = {}
    for version in ("2.11", "2.9"):
        old = with_version(old, version, found)
    assert old["torch.a"] == {"2.9, 2.11": "(x, y)"}
    assert changes(old, "2.11", found) == []
    new = with_version(old, "2.13", found | {"torch.b.c": "missing"})
    assert new["torch.b.c"] == {"2.9, 2.11": "there", "2.13": "missing"}
    assert of_version(new, "2.13") == {"torch.a": "(x, y)", "torch.b.c": "missing"}
    (line,) = changes(new, "2.13", found)
    assert line.startswith("torch.b.c: with torch 2.13 it was missing, with this torch ") and line.endswith("is there")
    head, line = changes(new, "2.14", found)
    assert "torch 2.14 is not recorded in private_names.json" in head and head.endswith("Since torch 2.13:")
    assert line.startswith("torch.b.c: with torch 2.13 it was missing")
    again = with_version(new, "2.13", found)
    assert again["torch.b.c"] == {"2.9, 2.11, 2.13": "there"}


def test_the_installed_version_is_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes(table(), installed(), described()) == []
    name = "torch.utils.checkpoint._CheckpointFrame"
    monkeypatch.setattr(name, lambda recompute: None)
    found = changes(table(), installed(), described())
    assert [line.split(": ")[0] for line in found] == [name, f"{name}.recompute_fn"]
    assert found[0].endswith(f", with this torch {torch.__version__} it is (recompute)")
