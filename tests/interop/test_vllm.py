"""Weights sent to a real vLLM engine on the CPU, in another process and virtual environment (`make test-serving`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import serving
from tests.distributed.pool import run_ranks
from tests.interop.hashes import sha

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
RECIPES: dict[str, Any] = {
    "rowwise-f32": qs.recipe.Float8RowwiseScaling(use_power_2_scales=False),
}  # fmt: skip
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]


class Engine:
    """A process of tests/interop/vllm_engine.py, with `tp` workers."""

    def __init__(self, folder: Path, tp: int) -> None:
        replies, end = os.pipe()
        command = [str(PYTHON), str(ROOT / "tests/interop/vllm_engine.py"), str(folder), str(end), str(tp)]
        self.log = folder / f"engine-{tp}.log"
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
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def started(tp: int = 1) -> Engine:
        engines.append(Engine(tmp_path, tp))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def build(recipe: str) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
    if recipe != "bf16":
        qs.convert(model, RECIPES.get(recipe, recipe))
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


def fused(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Hashes of parameters as vLLM fuses them: q, k, v and gate, up, one below the other."""
    parts: dict[str, list[Tensor]] = {}
    for names, into in (("q_proj k_proj v_proj", "qkv_proj"), ("gate_proj up_proj", "gate_up_proj")):
        for name in names.split():
            for key in [key for key in tensors if f".{name}." in key]:
                parts.setdefault(key.replace(name, into), []).append(tensors[key].reshape(-1))
    whole = {key: [value] for key, value in tensors.items() if not re.search(r"\.([qkv]|gate|up)_proj\.", key)}
    return {key: sha(torch.cat(values) if len(values) > 1 else values[0]) for key, values in (whole | parts).items()}


def worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"), [("bf16", "plain-bf16"), ("rowwise-f32", "compressed-tensors-fp8-channel")]
)
def test_an_engine_computes_with_the_weights_of_the_trainer(
    recipe: str, layout: str, tmp_path: Path, start: Callable[..., Engine]
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
    # BF16's rounding differs between the programs; an activation near the middle of two FP8 codes then differs by one
    for number, (trainer, served) in enumerate(zip(ours, versions, strict=True)):
        print(f"{layout} version {number}: worst difference {worst(trainer, served['logprobs']):.4f}")
        assert worst(trainer, served["logprobs"]) < 0.05
    assert worst(versions[0]["logprobs"], versions[2]["logprobs"]) > 0.2
    after = engine.call("parameters")
    assert before.keys() == after.keys() and all(before[name] != after[name] for name in before)
    if layout != "plain-bf16":
        (file,) = (tmp_path / "2").glob("*.safetensors")
        wanted = fused(load_file(file))
        assert len(after) == 2 * 10 + 3 and all(after[name][2] == wanted[name] for name in after)


COLUMNWISE, ROWWISE = r"([qkv]|gate|up)_proj\.|embed_tokens|lm_head", r"(o|down)_proj\.weight$"
"""Tensors of which vLLM's ranks hold rows, and columns."""


def shards(tensors: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    result = dict(tensors)
    for name, value in tensors.items():
        for pattern, dim in ((COLUMNWISE, 0), (ROWWISE, 1)):
            if re.search(pattern, name):
                result[name] = value.chunk(tp, dim)[rank].contiguous()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"), [("bf16", "plain-bf16"), ("rowwise-f32", "compressed-tensors-fp8-channel")]
)
def test_an_engine_with_another_tensor_parallel_size(
    recipe: str, layout: str, tmp_path: Path, start: Callable[..., Engine]
) -> None:
    """The trainer has 2 ranks under FSDP2, and vLLM 2 tensor-parallel workers, whose parameters have our bytes."""
    ours = run_ranks(2, train, str(tmp_path), recipe, layout, 1)[0]
    later = serving.published(tmp_path)[1].rename(tmp_path / "later")
    engines = [start(tp) for tp in (1, 2)]
    for version, trainer in enumerate(ours):
        if version:
            later.rename(tmp_path / "1")
            assert [engine.call("update") for engine in engines] == ["1", "1"]
        whole, split = (engine.call("logprobs", PROMPT)["logprobs"] for engine in engines)
        print(
            f"{layout} version {version}: from 1 worker {worst(whole, split):.4f}, trainer {worst(trainer, split):.4f}"
        )
        # workers round their sums to BF16, and scale the inputs of o_proj and down_proj by their own amaxes
        assert worst(whole, split) < 0.05 and worst(trainer, split) < 0.05
    assert worst(*ours) > 0.1
    # vLLM reorders linear layers in BF16 for CPUs
    if layout != "plain-bf16":
        (file,) = (tmp_path / "1").glob("*.safetensors")
        for rank in range(2):
            wanted = fused(shards(load_file(file), rank, 2))
            assert {name: entry[2] for name, entry in engines[1].call("parameters", rank).items()} == wanted


def ours(recipe: str, x: Tensor) -> Tensor:
    model = build(recipe)
    with torch.no_grad():
        output: Tensor = model.model.layers[1].mlp.down_proj(x)
    return output


@pytest.mark.slow
def test_linear_layers_agree_and_sources_fit_vllm(tmp_path: Path, start: Callable[..., Engine]) -> None:
    """A layer of the engine has our codes, scales its input as we do, and differs by the order of its sum."""
    layout = "compressed-tensors-fp8-channel"
    serving.publish(serving.LiveWeights(build("rowwise-f32"), layout), tmp_path, 0)
    engine = start()
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    served = torch.tensor(engine.call("linear", "model.layers.1.mlp.down_proj", x.tolist()))
    output = ours("rowwise-f32", x).float()
    difference = (served - output).abs()
    print(f"{layout}: {(difference == 0).float().mean():.3f} of the outputs are equal")
    # one unit in the last place of BF16
    assert (difference <= 2**-7 * output.abs() + 1e-6).all() and (difference == 0).float().mean() > 0.9
    sent, version, buffers = engine.call("send", SIZES, layout)
    assert version == "from the source" and 1 < buffers < len(sent) / 4
    wanted = {name: entry[2] for name, entry in engine.call("parameters").items() if "_proj" not in name}
    assert len(wanted) == 7 and all(sent[name] == value for name, value in wanted.items())


@pytest.mark.slow
def test_a_trainer_that_dies_leaves_no_mixture(tmp_path: Path, start: Callable[..., Engine]) -> None:
    """Killed while it publishes: the engine keeps its weights. Killed in vLLM's protocol: it refuses to serve."""
    weights = serving.LiveWeights(build("bf16"), "plain-bf16")
    serving.publish(weights, tmp_path, 1)
    engine = start()
    before = engine.call("logprobs", PROMPT)
    assert engine.call("update") == "1" and engine.call("logprobs", PROMPT)["version"] == "1"
    command = [sys.executable, "-c", DIES, str(tmp_path)]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert list(tmp_path.glob(".2.partial/*"))
    assert engine.call("update") == "1" and engine.call("logprobs", PROMPT)["logprobs"] == before["logprobs"]
    assert engine.call("transfer", "1", 5) is None
    refusal = "ConfigurationError: the engine holds parts of two versions of the weights; complete a transfer first"
    assert engine.call("logprobs", PROMPT) == refusal
    # a new trainer sends everything
    serving.publish(weights, tmp_path, 3)
    assert not list(tmp_path.glob(".*.partial"))
    assert engine.call("update") == "3" and engine.call("logprobs", PROMPT)["logprobs"] == before["logprobs"]
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 384}))
    serving.publish(serving.LiveWeights(model.bfloat16(), "plain-bf16"), tmp_path, 4)
    assert "4 is of another model: intermediate_size is 384, the engine's 512" in engine.call("update")
    assert engine.call("logprobs", PROMPT) == {"logprobs": before["logprobs"], "version": "3"}


DIES = """
import os, signal, sys
from quantshard import serving
from quantshard.interop.layouts import files
from tests.interop.test_vllm import build
write = files.save_file
def killed(*args):
    write(*args)
    os.kill(os.getpid(), signal.SIGKILL)
files.save_file = killed
serving.publish(serving.LiveWeights(build("bf16"), "plain-bf16"), sys.argv[1], 2)
"""


LOADED = {
    "hf-fp8-block": "block", "compressed-tensors-fp8-block": "current", "compressed-tensors-mxfp8": "mxfp8",
    "modelopt-mxfp8": "mxfp8", "compressed-tensors-nvfp4": "nvfp4", "modelopt-nvfp4": "nvfp4",
}  # fmt: skip
"""Layouts that vLLM computes on GPUs only, and a recipe to send."""


@pytest.mark.slow
def test_the_loader_takes_every_layout(tmp_path: Path) -> None:
    """Parameters of vLLM's model have the bytes that were sent."""
    for layout, recipe in LOADED.items():
        lossy = recipe == "nvfp4"
        serving.publish(serving.LiveWeights(build(recipe), layout, lossy=lossy), tmp_path / layout, 0)
    folders = [str(tmp_path / layout / "0") for layout in LOADED]
    command = [str(PYTHON), str(ROOT / "tests/interop/vllm_loader.py"), *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_folder = json.loads(done.stdout.splitlines()[-1])
    for folder in folders:
        (file,) = Path(folder).glob("*.safetensors")
        wanted, loaded = fused(load_file(file)), by_folder[folder]
        assert {name for name, value in wanted.items() if loaded.get(name) != value} == set(), folder


def example(folder: Path, *layout: str) -> list[tuple[float, ...]]:
    """Run the example: for each step reward, changed parameters, largest and mean difference of log-probabilities."""
    folder.mkdir()
    # virtual machines can report AMX tiles and trap their use
    (folder / "sitecustomize.py").write_text("import torch\ntorch.cpu._is_amx_tile_supported = lambda: False\n")
    env = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT}", "VLLM_PYTHON": str(PYTHON), "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/grpo_vllm.py"]
    done = subprocess.run(
        [sys.executable, *command, str(folder / "policy"), *layout], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    pattern = r"reward (\S+), (\d+) of \d+ parameters changed .* differ by (\S+) \(mean (\S+)\)$"
    lines = [tuple(map(float, values)) for values in re.findall(pattern, done.stdout, re.M)]
    assert len(lines) == 4
    return lines


@pytest.mark.slow
def test_the_grpo_example(tmp_path: Path) -> None:
    """2 ranks and an engine: parameters change in each of three steps; BF16 values differ more than codes."""
    codes = example(tmp_path / "codes")
    rewards, changes, largest, mean = zip(*codes, strict=True)
    assert rewards[3] > rewards[0] and changes[0] == 0 and all(changed >= 16 for changed in changes[1:])
    *_, mean_of_values = zip(*example(tmp_path / "values", "plain-bf16"), strict=True)
    assert max(largest) < 0.1 and sum(mean) < sum(mean_of_values)
