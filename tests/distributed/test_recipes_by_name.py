"""Recipes by the names of layers, given to `quantize_`, `convert` and the train command: sharded, saved,
explained, exported, and loaded where every layer has the recipe that it was saved with. 1 and 3 ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import checkpoints
from quantshard.checkpoints.disk import manifest
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.layouts import export
from quantshard.interop.layouts.source import CheckpointModel
from quantshard.optimizers import FusedAdam
from quantshard.tools.observe import explain
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed.models import bits, set_gradients
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

BF16 = torch.bfloat16
SETTINGS = TrainSettings(
    hidden=96, layers=2, heads=2, ffn=160, seq_length=16, global_batch=6, vocabulary=64, params_dtype="bfloat16"
)
HEAD = "lm_head"


class Block(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.up, self.down = linear(96, 160, bias=False), linear(160, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    """Two blocks of layers that `linear` makes."""

    def __init__(self, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(linear) for _ in range(2))
        self.lm_head = nn.Linear(96, 32, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def ours(cols: int, rows: int, bias: bool, device: str = "cpu") -> nn.Module:
    return qs.Linear(cols, rows, bias=bias, params_dtype=BF16, device=device)


def plain(cols: int, rows: int, bias: bool) -> nn.Module:
    return nn.Linear(cols, rows, bias=bias, dtype=BF16)


def by_init(recipes: dict[str, str], device: str = "cpu") -> nn.Module:
    model = Blocks(partial(ours, device=device))
    qs.quantize_(model, recipes)
    return sharded(model)


def by_convert(recipes: dict[str, str]) -> nn.Module:
    model = Blocks(plain)
    qs.convert(model, recipes)
    return sharded(model)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh)
    return model


def by_train(recipes: dict[str, str]) -> nn.Module:
    text = ",".join(f"{pattern}={recipe}" for pattern, recipe in recipes.items())
    axes = MeshSpec.parse(f"dp_shard={dist.get_world_size()}")
    settings = TrainSettings(**{**vars(SETTINGS), "recipe": text, "mesh": str(axes)}).resolved()
    return models.build(models.ModelSpec(settings), axes.device_mesh("cpu"))


BUILD = {"init": by_init, "convert": by_convert, "train": by_train}
RECIPES = {
    "init": {"layers.1.down": "bf16", "*": "rowwise"},
    "convert": {"layers.1.down": "bf16", "*": "rowwise"},
    "train": {"layers.1": "bf16", "*": "rowwise"},
}
TAGS = {
    "init": {"layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight"},
    "convert": {"layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight"},
    "train": {
        "layers.0.self_attention.proj.weight",
        *(f"layers.0.self_attention.layernorm_qkv.{name}_weight" for name in ("query", "key", "value")),
        *(f"layers.0.layernorm_mlp.fc{name}_weight" for name in ("1_gate", "1_up", "2")),
    },
}
"""Of the quantized weights."""
OTHERS = {
    "quantized here alone": {"*": "rowwise"},
    "quantized there alone": {"layers.0*": "bf16", "*": "rowwise"},
    "another format": {"layers.0*": "block", "*": "rowwise"},
}
SAID = {
    "quantized here alone": "layers.1.{} is stored as high precision there and as fp8_1xrow in this model",
    "quantized there alone": "layers.0.{} is stored as fp8_1xrow there and as high precision in this model",
    "another format": "layers.0.{} is stored as fp8_1xrow there and as fp8_128x128 in this model",
}
FIRST = {"init": "down.weight", "convert": "down.weight", "train": "layernorm_mlp.fc1_gate_weight"}
OTHERS_OF_TRAIN = {
    case: {key.removesuffix("*") or "*": each for key, each in of.items()} for case, of in OTHERS.items()
}
IGNORED = {
    "init": ["layers.1.down", HEAD],
    "convert": ["layers.1.down", HEAD],
    "train": [
        HEAD, "model.embed_tokens", *(f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")),
        *(f"model.layers.1.self_attn.{name}_proj" for name in "kqvo"),
    ],
}  # fmt: skip


def step(entry: str, model: nn.Module) -> float:
    """A forward and backward of this model; the loss."""
    if entry == "train":
        tokens = torch.arange(34).view(2, 17) % 64
        loss = models.loss(model(tokens[:, :-1]), tokens[:, 1:])
    else:
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
        with qs.autocast(recipe="mxfp8") if entry == "init" else torch.enable_grad():
            loss = model(x).float().square().mean()
    loss.backward()
    return loss.item()


def on_ranks(folder: str) -> dict[str, object]:
    """What each entry's model is after a step, as it was saved and loaded; and what is said of other models."""
    found: dict[str, object] = {}
    for entry, build in BUILD.items():
        path = f"{folder}/{dist.get_world_size()}/{entry}"
        torch.manual_seed(0)
        model = build(RECIPES[entry])
        optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
        set_gradients(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(path, model, optimizer, extra={"recipe": str(RECIPES[entry])})
        before = bits(model, optimizer)
        torch.manual_seed(1)
        again = build(RECIPES[entry])
        other = FusedAdam(again.named_parameters(), lr=1e-2)
        checkpoints.load(path, again, other)
        assert bits(again, other) == before
        assert step(entry, again) == step(entry, model)
        rows = explain(again, other, recipe="rowwise").rows
        shown = {row.name for row in rows if row.format == "fp8_1xrow"}
        assert shown == TAGS[entry], (entry, shown)
        assert not any(row.warnings and entry != "train" for row in rows)
        found[entry] = before
        for case, recipes in (OTHERS_OF_TRAIN if entry == "train" else OTHERS).items():
            found[entry, case] = refused(path, build(recipes))
    return found


def cut() -> list[str]:
    """Layers that tensor parallelism cuts, and experts spread over ranks, are those of a context around each; those
    that are sharded on the meta device and filled then, those of the CPU. A layer that is sharded before the context
    is left is refused: what is said."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds: list[Callable[[], nn.Module]] = [
        lambda: qs.Linear(96, 96, parallel_mode="column", tp_mesh=mesh, params_dtype=BF16),
        lambda: qs.Linear(96, 96, parallel_mode="row", tp_mesh=mesh, params_dtype=BF16),
        lambda: qs.GroupedLinear(3, 32, 64, ep_mesh=mesh, params_dtype=BF16),
    ]
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for kind in kinds))
    qs.quantize_(model, {"0": "block", "1": "nvfp4", "*": "mxfp8"})
    torch.manual_seed(0)
    twins = []
    for kind, recipe in zip(kinds, ("block", "nvfp4", "mxfp8"), strict=True):
        with qs.quantized_model_init(recipe=recipe):
            twins.append(kind())
    twin = nn.Sequential(*twins)
    for one, two in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(*(each.to_local() if isinstance(each, DTensor) else each for each in (one, two)))
    spread = [process_groups.is_expert_parallel(param) for param in model.parameters()]
    assert spread == [process_groups.is_expert_parallel(param) for param in twin.parameters()]
    assert any(spread) == (dist.get_world_size() > 1)
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        whole = by_init({"0.down": "delayed", "up": "nvfp4", "*": "bf16"}, device)
        for layer in whole.layers if device == "meta" else ():
            for linear in (layer.up, layer.down):
                linear.reset_parameters()
        found.append({name: value for name, value in bits(whole).items() if name.startswith("layers.")})
    assert found[0] == found[1] and "layers.0.down.input_amax_history" in found[0]
    with pytest.raises(ConfigurationError) as caught:
        qs.quantize_(sharded(Blocks(ours)), {"*": "mxfp8"})
    return [str(caught.value)]


def test_layers_of_several_axes() -> None:
    for ranks in (1, 3):
        for (said,) in run_ranks(ranks, cut):
            assert "layers.0.up.weight is sharded already; call quantize_ first" in said


def refused(path: str, model: nn.Module) -> str:
    try:
        checkpoints.load(path, model)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[dict[str, object]]]]:
    folder = tmp_path_factory.mktemp("recipes")
    return folder, {ranks: run_ranks(ranks, on_ranks, str(folder)) for ranks in (1, 3)}


def test_the_model_is_the_same_on_any_number_of_ranks(written) -> None:
    _, found = written
    for entry in BUILD:
        assert len({tuple(sorted(of[entry].items())) for results in found.values() for of in results}) == 1


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("entry", BUILD)
def test_another_recipe_of_a_layer_is_refused_by_its_name(written, entry: str, case: str) -> None:
    """On every rank, in the same words."""
    _, found = written
    for results in found.values():
        (said,) = {of[entry, case] for of in results}
        assert SAID[case].format(FIRST[entry]) in said and "\n" not in said


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("entry", BUILD)
def test_the_checkpoint_says_and_an_export_writes_what_each_layer_has(
    written, tmp_path: Path, entry: str, ranks: int
) -> None:
    folder, _ = written
    path = folder / str(ranks) / entry
    weights = CheckpointModel(path).weights.values()
    assert {weight.name for weight in weights if "1xrow" in (weight.tag or "")} == TAGS[entry]
    facts = manifest.read_manifest(str(path))
    assert facts is not None and facts.recipe == str(RECIPES[entry])
    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    done = export(path, "compressed-tensors", tmp_path / "out", config=config if entry == "train" else {})
    assert not done.requantized
    written_config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written_config["quantization_config"]["ignore"] == sorted(IGNORED[entry])
