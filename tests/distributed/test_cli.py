"""`quantshard train` and `resume` as a user types them, stopped, killed, resumed and broken.

Where something ends or breaks, with processes of their own; else in those of the pool, see `commands`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quantshard import checkpoints
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import ownership
from quantshard.errors import CheckpointError
from quantshard.tools.trainer.data import collect, from_table
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer
from quantshard.tools.trainer.models.model import generate
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed.commands import quantshard
from tests.distributed.forked import STARTS, Forked, started
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SIZES = (
    "--recipe mxfp8 --hidden 96 --heads 3 --ffn 200 --layers 2 --seq-length 32 --global-batch 6 --warmup 2 "
    "--eval-sequences 5"
)
SECONDS = 300  # the machine may be busy


def command(*arguments):
    return ["-m", "quantshard", *map(str, arguments)]


def environment(**more):
    path = os.pathsep.join(filter(None, [more.pop("first", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def train(run, text, *arguments, steps=6):
    return ["train", "--run", run, "--data", text, "--nproc-per-node", 2, "--steps", steps, *SIZES.split(), *arguments]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    """What must be equal to the last bit: every figure that is not a measurement of this machine."""
    return [
        {k: v for k, v in record.items() if k not in ("tokens_per_s", "mfu", "memory_bytes", "data_wait_s")}
        for record in metrics(run)
    ]


def wait_for_steps(run, count, process):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= count:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate())


def children(pid):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
        except OSError:
            pass
    return sorted(found)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pids):
    deadline = time.monotonic() + SECONDS
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def one_line(result, says):
    """It failed with one line on stderr."""
    lines = result.stderr.splitlines()
    assert result.returncode == 1 and len(lines) == 1 and re.search(says, lines[0]), (result.returncode, result.stderr)
    assert lines[0].startswith("quantshard: ") and "Traceback" not in result.stdout


def content(run):
    """The files of a run, except its logs and the record of its owner, which a refused resume writes too."""
    changing = (ownership.LOCK_FILE, ownership.OWNER_FILE)
    files = (p for p in sorted(run.rglob("*")) if p.is_file() and p.name not in changing and p.suffix != ".log")
    return {p.relative_to(run): p.read_bytes() for p in files}


@pytest.fixture(scope="module", autouse=True)
def one_line_each():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "10000")
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text that does not change with the repository: what dropout does to a loss depends on it."""
    folder, licence = tmp_path_factory.mktemp("texts"), (ROOT / "LICENSE").read_text(encoding="utf-8")
    for part in range(3):
        (folder / f"{part}.txt").write_text(licence[4000 * part :], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    options = ["--save-every", 2, "--eval-every", 4, "--micro-batches", 3, "--sample-tokens", 5, "--tensorboard"]
    result = quantshard(*train(run, text, *options))
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "mxfp8_32x32" in result.stdout and "step 6/6" in result.stdout  # explain, and progress
    assert (
        result.stdout.startswith("starting ") and "layers.{0-1}." in result.stdout and "layers.1." not in result.stdout
    )
    return run


def test_run_leaves_its_records(uninterrupted):
    assert [record["step"] for record in metrics(uninterrupted)] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in metrics(uninterrupted) if "heldout_loss" in record] == [4, 6]
    record = metrics(uninterrupted)[-1]
    assert record["skipped_steps"] == 0 and record["tokens_per_s"] > 0 and record["memory_bytes"] > 1e7
    assert 0 < record["lr"] < TrainSettings().lr and record["grad_norm"] > 0
    assert metrics(uninterrupted)[0]["loss"] > record["loss"]
    samples = [json.loads(line) for line in (uninterrupted / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 6] and all(sample["text"] for sample in samples)
    names = [path.name for path in sorted((uninterrupted / "checkpoints").iterdir())]
    assert names == [ownership.LOCK_FILE, ownership.OWNER_FILE, "step-000002", "step-000004", "step-000006"]
    for rank in range(2):
        log = (uninterrupted / "logs" / f"rank-{rank}.log").read_text()
        assert f"[rank {rank}] INFO quantshard.tools.trainer.worker: process " in log
        assert ("saved step 6" in log) == (rank == 0)
    assert tracked_losses(uninterrupted) == [(record["step"], record["loss"]) for record in metrics(uninterrupted)]


def tracked_losses(run):
    """What TensorBoard shows of a run; it has float32."""
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    known = {record["step"]: record["loss"] for record in metrics(run)}
    events = [(event.step, event.value) for event in found.Scalars("loss")]
    return [(step, known[step] if value == pytest.approx(known[step], rel=1e-6) else value) for step, value in events]


def test_what_a_run_wrote_is_reported_and_watched(uninterrupted, tmp_path):
    page = tmp_path / "report.html"
    result = quantshard("report", uninterrupted, "--out", page)
    assert result.returncode == 0 and not result.stderr and f"wrote {page}: 1 run, " in result.stdout
    text = page.read_text()
    cells = [
        "6 of 6",
        f"{metrics(uninterrupted)[-1]['loss']:.4f}",
        "mxfp8",
        torch.__version__,
    ]
    assert all(f">{cell}</td>" in text for cell in cells)
    result = quantshard("watch", uninterrupted)
    assert result.returncode == 0 and "step 6/6" in result.stdout and result.stdout.endswith("done at step 6\n")


def in_one_go(folder, whole, steps):
    """The run of a folder from its first step on, by the ranks of this call."""
    settings, _, corpus = RunDir(Path(folder)).read_config()
    place = ProcessInfo(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    Trainer(replace(settings, steps=steps), from_table(corpus), RunDir(Path(whole)), place, StopFlag()).train(0)


@pytest.mark.parametrize(
    ("start", "kills"),
    [
        (Forked, ()),
        *(pytest.param(start, ("rank", "launcher"), marks=pytest.mark.exhaustive) for start in (Forked, started)),
    ],
    ids=["stopped", "killed", "killed, started"],
)
def test_stopped_killed_and_resumed_is_bitwise(text, tmp_path, start, kills):
    """SIGTERM, which saves; then a rank is killed, then the launcher, and each time the run goes on."""
    options = ["--save-every", 2, "--eval-every", 4, "--layers", 1, "--recipe", "delayed", "--decay-steps", 50]
    run, whole = tmp_path / "run", tmp_path / "whole"
    process = start(command(*train(run, text, *options, steps=5000)), environment())
    wait_for_steps(run, 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    done = len(metrics(run))
    assert process.returncode == 0 and not err and f"stopped at step {done}, resume with: quantshard resume" in out
    assert RunDir(run).last_complete() == done
    for killed in kills:
        done = RunDir(run).last_complete()
        process = start(command("resume", run), environment())
        wait_for_steps(run, done + 4, process)  # more than a killed run can have left
        workers = children(process.pid)
        assert len(workers) == 2
        os.kill(process.pid if killed == "launcher" else workers[1], signal.SIGKILL)
        out, err = process.communicate(timeout=SECONDS)
        assert f"resumed after step {done}" in out
        if killed == "rank":
            says = r"process 1 was killed by SIGKILL\. To resume from the last checkpoint: quantshard resume"
            one_line(subprocess.CompletedProcess([], process.returncode, out, err), says)
        assert ends(workers)  # those that were not killed too
    done = RunDir(run).last_complete()
    result = quantshard("resume", run, "--steps", done + 2)
    assert result.returncode == 0 and f"resumed after step {done}" in result.stdout, result.stderr
    whole.mkdir()
    run_ranks(2, in_one_go, str(run), str(whole), done + 2)
    assert losses(run) == losses(whole)


@pytest.mark.exhaustive
def test_resumed_on_three(uninterrupted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    shutil.rmtree(run / "checkpoints" / "step-000006")
    (run / "checkpoints" / "step-000004" / ".metadata").unlink()  # was not completed: the one before it counts
    result = quantshard("resume", run, "--nproc-per-node", 3, "--steps", 5)
    one_line(result, "global_batch = 6 cannot be split evenly over 3 data-parallel processes x micro_batches = 3")
    config = run / "config.toml"
    config.write_text(config.read_text().replace("micro_batches = 3", "micro_batches = 1"))
    result = quantshard("resume", run, "--nproc-per-node", 3, "--steps", 5)
    assert result.returncode == 0 and "resumed after step 2" in result.stdout, result.stderr
    assert "skipped the incomplete checkpoint" in result.stdout and "step-000004" in result.stdout
    assert losses(run)[:2] == losses(uninterrupted)[:2] and len(losses(run)) == 5
    for resumed, whole in zip(losses(run)[2:], losses(uninterrupted)[2:], strict=False):
        assert abs(resumed["loss"] - whole["loss"]) < 0.02  # bf16 activations, other order of sums


@pytest.mark.parametrize("start", STARTS)
def test_under_torchrun_it_starts_no_processes(uninterrupted, text, tmp_path, start):
    run = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command("train")]
    options = ["--steps", "2", "--decay-steps", "6", "--micro-batches", "3", "--eval-every", "0", *SIZES.split()]
    process = start([*torchrun, "--run-dir", str(run), "--data", str(text), *options], environment())
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    figures = [{k: v for k, v in record.items() if k != "heldout_loss"} for record in losses(run)]
    assert figures == losses(uninterrupted)[:2]


FAILING = """
import os, sys, threading, time

def break_rank_1():
    while not hasattr(sys.modules.get("quantshard.tools.trainer.data"), "Windows"):
        time.sleep(0.01)
    windows = sys.modules["quantshard.tools.trainer.data"].Windows
    whole = windows.batch
    def batch(self, seed, step, first, count):
        if step == 2:
            raise ValueError("the disk\\nis gone")
        return whole(self, seed, step, first, count)
    windows.batch = batch

if os.environ.get("RANK") == "1":
    threading.Thread(target=break_rank_1, daemon=True).start()
"""


@pytest.mark.parametrize("start", STARTS)
def test_rank_that_fails_alone(text, tmp_path, start):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAILING)
    run = tmp_path / "run"
    process = start(command(*train(run, text)), environment(first=str(tmp_path / "site")))
    out, err = process.communicate(timeout=SECONDS)
    one_line(
        subprocess.CompletedProcess([], process.returncode, out, err),
        r"process 1: ValueError: the disk \(traceback: .*rank-1\.txt\)$",
    )
    assert "ValueError: the disk\nis gone" in (run / "logs" / "rank-1.txt").read_text()


def test_damaged_checkpoint(uninterrupted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    file = run / "checkpoints" / "step-000006" / "__1_0.distcp"
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    result = quantshard("resume", run, "--steps", 6)
    assert result.returncode == 0 and "resumed after step 4" in result.stdout, result.stderr
    assert losses(run) == losses(uninterrupted)
    assert tracked_losses(run) == [(record["step"], record["loss"]) for record in metrics(run)]  # each step once
    assert compare(run / "checkpoints" / "step-000006", uninterrupted / "checkpoints" / "step-000006").equal
    assert RunDir(run).saved_steps() == [2, 4, 6]
    for step in (2, 4, 6):
        next((run / "checkpoints" / f"step-{step:06d}").glob("*.distcp")).unlink()
    before = content(run)
    result = quantshard("resume", run, "--steps", 8)
    one_line(result, r"has no checkpoint to go on from: .*distcp is missing; .*distcp is missing")
    assert content(run) == before


def refusal(folder, changes):
    run = RunDir(Path(folder))
    settings, _, corpus = run.read_config()
    place = ProcessInfo(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(replace(settings, **changes), from_table(corpus), run, place, StopFlag())
    with trainer.manager, pytest.raises(CheckpointError) as caught:
        trainer.restore()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ffn": 208}, "is of another model: .* has shape"),
        ({"layers": 1}, "is of another model: .* that this one lacks"),
        ({"recipe": "block"}, "is of another recipe: .* is stored as mxfp8_32x32 there"),
        ({"exp_avg_dtype": "fp8"}, "is of another"),
    ],
)
def test_checkpoint_of_another_model(uninterrupted, changes, says):
    before = content(uninterrupted)
    for message in run_ranks(2, refusal, str(uninterrupted), changes):
        assert re.search(says, message) and "\n" not in message
    assert content(uninterrupted) == before


def test_changed_data(uninterrupted, text, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(uninterrupted, run)
    shutil.copytree(text, other)
    (other / "1.txt").write_text("another")
    before = content(run)
    one_line(quantshard("resume", run, "--steps", 8, "--data", other), r"other/1\.txt is not the .*1\.txt")
    assert content(run) == before


def first_losses(folder, recipe):
    settings = replace(
        TrainSettings(), hidden=96, heads=3, ffn=200, layers=1, seq_length=32, global_batch=12, recipe=recipe, steps=2
    ).resolved()
    place = ProcessInfo(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(settings, collect([folder]), RunDir(Path(folder)), place, StopFlag())
    return [trainer.step(step)[0] for step in (1, 2)], trainer.evaluate("heldout_loss")["heldout_loss"]


@pytest.mark.parametrize("recipe", [pytest.param("bf16", marks=pytest.mark.exhaustive), "mxfp8"])
def test_same_global_batch_on_one_and_four(text, recipe):
    alone, heldout_alone = run_ranks(1, first_losses, str(text), recipe)[0]
    for together, heldout in run_ranks(4, first_losses, str(text), recipe):
        # the same weights and sequences; sums over sequences are taken in another order
        assert together[0] == pytest.approx(alone[0], rel=1e-6) and together[1] == pytest.approx(alone[1], rel=1e-3)
        assert heldout == pytest.approx(heldout_alone, rel=1e-3)


# Meshes with an axis of tensor parallelism

MESH = "dp_shard=2,tp=2"
CUT = f"{SIZES} --heads 4 --layers 1 --global-batch 8 --save-every 2 --eval-every 4".split()  # the last flag counts
CUT += ["--activation-storage", "fp8"]


@pytest.fixture(scope="module")
def tensor_parallel(text, tmp_path_factory):
    """A run on 2 x 2 processes, of 4 steps."""
    run = tmp_path_factory.mktemp("meshes") / "run"
    result = quantshard("train", "--run", run, "--data", text, "--mesh", MESH, "--steps", 4, *CUT)
    assert result.returncode == 0, result.stderr
    assert "dp_shard=2 StridedShard(0), tp=2 Shard(0)" in result.stdout  # explain
    assert f"on 4 x cpu ({MESH})" in result.stdout
    return run


def test_resumed_onto_another_mesh(tensor_parallel, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(tensor_parallel, run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    result = quantshard("resume", run, "--mesh", "dp_shard=2", "--steps", 3, "--copy-to", copy)
    assert result.returncode == 0 and "on 2 x cpu (dp_shard=2)" in result.stdout, result.stderr
    compared = compare(run / "checkpoints" / "step-000002", copy)
    assert compared.equal and compared.tensors > 50, compared
    settings, launched, _ = RunDir(run).read_config()
    assert settings.mesh == launched["mesh"] == "dp_shard=2"
    assert losses(run)[:2] == losses(tensor_parallel)[:2]
    assert abs(losses(run)[2]["loss"] - losses(tensor_parallel)[2]["loss"]) < 0.02  # bf16 activations, other sums


def trainer_of(folder, **changes):
    settings, _, corpus = RunDir(Path(folder)).read_config()
    place = ProcessInfo(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    settings = replace(settings, **changes).resolved()
    return Trainer(settings, from_table(corpus), RunDir(Path(folder)), place, StopFlag())


def born_and_resumed(folder, born, mesh):
    trainer = trainer_of(folder, mesh=mesh)
    checkpoints.save(born, trainer.model, trainer.optimizer, trainer.extra(0))
    if mesh != MESH:
        return []
    with trainer.manager:
        trainer.restore(2)
    return [
        [*trainer.step(step)[:2], trainer.evaluate("heldout_loss")["heldout_loss"] if step == 4 else None]
        for step in (3, 4)
    ]


def test_born_as_in_one_process_and_resumed_bitwise(tensor_parallel, tmp_path):
    run_ranks(1, born_and_resumed, str(tensor_parallel), str(tmp_path / "1"), "dp_shard=1")
    resumed = run_ranks(4, born_and_resumed, str(tensor_parallel), str(tmp_path / "4"), MESH)
    compared = compare(tmp_path / "1", tmp_path / "4")
    assert compared.equal and compared.tensors > 50, compared
    told = [[r["loss"], r["grad_norm"], r.get("heldout_loss")] for r in metrics(tensor_parallel)[2:]]
    assert resumed == [told] * 4


ALIKE = {
    "params_dtype": "float32",
    "recipe": "bf16",
    "global_batch": 8,
    "eval_sequences": 5,
    "sequence_parallel": "auto",
}
CASES = {
    "llama": {},
    "rows stay": {"global_batch": 4, "micro_batches": 2, "sequence_parallel": "off"},
    "gpt": {"architecture": "gpt", "tied": True, "micro_batches": 2},
    "three": {"heads": 3, "kv_heads": 3, "ffn": 201},
    "dropout": {"dropout": 0.2},
}


def figures(folder, cases, mesh):
    """Of each case the figures of two steps and of an evaluation, and a generated text."""
    found = {}
    for case in cases:
        trainer = trainer_of(folder, **ALIKE | CASES[case], mesh=mesh)
        steps = [value for step in (1, 2) for value in trainer.step(step)[:2]]
        text = generate(trainer.model, trainer.settings, b"def", 3)
        assert trainer.model.sequence_parallel == (mesh in ("tp=2", MESH) and case != "rows stay")
        found[case] = [*steps, trainer.evaluate("heldout_loss")["heldout_loss"]], text
    return found


TRAINED = {
    "tp=2": ["rows stay", "dropout", "gpt"],
    "tp=3": ["three"],
}
MORE = {"tp=2": ["llama"], "dp_replicate=2,tp=2": ["rows stay"], MESH: ["gpt", "dropout"]}


@pytest.mark.parametrize("meshes", [TRAINED, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["some", "more"])
def test_training_on_each_mesh_is_that_of_one_process(tensor_parallel, meshes):
    tried = {case for cases in meshes.values() for case in cases}
    [alone] = run_ranks(1, figures, str(tensor_parallel), [case for case in CASES if case in tried], "dp_shard=1")
    for mesh, cases in meshes.items():
        ranks = run_ranks(MeshSpec.parse(mesh).processes, figures, str(tensor_parallel), cases, mesh)
        assert all(found == ranks[0] for found in ranks), mesh
        for case in cases:
            (found, text), (expected, expected_text) = ranks[0][case], alone[case]
            if case == "dropout":  # other elements are dropped
                assert found[:2] != expected[:2] and found == pytest.approx(expected, rel=0.05)
            else:  # float32 sums in another order
                assert found == pytest.approx(expected, rel=1e-5) and text == expected_text, (mesh, case)
