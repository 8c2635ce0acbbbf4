"""torchtitan's Trainer, from its command line, with quantized linear layers and FusedAdam by its overrides; 2 ranks.

Its losses are bitwise those of a plain FSDP2 loop over the same model. `titan_configs` says what stands in for a GPU.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from quantshard import Linear, explain, quantized_model_init
from quantshard.checkpoints import high_precision_state_dict
from quantshard.optimizers import FusedAdam
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.interop.frameworks import perceptron, titan_configs
from tests.interop.frameworks.titan_configs import integration, param_group, trainer_of
from tests.pages import snippets

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import torchtitan_parallelize

pytestmark = pytest.mark.distributed
STEPS, MORE = 5, 2
RECIPES = ("mxfp8", "current", "nvfp4")
QUANTIZED = 7 * titan_configs.LAYERS
OPTIMIZER = "quantshard.integrations.torchtitan.optimizer"


def overrides(recipe: str) -> list[str]:
    return [
        "--override.imports",
        f'quantshard.integrations.torchtitan.linear={{"recipe": "{recipe}"}}',
        OPTIMIZER,
    ]


def by_hand(recipe: str, begin: dict[str, Tensor], rates: list[float]) -> list[float]:
    """The losses of a loop over the same model, by FSDP2 alone, with these learning rates."""
    config = titan_configs.model(fuse_qkv=False)
    integration.TitanConverter.Config(recipe=recipe).build().convert(config)
    with torch.device("meta"):
        model = config.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy).set_gradient_divide_factor(1.0)
    titan_configs.force_sums(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.load_state_dict(begin)
    optimizer, losses = FusedAdam(model.named_parameters(), betas=(0.9, 0.95), weight_decay=0.1), []
    for step, rate in enumerate(rates):
        tokens = titan_configs.random_tokens(step, dist.get_rank(), (2, titan_configs.SEQUENCE + 1))
        out, target = model(tokens[:, :-1]), tokens[:, 1:]
        loss = F.cross_entropy(out.flatten(0, 1).float(), target.flatten(), reduction="sum")
        loss = loss / (target.numel() * dist.get_world_size())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def trained(recipe: str, folder: Path) -> dict[str, Any]:
    """What the test compares."""
    enabled = ["--checkpoint.enable", *overrides(recipe)]
    trainer, rates = trainer_of(folder, *enabled), list[float]()
    model = trainer.model_parts[0]
    begin = {key: value.detach().clone() for key, value in model.state_dict().items()}
    before = perceptron.quantized_bits(model)
    (fused,) = trainer.optimizers

    def note(optimizer: FusedAdam, *_: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    fused.register_step_pre_hook(note)
    losses = titan_configs.train(trainer)
    found = {
        "weights": len(before),
        "changed": perceptron.changed(before, model),
        "held": perceptron.in_optimizer(model, fused),
    }
    saved = bits(model, fused)
    trainer.close()
    trainer = trainer_of(folder, *enabled, "--training.steps", str(STEPS + MORE))
    trainer.checkpointer.load()
    (fused,) = trainer.optimizers
    after = bits(trainer.model_parts[0], fused)
    found["differ"] = [name for name in saved if saved[name] != after.get(name)]
    fused.register_step_pre_hook(note)
    losses += titan_configs.train(trainer)
    trainer.close()
    return found | {"losses": losses, "by hand": by_hand(recipe, begin, rates)}


def all_trained(folder: Path, recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {recipe: trained(recipe, folder / recipe) for recipe in recipes}


@pytest.mark.parametrize("recipes", [("mxfp8",), pytest.param(("current", "nvfp4"), marks=pytest.mark.exhaustive)])
def test_the_trainer(recipes: Sequence[str], tmp_path: Path) -> None:
    """2 ranks."""
    for rank in run_ranks(2, all_trained, tmp_path, recipes):
        for recipe, found in rank.items():
            assert (found["weights"], found["changed"], found["held"]) == (QUANTIZED, QUANTIZED, QUANTIZED), recipe
            assert found["differ"] == [], recipe
            assert found["losses"] == found["by hand"], recipe
            assert len(found["losses"]) == STEPS + MORE and found["losses"][-1] < found["losses"][0]


def recomputed(folder: Path) -> list[list[float]]:
    """Losses with and without activation checkpointing."""
    found = []
    for config in ("tiny", "recomputed"):
        trainer = trainer_of(folder, *overrides("nvfp4"), "--training.steps", "3", config=config)
        found.append(titan_configs.train(trainer))
        trainer.close()
    return found


@pytest.mark.exhaustive
def test_recomputed_activations(tmp_path: Path) -> None:
    """2 ranks: not a bit differs."""
    for plain, again in run_ranks(2, recomputed, tmp_path):
        assert plain == again and len(plain) == 3


def adapted(folder: Path) -> tuple[int, int, int, list[float]]:
    """LoRA: quantized weights, how many of these changed, how many parameters train, and the losses."""
    trainer = trainer_of(folder, "--override.imports", OPTIMIZER, config="adapted")
    model = trainer.model_parts[0]
    before = perceptron.quantized_bits(model)
    losses = titan_configs.train(trainer)
    trained = sum(param.requires_grad for param in model.parameters())
    trainer.close()
    return len(before), perceptron.changed(before, model), trained, losses


@pytest.mark.exhaustive
def test_adapters_over_frozen_weights(tmp_path: Path) -> None:
    """2 ranks."""
    for quantized, changed, trained, losses in run_ranks(2, adapted, tmp_path):
        adapters = 2 * titan_configs.LAYERS
        assert (quantized, changed, trained) == (QUANTIZED, 0, 2 * adapters) and losses[-1] < losses[0]


# What torchtitan does to weights besides ----------------------------------------------------------------------------


def projected(folder: Path) -> tuple[int, list[str], list[str]]:
    """A fused projection, whose weight torchtitan cuts into three in the state dict: what differs when loaded."""
    arguments = ["--checkpoint.enable", *overrides("nvfp4"), "--training.steps", "2"]
    trainer = trainer_of(folder, *arguments, config="fused")
    titan_configs.train(trainer)
    (fused,) = trainer.optimizers
    saved = bits(trainer.model_parts[0], fused)
    cut = [key for key in trainer.checkpointer.states["model"].state_dict() if key.endswith(".wq.weight")]
    trainer.close()
    trainer = trainer_of(folder, *arguments, config="fused")
    trainer.checkpointer.load()
    (fused,) = trainer.optimizers
    after = bits(trainer.model_parts[0], fused)
    trainer.close()
    return perceptron.in_optimizer(trainer.model_parts[0], fused), cut, [k for k in saved if saved[k] != after.get(k)]


@pytest.mark.exhaustive
def test_fused_projections(tmp_path: Path) -> None:
    """2 ranks."""
    for held, cut, differ in run_ranks(2, projected, tmp_path):
        assert held == 5 * titan_configs.LAYERS and len(cut) == titan_configs.LAYERS and differ == []


# Wrong use -----------------------------------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(folder: Path) -> dict[str, str]:
    """What is said."""
    on = overrides("mxfp8")
    found = {
        "tensor parallelism": said(lambda: trainer_of(folder, *on, "--parallelism.tensor_parallel_degree", "2")),
        "backend": said(lambda: trainer_of(folder, *on, "--parallelism.spmd_backend", "spmd_types")),
        "recipe": said(lambda: trainer_of(folder, *overrides("mxfp9"))),
    }
    config = titan_configs.model(fuse_qkv=False)
    for name, options in {"pattern": {"filter": ["wz"]}, "converter's recipe": {"recipe": "fp7"}}.items():
        build = integration.TitanConverter.Config(**options).build
        found[name] = said(lambda build=build: build().convert(config))  # type: ignore[misc]
    converter = integration.TitanConverter.Config().build()
    converter.convert(config)
    found["twice"] = said(lambda: converter.convert(config))
    found["another layer"] = said(lambda: integration.linear(OtherConfig(in_features=64, out_features=32)))
    found["optimizer"] = said(lambda: integration.TitanOptimizers._resolve_optimizer_factory("DistMuon"))
    trainer = trainer_of(folder, *on, "--checkpoint.enable")
    state = trainer.checkpointer.states["model"].state_dict()
    save = partial(trainer.checkpointer.dcp_save, state, str(folder / "hf"), "disabled", to_hf=True)
    found["export"] = said(save)
    found["import"] = said(lambda: trainer.checkpointer.dcp_load(state, str(folder / "hf"), True, False))
    trainer.close()
    trainer = trainer_of(folder / "stock", *on[:2])
    found["stock optimizer"] = said(lambda: titan_configs.train(trainer))
    trainer.close()
    return found


def test_a_preset_of_the_optimizer() -> None:
    """Of the whole optimizer, in the config's options of its constructor; a group's own would do nothing."""
    with quantized_model_init(recipe="block"):
        layer = Linear(128, 128, bias=False)

    def built(whole: Any, **options: Any) -> Any:
        group = param_group(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, **options})
        config = integration.TitanOptimizers.Config(
            param_groups=[group], optimizer_factory_kwargs_by_name={"AdamW": whole}
        )
        return config.build(model_parts=[layer])

    [optimizer] = built({"preset": "lean8"}).optimizers
    told = explain(layer, optimizer).parameter
    assert (told["master"], round(told["moments"])) == (1, 2)
    assert "param_groups[0]: preset cannot be set for one group" in said(lambda: built({}, preset="lean8"))


@dataclasses.dataclass(kw_only=True, slots=True)
class OtherConfig(titan_configs.Linear.Config):
    """Of a linear layer that computes in another way."""


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    """2 ranks."""
    for found in run_ranks(2, refused, tmp_path):
        assert found.keys() == SAID.keys()
        for name, words in SAID.items():
            assert words in found[name] and "\n" not in found[name], (name, found[name])


SAID = {
    "tensor parallelism": "has no TP; use --parallelism.tensor_parallel_degree 1",
    "backend": "needs --parallelism.spmd_backend partial_dtensor",
    "recipe": "unknown recipe 'mxfp9'; did you mean 'mxfp8'? choose one of: auto,",
    "pattern": "TitanConverter(filter='wz') matches none of the 13 linear layers (",
    "converter's recipe": "unknown recipe 'fp7'; choose one of: auto,",
    "twice": "TitanConverter selects none of 1 plain linear layers",
    "another layer": "OtherConfig computes in its own way",
    "optimizer": "'DistMuon' has no masters; use AdamW or Adam",
    "export": "codes as values (layers.0.attention.qkv_linear.wq.weight)",
    "import": "codes as values (layers.0.attention.qkv_linear.wq.weight)",
    "stock optimizer": "or MasterWeights",
}


# The values, and the example -----------------------------------------------------------------------------------------


def exported(folder: Path) -> list[str]:
    """The names of a model's values, which load into the model that torchtitan builds without us."""
    found = []
    for recipe in RECIPES:
        trainer = trainer_of(folder, *overrides(recipe), "--training.steps", "1")
        titan_configs.train(trainer)
        (fused,) = trainer.optimizers
        values = high_precision_state_dict(trainer.model_parts[0], fused, full=True)
        plain = titan_configs.model(fuse_qkv=False).build()
        plain.load_state_dict(values)
        name = "layers.0.attention.wo.weight"
        master = fused.state[trainer.model_parts[0].get_parameter(name)]["master_param"].full_tensor()
        assert torch.equal(plain.get_parameter(name), master)
        found.append(recipe)
        trainer.close()
    return found


@pytest.mark.exhaustive
def test_values_are_exported(tmp_path: Path) -> None:
    """2 ranks."""
    assert run_ranks(2, exported, tmp_path) == [list(RECIPES)] * 2


def example(recipe: str) -> tuple[list[float], int, int, bool]:
    """Losses; how many weights are quantized, and how many of these the optimizer holds; is the page's config ours?"""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    losses, model, optimizers = torchtitan_parallelize.train(recipe, mesh, 4)
    (fused,) = optimizers
    names: dict[str, Any] = {}
    exec(snippets("docs/frameworks.md#lightning-and-torchtitan")[1], names)
    config = names["quantized_debugmodel"]()
    theirs, ours = (
        re.sub(r" at 0x\w+", "", str(each.to_dict()))
        for each in (config, torchtitan_parallelize.quantized_debugmodel())
    )
    assert theirs == ours
    layers = list(config.model_spec.model.traverse(integration.TitanLinear.Config))
    is_ours = isinstance(config.optimizer, integration.TitanOptimizers.Config)
    return (
        losses,
        len(perceptron.quantized(model)),
        perceptron.in_optimizer(model, fused),
        len(layers) == 30 and is_ours,
    )


@pytest.mark.exhaustive
def test_the_example() -> None:
    """2 ranks."""
    for losses, quantized, held, is_configured in run_ranks(2, example, "mxfp8"):
        assert losses[-1] < losses[0] and quantized == held == 5 * torchtitan_parallelize.LAYERS and is_configured
