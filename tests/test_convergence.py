"""The benchmark of convergence, with a small model on a few tokens."""

import hashlib
import json
import math
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import convergence, convergence_plot, convergence_runs, convergence_table
from benchmarks.convergence import ARMS, DENSE, LLAMA, MIXTURE, NVFP4_BETWEEN, Training, bytes_kept
from benchmarks.convergence_corpus import Document, check_alike, is_held_out
from benchmarks.convergence_peers import PLAIN, PlainModel
from benchmarks.convergence_table import RESULTS, TrainedOn
from quantshard import recipe
from quantshard.tools.trainer import worker
from quantshard.tools.trainer.models.decoder import LanguageModel
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.covering import exhaustive
from tests.tools.report.runs import entry, write

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 64, "seq_length": 16}
TINY = replace(convergence.SMALL, **SIZES, steps=6, warmup=2, global_batch=4, eval_sequences=32)
EXPERTS = replace(TINY, architecture="llama", experts=4, experts_per_token=2)
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


def test_runs_of_the_train_command_are_arms(corpus, tmp_path):
    folder, data = RunDir(tmp_path / "run"), (str(corpus / "train.bin"),)
    digest = hashlib.sha256((corpus / "train.bin").read_bytes()).hexdigest()
    (corpus / "corpus.json").write_text(json.dumps({"vocabulary": 100, "train": {"sha256": digest}}))
    settings = TrainSettings(model=DENSE, data=data, vocabulary=128, steps=20, recipe="block", preset="lean8", seed=3)
    worker.create_run(folder, settings.resolved(), 1)
    folder.parameters.write_text(json.dumps({"parameter": {"preset": "lean8", "together": 5.094}}))
    write(folder.starts, [{"environment": {"device": "NVIDIA H200", "torch": "2.11.0"}}])
    write(folder.metrics, [entry(step, tokens_per_s=1024.0 if step > 3 else 1.0) for step in range(1, 20)])
    with pytest.raises(ValueError, match="after 19 of 20 steps"):
        convergence_runs.record(corpus, folder.path)
    write(folder.metrics, [entry(20, tokens_per_s=1024.0, heldout_loss=2.5)], "a")
    found = convergence_runs.record(corpus, folder.path)
    assert found["arm"] == "block lean8" and found["arm"] in ARMS and found["seed"] == 3
    assert (found["heldout"], found["bytes"], found["tokens_per_s"], found["peak_gib"]) == (2.5, 5.094, 1024, 1.0)
    assert found["tokens"] == 20 * 16 * 128 and len(found["losses"]) == 2
    starts = ((0, "current"), (0, "nvfp4"), (10, "nvfp4"), (18, "mxfp8"), (16, "block"))
    changed = [{"step": step, "recipe": recipe} for step, recipe in starts]
    write(folder.starts, [{"environment": {"device": "NVIDIA H200", "torch": "2.11.0"}} | start for start in changed])
    assert convergence_runs.record(corpus, folder.path)["arm"] == "nvfp4, block from 80 % lean8"
    rows = [
        {"optimizer": {"exp_avg_sq": "FP8"}, "state_sizes": {"exp_avg": 132, "exp_avg_sq": size}} for size in (129, 132)
    ]
    for of_now, row in zip((True, False), rows, strict=True):
        kept = json.loads(folder.parameters.read_text()) | {"rows": [row]}
        folder.parameters.write_text(json.dumps(kept))
        assert convergence_runs.record(corpus, folder.path)["arm"].endswith("% lean8" if of_now else "% E4M3 lean8")
    folder.parameters.write_text(json.dumps({"parameter": kept["parameter"]}))
    write(folder.starts, [{"environment": {"device": "NVIDIA H200", "torch": "2.11.0"}}])
    (tmp_path / "lines.jsonl").write_text(json.dumps(found) + "\n")
    [(trained, arms)] = convergence_table.read(tmp_path / "lines.jsonl").items()
    assert trained == TrainedOn(DENSE, digest[:8], 20 * 16 * 128, 16) and list(arms) == ["block lean8"]
    config = (folder.path / "config.toml").read_text()
    for was, now, says in (
        ('optimizer = "adamw"', 'optimizer = "muon"', ""),
        ("clip = 1.0", "clip = 2.0", "clip = 2.0, which no arm's name tells"),
        (digest, "0" * 64, "which is not train.bin of"),
    ):
        (folder.path / "config.toml").write_text(config.replace(was, now))
        if not says:
            again = convergence_runs.record(corpus, folder.path)
            assert again["arm"] == "block muon lean8"
            kept = folder.read_config()[0]
            assert convergence_runs.with_rate(again, kept) == again
            named = convergence_runs.with_rate(again, replace(kept, lr=2e-3))
            assert named["arm"] == "block muon lean8 at 0.002"
            continue
        with pytest.raises(ValueError, match=says):
            convergence_runs.record(corpus, folder.path)


@pytest.mark.exhaustive
def test_another_version_of_a_package_is_told(tmp_path):
    """Before a corpus is made whose losses nobody could compare."""
    like = tmp_path / "corpus.json"
    like.write_text(json.dumps({"sources": ["babel 2.18.0", "numpy 2.4.6"]}))
    check_alike(["numpy 2.4.6", "babel 2.18.0", "numpy 2.4.6"], like)
    with pytest.raises(SystemExit, match=r"here babel 2\.19\.0, rich 1; there babel 2\.18\.0;"):
        check_alike(["numpy 2.4.6", "babel 2.19.0", "rich 1"], like)


@pytest.mark.exhaustive
def test_an_arm_reads_and_begins_as_a_run_of_the_train_command(corpus, tmp_path, monkeypatch):
    """Its first two losses have the same bits; later ones differ, since gradients of micro-batches add up in BF16."""
    monkeypatch.setattr(convergence, "EVERY", 1)
    settings = replace(TINY, micro_batches=1)
    arm = Training(ARMS["current"], 3, corpus, settings, "cpu")
    arm.train(math.inf, last=2)
    data = f"--data {corpus}/train.bin --heldout-data {corpus}/heldout.bin --vocabulary 128".split()
    sizes = "--architecture gpt --tied --hidden 32 --layers 1 --heads 2 --kv-heads 2 --ffn 64 --seq-length 16".split()
    steps = "--steps 6 --warmup 2 --global-batch 4 --lr 1e-3 --save-every 0 --seed 3 --recipe current".split()
    command = [sys.executable, "-m", "quantshard", "train", "--run", str(tmp_path / "run"), *data, *sizes, *steps]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in RunDir(tmp_path / "run").metrics.read_text().splitlines()]
    assert [round(line["loss"], 5) for line in lines[:2]] == arm.losses


@pytest.mark.exhaustive
def test_a_mixture_of_experts_trains_and_resumes(corpus, monkeypatch):
    resumed, whole = resumed_and_whole(corpus, "block lean8", EXPERTS)
    assert whole["model"] == MIXTURE and resumed["heldout"] == whole["heldout"]
    monkeypatch.setattr(convergence, "trained_loss", lambda model, found, settings: found.cross_entropy)
    without = convergence.run("block lean8", 1, Namespace(settings=EXPERTS, corpus=corpus, work=corpus / "a"), math.inf)
    monkeypatch.undo()
    balanced = convergence.run(
        "block lean8", 1, Namespace(settings=EXPERTS, corpus=corpus, work=corpus / "b"), math.inf
    )
    assert without["heldout"] != balanced["heldout"], "the loss of balance trains nothing"


def test_an_arm_of_recipes_by_layer_has_them_there(corpus, tmp_path):
    settings = replace(TINY, architecture="llama", layers=12, steps=1)
    training = Training(ARMS[NVFP4_BETWEEN], 0, corpus, settings, "cpu")
    formats = [layer.self_attention.proj.weight.quantized_storage.spec.format.name for layer in training.model.layers]
    assert formats == 2 * ["fp8_e4m3"] + 8 * ["nvfp4_16x16"] + 2 * ["fp8_e4m3"]
    assert training.train(math.inf) and bytes_kept(training) == pytest.approx(8 + 4 + 2 / 3, abs=0.1)  # and scales
    asked = Namespace(settings=settings, corpus=corpus, work=tmp_path / "work")
    assert convergence.run("bf16 AdamW", 0, asked, math.inf)["model"] == "llama 12x32"


def test_the_plain_model_is_ours_in_plain_layers():
    torch.manual_seed(0)
    ours = LanguageModel(replace(TINY, layers=2), recipe.resolve("bf16"), "cpu", vocabulary=128)
    with torch.no_grad():
        for param in ours.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))
    plain = PlainModel(ours, PLAIN, "cpu")
    tokens = torch.randint(0, 128, (3, 16))
    with torch.no_grad():
        wanted, found = ours.float()(tokens), plain.float()(tokens)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert sum(each.numel() for each in plain.parameters()) == sum(each.numel() for each in ours.parameters())
    with pytest.raises(ValueError, match="of GPT-2's kind"):
        PlainModel(LanguageModel(EXPERTS, recipe.resolve("bf16"), "cpu", vocabulary=128), PLAIN, "cpu")


def test_torchao_quantizes_the_layers_of_its_arm(corpus):
    def losses(name):
        training = Training(ARMS[name], 0, corpus, TINY, "cpu")
        kinds = {type(each).__name__ for each in training.model.layers.modules() if hasattr(each, "in_features")}
        training.train(math.inf)
        return kinds, training.evaluate()

    (ours, ours_loss), (plain, plain_loss) = losses("torchao tensorwise"), losses("plain bf16")
    assert (ours, plain) == ({"Float8Linear"}, {"Linear"})
    assert ours_loss != plain_loss and abs(ours_loss - plain_loss) < 0.1


def test_rates_are_of_the_steps_of_all_sittings_but_for_the_first_of_each(corpus, monkeypatch):
    monkeypatch.setattr(convergence, "EVERY", 1)
    first = Training(ARMS["bf16"], 0, corpus, TINY, "cpu")
    first.train(math.inf, last=4)
    first.save(corpus / "saved")
    second = Training(ARMS["bf16"], 0, corpus, TINY, "cpu")
    second.load(corpus / "saved")
    second.train(math.inf)
    assert second.times[:3] == first.times and len(second.times) == 3 + 1
    second.times = [0.5, 100.0, 0.5, 0.5]
    assert second.tokens_per_second() == 4 * 16 * 1 / 0.5
    second.times, second.seconds = [], 3.0
    assert second.tokens_per_second() == pytest.approx(6 * 4 * 16 / 3)


def test_steps_and_batches_are_chosen():
    assert convergence.chosen_settings(DENSE, 1500, 64) == convergence.SMALL
    short = convergence.chosen_settings(MIXTURE, 300, 96)
    assert (short.steps, short.decay_steps, short.warmup, short.micro_batches) == (300, 300, 30, 3)
    assert (short.experts, short.kv_heads, short.seq_length, short.architecture) == (16, 4, 512, "llama")
    llama = convergence.chosen_settings(LLAMA, 1200, 32, 256)
    run = TrainSettings(
        architecture="llama", hidden=768, layers=12, heads=12, ffn=2048, tied=True, seq_length=1024, steps=1200,
        global_batch=32, lr=1e-3, warmup=120, eval_sequences=256, save_every=0,
    )  # fmt: skip
    assert llama == run.resolved() and convergence.model_of(llama) == LLAMA
    with pytest.raises(ValueError, match="--batch 65 cannot be taken in 3 equal parts"):
        convergence.chosen_settings(DENSE, 10, 65)
    folders = {
        convergence.work_folder(Path("w"), "block lean8", 1, convergence.chosen_settings(*chosen))
        for chosen in ((DENSE, 1500, 64), (DENSE, 300, 64), (DENSE, 1500, 32), (MIXTURE, 1500, 64), (LLAMA, 1500, 64))
    }
    assert len(folders) == 5 and Path("w/block-lean8-1") in folders


def test_an_arm_of_other_tokens_is_run_again(corpus, tmp_path):
    trained = convergence.what_is_trained(corpus, convergence.SMALL)
    record = {"arm": "bf16", "seed": 1, "corpus": "01234567", "tokens": 1500 * 64 * 1024}
    others = [{"corpus": "76543210"}, {"tokens": 64 * 1024}, {"model": MIXTURE}, {"batch": 32}]
    results = tmp_path / "results.jsonl"
    lines = [record, *(record | other | {"seed": 2 + number} for number, other in enumerate(others))]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert convergence.finished(results, trained) == {("bf16", 1)}
    assert convergence.finished(tmp_path / "none", trained) == set()


def test_what_is_held_out_is_told_by_the_contents_alone():
    documents = [Document(f"{number:064x}", "", "") for number in range(1000)]
    held = [document for document in documents if is_held_out(document)]
    assert len(held) == 5 and [each for each in documents[100:] if is_held_out(each)] == held[1:]


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


def test_runs_that_shared_a_gpu_tell_no_times(tmp_path, monkeypatch, capsys):
    made = lambda corpus, folder: FIRST | {"heldout": 2.01, "peak_gib": 7.0, "tokens_per_s": 7}  # noqa: E731
    monkeypatch.setattr(convergence_runs, "record", made)
    monkeypatch.setattr(convergence_runs, "with_rate", lambda found, settings: found)
    monkeypatch.setattr(RunDir, "read_config", lambda self: (None,))
    told = []
    for options in ([], ["--shared-gpu"]):
        monkeypatch.setattr("sys.argv", ["convergence_runs.py", "corpus", "run", *options])
        convergence_runs.main()
        told.append(json.loads(capsys.readouterr().out))
    assert told[0].keys() - told[1].keys() == {"seconds", "tokens_per_s"} and told[0] | told[1] == told[0]
    rates = ({"arm": "block", "seed": seed, "tokens_per_s": 100 + seed} for seed in range(2))
    groups = records(tmp_path, {}, {"seed": 1}, *rates)
    [(trained, arms)] = groups.items()
    convergence_table.add(groups, told[1] | {"arm": "block", "seed": 2})
    convergence_table.add(groups, told[1] | {"arm": "shared", "seed": 2})
    lines = list(convergence_table.table(trained, arms))
    assert lines[-1] == "| shared | 2.0100 | - | 14.00 | 7.0 | - | 1 |"
    assert any(line.startswith("| block | 2.0033 | +0.00") and line.endswith("| 7.0 | 101 | 3 |") for line in lines)


def test_an_arm_is_compared_with_bf16_of_its_optimizer_and_rate():
    arms = {name: name for name in ("bf16", "bf16 muon", "bf16 muon at 0.002", "current", "current lion")}
    found = {
        "bf16 muon": "bf16", "bf16 muon at 0.002": "bf16", "current lean8": "bf16", "current lion": "bf16",
        "nvfp4, bf16 from 80 % muon": "bf16 muon", "current muon lean8 at 0.002": "bf16 muon at 0.002",
        "current muon at 0.004": "bf16",
    }  # fmt: skip
    assert {name: convergence_table.reference_of(name, arms) for name in found} == found


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


def test_the_readme_tells_bf16s_loss_of_the_seeds_that_all_rows_have(tmp_path):
    three = [{"arm": "bf16", "seed": seed, "heldout": 2.0 + 0.3 * seed} for seed in range(3)]
    for others, told in (
        ((0, 1), "2.300 (2.150 on the 2 seeds that all rows share)"),
        ((1,), "2.300 (2.300 on the 1 seed that all rows share)"),
        ((), "2.300 |"),
    ):
        current = [{"arm": "current", "seed": seed} for seed in others]
        lines = list(convergence_table.costs(records(tmp_path, *three, *current)))
        assert told in lines[2], lines[2]


def test_a_line_that_is_no_record_is_named(tmp_path):
    for wrong in ("{", '{"arm": "bf16"}', "[1]"):
        file = tmp_path / "records.jsonl"
        file.write_text(json.dumps(FIRST) + "\n" + wrong + "\n")
        with pytest.raises(ValueError, match=r"records.jsonl:2 is no record of convergence.py"):
            convergence_table.read(file)


@pytest.mark.slow
def test_curves_are_the_same_picture_each_time(tmp_path):
    groups = records(tmp_path, {"losses": [3.0 - 0.1 * at for at in range(12)]}, {"arm": "block"}, {"tokens": 5})
    trained = convergence_table.ranked_groups(groups)[0]
    for name in ("a.svg", "b.svg"):
        convergence_plot.draw(tmp_path / name, trained, groups[trained])
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text() and "block" in picture and "million tokens" in picture


def test_arms_of_recipes_by_layer_have_short_labels():
    for name, shown in {
        NVFP4_BETWEEN: "nvfp4; current: layers 0, 1, 10, 11",
        f"{NVFP4_BETWEEN}, current from 80 % muon at 0.004": (
            "nvfp4; current: layers 0, 1, 10, 11, current from 80 % muon at 0.004"
        ),
        "layers.0=bf16,self_attention=current,*=nvfp4/wgrad:current lean8": (
            "nvfp4/wgrad:current; bf16: layers 0; current: self_attention lean8"
        ),
        "layers.0=current": "bf16; current: layers 0",
        "current master=float16 momentum=fp8": "current master=float16 momentum=fp8",
        "nvfp4, current from 80 %": "nvfp4, current from 80 %",
    }.items():
        assert convergence_plot.label(name) == shown


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
