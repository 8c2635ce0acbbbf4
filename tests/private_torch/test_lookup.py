"""Private names of PyTorch that a version may lack: the import and plain training go on, and a warning says which
versions were tested. tests/distributed/test_missing_names.py tries each name by itself, where it is used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantshard.errors import TorchVersionError
from quantshard.private_torch import lookup

ROOT = Path(__file__).parents[2]

CENTRAL = [
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch.Tensor._make_wrapper_subclass",
]
"""Names without which no quantized layer works."""

CHILD = """
import importlib.util, json, os, sys, warnings
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.checkpoint, torch.distributed.tensor


class Without:
    \"\"\"Imports quantshard as if PyTorch had some names not.\"\"\"

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name != "quantshard.private_torch.lookup":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            found = module.private_name
            module.private_name = lambda name, feature: (
                found(name, feature) if name not in self.names else
                module.NAMES.update({name: feature}) or module.MissingName(name, feature))

        spec.loader.exec_module = changed
        return spec


def tried(names, version, train):
    sys.meta_path.insert(0, Without(names))
    torch.__version__ = version
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import quantshard as qs
        import quantshard
    result = {"warnings": [f"{w.category.__name__}: {w.message}" for w in caught]}
    result["missing"] = sorted(
        name for name in qs.private_torch.lookup.NAMES if name in names)
    if train:
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="mxfp8"):
            model = torch.nn.Sequential(qs.Linear(32, 32), qs.Linear(32, 32))
        optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            with qs.autocast(recipe="mxfp8"):
                loss = model(torch.ones(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        result["losses"] = losses
    return result


for case in json.loads(sys.stdin.read()):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            text = json.dumps(tried(*case))
        except BaseException as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read())
    os.wait()
"""


Case = tuple[list[str], str, bool]
"""Names that are missing, a version of torch, and whether to train."""


def tried(cases: dict[str, Case]) -> dict[str, dict[str, object]]:
    """What importing quantshard and training came to."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(list(cases.values())), cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(cases, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def imported() -> dict[str, dict[str, object]]:
    """Without private names, and as other versions of torch."""
    names = sorted(lookup.NAMES)
    return tried(
        {
            "with all names": ([], torch.__version__, True),
            "without any name": (names, "2.11.0+cu130", False),
            "without any but the central ones": ([name for name in names if name not in CENTRAL], "2.15.3", True),
            "too old": ([], "2.10.1", True),
            f"without {CENTRAL[0]}": ([CENTRAL[0]], torch.__version__, True),
        }
    )


def test_the_import_needs_no_private_name(imported: dict[str, dict[str, object]]) -> None:
    assert imported["without any name"]["missing"] == sorted(lookup.NAMES)


def test_plain_training_needs_the_central_names_only(imported: dict[str, dict[str, object]]) -> None:
    full, without = imported["with all names"], imported["without any but the central ones"]
    assert len(without["missing"]) == len(lookup.NAMES) - len(CENTRAL)
    assert full["losses"] == without["losses"]
    assert full["losses"][0] != full["losses"][1]
    check_error(CENTRAL[0], imported[f"without {CENTRAL[0]}"]["error"])


def check_error(name: str, error: object) -> None:
    assert str(error).startswith(f"TorchVersionError: torch {torch.__version__} has no {name}, without which "), error


@pytest.mark.exhaustive
def test_each_of_the_central_names_is_told() -> None:
    cases: dict[str, Case] = {name: ([name], torch.__version__, True) for name in CENTRAL[1:]}
    for name, found in tried(cases).items():
        check_error(name, found["error"])


@pytest.mark.exhaustive
def test_newer_versions_train() -> None:
    cases: dict[str, Case] = {
        version: ([], version, True) for version in (torch.__version__, "2.16.0a0+gitabc", "2.11.0+cu130", "2.15.3")
    }
    first, *others = tried(cases).values()
    assert all(found["losses"] == first["losses"] for found in others)
    assert [bool(found["warnings"]) for found in others] == [True, False, False]


def test_a_warning_names_versions_that_were_not_tested(imported: dict[str, dict[str, object]]) -> None:
    for case in ("with all names", "without any name", "without any but the central ones"):  # the oldest, the newest
        assert imported[case]["warnings"] == []
    (warning,) = imported["too old"]["warnings"]
    assert warning.startswith("UserWarning: quantshard was tested with torch 2.11 to 2.15, and this is torch 2.10.1")
    assert imported["too old"]["losses"] == imported["with all names"]["losses"]


def test_versions_agree() -> None:
    """What the import warns of, what pip installs, and what the tests run with unless told otherwise."""
    (first, last), text = (lookup.FIRST_TORCH, lookup.LAST_TORCH), (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in text
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is not None and first <= (int(pinned[1]), int(pinned[2])) <= last


def test_what_stands_in_place_of_a_missing_name() -> None:
    missing = lookup.private_name("torch._C._none_such", "a feature")
    del lookup.NAMES["torch._C._none_such"]
    message = r"torch .* has no torch\._C\._none_such, without which a feature cannot work; install torch 2"
    for use in (
        lambda: missing(1),
        lambda: missing.attribute,
        lambda: isinstance(torch.strided, missing),
    ):
        with pytest.raises(TorchVersionError, match=message):
            use()
    for other in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), 1, None, lookup):
        assert not isinstance(other, missing)
    assert str(lookup.missing(1, missing)) == str(missing.error())
    assert lookup.missing(1, None) is None
