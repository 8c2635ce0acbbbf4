"""Which linear layers of a model are converted, by which recipe, and why the others are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils import parametrize

from quantshard.errors import ConfigurationError
from quantshard.recipe import Recipe, resolve

HEADS = frozenset("lm_head embed_out output head classifier score qa_outputs unembed".split())
"""Last parts of the names under which models keep their head, in transformers, torchtitan and timm."""

ROUTERS = frozenset("gate router wg shared_expert_gate".split())
"""Last parts of the names of what chooses experts, in the families of transformers that have any."""

ADAPTERS = "lora_"
"""How parts of the names of PEFT's adapters begin."""

HIGH_PRECISION = "bf16"
"""The recipe that leaves a layer as it is."""

Filter = Callable[[nn.Module, str], bool] | Sequence[str] | str
Recipes = str | Recipe | Mapping[str, str | Recipe]


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
    by_pattern = _resolved(recipes)
    if not layers:
        return []
    _check_patterns("recipe", by_pattern, layers)
    if isinstance(filter, str):
        filter = [filter]
    if filter is not None and not callable(filter):
        _check_patterns("filter", filter, layers)
    elsewhere, head = _users_of_weights(model), _output_layer(model)
    found = []
    for name, module in layers.items():
        recipe = next((recipe for pattern, recipe in by_pattern.items() if matches(pattern, name)), None)
        reason = (
            _unfit(module, [user for user in elsewhere.get(id(module.weight), []) if user != name])
            or _unwanted(name, module, filter, module is head)
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


def matches(pattern: str, name: str) -> bool:
    """True if a pattern (`*`, `?`, `[...]`) covers the whole name, or the end of it behind a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_reached(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse a pattern that holds for no name since others, which stand before it, match all that it matches; `*` is
    for what is left, which may be nothing.

    Raises:
        ConfigurationError: naming the pattern.
    """
    left = list(names)
    for pattern in patterns:
        rest = [name for name in left if not matches(pattern, name)]
        if len(rest) == len(left) and pattern != "*":
            raise ConfigurationError(
                f"{argument}: {pattern!r} would do nothing, since the first pattern that matches a layer holds, and "
                "those before it match all its layers; let it stand before them, or leave it out"
            )
        left = rest


def _resolved(recipes: Recipes) -> dict[str, Recipe]:
    by_pattern = recipes if isinstance(recipes, Mapping) else {"*": recipes}
    if not by_pattern:
        raise ConfigurationError(
            "convert(recipe={}): a mapping needs an entry, as {'*.down_proj': 'block', '*': 'mxfp8'}"
        )
    return {pattern: resolve(recipe) for pattern, recipe in by_pattern.items()}


def _check_patterns(
    argument: str, patterns: Sequence[str] | Mapping[str, Recipe], layers: Mapping[str, nn.Linear]
) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in layers):
            ends = sorted({name.rsplit(".", 1)[-1] for name in layers})
            near = get_close_matches(pattern.rsplit(".", 1)[-1], ends, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"their names end in {', '.join(ends[:12])}"
            raise ConfigurationError(
                f"convert({argument}={pattern!r}) matches none of the {len(layers)} linear layers of this model; {hint}"
            )
    if isinstance(patterns, Mapping):
        check_reached(f"convert({argument})", patterns, list(layers))


def _users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """By the identity of each parameter, the modules that hold it."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(name)
    return found


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
    return ""


def _unwanted(name: str, module: nn.Linear, filter: Filter | None, is_head: bool) -> str:
    if filter is not None:
        chosen = filter(module, name) if callable(filter) else any(matches(pattern, name) for pattern in filter)
        return "" if chosen else "not chosen by the filter"
    last = name.rsplit(".", 1)[-1]
    if is_head or last in HEADS:
        return "the head; a filter that matches it converts it too"
    if any(part.startswith(ADAPTERS) for part in name.split(".")):
        return "an adapter; a filter that matches it converts it too"
    if last in ROUTERS:
        return "a router; a filter that matches it converts it too"
    return ""


def _no_recipe(recipe: Recipe | None) -> str:
    return "no pattern of the recipes matches it" if recipe is None else f"recipe {HIGH_PRECISION}"
