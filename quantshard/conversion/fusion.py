"""Which layers of a model `modules="fused"` makes one step, and why the others are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from quantshard.conversion import gated_mlp
from quantshard.conversion.report import FusedLayers, UnfusedLayers
from quantshard.conversion.selection import LayerChoice


@dataclass(frozen=True)
class GatedMLPChoice:
    """A gated MLP, and why it is not fused; "" if it is."""

    name: str
    module: nn.Module
    reason: str


def gated_mlps(model: nn.Module, chosen: Sequence[LayerChoice]) -> list[GatedMLPChoice]:
    """All gated MLPs of a model, before its layers are exchanged."""
    by_module = {id(choice.module): choice for choice in chosen}
    return [
        GatedMLPChoice(name, module, gated_mlp.unknown(module) or _apart(module, by_module))
        for name, module in model.named_modules()
        if gated_mlp.is_candidate(module)
    ]


def _apart(module: nn.Module, by_module: dict[int, LayerChoice]) -> str:
    """Why the layers of an MLP cannot be one step: they are not converted alike."""
    found = [by_module.get(id(getattr(module, name))) for name in gated_mlp.LAYERS]
    for name, choice in zip(gated_mlp.LAYERS, found, strict=True):
        if choice is None or choice.recipe is None:
            return f"its {name} is not converted ({choice.reason if choice else 'no torch.nn.Linear'})"
    recipes = [choice.recipe for choice in found if choice]
    dtypes = {choice.module.weight.dtype for choice in found if choice}
    if any(recipe != recipes[0] for recipe in recipes):
        return f"its layers have different recipes ({', '.join(recipe.name for recipe in recipes if recipe)})"
    return "its layers have different dtypes" if len(dtypes) > 1 else ""


def reported(mlps: Sequence[GatedMLPChoice]) -> tuple[tuple[FusedLayers, ...], tuple[UnfusedLayers, ...]]:
    """What the report says of them: those that were fused, and the others."""
    done = tuple(
        FusedLayers(each.name, f"gated MLP, {gated_mlp.activation_of(each.module.act_fn)}")
        for each in mlps
        if not each.reason
    )
    return done, tuple(UnfusedLayers(each.name, each.reason) for each in mlps if each.reason)
