"""accelerate with quantized weights: its loop has the bits of a plain FSDP2 loop, saved, loaded and refused by name.

Each test names its rank count.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DistributedType, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import quantshard as qs
from quantshard.errors import CheckpointError, ConfigurationError, RankMismatchError, UnsupportedOperationError
from quantshard.integrations.accelerate import prepare
from quantshard.interop.layouts.names import Names
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.interop.frameworks.accelerators import (
    LINEAR_LAYERS,
    accelerator,
    batches,
    build,
    changed,
    codes,
    fsdp2,
    held,
    plain,
    quantized,
)

pytestmark = pytest.mark.distributed
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": partial(FusedAdam, lr=3e-3),
    "MasterWeights": lambda params: MasterWeights(torch.optim.AdamW, params, lr=3e-3),
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
}
STEPS, MICRO_BATCHES, MAX_NORM = 3, 2, 0.5


def by_hand(recipe: str, mixed: str, optimizer: str, keep: bool) -> tuple[list[float], dict[str, str]]:
    """Losses and bits of a plain FSDP2 loop that accumulates and clips."""
    model = build(recipe, keep=keep)
    policy = {} if mixed == "no" else {"mp_policy": fsdp2(mixed).mixed_precision_policy}
    if mixed != "no":
        model.float()  # as accelerate does; of quantized weights the nominal dtype alone
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    steps = OPTIMIZERS[optimizer](model.named_parameters())
    losses = []
    for _ in range(STEPS):
        parts = batches(MICRO_BATCHES)
        for number, tokens in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        steps.step()
        steps.zero_grad()
    return losses, bits(model, steps)


def by_accelerate(
    accelerate: Accelerator, model: nn.Module, optimizer: Any, count: int = STEPS, parts: int = MICRO_BATCHES
) -> list[float]:
    losses = []
    for _ in range(count):
        for tokens in batches(parts):
            with accelerate.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerate.backward(loss)
                if accelerate.sync_gradients:
                    accelerate.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses


def trained(cells: list[tuple[str, str, str, str, bool]]) -> list[Any]:
    """Of each cell: quantized weights, changed ones and those in the optimizer; losses and bits, here and by hand."""
    found = []
    for how, recipe, mixed, optimizer, keep in cells:
        plugin = {how: True} if how == "activation_checkpointing" else {}
        with accelerator(mixed=mixed, accumulate=MICRO_BATCHES, **plugin) as accelerate:
            model: Any = build(recipe, keep=keep)
            make = OPTIMIZERS[optimizer]
            if how == "prepare, a function":
                model, steps = prepare(accelerate, model, make)
            elif how != "accelerator.prepare":
                model, steps = prepare(accelerate, model, make(model.named_parameters()))
            else:
                model, steps = accelerate.prepare(model, make(model.named_parameters()))
            before = codes(model)
            losses = by_accelerate(accelerate, model, steps)
            counts = len(quantized(model)), changed(before, model), held(model, steps)
            found.append((counts, losses, bits(model, steps.optimizer)))
        found.append(by_hand(recipe, mixed, optimizer, keep))
    return found


CELLS = [
    ("accelerator.prepare", "mxfp8", "no", "FusedAdam", True),
]
MORE_CELLS = [
    ("prepare, a function", "nvfp4", "bf16", "MasterWeights", True),
    ("accelerator.prepare", "current", "bf16", "MasterWeights", False),
    ("prepare", "nvfp4", "bf16", "FusedAdam", True),
    ("prepare", "mxfp8", "no", "AdamW", False),
    ("activation_checkpointing", "mxfp8", "no", "FusedAdam", False),
]


@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE_CELLS, marks=pytest.mark.exhaustive)], ids=["", "more"])
def test_training_has_the_bits_of_a_plain_loop(cells: list[tuple[str, str, str, str, bool]]) -> None:
    """2 ranks: every quantized weight is in the optimizer, and changes."""
    for rank in run_ranks(2, trained, cells):
        for cell, (counts, losses, got), (expected, reference) in zip(cells, rank[::2], rank[1::2], strict=True):
            assert counts == (LINEAR_LAYERS,) * 3, cell
            assert losses == expected and losses[-1] < losses[0], cell
            assert got == reference, cell


# Checkpoints ---------------------------------------------------------------------------------------------------------


def saved(cells: list[tuple[str, str]], folder: Path) -> list[dict[str, str]]:
    """Bits of runs that were saved after a step, of a later step, and of loading back; then of a step from there."""
    found = []
    for recipe, mixed in cells:
        with accelerator(mixed=mixed) as accelerate:
            model, optimizer = prepare(accelerate, build(recipe), partial(FusedAdam, lr=3e-3))
            by_accelerate(accelerate, model, optimizer, 1, 1)
            found.append(bits(model, optimizer.optimizer))
            accelerate.save_state(str(folder / recipe))
            by_accelerate(accelerate, model, optimizer, 1, 1)
            found.append(bits(model, optimizer.optimizer))
            accelerate.load_state(str(folder / recipe))
            found.append(bits(model, optimizer.optimizer))
            by_accelerate(accelerate, model, optimizer, 1, 1)
            found.append(bits(model, optimizer.optimizer))
    return found


def loaded(cells: list[tuple[str, str]], folder: Path) -> list[dict[str, str]]:
    """Bits of new runs, of other weights, into which those were loaded; a plain model does not take them."""
    found = []
    with accelerator() as accelerate:
        model = plain()
        accelerate.prepare(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(CheckpointError, match=CODES.replace("mxfp8_32x32", ".*")):
            accelerate.load_state(str(folder / cells[0][0]))
    for recipe, mixed in cells:
        with accelerator(mixed=mixed) as accelerate:
            model, optimizer = prepare(accelerate, build(recipe, seed=1), partial(FusedAdam, lr=3e-3))
            accelerate.load_state(str(folder / recipe))
            found.append(bits(model, optimizer.optimizer))
            by_accelerate(accelerate, model, optimizer, 1, 1)  # goes on
    return found


def check_export(recipe: str, folder: Path) -> None:
    """What save_state wrote of the model is exported, and transformers reads it: the values of its weights."""
    model: Any = build(recipe, seed=1)
    numbered = {re.sub(r"(?<=[.])[0-9]+(?=[.])", "{n}", name, count=1) for name, _ in model.named_parameters()}
    names, saved_model = Names({name: name for name in numbered}), folder / recipe / "pytorch_model_fsdp_0"
    out = folder / f"{recipe}-plain"
    qs.layouts.export(saved_model, "plain", out, names=names, config=model.config.to_dict())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved_model)
    model.load_state_dict(state["model"])
    qs.revert(model)
    read = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    expected = {name: value.float() for name, value in model.state_dict().items()}
    assert read.keys() == expected.keys()
    assert all(torch.allclose(value, expected[name], rtol=2**-8, atol=0) for name, value in read.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")  # DCP's
@pytest.mark.parametrize(
    "cells",
    [[("mxfp8", "no")], pytest.param([("current", "bf16"), ("nvfp4", "bf16")], marks=pytest.mark.exhaustive)],
    ids=["", "more"],
)
def test_save_state_and_load_state(cells: list[tuple[str, str]], tmp_path: Path) -> None:
    """2 ranks save and load back and go on with the bits of the run that never stopped; 1 and 3 ranks load the same."""
    one, two = run_ranks(2, saved, cells, tmp_path)
    assert one == two
    for first, later, back, again in zip(*[iter(one)] * 4, strict=True):
        assert first == back != later and again == later
    for recipe, _ in cells:
        check_export(recipe, tmp_path)
    for ranks in (1, 3):
        for found in run_ranks(ranks, loaded, cells[:1], tmp_path):
            assert found == one[:1]


# Values of rank 0 ----------------------------------------------------------------------------------------------------


@pytest.fixture
def alone_on_cpu() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


CODES = r"holds quantized weights \(model.layers.0.self_attn.q_proj.weight: mxfp8_32x32\)"


@pytest.mark.parametrize(
    "options",
    [{}, {"safe_serialization": False}, {"max_shard_size": "50KB"}],
    ids=["safetensors", "bin", "several files"],
)
def test_codes_of_save_model_are_not_read_as_values(
    options: dict[str, Any], alone_on_cpu: Accelerator, tmp_path: Path
) -> None:
    """The function was imported above, before quantshard."""
    model = build("mxfp8")
    alone_on_cpu.save_model(model, str(tmp_path), **options)
    other = plain(seed=1)
    before = bits(other)
    for path in [tmp_path, *tmp_path.glob("*.index.json")]:
        with pytest.raises(CheckpointError, match=CODES) as caught:
            load_checkpoint_in_model(other, path)
        assert "call quantshard.convert with the recipe" in str(caught.value)
    if index := [*tmp_path.glob("*.index.json")]:
        content = json.loads(index[0].read_text())
        elsewhere = tmp_path / "elsewhere"
        (elsewhere / "shards").mkdir(parents=True)
        for name in {*content["weight_map"].values()}:
            shutil.copy(tmp_path / name, elsewhere / "shards")
        content["weight_map"] = {key: f"shards/{name}" for key, name in content["weight_map"].items()}
        (elsewhere / index[0].name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=CODES):
            load_checkpoint_in_model(other, elsewhere / index[0].name)
    assert bits(other) == before
    other = build("mxfp8", seed=1)
    load_checkpoint_in_model(other, tmp_path)
    assert bits(other) == bits(model)


@pytest.mark.parametrize("safe", [True, False])
def test_codes_of_save_state_are_not_read_as_values(safe: bool, alone_on_cpu: Accelerator, tmp_path: Path) -> None:
    alone_on_cpu.prepare(build("mxfp8"))
    alone_on_cpu.save_state(str(tmp_path), safe_serialization=safe)
    alone_on_cpu.free_memory()
    alone_on_cpu.prepare(plain(seed=1))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        alone_on_cpu.load_state(str(tmp_path))


def from_rank0(mixed: str) -> list[Any]:
    """Bits with `cpu_ram_efficient_loading` and without; non-persistent buffers; a loss of each."""
    found: list[Any] = []
    for efficient in (True, False):
        with accelerator(mixed=mixed, cpu_ram_efficient_loading=efficient) as accelerate:
            model = build("mxfp8", seed=dist.get_rank() if efficient else 0)
            if efficient and dist.get_rank() == 1:
                model.to("meta")
            model, optimizer = prepare(accelerate, model, partial(FusedAdam, lr=3e-3))
            found.append(bits(model, optimizer.optimizer))
            found.append([(name, buffer.sum().item()) for name, buffer in model.named_buffers()])
            found.append(by_accelerate(accelerate, model, optimizer, 1))
    return found


def on_meta(_: object) -> list[Any]:
    """Of a model without values: what is sharded, what an optimizer says, and a loss once it has some."""
    with accelerator() as accelerate:
        model = plain().to("meta")
        qs.convert(model, "mxfp8")
        empty: Any = prepare(accelerate, model)
        where = {(type(param), param.is_meta) for param in empty.parameters()}
        with pytest.raises(ConfigurationError) as caught:
            prepare(accelerate, empty, partial(FusedAdam, lr=3e-3))
        return [where == {(DTensor, True)}, str(caught.value)]


def test_a_model_without_values_is_sharded_and_its_optimizer_waits() -> None:
    """2 ranks."""
    for sharded, said_of_optimizer in run_ranks(2, on_meta, None):
        assert sharded and "is on the meta device; call reset_parameters()" in said_of_optimizer


def of_other_seeds(_: object) -> list[str]:
    """What is said of ranks that hold other models, and of some that hold none while others do."""
    found = []
    for placed in (lambda model: model, lambda model: model.to("meta") if dist.get_rank() else model):
        with accelerator() as accelerate:
            try:
                prepare(accelerate, placed(build("mxfp8", seed=dist.get_rank())))
                found.append("")
            except RankMismatchError as error:
                found.append(str(error))
    return found


def test_ranks_that_hold_other_models_are_refused() -> None:
    """2 ranks and 3: each would keep its part of another model. Where some hold nothing, none waits for them."""
    for ranks in (2, 3):
        for other, _ in run_ranks(ranks, of_other_seeds, None):
            assert "the hash of 'model.embed_tokens.weight" in other and "differs between ranks" in other


def test_cpu_ram_efficient_loading() -> None:
    """3 ranks, of which one has the values, one others and one none."""
    for found in run_ranks(3, from_rank0, "bf16"):
        assert found[:3] == found[3:] and found[1]


def replicas(recipe: str, folder: Path) -> list[Any]:
    """Under DDP, of ranks that were born apart: bits after training, saved, and loaded; what accelerate alone says."""
    with accelerator("ddp") as accelerate, pytest.raises(UnsupportedOperationError) as caught:
        model = build(recipe)
        accelerate.prepare(model, FusedAdam(model.parameters()))
    with accelerator("ddp", "bf16") as accelerate:
        model, optimizer = prepare(accelerate, build(recipe, seed=dist.get_rank()), partial(FusedAdam, lr=3e-3))
        before = codes(model)
        losses = by_accelerate(accelerate, model, optimizer)
        qs.check_replicas(model.module)
        counts = len(quantized(model)), changed(before, model), held(model, optimizer)
        accelerate.save_state(str(folder))
        kept = bits(model.module, optimizer.optimizer)
        by_accelerate(accelerate, model, optimizer, 1, 1)
        accelerate.load_state(str(folder))
        return [type(model), counts, losses, kept, bits(model.module, optimizer.optimizer), str(caught.value)]


def alone(recipe: str, folder: Path) -> dict[str, str]:
    """A process without a group, of other weights, loads what replicas saved, with an optimizer that exists."""
    with accelerator("none", "bf16") as accelerate:
        assert accelerate.distributed_type == DistributedType.NO
        model: Any = build(recipe, seed=5)
        model, optimizer = prepare(accelerate, model, FusedAdam(model.named_parameters(), lr=3e-3))
        accelerate.load_state(str(folder))
        found = bits(model, optimizer.optimizer)
        losses = by_accelerate(accelerate, model, optimizer, 2, 1)
        assert losses[-1] < losses[0]
        return found


@pytest.mark.parametrize(
    "recipe", ["mxfp8", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("current", "nvfp4"))]
)
def test_replicas_under_ddp(recipe: str, tmp_path: Path) -> None:
    """2 ranks, and this process."""
    ranks = run_ranks(2, replicas, recipe, tmp_path)
    for kind, counts, losses, kept, back, alone_says in ranks:
        assert "init_sync=False" in alone_says
        assert kind is nn.parallel.DistributedDataParallel and counts == (LINEAR_LAYERS,) * 3
        assert losses[-1] < losses[0]
        assert kept == back == ranks[0][3]
    assert alone(recipe, tmp_path) == ranks[0][3]


# Refusals ------------------------------------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


def refused(_: object) -> list[str]:
    """What is said of each wrong use, by the same rank."""
    found = []
    with accelerator() as accelerate:
        plugin, state = accelerate.state.fsdp_plugin, accelerate.state
        model = build("mxfp8")
        found.append(said(lambda: prepare(accelerate, plain(), torch.optim.AdamW)))
        other = FusedAdam(plain().named_parameters())
        found.append(said(lambda: prepare(accelerate, model, other)))
        plugin.state_dict_type = fsdp2(state_dict_type="FULL_STATE_DICT").state_dict_type
        found.append(said(lambda: prepare(accelerate, model)))
        plugin.state_dict_type, plugin.fsdp_version = fsdp2().state_dict_type, 1
        found.append(said(lambda: prepare(accelerate, model)))
        plugin.fsdp_version, state._mixed_precision = 2, "fp8"
        found.append(said(lambda: prepare(accelerate, model)))
        state._mixed_precision, state.distributed_type = "no", DistributedType.DEEPSPEED
        found.append(said(lambda: prepare(accelerate, model)))
        state.distributed_type, plugin.cpu_ram_efficient_loading = DistributedType.FSDP, True
        found.append(said(lambda: prepare(accelerate, build("mxfp8", keep=True))))
        found.append(said(lambda: prepare(accelerate, build("mxfp8", tie_word_embeddings=True))))
        found.append(said(lambda: prepare(accelerate, build("mxfp8").to("meta"))))
        plugin.cpu_ram_efficient_loading = False
        adamw = torch.optim.AdamW(model.parameters())
        model(input_ids=batches()[0]).logits.sum().backward()
        adamw.step()
        found.append(said(lambda: prepare(accelerate, model, adamw)))
    return found


def prepared_in_part(_: object) -> tuple[int, bool]:
    with accelerator() as accelerate:
        model: Any = build("mxfp8")
        params = [p for name, p in model.named_parameters() if "mlp.up_proj" not in name]
        model, optimizer = prepare(accelerate, model, FusedAdam(params))
        grouped = {p for group in optimizer.param_groups for p in group["params"]}
        return len(params) - len(grouped), optimizer.optimizer.state.keys() == grouped


def test_an_optimizer_of_some_parameters_is_prepared() -> None:
    """1 rank."""
    assert run_ranks(1, prepared_in_part, None) == [(0, True)]


def test_wrong_use_is_said_in_one_line() -> None:
    """1 rank."""
    (lines,) = run_ranks(1, refused, None)
    words = [
        "LlamaForCausalLM has no quantized weight; call quantshard.convert",
        "has foreign parameters; build it after convert",
        "state_dict_type='SHARDED_STATE_DICT'",
        "fsdp_version=2",
        "use 'bf16' or 'no'",
        "DEEPSPEED is not supported",
        "omits the initial values",
        "would separate tied weights",
        "rank 0 has no values of",
        "AdamW would lose its states",
    ]
    for line, expected in zip(lines, words, strict=True):
        assert expected in line and "\n" not in line


def test_fsdp_that_accelerate_does_not_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 process, for which it shards nothing; nor does it on CPUs with more."""
    with qs.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(qs.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu"))
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.warns(UserWarning, match="asked for FSDP but runs NO"):
        prepare(Accelerator(cpu=True), model)
    AcceleratorState._reset_state(reset_partial_state=True)
