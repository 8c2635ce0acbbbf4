"""transformers models that a run trains: built on the meta device, converted, and filled shard by shard.

The configuration is a config.json, which is untrusted: it is checked before transformers reads it, and no code next to
it is run. Values come from safetensors or are drawn as transformers draws them.

Initial values are drawn on the CPU one module at a time, with a generator seeded by the run's seed and the module's
name. The model is therefore the same on any number of ranks, and no rank holds all of it.
"""

import hashlib
import importlib
import inspect
import itertools
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import checkpoints, foreign, private_torch
from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader
from quantshard.interop.conversion import attention
from quantshard.interop.conversion.convert import ConversionReport, convert
from quantshard.interop.conversion.head_loss import ChunkedLoss
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.layouts.files import CONFIGURATION, read_config
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION
from quantshard.tensor import components
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer.data.packing import Documents
from quantshard.tools.trainer.data.sources import library
from quantshard.tools.trainer.settings.values import LayerRecipes

_MOST_LAYERS = 1 << 10
_COUNT = re.compile(r"\w*(layers?|experts?|blocks?|stages|depths?)")
"""Names of fields that count modules, from which configurations themselves build lists."""

_UNSAFE = re.compile(r"_?(attn|experts)_implementation|use_kernels|auto_map|attribute_map|trust_remote_code")
"""Names of fields that make transformers fetch or import code, or that rename other fields."""

_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid", "recurrent")
"""Types of layers whose state passes from token to token without attention."""


def read_configuration(path: str) -> dict[str, Any]:
    """Read a config.json, or the one in a folder."""
    location = Path(outputs.existing(path, "a folder with config.json, or a config.json"))
    if location.is_dir() and not (location / CONFIGURATION).is_file():
        raise ConfigurationError(f"{path} has no {CONFIGURATION}; name a folder of a Hugging Face model")
    return read_config(path)


def longest_sequence(content: Mapping[str, Any]) -> int | None:
    """Return the maximum number of positions in a configuration; None if it is not stated."""
    fields = FieldReader(content, CONFIGURATION)
    return fields.integer("max_position_embeddings", 1, 1 << 40) or fields.integer("n_positions", 1, 1 << 40)


def described(content: Mapping[str, Any], where: str, causal: bool = False) -> nn.Module:
    """Build a configuration's model in its dtype on meta. `causal`: a next-token model, whatever class it names."""
    transformers = library("transformers", f"the model of {where}")
    fields = FieldReader(content, where)
    kind, dtype = fields.text("model_type"), fields.text("dtype") or fields.text("torch_dtype") or "bfloat16"
    config_fields = _checked(content, where)
    for name in ("model_type", "dtype", "torch_dtype"):
        config_fields.pop(name, None)
    names = [name for name in content.get("architectures") or () if isinstance(name, str)]
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise fields.wrong("dtype", "a dtype of torch, such as bfloat16")
    # a field of a wrong type can raise any exception in transformers
    with foreign.errors_in_one_line(f"{where}: transformers cannot build it"), foreign.hub_offline():
        config = transformers.AutoConfig.for_model(kind, **config_fields)
        if causal:
            _check_decoder(config, where)
        model_class: Any = getattr(transformers, names[0], None) if names else None
        is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
        if not is_model or (causal and not model_class.__name__.endswith(("ForCausalLM", "LMHeadModel"))):
            model_class = partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)
        return _on_meta(model_class, config, getattr(torch, dtype))


def _on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a model with parameters of a dtype; rotary tables name float32 explicitly."""
    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return model_class(config)  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(old_dtype)


def _check_decoder(config: Any, where: str) -> None:
    """Refuse encoders such as BERT, in which each position sees the token to predict."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        raise ConfigurationError(f"{where}: {config.model_type} is an encoder; set is_decoder in its config.json")


def _checked(value: Any, where: str, name: str = "") -> Any:
    """Remove `_UNSAFE` fields, and refuse more layers than any model has, at any depth of a configuration."""
    if isinstance(value, list):
        return [_checked(entry, where, name) for entry in value]
    if isinstance(value, dict):
        return {key: _checked(entry, where, key) for key, entry in value.items() if not _UNSAFE.fullmatch(key)}
    if isinstance(value, int | float) and value > _MOST_LAYERS and _COUNT.fullmatch(name):
        raise ConfigurationError(f"{where}: {name} is {value}, and at most {_MOST_LAYERS} are built")
    return value


def converted(
    content: Mapping[str, Any], where: str, recipes: LayerRecipes, causal: bool = False
) -> tuple[nn.Module, ConversionReport | None]:
    """Build a configuration's model, quantize it, and return the report, if any. `causal`: see `described`."""
    # it describes the weights of the file
    plain = {name: value for name, value in content.items() if name != "quantization_config"}
    model = described(plain, where, causal)
    if list(recipes.patterns.values()) == [HIGH_PRECISION]:
        return model, None
    try:
        return model, convert(model, recipes.recipes, preserve_high_precision_init_val=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `fully_shard` wraps one by one: names that end in their first number."""
    return [module for name, module in model.named_modules() if re.fullmatch(r"(?:[^.]*[^.\d][^.]*\.)*\d+", name)]


def check_documents(model: Any, where: str) -> None:
    """Refuse models with layers that carry a state from one document of a sequence to the next."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if mixing := sorted(kinds.intersection(_RECURRENT)):
        raise _mixes(f"{where}: layers of type {mixing[0]}")


def _mixes(what: str) -> ConfigurationError:
    return ConfigurationError(f"{what} would mix the documents of a sequence; give --packing stream")


def run_model(model: Any, tokens: Tensor, documents: Documents | None = None, **labels: Any) -> Any:
    """Run a model. `documents`: see `model.logits`; the first call with them checks that attention is masked by their
    boundaries or positions. `labels`: arguments of its loss."""
    options = {"input_ids": tokens, "use_cache": False, **labels}
    name = "_separates_documents"
    if documents is None:
        return model(**options)
    options["position_ids"] = documents.positions
    with mock.patch.object(attention, "boundaries", documents.boundaries):
        if hasattr(model, name):
            return model(**options)
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise _mixes(type(model).__name__)
        masks: Any = importlib.import_module("transformers.masking_utils")
        watched = ((masks, masks.find_packed_sequence_indices), (attention, attention.packing))
        with ExitStack() as stack:
            patches = [mock.patch.object(module, call.__name__, side_effect=call) for module, call in watched]
            calls = [stack.enter_context(patch) for patch in patches]
            result = model(**options)
    if not any(call.call_count for call in calls):
        raise _mixes(f"attention of {type(model).__name__}")
    setattr(model, name, True)
    return result


def chunked_vocabulary(model: Any) -> int:
    """Number of logits per token that a training pass of a converted model computes in chunks; 0 if all at once."""
    is_chunked = model.training and isinstance(getattr(model, "loss_function", None), ChunkedLoss)
    return model.get_output_embeddings().weight.shape[0] if is_chunked else 0


def leave_meta(model: nn.Module, device: torch.device) -> None:
    """Allocate a model, sharded or not. Tied parameters stay tied; buffers, which no weight file has, get values."""
    first_names = {id(param): name for name, param in model.named_parameters()}
    tied = {name: first_names[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
    model.to_empty(device=device)
    for name, first in tied.items():
        if name != first:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    skeleton = _skeleton(model)
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers and not isinstance(module, ConvertedLinear):
            values = _initial_values(skeleton, name, 0)
            for leaf, buffer in buffers.items():
                buffer.copy_(values[leaf])


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill an allocated model with the values that transformers draws, one module at a time. Collective."""
    skeleton = _skeleton(model)
    drawn = lru_cache(maxsize=1)(lambda owner: _initial_values(skeleton, owner, seed))
    values = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = skeleton.all_tied_weights_keys.get(name, name).rpartition(".")
        values[name] = _local_part(param, drawn(owner)[leaf].to(param.dtype))
    checkpoints.load_high_precision(model, values)


def _local_part(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of a parameter's values: a tensor, or a DTensor sharded like the parameter."""
    if not isinstance(param, DTensor):
        return whole
    local = private_torch.local_tensor(param)
    part = components.part_of_whole(param, whole).reshape(local.shape).to(local.device, copy=True)
    return components.as_dtensor(part, param, list(param.placements), tuple(whole.shape))


def _skeleton(model: Any) -> Any:
    """Build the model's unsharded twin from its configuration on the meta device."""
    with foreign.hub_offline():
        return _on_meta(type(model), model.config, model.dtype)


@torch.no_grad()
def _initial_values(skeleton: Any, name: str, seed: int) -> dict[str, Tensor]:
    """Draw a module's direct parameters and buffers as transformers does, on the CPU.

    A module's rule may set weights of modules inside it, so the rules of all its parents run too, innermost first.
    Other modules are on the meta device, where setting a value has no effect.
    """
    from transformers import PreTrainedModel

    path, models = [skeleton], [skeleton]
    for child in name.split(".") if name else ():
        path.append(path[-1].get_submodule(child))
        models.append(path[-1] if isinstance(path[-1], PreTrainedModel) else models[-1])
    module = path[-1].to_empty(device="cpu", recurse=False)
    values = dict(itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)))
    for tensor in values.values():
        if tensor.is_floating_point():
            # marks values that no rule sets
            tensor.fill_(torch.nan)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        for model, parent in zip(reversed(models), reversed(path), strict=True):
            model._init_weights(parent)
    module.to_empty(device="meta", recurse=False)
    for leaf, tensor in values.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ConfigurationError(f"transformers has no initial value for {name}.{leaf}; give --init-from")
    return values
