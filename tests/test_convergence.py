"""The benchmark of convergence, with a small model on a few tokens."""

import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import convergence, convergence_table
from benchmarks.convergence import ARMS, DENSE, LLAMA, MIXTURE, NVFP4_BETWEEN, Training, bytes_per_parameter
from benchmarks.convergence_table import RESULTS, TrainedOn
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.covering import exhaustive

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 64, "seq_length": 16}
TINY = replace(convergence.SMALL, **SIZES, steps=6, warmup=2, global_batch=4, eval_sequences=32)
BYTES = {"bf16": 14, "mxfp8": 13, "block lean8": 4, "block lean6": 5, "mxfp8 AdamW": 5, "torchao tensorwise": 14,
         "nvfp4 mxfp8-backward": 12.5, "nvfp4 mxfp8-forward": 13}  # fmt: skip
"""Of a parameter of a large matrix, without scales."""


@pytest.fixture
def corpus(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 100, 4000).astype(np.uint16)
    for name in ("train.bin", "heldout.bin"):
        (tmp_path / name).write_bytes(tokens.tobytes())
    (tmp_path / "corpus.json").write_text(json.dumps({"vocabulary": 100, "train": {"sha256": "0123456789"}}))
    return tmp_path


def resumed_and_whole(corpus, name, settings):
    asked = Namespace(settings=settings, corpus=corpus, work=corpus / "work")
    whole = convergence.run(name, 0, asked, math.inf)
    half = Training(ARMS[name], 0, corpus, settings, "cpu")
    assert half.train(math.inf, last=3)
    half.save(convergence.work_folder(asked.work, name, 0, settings))
    return convergence.run(name, 0, asked, math.inf), whole


@pytest.mark.parametrize("name", exhaustive([(name,) for name in BYTES], [("nvfp4 mxfp8-backward",)]))
def test_an_arm_that_was_stopped_is_the_one_that_was_not(corpus, name, monkeypatch):
    monkeypatch.setattr(convergence, "EVERY", 1)
    resumed, whole = resumed_and_whole(corpus, name, TINY)
    assert resumed["losses"] == whole["losses"] and len(whole["losses"]) == 6
    assert len(set(whole["losses"])) >= 5  # of random tokens, two may agree in five digits
    assert whole["tokens"] == 6 * 4 * 16 and (whole["model"], whole["batch"]) == (DENSE, 4)
    assert whole["tokens_per_s"] > 0 and "peak_gib" not in whole
    assert resumed["heldout"] == whole["heldout"]
    assert BYTES[name] <= resumed["bytes"] < BYTES[name] + 0.5  # scales of lines of 32


def test_an_arm_of_recipes_by_layer_has_them_there(corpus, tmp_path):
    settings = replace(TINY, architecture="llama", layers=12, steps=1)
    training = Training(ARMS[NVFP4_BETWEEN], 0, corpus, settings, "cpu")
    formats = [layer.self_attention.proj.weight.quantized_storage.spec.format.name for layer in training.model.layers]
    assert formats == 2 * ["fp8_e4m3"] + 8 * ["nvfp4_16x16"] + 2 * ["fp8_e4m3"]
    assert training.train(math.inf) and bytes_per_parameter(training) == pytest.approx(
        8 + 4 + 2 / 3, abs=0.1
    )  # and scales
    asked = Namespace(settings=settings, corpus=corpus, work=tmp_path / "work")
    assert convergence.run("bf16 AdamW", 0, asked, math.inf)["model"] == "llama 12x32"


def test_steps_and_batches_are_chosen():
    assert convergence.make_settings(DENSE, 1500, 64) == convergence.SMALL
    short = convergence.make_settings(MIXTURE, 300, 96)
    assert (short.steps, short.decay_steps, short.warmup, short.micro_batches) == (300, 300, 30, 3)
    assert (short.experts, short.kv_heads, short.seq_length, short.architecture) == (16, 4, 512, "llama")
    llama = convergence.make_settings(LLAMA, 1200, 32, 256)
    run = TrainSettings(
        architecture="llama", hidden=768, layers=12, heads=12, ffn=2048, tied=True, seq_length=1024, steps=1200,
        global_batch=32, lr=1e-3, warmup=120, eval_sequences=256, save_every=0,
    )  # fmt: skip
    assert llama == run.resolved() and convergence.model_name(llama) == LLAMA
    with pytest.raises(ValueError, match="--batch 65 cannot be taken in 3 equal parts"):
        convergence.make_settings(DENSE, 10, 65)
    folders = {
        convergence.work_folder(Path("w"), "block lean8", 1, convergence.make_settings(*chosen))
        for chosen in ((DENSE, 1500, 64), (DENSE, 300, 64), (DENSE, 1500, 32), (MIXTURE, 1500, 64), (LLAMA, 1500, 64))
    }
    assert len(folders) == 5 and Path("w/block-lean8-1") in folders


def test_an_arm_of_other_tokens_is_run_again(corpus, tmp_path):
    trained = convergence.training_key(corpus, convergence.SMALL)
    record = {"arm": "bf16", "seed": 1, "corpus": "01234567", "tokens": 1500 * 64 * 1024}
    others = [{"corpus": "76543210"}, {"tokens": 64 * 1024}, {"model": MIXTURE}, {"batch": 32}]
    results = tmp_path / "results.jsonl"
    lines = [record, *(record | other | {"seed": 2 + number} for number, other in enumerate(others))]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert convergence.finished(results, trained) == {("bf16", 1)}
    assert convergence.finished(tmp_path / "none", trained) == set()


# The table -----------------------------------------------------------------------------------------------------------

FIRST = {
    "arm": "bf16", "seed": 0, "corpus": "c", "heldout": 2.0, "bytes": 14.0, "tokens": 1000, "seconds": 10.0,
    "losses": [3.0, 2.5], "device": "some GPU",
}  # fmt: skip


def records(tmp_path, *changes):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(FIRST | change) + "\n" for change in changes))
    return convergence_table.read(file)


def test_arms_are_compared_by_seed_and_on_equal_tokens(tmp_path):
    lean = {"arm": "current lean8", "bytes": 5.09, "peak_gib": 7.25, "tokens_per_s": 2000}
    groups = records(
        tmp_path, {}, {"seed": 1, "heldout": 2.2}, lean | {"heldout": 2.01}, lean | {"seed": 1, "heldout": 2.2},
        lean | {"seed": 2, "heldout": 9.0, "tokens": 2000}, {"arm": "block", "seed": 5},
    )  # fmt: skip
    dense, longer = (TrainedOn(DENSE, "c", tokens, 64) for tokens in (1000, 2000))
    assert list(groups) == [dense, longer]
    head, _, *lines = convergence_table.table(dense, groups[dense])
    assert head == (
        "**gpt2-small, 1,000 tokens of corpus c, 64 sequences a step**, on some GPU. From seed to seed bf16 differs by "
        "up to 9.52 %."
    )
    assert lines[2:] == [
        "| block | 2.0000 | - | 14.00 | - | 100 | 1 |",  # no seed of bf16's
        "| bf16 | 2.1000 | 0 | 14.00 | - | 100 | 2 |",
        "| current lean8 | 2.1050 | +0.25 ± 0.25 (+0.00 to +0.50) | 5.09 | 7.2 | 2,000 | 2 |",
    ]
    alone = list(convergence_table.table(longer, groups[longer]))
    assert "not known: it has 0." in alone[0] and alone[-1].startswith("| current lean8 | 9.0000 | - |")


def test_the_readmes_losses_are_of_most_arms_and_then_of_most_seeds(tmp_path):
    def of(corpus, heldout, *arms, seeds=1):
        return [{"arm": arm, "corpus": corpus, "heldout": heldout, "seed": at} for at in range(seeds) for arm in arms]

    few, many = ("bf16", "current"), ("bf16", "current", "nvfp4")
    llama = [each | {"model": LLAMA} for each in of("b", 3.0, *many, seeds=2)]
    mixture = [each | {"model": MIXTURE} for each in llama]  # has no row
    for groups, loss, same in (
        ((of("a", 2.0, *many), of("b", 3.0, *few, seeds=9)), "2.000", "+0.00"),
        ((of("a", 2.0, *many), of("b", 3.0, *many, seeds=2)), "3.000", "+0.00 ± 0.00"),
        ((of("a", 2.0, *many, seeds=2), of("b", 3.0, *many)), "2.000", "+0.00 ± 0.00"),
        ((of("a", 2.0, *many), llama), "3.000", "+0.00 ± 0.00"),
        ((of("a", 2.0, *many), mixture), "2.000", "+0.00"),
    ):
        lines = list(convergence_table.costs(records(tmp_path, *(each for group in groups for each in group))))
        assert [line.split("|")[-2].strip() for line in lines[2:6]] == [
            loss, "not yet run", f"{loss} ({same} %)", f"{loss} ({same} %)"
        ]  # fmt: skip


def test_the_readme_has_the_bytes_of_the_formats_and_the_losses_that_were_recorded():
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    lines = list(convergence_table.costs(convergence_table.read(RESULTS)))
    assert convergence_table.with_costs(page, lines) == page, (
        "python -m benchmarks.convergence_table --readme README.md"
    )
    sizes = {row.what: row.size.together for row in convergence_table.cost_rows()}
    assert sizes["BF16, `torch.optim.AdamW` with BF16 moments"] == 6
    assert all(row.arm in ARMS for row in convergence_table.cost_rows())
    with pytest.raises(ValueError, match="must have one table"):
        convergence_table.with_costs("none", lines)
