"""State of compiled layers: past amaxes and random draws enter a graph as tensors, and new amaxes leave it as tensors.

    read_amaxes     before the first operand of a pass under delayed scaling: reads past amaxes
    draw            before an operand is rounded at random: counts a draw
    record_amaxes   after a pass under delayed scaling: records the new amaxes
    fetch_copy      gathers the copy of a weight that FSDP2 did not gather

Graphs call these operators in the order of the code. No CUDA graph contains them: a replay would repeat their results.
An operator gets a module as a handle, and the static facts of a layer as the key of its `LayerStructure`. A key is a
digest, so a graph that another process reads from a compile cache refers to the same facts or to none.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quantshard import kernels, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import Orientation
from quantshard.modules.contexts import pending_amaxes, recompute, settings
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_state import DelayedScale, LinearState
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.sharding import Shard
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage
from quantshard.version import __version__

if kernels.USABLE:
    from quantshard.kernels import graph_launch
    from quantshard.kernels.graph_launch import HostNumber

# Handles and keys ----------------------------------------------------------------------------------------------------


class LinearModule(Protocol):
    """Interface of the module of a linear layer: a `QuantizedModule`, or one that holds several of them by name."""

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState: ...


_modules: WeakValueDictionary[int, LinearModule] = WeakValueDictionary()
"""Address of the handle -> module."""


def handle(module: LinearModule, device: torch.device) -> Tensor:
    """Create a tensor whose address identifies a module: unlike an int, it lets one graph serve all modules."""
    tensor = torch.empty(1, dtype=torch.uint8, device="cpu" if device.type == "meta" else device)
    if not private_torch.is_traced(tensor):
        _modules[private_torch.keep_address(tensor).data_ptr()] = module
    return tensor


def handle_beside(module: Any, current: Tensor) -> Tensor:
    """Return the handle of a module, or a new one if the module's parameters have moved to another device."""
    device = next((param.device for param in module.parameters()), current.device)
    return current if device == current.device or device.type == "meta" else handle(module, device)


@dataclass(frozen=True)
class LayerStructure:
    """One linear layer of a module; see `TracedLinear`. `stored`: spec and shard of each quantized weight, or None."""

    weights: tuple[str, ...]
    prefix: str
    record: bool
    setting: str
    stored: tuple[tuple[QuantSpec, Shard] | None, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the autocast setting."""
        return settings.registered[self.setting].recipe

    def delayed_tensors(self, backward: bool) -> list[tuple[TensorRole, int]]:
        """Role and weight index of each tensor that a pass scales by past amaxes."""
        parts, tensors = range(len(self.weights)), [(TensorRole.INPUT, 0)]
        if backward:
            tensors = [(TensorRole.GRAD_OUTPUT, part) for part in parts]
        else:
            tensors += [(TensorRole.WEIGHT, part) for part in parts if self.stored[part] is None]
        return [tensor for tensor in tensors if (spec := self.spec(tensor[0])) and spec.scaling.history]

    def spec(self, role: TensorRole) -> QuantSpec | None:
        """How tensors of a role are quantized first."""
        if role is TensorRole.WEIGHT:
            return self.recipe.weight
        first, second = self.recipe.activations[role]
        return first or second

    def key(self) -> str:
        """Register the structure in this process and return its key."""
        # with the version, because a graph contains what one version does
        key = hashlib.sha256(f"{__version__} {self!r}".encode()).hexdigest()
        assert _structures.setdefault(key, self) == self
        return key


_structures: dict[str, LayerStructure] = {}


def structure_of(key: str) -> LayerStructure:
    """The structure of a layer that this process traced."""
    if key not in _structures:
        raise UnsupportedOperationError(f"layer {key} was compiled by another process; call torch.compile in this one")
    return _structures[key]


# Tracing -------------------------------------------------------------------------------------------------------------


def of_fixed_size(value: Any) -> Any:
    """Replace symbolic sizes of a tensor by their values, which the graph is then limited to."""
    if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
        return value.view([int(size) for size in value.shape])
    return value


class GraphStep:
    """A call of an eager function, and its backward, while AOTAutograd traces them into a graph.

    `after`: in backward, the gradient of an output. Operators take it so that the partitioner keeps them in backward.
    """

    def __init__(self) -> None:
        self.layers: list[GraphState] = []
        self.after: Tensor | None = None

    @contextmanager
    def traced(self, grads: Sequence[Tensor | None] = ()) -> Iterator[None]:
        """Trace a forward or, with gradients of its outputs, a backward, and record its amaxes."""
        self.after = next((grad for grad in grads if grad is not None), None)
        with graph_launch.traced_launches(self):
            yield
            for layer in self.layers:
                if layer.slots:
                    new_amaxes = torch.stack(list(layer.slots.values()))
                    torch.ops.quantshard.record_amaxes(
                        layer.module, layer.key, self.after is not None, layer.repeated, new_amaxes
                    )
                    layer.slots.clear()

    def state(self, module: Tensor, structure: LayerStructure, weights: Sequence[Tensor]) -> LinearState:
        """State of a layer whose weights are `weights`."""
        layer = GraphState(self, module, structure)
        self.layers.append(layer)
        for index, weight in enumerate(weights):
            if isinstance(weight, QuantizedTensor):
                storage = weight.quantized_storage
                storage.components.update({name: of_fixed_size(part) for name, part in storage.components.items()})
                storage.fetch = layer.fetch(storage, index)
        return LinearState([{} for _ in weights], None, None, structure.record, graph=layer)


class GraphState:
    """State of a layer in a graph that is being traced, instead of amax histories and RNG counters.

    `amaxes`: past amaxes by role and weight index. `slots`: slots of new amaxes of the pass that is traced, in the
    order of `LayerStructure.delayed_tensors`. `repeated`: whether the forward is a recomputation, bool [1] on the CPU.
    """

    def __init__(self, step: GraphStep, module: Tensor, structure: LayerStructure) -> None:
        self.step, self.module, self.structure, self.key = step, module, structure, structure.key()
        self.amaxes: dict[tuple[TensorRole, int], Tensor] = {}
        self.slots: dict[tuple[TensorRole, int], Tensor] = {}
        self.repeated: Tensor | None = None

    def draw(self, weight_index: int) -> tuple[Any, Tensor, Any]:
        """See `LinearState.draw`; key and stream are numbers that launches read in each run of the graph."""
        numbers, draw = torch.ops.quantshard.draw(self.module, self.key, weight_index, self.step.after)
        low, high, stream = (HostNumber(numbers, 0, column) for column in range(3))
        return (low, high), draw, stream

    def scale(self, role: TensorRole, weight_index: int) -> DelayedScale:
        """See `DelayedScale.of`."""
        tensor = role, weight_index
        if tensor not in self.amaxes:
            after = self.step.after
            past, self.repeated = torch.ops.quantshard.read_amaxes(self.module, self.key, after)
            for delayed, amax in zip(self.structure.delayed_tensors(after is not None), past.unbind(), strict=True):
                self.amaxes[delayed] = amax
                if self.structure.record:
                    self.slots[delayed] = torch.zeros((), dtype=torch.float32, device=amax.device)
        return _GraphScale(self.amaxes[tensor], self.slots.get(tensor))

    def fetch(self, storage: QuantizedStorage, index: int) -> Callable[[Orientation], dict[str, Tensor]]:
        """Function that gathers the copy of a weight that FSDP2 did not gather; see `QuantizedStorage.fetch`."""
        names = [part.name for part in storage.spec.format.components if part.name not in storage.components]

        def fetched(_: Orientation) -> dict[str, Tensor]:
            parts = torch.ops.quantshard.fetch_copy(self.module, self.key, index, names, kernels.tracing.step.after)
            return dict(zip(names, parts, strict=True))

        return fetched


class _GraphScale(DelayedScale):
    """A `DelayedScale` in a graph. `slot`: None if the new amax is not recorded."""

    def __init__(self, amax: Tensor, slot: Tensor | None) -> None:
        self.amax, self.notes, self._slot = amax, slot is not None, slot

    def slot(self, device: torch.device) -> Any:
        return self._slot


# Operators ------------------------------------------------------------------------------------------------------------


def live_module(handle: Tensor, weights: Sequence[str]) -> LinearModule:
    """The module of a handle, which has `weights`."""
    module = _modules.get(handle.data_ptr())
    if module is None:
        raise UnsupportedOperationError(f"the module of {', '.join(weights)!r} was deleted before backward; keep it")
    return module


def _live_state(module: Tensor, structure: LayerStructure) -> LinearState:
    live = live_module(module, structure.weights)
    state = live._linear_state(structure.weights, structure.recipe, structure.prefix)
    state.record = structure.record
    return state


def _scales(
    structure: LayerStructure, call: LinearContext | None, module: Tensor, backward: bool
) -> list[DelayedScale]:
    """The scales of the tensors that a pass of a layer scales by past amaxes. `call`: of a forward."""
    state, setting = _live_state(module, structure), settings.registered[structure.setting]
    call = call or LinearContext(setting.recipe, setting.amax_reduction_group, setting.strict)
    return [
        DelayedScale(role, spec, call, state, part)
        for role, part in structure.delayed_tensors(backward)
        if (spec := structure.spec(role))
    ]


def _read_amaxes(module: Tensor, key: str, after: Tensor | None) -> list[Tensor]:
    """Past amaxes, float32 [delayed tensors], and whether this is a recomputed forward, on the CPU."""
    structure, call, is_repeated = structure_of(key), None, False
    pending_amaxes.drop_failed_backward()  # entering autocast does this in eager code, but leaves no trace in a graph
    if after is None:
        layer = id(live_module(module, structure.weights)), structure.weights
        call = recompute.linear_context(layer, any(structure.stored), structure.record, structure.setting)
        if is_repeated := call.repeated:
            pending_amaxes.flush_after_backward()
    past = torch.stack([scale.amax for scale in _scales(structure, call, module, after is not None)])
    return [past, torch.tensor([is_repeated], dtype=torch.bool, device="cpu")]


def _read_amaxes_shapes(module: Tensor, key: str, after: Tensor | None) -> list[Tensor]:
    private_torch.check_order_is_kept()
    structure = structure_of(key)
    if after is None and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {', '.join(structure.weights)!r}"
            ": under delayed scaling its second forward must scale by the amaxes of the first, which a graph does not "
            "keep; compile the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    return [
        module.new_empty((len(structure.delayed_tensors(after is not None)),), dtype=torch.float32),
        torch.empty((1,), dtype=torch.bool, device="cpu"),
    ]


def _record_amaxes(module: Tensor, key: str, backward: bool, repeated: Tensor, amaxes: Tensor) -> Tensor:
    """Record the new amaxes [delayed tensors] of a pass, unless it recomputed a forward or inferred shapes."""
    structure = structure_of(key)
    if not repeated:
        scales = _scales(structure, None, module, backward)
        for scale, amax in zip(scales, amaxes.clone().unbind(), strict=True):
            if scale.notes:
                scale.add(amax)
    # a tensor, because torch 2.13's Inductor would use a previous output after freeing it
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _draw(module: Tensor, key: str, index: int, after: Tensor | None) -> list[Tensor]:
    """RNG key and stream of a weight, int64 [1, 2] as int32 on the CPU, and the number of its draw."""
    rng_key, draw, stream = _live_state(module, structure_of(key)).draw(index)
    number = torch.empty((), dtype=torch.int64, device=module.device).fill_(draw)
    return [torch.tensor([[rng_key, stream]], dtype=torch.int64, device="cpu").view(torch.int32), number]


def _draw_shapes(module: Tensor, key: str, index: int, after: Tensor | None) -> list[Tensor]:
    private_torch.check_order_is_kept()
    return [torch.empty((1, 4), dtype=torch.int32, device="cpu"), module.new_empty((), dtype=torch.int64)]


def _fetch_copy(module: Tensor, key: str, index: int, names: list[str], after: Tensor | None) -> list[Tensor]:
    """The missing components of a weight."""
    structure = structure_of(key)
    live = live_module(module, structure.weights)
    weight: Any = private_torch.local_tensor(attrgetter(structure.weights[index])(live))
    storage: QuantizedStorage = weight.quantized_storage
    for which in storage.spec.format.copies:
        storage = storage.with_copy(which)
    # cloned, because FSDP2 may have gathered them in the meantime
    return [storage.components[name].clone() for name in names]


def _fetch_copy_shapes(module: Tensor, key: str, index: int, names: list[str], after: Tensor | None) -> list[Tensor]:
    spec_and_shard = structure_of(key).stored[index]
    assert spec_and_shard is not None
    spec, shard = spec_and_shard
    parts = [spec.format.by_name[name] for name in names]
    return [module.new_empty(shard.component_shape(part), dtype=part.encoding.storage) for part in parts]


def _register(name: str, schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    private_torch.keep_order(private_torch.define_operator(name, schema, body, shapes, torch.Tag.cudagraph_unsafe))


_register("read_amaxes", "(Tensor module, str key, Tensor? after) -> Tensor[]", _read_amaxes, _read_amaxes_shapes)
_register("draw", "(Tensor module, str key, int index, Tensor? after) -> Tensor[]", _draw, _draw_shapes)
_register(
    "record_amaxes", "(Tensor module, str key, bool backward, Tensor repeated, Tensor amaxes) -> Tensor",
    _record_amaxes, lambda *_: torch.empty(0, dtype=torch.float32, device="cpu"),
)  # fmt: skip
_register(
    "fetch_copy", "(Tensor module, str key, int index, str[] names, Tensor? after) -> Tensor[]",
    _fetch_copy, _fetch_copy_shapes,
)  # fmt: skip
