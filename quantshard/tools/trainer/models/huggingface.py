"""Models of transformers that a run trains: described on the meta device, converted, and filled shard by shard.

A model's configuration is a config.json, which may come from anybody: it is checked before transformers gets it, and no
code beside it is run. Values come from safetensors, or are those that transformers would draw. These are drawn a module
at a time, on the CPU, by a generator that the run's seed and the module's name set, so that a model is born the same on
any number of processes, and lies on none as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from quantshard import checkpoints, foreign, private_torch
from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader, shown
from quantshard.interop.conversion.convert import convert
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.report import ConversionReport
from quantshard.interop.layouts.files import SUFFIX, read_layout_json
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION
from quantshard.tensor import components
from quantshard.tools.terminal import inputs
from quantshard.tools.trainer.settings.recipes import LayerRecipes

_MOST_LAYERS, _MOST_MODULES = 1 << 10, 1 << 14
_COUNT = re.compile(r"\w*(layers?|experts?|blocks?|stages|depths?)")
"""Names of fields that count modules, of which configurations themselves make lists."""

_UNSAFE = re.compile(r"_?(attn|experts)_implementation|use_kernels|auto_map|attribute_map|trust_remote_code")
"""Names of fields that make transformers fetch or import code, or that rename other fields."""

_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.gguf", "consolidated*.pth", "tf_model.h5", "flax_model.msgpack", "model*.pt")
"""Files of weights that are not read."""


# Configuration


def read_configuration(path: str) -> dict[str, Any]:
    """The configuration of a folder, or a config.json itself.

    Raises:
        ConfigurationError: it is not there, or no object of JSON.
    """
    place = Path(inputs.existing(path, "a folder with config.json, or a config.json"))
    file = place / CONFIGURATION if place.is_dir() else place
    if not file.is_file():
        raise ConfigurationError(f"{path} holds no {CONFIGURATION} of a Hugging Face model")
    return read_layout_json(file)


def weights_beside(path: str) -> str:
    """The folder of a configuration if it holds safetensors too, or "".

    Raises:
        ConfigurationError: it holds weights in other files alone.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if any(file.name.endswith(SUFFIX) for file in folder.iterdir()):
        return str(folder)
    others = [file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern)]
    if others:
        raise ConfigurationError(
            f"{folder} has weights in {others[0]}, which is not read, as it may run code; write safetensors of it with "
            "transformers, or begin anew with --random-weights"
        )
    return ""


def longest_sequence(content: Mapping[str, Any]) -> int | None:
    """The most positions that a configuration says its model has; None if it does not say."""
    fields = FieldReader(content, CONFIGURATION)
    return fields.integer("max_position_embeddings", 1, 1 << 40) or fields.integer("n_positions", 1, 1 << 40)


def vocabulary_size(content: Mapping[str, Any], where: str) -> int:
    """How many tokens a configuration's model has.

    Raises:
        ConfigurationError: it does not say.
    """
    fields = FieldReader(content, where)
    found = fields.integer("vocab_size", 1, 1 << 40)
    if found is None:
        raise fields.wrong("vocab_size", "given")
    return found


# Models on the meta device


def described(content: Mapping[str, Any], where: str, causal: bool = False) -> nn.Module:
    """The model of a configuration, in its dtype, on the meta device. `causal`: one that tells the next token, whatever
    class the configuration names.

    Raises:
        ConfigurationError: transformers is not there, does not know it, or cannot build it.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"{where} describes a model of transformers, which is not installed: pip install transformers"
        ) from None
    _check_counts(content, where)
    fields = FieldReader(content, where)
    kind, dtype = fields.text("model_type"), fields.text("dtype") or fields.text("torch_dtype") or "bfloat16"
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        near = get_close_matches(str(kind), known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "is this a model's configuration?"
        raise ConfigurationError(
            f"{where}: transformers {transformers.__version__} has no model_type {shown(kind)}; {hint}"
        )
    kept = {name: value for name, value in _harmless(content).items() if name not in _READ}
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise fields.wrong("dtype", "a dtype of torch, such as bfloat16")
    names = [name for name in content.get("architectures") or () if isinstance(name, str)]
    try:
        with foreign.hub_offline(), _module_limit(where):
            config = transformers.AutoConfig.for_model(kind, **kept)
            if causal:
                _check_decoder(config, where)
            named: Any = getattr(transformers, names[0], None) if names else None
            is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
            is_model = is_model and (not causal or named.__name__.endswith(("ForCausalLM", "LMHeadModel")))
            auto = partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)
            with _default_dtype(getattr(torch, dtype)), torch.device("meta"):
                model: nn.Module = (named if is_model else auto)(config)
    except ConfigurationError:
        raise
    except Exception as error:  # whatever a field of a wrong type leads to in there
        line = " ".join(str(error).split())
        raise ConfigurationError(
            f"{where}: transformers cannot build it: {type(error).__name__}: {line:.300}"
        ) from None
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of new parameters; tables of angles name float32 themselves."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_decoder(config: Any, where: str) -> None:
    """Refuse encoders such as BERT: each of their positions sees the token that it is to predict."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        raise ConfigurationError(
            f"{where}: {config.model_type} is an encoder, and train predicts the next token; set is_decoder to true in "
            "a copy of its config.json to train it as a decoder"
        )


_READ = ("model_type", "dtype", "torch_dtype")


def _harmless(value: Any) -> Any:
    """A configuration without `_UNSAFE` fields at any depth."""
    if isinstance(value, list):
        return [_harmless(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _harmless(entry) for name, entry in value.items() if not _UNSAFE.fullmatch(name)}
    return value


def _check_counts(value: Any, where: str, name: str = "") -> None:
    """Refuse more layers than any model has, at any depth of a configuration."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_counts(entry, where, key)
    elif isinstance(value, list):
        for entry in value:
            _check_counts(entry, where, name)
    elif isinstance(value, int | float) and value > _MOST_LAYERS and _COUNT.fullmatch(name):
        raise ConfigurationError(f"{where}: {name} is {value}, and at most {_MOST_LAYERS} are built")


@contextmanager
def _module_limit(where: str) -> Iterator[None]:
    """Refuse to build more than `_MOST_MODULES` modules, whatever fields of the configuration ask for them."""
    numbers = itertools.count(1)

    def count(*arguments: Any) -> None:
        if next(numbers) > _MOST_MODULES:
            raise ConfigurationError(f"{where}: its model has more than {_MOST_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def converted(
    content: Mapping[str, Any], where: str, recipes: LayerRecipes, causal: bool = False
) -> tuple[nn.Module, ConversionReport | None]:
    """A configuration's model with quantized linear layers, and what became of each; None if all are left. `causal`: as
    in `described`.

    Raises:
        ConfigurationError: it cannot be built or converted, or a pattern matches nothing.
    """
    plain = {name: value for name, value in content.items() if name != "quantization_config"}  # of weights beside it
    model = described(plain, where, causal)
    if list(recipes.patterns.values()) == [HIGH_PRECISION]:
        return model, None
    try:
        return model, convert(model, recipes.recipes, preserve_high_precision_init_val=True)
    except ConfigurationError as error:
        way_out = "" if recipes.single is None else f"; --recipe {HIGH_PRECISION} leaves it as it is"
        said = re.sub(r"^convert\(recipe=(.*?)\)", r"recipe \1", str(error))  # as the settings call it
        raise ConfigurationError(f"{where}: {said}{way_out}") from None


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose names end in a number and have none before: what `fully_shard` is to wrap one by one."""
    return [module for name, module in model.named_modules() if re.fullmatch(r"(?:[^.]*[^.\d][^.]*\.)*\d+", name)]


def recompute_layers(model: nn.Module, every: int) -> None:
    """Let backward compute every so-manieth layer again; 0: none.

    Raises:
        ConfigurationError: transformers has no way for this model.
    """
    if not every:
        return
    layers = repeated_layers(model)
    before = "gradient_checkpointing_enable"
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or getattr(model, before)
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigurationError(f"recompute = 'layer': {error}") from None
    found = [layer for layer in layers if hasattr(layer, "gradient_checkpointing")]
    if not found:
        raise ConfigurationError(f"recompute = 'layer': transformers has no such layers in {type(model).__name__}")
    for number, layer in enumerate(found):
        layer.gradient_checkpointing = number % every == 0  # type: ignore[assignment]


# Values


def leave_meta(model: nn.Module, device: torch.device) -> None:
    """Give a model, which may be sharded, memory on a device. Parameters that are tied stay so, and buffers, which no
    file of weights has, get their values.

    Raises:
        ConfigurationError: transformers has no value for a buffer.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}
    tied = [
        (name, first)
        for name, param in model.named_parameters(remove_duplicate=False)
        if (first := first_names[id(param)]) != name
    ]
    model.to_empty(device=device)
    for name, first in tied:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    skeleton = _skeleton(model)
    for name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if own and not isinstance(module, ConvertedLinear):
            values = _initial_values(skeleton, name, 0)
            for leaf, buffer in own.items():
                buffer.copy_(values[leaf])


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill a model that left the meta device with the values that transformers draws. A collective call.

    Raises:
        ConfigurationError: transformers has no value for a parameter.
    """
    checkpoints.load_high_precision(model, _InitialValues(model, seed))


class _InitialValues(Mapping[str, Tensor]):
    """This rank's part of each parameter's initial values, by name; those of one module are made at a time."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._skeleton, self._seed = _skeleton(model), seed
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._sources: dict[str, str] = self._skeleton.all_tied_weights_keys
        self._made: tuple[str, dict[str, Tensor]] = "", {}

    def __getitem__(self, name: str) -> Tensor:
        param = self._params[name]
        owner, _, leaf = self._sources.get(name, name).rpartition(".")
        if leaf not in self._made[1] or self._made[0] != owner:
            self._made = owner, _initial_values(self._skeleton, owner, self._seed)
        return _local_part(param, self._made[1][leaf].to(param.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def _local_part(param: Tensor, whole: Tensor) -> Tensor:
    """What a rank has of a parameter's values: a tensor, or a DTensor sharded as the parameter is."""
    if not isinstance(param, DTensor):
        return whole
    local, quantized = private_torch.local_tensor(param), components.quantized_local(param)
    first = private_torch.global_offset(param) if quantized is None else quantized.quantized_storage.shard.origin
    part = whole[tuple(slice(start, start + size) for start, size in zip(first, local.shape, strict=True))].clone()
    return DTensor.from_local(
        part.to(local.device), param.device_mesh, param.placements, shape=whole.shape, stride=whole.stride()
    )


def _skeleton(model: Any) -> Any:
    """Build the model that transformers makes of a model's configuration, on the meta device and not sharded."""
    with foreign.hub_offline(), _default_dtype(model.dtype), torch.device("meta"):
        return type(model)(model.config)


@torch.no_grad()
def _initial_values(skeleton: Any, name: str, seed: int) -> dict[str, Tensor]:
    """Draw a module's own parameters and buffers as transformers does, on the CPU.

    A module's rule may set weights of modules inside it, so the rules of all its parents run too, innermost first.
    They see the other modules on the meta device, where setting a value does nothing.

    Raises:
        ConfigurationError: transformers has no value for a parameter or buffer.
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
            tensor.fill_(torch.nan)  # marks what no rule sets
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        for model, parent in zip(reversed(models), reversed(path), strict=True):
            model._init_weights(parent)
    module.to_empty(device="meta", recurse=False)
    for leaf, tensor in values.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ConfigurationError(
                f"{type(skeleton).__name__}: transformers has no initial value for {name}.{leaf}; begin with weights, "
                "and a release of transformers that fills it"
            )
    return values
