"""Initial values of parameters.

Values of a weight come from a counter-based generator, seeded by the parameter's key and indexed by position in the
global tensor. They do not depend on sharding, or on whether the module was built on the meta device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import numerics, private_torch, sharding
from quantshard.collectives import rank_checks
from quantshard.distributed import module_meshes
from quantshard.errors import ConfigurationError
from quantshard.modules.gemms.linear_state import HISTORIES
from quantshard.numerics import distributions
from quantshard.recipe import QuantSpec, Recipe
from quantshard.tensor import components, moves, requantize, storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY, INIT_STREAM, RNG_DRAWS, RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor

InitMethod = Callable[[Tensor], Any]
DEFAULT_STD = 0.023
"""Standard deviation of the default initialization, as in TransformerEngine."""

_MATERIALIZED = "quantshard_materialized"  # attribute of a meta parameter: the parameter that replaced it


@dataclass(frozen=True)
class WeightSpec:
    """Shape [out_features, in_features] and initialization of a weight.

    `init_method`: function that fills the whole tensor in place, with torch's generator seeded by the parameter's key.
    If None, values are drawn from N(0, `std`**2) by the counter-based generator, which never builds the whole tensor.
    """

    shape: tuple[int, int]
    init_method: InitMethod | None = None
    std: float = DEFAULT_STD

    def values(self, key: int, origin: tuple[int, int], shape: tuple[int, int], device: torch.device) -> Tensor:
        """Initial values of the rectangle at `origin` with `shape`, float32."""
        if self.init_method is None:
            words = numerics.random_words(key, 0, INIT_STREAM, self.shape, origin, shape, device=device)
            return distributions.normal(words) * self.std
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(key)  # torch.manual_seed would also seed the accelerators, unforked
            whole = torch.empty(self.shape, dtype=torch.float32, device="cpu")
            self.init_method(whole)
        return whole[origin[0] : origin[0] + shape[0], origin[1] : origin[1] + shape[1]].to(device)


def default_device() -> torch.device:
    """PyTorch's default device if one was set, else the current GPU, else the CPU."""
    device = torch.get_default_device()  # set by "with torch.device('meta'):" or torch.set_default_device
    if device.type != "cpu":
        return device
    return _current_device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def _current_device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def empty_weight(
    module: Any, name: str, spec: QuantSpec | None, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter without values, quantized by `spec` or in high precision if `spec` is None."""
    shape: tuple[int, int] = module._weights[name].shape
    if module.tp_mesh is not None:
        return module_meshes.empty_parameter(
            shape, module.tp_mesh, module._cuts[name], dtype=dtype, device=device, spec=spec, state=state
        )
    if spec is None:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    return nn.Parameter(QuantizedTensor(storages.empty(spec, sharding.whole(shape), device, state), dtype))


def make_histories(module: Any, recipe: Recipe, prefix: str) -> None:
    """Register the amax histories of a layer's activations that a recipe needs (delayed scaling)."""
    for role, length in recipe.histories.items():
        # of the original tensor, if the weight is parametrized
        device = private_torch.local_tensor(next(module.parameters())).device
        zeros = torch.zeros(length, dtype=torch.float32, device=device)
        module.register_buffer(prefix + HISTORIES[role], zeros)


@torch.no_grad()
def fill(module: Any, names: Iterable[str]) -> None:
    """Fill weights with their initial values. A collective call if they are sharded."""
    for name in names:
        group = private_torch.mesh_group(module.get_parameter(name))
        rank_checks.check_equal_on_ranks({name: module.weight_state(name)[RNG_KEY]}, group, "the random key")
    quantized: dict[str, tuple[Tensor, Tensor]] = {}
    for name in names:
        param, state, spec = module.get_parameter(name), module.weight_state(name), module._weights[name]
        state[RNG_DRAWS].zero_()
        if AMAX_HISTORY in state:
            state[AMAX_HISTORY].zero_()
        local, offset = private_torch.local_tensor(param), private_torch.global_offset(param)
        shard = local.quantized_storage.shard if isinstance(local, QuantizedTensor) else None
        origin = (offset[0], offset[1]) if shard is None else shard.origin
        shape = (local.shape[0], local.shape[1]) if shard is None else shard.shape
        values = spec.values(int(state[RNG_KEY]), origin, shape, local.device).to(module._dtype)
        if isinstance(local, QuantizedTensor):
            quantized[f"{type(module).__name__}.{name}"] = (param, values)
        else:
            local.copy_(values)
    requantize.requantize_(list(quantized.values()), names=list(quantized))
    if module._plan.preserve_high_precision:
        for weight, values in quantized.values():
            components.storage_of(weight).keep_initial_values(values.cpu().clone())


def materialize(module: Any) -> None:
    """Replace parameters and buffers on the meta device by uninitialized ones on the module's device."""
    for name, param in list(module.named_parameters(recurse=False)):
        if param.is_meta:
            mesh_type = param.device_mesh.device_type if isinstance(param, DTensor) else None
            device = default_device() if mesh_type is None else _current_device(mesh_type)
            new = getattr(param, _MATERIALIZED, None)  # set if a tied module was materialized first
            if new is None:
                new = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                setattr(param, _MATERIALIZED, new)
            setattr(module, name, new)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            device = next((private_torch.local_tensor(p).device for p in module.parameters()), default_device())
            module.register_buffer(name, torch.zeros_like(buffer, device=device))
    for name, state in module._born_states.items():
        if AMAX_HISTORY in state and state[AMAX_HISTORY].is_meta:
            device = private_torch.local_tensor(module.get_parameter(name)).device
            state[AMAX_HISTORY] = torch.zeros_like(state[AMAX_HISTORY], device=device)


@torch.no_grad()
def reset(module: Any) -> None:
    """Materialize a module on the meta device, and fill all of its parameters and buffers."""
    if private_torch.has_gathered_parameters(module):
        remedy = "call reshard() on its FSDP module first"
        raise ConfigurationError(f"{type(module).__name__}.reset_parameters: FSDP has gathered parameters; {remedy}")
    materialize(module)
    fill(module, module._weights)
    for name, value in module._vectors.items():
        private_torch.local_tensor(module.get_parameter(name)).fill_(value)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()
    module._awaits_values = False


def quantize_weight(module: Any, name: str, owner: str) -> None:
    """Store a weight as the module's plan says, keeping its values. `owner`: name of the module in the model."""
    spec, state = module._plan.recipe.weight, module._born_states[name]
    device = private_torch.local_tensor(getattr(module, name)).device
    if spec is not None and spec.scaling.history:
        state[AMAX_HISTORY] = torch.zeros(spec.scaling.history, dtype=torch.float32, device=device)
    if not module._plan.quantize:
        return
    old = module.get_parameter(name)
    module._born_states[name] = {key: value.clone() for key, value in state.items()}
    new = empty_weight(module, name, spec, state, old.dtype, device)
    new.requires_grad_(old.requires_grad)
    new.__dict__.update(moves.set_attributes(old))
    values = private_torch.local_tensor(old).detach()
    if not values.is_meta and not module._awaits_values:  # otherwise values are loaded later
        requantize.requantize_([(new, values)], names=[f"{owner}.{name}"])
        if module._plan.preserve_high_precision:
            components.storage_of(new).keep_initial_values(values.cpu().clone())
    setattr(module, name, new)
