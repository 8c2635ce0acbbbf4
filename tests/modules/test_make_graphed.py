"""`make_graphed_callables` on a GPU: five steps of two micro-batches, optimizer steps between, captured against eager,
bit for bit. Skipped without a GPU; what needs none: tests/modules/test_graphs.py."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.recipe import Recipe
from tests.distributed.models import RECIPES, bits
from tests.modules.graphed import MODULES, Failing, Training, assert_same, module_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def built(name: str, recipe: str, **options: Any) -> nn.Module:
    return module_of(name, RECIPES[recipe], "cuda", **options)


def pair(recipe: str, names: list[str], optimizer: Any = FusedAdam, **options: Any) -> tuple[Training, Training]:
    gc.collect()  # graphs of tests before this one
    eager, graphed = (Training(recipe, [built(name, recipe, **options) for name in names], optimizer) for _ in range(2))
    return eager, graphed


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_five_steps_have_the_bits_of_eager(name: str, recipe: str) -> None:
    """1 process: losses, gradients, weights, histories, draws, states of the optimizer."""
    eager, graphed = pair(recipe, [name])
    graphed.capture()
    assert_same(eager, graphed)
    assert len({float(loss) for loss in eager.seen if loss.ndim == 0}) > 5


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layers_of_a_model(recipe: str) -> None:
    """1 process: several modules that share memory."""
    eager, graphed = pair(recipe, ["TransformerLayer", "LayerNormMLP", "TransformerLayer"])
    graphed.capture(several=True)
    assert_same(eager, graphed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_in_high_precision(recipe: str) -> None:
    """1 process."""
    eager, graphed = pair(recipe, ["LayerNormMLP"], quantized=False)
    graphed.capture()
    assert_same(eager, graphed)


def master_weights(params: Any, **options: Any) -> MasterWeights:
    return MasterWeights(torch.optim.AdamW, params, **options)


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in params], **options)


def lean(params: Any, **options: Any) -> FusedAdam:
    states = {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    return FusedAdam(params, **options, **states)


@pytest.mark.parametrize("optimizer", [master_weights, adamw, lean])
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_optimizers(recipe: str, optimizer: Any) -> None:
    """1 process: each writes codes and scales where they are."""
    eager, graphed = pair(recipe, ["LayerNormMLP"], optimizer)
    graphed.capture()
    assert_same(eager, graphed)


@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4"])
def test_capturing_leaves_no_trace(recipe: str) -> None:
    """1 process: in the midst of training, with gradients that wait for a step; and a captured module trains on."""
    eager, graphed = pair(recipe, ["TransformerLayer"], dropout=0.1)
    for training in (eager, graphed):
        torch.manual_seed(11)
        training.run(2)
        training.forward(training.data(7)).float().sum().backward()
    before = bits(graphed.model, graphed.optimizer), torch.cuda.get_rng_state(), torch.get_rng_state()
    grads = [param.grad for param in graphed.model.parameters()]
    copies = [grad.clone() for grad in grads if grad is not None]
    graphed.capture()
    assert bits(graphed.model, graphed.optimizer) == before[0]
    assert torch.equal(torch.cuda.get_rng_state(), before[1]) and torch.equal(torch.get_rng_state(), before[2])
    for param, grad, copy in zip(graphed.model.parameters(), grads, copies, strict=True):
        assert param.grad is grad and torch.equal(grad, copy)
    for training in (eager, graphed):
        training.seen.clear()
        training.optimizer.zero_grad()
    assert_same(eager, graphed)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout(dropout: float) -> None:
    """1 process: a replay draws what the eager pass draws."""
    eager, graphed = pair("current", ["TransformerLayer"], dropout=dropout)
    graphed.capture()
    assert_same(eager, graphed)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, used: bool) -> None:
        super().__init__()
        self.inner, self.used = inner, used

    def forward(self, x: Tensor) -> Any:
        return qs.checkpoint(self.inner, x, preserve_rng_state=False) if self.used else self.inner(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_inside(recipe: str) -> None:
    """1 process."""
    gc.collect()
    eager, graphed = (Training(recipe, [Checkpointed(built("LayerNormMLP", recipe), used)]) for used in (False, True))
    graphed.capture()
    assert_same(eager, graphed)


def test_eval_and_other_shapes_between() -> None:
    """1 process: what runs eagerly between replays changes none of them."""
    eager, graphed = pair("delayed", ["TransformerLayer"])
    graphed.capture()
    for number in range(4):
        for training in (eager, graphed):
            training.step(number)
            with torch.no_grad():
                training.model.eval()
                training.seen.append(training.forward(training.data(50)[: 32 * (1 + number % 3)]))
                training.model.train()
    assert all(torch.equal(a, b) for a, b in zip(eager.seen, graphed.seen, strict=True))
    assert bits(eager.model, eager.optimizer) == bits(graphed.model, graphed.optimizer)


def test_tensors_among_keywords_are_read_in_each_replay() -> None:
    """1 process: a table that is made of angles once must not be that of the capture for good."""
    eager, graphed = (built("TransformerLayer", "current") for _ in range(2))
    x = torch.randn(96, 1, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    angles = qs.RotaryPositionEmbedding(16)(96, device="cuda")
    qs.make_graphed_callables(graphed, (x,), sample_kwargs={"rotary_pos_emb": angles}, recipe="current")
    found = []
    for scale in (1.0, 0.5, 2.0, 0.5):
        with qs.autocast(recipe="current"):
            pair_of_outputs = [module(x, rotary_pos_emb=angles * scale).detach().clone() for module in (eager, graphed)]
        assert torch.equal(*pair_of_outputs)
        found.append(pair_of_outputs[0])
    assert not torch.equal(found[0], found[1]) and torch.equal(found[1], found[3])


def test_torch_autocast() -> None:
    """1 process: float32 parameters, captured and called under torch.autocast."""
    found = []
    for captured in (False, True):
        torch.manual_seed(5)
        with qs.quantized_model_init(recipe="current"):
            layer = qs.LayerNormMLP(64, 160, device="cuda")
        x = torch.randn(96, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            if captured:
                qs.make_graphed_callables(layer, (x,), recipe="current")
            for _ in range(2):
                with qs.autocast(recipe="current"):
                    y = layer(x)
                y.float().square().sum().backward()
        found.append([y.detach().clone(), *(param.grad for param in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_host_launches_little() -> None:
    """1 process: a guard against a replay that runs the module again."""
    _, graphed = pair("delayed", ["TransformerLayer"])
    graphed.capture()
    graphed.step(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        x = graphed.data(1).requires_grad_()
        graphed.forward(x).float().sum().backward()
    names = [event.key for event in seen.key_averages()]
    assert not any("scaled_mm" in name or name.endswith("::mm") for name in names), names


def test_host_tensors_are_refused() -> None:
    """1 process: a graph would keep their value."""
    layer = built("Linear", "current")
    with pytest.raises(qs.errors.ConfigurationError, match="on cpu, cuda:0, but a CUDA graph is of one GPU"):
        qs.make_graphed_callables(layer, (torch.zeros(16, 64),), recipe="current")


class _LastLayerError(Exception):
    """Ends a forward that is run for the layers' arguments."""


def capture_layers(model: nn.Module, recipe: str | Recipe, **inputs: Tensor) -> None:
    """Capture the decoder layers of a model of transformers with the arguments that its forward gives them."""
    layers: Any = model.model.layers  # type: ignore[union-attr]
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        arguments.append((args, kwargs))
        if len(arguments) == len(layers):
            raise _LastLayerError
        return args[0]

    for layer in layers:
        layer.forward = note
    with pytest.raises(_LastLayerError):
        model(**inputs)
    for layer in layers:
        del layer.forward
    qs.make_graphed_callables(
        list(layers), [args for args, _ in arguments], sample_kwargs=[kwargs for _, kwargs in arguments], recipe=recipe
    )


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_layers_of_transformers(recipe: str) -> None:
    """1 process: the decoder layers of a converted Llama, with the arguments that its forward gives them."""
    transformers = pytest.importorskip("transformers")
    found = []
    for captured in (False, True):
        gc.collect()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
        qs.convert(model, RECIPES[recipe])
        optimizer = FusedAdam(model.named_parameters(), lr=1e-3)
        tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
        if captured:
            capture_layers(model, RECIPES[recipe], input_ids=tokens, labels=tokens)
        losses = []
        for _ in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append((torch.stack(losses), bits(model, optimizer)))
    assert torch.equal(found[0][0], found[1][0]) and len(found[0][0].unique()) == 4
    assert found[0][1] == found[1][1]


def test_what_autograd_saved_of_a_result_is_written_over() -> None:
    """1 process: a frozen layer's result, that a head keeps for its own backward."""
    layer, head = built("Linear", "current").requires_grad_(False), nn.Linear(64, 2).to("cuda", torch.bfloat16)
    x = torch.randn(96, 1, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    qs.make_graphed_callables(layer, (x,), recipe="current")
    with qs.autocast(recipe="current"):
        first, second = (head(layer(x * number)).float().sum() for number in (1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    second.backward()


@pytest.mark.parametrize("runs", [2, 4])
def test_a_failed_capture_leaves_draws_counted_on_the_host(runs: int) -> None:
    """1 process: it fails in the second warm-up, or in the capture; afterwards it can be captured."""
    eager, graphed = (Training("nvfp4", [Failing(built("Linear", "nvfp4"), runs)]) for _ in range(2))
    state, before = graphed.model[0].inner.weight.quantized_storage.state, bits(graphed.model)
    with pytest.raises(ValueError, match="enough"):
        graphed.capture()
    assert state["draws"].is_cpu and bits(graphed.model) == before
    for training in (eager, graphed):
        training.model[0].runs = 99
    graphed.capture()
    assert state["draws"].is_cuda
    assert_same(eager, graphed, steps=3)


def memory_after(recipe: str) -> int:
    """Bytes that are reserved when a captured model was trained and is gone."""
    training = Training(recipe, [built("LayerNormMLP", recipe)])
    training.capture()
    training.step(0)
    training.model.forward.reset()
    del training
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_memory_of_graphs_goes_with_them(recipe: str) -> None:
    """1 process: what four models reserved is no more than what two did."""
    found = [memory_after(recipe) for _ in range(4)]
    assert found[3] <= found[1], found


def test_calls_that_share_a_pool_train_in_turn() -> None:
    """1 process: bits of eager where each backward comes before another call's forward, an error elsewhere."""
    pool = torch.cuda.graph_pool_handle()
    eager, graphed = ([Training("delayed", [built("LayerNormMLP", "delayed")]) for _ in range(2)] for _ in range(2))
    for training in graphed:
        training.capture(pool=pool)
    for number in range(3):
        for training in (*eager, *graphed):
            training.step(number)
    for one, other in zip(eager, graphed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.seen, other.seen, strict=True))
        assert bits(one.model, one.optimizer) == bits(other.model, other.optimizer)
    lost, kept = (training.forward(training.data(1)).float().sum() for training in graphed)
    with pytest.raises(qs.errors.UnsupportedOperationError, match="overwritten"):
        lost.backward()
    kept.backward()
