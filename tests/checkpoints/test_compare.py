"""Comparing checkpoints that were written on different numbers of ranks."""

import copy
import gc
import math
import os
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typer.testing import CliRunner

import quantshard as qs
from quantshard.checkpoints import comparison as module, save
from quantshard.checkpoints.comparison import Comparison, compare, largest_difference
from quantshard.errors import CheckpointError
from quantshard.tools.cli import app
from tests.checkpoints.test_untrusted import change_entry
from tests.covering import by_turns
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed  # all checkpoints here are written by ranks of the pool, but those of `plain`


def plain(path: Path, **entries: Any) -> Path:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(entries, checkpoint_id=path)
    return path


# Of models, on 1, 2 and 3 ranks

OTHERS = 12
"""Entries that are not tensors: eleven of an optimizer's group, and extra.step."""


def train(path: str, steps: int = 2, recipe: str = "nvfp4") -> None:
    """A model trained on the same data on any number of ranks up to rounding, saved at birth and after `steps`."""
    torch.manual_seed(11)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(
            *(qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in [(96, 200), (200, 40), (40, 2)])
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=0.01, exp_avg_dtype=torch.uint8)
    save(f"{path}/born", model, optimizer, {"step": 0})
    save(f"{path}/weights", model, None)
    for _ in range(steps):
        with qs.autocast(recipe=recipe):
            model(torch.ones(4, 96, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(f"{path}/trained", model, optimizer, {"step": steps})


@pytest.fixture(autouse=True)
def one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    paths = {ranks: tmp_path_factory.mktemp(f"ranks-{ranks}") for ranks in (1, 2, 3)}
    for ranks, path in paths.items():
        run_ranks(ranks, train, str(path), 2 if ranks == 3 else 0)
    return paths


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 3), (2, 3), (2, 2)])
def test_equal_whatever_the_sharding(trained, one, other):
    found = compare(trained[one] / "born", trained[other] / "born")
    assert found.equal, found.first
    assert found.first is None
    elements = 96 * 200 + 200 + 200 * 40 + 40 + 40 * 2 + 2
    assert found.bytes > elements * (0.5 + 1 + 4 + 4)  # codes, two moments and a master
    assert found.tensors > 20
    assert found.others == OTHERS


def test_differences_are_counted_by_entry(trained):
    found = compare(trained[2] / "born", trained[3] / "trained")
    by_key = {difference.key: difference for difference in found.differences}
    assert list(by_key) == sorted(by_key)
    assert found.first is found.differences[0]
    assert by_key["extra.step"].what == "0 and 2"
    assert by_key["optimizer.param_groups.0.step"].what == "0 and 2"
    master = by_key["optimizer.state.0.master_param"]
    assert 0 < master.count <= master.elements == 96 * 200
    assert "model.0.weight_key" not in by_key


# Of bits


def write_bits(path: str, flips: list[tuple[str, tuple[int, ...]]]) -> None:
    """Tensors of all kinds, each sharded over the ranks, with the lowest bit of some elements flipped."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        words = torch.arange(7 * 5 * dtype.itemsize, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
        state[name] = words.view(dtype).view(7, 5)
    state["scalar"] = torch.tensor(2.5)
    for key, index in flips:
        element = state[key][index].view(1).view(torch.uint8) if index else state[key].view(1).view(torch.uint8)
        element[0] ^= 1
    sharded = {k: distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) if v.ndim else v for k, v in state.items()}
    assert all(isinstance(v, DTensor) for v in sharded.values() if v.ndim)
    dcp.save(sharded, checkpoint_id=path)


DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


@pytest.mark.parametrize("key", [*DTYPES, "scalar"])
def test_one_flipped_bit_is_found_and_named(tmp_path, key):
    index = (5, 3) if key in DTYPES else ()
    run_ranks(3, write_bits, str(tmp_path / "a"), [])
    run_ranks(2, write_bits, str(tmp_path / "b"), [(key, index)])
    found = compare(tmp_path / "a", tmp_path / "b")
    (difference,) = found.differences
    assert (difference.key, difference.index, difference.count) == (key, index, 1)
    assert difference.elements == (35 if index else 1)
    if index:
        assert f"at {list(index)}" in difference.what
    again = compare(tmp_path / "b", tmp_path / "a").first
    assert again is not None
    values, swapped = (d.what.split(" at ")[0].split(";")[0].split(" and ") for d in (difference, again))
    assert values == swapped[::-1]
    assert len(set(values)) == 2
    bits = [int(value.split("(0x")[1].rstrip(")"), 16) for value in values]
    assert bits[0] ^ bits[1] == 1


def test_first_difference_is_first_in_the_global_tensor(tmp_path):
    run_ranks(2, write_bits, str(tmp_path / "a"), [])
    run_ranks(
        3, write_bits, str(tmp_path / "b"), [("fp32", (6, 0)), ("fp32", (1, 4)), ("fp32", (2, 0)), ("uint8", (0, 0))]
    )
    first, second = compare(tmp_path / "a", tmp_path / "b").differences
    assert (first.key, first.index, first.count) == ("fp32", (1, 4), 3)
    assert (second.key, second.index, second.count) == ("uint8", (0, 0), 1)


def test_slices_count_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SLICE_ELEMENTS", 4)
    run_ranks(2, write_bits, str(tmp_path / "a"), [])
    run_ranks(2, write_bits, str(tmp_path / "b"), [("bf16", (1, 1)), ("bf16", (6, 4))])
    (difference,) = compare(tmp_path / "a", tmp_path / "b").differences
    assert (difference.index, difference.count) == ((1, 1), 2)


def test_nan_and_zero_are_compared_as_bits(tmp_path):
    nan = torch.tensor([float("nan")] * 2)
    other = nan.clone()
    other.view(torch.int32)[1] ^= 1
    a = plain(tmp_path / "a", nan=nan, zero=torch.tensor([0.0]))
    assert compare(a, plain(tmp_path / "b", nan=nan.clone(), zero=torch.tensor([0.0]))).equal
    found = compare(a, plain(tmp_path / "c", nan=other, zero=torch.tensor([-0.0])))
    assert [(d.key, d.index, d.count) for d in found.differences] == [("nan", (1,), 1), ("zero", (0,), 1)]
    assert found.differences[0].what == "nan (0x7fc00000) and nan (0x7fc00001) at [1]; 1 of 2 elements differ"
    assert found.differences[1].what.startswith("0.0 (0x00000000) and -0.0 (0x80000000)")


# Of what is there


def test_keys_shapes_and_dtypes(tmp_path):
    a = plain(
        tmp_path / "a", x=torch.zeros(3), y=torch.zeros(2, 3), z=torch.zeros(2), both=torch.ones(1), e=torch.empty(0)
    )
    b = plain(
        tmp_path / "b",
        w=torch.zeros(3),
        y=torch.zeros(3, 2),
        z=torch.zeros(2).half(),
        both=torch.ones(1),
        e=torch.empty(0),
    )
    found = compare(a, b)
    assert {d.key: d.what for d in found.differences} == {
        "w": f"only in {b}, not in {a}",
        "x": f"only in {a}, not in {b}",
        "y": "float32 (2, 3) and float32 (3, 2)",
        "z": "float32 (2,) and float16 (2,)",
    }
    assert found.tensors == 4
    assert found.bytes == 4


def test_entries_that_are_not_tensors(tmp_path):
    groups: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": float("nan")}]
    a = plain(tmp_path / "a", groups=groups, step=3, name="run", x=1)
    assert compare(a, plain(tmp_path / "b", groups=groups, step=3, name="run", x=1)).equal
    changed = [{"lr": 0.1, "betas": (0.9, 0.999)}, {"lr": float("nan")}]
    found = compare(a, plain(tmp_path / "c", groups=changed, step=4, name="run", x=torch.ones(1)))
    assert {d.key: d.what for d in found.differences} == {
        "groups.0.betas": "(0.9, 0.99) and (0.9, 0.999)",
        "step": "3 and 4",
        "x": "not a tensor and float32 (1,)",
    }
    assert (found.tensors, found.others) == (0, 5)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0.0, -0.0),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ([{"t": torch.ones(2)}], [{"t": torch.zeros(2)}]),
        ([torch.ones(2)], [torch.ones(3)]),
    ],
)
def test_unequal_objects_are_shown(a, b):
    assert module.digest(a) != module.digest(b)
    assert module.digest(a) == module.digest(copy.deepcopy(a))


class Malicious:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: Path, salt: int) -> None:
        self.path, self.salt = path, salt

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path), 0o777 - self.salt)


def test_objects_are_read_without_running_their_code(tmp_path):
    a = plain(tmp_path / "a", thing=Malicious(tmp_path / "run", 0))
    b = plain(tmp_path / "b", thing=Malicious(tmp_path / "run", 1))
    for first, second in ((a, b), (a, a), (plain(tmp_path / "c", thing=[1]), b)):
        (difference,) = compare(first, second).differences
        assert re.fullmatch(
            r"they cannot be compared: .*thing cannot be read: it names posix\.mkdir, .*", difference.what
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first", [True, False])
def test_a_damaged_object_is_a_difference(tmp_path, first):
    good, bad = plain(tmp_path / "a", thing=3), plain(tmp_path / "b", thing=3)
    change_entry(bad, "thing", b"no archive")
    (difference,) = compare(*((bad, good) if first else (good, bad))).differences
    assert f"{bad} is damaged or incomplete: thing cannot be read: it is not a complete archive" in difference.what


def test_two_tensors_at_a_time(tmp_path, monkeypatch):
    a = plain(tmp_path / "a", **{f"t{i}": torch.ones(10) for i in range(5)})
    alive: list[weakref.ref[torch.Tensor]] = []
    read = module.SafeReader.value

    def recorded(self: Any, *args: Any) -> torch.Tensor:
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 1
        tensor = read(self, *args)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(module.SafeReader, "value", recorded)
    assert compare(a, a).equal
    assert len(alive) == 10


# Of what cannot be compared


def truncated(path: Path) -> Path:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-200])
    return path


def without_a_file(path: Path) -> Path:
    next(path.glob("*.distcp")).unlink()
    return path


def with_a_hole(path: Path) -> Path:
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata["x"].chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def without_metadata(path: Path) -> Path:
    (path / ".metadata").unlink()
    return path


def with_half_the_metadata(path: Path) -> Path:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:100])
    return path


def missing(path: Path) -> Path:
    return path / "nowhere"


DAMAGES = {
    truncated: "its file __0_0.distcp is cut short: [0-9]+ bytes of [0-9]+",
    without_a_file: "its file __0_0.distcp is missing",
    with_a_hole: "has more or fewer pieces of entries than it says where they are",
    without_metadata: "not a complete checkpoint",
    with_half_the_metadata: "metadata cannot be read",
    missing: "not a complete checkpoint",
}


@by_turns(2, damage=list(DAMAGES), first=[True, False])
def test_damaged_checkpoints_are_one_line(tmp_path, damage, first):
    good = plain(tmp_path / "a", x=torch.ones(100))
    bad = damage(plain(tmp_path / "b", x=torch.ones(100)))
    pair = (bad, good) if first else (good, bad)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]) as raised:
        compare(*pair)
    assert str(bad) in str(raised.value)
    result = command(*pair)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert str(bad) in result.stderr


# The command


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app(), ["diff", *map(str, arguments)])


def test_command_says_equal(trained):
    result = command(trained[1] / "born", trained[3] / "born")
    found = compare(trained[1] / "born", trained[3] / "born")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"equal: {found.tensors} tensors, {found.bytes} bytes, {OTHERS} other entries\n"


def test_command_names_the_first_difference_and_counts_all(trained):
    result = command(trained[1] / "born", trained[3] / "trained")
    found: Comparison = compare(trained[1] / "born", trained[3] / "trained")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    size = f"{found.tensors} tensors, {found.bytes} bytes, {OTHERS} other entries"
    assert lines[:4] == [
        f"{len(found.differences)} of {len(found.keys)} entries differ; both have {size}",
        f"A: {trained[1] / 'born'}",
        f"B: {trained[3] / 'trained'}",
        f"first difference: {found.first}",
    ]
    assert any(re.fullmatch(r"weights: \d+ of \d+ differ", line) for line in lines)
    master = next(d for d in found.differences if d.key == "optimizer.state.0.master_param")
    assert f"  {master.key}: {master.count} of 19200 elements, by at most {master.largest:.4g}" in lines


def test_largest_difference_is_that_of_values():
    """Of plain tensors, and infinite for NaN."""
    a, b = (torch.tensor([1.0, float("nan"), float("inf"), 2.0]), torch.tensor([1.0, float("nan"), float("inf"), 2.5]))
    assert largest_difference(a[[0, 3]], b[[0, 3]]) == 0.5 and largest_difference(a[2:], b[2:]) == 0.5
    assert largest_difference(a, b) == math.inf and largest_difference(a[:0], b[:0]) == 0.0


def test_command_says_in_groups_what_one_has_alone(trained):
    path, alone = trained[1] / "born", trained[2] / "weights"
    found = compare(path, alone)
    lines = command(path, alone).stdout.splitlines()
    count = sum(d.key.startswith("optimizer.") for d in found.differences)
    assert count > 9 and len(found.differences) == count + 1
    assert f"optimizer: {count} of {count} differ" in lines and not any(line.startswith("weights") for line in lines)
    assert any(re.fullmatch(r"  optimizer\.state\.\{0-\d+\}\.exp_avg x\d+: only in A", line) for line in lines), lines
