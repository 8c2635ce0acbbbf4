"""autocast: nesting, mismatches, and the amax histories of delayed scaling, step by step against a hand-kept list.

All on the CPU, also where there is a GPU: products there sum in another order than those by hand.
"""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import quantshard
from quantshard import recipe as recipes, requantize_
from quantshard.errors import ConfigurationError, QuantshardError, RecipeMismatchError
from quantshard.modules import LayerNormMLP, Linear, TransformerLayer, autocast, quantized_model_init
from quantshard.modules.contexts import context, pending_amaxes, settings
from quantshard.modules.contexts.recompute import checkpoint
from quantshard.tensor.quantized_tensor import QuantizedTensor

SIZE, LENGTH = 48, 3
DELAYED = recipes.DelayedScaling(amax_history_len=LENGTH)
NAMES = ["delayed", "current", "block", "rowwise", "mxfp8", "nvfp4"]


def linear(recipe=None, seed=0, **arguments):
    torch.manual_seed(seed)
    with quantized_model_init(enabled=recipe is not None, recipe=recipe or "bf16"):
        return Linear(SIZE, SIZE, **{"device": "cpu", **arguments})


def data(seed=0):
    torch.manual_seed(seed)
    return torch.randn(5, SIZE)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert settings.registered[context.current_setting()].recipe == recipes.HighPrecision()
    assert not pending_amaxes.forward_amaxes()
    assert not pending_amaxes.backward_amaxes


# Settings


def test_a_setting_goes_with_its_process_group():
    """Compiled graphs know settings by name, so the names of those that are gone are not given to others."""

    before, names = (set(settings.registered), set(settings._names)), set()
    for _ in range(3):
        group = dist.ProcessGroup(0, 1)
        context_ = autocast(recipe="delayed", amax_reduction_group=group)
        assert autocast(recipe="delayed", amax_reduction_group=group).setting == context_.setting
        names.add(context_.setting)
        found = weakref.ref(group)
        del group
        assert settings.registered[context_.setting].amax_reduction_group is found()
        del context_
        gc.collect()
        assert found() is None
    assert len(names) == 3
    assert (set(settings.registered), set(settings._names)) == before


def calls_of(function):
    """Python calls that a call makes."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(called)
    function()
    sys.setprofile(None)
    gc.enable()
    return count


def test_an_autocast_costs_the_same_however_many_recipes_were_used():
    def step_of(recipe):
        layer, x = linear(recipe), data()

        def step():
            with autocast(recipe=recipe):
                layer(x)

        step()
        return calls_of(step)

    alone = step_of(recipes.DelayedScaling(amax_history_len=71))
    for length in range(100, 130):
        autocast(recipe=recipes.DelayedScaling(amax_history_len=length))
    step_of(recipes.Float8CurrentScaling())  # whose formats are the same
    assert step_of(recipes.DelayedScaling(amax_history_len=72)) == alone


# Which recipe


def test_the_innermost_decides():
    plain, x = linear(), data()
    alone = {}
    for name in ("current", "mxfp8", "nvfp4"):  # block scales are powers of two too: mostly the same bits as mxfp8
        with autocast(recipe=name):
            alone[name] = plain(x)
    assert len({tuple(y.flatten().tolist()) for y in alone.values()}) == len(alone)
    high = plain(x)
    with autocast(recipe="current"):
        for inner in ("mxfp8", "nvfp4"):
            with autocast(recipe=inner):
                assert torch.equal(plain(x), alone[inner])
                with autocast(recipe="current"):
                    assert torch.equal(plain(x), alone["current"])
                assert torch.equal(plain(x), alone[inner])
            assert torch.equal(plain(x), alone["current"])
        with autocast(enabled=False, recipe="nvfp4"):
            assert torch.equal(plain(x), high)
        with autocast(recipe="bf16"):
            assert torch.equal(plain(x), high)
    assert torch.equal(plain(x), high)


def test_backward_uses_the_recipe_of_its_forward():
    grads = []
    for inside in (True, False):
        layer, x = linear(), data().requires_grad_()
        with autocast(recipe="current"):
            y = layer(x)
            if inside:
                y.backward(data(1))
        if not inside:
            with autocast(recipe="nvfp4"):
                y.backward(data(1))
        grads.append((x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_default_recipe_is_current_scaling():
    plain, x = linear(), data()
    with autocast():
        default = plain(x)
    with autocast(recipe="current"):
        assert torch.equal(plain(x), default)


def test_a_generator_that_ends_late_takes_its_own_contexts_with_it():
    def holding(made):
        with made:
            yield

    late = holding(autocast(recipe="mxfp8"))
    next(late)
    with autocast(recipe="block"):
        late.close()
        assert settings.registered[context.current_setting()].recipe.name == "block"
    late = holding(quantized_model_init(recipe="mxfp8"))
    next(late)
    with quantized_model_init(recipe="block"):
        late.close()
        assert context.init_plan().recipe.name == "block"
    assert not context.init_plan().quantize


@pytest.mark.filterwarnings("ignore:.*an amax history was made in this forward")
@pytest.mark.parametrize("stored", [None, "delayed"])
def test_a_layer_whose_first_call_was_in_inference_mode_trains(stored):
    """What delayed scaling remembers is made in the first forward, if not with the module."""
    layers = [linear(stored), linear(stored)]
    layers[0].eval()
    with torch.inference_mode(), autocast(recipe="delayed"):
        layers[0](data())
    layers[0].train()
    for layer in layers:
        with autocast(recipe="delayed"):
            out = layer(data())
        out.sum().backward()
    for name, buffer in layers[1].named_buffers():
        assert torch.equal(layers[0].get_buffer(name), buffer)
    assert layers[1].get_buffer("input_amax_history").any()


def test_as_decorators():
    @autocast(recipe="mxfp8")
    def recipe_inside(depth=0):
        return recipe_inside(depth - 1) if depth else settings.registered[context.current_setting()].recipe.name

    @quantized_model_init(recipe="block")
    def built():
        """A layer."""
        return Linear(SIZE, SIZE, device="cpu")

    assert recipe_inside() == recipe_inside(2) == "mxfp8"
    assert built.__doc__ == "A layer." and all("fp8_128x128" in repr(built().weight) for _ in range(2))
    assert not context.init_plan().quantize


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_the_meta_device(recipe):
    with torch.device("meta"):
        layer, x = linear(recipe, device="meta"), torch.randn(5, SIZE, requires_grad=True)
    with autocast(recipe=recipe):
        out = layer(x)
    out.sum().backward()
    assert out.is_meta and x.grad.shape == x.shape


def test_an_instance_can_be_entered_again():
    entered = autocast(recipe="current")
    with entered, autocast(recipe="block"), entered:
        assert context.current_setting() == entered.setting
    assert context.current_setting() == settings.NO_AUTOCAST


@pytest.mark.parametrize("context", [autocast, quantized_model_init])
@pytest.mark.parametrize("given", ["nvfp4", DELAYED, 1, None])
def test_a_recipe_in_the_place_of_enabled_is_refused(context, given):
    """It would be true, and the default recipe be used."""
    with pytest.raises(ConfigurationError, match=rf"{context.__name__}\(enabled=.*must be True or False.*recipe="):
        context(given)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_the_dequantized_weight_is_used(name, dtype):
    layer, x = linear(name, params_dtype=dtype), data().to(dtype)
    layer.bias.data.fill_(0.25)
    want = (x.float() @ layer.weight.dequantize(dtype=torch.float32).t() + 0.25).to(dtype)
    assert torch.equal(layer(x), want)
    with autocast(recipe=name), autocast(enabled=False):
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_outside_are_those_of_the_dequantized_weight(name):
    layer, x = linear(name), data().requires_grad_()
    layer(x).backward(data(1))
    assert torch.equal(x.grad, data(1) @ layer.weight.dequantize())
    assert torch.equal(layer.weight.grad, data(1).t() @ data())
    assert type(layer.weight.grad) is torch.Tensor


@pytest.mark.parametrize(("stored", "asked"), [("current", "mxfp8"), ("nvfp4", "block"), ("current", "delayed")])
def test_another_recipes_weight_is_refused_by_name(stored, asked):
    layer = linear(stored)
    with pytest.raises(RecipeMismatchError) as caught, autocast(recipe=asked):
        layer(data())
    assert isinstance(caught.value, QuantshardError)
    assert isinstance(caught.value, ValueError)
    assert "Linear.weight" in str(caught.value)
    assert repr(asked) in str(caught.value)
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    with pytest.raises(
        RecipeMismatchError,
        match=r"^Recipe mismatch for 'Linear\.weight': it is stored as .* enter autocast with the weights",
    ):
        with autocast(recipe=asked):
            model(data())
    for cell in (recipes.resolve(stored).weight, recipes.resolve(asked).weight):
        assert cell is not None and cell.format.name in str(caught.value)


def test_mismatch_names_the_weight_of_a_fused_module():
    with quantized_model_init(recipe="block"):
        module = LayerNormMLP(SIZE, 64, device="cpu")
    with pytest.raises(RecipeMismatchError, match=r"LayerNormMLP\.fc1_weight"), autocast(recipe="nvfp4"):
        module(data())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_quantizing_at_birth_or_in_the_gemm_gives_the_same_bits(name, dtype):
    """The weight itself is rounded to the parameters' dtype first, in both."""
    stored, plain = linear(name, params_dtype=dtype), linear(params_dtype=dtype)
    assert type(plain.weight) is torch.nn.Parameter
    results = []
    for layer in (stored, plain):
        x = data().to(dtype).requires_grad_()
        with autocast(recipe=name):
            y = layer(x)
        y.backward(data(1).to(dtype))
        results.append((y.detach(), x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_the_same_for_a_whole_layer(name):
    outputs = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with quantized_model_init(enabled=enabled, recipe=name):
            layer = TransformerLayer(96, 200, 3, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
        torch.manual_seed(1)
        with autocast(recipe=name):
            outputs.append(layer(torch.randn(7, 2, 96)))
    assert torch.equal(*outputs)


# Delayed scaling


def histories(layer):
    return [layer.input_amax_history, layer.grad_output_amax_history, layer.weight_state("weight")["amax_history"]]


def amax(tensor):
    return tensor.detach().abs().max().float().item()


class Kept:
    """Histories kept by hand: oldest first, `LENGTH` long, zeros before the first."""

    def __init__(self):
        self.lists = [[0.0] * LENGTH for _ in range(3)]

    def note(self, *amaxes):
        for history, value in zip(self.lists, amaxes, strict=True):
            if value:
                history.append(value)
                del history[0]

    def assert_equal(self, layer):
        for history, want in zip(histories(layer), self.lists, strict=True):
            assert torch.equal(history, torch.tensor(want)), (history, want)


@pytest.mark.filterwarnings("ignore:.*was made in this forward")
@pytest.mark.parametrize("stored", [True, False])
def test_histories_after_some_steps(stored):
    layer, kept = linear(DELAYED if stored else None), Kept()
    if stored:
        initial = linear()  # the same values
        kept.note(0, 0, amax(initial.weight))
        kept.assert_equal(layer)
    for number in range(LENGTH + 2):
        x, dy = data(number) * (1 + number % 3), data(number + 50) / (number + 1)
        weight_amax = amax(layer.weight) if not stored else 0
        with autocast(recipe=DELAYED):
            y = layer(x)
            kept.assert_equal(layer)  # nothing is recorded before the exit
        kept.note(amax(x), 0, weight_amax)
        kept.assert_equal(layer)
        y.backward(dy)
        kept.note(0, amax(dy), 0)
        kept.assert_equal(layer)
        new = data(number + 90).t() @ data(number + 90) / 10
        if stored:
            requantize_([(layer.weight, new)])
            kept.lists[2] = [0.0] * (LENGTH - 1) + [amax(new)]  # it begins again
        else:
            layer.weight.data.copy_(new)
    kept.assert_equal(layer)


def test_most_recent_scales_by_the_newest():
    x = data()
    outputs = {}
    for algorithm in ("max", "most_recent"):
        recipe = recipes.DelayedScaling(amax_history_len=LENGTH, amax_compute_algo=algorithm)
        layer = linear(recipe)
        for factor in (8.0, 1.0):
            with autocast(recipe=recipe):
                layer(x * factor)
        with autocast(recipe=recipe):
            outputs[algorithm] = layer(x)
        assert torch.equal(layer.input_amax_history[-2:], torch.tensor([amax(x), amax(x)]))
    fresh = linear(recipe)
    fresh.input_amax_history[-1] = amax(x)
    with autocast(recipe=recipe):
        assert torch.equal(fresh(x), outputs["most_recent"])
    assert not torch.equal(outputs["max"], outputs["most_recent"])


def test_eval_records_nothing():
    layer = linear(DELAYED).eval()
    before = [h.clone() for h in histories(layer)]
    with autocast(recipe=DELAYED):
        y = layer(data().requires_grad_())
    y.backward(data(1))
    assert all(torch.equal(a, b) for a, b in zip(before, histories(layer), strict=True))


def test_a_failed_forward_records_nothing():
    layer = linear(DELAYED)
    with pytest.raises(RuntimeError, match="boom"), autocast(recipe=DELAYED):
        with autocast(recipe=DELAYED):
            layer(data())
        raise RuntimeError("boom")
    assert torch.equal(layer.input_amax_history, torch.zeros(LENGTH))
    with autocast(recipe=DELAYED):
        layer(data(1))
    assert torch.equal(layer.input_amax_history, torch.tensor([0.0, 0.0, amax(data(1))]))


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("boom")


def test_a_failed_backward_does_not_stop_the_next():
    layer = linear(DELAYED)
    with autocast(recipe=DELAYED):
        y = layer(FailsInBackward.apply(data().requires_grad_()))
    with pytest.raises(RuntimeError, match="boom"):
        (y * 100).sum().backward()
    with autocast(recipe=DELAYED):
        y = layer(data())
    y.backward(data(1))
    assert torch.equal(layer.grad_output_amax_history, torch.tensor([0.0, 0.0, amax(data(1))]))


def test_a_failed_backward_does_not_stop_the_next_of_a_graph_that_is_there():
    layer = linear(DELAYED)
    with autocast(recipe=DELAYED):
        failing = layer(FailsInBackward.apply(data().requires_grad_()))
        y = layer(data())
    with pytest.raises(RuntimeError, match="boom"):
        (failing * 100).sum().backward()
    y.backward(data(1))
    assert torch.equal(layer.grad_output_amax_history, torch.tensor([0.0, 0.0, amax(data(1))]))


def test_used_twice_the_larger_is_recorded_once():
    layer = linear(DELAYED)
    small, large = data(1), data(2) * 5
    with autocast(recipe=DELAYED):
        total = layer(large) * 3 + layer(small)
    total.backward(data(3))
    assert torch.equal(layer.input_amax_history, torch.tensor([0.0, 0.0, amax(large)]))
    assert torch.equal(layer.grad_output_amax_history, torch.tensor([0.0, 0.0, amax(data(3) * 3)]))


def test_amaxes_are_recorded_at_the_outermost_exit():
    layer = linear(DELAYED)
    with autocast(recipe="current"):
        with autocast(recipe=DELAYED):
            layer(data())
        assert torch.equal(layer.input_amax_history, torch.zeros(LENGTH))
    assert torch.equal(layer.input_amax_history, torch.tensor([0.0, 0.0, amax(data())]))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_zero_and_nonfinite_amaxes_are_not_recorded(value):
    layer = linear(DELAYED)
    for x, dy in ((data(), data(1)), (torch.full((2, SIZE), value),) * 2):
        with autocast(recipe=DELAYED):
            y = layer(x)
        y.backward(dy)
    assert torch.equal(layer.input_amax_history, torch.tensor([0.0, 0.0, amax(data())]))
    assert torch.equal(layer.grad_output_amax_history, torch.tensor([0.0, 0.0, amax(data(1))]))


def test_histories_are_in_the_state_dict_where_delayed_scaling_is_planned():
    keys = {"input_amax_history", "grad_output_amax_history", "weight_amax_history"}
    assert keys <= set(linear(DELAYED).state_dict())
    assert not keys & set(linear("current").state_dict())
    with quantized_model_init(enabled=False, recipe=DELAYED):
        planned = Linear(SIZE, SIZE, device="cpu")
    assert keys <= set(planned.state_dict())
    assert type(planned.weight) is torch.nn.Parameter


@pytest.mark.parametrize("how", ["argument", "context", "to_empty"])
def test_planned_histories_survive_meta(how):
    with quantized_model_init(enabled=False, recipe=DELAYED):
        if how == "context":
            with torch.device("meta"):
                layer = Linear(SIZE, SIZE)
        else:
            layer = Linear(SIZE, SIZE, device="meta")
    assert layer.weight.is_meta
    if how == "to_empty":
        layer.to_empty(device="cpu")
    layer.reset_parameters()
    with autocast(recipe=DELAYED):
        layer(data().to(layer.weight.device))
    assert [h[-1].item() for h in histories(layer)] == [amax(data()), 0.0, amax(layer.weight)]


# Threads


def in_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_autocast_holds_for_the_thread_that_entered_it(compiled):
    layer, x = linear("current"), data()
    forward = torch.compile(lambda x: layer(x), backend="eager") if compiled else layer
    high_precision = layer(x)
    with autocast(recipe="current"):
        quantized = forward(x)
        elsewhere = in_another_thread(lambda: forward(x))

        def run_inside():
            with autocast(recipe="current"):
                return forward(x)

        entered_elsewhere = in_another_thread(run_inside)
    assert not torch.equal(quantized, high_precision)
    assert torch.equal(elsewhere, high_precision)
    assert torch.equal(entered_elsewhere, quantized)


def test_quantized_model_init_holds_for_the_thread_that_entered_it():
    with quantized_model_init(recipe="current"):
        weight = in_another_thread(lambda: Linear(SIZE, SIZE, device="cpu").weight)
        assert isinstance(Linear(SIZE, SIZE, device="cpu").weight, QuantizedTensor)
    assert not isinstance(weight, QuantizedTensor)


def test_leaving_an_autocast_records_no_amaxes_of_another_thread():
    layer, other = linear(DELAYED), linear(DELAYED)
    other.eval()

    def run_other():
        with autocast(recipe=DELAYED):
            other(data(1))

    with autocast(recipe=DELAYED):
        layer(data())
        in_another_thread(run_other)
        assert not layer.input_amax_history.any()
    assert layer.input_amax_history[-1] == data().abs().max()


def test_entering_an_autocast_drops_no_gradient_amaxes_of_another_thread():
    layer = linear(DELAYED)

    def enter(grad):
        in_another_thread(lambda: autocast(recipe="current")(torch.nn.Identity())(grad))

    x = torch.zeros(5, SIZE, requires_grad=True)
    with autocast(recipe=DELAYED):
        hidden = layer(x * 1.0 + data())
    x.register_hook(enter)
    hidden.square().sum().backward()
    recorded = layer.grad_output_amax_history[-1]
    assert recorded == 2 * hidden.abs().max()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_in_another_thread_recomputes_by_the_recipe_of_its_forward(use_reentrant):
    def gradient(run_backward, recompute):
        layer, x = linear("current"), data().requires_grad_()
        with autocast(recipe="current"):
            y = checkpoint(layer, x, use_reentrant=use_reentrant) if recompute else layer(x)
        run_backward(y.square().sum().backward)
        return x.grad

    expected = gradient(lambda backward: backward(), recompute=False)
    with autocast(recipe="block"):
        assert torch.equal(gradient(in_another_thread, recompute=True), expected)


# The recipe "auto"


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    recipes.auto_name.cache_clear()
    yield
    recipes.auto_name.cache_clear()


def test_auto_is_current_where_mxfp8_is_emulated():
    assert recipes.resolve("auto") is recipes.resolve(None) is recipes.resolve("current")
    assert recipes.resolve("auto/wgrad:bf16") is recipes.resolve("current/wgrad:bf16")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_auto_is_current_on_gpus_other_than_blackwell_datacenter(capability, blackwell, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert recipes.resolve("auto").name == "current"


def test_auto_is_mxfp8_on_blackwell(blackwell):
    assert recipes.resolve(None).name == recipes.resolve("AUTO").name == "mxfp8"
    assert quantized_model_init().plan.recipe.name == "mxfp8"


def test_autocast_without_a_recipe_matches_weights_of_a_model_init_without_one():
    with quantized_model_init():
        layer = Linear(SIZE, SIZE, device="cpu")
    with autocast():
        by_default = layer(data())
    with autocast(recipe="current"):
        assert torch.equal(layer(data()), by_default)


# Printed models


@pytest.mark.parametrize(
    "build",
    [
        lambda: Linear(64, 64, device="cpu"),
        lambda: quantshard.LayerNormLinear(64, 64, device="cpu"),
        lambda: quantshard.LayerNormMLP(64, 64, device="cpu"),
        lambda: quantshard.GroupedLinear(2, 64, 64, device="cpu"),
        lambda: quantshard.Linear(64, 64, parameters_split=("query", "key"), device="cpu"),
    ],
)
def test_quantized_layers_print_the_format_of_their_weights(build):
    with quantized_model_init(recipe="mxfp8"):
        assert repr(build()).endswith(", weight=mxfp8_32x32)")
    assert "weight=" not in repr(build())


def test_converted_layers_print_the_format_of_their_weights():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    quantshard.convert(model, {"0": "mxfp8", "1": "bf16"})
    assert ", bias=True, weight=mxfp8_32x32)" in repr(model[0]) and "weight=" not in repr(model[1])
