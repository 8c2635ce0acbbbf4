"""CUDA graphs: a whole training step, captured once, replayed as often as it is taken. Skipped without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import quantshard as qs
from quantshard.checkpoints.comparison import compare
from quantshard.collectives import delayed_scaling
from quantshard.errors import RankMismatchError
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks
from tests.distributed.test_cli import losses
from tests.modules.test_graphs import layer_of, trained_on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS, TOKENS, HIDDEN = 20, 96, 64


class Training:
    """A transformer layer, its optimizer, and the tensors that a captured step reads and writes."""

    def __init__(self, recipe: str, lr: float, quantized: bool = True) -> None:
        torch.manual_seed(5)
        with qs.quantized_model_init(quantized, recipe=RECIPES[recipe]):
            self.model = qs.TransformerLayer(
                HIDDEN, 160, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
                activation="swiglu", params_dtype=torch.bfloat16, device="cuda", attention_backend="math",
            )  # fmt: skip
        self.recipe = recipe
        self.optimizer = FusedAdam(self.model.named_parameters(), lr=lr, weight_decay=0.1, capturable=True)
        self.x = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.loss = torch.zeros((), device="cuda")

    def step(self) -> None:
        with qs.autocast(recipe=RECIPES[self.recipe]):
            y = self.model(self.x)
        loss = y.float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss.copy_(loss.detach())

    def take(self, number: int, step: object) -> Tensor:
        """One step on data of its own, at a rate of its own."""
        generator = torch.Generator().manual_seed(number)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        for group in self.optimizer.param_groups:
            group["lr"].fill_(1e-3 / (1 + number))
        step()
        return self.loss.clone()


def captured(training: Training) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    return graph


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized weights", "plain weights"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_replays_are_twenty_steps(recipe: str, quantized: bool) -> None:
    """1 process: losses, weights, states, amax histories and draws, bit for bit."""
    eager, replayed = (Training(recipe, 1e-3, quantized) for _ in range(2))
    qs.capturable_(replayed.model)
    first = [training.take(0, training.step) for training in (eager, replayed)]  # a graph needs a step before it
    assert torch.equal(*first)
    graph = captured(replayed)
    losses = [torch.stack([t.take(number, step) for number in range(1, STEPS + 1)]) for t, step in (
        (eager, eager.step), (replayed, graph.replay),
    )]  # fmt: skip
    assert torch.equal(*losses) and losses[0].isfinite().all() and len(losses[0].unique()) == STEPS
    assert bits(eager.model, eager.optimizer) == bits(replayed.model, replayed.optimizer)


def replayed_in_a_group() -> tuple[bool, str, bool]:
    """Whether replays have the bits of steps; what ranks that seem to differ in a replay are told; and whether their
    histories stayed."""
    eager, replayed = (Training("delayed", 1e-3) for _ in range(2))
    for training in (eager, replayed):
        training.take(0, training.step)
    graph = captured(replayed)
    for training, step in ((eager, eager.step), (replayed, graph.replay)):
        for number in range(1, 4):
            training.take(number, step)
    equal = bits(eager.model, eager.optimizer) == bits(replayed.model, replayed.optimizer)
    replayed.take(4, replayed.step)  # between two captures there is a step
    with mock.patch.object(delayed_scaling, "was_alike", lambda highest, complement: highest + complement < 0):
        graph = captured(replayed)
    before = [buffer.clone() for buffer in replayed.model.buffers()]
    replayed.take(5, graph.replay)
    stayed = all(map(torch.equal, before, replayed.model.buffers()))
    with pytest.raises(RankMismatchError) as error:
        replayed.model.state_dict()
    return equal, str(error.value), stayed


@pytest.mark.distributed
def test_amaxes_are_reduced_in_a_captured_step() -> None:
    """1 rank, over NCCL: a graph waits for nothing, and what it finds is told when the state is read."""
    [(equal, told, stayed)] = run_ranks(1, replayed_in_a_group)
    assert equal and "ranks used different modules" in told and stayed


def test_the_captured_step_learns() -> None:
    """1 process: a guard against a graph that replays nothing."""
    training = Training("current", 1e-2)
    training.take(0, training.step)
    before = bits(training.model, training.optimizer)
    graph = captured(training)
    assert bits(training.model, training.optimizer) == before, "capturing runs nothing"
    training.take(1, graph.replay)
    assert bits(training.model, training.optimizer) != before
    assert isinstance(training.model, nn.Module)


@pytest.mark.parametrize("quantized", [True, False])
def test_counts_go_where_the_model_goes(quantized: bool) -> None:
    """1 process: a model counted on its GPU goes on on a CPU, by the words of one that never was on a GPU."""
    x = torch.randn(21, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        with qs.quantized_model_init(quantized, "nvfp4"):
            layer = qs.Linear(40, 33, params_dtype=torch.bfloat16, device="cpu").to(device)
        qs.capturable_(layer)
        for where in (device, "cpu"):
            layer.to(where).zero_grad()
            with qs.autocast(recipe="nvfp4"):
                layer(x.to(where)).float().sin().sum().backward()
        found.append({name: p.grad for name, p in layer.named_parameters()} | dict(layer.state_dict()))
    on_cpu, moved = found
    assert on_cpu["weight_draws"].item() == 2
    assert all(value.device.type == "cpu" and torch.equal(value, on_cpu[name]) for name, value in moved.items())


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["DDP", "tensor parallel"])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_replicas_and_tensor_parallelism(recipe: str, way: str) -> None:
    """2 ranks, over NCCL: layers of `make_graphed_callables`, with collectives in the graphs or around them."""
    eager, captured = (run_ranks(2, trained_on_ranks, recipe, way, captured, "cuda") for captured in (False, True))
    assert eager == captured and eager[0] == eager[1]


def whole_steps_on_ranks(recipe: str, captured: bool) -> tuple[list[float], dict[str, str]]:
    """Losses and bits after eight steps of a layer that ranks share, on rows of each rank's own."""
    layer = layer_of(recipe, init_device_mesh("cuda", (2,), mesh_dim_names=("tp",)), "cuda")
    optimizer = FusedAdam(layer.named_parameters(), lr=1e-2, capturable=True)

    def step(x: Tensor) -> Tensor:
        with qs.autocast(recipe=RECIPES[recipe]):
            y = layer(x)
        loss = y.float().sin().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    own = torch.Generator().manual_seed(dist.get_rank())
    with qs.StepGraph(step, layer, optimizer, enabled=captured) as graph:
        batches = [torch.randn(16, 1, HIDDEN, generator=own).bfloat16().cuda() for _ in range(8)]
        found = [graph(x).item() for x in batches]
        assert len(graph._replays) == captured
    return found, bits(layer, optimizer)


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4"])
def test_whole_steps_under_tensor_parallelism(recipe: str) -> None:
    """2 ranks, over NCCL, with sequence parallelism: losses and all that is kept."""
    eager, captured = (run_ranks(2, whole_steps_on_ranks, recipe, captured) for captured in (False, True))
    assert eager == captured and len({*eager[0][0]}) == 8


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "current"), (1, "layers.0=nvfp4,*=delayed"), (1, "block --experts 5"), (1, "bf16 --experts 5"),
        (1, "current --optimizer lion"), (2, "current"), (2, "current --experts 5"), (2, "mxfp8 --optimizer muon"),
    ],
)  # fmt: skip
def test_the_train_command_replays_its_steps(tmp_path: Path, ranks: int, flags: str) -> None:
    """Losses, statistics and checkpoint of a run that is not captured; every third step is sampled. It ends, though
    graphs have collectives of NCCL."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    text, sampled = tmp_path / "text.txt", {}
    text.write_text(Path(__file__).read_text())
    sizes = "--hidden 128 --heads 2 --layers 2 --ffn 256 --seq-length 128 --global-batch 4 --steps 12 --warmup 1"
    for name, more in (("eager", ""), ("replayed", "--cuda-graphs")):
        options = f"--nproc-per-node {ranks} {sizes} --recipe {flags} --statistics-every 3 {more}".split()
        command = [sys.executable, "-m", "quantshard", "train", "--run", tmp_path / name, "--data", text, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "statistics.jsonl").read_text().splitlines()
        sampled[name] = [json.loads(line) for line in lines]
    assert losses(tmp_path / "replayed") == losses(tmp_path / "eager")
    found = compare(*(tmp_path / run / "checkpoints" / "step-000012" for run in ("eager", "replayed")))
    assert {each.key.rpartition(".")[2] for each in found.differences} <= {"lr"}  # a graph's is float32
    assert [each["step"] for each in sampled["eager"]] == [3, 6, 9, 12]
    for one, other in zip(sampled["eager"], sampled["replayed"], strict=True):
        assert one["alarms"] == other["alarms"]
        for row, again in zip(one["rows"], other["rows"], strict=True):
            assert row.pop("wgrad", {}) == pytest.approx(again.pop("wgrad", {}), rel=1e-9)
            assert [row.pop("name"), row.pop("role")] == [again.pop("name"), again.pop("role")]
            assert row == pytest.approx(again, rel=1e-9)
