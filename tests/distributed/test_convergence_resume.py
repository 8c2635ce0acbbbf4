"""The benchmark of arms that are resumed at their midpoint: in the processes of the pool, and its tables."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import convergence_resume as bench
from benchmarks.convergence_corpus import Document, tokenizer_of
from benchmarks.convergence_runs import _arm
from quantshard.tools.cli import demo
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.distributed.commands import quantshard

STEPS = 4
SIZES = "--hidden 32 --layers 1 --heads 2 --seq-length 16 --global-batch 6 --warmup 1 --eval-sequences 8 --device cpu"


@pytest.fixture
def corpus(tmp_path):
    tokenizer = tokenizer_of([Document("0", "some text, and some more of it\n" * 9, "")], 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tobytes()
    for name in ("train.bin", "heldout.bin"):
        (tmp_path / name).write_bytes(tokens)
    digest = bench.sha256(tokens).hexdigest()
    (tmp_path / "corpus.json").write_text(json.dumps({"vocabulary": 300, "train": {"sha256": digest}}))
    return tmp_path


def in_the_pool(arguments, run, kill_after=0):
    """Stands for `_follow`: of a run that is killed it leaves what a kill does, a step more than is saved."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RANK", raising=False)
        done = quantshard(*arguments)
    assert done.returncode == 0, done.stderr
    if kill_after:
        shutil.rmtree(run.checkpoint(STEPS))
        run.forget_after(kill_after + 1)
    return demo.last_step(run)


def tables(monkeypatch, capsys, results, *arguments):
    monkeypatch.setattr(sys, "argv", ["convergence_resume.py", str(results), *map(str, arguments)])
    bench.main()
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("| current")]


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_arms_are_resumed_once_and_told(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_follow", in_the_pool)
    results, work = tmp_path / "results.jsonl", tmp_path / "work"
    given = ["--corpus", corpus, "--work", work, "--arms", "current lean8", "--steps", STEPS]
    same, other, arm = tables(monkeypatch, capsys, results, *given, "--others", "3", "--", *SIZES.split(), "--lr", 1e-2)
    assert same.startswith("| current lean8 | 1 -> 1 | 2 (3) | equal | equal | 0.00000 | +0.00000 |")
    assert (
        other.startswith("| current lean8 | 1 -> 3 | 2 (3) | equal | 2 steps differ, checkpoint differs |")
        and "(2)" in other
    )
    assert same.endswith("| bitwise |") and arm.startswith("| current lean8 |") and arm.endswith("| 2 |")
    first, second = map(json.loads, results.read_text().splitlines())
    assert (first["seed"], second["seed"], "resumed" in second) == (0, 1, False)
    assert [each["exact"] for each in first["resumed"]] == [True, True]
    assert not list(work.rglob("checkpoints"))
    monkeypatch.setattr(bench, "_follow", None)  # what is done is not run again
    again = tables(monkeypatch, capsys, results, *given, "--others", "3", "--", *SIZES.split(), "--lr", 1e-2)
    assert again == [same, other, arm] == tables(monkeypatch, capsys, results)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        tables(monkeypatch, capsys, results, *given, "--", *SIZES.split())


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_what_a_resume_loses_is_told(corpus, tmp_path, monkeypatch, capsys):
    def forgetful(arguments, run, kill_after=0):
        if arguments[0] == "resume":
            arguments = [*arguments, "--recipe", "mxfp8"]  # other weights than those that were saved
        return in_the_pool(arguments, run, kill_after)

    monkeypatch.setattr(bench, "_follow", forgetful)
    results = tmp_path / "results.jsonl"
    given = ["--corpus", corpus, "--work", tmp_path / "work", "--arms", "current", "--steps", STEPS, "--seeds", "0"]
    [same, _] = tables(monkeypatch, capsys, results, *given, "--others", "", "--", *SIZES.split())
    assert "| **differs** | **2 steps differ, checkpoint differs** |" in same and same.endswith("| **not bitwise** |")
    assert list((tmp_path / "work").rglob("checkpoints")), "what is to be looked at was removed"


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_a_batch_in_the_same_parts_has_the_same_bits_on_another_number(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_follow", in_the_pool)
    results = tmp_path / "results.jsonl"
    given = ["--corpus", corpus, "--work", tmp_path / "work", "--arms", "current lean8", "--steps", STEPS]
    flags = [*SIZES.split(), "--micro-batch", "3", "--lr", 1e-2]
    _, other, _ = tables(monkeypatch, capsys, results, *given, "--seeds", "0", "--others", "2", "--", *flags)
    assert "checkpoint equal | 0.00000 | +0.00000" in other or "| equal | equal | 0.00000 | +0.00000" in other


FIRST = {
    "arm": "current", "seed": 0, "model": "llama 1x32", "corpus": "c", "tokens": 1000, "batch": 4, "heldout": 2.0,
    "bytes": 13.0, "seconds": 1.0, "losses": [], "device": "CPU", "processes": 2, "steps": 10, "flags": "--hidden 32",
}  # fmt: skip
SAME = {
    "on": 2, "at": 5, "killed": 6, "loaded": True, "difference": 0.0, "differing": 0, "largest": 0.0,
    "checkpoint": True, "exact": True,
}  # fmt: skip
OTHER = SAME | {"on": 1, "differing": 5, "checkpoint": False, "difference": -0.01, "largest": 0.02}


def test_verdicts_are_those_of_the_numbers():
    def verdicts(*lines):
        found = list(bench.resume_tables(lines))
        return [line.rsplit("|", 2)[1].strip() for line in found if " -> " in line]

    first = FIRST | {"resumed": [SAME, OTHER]}
    near, far = (FIRST | {"seed": 1, "processes": 1, "heldout": 2.0 + gap} for gap in (0.005, 0.02))
    assert verdicts(first) == ["bitwise", "spread not known"]
    assert verdicts(first, near) == ["bitwise", "**outside**"]
    assert verdicts(first, far) == verdicts(first, near, far | {"seed": 2}) == ["bitwise", "within"]
    assert verdicts(first, far | {"flags": ""}) == ["bitwise", "spread not known"]  # of another size
    assert verdicts(first, far | {"arm": "block"}) == ["bitwise", "spread not known"]
    for wrong in ({"differing": 1}, {"checkpoint": False}):
        assert verdicts(FIRST | {"resumed": [SAME | wrong]}) == ["**not bitwise**"]
    whole = FIRST | {"processes": 1, "heldout": 2.5}
    assert any(line.startswith("| current | 2.5000") for line in bench.resume_tables([whole, first]))


def test_arms_are_named_by_their_flags():
    for name, flags in bench.ARMS.items():
        words, given = list(flags), {}
        while words:
            key = words.pop(0).removeprefix("--").replace("-", "_")
            given |= {key.removeprefix("no_"): False} if key.startswith("no_") else {key: words.pop(0)}
        given = {key: float(value) if key == "lr" else value for key, value in given.items()}
        assert _arm(TrainSettings(**given).resolved()) == name
    partly = TrainSettings(recipe="current", master_dtype="float16", momentum_dtype="fp8", optimizer="muon").resolved()
    assert _arm(partly) == "current muon master=float16 momentum=fp8"
    spelled = replace(TrainSettings(recipe="current", preset="lean8").resolved(), preset="", momentum_dtype="float32")
    assert _arm(spelled) == "current lean8"
    assert (
        _arm(replace(spelled, optimizer="muon"))
        == "current muon master=float16 master_remainders=on exp_avg=fp8 exp_avg_sq=fp8"
    )
    assert _arm(TrainSettings(recipe="block", master_weights=False)) == "block master_weights=False"
