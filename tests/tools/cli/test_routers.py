"""Routers of the built-in decoder: their losses, capacity, loss-free balancing, and the alarm for dead experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard.errors import ConfigurationError
from quantshard.modules import autocast, quantized_model_init
from quantshard.optimizers import FusedAdam
from quantshard.tools.report.history import RunWatch, read_history, step_line
from quantshard.tools.report.page import page_data
from quantshard.tools.statistics.rows import SPAN, ExpertLoads
from quantshard.tools.trainer.measurements import RunStatistics
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.models.decoder import LanguageModel, recipes_of
from quantshard.tools.trainer.models.mixture import ExpertMixture, balance_loss, expert_slots, router_z_loss
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.tools.report.runs import entry, made_run, sampled, write
from tests.tools.statistics.models import perceptron

TINY = replace(
    TrainSettings(), hidden=16, heads=2, layers=2, ffn=24, experts=6, experts_per_token=2, seq_length=12,
    params_dtype="float32", recipe="bf16",
).resolved()  # fmt: skip
FLOAT32 = torch.finfo(torch.float32).eps


def mixture(**changes: object) -> ExpertMixture:
    torch.manual_seed(0)
    settings = replace(TINY, **changes)  # type: ignore[arg-type]
    return ExpertMixture(settings, None, params_dtype=torch.float32, device="cpu")


def by_hand(module: ExpertMixture, x: Tensor, capacity: int) -> tuple[Tensor, list[int], int]:
    """The output in float64, token by token; the rows chosen for each expert, and the number of dropped rows."""
    names = ("router.weight", *(f"{part}.weight{i}" for part in ("gate", "up", "down") for i in range(6)))
    weights = {name: module.get_parameter(name).double() for name in names}
    chosen, dropped, out = [0] * 6, 0, torch.zeros_like(x, dtype=torch.float64)
    for sequence in range(len(x)):
        used = [0] * 6
        for position in range(x.shape[1]):
            token = x[sequence, position].double()
            probabilities = (weights["router.weight"] @ token).softmax(0)
            top = probabilities.topk(2)
            for value, expert in zip(top.values / top.values.sum(), top.indices.tolist(), strict=True):
                chosen[expert] += 1
                used[expert] += 1
                if used[expert] > capacity:
                    dropped += 1
                    continue
                gate, up, down = (weights[f"{part}.weight{expert}"] for part in ("gate", "up", "down"))
                out[sequence, position] += value * (down @ (F.silu(gate @ token) * (up @ token)))
    return out, chosen, dropped


def test_losses_equal_float64() -> None:
    """Sums of at most 60 float32 terms: within 60 roundings."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 15, 6)
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(2).indices
    exact = logits.double().softmax(-1)
    expected = []
    for part, tokens in ((exact[i], chosen[i]) for i in range(4)):
        loss = 0.0
        for expert in range(6):
            share = (tokens == expert).sum().double() * 6 / (2 * 15)
            loss += share * part[:, expert].mean()
        expected.append(loss)
    counts = torch.stack([torch.bincount(tokens.flatten(), minlength=6) for tokens in chosen]).float()
    loss = balance_loss(probabilities, counts)
    torch.testing.assert_close(loss.double(), torch.stack(expected).mean(), rtol=60 * FLOAT32, atol=0)
    whole = balance_loss(probabilities.flatten(0, 1), counts.sum(0))
    shares = counts.sum(0).double() / (2 * 60)
    torch.testing.assert_close(whole.double(), 6 * (shares * exact.mean((0, 1))).sum(), rtol=60 * FLOAT32, atol=0)
    assert loss > whole > 1
    assert balance_loss(torch.full((5, 6), 1 / 6), torch.full((6,), 5.0)).item() == pytest.approx(1, rel=6 * FLOAT32)
    z_loss = torch.stack([row.double().exp().sum().log() ** 2 for row in logits.flatten(0, 1)]).mean()
    torch.testing.assert_close(router_z_loss(logits).double(), z_loss, rtol=60 * FLOAT32, atol=0)


def test_trained_loss_weighs_the_mean_over_layers() -> None:
    tokens = torch.randint(257, (2, 12))
    for balance, z_loss in (("aux", 0.0), ("sequence", 0.5), ("none", 0.5), ("bias", 0.0), ("bias+sequence", 0.0)):
        settings = replace(TINY, router_balance=balance, balance_loss=0.25, router_z_loss=z_loss)
        torch.manual_seed(0)
        model = LanguageModel(settings, recipes_of(settings), "cpu")
        losses = models.losses(model, tokens, tokens)
        routing = list(model.routing)
        assert len(routing) == 2 and all(
            (of_layer.balance_loss != 0) == (balance not in ("none", "bias")) for of_layer in routing
        )
        expected = losses.cross_entropy + sum(0.25 * r.balance_loss + z_loss * r.z_loss for r in routing) / 2
        total = models.trained_loss(model, losses, settings)
        torch.testing.assert_close(total, expected)
        assert not model.routing
        total.backward()
        assert model.layers[1].mlp.router.weight.grad.norm() > 0


def test_biases_move_as_by_hand() -> None:
    """Three steps; an expert with the mean load stays. The bias changes choices, and no weight of an expert."""
    settings = replace(TINY, router_balance="bias")
    model = LanguageModel(settings, recipes_of(settings), "cpu")
    biases = [[0.0] * 6 for _ in range(2)]
    rate = torch.tensor(0.01).item()
    for step in range(3):
        counts = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(step)).double()
        counts[1, 3] = counts[1, [0, 1, 2, 4, 5]].mean().round()
        counts[1, 4] += 5 * counts[1, 3] - counts[1, [0, 1, 2, 4, 5]].sum()
        models.move_biases(model, counts, 0.01)
        for layer in range(2):
            mean = sum(counts[layer].tolist()) / 6
            for expert, count in enumerate(counts[layer].tolist()):
                sign = (mean > count) - (mean < count)
                biases[layer][expert] = (torch.tensor(biases[layer][expert]) + sign * rate).item()
    for layer, expected in zip(model.layers, biases, strict=True):
        assert layer.mlp.router.expert_bias.tolist() == expected
    assert biases[1][3] == 0 and any(biases[1])
    module, x = mixture(router_balance="bias+sequence"), torch.randn(2, 12, 16)
    before = module(x)[1].balance_loss
    module.router.expert_bias[4] = 2.0
    biased, (balance, _, counts) = module(x)
    # DeepSeek-V3's loss is about the choice by probability alone
    assert torch.equal(balance, before)
    assert counts[4] == 24 and counts[:6].sum() == 48
    router = module.router.weight
    scores = (x @ router.T).softmax(-1)
    others = scores.index_fill(-1, torch.tensor([4]), -1).argmax(-1)
    pair = scores.gather(-1, torch.stack([others, torch.full_like(others, 4)], -1))
    with torch.no_grad():
        expected = torch.zeros_like(x)
        for place in ((s, t) for s in range(2) for t in range(12)):
            for expert, weight in zip((others[place], 4), pair[place] / pair[place].sum(), strict=True):
                gate, up, down = (module.get_parameter(f"{part}.weight{expert}") for part in ("gate", "up", "down"))
                expected[place] += weight * (down @ (F.silu(gate @ x[place]) * (up @ x[place])))
    torch.testing.assert_close(biased, expected)


@pytest.mark.parametrize("favorite", [None, 0, 5])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.3, 100.0])
def test_capacity_drops_the_last_rows(favorite: int | None, factor: float) -> None:
    """With `favorite`, this expert gets all tokens, another one too, and four get none."""
    module, x = mixture(capacity_factor=factor), torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(1))
    if favorite is not None:
        with torch.no_grad():
            x[..., 0] = 9
            module.router.weight[:, 0] = 0
            module.router.weight[favorite, 0] = 3
            module.router.weight[2, 0] = 2
    x.requires_grad_()
    capacity = {0.0: 12, 0.5: 2, 1.0: 4, 1.3: 6, 100.0: 12}[factor]
    out, routing = module(x)
    expected, chosen, dropped = by_hand(module, x, capacity)
    assert routing.counts.tolist() == [*chosen, dropped]
    if favorite is not None:
        assert sorted(chosen) == [0, 0, 0, 0, 36, 36] and dropped == 3 * 2 * (12 - capacity)
        assert out[:, :capacity].any(-1).all() and not out[:, capacity:].any()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn_like(out)
    parameters = [x, *module.parameters()]
    of_module = torch.autograd.grad(out, parameters, gradient, allow_unused=True)
    of_hand = torch.autograd.grad(expected, parameters, gradient.double(), allow_unused=True)
    for one, other in zip(of_module, of_hand, strict=True):
        # an expert without rows gets zeros, and is not in the sum by hand
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-4, atol=1e-5)
    module.eval()
    torch.testing.assert_close(module(x)[0].double(), by_hand(module, x, 12)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4", "delayed"])
def test_quantized_experts_run_in_slots(recipe: str) -> None:
    """Zeros of unused slots change no scale: without drops, values differ from those without slots by the order of
    sums, within a rounding to bfloat16. With drops, gradients are finite."""
    outputs, x = [], torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for factor in (0.0, 2.75, 0.5):
        settings = replace(TINY, hidden=32, ffn=32, capacity_factor=factor)
        torch.manual_seed(0)
        with quantized_model_init(recipe=recipe):
            module = ExpertMixture(settings, None, params_dtype=torch.bfloat16, device="cpu")
        with autocast(recipe=recipe):
            out, routing = module(x)
        outputs.append(out.float())
        assert (int(routing.counts[6]) > 0) == (factor == 0.5)
        out.float().square().sum().backward()
        assert all(param.grad is not None and param.grad.isfinite().all() for param in module.parameters())
    plain, slots, _ = outputs
    torch.testing.assert_close(slots, plain, rtol=2**-7, atol=2**-9 * plain.abs().max().item())


def test_slots_go_by_position() -> None:
    experts = torch.tensor([[1, 0, 1, 2, 1, 0], [0, 0, 0, 0, 0, 0]])
    #                                  slots of expert 0: 0, 1 and 2, 3; of expert 1: 4, 5 and 6, 7; 12: dropped
    assert expert_slots(experts, 3, 2).tolist() == [[4, 0, 5, 8, 12, 1], [2, 3, 12, 12, 12, 12]]


EVEN, DYING = [50.0, 50.0, 100.0, 0.0], [98.0, 2.0, 100.0, 7.0]
"""Rows of three experts of a layer, and dropped rows; 2 is 0.03 of the mean."""


def test_dead_experts_raise_one_alarm() -> None:
    """Of two layers; after the expert recovers and dies again, there is a second alarm."""
    loads, alarms = ExpertLoads(0.1), []
    for step in range(1, 5 * SPAN + 1):
        alarm = loads.add(step, 2, EVEN + (EVEN if 2 * SPAN < step <= 3 * SPAN else DYING))
        alarms += [(step, alarm)] if alarm else []
    assert [step for step, _ in alarms] == [SPAN, 4 * SPAN]
    alarm = alarms[0][1]
    assert (alarm.kind, alarm.name) == ("dead expert", "layers.1.mlp.1") and alarm.value == pytest.approx(0.03)
    assert alarm.text == "step 50: expert 1 of layers.1.mlp got 3.0% of the mean load in 50 steps, less than 10.0%"
    assert loads.figures == {"expert_load_max": 1.5, "dropped_rows": pytest.approx(0.0175)}
    off = ExpertLoads(0.0)
    assert not any(off.add(step, 2, [*EVEN, 0.0, 0.0, 1.0, 0.0]) for step in range(1, 2 * SPAN))
    both = ExpertLoads(0.1)
    assert "; 1 more are below" in [both.add(step, 1, [1.0, 2.0, 97.0, 0.0]) for step in range(SPAN)][-1].text


def test_loads_are_recorded_and_shown(tmp_path: Path) -> None:
    """In sampled steps; the report draws layers by experts, first of all statistics."""
    run, notes, lines = made_run(tmp_path / "run", steps=3), [], []
    model = perceptron()
    settings = replace(TINY, layers=2, statistics_every=2)
    optimizer = FusedAdam(model.named_parameters(), lr=1e-3)
    with RunStatistics(
        settings, model, optimizer, lines.append, lambda text, level: notes.append(text), 0
    ) as statistics:
        for _ in range(SPAN + 1):
            statistics.add_counts(EVEN + DYING)
            statistics.stepped(1.0, lambda: None)
    assert [line["step"] for line in lines] == list(range(2, SPAN + 1, 2))
    rows = [row for row in lines[0]["rows"] if row["role"] == "experts"]
    assert rows == [
        {"name": "layers.0.mlp", "role": "experts", "load": [0.75, 0.75, 1.5], "load_max": 1.5, "load_min": 0.75,
         "dropped": 0.0},
        {"name": "layers.1.mlp", "role": "experts", "load": [1.47, 0.03, 1.5], "load_max": 1.5,
         "load_min": pytest.approx(0.03), "dropped": 0.035},
    ]  # fmt: skip
    assert notes == [f"ALARM (dead expert): {lines[-1]['alarms'][0]['text']}"]
    write(run / "statistics.jsonl", lines)
    watched = RunWatch(run).poll(99)
    assert any(line.startswith("ALARM (dead expert): step 50: expert 1 of layers.1.mlp got") for line in watched)
    data = page_data([read_history(run)], ["run"])["maps"][0]
    first = data["maps"][0]
    assert (first["role"], first["statistic"]) == ("experts", "load by expert, step 50")
    assert first["columns"] == ["expert 0", "expert 1", "expert 2"]
    assert [(data["names"][index], cells) for index, *cells in first["rows"]] == [
        ("layers.0.mlp", [0.75, 0.75, 1.5]), ("layers.1.mlp", [1.47, 0.03, 1.5])
    ]  # fmt: skip
    assert "3.5% of rows dropped" in step_line(entry(1, dropped_rows=0.035), 3)
    assert "dropped" not in step_line(entry(1), 3)


def test_a_broken_load_leaves_the_report_whole(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=3)
    loads = [["x", None, 1.0, "inf", [2]], [], [0.5] * 5000, {"a": 1}, "2"]
    rows = [{"name": f"layers.{number}.mlp", "role": "experts", "load": load} for number, load in enumerate(loads)]
    write(run / "statistics.jsonl", [sampled(9) | {"rows": [*sampled(9)["rows"], *rows]}], "a")
    data = page_data([read_history(run)], ["run"])
    table = data["maps"][0]["maps"][0]
    assert len(table["columns"]) == 1024 and [len(cells) - 1 for cells in table["rows"]] == [5, 0, 1024]
    assert table["rows"][0][1:] == ["x", "x", 1.0, "x", "x"]
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"router_balance": "switch"}, "choose one of: none, aux, sequence, bias, bias+sequence"),
        ({"router_balance": "bais"}, "did you mean 'bias'?"),
        ({"router_bias_rate": 0.0}, "router_bias_rate = 0.0: must be more than 0"),
        ({"router_z_loss": -1.0}, "router_z_loss = -1.0: must be 0 or more"),
        ({"capacity_factor": float("nan")}, "capacity_factor = nan: must be 0 or more"),
        ({"alarm_dead_experts": 2.0}, "alarm_dead_experts = 2.0: must be 0 or more, and at most 1"),
        ({"mesh": "cp=2", "seq_length": 12, "capacity_factor": 1.0}, "cp in the mesh cannot be combined with capacity"),
        ({"mesh": "cp=2", "seq_length": 12, "router_balance": "bias+sequence"}, "with a balance loss per sequence"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        replace(TINY, **changes).check()  # type: ignore[arg-type]
    assert says in str(caught.value) and "\n" not in str(caught.value)
