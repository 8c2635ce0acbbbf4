"""What `LiveWeights` sends of sharded models: the bits of an export of the model's checkpoint. Tests name ranks."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from quantshard import checkpoints, numerics, serving
from quantshard.formats import NVFP4_1X16, Orientation
from quantshard.interop.layouts import export, live, writing
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed import test_layouts
from tests.distributed.models import sha
from tests.distributed.pool import run_ranks

pytest.importorskip("transformers", "5.0")

import transformers

from tests.distributed.test_mixtures import built
from tests.interop.layouts.models import CONFIG
from tests.pages import snippets
from tests.tools.planning.counted import StorageCounter, plain_tensors

pytestmark = pytest.mark.distributed


class Case(NamedTuple):
    """A recipe, the layout to send, and a mesh; `lossy` as in `LiveWeights`."""

    recipe: str
    layout: str
    mesh: str
    lossy: bool = False


class Sent(NamedTuple):
    """Hashes by name of what a rank yields, in order; None for what others hold. `held`: its `held_names()`."""

    tensors: dict[str, str | None]
    held: set[str] | None
    lines: list[str]


def bits(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {sha(tensor.reshape(-1).view(torch.uint8))}"


def sent(weights: serving.LiveWeights) -> Sent:
    tensors = {}
    for (name, dtype, shape), (yielded, value) in zip(weights.metadata(), weights, strict=True):
        assert name == yielded and (value is None or (value.dtype, tuple(value.shape)) == (dtype, shape))
        tensors[name] = None if value is None else bits(value)
    return Sent(tensors, weights.held_names(), weights.report.lines())


def exported(folder: Path, layout: str, config: Any, **options: Any) -> dict[str, str]:
    export(folder, layout, folder / "out", config=config, values="weights", **options)
    files = [load_file(path) for path in (folder / "out").glob("*.safetensors")]
    return {name: bits(value) for tensors in files for name, value in tensors.items()}


def ours(folder: str, cases: list[Case]) -> list[Sent]:
    """Models of `TransformerLayer` after a step, when masters are no longer the weights."""
    found = []
    for number, case in enumerate(cases):
        model = test_layouts.build(case.recipe, case.mesh, seed=0)
        optimizer = test_layouts.FusedAdam(model.named_parameters(), lr=1e-2)
        test_layouts.step(model, optimizer)
        checkpoints.save(f"{folder}/{number}", model, optimizer)
        options: dict[str, Any] = {"config": test_layouts.HF, "lossy": case.lossy}
        found.append(sent(serving.LiveWeights(model, case.layout, **options)))
    return found


CASES = [
    Case("block", "hf-fp8-block", "dp_shard=1"),
    Case("mxfp8", "compressed-tensors-mxfp8", "dp_shard=1"),
    Case("block", "hf-fp8-block", "dp_shard=2"),
    Case("current", "compressed-tensors-fp8-channel", "tp=2"),
    Case("nvfp4", "plain-bf16", "tp=2"),
    Case("mxfp8", "sglang-mxfp8", "dp_replicate=2"),
    Case("block", "compressed-tensors-fp8-block", "dp_shard=3"),
    Case("delayed", "modelopt-fp8-channel", "dp_shard=3"),
    Case("rowwise", "modelopt-fp8-channel", "dp_shard=3"),
    Case("nvfp4", "plain-fp32", "dp_shard=3"),
    Case("bf16", "plain-bf16", "dp_shard=3"),
    Case("mxfp8", "modelopt-mxfp8", "dp_shard=2,tp=2"),
    Case("block", "hf-fp8-block", "dp_replicate=2,dp_shard=2"),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bits_are_those_of_an_export(ranks: int, tmp_path: Path) -> None:
    """1 to 4 ranks; on 3, shards are uneven and end inside blocks."""
    cases = [case for case in CASES if MeshSpec.parse(case.mesh).processes == ranks]
    by_rank = run_ranks(ranks, ours, str(tmp_path), cases)
    for number, case in enumerate(cases):
        wanted = exported(tmp_path / str(number), case.layout, test_layouts.HF)
        for found in by_rank:
            assert found[number].tensors == wanted, case
            assert found[number].held is None


def converted(folder: str) -> list[Sent]:
    """Tied embeddings, under DDP and FSDP2."""
    found = []
    for kind in ("ddp", "fsdp"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**{**CONFIG, "tie_word_embeddings": True, "num_hidden_layers": 1})
        model: Any = transformers.LlamaForCausalLM(config).bfloat16()
        qs.convert(model, "block")
        if kind == "fsdp":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        checkpoints.save(f"{folder}/{kind}", model, None)
        wrapped = DistributedDataParallel(model, init_sync=False) if kind == "ddp" else model
        found.append(sent(serving.LiveWeights(wrapped, "hf-fp8-block")))
    return found


def test_tied_embeddings_are_sent_once(tmp_path: Path) -> None:
    """3 ranks."""
    config = {**CONFIG, "tie_word_embeddings": True, "num_hidden_layers": 1}
    by_rank = run_ranks(3, converted, str(tmp_path))
    for number, kind in enumerate(("ddp", "fsdp")):
        wanted = exported(tmp_path / kind, "hf-fp8-block", config)
        assert "lm_head.weight" not in wanted and "model.embed_tokens.weight" in wanted
        for found in by_rank:
            assert found[number].tensors == wanted


def mixtures(folder: str, names: list[str], layout: str) -> list[tuple[Sent, Sent, int, int]]:
    """Experts on 2 ranks, all gathered and not, and the bytes that were gathered for both."""
    found = []
    for name in names:
        model = built(name, "mxfp8", 2)
        checkpoints.save(f"{folder}/{name}", model, None)
        model.config.architectures = [live.class_name(model)]
        if dist.get_rank() == 0:
            model.config.save_pretrained(f"{folder}/{name}-config")
        results, gathered = [], []
        plain_gather = live._all_gather
        for held_only in (False, True):
            total = [0]

            def counted(pieces: Any, group: Any, total: list[int] = total, plain_gather: Any = plain_gather) -> None:
                total[0] += sum(piece.nbytes for piece in pieces) * (group.size() - 1)
                plain_gather(pieces, group)

            live._all_gather = counted
            try:
                results.append(sent(serving.LiveWeights(model, layout, held_only=held_only)))
            finally:
                live._all_gather = plain_gather
            gathered.append(total[0])
        found.append((results[0], results[1], gathered[0], gathered[1]))
    return found


def test_ranks_send_their_own_experts(tmp_path: Path) -> None:
    """2 ranks, each with two of four experts: together all tensors, and nobody gathers the other's experts."""
    by_rank = run_ranks(2, mixtures, str(tmp_path), ["Qwen3-MoE", "Mixtral"], "compressed-tensors-mxfp8")
    for number, name in enumerate(("Qwen3-MoE", "Mixtral")):
        wanted = exported(tmp_path / name, "compressed-tensors-mxfp8", tmp_path / f"{name}-config")
        together: dict[str, str] = {}
        for found in by_rank:
            gathered, held, all_bytes, held_bytes = found[number]
            assert gathered.tensors == wanted and gathered.held is None
            assert held.tensors.keys() == wanted.keys()
            own = {key: value for key, value in held.tensors.items() if value is not None}
            assert held.held == own.keys() and own.items() <= wanted.items()
            assert sum(".experts." in key for key in own) * 2 == sum(".experts." in key for key in wanted)
            together |= own
            # two layers, half of four experts, 3 * 32 * 64 codes, and a scale for 32 x 32 of them
            assert all_bytes - held_bytes == 2 * 2 * 3 * 32 * 64 * 1025 // 1024
        assert together == wanted


def extra_bytes(_: object) -> tuple[int, int, int]:
    """The most bytes that a transfer takes next to the shards, of a layer's tensors, and of all."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 6, "vocab_size": 32})
    model: Any = transformers.LlamaForCausalLM(config).bfloat16()
    qs.convert(model, "block")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    weights = serving.LiveWeights(model, "hf-fp8-block")
    sizes = {name: dtype.itemsize * math.prod(shape) for name, dtype, shape in weights.metadata()}
    with StorageCounter(plain_tensors(model.parameters())) as counter:
        for _ in weights:
            # gloo's thread lets go of buffers a little later
            time.sleep(0.01)
    layer_bytes = sum(size for name, size in sizes.items() if ".layers.0." in name)
    return counter.most[""], layer_bytes, sum(sizes.values())


def test_a_rank_holds_at_most_one_extra_layer() -> None:
    """3 ranks."""
    for most, layer, whole in run_ranks(3, extra_bytes, None):
        # gloo's thread can hold the input of a gather while its result is read
        assert layer / 2 < most < 1.05 * layer < whole / 4


def averaged(_: object) -> tuple[list[str], list[str], bool]:
    """Reports of transfers outside and inside `averaged_weights`, and whether the latter sent what was in the model."""
    model = test_layouts.build("mxfp8", f"dp_shard={dist.get_world_size()}", seed=0)
    optimizer = test_layouts.FusedAdam(model.named_parameters(), lr=1e-2, ema_decay=0.5)
    for _ in range(2):
        test_layouts.step(model, optimizer)
    weights = serving.LiveWeights(model, "sglang-mxfp8", config=test_layouts.HF)
    outside = sent(weights)
    with qs.optimizers.averaged_weights(model, optimizer):
        inside = sent(weights)
    assert sent(weights).tensors == outside.tensors
    return outside.lines, inside.lines, outside.tensors != inside.tensors


def test_a_transfer_inside_averaged_weights_says_so() -> None:
    """2 ranks."""
    for outside, inside, differ in run_ranks(2, averaged, None):
        assert differ and not any("averages" in line for line in outside)
        assert "12 tensors have the values of averages of the weights (EMA)" in inside


def repeated(_: object) -> list[tuple[bool, int, int]]:
    """For each layout: whether the second transfer, after a step, equals that of a new object, and plans made."""
    results = []
    plain_groups = writing.ExportPlan.groups
    for recipe, layout, lossy in (("block", "hf-fp8-block", False), ("nvfp4", "modelopt-nvfp4", True)):
        model = test_layouts.build(recipe, f"dp_shard={dist.get_world_size()}", seed=0)
        optimizer = test_layouts.FusedAdam(model.named_parameters(), lr=1e-2)
        options: dict[str, Any] = {"config": test_layouts.HF, "lossy": lossy}
        plans = [0]

        def counted(plan: Any, plans: list[int] = plans) -> Any:
            plans[0] += 1
            return plain_groups(plan)

        writing.ExportPlan.groups = counted  # type: ignore[method-assign]
        try:
            weights = serving.LiveWeights(model, layout, **options)
            first = sent(weights)
            test_layouts.step(model, optimizer)
            second, made = sent(weights), plans[0]
        finally:
            writing.ExportPlan.groups = plain_groups  # type: ignore[method-assign]
        assert second.tensors != first.tensors
        retained = sum(part.nbytes for parts in weights._source._gathered.values() for part in parts.values())
        results.append((second == sent(serving.LiveWeights(model, layout, **options)), made, retained))
    return results


def test_later_transfers_send_the_present_weights() -> None:
    """2 ranks. What only depends on the model's structure is planned once; scales that engines fuse are read again."""
    assert run_ranks(2, repeated, None) == [[(True, 1, 0), (True, 3, 0)]] * 2


def test_a_model_that_changes_is_planned_again() -> None:
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 1}))
    qs.convert(model.bfloat16(), "block")
    weights = serving.LiveWeights(model, "hf-fp8-block")
    model.model.norm.float()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 40, bias=False)
    tensors = dict(weights)
    assert weights.metadata() == serving.LiveWeights(model, "hf-fp8-block").metadata()
    head, norm = tensors["lm_head.weight"], tensors["model.norm.weight"]
    assert head is not None and norm is not None
    assert norm.dtype is torch.float32 and torch.equal(head, model.lm_head.weight)
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data.half()
    assert dict(weights)["lm_head.weight"].dtype is torch.float16  # type: ignore[union-attr]
    model.lm_head.to("meta")
    # the second attempt must not send what the last plan had
    for _ in range(2):
        with pytest.raises(qs.errors.ConfigurationError, match=r"lm_head\.weight is on the meta device"):
            next(iter(weights))


def test_a_plan_that_failed_is_not_reused() -> None:
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 1}))
    qs.convert(model.bfloat16(), "block")
    weights = serving.LiveWeights(model, "hf-fp8-block")
    qs.revert(model.model.layers[0].mlp)
    qs.convert(model.model.layers[0].mlp, "nvfp4")
    for _ in range(2):
        with pytest.raises(qs.errors.ConfigurationError, match="hf-fp8-block"):
            iter(weights)


def test_names_that_change_are_planned_again() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in "abc"})
    weights = serving.LiveWeights(model, "plain-bf16")
    model["b"].weight = model["c"].weight
    assert torch.equal(value_of(weights, "b.weight"), model["c"].weight.bfloat16())
    model["b"].weight = model["a"].weight
    assert torch.equal(value_of(weights, "b.weight"), model["a"].weight.bfloat16())
    model["d"] = model.pop("c")
    assert [name for name, _ in weights] == ["a.weight", "b.weight", "d.weight"]


def value_of(weights: serving.LiveWeights, name: str) -> torch.Tensor:
    value = dict(weights)[name]
    assert value is not None
    return value


def test_transfers_announce_a_changed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = SimpleNamespace(WeightSource=object, ParamMeta=lambda *spec: spec)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 1}))
    qs.convert(model.bfloat16(), "block")
    weights = serving.LiveWeights(model, "hf-fp8-block")
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 40, dtype=torch.bfloat16)
    folder = serving.publish(weights, tmp_path, version=1)
    assert any("lm_head.bias" in load_file(file) for file in folder.glob("*.safetensors"))
    source = serving.weight_source(weights)
    source.metadata()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 40, bias=False, dtype=torch.bfloat16)
    with pytest.raises(qs.errors.ConfigurationError, match="changed after metadata"):
        next(iter(source))
    assert len(source.metadata()) == len([*source])


def unfinished() -> list[bool]:
    """A transfer that was given up leaves nothing that the next one would send or wait for."""
    model = test_layouts.build("block", f"dp_shard={dist.get_world_size()}", seed=0)
    weights = serving.LiveWeights(model, "hf-fp8-block", config=test_layouts.HF)
    first = iter(weights)
    if dist.get_rank() == 0:
        # rank 0 keeps the iterator, and the others have closed it
        next(first)
    else:
        next(first)
        first.close()  # type: ignore[attr-defined]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    fresh = dict(serving.LiveWeights(model, "hf-fp8-block", config=test_layouts.HF))
    return [torch.equal(value, fresh[name]) for name, value in weights if value is not None]  # type: ignore[arg-type]


def test_an_unfinished_transfer_leaves_nothing() -> None:
    for equal in run_ranks(2, unfinished):
        assert equal and all(equal)


def requantized(_: object) -> tuple[list[str], float, list[float]]:
    """The report of a lossy transfer, the error of a weight measured from outside, and second scales of q, k and v."""
    model = test_layouts.build("nvfp4", f"dp_shard={dist.get_world_size()}", seed=0)
    options: dict[str, Any] = {"config": test_layouts.HF, "lossy": True}
    weights = serving.LiveWeights(model, "modelopt-nvfp4", **options)
    tensors = {name: value.clone() for name, value in weights if value is not None}
    plain = dict(serving.LiveWeights(model, "plain-fp32", config=test_layouts.HF))
    stem = "model.layers.0.self_attn.q_proj."
    parts = {"codes": tensors[stem + "weight"], "scale_inv": tensors[stem + "weight_scale"].view(torch.uint8)}
    parts["amax"] = (tensors[stem + "weight_scale_2"] * 2688).view(1, 1)
    value = plain[stem + "weight"]
    assert value is not None
    copy = NVFP4_1X16.copies[Orientation.ROWWISE]
    read = numerics.dequantize(copy, parts, (value.shape[0], value.shape[1]))
    error = float((read - value).norm() / value.norm())
    scales = [float(tensors[f"model.layers.0.self_attn.{part}_proj.weight_scale_2"]) for part in "qkv"]
    assert abs(weights.report.errors[stem + "weight"] - error) < 1e-5
    return weights.report.lines(), error, scales


def test_requantized_weights_have_one_scale_and_a_known_error() -> None:
    """2 ranks."""
    for lines, error, scales in run_ranks(2, requantized, None):
        assert len(set(scales)) == 1 and 0.01 < error < 0.15
        assert any(line.startswith("relative error of requantized weights: at most 0.") for line in lines)
        assert any("LOSSY: requantized 5 weights" in line for line in lines)


def refused(_: object) -> list[str]:
    """What is said of bad input, the same on all ranks."""
    said = []

    def attempt(function: Any) -> None:
        try:
            function()
            said.append("nothing was raised")
        except qs.errors.QuantshardError as error:
            said.append(str(error))

    model = test_layouts.build("nvfp4", f"dp_shard={dist.get_world_size()}", seed=0)
    attempt(lambda: serving.LiveWeights(model, "hf-fp8-blok", config=test_layouts.HF))
    attempt(lambda: serving.LiveWeights(model, "hf-fp8-block", config=test_layouts.HF))
    attempt(lambda: serving.LiveWeights(model, "modelopt-nvfp4", config=test_layouts.HF))
    attempt(lambda: serving.LiveWeights(model, "modelopt-fp8", config=test_layouts.HF))
    with torch.device("meta"):
        empty = torch.nn.Linear(4, 4) if dist.get_rank() == 1 else None
    attempt(lambda: serving.LiveWeights(empty or torch.nn.Linear(4, 4, device="cpu"), "plain-bf16"))
    return said


def test_bad_input_is_one_line_on_all_ranks() -> None:
    """3 ranks; the last error is one rank's alone."""
    first, *others = run_ranks(3, refused, None)
    assert all(said == first for said in others)
    unknown, inexact, fused, undefined, meta = first
    assert unknown.startswith("unknown layout 'hf-fp8-blok'; did you mean 'hf-fp8-block'?")
    assert "is not exact in hf-fp8-block: codes are E2M1, the layout's E4M3" in inexact
    assert "fuses model.layers.0.self_attn.q_proj.weight with 2 more under one scale, and theirs differ" in fused
    assert "its readers need a scale of the activations" in undefined
    assert meta == "on rank 1: weight is on the meta device; load the model, or call reset_parameters()"


class RecordingLLM:
    """The methods of vLLM's `LLM` that a receiver calls; `calls` has those that replace weights."""

    def __init__(self, model: str) -> None:
        config = SimpleNamespace(model_config=SimpleNamespace(model=model))
        self.llm_engine, self.version, self.calls = SimpleNamespace(vllm_config=config), "default", []

    def get_weight_version(self) -> str:
        return self.version

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        # vLLM must not seem complete while it loads
        self.calls.append((method, Path(kwargs["weights_path"]).name, self.version))

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, prompts: list[str], sampling: None) -> list[str]:
        return prompts


def test_the_page_on_serving(tmp_path: Path) -> None:
    """The snippets of docs/serving.md, with a stand-in for vLLM."""
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 1}))
    qs.convert(model.bfloat16(), "block")
    names: dict[str, Any] = {"model": model, "step": 0, "LLM": RecordingLLM, "prompts": ["a"], "sampling": None}
    send, receive = (text.replace("/dev/shm/policy", str(tmp_path)) for text in snippets("docs/serving.md"))
    for names["step"] in range(3):
        exec(send, names)
    assert [path.name for path in serving.published(tmp_path)] == ["1", "2"]
    exec(receive, names)
    assert names["outputs"] == ["a"] and names["receiver"].version == "2"
    assert names["receiver"].llm.calls == [("reload_weights", "2", "incomplete"), "reset"]
    names["receiver"].llm.update_weight_version(serving.INCOMPLETE)
    with pytest.raises(qs.errors.ConfigurationError, match="parts of two versions"):
        names["receiver"].generate([], None)
    with pytest.raises(qs.errors.CheckpointError, match="holds no complete version"):
        names["receiver"].update(tmp_path / "nothing")


def test_a_source_waits_for_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs buffer after buffer on streams of its own; the first read and each change of streams wait."""
    base = SimpleNamespace(WeightSource=object, ParamMeta=lambda *spec: spec)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 1}))
    qs.convert(model.bfloat16(), "block")
    weights = serving.LiveWeights(model, "hf-fp8-block")
    source, events, stream = serving.weight_source(weights), list[str](), ["first"]
    read = weights._source.parts
    monkeypatch.setattr(weights._source, "parts", lambda weight: events.append("read") or read(weight))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append(f"wait for {stream[0]}"))
    names = []
    for name, _ in source:
        names.append(name)
        if len(names) == 4:
            stream[0] = "second"
    assert names == [name for name, *_ in source.metadata()]
    waits = [number for number, event in enumerate(events) if event != "read"]
    assert [events[number] for number in waits] == ["wait for first", "wait for second"]
    assert waits[0] == 0 < waits[1] < len(events) - 1
    assert not weights._source._gathered


def test_a_folder_of_versions(tmp_path: Path) -> None:
    """Versions rise, and what others wrote stays; layers that are compiled have their own names."""
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": 1}))
    qs.convert(model.bfloat16(), "block")
    names = [name for name, _ in serving.LiveWeights(model, "hf-fp8-block")]
    model.model.layers[0] = torch.compile(model.model.layers[0])
    weights = serving.LiveWeights(model, "hf-fp8-block")
    assert [name for name, _ in weights] == names
    (tmp_path / "100").mkdir()
    (tmp_path / ".notes.partial").mkdir()
    for version in (4, 5, 6):
        serving.publish(weights, tmp_path, version)
    assert [path.name for path in serving.published(tmp_path)] == ["5", "6"]
    assert (tmp_path / "100").exists() and (tmp_path / ".notes.partial").exists()
    for arguments, message in (
        ({"version": 6}, "has version 6; use a new folder"),
        ({"version": 3}, "has version 6; use a new folder"),
        ({"version": "7"}, "version='7'.*use an integer of at least 0"),
        ({"version": 7, "keep": 0}, "keep=0.*use an integer of at least 1"),
    ):
        with pytest.raises(qs.errors.ConfigurationError, match=message):
            serving.publish(weights, tmp_path, **arguments)
    with pytest.raises(qs.errors.ConfigurationError, match="pass LiveWeights"):
        serving.publish(model, tmp_path, 7)  # type: ignore[arg-type]
