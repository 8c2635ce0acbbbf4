"""Recording of CUDA graphs, for modules and for whole steps, and checks of what a graph assumes constant.

A graph contains launches and addresses, but nothing that Python did during the capture. Arguments are copied to fixed
addresses; contexts, parameters, buffers and hooks are compared with those of the capture.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quantshard import limits, private_torch
from quantshard.collectives.process_groups import world
from quantshard.errors import ConfigurationError, QuantshardError, UnsupportedOperationError
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts import context
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor

Result = TypeVar("Result")

# Capture --------------------------------------------------------------------------------------------------------------


@cache
def _warming_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream for all warmups, on the current device, which must be `device`. Allocations per stream, such as cuBLAS
    workspaces and zeroed scalars, are never reused by other streams."""
    return torch.cuda.Stream()


class GraphRecorder:
    """Records work on one device into CUDA graphs in one `pool`. `error_mode`: as for `torch.cuda.graph`."""

    def __init__(self, device: torch.device, pool: Any = None, error_mode: str = "global") -> None:
        self._device, self._pool, self._error_mode = device, pool, error_mode

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run the block on another stream before a recording, for one-time allocations and compilations."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(_warming_stream(self._device)):
                yield
            torch.cuda.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Surround calls of `record` that share memory. Garbage collection, which could destroy graphs, is off."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        gc_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._device):
                yield
        finally:
            if gc_enabled:
                gc.enable()

    def record(self, owner: str, work: Callable[[], Result]) -> tuple[Callable[[], Result], Result]:
        """Record work without computing anything. Return a function that replays it, and the result it overwrites."""
        graph, errors = torch.cuda.CUDAGraph(), list[BaseException]()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._error_mode):
                try:
                    result = work()
                except BaseException as error:
                    errors.append(error)
                    raise
        except Exception as error:
            # the end of a failed capture raises another error
            cause = errors[0] if errors else error
            if isinstance(cause, torch.OutOfMemoryError | QuantshardError) or not isinstance(cause, RuntimeError):
                raise cause from None
            lines = str(cause).strip().splitlines() or [type(cause).__name__]
            remedy = "move what waits for the device (item, print, a copy to the host) out of it"
            raise UnsupportedOperationError(f"{owner} cannot be captured ({lines[0]}); {remedy}") from cause

        def replay() -> Result:
            graph.replay()
            return result

        return replay, result


def graph_device(owner: str, tensors: Iterable[Tensor]) -> torch.device:
    """Return the GPU that all tensors are on."""
    devices = {private_torch.local_tensor(tensor).device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        where = ", ".join(sorted(map(str, devices))) or "no device"
        raise ConfigurationError(f"{owner}: tensors are on {where}, but a CUDA graph is of one GPU; run eagerly")
    return devices.pop()


def check_not_replicated(model: nn.Module, name: str) -> None:
    """Raise if DistributedDataParallel wraps the module or a submodule."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedOperationError(limits.refusal("captured replicas", name))


def check_autocast_cache(owner: str) -> None:
    """Raise under a torch.autocast whose cached casts of weights every replay would read."""
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise ConfigurationError(f"{owner}: a graph keeps torch.autocast's casts; enter it with cache_enabled=False")


# States that a capture changes ----------------------------------------------------------------------------------------


def capturable_(model: nn.Module) -> None:
    """Move the random draw counters of all weights to the weights' devices, so that a CUDA graph can hold a backward
    that draws.

    Recipes with stochastic rounding (NVFP4) draw random words in each backward pass. By default the host counts the
    draws, which a graph cannot see, and capturing such a pass raises. With this call the bits stay the same, and
    checkpoints load either way. Other recipes do not need it; the optimizer's counterpart is `capturable=True`.

    Call it once before the capture, and run one step in between, which compiles the kernels that read a counter. If the
    model moves through a CPU, the host counts again. Optimizers that change quantized weights without masters (stock
    `torch.optim`, `FusedAdam(master_weights=False)`) cannot be captured, and then read the counters back.

    Args:
        model: weights, quantized or not, on any devices but meta; weights on a CPU are left unchanged.
    """
    states = _states(model)
    for name, (param, _) in states.items():
        if param.is_meta:
            raise ConfigurationError(f"capturable_: {name} is on the meta device; materialize the model first")
    for param, state in states.values():
        state[RNG_DRAWS] = state[RNG_DRAWS].to(param.device)


@contextmanager
def states_preserved(models: Sequence[nn.Module], device: torch.device, capturable: bool = False) -> Iterator[None]:
    """Restore after the block the state other than gradients that forward and backward change: buffers, draw counters,
    amax histories, and the random generators of the CPU and `device`.

    `capturable`: call `capturable_` first, and undo it if the block raises.
    """
    states = [state for model in models for _, state in _states(model).values()]
    draws = [state[RNG_DRAWS] for state in states]
    if capturable:
        for model in models:
            capturable_(model)
    tensors = [buffer for model in models for buffer in model.buffers()]
    tensors += [value for state in states for name, value in state.items() if name != RNG_KEY]
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        except BaseException:
            for state, counter in zip(states, draws, strict=True):
                state[RNG_DRAWS] = counter
            raise
        finally:
            with torch.no_grad():
                for tensor, before in copies:
                    tensor.copy_(before)


def draw_counts(models: Sequence[nn.Module]) -> list[int]:
    """Return the number of random draws of each weight."""
    return [int(state[RNG_DRAWS]) for model in models for _, state in _states(model).values()]


def _states(model: nn.Module) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return name -> (local tensor, state) of each weight that draws."""
    states: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for prefix, module in model.named_modules():
        for name, state in module.plain_states.items() if isinstance(module, QuantizedModule) else ():
            param = private_torch.local_tensor(module.get_parameter(name))
            states[f"{prefix}.{name}" if prefix else name] = param, state
    for name, parameter in model.named_parameters():
        local = private_torch.local_tensor(parameter)
        if isinstance(local, QuantizedTensor):
            states[name] = local, local.quantized_storage.state
    return states


# Arguments and results ------------------------------------------------------------------------------------------------

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum, tuple, list, dict)
"""Types that a graph treats as constants. Tuples, lists and dicts are constants only if empty."""


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to each tensor in nested tuples, lists and dicts, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [mapped(item, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):
        items = {key: mapped(item, change) for key, item in value.items()}
        # other classes: outputs of transformers models
        return items if type(value) is dict else type(value)(**items)
    return value


def copied(value: Any, device: torch.device) -> Any:
    """Copy the tensors in arguments or results to a device, detached from autograd."""
    return mapped(value, lambda tensor: tensor.detach().to(device, copy=True))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def kind_of(owner: str, value: Any, tensor_kind: Callable[[Tensor], Hashable] = lambda _: None) -> Hashable:
    """Return what a graph fixes about arguments or results: their nesting, constants, and the `tensor_kind` of tensors.
    Raise if a value is neither a tensor nor a constant."""
    if isinstance(value, Tensor):
        return tensor_kind(value)
    if isinstance(value, tuple | list) and value:
        return type(value), *(kind_of(owner, item, tensor_kind) for item in value)
    if isinstance(value, dict) and value:
        # in insertion order
        return type(value), *((key, kind_of(owner, item, tensor_kind)) for key, item in value.items())
    if isinstance(value, CONSTANTS):
        return type(value), repr(value)
    raise ConfigurationError(f"{owner}: a {type(value).__name__} cannot be in a graph; use tensors and constants")


def described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> description of the tensors and constants in arguments, for messages."""
    texts: dict[str, str] = {}
    pending = [(f"argument {name}", value) for name, value in (*enumerate(args), *kwargs.items())]
    for name, value in pending:
        if isinstance(value, tuple | list | dict) and value:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{name}[{key!r}]", item) for key, item in items]
        elif isinstance(value, Tensor):
            grad = ", requires_grad" if value.requires_grad else ""
            texts[name] = f"{list(value.shape)} {value.dtype} on {value.device}{grad}"
        else:
            texts[name] = repr(value)
    return texts


# Facts that a graph relies on -----------------------------------------------------------------------------------------


def surroundings() -> tuple[Any, ...]:
    """Return the contexts that a forward depends on: quantshard's and torch's autocast, and the process group."""
    in_autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if in_autocast else None
    return context.current_setting(), dtype, world()


def check_surroundings(owner: str, captured: tuple[Any, ...]) -> None:
    """Raise if the current contexts differ from those of the capture."""
    if (current := surroundings()) != captured:
        before, now = (f"{setting}, torch.autocast of {dtype}" for setting, dtype, _ in (captured, current))
        raise ConfigurationError(f"{owner} was captured under {before}, but called under {now}, or in another group")


class GraphAddresses:
    """Addresses of a module's tensors and its `requires_grad` flags at the time of a capture.
    `draws`: the module draws random words, by keys that the graph fixes by value."""

    def __init__(self, module: nn.Module | None, draws: bool) -> None:
        self._draws = draws
        self._owners = [] if module is None else list(module.named_modules())
        self._params: list[tuple[str, nn.Module, str, Mapping[str, Tensor]]] = []
        self._owned_buffers: list[tuple[str, nn.Module, str]] = []
        for path, owner in self._owners:
            states = owner.plain_states if isinstance(owner, QuantizedModule) else {}
            names = [name for name, _ in owner.named_parameters(recurse=False)]
            self._params += [(path, owner, name, states.get(name, {})) for name in names]
            self._owned_buffers += [(path, owner, name) for name, _ in owner.named_buffers(recurse=False)]
        self._captured = self._facts()

    def changed(self) -> str | None:
        """Return the name of the first module or tensor that changed since the capture, or None."""
        facts = self._facts()
        if facts == self._captured:
            return None
        labels = [path or "the module" for path, _ in self._owners]
        labels += [f"{path}.{name}".lstrip(".") for path, _, name, *_ in (*self._params, *self._owned_buffers)]
        pairs = zip(labels, facts, self._captured, strict=True)
        return next(label for label, current, captured in pairs if current != captured)

    def _facts(self) -> list[Any]:
        # mode, children, and Python hooks of submodules, which a replay would not run
        facts: list[Any] = [
            (module.training, [id(child) for child in module.children()], path and private_torch.has_call_hooks(module))
            for path, module in self._owners
        ]
        facts += [self._of_parameter(owner, name, state) for _, owner, name, state in self._params]
        for _, owner, name in self._owned_buffers:
            buffer = private_torch.registered_buffer(owner, name)
            facts.append(buffer if buffer is None else buffer.data_ptr())
        return facts

    def _of_parameter(self, module: nn.Module, name: str, state: Mapping[str, Tensor]) -> Any:
        param = private_torch.registered_parameter(module, name)
        if param is None:
            return None
        local = private_torch.local_tensor(param)
        if isinstance(local, QuantizedTensor):
            state = local.quantized_storage.state
        addresses = [part.data_ptr() for part in memory_of(param)]
        addresses += [value.data_ptr() for key, value in state.items() if key != RNG_KEY]
        # the graph contains the value of the random key
        key = int(state[RNG_KEY]) if self._draws and RNG_KEY in state else 0
        return id(param), param.requires_grad, key, addresses


def memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain local tensors that a tensor consists of."""
    local = private_torch.local_tensor(tensor)
    return list(local.quantized_storage.components.values()) if isinstance(local, QuantizedTensor) else [local]
