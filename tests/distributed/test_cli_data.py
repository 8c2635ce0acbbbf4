"""`quantshard train` on tokens: several sources by weight, a tokenizer, held-out data; resumed, moved, exported."""

import json
import re
import shutil

import numpy as np
import pytest

from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed.commands import quantshard
from tests.tools.cli import sources

pytestmark = pytest.mark.distributed

SIZES = "--hidden 64 --heads 2 --layers 1 --seq-length 16 --global-batch 6 --warmup 2 --eval-sequences 6".split()


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [{k: r[k] for k in ("step", "loss", "grad_norm", "heldout_loss") if k in r} for r in metrics(run)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("data")
    sources.tokenizer_folder(at / "tokenizer", eos_token=sources.END)
    sources.jsonl(at / "a.jsonl", sources.texts(80))
    sources.parquet(at / "b.parquet", sources.texts(60, seed=1000))
    sources.jsonl(at / "kept.jsonl", sources.texts(20, seed=2000))
    return at


@pytest.fixture(scope="module")
def trained(folder):
    """A run of 4 steps on 2 processes, saved after 2; one source was made into shards before."""
    tokenizer = ["--tokenizer", folder / "tokenizer"]
    made = quantshard("tokenize", folder / "b.parquet", *tokenizer, "--out", folder / "b", "--shard-size", "1kb")
    assert made.returncode == 0 and "60 documents" in made.stdout, made.stderr
    data = [
        "--data",
        folder / "a.jsonl",
        "--data",
        folder / "b",
        "--data-weights",
        "3,1",
        "--heldout-data",
        folder / "kept.jsonl",
    ]
    more = ["--save-every", 2, "--eval-every", 2, "--sample-tokens", 3, "--sample-prompt", "shard scale"]
    run = folder / "run"
    result = quantshard("train", "--run", run, *data, *tokenizer, "--nproc-per-node", 2, "--steps", 4, *SIZES, *more)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "80 documents" in result.stdout and "20 documents" in result.stdout
    return run


def test_records(trained, folder):
    settings, _, corpus = RunDir(trained).read_config()
    assert (settings.vocabulary, corpus["vocabulary"]) == (512, 400)  # rows that no token has make GEMMs fast
    assert settings.heldout == 0.0
    assert settings.data[1] == str(folder / "b") and settings.data[0].startswith(str(trained / "tokens" / "a.jsonl-"))
    assert [r["step"] for r in losses(trained) if "heldout_loss" in r] == [2, 4]
    assert all(r["data_wait_s"] >= 0 for r in metrics(trained))
    samples = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [0, 4] and all(s["text"].startswith("shard scale") for s in samples)


def test_moved_and_resumed_is_bitwise(trained, folder, tmp_path):
    """The tokens in the run's folder go with it; on 3 processes the sequences are the same."""
    for processes in (2, 3):
        run = tmp_path / f"on-{processes}"
        shutil.copytree(trained, run)
        shutil.rmtree(run / "checkpoints" / "step-000004")
        gone = folder / "elsewhere"
        trained.rename(gone)
        try:
            result = quantshard("resume", run, "--nproc-per-node", processes)
        finally:
            gone.rename(trained)
        assert result.returncode == 0 and "resumed after step 2" in result.stdout, result.stderr
        if processes == 2:
            assert losses(run) == losses(trained)
        for now, then in zip(losses(run), losses(trained), strict=True):
            assert now["loss"] == pytest.approx(then["loss"], abs=0.02)  # bf16 activations, other order of sums


TEMPLATE = "{% for m in messages %}<|other|>{{ m.role }} {{ m.content }}{% endfor %}"


def chats(path, count, seed):
    """Chats of one turn each."""
    pairs = zip(sources.texts(count, seed=seed), sources.texts(count, seed=seed + 50), strict=True)
    turns = [
        [{"role": "user", "content": a[:40]}, {"role": "assistant", "content": b[: 9 + 7 * (i % 9)]}]
        for i, (a, b) in enumerate(pairs)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def test_packed_chats_resumed_are_bitwise(folder, tmp_path):
    """Rows of whole chats, of which the assistant's tokens are trained; evaluated on two sources. On 1 and 3 processes,
    which agree up to the order of float32 sums: each token has the same weight."""
    tokenizer = sources.tokenizer_folder(tmp_path / "tokenizer", eos_token=sources.END, chat_template=TEMPLATE)
    heldout = [chats(tmp_path / "kept.jsonl", 12, 3000), tmp_path / "texts.jsonl"]
    shutil.copy(folder / "kept.jsonl", heldout[1])
    names = [f"heldout_loss/{path.name}" for path in heldout]
    begun = []
    for processes in (1, 3):
        run, stopped = tmp_path / f"run-{processes}", tmp_path / f"stopped-{processes}"
        result = quantshard(
            "train", "--run", run, "--data", chats(tmp_path / "chats.jsonl", 70, 0), "--tokenizer", tokenizer,
            "--heldout-data", heldout[0], "--heldout-data", heldout[1], "--packing", "best-fit", *SIZES[:6],
            "--seq-length", 48, "--global-batch", 6, "--warmup", 1, "--nproc-per-node", processes, "--steps", 3,
            "--save-every", 2, "--eval-every", 1, "--recipe", "bf16", "--params-dtype", "float32",
        )  # fmt: skip
        assert result.returncode == 0 and not result.stderr, result.stderr
        assert " rows hold 70 documents (" in result.stdout and "% padding" in result.stdout
        shutil.copytree(run, stopped)
        shutil.rmtree(stopped / "checkpoints" / "step-000003")
        again = quantshard("resume", stopped, "--nproc-per-node", processes)
        assert again.returncode == 0 and "resumed after step 2" in again.stdout, again.stderr
        assert losses(stopped) == losses(run)
        last, resumed = metrics(run)[-1], metrics(stopped)[-1]
        assert [last[name] for name in names] == [resumed[name] for name in names]
        assert min(last[name] for name in names) < last["heldout_loss"] < max(last[name] for name in names)
        starts = [json.loads(line) for line in (stopped / "starts.jsonl").read_text().splitlines()]
        assert [start["packing"] for start in starts] == [starts[0]["packing"]] * 2 and "padding" in result.stdout
        begun.append([metrics(run)[0][name] for name in ("loss", "grad_norm", "heldout_loss", *names)])
    assert begun[0] == pytest.approx(begun[1], rel=1e-5)


def one_line(result, says):
    lines = result.stderr.splitlines()
    assert result.returncode == 1 and len(lines) == 1 and says in lines[0], (says, result.stderr)


def test_changed_data_are_refused(trained, folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    [shards] = (run / "tokens").glob("a.jsonl-*")
    tokens = np.fromfile(shards / "00000.bin", "<u2")
    tokens[7] ^= 1
    tokens.tofile(shards / "00000.bin")
    data = ["--data", shards, "--data", folder / "b"]
    before = (run / "config.toml").read_bytes()
    one_line(quantshard("resume", run, "--steps", 5, *data), "its content is another; restore it")
    one_line(
        quantshard("resume", run, "--steps", 5, "--data", shards),
        "give a number above 0 for each of the 1 --data",
    )
    other = sources.tokenizer_folder(tmp_path / "other", eos_token="<|other|>")
    one_line(quantshard("resume", run, "--steps", 5, "--tokenizer", other), "is not the tokenizer of the data")
    assert (run / "config.toml").read_bytes() == before
    (run / "config.toml").write_text(re.sub("\nseq_length = .*", "\nseq_length = 40", before.decode()))
    one_line(quantshard("resume", run, "--steps", 5), "seq_length was 16, not 40; its data would differ")


def test_export_has_the_tokenizer(trained, folder, tmp_path):
    checkpoint, out = trained / "checkpoints" / "step-000004", tmp_path / "out"
    result = quantshard("export", checkpoint, "--layout", "plain-bf16", "--out", out)
    assert result.returncode == 0 and "copied: " in result.stdout, result.stderr
    config = json.loads((out / "config.json").read_text())
    end = json.loads(sources.tokenizer_json())["model"]["vocab"][sources.END]
    assert (config["vocab_size"], config["eos_token_id"]) == (512, end)
    transformers = pytest.importorskip("transformers")
    text = sources.texts(1)[0]
    made = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert made.decode(made(text)["input_ids"]) == text and made.eos_token == sources.END
    result = quantshard(
        "train", "--run", tmp_path / "next", "--init-from", out, "--data", folder / "b", "--steps", 1,
        "--seq-length", 16, "--global-batch", 2, "--nproc-per-node", 2,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    one_line(
        quantshard("train", "--run", tmp_path / "bytes", "--init-from", out, "--data", folder / "a.jsonl"),
        "is not a model of bytes; name its --tokenizer",
    )
