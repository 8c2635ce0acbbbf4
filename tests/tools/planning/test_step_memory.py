"""The memory of a step that `plan` tells: beside what real steps on 1 and 2 ranks take, counted; by hand; refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import kernel_dispatch, kernels
from quantshard.errors import ConfigurationError
from quantshard.gemm import hardware
from quantshard.kernels import workspace
from quantshard.tools.observe.costs import KINDS, StepMemory
from quantshard.tools.planning.rehearsal import RESERVE
from quantshard.tools.planning.timeline import MemoryTimeline, meta_bytes
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.distributed.pool import run_ranks
from tests.tools.planning.counted import Case, counted, planned

if not kernels.USABLE:
    pytest.skip("counted with the kernels, which need Triton", allow_module_level=True)

MIB = 1 << 20
SMALL = TrainSettings(hidden=256, heads=4, ffn=704, layers=4, seq_length=512, global_batch=4)
HOPPER, BLACKWELL = (9, 0), (10, 0)
NATIVE = {"mxfp8": BLACKWELL, "nvfp4": BLACKWELL}
"""GPUs that have all products of a recipe, as the ranks that are counted do."""


def case(ranks: int, recipe: str, *, recomputed: bool = False, **settings: Any) -> Case:
    return Case(replace(SMALL, recipe=recipe, **{"layers": 2, **settings}), ranks, recomputed)


CASES = [
    case(1, "delayed"),
    case(1, "block", recomputed=True),
    case(1, "bf16", micro_batches=2),
    case(1, "current", activation_storage="fp8", recompute="activation"),
    case(2, "current"),
    case(2, "mxfp8", micro_batches=2),
    case(2, "bf16", recomputed=True),
    case(2, "nvfp4", recomputed=True, exp_avg_dtype="fp8"),
    case(2, "delayed", reduce_dtype="bfloat16", architecture="gpt"),
    case(2, "block", mesh="dp_replicate=2"),
]


FEW = CASES[3], CASES[7]


def counted_together(cases: list[Case]) -> list[dict[str, int]]:
    return [counted(each) for each in cases]


@pytest.mark.distributed
@pytest.mark.parametrize("chosen", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["some", "others"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_phases_take_what_is_counted(ranks: int, chosen: bool) -> None:
    """Within a fiftieth: allocations are rounded up, and histories of amaxes are no weights."""
    cases = [each for each in CASES if each.ranks == ranks and (each in FEW) == chosen]
    for each, found in zip(cases, run_ranks(ranks, counted_together, cases)[0], strict=True):
        told = planned(each, NATIVE.get(each.settings.recipe, HOPPER))
        assert told.keys() == found.keys()
        for phase, size in found.items():
            assert told[phase] == pytest.approx(size, rel=0.02), (each, phase)


# By hand -------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers [n, n] of bfloat16, each of which keeps its input of n tokens, behind an embedding."""

    def __init__(self, size: int, count: int = 3, device: str = "meta") -> None:
        super().__init__()
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.embedding = nn.Embedding(size, size, **made)
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False, **made) for _ in range(count))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def memory_of(model: nn.Module, mesh: dict[str, int], **options: Any) -> StepMemory:
    layers = getattr(model, "layers", ())
    arguments = {name: options.pop(name) for name in ("memory", "reshard_after_forward") if name in options}
    step = qs.TrainingStep(**{"batch": 1, "seq_length": 1024, **options})
    found = qs.plan(model, mesh, layers=layers, step=step, **arguments).memory
    assert found is not None
    return found


def test_one_process_by_hand() -> None:
    """1024 x 1024 of bfloat16 are 2 MiB: weights, gradients and activations alike."""
    forward, backward, optimizer = memory_of(Layers(1024), {}).phases
    weights, states = 4 * 2 * MIB, 4 * 12 * MIB
    for phase in (forward, backward, optimizer):
        assert (phase.bytes["weights"], phase.bytes["optimizer states"]) == (weights, states)
        assert phase.bytes["gathered weights"] == 0
    kept, tokens = 3 * 2 * MIB, 16 * 1024
    assert tokens <= forward.bytes["activations"] - kept <= 2 * tokens
    assert forward.bytes["head and loss"] == pytest.approx(2 * MIB, abs=1024)  # what the softmax keeps of logits
    assert forward.bytes["temporary"] == 2 * MIB  # the logits, which are the last layer's result
    assert optimizer.bytes["gradients"] == 4 * 2 * MIB
    assert set(forward.bytes) == set(KINDS)


def test_fsdp_by_hand() -> None:
    """Of 4 ranks each has a quarter; a forward takes most in its last layer."""
    mesh = {"dp_shard": 4}
    forward, _, optimizer = memory_of(Layers(1024), mesh).phases
    assert forward.bytes["weights"] == 2 * MIB and optimizer.bytes["gradients"] == 2 * MIB
    assert forward.bytes["gathered weights"] == 3 * 2 * MIB  # the embedding, a layer, and the buffer that it came in
    whole = memory_of(Layers(1024), mesh, reshard_after_forward=False).phases[0]
    assert whole.bytes["gathered weights"] == 4 * 2 * MIB
    twice = memory_of(Layers(1024), mesh, micro_batches=2, reduce_dtype=torch.float32).phases
    assert twice[0].bytes["gradients"] == 4 * 4 * MIB  # whole, of the first micro-batch
    assert memory_of(Layers(1024), mesh, micro_batches=2).phases[0].bytes["gradients"] == 4 * 2 * MIB
    # where there are few tokens: three whole ones, the gradient of the second, the last one's shard, and its buffer
    few = memory_of(Layers(1024), mesh, micro_batches=2, reduce_dtype=torch.float32, seq_length=8).phases[1]
    assert few.bytes["gradients"] == (3 * 4 + 2 + 0.5 + 4) * MIB


def test_activations_of_recomputed_layers_are_their_inputs() -> None:
    settings = SMALL.resolved()
    phases = {again: planned(Case(settings, 1, recomputed=again), BLACKWELL) for again in (False, True)}
    assert phases[True]["backward"] < 0.75 * phases[False]["backward"]
    assert phases[True]["optimizer step"] == pytest.approx(phases[False]["optimizer step"], abs=4096)


def test_stored_activations_are_their_codes() -> None:
    """Of gate and up in four layers; of one layer they are values in forward still, and in backward again. Logits are
    more than the codes that a layer makes beside its values: with fewer these would be the most of the forward."""
    settings = replace(SMALL, vocabulary=1024).resolved()
    stored = replace(settings, activation_storage="fp8")
    plain, codes = (planned(Case(each, 1), BLACKWELL) for each in (settings, stored))
    tokens, blocks = settings.global_batch * settings.seq_length, -(-settings.ffn // 128)
    layer = 2 * tokens * (2 * settings.ffn - (settings.ffn + 4 * blocks))
    for phase in ("forward", "backward"):
        assert 3 * layer <= plain[phase] - codes[phase] <= 4 * layer, phase
    assert plain["optimizer step"] == pytest.approx(codes["optimizer step"], abs=4096)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_plan_is_the_same_whatever_was_planned_before(recipe: str) -> None:
    """Scalars that share an allocation, and tables, outlive what asked for them."""
    workspace.discard(torch.device("meta"))
    plans = [planned(Case(replace(SMALL.resolved(), recipe=recipe), 1), BLACKWELL) for _ in range(3)]
    workspace.zero(torch.device("meta"))
    plans.append(planned(Case(replace(SMALL.resolved(), recipe=recipe), 1), BLACKWELL))
    assert plans == plans[:1] * 4


def test_the_norm_of_gradients_takes_memory_before_the_optimizer() -> None:
    before, after = (memory_of(Layers(1024), {}, norm_dtype=dtype).phases[-1] for dtype in (None, torch.float64))
    assert after.total - before.total == after.bytes["temporary"] - before.bytes["temporary"] == 16 * MIB


@pytest.mark.parametrize("gib", [0.05, 0.2, 1, 8])
def test_the_largest_batch_is_the_largest(gib: float) -> None:
    limit = int(gib * 2**30)
    found = memory_of(Layers(1024), {}, memory=limit)
    if gib == 0.05:
        assert found.fits.startswith("not even a batch of 1 fits in 51.2 MiB")
        return
    batch = int(found.fits.split(" x ")[0])
    fits, fails = (memory_of(Layers(1024), {}, batch=each).peak for each in (batch, batch + 1))
    assert fits <= limit * (1 - RESERVE) < fails


def test_a_model_is_left_as_it_was() -> None:
    """One with values, on the CPU, whose weights draw random words and whose state of torch's generator is used."""
    with qs.quantized_model_init(recipe="nvfp4"):
        model = qs.LayerNormMLP(64, 128, params_dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = torch.get_rng_state()

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = model(torch.empty(*tokens.shape, 64, dtype=torch.bfloat16, device="meta", requires_grad=True))
        return found

    found = memory_of(model, {"dp_shard": 1}, recipe="nvfp4", loss=loss)
    assert found.peak > 0
    after = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(state, torch.get_rng_state()) and all(param.grad is None for param in model.parameters())
    assert "meta" not in kernel_dispatch.KERNEL_DEVICES
    assert hardware.capability_of(torch.device("meta")) is None


def test_emulated_products_take_their_operands_in_high_precision() -> None:
    """MXFP8 is native from compute capability 10.0 on."""
    hopper, blackwell = (planned(case(1, "mxfp8"), capability)["backward"] for capability in (HOPPER, BLACKWELL))
    assert hopper > 1.02 * blackwell


def test_a_converted_model_with_its_own_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, attn_implementation="sdpa",
    )  # fmt: skip

    def planned(batch: int, loss: str) -> Any:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        qs.convert(model, "current", loss=loss)
        step = qs.TrainingStep(batch, 512 // batch)
        return qs.plan(model, {"dp_shard": 2}, layers=model.model.layers, step=step).memory

    short, long, chunked = planned(2, "model"), planned(1, "model"), planned(2, "chunked")
    assert short.highest.phase == "backward"
    logits = 512 * 1000 * 4
    assert 2 * logits <= short.highest.bytes["head and loss"] < 6 * logits
    # one chunk of logits in bfloat16, and gradients of weight and hidden states in float32
    expected = logits // 2 + 1000 * 128 * 4 + 512 * 128 * 4
    assert expected <= chunked.highest.bytes["head and loss"] < 1.5 * expected
    # attention on a GPU does not keep what it multiplies for each pair of tokens
    assert long.highest.bytes["activations"] == pytest.approx(short.highest.bytes["activations"], rel=0.01)


# Refusals ------------------------------------------------------------------------------------------------------------


class Asking(Layers):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * tokens.sum().item()


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"memory is unknown under 'tp' of 2"):
        memory_of(Layers(64), {"dp_shard": 2, "tp": 2})


def test_a_model_that_asks_for_values_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"Asking does not run without values.*leave the step out"):
        memory_of(Asking(64), {})
    assert "meta" not in kernel_dispatch.KERNEL_DEVICES


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a step"):
        qs.plan(Layers(64), {}, memory=1)


# The timeline --------------------------------------------------------------------------------------------------------


def test_an_operation_has_its_arguments_while_it_runs() -> None:
    timeline = MemoryTimeline()
    with timeline.recorded():
        a = meta_bytes(1 << 20)
        b = a + 1
        del a
        c = b.view(2, -1)
        del b
        d = c * 2
        del c, d
    assert [each.bytes for each in timeline.allocations] == [MIB] * 3
    peak = timeline.highest(0, timeline.now)
    assert [each.lives(peak) for each in timeline.allocations].count(True) == 2
    assert not any(each.lives(timeline.now + 1) for each in timeline.allocations)


def test_released_gradients_by_hand() -> None:
    """Each weight of 128 MiB is updated as soon as it has a gradient; on 4 ranks the shard of one is left."""
    _, backward, optimizer = memory_of(Layers(8192), {}, seq_length=8, release_gradients=True).phases
    assert optimizer.bytes["gradients"] == 0 and backward.bytes["gradients"] == 128 * MIB
    whole = memory_of(Layers(8192), {}, seq_length=8).phases[1]
    assert whole.bytes["gradients"] == 4 * 128 * MIB
    _, backward, optimizer = memory_of(Layers(8192), {"dp_shard": 4}, seq_length=8, release_gradients=True).phases
    assert optimizer.bytes["gradients"] == 0
    whole = memory_of(Layers(8192), {"dp_shard": 4}, seq_length=8).phases[1]
    assert backward.total < whole.total and backward.bytes["gradients"] < whole.bytes["gradients"]
