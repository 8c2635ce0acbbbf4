"""Weights sent to a real vLLM engine on the CPU, in another process and virtual environment (`make test-serving`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import serving
from tests.distributed.pool import run_ranks

transformers = pytest.importorskip("transformers", "5.0")

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("QUANTSHARD_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist; `make test-serving` installs vLLM there"),
]

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]


class Engine:
    """A process of tests/interop/vllm_engine.py."""

    def __init__(self, folder: Path) -> None:
        replies, end = os.pipe()
        command = [str(PYTHON), str(ROOT / "tests/interop/vllm_engine.py"), str(folder), str(end)]
        self.log = folder / "engine.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[end], cwd=ROOT
            )
        os.close(end)
        self._replies = os.fdopen(replies)
        assert self._replies.readline() == '"ready"\n', self.log.read_text()

    def call(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        reply = json.loads(self._replies.readline())
        return reply["result"] if "result" in reply else reply["error"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._replies.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Engine]]:
    engines: list[Engine] = []

    def started() -> Engine:
        engines.append(Engine(tmp_path))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def build(recipe: str) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
    if recipe != "bf16":
        qs.convert(model, recipe)
    if dist.is_initialized():
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def logprobs(model: Any) -> list[float]:
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens).logits.float().log_softmax(-1)
    return logits[0, :-1].gather(1, tokens[0, 1:, None]).flatten().tolist()


def train(folder: str, recipe: str, layout: str, steps: int) -> list[list[float]]:
    """Publish before and after each step; the trainer's log-probabilities by version."""
    model = build(recipe)
    optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=3e-3)
    weights, by_version = serving.LiveWeights(model, layout), []
    for version in range(steps + 1):
        serving.publish(weights, folder, version, keep=steps + 1)
        by_version.append(logprobs(model))
        if version < steps:
            ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(version))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return by_version


def worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"), [("bf16", "plain-bf16"), ("rowwise", "compressed-tensors-fp8-channel")]
)
def test_an_engine_computes_with_the_weights_of_the_trainer(
    recipe: str, layout: str, tmp_path: Path, start: Callable[[], Engine]
) -> None:
    """2 ranks under FSDP2 train; a third process serves. FP8 parameters in the engine have our bytes."""
    ours = run_ranks(2, train, str(tmp_path), recipe, layout, 2)[0]
    later = [path.rename(tmp_path / f"later-{path.name}") for path in serving.published(tmp_path)[1:]]
    engine = start()
    versions = [engine.call("logprobs", PROMPT)]
    before = engine.call("parameters")
    for path in later:
        path.rename(tmp_path / path.name.removeprefix("later-"))
        assert engine.call("update") == path.name.removeprefix("later-")
        versions.append(engine.call("logprobs", PROMPT))
    # BF16 rounds each of two layers' sums, in another order, to 2**-9 of values near 1
    for number, (trainer, served) in enumerate(zip(ours, versions, strict=True)):
        print(f"{layout} version {number}: worst difference {worst(trainer, served['logprobs']):.4f}")
        assert worst(trainer, served["logprobs"]) < 0.05
    assert worst(versions[0]["logprobs"], versions[2]["logprobs"]) > 0.2
    after = engine.call("parameters")
    assert before.keys() == after.keys() and all(before[name] != after[name] for name in before)
