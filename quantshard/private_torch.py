"""Every use of a private PyTorch API, each with its reason. Checked on torch 2.11 and 2.13."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.traceback
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import checkpoint as torch_checkpoint

from quantshard.errors import ConfigurationError

disabled_torch_function = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing: a tensor subclass that lives at the dispatch level pays no toll above it.
PyTorch's own wrapper subclasses (DTensor) are declared so; there is no public spelling."""


all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed both, and warns of the old names."""


state_dict_stager = StateDictStager
"""Copies a state dict into memory of the host that the next copy uses again. What is public, `DefaultStager`, ends its
own after each copy in torch 2.11: so it copies once, and the memory would be pinned anew each time."""

storage_info = _StorageInfo
"""Where DCP's metadata say that one piece of an entry is. Its readers want this class, which has no public name."""

set_element = set_element
"""Puts a value into nested dicts and lists by the path that DCP's planners keep for it; they have no public way to."""

flatten_state_dict = flatten_state_dict
"""Nested state dicts by the keys that DCP's planners give to their entries, and the path to each."""

all_gather_of_dtensor = torch.ops._c10d_functional.all_gather_into_tensor.default
"""What `DTensor.full_tensor()` and `redistribute()` do to local tensors."""

dtensor_handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
"""By operation, what answers it for DTensors in place of their own rules; there is no public way to refuse one."""

CHECKPOINT_WRAPPER = _CHECKPOINT_PREFIX
"""What `checkpoint_wrapper` puts into names of parameters, and takes out of the keys of state dicts."""

save_checkpoint = _save_state_dict
load_checkpoint = _load_state_dict
"""What `dcp.save` and `dcp.load` do, without their remark on a single process. That cannot be silenced beside training:
filters of warnings are of the whole process, so a save in a thread would change what training hears."""


def make_wrapper(cls: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of class `cls` with a shape, dtype and device but no data of its own.

    `_make_wrapper_subclass` is the documented-by-example way (the torch.utils._python_dispatch notes) to build one.
    """
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def has_hooks(module: nn.Module) -> bool:
    """True if something sees, or changes, what goes into or comes out of a module's forward: a user's hook, or FSDP2's,
    which casts inputs under a `MixedPrecisionPolicy`. Hooks can be registered in public, but not looked for."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def take_saved(ctx: Any) -> tuple[Any, ...]:
    """`ctx.saved_tensors` in the backward of an autograd function, which lets go of each as soon as its caller does.

    The public attribute leaves them with the graph until backward has returned. Where the graph is to be kept
    (`retain_graph=True`), so are they. It is what AOTAutograd calls in its own backward.
    """
    saved = tuple(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, for the result of an autograd function.

    Where `to` (or `reshape`) changes nothing and returns its argument, torch 2.11's Dynamo takes the function's result
    for one without a gradient, in silence.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread. There is no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def is_traced(tensor: Tensor) -> bool:
    """True while a graph is traced, or if the tensor has a shape but no values, as in tracing.

    Of `FakeTensor`, PyTorch's only name for such a tensor.
    """
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or, of one that DTensor's collectives are still filling, its values once they are there.

    Such an `AsyncCollectiveTensor` waits by itself before any operation of PyTorch, but has no address that a kernel
    could read from; it has no public name. Not differentiable: for use inside an `autograd.Function`.
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter by its name, or None where there is none. As an attribute it takes ten times as long, which counts in
    a layer of many experts."""
    return module._parameters.get(name)


def registered_buffer(module: nn.Module, name: str) -> Tensor | None:
    """The same of a buffer."""
    return module._buffers.get(name)


def constant_in_graphs(function: Any) -> Any:
    """Let torch.compile call a function while it traces, and take its result for a constant.

    This is the mark that `torch.compiler.assume_constant_result` sets; that imports all of Dynamo to do so, a second of
    every process that starts, whether it compiles anything or not.
    """
    function._dynamo_marked_constant = True
    return function


def keep_order(operator: Any) -> None:
    """Tell torch.compile that an operator does more than it returns: calls are neither dropped, merged nor reordered.

    torch.library has no public name for it yet. Such an operator cannot stand in a checkpointed part of a graph.
    """
    _register_effectful_op(operator, _EffectType.ORDERED)


def is_recomputed_in_graph() -> bool:
    """True where torch.compile traces what checkpointing inside the graph may run again in backward."""
    return "recompute" in torch.fx.traceback.get_current_meta()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once when the backward pass now running ends. FSDP2 and DDP finish their work in the same way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_place_changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place, by which autograd notices that too; not through `.data`.

    Operations on a DTensor count for it, those on its local tensor for that.
    """
    local = local_tensor(tensor)
    return tensor._version + (0 if local is tensor else local._version)


@dataclass(frozen=True)
class CheckpointedRegions:
    """The regions of `torch.utils.checkpoint` around the running code: objects that autograd keeps until they are done.

    `entered`: those that it runs the first forward of. `replayed`: the one that is recomputed, if any, and `replay`
    which recomputation of it this is.
    """

    entered: tuple[Any, ...] = ()
    replayed: Any = None
    replay: Any = None


_CHECKPOINT = inspect.unwrap(torch_checkpoint.checkpoint).__code__
_REENTRANT_FORWARD = torch_checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_BACKWARD = torch_checkpoint.CheckpointFunction.backward.__code__
_HOOK_CODES = {
    code.co_name: code
    for code in torch_checkpoint._checkpoint_hook.__init__.__code__.co_consts
    if isinstance(code, types.CodeType)
}


def _require_names(found: dict[str, types.CodeType]) -> None:
    """Of frames only names tell what they hold: a renamed one would not fail, but give another recipe or draws."""
    wanted = {
        "checkpoint": ("gen",),
        "_checkpoint_without_reentrant_generator": ("new_frame",),
        "CheckpointFunction.forward": ("ctx",),
        "CheckpointFunction.backward": ("ctx",),
        "pack_hook": ("frame",),
        "unpack_hook": ("frame", "gid"),
    }
    for function, names in wanted.items():
        code = found.get(function)
        held = () if code is None else (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        lacking = [name for name in names if name not in held]
        assert not lacking, (
            f"torch {torch.__version__}: {function} of torch.utils.checkpoint has no variable {lacking[0]!r}, by which "
            "quantshard.private_torch.checkpointed_regions finds what is recomputed; teach it this version's names"
        )


_require_names(
    {
        "checkpoint": _CHECKPOINT,
        "_checkpoint_without_reentrant_generator": torch_checkpoint._checkpoint_without_reentrant_generator.__code__,
        "CheckpointFunction.forward": _REENTRANT_FORWARD,
        "CheckpointFunction.backward": _REENTRANT_BACKWARD,
        **_HOOK_CODES,
    }
)


def checkpointed_regions() -> CheckpointedRegions:
    """Which checkpointed regions the calling code runs in.

    PyTorch has no such question, so its own frames on the Python stack are read: a reentrant region is its autograd
    node, another one the `_CheckpointFrame` that its saved-tensor hooks close over. The stack is walked only where a
    region is possible: without gradients, under saved-tensor hooks, or in backward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None and torch.is_grad_enabled() and not in_backward():
        return CheckpointedRegions()
    entered: list[Any] = []
    if hooks is not None and getattr(hooks[0], "__code__", None) is _HOOK_CODES["pack_hook"]:
        names = _HOOK_CODES["pack_hook"].co_freevars
        cells: Any = hooks[0].__closure__  # type: ignore[attr-defined]
        entered.append(cells[names.index("frame")].cell_contents)  # for the composable API, which is not on the stack
    at: types.FrameType | None = sys._getframe(1)
    while at is not None:
        code = at.f_code
        if code is _REENTRANT_FORWARD:
            entered.append(at.f_locals["ctx"])
        elif code is _CHECKPOINT and at.f_locals.get("gen") is not None:
            entered.append(at.f_locals["gen"].gi_frame.f_locals["new_frame"])
        elif code is _REENTRANT_BACKWARD:
            return CheckpointedRegions(_distinct(entered), at.f_locals["ctx"], torch._C._current_graph_task_id())
        elif code is _HOOK_CODES["unpack_hook"]:
            return CheckpointedRegions(_distinct(entered), at.f_locals["frame"], at.f_locals["gid"])
        at = at.f_back
    return CheckpointedRegions(_distinct(entered))


def _distinct(objects: list[Any]) -> tuple[Any, ...]:
    return tuple({id(each): each for each in objects}.values())


@dataclass(frozen=True)
class FsdpPlan:
    """What FSDP2 was told to do with one parameter: free it after each pass (and gather it again), and into what."""

    frees_between_passes: bool = False
    reshards_to_other_mesh: bool = False
    group: weakref.ReferenceType[Any] | None = None

    def changed(self) -> bool:
        """True if FSDP2 was told since to keep what it was to free; a plan to keep serves freeing too."""
        group = None if self.group is None else self.group()
        return group is not None and self.frees_between_passes and not _frees_between_passes(group)


def _frees_between_passes(group: Any) -> bool:
    return bool(group._reshard_after_forward and group.reshard_after_backward)


def fsdp_plan(storage: Any) -> FsdpPlan:
    """The plan for the sharded parameter whose local tensor has this storage.

    FSDP2 hands its hooks no such fact, so its own state is asked: the parameter group that holds the parameter. Keep
    everything gathered where no group is found.
    """
    for reference in list(_module_state_mapping.values()):
        state = reference()
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                local = fsdp_param.sharded_param._local_tensor
                if getattr(local, "_storage", None) is storage:
                    after, now = group.post_forward_mesh_info, group.mesh_info
                    size = getattr(now, "shard_mesh_size", None)
                    other = after is not None and getattr(after, "shard_mesh_size", None) != size
                    return FsdpPlan(_frees_between_passes(group), other, weakref.ref(group))
    return FsdpPlan()


def sharded_parameters() -> Iterator[tuple[DTensor, str]]:
    """FSDP2's sharded parameters in this process, each with its name, or where FSDP2 does not know it with its module's
    class: it looks for names in the first forward, and then not for those of parameters that replaced its own.

    Within an operation's dispatch only the local tensor is known, and no public record leads from it to its DTensor.
    """
    for reference in list(_module_state_mapping.values()):
        for group in _param_groups(reference()):
            for fsdp_param in group.fsdp_params:
                info = fsdp_param._module_info
                name = fsdp_param._param_fqn or f"{info.param_name} of a {type(info.module).__name__}"
                yield _sharded_param(fsdp_param), name


def _sharded_param(fsdp_param: Any) -> Any:
    """The parameter that the optimizer has; FSDP2 learns of one that replaced its own in the first forward only."""
    info = fsdp_param._module_info
    sharded = fsdp_param.sharded_state.name == "SHARDED"
    return getattr(info.module, info.param_name) if sharded else fsdp_param.sharded_param


@dataclass(frozen=True)
class FsdpGather:
    """How FSDP2 gathers one parameter: over how many ranks, in backward too or not, and a plain one as what."""

    param: nn.Parameter
    ranks: int
    in_backward: bool
    padded_numel: int
    dtype: torch.dtype | None


def fsdp_gathers(model: nn.Module) -> dict[tuple[int, str], FsdpGather]:
    """How FSDP2 gathers each parameter, by (id of its module, name in it).

    FSDP2 has no public way to ask which parameters it gathers together, in which dtype, and whether again in backward.
    A module that is outermost and was not told otherwise keeps its parameters until backward, but FSDP2 decides that
    in the first forward only.
    """
    found: dict[tuple[int, str], FsdpGather] = {}
    outermost: list[str] = []
    for prefix, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        inner = any(not outer or prefix.startswith(f"{outer}.") for outer in outermost)
        outermost += [] if inner else [prefix]
        keeps = not inner and state._is_root is None and bool(state._auto_reshard_after_forward)
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                info = fsdp_param._module_info
                param = _sharded_param(fsdp_param)
                dtype = group.mp_policy.param_dtype if param.is_floating_point() else None
                gather = FsdpGather(
                    param,
                    ranks=getattr(group.mesh_info, "shard_mesh_size", 1),
                    in_backward=group.post_forward_mesh_info is not None and not keeps,
                    padded_numel=fsdp_param.padded_sharded_param_size.numel(),
                    dtype=dtype,
                )
                found[(id(info.module), info.param_name)] = gather
                for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[(id(shared), name)] = gather
    return found


def has_gathered_parameters(module: nn.Module) -> bool:
    """True if FSDP2 holds parameters of this very module gathered now."""
    for reference in list(_module_state_mapping.values()):
        for group in _param_groups(reference()):
            for fsdp_param in group.fsdp_params:
                if fsdp_param._module_info.module is module and fsdp_param.sharded_state.name != "SHARDED":
                    return True
    return False


def _param_groups(state: Any) -> list[Any]:
    """The parameter groups of one `fully_shard`-ed module; before torch 2.12 there is at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, without the autograd node that the public `to_local()` adds; else the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dtensor_around(local: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: torch.Size) -> DTensor:
    """A DTensor of a global shape whose local tensor is this very one.

    The public `DTensor.from_local` moves it to the mesh's device: under CPU offload that would be a copy on the GPU,
    and what is loaded into it lost. FSDP2 makes its own DTensors as here.
    """
    meta = TensorMeta(shape, torch.empty(shape, dtype=local.dtype, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def global_offset(tensor: Tensor) -> tuple[int, ...]:
    """Global index of the first local element of a plain parameter, a DTensor or not."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def told_extents(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> list[tuple[int, int]]:
    """For each dim the first and one past the last index that DTensor's metadata gives to the rank at a coordinate of
    the mesh. The public function tells of the running rank alone."""
    lengths, starts = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def is_strided_over(placement: Placement, inner: int) -> bool:
    """True for FSDP2's own placement on a dim that axes of `inner` ranks had cut before; it has no public name."""
    return isinstance(placement, _StridedShard) and placement.split_factor == inner


def cut_dims(placements: Iterable[Placement]) -> list[int | None]:
    """For each mesh axis the dim that it shards, if any. FSDP2's placement over tensor parallelism is private."""
    return [None if placement.is_replicate() else int(placement.dim) for placement in placements]  # type: ignore[attr-defined]


def mesh_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks of a DTensor's mesh, as the process group of each of its axes; none for other tensors."""
    if not isinstance(tensor, DTensor):
        return ()
    return axis_groups(tensor.device_mesh, range(tensor.device_mesh.ndim))


def axis_groups(mesh: DeviceMesh, axes: Iterable[int]) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of some axes of a mesh, of those that have more than one rank.

    What is reduced over them one after the other is reduced over the ranks that the axes span together, without a
    process group of these: to make one is a collective call of all processes, some of which may not know of it.
    """
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


def other_axes(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of all axes but this one of the mesh that a 1-D mesh is an axis of: together the ranks that
    stand at this rank's place on it. A mesh has no public way to tell what it was sliced from.

    Raises:
        ConfigurationError: it is not an axis of a mesh of all processes, so these ranks are not known.
    """
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    known = root.mesh_dim_names or names or ("",)
    if root.size() != dist.get_world_size() or not (root == mesh or (names and names[0] in known)):
        raise ConfigurationError(
            f"which ranks stand alike on the mesh {mesh} is not known: it is not an axis of a mesh of all "
            f"{dist.get_world_size()} processes; make one with init_device_mesh, and slice it"
        )
    if root == mesh:
        return ()
    assert names is not None
    return axis_groups(root, (axis for axis, name in enumerate(known) if name != names[0]))


def load_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that were registered on an optimizer's `load_state_dict`: those to run before, those to run after.

    A class that replaces the method has no public way to run them.
    """
    before = optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined]
    return [*before.values()], [*optimizer._optimizer_load_state_dict_post_hooks.values()]  # type: ignore[attr-defined]


def end_checkpoint_process() -> None:
    """End the process that `dcp.async_save` keeps for saving, if there is one.

    It lives as long as this one does, and keeps the ranks that it was started with; there is no public way to end it.
    """
    _async_process_executor._CHECKPOINT_PROCESS = None  # its destructor asks it to end, and waits


def first_state(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], probe: nn.Parameter) -> dict[str, Any]:
    """What a first `step()`, which alone makes states, makes for a parameter: that of an object of the same class with
    states, groups and hooks of its own, so that nobody learns of it."""
    shadow = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        shadow.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    shadow.__dict__.pop("step", None)  # which an LR scheduler wraps to count steps
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state, shadow.param_groups = defaultdict(dict), [{**settings, "params": [probe]}]
    shadow.step()
    return dict(shadow.state.get(probe, {}))
