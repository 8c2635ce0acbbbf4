"""`Statistics`: its numbers are those of the tensors, training keeps its bits, and a step without it costs nothing."""

import contextlib
import math
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import quantshard as qs
from benchmarks.host import without_garbage_collection
from quantshard import kernel_dispatch
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.statistics import Statistics
from quantshard.tensor import components, observation
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tools.statistics.step_sample import StepSample
from tests.covering import exhaustive
from tests.tools.statistics.models import FEATURES, loss_of, perceptron, tokens, trained

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")


def bits(model: nn.Module) -> list[bytes]:
    return [
        value.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        for value in model.state_dict().values()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize("recipe", exhaustive([(name,) for name in RECIPES], [("delayed",), ("nvfp4",)]))
def test_training_keeps_its_bits(recipe):
    """With random words and histories, too; each sampled step is told once, in order."""
    plain, watched = perceptron(recipe), perceptron(recipe)
    trained(plain, 5, 0, recipe)
    samples = trained(watched, 5, 2, recipe, saturation=1)
    assert bits(plain) == bits(watched)
    assert [sample.step for sample in samples] == [2, 4]
    assert observation.active is None


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_on_the_device_that_there_is(recipe):
    """Where there is a GPU: the kernels that add up, the copy to pinned memory, and the event that it is read after."""
    plain, watched = (perceptron(recipe, device=DEVICE) for _ in range(2))
    trained(plain, 5, 0, recipe)
    samples = trained(watched, 5, 2, recipe, saturation=1)
    assert bits(plain) == bits(watched)
    assert [sample.step for sample in samples] == [2, 4]
    # not of step 2, which has gradients that outgrow a history of one amax
    rows = {(row.name, row.role): row for row in samples[-1].rows}
    for name in ("0.fc1_gate_weight", "0.fc2_weight", "1.weight", "2.weight"):
        assert all(rows[name, role].error.sqnr_db > 20 for role in ("input", "weight", "grad_output")), name
        assert rows[name, "input"].amax > 0 and 0 < rows[name, "weight"].update_ratio < 1, name


def test_numbers_of_a_linear_layer_by_hand():
    """All of one layer, computed here from the tensors that a training has."""
    recipe = "current"
    with qs.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = nn.Sequential(qs.Linear(FEATURES, 40, params_dtype=torch.bfloat16, bias=False, device="cpu"))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    weight = model[0].weight
    master = optimizer.get_unscaled_state(weight, "master_param").clone()
    codes = components.quantized_local(weight).quantized_storage.components["codes"].clone()
    statistics = Statistics(model, optimizer, every=1)
    x = tokens(0).requires_grad_()
    with qs.autocast(recipe=recipe):
        y = model(x)
    y.retain_grad()
    y.float().square().sum().backward()
    grad = weight.grad.clone()
    optimizer.step()
    assert statistics.step() == []
    (sample,) = statistics.close()
    rows = {row.role: row for row in sample.rows}
    new = optimizer.get_unscaled_state(weight, "master_param")
    storage = components.quantized_local(weight).quantized_storage
    assert rows["weight"].grad_norm == pytest.approx(float(grad.double().norm()))
    assert rows["weight"].update_ratio == pytest.approx(float((new - master).double().norm() / master.double().norm()))
    assert rows["weight"].changed == float((storage.components["codes"] != codes).double().mean()) > 0
    for role, values, top in (
        ("weight", new, 448), ("input", x.detach(), 448), ("grad_output", y.grad, 57344),
    ):  # fmt: skip
        scale = float(values.abs().amax()) / top
        dtype = torch.float8_e4m3fn if top == 448 else torch.float8_e5m2
        q = (values.double() / scale).clamp(-top, top).float().to(dtype).double() * scale
        noise = float((values.double() - q).square().sum())
        row = rows[role]
        assert row.amax == float(values.abs().amax())
        assert row.error.scale == pytest.approx(scale) and row.error.scale_min is None
        assert row.error.sqnr_db == pytest.approx(10 * math.log10(float(values.double().square().sum()) / noise), 1e-3)
        assert row.error.saturated == 0 and row.nonfinite == 0 and row.wgrad is None
        assert row.error.underflowed == pytest.approx(float(((q == 0) & (values != 0)).double().mean()), abs=2e-3)


def test_rows_of_fused_layers_in_blocks():
    """Inputs under the first weight's name, gradients under each; quantized for wgrad once more."""
    (sample,) = trained(perceptron(), 1, 1)
    rows = {(row.name, row.role): row.to_dict() for row in sample.rows}
    assert rows["0.fc1_gate_weight", "input"]["wgrad"].keys() == {
        "scale", "scale_min", "saturated", "underflowed", "sqnr_db",
    }  # fmt: skip
    assert ("0.fc1_up_weight", "input") not in rows
    for name in ("0.fc1_gate_weight", "0.fc1_up_weight", "0.fc2_weight", "1.weight", "2.weight"):
        assert rows[name, "grad_output"]["sqnr_db"] > 25
        assert rows[name, "weight"].keys() >= {"amax", "scale", "sqnr_db", "changed", "update_ratio", "grad_norm"}
    assert rows["0.fc2_bias", "weight"].keys() == {
        "name",
        "role",
        "grad_norm",
    }  # zeros before, of which it has no ratio


def test_saturation_is_found_and_its_worst_operand_named():
    """Delayed scaling by an amax of before, and then a batch that is ten times as large."""
    recipe = qs.recipe.DelayedScaling(amax_history_len=2)
    model, alarms = perceptron(recipe), []
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    for step in range(3):
        loss_of(model, step, recipe).backward()
    optimizer.zero_grad()
    statistics = Statistics(model, optimizer, every=1, on_alarm=alarms.append)
    with qs.autocast(recipe=recipe):
        model[1](tokens(0) * 10).float().sum().backward()
    statistics.step()
    (sample,) = statistics.close()
    (alarm,) = [each for each in alarms if each.kind == "saturation"]
    row = next(row for row in sample.rows if (row.name, row.role) == ("1.weight", "input"))
    assert alarm.name == "1.weight" and "1 more are above" in alarm.text and alarm in sample.alarms
    assert alarm.value == max(row.error.saturated or 0 for row in sample.rows) >= row.error.saturated > 0.1


def test_first_nonfinite_operand_is_named():
    """The input of the second layer has one infinite value, which its output and all gradients then have."""
    model, alarms = perceptron(), []
    statistics = Statistics(model, None, every=1, on_alarm=alarms.append)
    x = tokens(0)
    model[0].register_forward_hook(
        lambda *a: a[2].index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(math.inf).bfloat16())
    )
    with qs.autocast(recipe="mxfp8"):
        model(x).float().square().mean().backward()
    statistics.step()
    statistics.close()
    (alarm,) = alarms
    assert (alarm.kind, alarm.name) == ("nan", "1.weight") and "input" in alarm.text
    assert alarm.value == 1 / x.numel()


@pytest.mark.parametrize(
    "make", [lambda p, lr: torch.optim.AdamW(p, lr), lambda p, lr: MasterWeights(torch.optim.SGD, p, lr=lr)],
    ids=["torch", "MasterWeights"],
)  # fmt: skip
def test_other_optimizers_are_measured_too(make):
    recipe = "block"
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(qs.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16, device="cpu"))
    (sample,) = trained(model, 1, 1, recipe, make)
    row = next(row for row in sample.rows if (row.name, row.role) == ("0.weight", "weight"))
    assert 0 < row.update_ratio < 1 and 0 < row.grad_norm and row.changed is not None


def test_layers_in_high_precision_show_amaxes():
    model = nn.Sequential(qs.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16, device="cpu"))
    (sample,) = trained(model, 1, 1, qs.recipe.HighPrecision())
    rows = {row.role: row.to_dict() for row in sample.rows if row.name == "0.weight"}
    assert rows["input"].keys() == {"name", "role", "amax"} == rows["grad_output"].keys()


def keys_of(model):
    weights = [(layer, name) for layer in model for name in layer._weights]
    return [layer.weight_state(name)[RNG_KEY] for layer, name in weights]


def test_recomputed_layers_count_once(monkeypatch):
    """A region's second forward shows nothing; evaluations neither, nor layers of another model."""
    model, other, seen = perceptron(), perceptron(), Counter()
    real = StepSample.see_operand

    def see(self, key, role, for_wgrad, *others):
        seen[id(key), role, for_wgrad] += 1
        return real(self, key, role, for_wgrad, *others)

    monkeypatch.setattr(StepSample, "see_operand", see)
    statistics = Statistics(model, None, every=1)
    with qs.autocast(recipe="mxfp8"):
        model.eval()(tokens(1) * 100)
        seen.clear()
        y = qs.checkpoint(model.train(), tokens(0).requires_grad_())
        other(tokens(1) * 100).float().square().sum().backward()  # of the same keys, which were drawn by one seed
        for key in [key for key in seen if key[0] not in {id(each) for each in keys_of(model)}]:
            del seen[key]
    y.float().square().sum().backward()
    statistics.step()
    (sample,) = statistics.close()
    assert len(seen) == 4 * 2 + 5 * 2 and set(seen.values()) == {1}  # of 5 weights two read one input
    row = next(row for row in sample.rows if (row.name, row.role) == ("1.weight", "input"))
    assert row.amax is not None and row.amax < 20


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # Dynamo's
def test_compiled_layers_are_seen():
    model = perceptron()
    compiled = torch.compile(model, backend="aot_eager")
    statistics = Statistics(model, None, every=1)
    with qs.autocast(recipe="mxfp8"):
        compiled(tokens(0)).float().square().mean().backward()
    statistics.step()
    (sample,) = statistics.close()
    seen = {(row.name, row.role) for row in sample.rows if row.error.sqnr_db}
    assert seen >= {(f"{name}.weight", role) for name in (1, 2) for role in ("input", "grad_output")}


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # Dynamo's
def test_compiled_layers_are_seen_in_sampled_steps():
    """They are eager there, and traced in the other steps."""
    pytest.importorskip("triton")
    model = nn.Sequential(qs.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16, device="cpu"))
    compiled = torch.compile(model, backend="aot_eager")
    torch._dynamo.reset()
    with kernel_dispatch.kernels_only_on("cpu"), Statistics(model, None, every=2) as statistics:
        for step in range(4):
            with qs.autocast(recipe="current"):
                compiled(tokens(step)).float().square().mean().backward()
            statistics.step()
        (sample,) = statistics.close()
    assert sample.step == 4
    assert {row.role for row in sample.rows if row.error.sqnr_db} >= {"input", "grad_output"}


@pytest.mark.exhaustive
def test_compiled_layers_in_high_precision_are_seen():
    model = nn.Sequential(qs.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16, device="cpu"))
    with Statistics(model, None, every=1) as statistics:
        with qs.autocast(recipe=qs.recipe.HighPrecision()):
            torch.compile(model, backend="aot_eager")(tokens(0)).float().square().mean().backward()
        statistics.step()
        (sample,) = statistics.close()
    assert {row.role for row in sample.rows} >= {"input", "grad_output"}


def test_converted_models_and_experts_are_seen():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    qs.convert(model, "block", filter=lambda module, name: True)
    with qs.quantized_model_init(recipe="block"):
        experts = qs.GroupedLinear(2, 64, 32, params_dtype=torch.bfloat16, device="cpu")
    both = nn.ModuleDict({"model": model, "experts": experts})
    statistics = Statistics(both, None, every=1)
    with qs.autocast(recipe="block"):
        h = model(torch.randn(8, 64, dtype=torch.bfloat16))
        experts(h, [3, 5]).float().square().sum().backward()
    statistics.step()
    (sample,) = statistics.close()
    seen = {(row.name, row.role) for row in sample.rows if row.error.sqnr_db}
    assert {(f"experts.weight{i}", role) for i in (0, 1) for role in ("input", "grad_output")} <= seen
    assert {("model.0.weight", "input"), ("model.1.weight", "input")} <= seen


# What it costs


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(run):
    """Python calls and operations."""
    calls = Counter()

    def profile(frame, event, _):
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    with Operations() as operations:
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
    return calls, operations.seen


@without_garbage_collection()
def test_a_step_that_is_not_sampled_makes_the_same_calls():
    """Exactly: without statistics, with some that sample every tenth step, and after their end. To free what other
    tests left would be calls too."""
    model = perceptron()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)

    def step():
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    counted(step)  # what torch makes for the first mode
    plain = counted(step)
    assert counted(step) == plain
    statistics = Statistics(model, optimizer, every=10)
    assert not statistics.is_sampling
    assert counted(step) == plain
    for _ in range(9):
        statistics.step()
    assert statistics.is_sampling
    assert counted(step) != plain
    statistics.step()
    assert counted(step) == plain
    statistics.close()
    assert counted(step) == plain


# Bad input


def test_two_at_once_and_parameters_of_others_are_refused():
    model = perceptron()
    first = Statistics(model, None, every=1)
    with pytest.raises(ConfigurationError, match=r"another Statistics samples this step; close.* first"):
        Statistics(model, None, every=1)
    first.close()
    with pytest.raises(RuntimeError, match="stop"), Statistics(model, None, every=1):
        raise RuntimeError("stop")
    assert observation.active is None


def test_a_capture_in_a_sampled_step_is_refused(monkeypatch):
    """Else each replay would add to it."""
    model = perceptron()
    statistics = Statistics(model, None, every=1)
    monkeypatch.setattr(kernel_dispatch, "is_capturing", lambda: True)
    with pytest.raises(UnsupportedOperationError, match="a CUDA graph is captured in a sampled step"):
        loss_of(model, 0)
    statistics.close()


def test_whole_steps_by_themselves():
    """Measured within `whole_step`, a step has the numbers of one measured by `step`; what is not, is refused."""
    found = []
    for whole in (False, True):
        model = perceptron()
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        with Statistics(model, optimizer, every=2, saturation=1) as statistics:
            for step in range(4):
                sampled = statistics.is_sampling
                with statistics.whole_step() if whole and sampled else contextlib.nullcontext() as sample:
                    loss_of(model, step).backward()
                    optimizer.step()
                optimizer.zero_grad()
                found += statistics.step(sample=sample)
                if sample is not None:
                    with pytest.raises(AssertionError, match="this step is not sampled"):
                        statistics.whole_step().__enter__()
            found += statistics.close()
    assert len(found) == 4 and found[:2] == found[2:]
    statistics = Statistics(model, None, every=1)
    with pytest.raises(RuntimeError), statistics.whole_step() as sample:
        raise RuntimeError
    statistics.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_has_the_numbers_of_an_eager_one(recipe):
    """1 process: each replay its own, and the bits of training; sums of squares are added in another order."""
    kept, found = [], []
    for captures in (False, True):
        model, x = perceptron(recipe, device="cuda"), tokens(0).cuda()
        qs.capturable_(model)
        optimizer = FusedAdam(model.named_parameters(), lr=1e-3, capturable=True)

        def train(model=model, x=x, optimizer=optimizer):
            with qs.autocast(recipe=recipe):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        graph, samples = None, []
        with Statistics(model, optimizer, every=1, saturation=1) as statistics:
            for step in range(5):
                x.copy_(tokens(step))
                if not captures or step < 2:
                    train()
                    samples += statistics.step()
                    continue
                if graph is None:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph), statistics.whole_step() as sample:
                        train()
                graph.replay()
                samples += statistics.step(sample=sample)
            samples += statistics.close()
        kept.append(bits(model))
        found.append([row.to_dict() for each in samples for row in each.rows])
    assert kept[0] == kept[1] and len(found[0]) == len(found[1]) > 50
    for row, other in zip(*found, strict=True):
        wgrad, exact = row.pop("wgrad", {}), other.pop("wgrad", {})
        names = row.pop("name"), row.pop("role")
        assert names == (other.pop("name"), other.pop("role"))
        assert row == pytest.approx(other, rel=1e-9) and wgrad == pytest.approx(exact, rel=1e-9), names


class NarrowMasters(torch.optim.SGD):
    """Of somebody else, with masters in bfloat16 under the name that ours have."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["master_param"].copy_(param)


def test_masters_of_another_optimizer_are_only_read():
    model = perceptron("current")
    param = next(each for each in model.parameters() if components.quantized_local(each) is None)
    optimizer = NarrowMasters([param], lr=100.0)
    master = optimizer.state[param]["master_param"] = param.detach().bfloat16()
    before = param.detach().clone()
    with Statistics(model, optimizer, every=1) as statistics:
        loss_of(model, 1, "current").backward()
        optimizer.step()
        found = [*statistics.step(), *statistics.close()]
    assert not torch.equal(before, param) and torch.equal(master, param.detach().bfloat16())
    assert any((row.update_ratio or 0.0) > 0.0 for sample in found for row in sample.rows)
