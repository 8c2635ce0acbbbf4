"""The benchmark of convergence, with a small model on a few tokens."""

import json
import math
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import convergence
from benchmarks.convergence import ARMS, Training
from benchmarks.convergence_corpus import Document, is_held_out

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 64, "seq_length": 16}
TINY = replace(convergence.SMALL, **SIZES, steps=6, warmup=2, global_batch=4, eval_sequences=32)
BYTES = {"bf16": 14, "mxfp8": 13, "block lean": 5, "mxfp8 AdamW": 5}
"""Of a parameter of a large matrix, without scales."""


@pytest.fixture
def corpus(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 100, 4000).astype(np.uint16)
    for name in ("train.bin", "heldout.bin"):
        (tmp_path / name).write_bytes(tokens.tobytes())
    (tmp_path / "corpus.json").write_text(json.dumps({"vocabulary": 100, "train": {"sha256": "0123456789"}}))
    return tmp_path


@pytest.mark.parametrize("name", BYTES)
def test_an_arm_that_was_stopped_is_the_one_that_was_not(corpus, name):
    asked = Namespace(settings=TINY, corpus=corpus, work=corpus / "work")
    whole = convergence.run(name, 0, asked, math.inf)
    assert whole is not None and whole["tokens"] == 6 * 4 * 16
    half = Training(ARMS[name], 0, corpus, TINY, "cpu")
    assert half.train(math.inf, last=3)
    half.save(corpus / "work" / f"{name}-0".replace(" ", "-"))
    resumed = convergence.run(name, 0, asked, math.inf)
    assert resumed is not None and resumed["heldout"] == whole["heldout"]
    assert BYTES[name] <= resumed["bytes"] < BYTES[name] + 0.5  # scales of lines of 32


def test_an_arm_of_another_corpus_is_run_again(corpus, tmp_path):
    record = {"arm": "bf16", "seed": 1, "corpus": "01234567"}
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(record) + "\n" + json.dumps(record | {"seed": 2, "corpus": "76543210"}) + "\n")
    assert convergence.finished(results, convergence.corpus_hash(corpus)) == {("bf16", 1)}
    assert convergence.finished(tmp_path / "none", "01234567") == set()


def test_what_is_held_out_is_told_by_the_contents_alone():
    documents = [Document(f"{number:064x}", "", "") for number in range(1000)]
    held = [document for document in documents if is_held_out(document)]
    assert len(held) == 5 and [each for each in documents[100:] if is_held_out(each)] == held[1:]
