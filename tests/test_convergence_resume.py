"""The tables of the benchmark of arms that are resumed at their midpoint."""

from dataclasses import replace

from benchmarks import convergence_resume as bench
from benchmarks.convergence_runs import arm_name
from quantshard.tools.trainer.settings.config import TrainSettings

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
        assert arm_name(TrainSettings(**given).resolved()) == name
    partly = TrainSettings(recipe="current", master_dtype="float16", momentum_dtype="fp8", optimizer="muon").resolved()
    assert arm_name(partly) == "current muon master=float16 momentum=fp8"
    spelled = replace(TrainSettings(recipe="current", preset="lean8").resolved(), preset="", momentum_dtype="float32")
    assert arm_name(spelled) == "current lean8"
    assert (
        arm_name(replace(spelled, optimizer="muon"))
        == "current muon master=float16 master_remainders=on exp_avg=fp8 exp_avg_sq=fp8"
    )
    assert arm_name(TrainSettings(recipe="block", master_weights=False)) == "block master_weights=False"
