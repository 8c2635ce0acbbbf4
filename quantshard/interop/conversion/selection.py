"""Which linear layers of a model are converted, by which recipe, and why the others are left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from quantshard import private_torch
from quantshard.argument_kinds import NAMES, ArgumentKind, check_arguments
from quantshard.modules.contexts.layer_recipes import (
    HIGH_PRECISION,
    Recipes,
    check_patterns,
    check_recipes,
    matches,
    recipes_of,
)
from quantshard.recipe import Recipe

HEADS = frozenset("lm_head embed_out output head classifier score qa_outputs unembed".split())
"""Last parts of the names under which models keep their head, in transformers, torchtitan and timm."""

ROUTERS = frozenset("gate router wg shared_expert_gate".split())
"""Last parts of the names of what chooses experts, in the families of transformers that have any."""

READ_DIRECTLY = "dt_proj"
"""Last part of the names of layers whose weight Mamba, Falcon Mamba and Jamba multiply with in their own code."""

ADAPTERS = "lora_"
"""How parts of the names of PEFT's adapters begin."""

Filter = Callable[[nn.Module, str], bool] | Sequence[str] | str
"""Which layers are converted. A function's attribute `leaves_out` is told as the reason of those it does not take."""

_FILTER = ArgumentKind(f"{NAMES.wanted}, or a function of module and name", (*NAMES.types, Callable))


@dataclass(frozen=True)
class LayerChoice:
    """One linear layer: its recipe, or, where it has none, why it is left."""

    name: str
    module: nn.Linear
    recipe: Recipe | None
    reason: str = ""


def choices(model: nn.Module, recipes: Recipes, filter: Filter | None) -> list[LayerChoice]:
    """All linear layers of a model, in its order.

    Raises:
        ConfigurationError: a pattern matches no linear layer, or a recipe is not known.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not layers:
        check_recipes("convert", recipes)
        return []
    given = recipes_of("convert", recipes, list(layers.items()))
    if isinstance(filter, str):
        filter = [filter]
    check_arguments("convert", _FILTER.or_none, filter=filter)
    if filter is not None and not callable(filter):
        check_patterns("convert(filter=", filter, list(layers))
    elsewhere, head = _users_of_weights(model), _output_layer(model)
    named = set(recipes) if isinstance(recipes, Mapping) else set()
    found = []
    for (name, module), recipe in zip(layers.items(), given, strict=True):
        reason = (
            _unfit(module, [user for user in elsewhere.get(id(module.weight), []) if user != name])
            or ("" if filter is None and name in named else _unwanted(name, module, filter, module is head))
            or ("" if recipe is not None and recipe.table else _no_recipe(recipe))
        )
        found.append(LayerChoice(name, module, None if reason else recipe, reason))
    return found


def stacked_experts(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters [experts, rows, columns] of modules that are not PyTorch's own, whose convolutions have such too.

    So keep the families of transformers the weights of their experts.
    """
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, param)
        for prefix, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        for leaf, param in module.named_parameters(recurse=False)
        if param.ndim == 3 and min(param.shape) > 1 and param.is_floating_point()
    ]


def transposed_linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linear layers of transformers whose weights are [in_features, out_features], which GPT-2 has; not converted."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]


def _users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """By the identity of each parameter, the modules that hold it, or another one that lies in the same memory."""
    users: dict[int, list[str]] = {}
    params: dict[int, int] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            params[id(parameter)] = memory = _memory(parameter)
            users.setdefault(memory, []).append(name)
    return {parameter: users[memory] for parameter, memory in params.items()}


def _memory(parameter: nn.Parameter) -> int:
    """What parameters have in common that were tied by their data: `head.weight.data = embedding.weight.data`."""
    if parameter.is_meta or parameter.numel() == 0:
        return id(parameter)
    return parameter.data_ptr() if type(parameter.data) is Tensor else id(parameter)  # else it is made of others


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The head that a model of transformers names itself."""
    named = getattr(model, "get_output_embeddings", None)
    return named() if callable(named) else None


def _unfit(module: nn.Linear, users: Sequence[str]) -> str:
    """Why a layer cannot be converted, whatever is asked for; `users`: other modules that hold its weight."""
    if parametrize.is_parametrized(module) or not isinstance(module.weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if type(module) is not nn.Linear:
        return f"a {type(module).__module__.split('.')[0]}.{type(module).__name__}, which computes in its own way"
    if users:
        return f"its weight is also that of {', '.join(users)}"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}"
    if "forward" in vars(module):
        return "its forward was replaced by another, as by hooks of accelerate"
    if own := _own(module):
        return f"it has {', '.join(own)} besides weight and bias"
    if private_torch.has_gradient_hooks(module.weight):
        return "its weight has hooks, which would not go over; register them after convert"
    return ""


def _own(module: nn.Linear) -> list[str]:
    """What a linear layer has that PyTorch's has not."""
    held = (module.named_parameters, module.named_buffers)
    own = [name for named in held for name, _ in named(recurse=False) if name not in ("weight", "bias")]
    return own + [name for name, _ in module.named_children()]


def _unwanted(name: str, module: nn.Linear, filter: Filter | None, is_head: bool) -> str:
    if filter is not None:
        chosen = filter(module, name) if callable(filter) else any(matches(pattern, name) for pattern in filter)
        return "" if chosen else getattr(filter, "leaves_out", "not chosen by the filter")
    last = name.rsplit(".", 1)[-1]
    if is_head or last in HEADS:
        return "the head; a filter that matches it, or a recipe by its very name, converts it too"
    if any(part.startswith(ADAPTERS) for part in name.split(".")):
        return "an adapter; a filter that matches it converts it too"
    if last == READ_DIRECTLY:
        return "the model reads its weight directly"
    if last in ROUTERS:
        return "a router; a filter that matches it converts it too"
    return ""


def _no_recipe(recipe: Recipe | None) -> str:
    return "no pattern of the recipes matches it" if recipe is None else f"recipe {HIGH_PRECISION}"
