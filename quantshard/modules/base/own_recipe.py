"""Modules that may have a recipe of their own, inside an autocast of another: how they run by it, and get it late."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import private_torch, sharding
from quantshard.distributed import distribute
from quantshard.distributed.module_meshes import TensorParallelModule
from quantshard.errors import ConfigurationError
from quantshard.modules.base.assignment import PiecewiseAssignment
from quantshard.modules.contexts import context
from quantshard.modules.contexts.context import InitPlan
from quantshard.modules.contexts.unnamed_layers import UnnamedLayers
from quantshard.recipe import QuantSpec, Recipe, TensorRole, resolve, stock_name
from quantshard.tensor import components, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import AMAX_HISTORY

HISTORIES = {TensorRole.INPUT: "input_amax_history", TensorRole.GRAD_OUTPUT: "grad_output_amax_history"}
"""The names of the amax histories of a layer's activations."""

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def by_own_recipe(forward: _Forward) -> _Forward:
    """Decorate the forward of a `RecipeModule`: it enters the module's own recipe, where it has one."""

    @functools.wraps(forward)
    def inside(self: RecipeModule, *args: Any, **kwargs: Any) -> Any:
        own = None if self.recipe is None and self.model_recipe is None else self.own_autocast()
        if own is None:
            return forward(self, *args, **kwargs)
        with own:
            return forward(self, *args, **kwargs)

    return cast(_Forward, inside)


class RecipeModule(TensorParallelModule, PiecewiseAssignment):
    """A module that may have a recipe of its own.

    `recipe`: by which its GEMMs run where that around quantizes any; None: that around. `model_recipe`: by which they
    run where there is no autocast around, as where a part of the model is called by itself, and not the model, whose
    forward enters one; None: in high precision, by dequantized weights. Both as of the recipes of several layers, of
    `convert` or `quantized_model_init`.
    """

    recipe: str | Recipe | None = None
    model_recipe: str | Recipe | None = None

    _plan: InitPlan
    _history_prefixes: list[str]

    def own_autocast(self) -> context.autocast | None:
        """What its forward enters; None where it runs by the autocast around."""
        if self.model_recipe is not None and not context.in_autocast():
            return context.autocast(recipe=self.model_recipe)
        if self.recipe is None or not context.quantizes(context.current_setting()) or context.runs_by(self.recipe):
            return None
        return context.autocast_by(self.recipe)

    def recipe_in(self, around: Recipe | None) -> Recipe | None:
        """By which its GEMMs run in an autocast of the recipe `around`; where that is None, as it is not known, its own
        recipe, or the one that its weights were quantized by, or None."""
        if around is not None and not around.table:
            return around
        built_by = self._plan.recipe if around is None and self._plan.quantize else around
        return built_by if self.recipe is None else resolve(self.recipe)

    @property
    def unnamed_layers(self) -> UnnamedLayers | None:
        """Those among which its recipe is found, by its name, when `quantized_model_init` is left."""
        return self._plan.unnamed if self._weights else None

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that a recipe may quantize, and that are parameters."""
        for name in self._weights:
            param = private_torch.registered_parameter(self, name)
            if param is not None:
                yield name, param

    def check_plan(self, plan: InitPlan, name: str) -> None:
        """Raise unless it can `take_plan`.

        Raises:
            ConfigurationError: a weight is sharded, quantized, or no parameter any more, or has hooks.
        """
        for weight in self._weights if plan.quantize else ():
            self._check_plain(name, weight)

    @torch.no_grad()
    def take_plan(self, plan: InitPlan, name: str) -> None:
        """Be as if it had been built by this plan, with the values that it has now; `name`: its own in the model.

        A collective call if tensor parallelism cuts it.
        """
        self._plan, self.recipe = plan, stock_name(plan.recipe) or plan.recipe
        for weight in self._weights:
            self._take_cell(weight, name)
        for prefix in self._history_prefixes:
            self._make_histories(prefix)

    def _check_plain(self, name: str, weight: str) -> None:
        param, why = private_torch.registered_parameter(self, weight), ""
        if param is None:
            why = "is computed from other parameters (parametrized)"
        elif components.quantized_local(param) is not None:
            why = "is quantized already"
        elif isinstance(param, DTensor) and (self.tp_mesh is None or param.device_mesh != self.tp_mesh):
            why = "is sharded already"
        elif private_torch.has_gradient_hooks(param):
            why = "has hooks already, which the quantized weight in its place would not have"
        if why:
            raise ConfigurationError(
                f"quantized_model_init(recipe=...): {name}.{weight} {why}, and its recipe is found by its name when "
                "the context is left; do that afterwards"
            )

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
        if not values.is_meta and not self._awaits_values:  # else they come later
            requantize.requantize_([(new, values)], names=[f"{owner}.{name}"])
            if self._plan.preserve_high_precision:
                components.storage_of(new).keep_initial_values(values.cpu().clone())
        setattr(self, name, new)

    def _empty_weight(
        self, name: str, cell: QuantSpec | None, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> nn.Parameter:
        """A parameter without values: of a format, or in high precision."""
        shape: tuple[int, int] = self._weights[name].shape
        if self.tp_mesh is not None:
            return distribute.empty_parameter(
                shape, self.tp_mesh, self._cuts[name], dtype=dtype, device=device, cell=cell, state=state
            )
        if cell is None:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        return nn.Parameter(QuantizedTensor(storages.empty(cell, sharding.whole(shape), device, state), dtype))

    def _make_histories(self, prefix: str) -> None:
        """Register the amax histories that delayed scaling of a layer's activations needs, if it is planned."""
        for role, length in self._plan.recipe.histories.items():
            device = private_torch.local_tensor(next(self.parameters())).device  # of a part, if a weight is computed
            zeros = torch.zeros(length, dtype=torch.float32, device=device)
            self.register_buffer(prefix + HISTORIES[role], zeros)
