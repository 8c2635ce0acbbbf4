"""Modules with a recipe of their own, which overrides the one of autocast and can be assigned after construction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from quantshard import private_torch, sharding
from quantshard.distributed import distribute
from quantshard.distributed.module_meshes import TensorParallelModule
from quantshard.modules.base.assignment import PiecewiseAssignment
from quantshard.modules.contexts import context
from quantshard.modules.contexts.context import InitPlan
from quantshard.recipe import QuantSpec, Recipe, TensorRole, resolve, stock_name
from quantshard.tensor import components, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import AMAX_HISTORY

HISTORIES = {TensorRole.INPUT: "input_amax_history", TensorRole.GRAD_OUTPUT: "grad_output_amax_history"}
"""Role -> name of the amax-history buffer of a layer."""

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def by_own_recipe(forward: _Forward) -> _Forward:
    """Decorate the forward of a `RecipeModule` to run under the module's own recipe, if there is one."""

    @functools.wraps(forward)
    def inside(self: RecipeModule, *args: Any, **kwargs: Any) -> Any:
        own_autocast = None if self.recipe is None and self.model_recipe is None else self.own_autocast()
        if own_autocast is None:
            return forward(self, *args, **kwargs)
        with own_autocast:
            return forward(self, *args, **kwargs)

    return cast(_Forward, inside)


class RecipeModule(TensorParallelModule, PiecewiseAssignment):
    """A module that may have a recipe of its own, from the per-layer recipes of `convert` or `quantize_`.

    `recipe`: recipe of its GEMMs inside an autocast that quantizes; None uses the recipe of that autocast.
    `model_recipe`: recipe of its GEMMs outside of every autocast, for example when only a part of the model is called
    and not the model itself, whose forward enters one; None computes in high precision with dequantized weights.
    """

    recipe: str | Recipe | None = None
    model_recipe: str | Recipe | None = None

    _plan: InitPlan
    _history_prefixes: list[str]

    def own_autocast(self) -> context.autocast | None:
        """The autocast that forward enters; None to use the enclosing one."""
        if self.model_recipe is not None and not context.in_autocast():
            return context.autocast(recipe=self.model_recipe)
        if self.recipe is None or not context.quantizes(context.current_setting()) or context.runs_by(self.recipe):
            return None
        return context.autocast_by(self.recipe)

    def recipe_in(self, around: Recipe | None) -> Recipe | None:
        """The recipe of this module's GEMMs inside an autocast of recipe `around`.

        If `around` is None (unknown): the module's own recipe, else the one its weights were quantized by, or None.
        """
        if around is not None and not around.table:
            return around
        built_by = self._plan.recipe if around is None and self._plan.quantize else around
        return built_by if self.recipe is None else resolve(self.recipe)

    @property
    def is_open(self) -> bool:
        """Whether this module has weights, and no `quantized_model_init` chose how to store them."""
        return bool(self._weights) and self._plan.is_open

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the weights that a recipe may quantize."""
        return tuple(self._weights)

    @torch.no_grad()
    def take_plan(self, plan: InitPlan, name: str, has_own_recipe: bool) -> None:
        """Convert in place to what `plan` would have built, keeping the current values.

        `name`: name of the module in the model. A collective call if tensor parallelism shards the module.
        """
        self._plan = plan
        if has_own_recipe:
            self.recipe = stock_name(plan.recipe) or plan.recipe
        for weight in self._weights:
            self._take_cell(weight, name)
        for prefix in self._history_prefixes:
            self._make_histories(prefix)

    def _take_cell(self, name: str, owner: str) -> None:
        cell, state = self._plan.recipe.weight, self._born_states[name]
        device = private_torch.local_tensor(getattr(self, name)).device
        if cell is not None and cell.scaling.history:
            state[AMAX_HISTORY] = torch.zeros(cell.scaling.history, dtype=torch.float32, device=device)
        if not self._plan.quantize:
            return
        old = self.get_parameter(name)
        self._born_states[name] = {key: value.clone() for key, value in state.items()}
        new = self._empty_weight(name, cell, state, old.dtype, device)
        new.requires_grad_(old.requires_grad)
        new.__dict__.update(components.set_attributes(old))
        values = private_torch.local_tensor(old).detach()
        if not values.is_meta and not self._awaits_values:  # otherwise values are loaded later
            requantize.requantize_([(new, values)], names=[f"{owner}.{name}"])
            if self._plan.preserve_high_precision:
                components.storage_of(new).keep_initial_values(values.cpu().clone())
        setattr(self, name, new)

    def _empty_weight(
        self, name: str, cell: QuantSpec | None, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> nn.Parameter:
        """A parameter without values, quantized by `cell` or in high precision if `cell` is None."""
        shape: tuple[int, int] = self._weights[name].shape
        if self.tp_mesh is not None:
            return distribute.empty_parameter(
                shape, self.tp_mesh, self._cuts[name], dtype=dtype, device=device, cell=cell, state=state
            )
        if cell is None:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        return nn.Parameter(QuantizedTensor(storages.empty(cell, sharding.whole(shape), device, state), dtype))

    def _make_histories(self, prefix: str) -> None:
        """Register the amax histories of a layer's activations that the planned recipe needs (delayed scaling)."""
        for role, length in self._plan.recipe.histories.items():
            device = private_torch.local_tensor(
                next(self.parameters())
            ).device  # of the original tensor, if the weight is parametrized
            zeros = torch.zeros(length, dtype=torch.float32, device=device)
            self.register_buffer(prefix + HISTORIES[role], zeros)
