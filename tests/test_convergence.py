"""The benchmark of convergence, with a small model on a few tokens."""

import json
import math
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import convergence
from benchmarks.convergence import ARMS, Training

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 64, "seq_length": 16}
TINY = replace(convergence.SMALL, **SIZES, steps=6, warmup=2, global_batch=4, eval_sequences=32)
BYTES = {"bf16": 14, "mxfp8": 13, "block lean": 5, "mxfp8 AdamW": 5}
"""Of a parameter of a large matrix, without scales."""


@pytest.fixture
def corpus(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 100, 4000).astype(np.uint16)
    for name in ("train.bin", "heldout.bin"):
        (tmp_path / name).write_bytes(tokens.tobytes())
    (tmp_path / "corpus.json").write_text(json.dumps({"vocabulary": 100}))
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
