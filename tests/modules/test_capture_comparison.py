"""What `StepGraph` does so that a capture computes what eager steps compute: masks, warm-up, and warnings."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import quantshard as qs
from quantshard import private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.graphs import comparison, step_graph
from quantshard.modules.graphs.comparison import EagerStep
from quantshard.modules.graphs.recorder import GraphRecorder
from tests.modules.test_step_graph import Training, batch, no_python

POSITIONS = torch.arange(6)[None]
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Captures that Python runs, and replays that run the step again; a number per capture."""
    captured: list[int] = []

    def record(_: GraphRecorder, owner: str, work: Any) -> tuple[Any, Any]:
        captured.append(len(captured))
        return work, None

    monkeypatch.setattr(GraphRecorder, "record", record)
    monkeypatch.setattr(step_graph, "_device", lambda model: torch.device("cpu"))
    return captured


def mask_of(**arguments: Any) -> Tensor | None:
    transformers = pytest.importorskip("transformers")
    from transformers import masking_utils

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    config._attn_implementation = "sdpa"
    cache = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
    arguments = {"attention_mask": None, "position_ids": POSITIONS, cache: None} | arguments
    mask: Tensor | None = masking_utils.create_causal_mask(
        config=config, inputs_embeds=torch.ones(2, 6, 8), **arguments
    )
    return mask


def test_transformers_builds_the_masks_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import import_utils

    assert mask_of() is None
    packed = mask_of(position_ids=PACKED)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert mask_of() is not None, "a capture alone changes the mask"
    with comparison.as_in_eager_steps([]) as flags:
        assert mask_of() is None
        assert mask_of(position_ids=PACKED) is None
    assert [bool(flag) for flag in flags] == [False, True]
    # values of arguments can differ in every replay
    padding = torch.ones(2, 6, dtype=torch.bool)
    with comparison.as_in_eager_steps([PACKED, POSITIONS]) as flags:
        assert mask_of(attention_mask=padding) is not None
        assert mask_of() is not None
        found = mask_of(position_ids=PACKED)
    assert not flags and found is not None and packed is not None and torch.equal(found, packed)


def test_sequences_in_rows_that_the_graph_ignores_raise(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import import_utils

    training = Training()

    def step(x: Tensor, y: Tensor, starts: Tensor) -> Any:
        # position ids that the step makes from its arguments, so that they are not an argument themselves
        mask_of(position_ids=POSITIONS * (1 - starts) + PACKED * starts)
        return training.step({"x": x, "y": y})["loss"]

    graphed = qs.StepGraph(step, training.model, training.optimizer)
    x, y = batch(0).values()
    for number in range(step_graph.EVERY + 8):
        monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: len(captures) > 0)
        graphed(x, y, torch.tensor(0))
        assert len(captures) == (number >= step_graph.WARMUP)
    with pytest.raises(ConfigurationError, match="rows have several sequences"):
        for _ in range(2 * step_graph.EVERY):
            graphed(x, y, torch.tensor(1))


def told(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(item.message) for item in caught if "StepGraph" in str(item.message)]


def test_other_operations_in_the_capture_are_named(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(
        GraphRecorder, "record", lambda _, owner, work: (captures.append(0), no_python(_, owner, work))[1]
    )

    def step(x: Tensor, y: Tensor, other: bool) -> Any:
        if captures and other:
            torch.mm(torch.ones(3, 5), torch.ones(5, 7))
        return training.step({"x": x, "y": y})["loss"]

    graphed = qs.StepGraph(step, training.model, training.optimizer)

    def run(other: bool) -> None:
        for number in range(5):
            graphed(*batch(number).values(), other)

    assert told(lambda: run(False)) == []
    captures.clear()
    [message] = told(lambda: run(True))
    assert "1 mm([3, 5], [5, 7]) only in the graph" in message and "only in eager" not in message


@pytest.mark.parametrize(("compiling", "eager_steps"), [(0, 2), (1, 2), (4, 5), (99, step_graph.WARMUP + 8)])
def test_steps_stay_eager_while_something_is_compiled(
    captures: list[int], monkeypatch: pytest.MonkeyPatch, compiling: int, eager_steps: int
) -> None:
    training = Training()
    monkeypatch.setattr(private_torch, "num_compilations", lambda: min(training.works, compiling))
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    while not captures:
        step(batch(0))
    assert training.works == eager_steps + 1


class Event:
    """An event of a clock that the test sets."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


@pytest.mark.parametrize("replay", [9.0, 11.0])
def test_a_graph_that_is_slower_than_eager_steps_is_named(monkeypatch: pytest.MonkeyPatch, replay: float) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    eager = EagerStep(torch.device("cuda"))

    def takes(duration: float) -> Any:
        def work() -> None:
            Event.now += duration

        return work

    eager.run(takes(10.0))
    messages = told(lambda: [eager.run_replay(takes(replay)) for _ in range(comparison.REPLAYS + 3)])
    assert len(messages) == (replay > 10.0)
    assert not messages or "replays take 11.0 ms, eager steps 10.0 ms" in messages[0]


def test_compilations_are_counted() -> None:
    before = private_torch.num_compilations()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    compiled(torch.ones(2))
    after = private_torch.num_compilations()
    compiled(torch.zeros(2))
    assert before < after == private_torch.num_compilations()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_transformers_model_has_the_bits_of_eager_steps(compiled: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=256, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip

    def trained(is_graph: bool) -> list[float]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        qs.convert(model, "current")
        if compiled:
            for layer in model.model.layers:
                layer.compile()
        optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-3, capturable=True)

        def train_step(tokens: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = qs.StepGraph(train_step, model, optimizer, enabled=is_graph)
        generator = torch.Generator().manual_seed(1)
        return [float(step(torch.randint(256, (2, 64), generator=generator).cuda())) for _ in range(8)]

    expected = trained(False)
    losses: list[float] = []
    messages = told(lambda: losses.extend(trained(True)))
    assert losses == expected and len({*losses}) == 8
    assert [message for message in messages if "operations" in message] == []
