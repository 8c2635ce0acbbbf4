"""Checks a model, and selects the linear layers to convert and their recipes, before anything is changed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from quantshard import private_torch
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion import experts
from quantshard.modules.contexts.layer_recipes import Recipes, check_patterns, check_recipes, matches, recipes_of
from quantshard.recipe import Recipe
from quantshard.tensor import components
from quantshard.tensor.requantize import non_finite

HEADS = frozenset("lm_head embed_out output head classifier score qa_outputs unembed".split())
"""Last name components of output heads in transformers, torchtitan and timm."""

ROUTERS = frozenset("gate router wg shared_expert_gate".split())

ADAPTERS = "lora_"
"""Prefix of the name components of PEFT's adapters."""

Filter = Callable[[nn.Module, str], bool] | Sequence[str] | str
"""The layers to convert. A function also gets the experts of mixtures, which have no `in_features`, and can have an
attribute `leaves_out`, the reason reported for layers it rejects."""


@dataclass(frozen=True)
class LayerChoice:
    """One linear layer, or the experts of a layer, and its recipe, or the `reason` for leaving it unconverted."""

    name: str
    module: nn.Module
    recipe: Recipe | None
    reason: str = ""

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights to quantize: `weight`, or the stacks of experts."""
        names = ["weight"] if isinstance(self.module, nn.Linear) else experts.stack_names(self.module)
        return {name: getattr(self.module, name) for name in names}


def choices(model: nn.Module, recipes: Recipes, filter: Filter | None) -> list[LayerChoice]:
    """Choose for all linear layers and stacked experts of a model, in the model's order."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or experts.stack_names(module)
    }
    if not layers:
        check_recipes("convert", recipes)
        return []
    layer_recipes = recipes_of("convert", recipes, list(layers.items()))
    if isinstance(filter, str):
        filter = [filter]
    if filter is not None and not callable(filter):
        check_patterns("convert(filter=", filter, list(layers))
    weight_users = _users_of_weights(model)
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    recipe_names = set(recipes) if isinstance(recipes, Mapping) else set()
    layer_choices = []
    for (name, module), recipe in zip(layers.items(), layer_recipes, strict=True):
        choice = LayerChoice(name, module, recipe)
        reason = (
            _unfit(choice, weight_users)
            or ("" if filter is None and name in recipe_names else _unwanted(name, module, filter, module is head))
            or ("no pattern of the recipes matches it" if recipe is None else "")
            or ("recipe bf16" if recipe is None or not recipe.table else "")
        )
        layer_choices.append(replace(choice, recipe=None, reason=reason) if reason else choice)
    return layer_choices


def stacked_experts(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Find parameters [experts, rows, columns], as in transformers, except in PyTorch's own modules."""
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, param)
        for prefix, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        for leaf, param in module.named_parameters(recurse=False)
        if param.ndim == 3 and min(param.shape) > 1 and param.is_floating_point() and not experts.stack_names(module)
    ]


def transposed_linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find transformers' Conv1D layers (GPT-2), whose weights are [in_features, out_features]."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]


def _users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Map each parameter's identity to the modules that hold it or another parameter in the same memory."""
    users: dict[int, list[str]] = {}
    params: dict[int, int] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            params[id(parameter)] = memory = _memory(parameter)
            users.setdefault(memory, []).append(name)
    return {parameter: users[memory] for parameter, memory in params.items()}


def _memory(parameter: nn.Parameter) -> int:
    """Return a key shared by parameters that are tied by data, as in `head.weight.data = embedding.weight.data`."""
    if parameter.is_meta or parameter.numel() == 0:
        return id(parameter)
    # tensor subclasses can consist of several tensors
    return parameter.data_ptr() if type(parameter.data) is Tensor else id(parameter)


def _unfit(choice: LayerChoice, weight_users: Mapping[int, Sequence[str]]) -> str:
    """Return why a layer or experts can never be converted, or "". `weight_users`: see `_users_of_weights`."""
    module, weights = choice.module, choice.weights.values()
    if parametrize.is_parametrized(module) or not all(isinstance(weight, nn.Parameter) for weight in weights):
        return "its weight is computed from other parameters"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"a {type(module).__module__.split('.')[0]}.{type(module).__name__}, which computes in its own way"
    if users := [user for weight in weights for user in weight_users.get(id(weight), ()) if user != choice.name]:
        return f"its weight is also that of {', '.join(users)}"
    for weight in weights:
        if not weight.is_floating_point() or weight.itemsize == 1:
            return f"its weight is {weight.dtype}; load it in bfloat16"
        if type(weight.data).__module__.partition(".")[0] != "torch":
            return f"its weight is a {type(weight.data).__name__}; load it in bfloat16"
    if "forward" in vars(module):
        return "its forward was replaced, for example by accelerate"
    if isinstance(module, nn.Linear) and (extras := _own(module)):
        return f"it also has {', '.join(extras)}"
    if any(private_torch.has_gradient_hooks(weight) for weight in weights):
        return "its weight has hooks; register them after convert"
    return "" if isinstance(module, nn.Linear) or choice.recipe is None else experts.unfit(module, choice.recipe)


def _own(module: nn.Linear) -> list[str]:
    iterators = (module.named_parameters, module.named_buffers)
    names = [name for iterator in iterators for name, _ in iterator(recurse=False) if name not in ("weight", "bias")]
    return names + [name for name, _ in module.named_children()]


def _unwanted(name: str, module: nn.Module, filter: Filter | None, is_head: bool) -> str:
    if filter is not None:
        selected = filter(module, name) if callable(filter) else any(matches(pattern, name) for pattern in filter)
        return "" if selected else getattr(filter, "leaves_out", "not chosen by the filter")
    last = name.rsplit(".", 1)[-1]
    if is_head or last in HEADS:
        return "the head; a filter or a recipe with its full name converts it"
    if any(part.startswith(ADAPTERS) for part in name.split(".")):
        return "an adapter; a filter that matches it converts it"
    if last == "dt_proj":  # in Mamba, Falcon Mamba and Jamba
        return "the model reads its weight directly"
    if last in ROUTERS:
        return "a router; a filter that matches it converts it"
    return ""


def check_model(model: nn.Module, what: str) -> None:
    """Check that a model can be converted: it is not itself a layer, not sharded, and not quantized."""
    if isinstance(model, nn.Linear):
        raise ConfigurationError(f"{what} replaces layers inside a model; pass torch.nn.Sequential(layer)")
    check_unsharded(model, what)
    for name, parameter in model.named_parameters():
        if components.quantized_local(parameter) is not None:
            raise ConfigurationError(f"{what}: {name} is already quantized; call quantshard.revert first")
    # set by transformers on models that were loaded quantized
    method = getattr(model, "quantization_method", None)
    if method is not None:
        method = getattr(method, "value", method)
        raise ConfigurationError(f"{what}: this model is already quantized ({method}); load it in bfloat16")


def check_unsharded(model: nn.Module, what: str) -> None:
    name = next((name for name, param in model.named_parameters() if isinstance(param, DTensor)), None)
    if name is not None:
        raise ConfigurationError(f"{what}: {name} is sharded; call {what} before fully_shard")


@torch.no_grad()
def check_values(chosen: Sequence[LayerChoice]) -> None:
    """Check the values of all layers to convert, except on meta: codes would hide infinite and NaN values."""
    for choice in chosen:
        for name, weight in choice.weights.items() if choice.recipe else ():
            if problem := "" if weight.is_meta else non_finite(weight, (0,) * weight.ndim):
                hint = "; load the model in bfloat16" if weight.dtype is torch.float16 else ""
                raise ConfigurationError(f"convert: {choice.name}.{name}: {problem}{hint}")
