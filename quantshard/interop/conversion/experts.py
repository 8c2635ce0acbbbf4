"""Experts of transformers' mixtures of experts: their stacked weights are quantized under their own names.

transformers runs experts through an interface (`use_experts_implementation`): the class of a model chooses activation,
layout and biases, its router chooses experts, and a function that the configuration names multiplies. Converted experts
do not ask the configuration, which could turn quantization off.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quantshard.distributed import experts
from quantshard.interop.conversion.forward import subclass_with
from quantshard.interop.conversion.linear import PackedLoading, seeded_by, set_recipes
from quantshard.modules import quantized_model_init
from quantshard.modules.base.module import by_own_recipe
from quantshard.modules.gemms.row_exchange import NO_EXCHANGE, RowExchange
from quantshard.modules.stacked_experts import StackedExperts
from quantshard.recipe import Recipe, TensorRole

_PLAIN = "_quantshard_plain_experts"

_GATE = "_apply_gate"
"""Method that transformers gives experts classes."""


def stack_names(module: nn.Module) -> list[str]:
    """Names of the stacked weights of an experts module that transformers runs through its interface; otherwise []."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "config")):
        return []
    names = ["gate_up_proj" if getattr(module, "has_gate") else "up_proj", "down_proj"]  # noqa: B009 (mypy)
    params = dict(module.named_parameters(recurse=False))
    return names if all(name in params and params[name].ndim == 3 for name in names) else []


def unfit(module: Any, recipe: Recipe) -> str:
    """Return why a recipe cannot store the weights of an experts module, or ""."""
    spec = recipe.weight
    if spec is None:
        return ""
    if recipe.is_delayed:
        return "experts have no amax histories; choose a recipe without delayed scaling for them"
    if module.is_transposed and not spec.format.transposable:
        return f"its weights are stored transposed, which {spec.format.name} cannot be; choose square blocks"
    for name in stack_names(module):
        rows = getattr(module, name).shape[1]
        if not spec.format.fits_stack(rows):
            return f"a block of {spec.format.name} would cross from one expert into the next, of {rows} rows each"
    return ""


class ConvertedExperts(PackedLoading, StackedExperts):
    """Base of the subclass that a converted experts module gets."""

    @by_own_recipe
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send tokens [tokens, hidden] to their experts, and sum the outputs by the router's weights.

        Args:
            top_k_index: experts of each token, int64 [tokens, choices].
            top_k_weights: their weights, of the same shape.
        """
        module: Any = self
        if parametrize.is_parametrized(module):  # by PEFT: adapters in high precision are added to the values
            return getattr(module, _PLAIN).forward(module, hidden_states, top_k_index, top_k_weights)
        inp = self._input(hidden_states)
        route = experts.route_tokens(inp, top_k_index, self.num_stacked, self.tp_mesh)
        first, second = self._weights
        bias = {name: f"{name}_bias" if module.has_bias else None for name in (first, second)}
        as_codes, has_norm = self.use_fp8_dispatch, getattr(module, "has_post_expert_norm", False)
        is_alone = len(route.sent) == 1 and not as_codes
        before = NO_EXCHANGE if is_alone else RowExchange(route, TensorRole.INPUT, as_codes)
        after = NO_EXCHANGE if is_alone or has_norm else RowExchange(route, TensorRole.GRAD_OUTPUT, as_codes)
        x = self.multiply(first, route.rows_of(inp) if is_alone else inp, route.m_splits, bias[first], before)
        x = getattr(module, _GATE)(x) if module.has_gate else module.act_fn(x)
        x = self.multiply(second, x, route.m_splits, bias[second], after)
        if has_norm:
            x = module.post_expert_norm(x)
        return route.combine(x, top_k_weights, after is not NO_EXCHANGE).to(hidden_states.dtype)


def convert_experts(
    module: Any, name: str, recipe: Recipe, around: Recipe | None, by_itself: bool, keep_values: bool
) -> None:
    """Quantize the stacked weights of an experts module in place. For the arguments see `linear.empty_linear`."""
    before = frozenset(vars(module))
    old = {weight: getattr(module, weight) for weight in stack_names(module)}
    module.__class__ = subclass_with(ConvertedExperts, _PLAIN, type(module))  # type: ignore[arg-type]  # mypy: unhashable
    with seeded_by(name), quantized_model_init(True, recipe, keep_values):
        module.init_empty(name, next(iter(old.values())))
        for weight, values in old.items():
            module.quantize_stack(weight, values, keep_values)
    set_recipes(module, recipe, around, by_itself)
    module.added_attributes = (*(vars(module).keys() - before), "added_attributes")


def revert_experts(module: Any) -> None:
    """Undo `convert_experts`; the parameters get the dequantized values."""
    stacks = {name: getattr(module, name) for name in module._weights}
    for name in module.added_attributes:
        vars(module).pop(name, None)
    module.__class__ = getattr(type(module), _PLAIN)
    for name, stack in stacks.items():
        empty = torch.empty(stack.shape, dtype=stack.dtype, device=stack.device)
        values = empty if stack.is_meta else stack.detach().dequantize()
        setattr(module, name, nn.Parameter(values, requires_grad=stack.requires_grad))
