"""Modules, autograd and graphs of torch.compile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from quantshard.private_torch.lookup import missing, needs_attributes, private_name, private_name_later

_task_id = private_name("torch._C._current_graph_task_id", "telling forward from backward, and so every layer,")
_engine = private_name("torch.autograd.Variable._execution_engine", "delayed scaling of gradients")
_fake_tensor = private_name("torch._subclasses.fake_tensor.FakeTensor", "a layer on tensors without values")
_COMPILED = "torch.compile of a layer"
_inductor = private_name_later("torch._inductor.utils", _COMPILED)
_unsafe = private_name_later("torch._inductor.utils.FORBIDDEN_CUDAGRAPH_OPS", _COMPILED)
_register_effect = private_name("torch._higher_order_ops.effects._register_effectful_op", _COMPILED)
_ordered = private_name("torch._higher_order_ops.effects._EffectType.ORDERED", _COMPILED)


def has_hooks(module: nn.Module) -> bool:
    """True if something sees, or changes, what goes into or comes out of a module's forward: a user's hook, or FSDP2's,
    which casts inputs under a `MixedPrecisionPolicy`. Hooks can be registered in public, but not looked for."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def has_call_hooks(module: nn.Module) -> bool:
    """True if a hook of a module sees its forward or its backward."""
    for name in HOOKS:
        if getattr(module, name):
            return True
    return False


def is_compiled(module: nn.Module) -> bool:
    """True if a call of a module runs what its `compile()` made."""
    return getattr(module, "_compiled_call_impl", None) is not None


def has_tensor_hooks(tensor: Tensor) -> bool:
    """True if a hook sees, or changes, the gradient of a tensor; it keeps them under a name that modules have too."""
    return any(getattr(tensor, name, None) for name in HOOKS)


def has_gradient_hooks(param: Tensor) -> bool:
    """True if a hook sees, or changes, the gradient of a parameter, or runs once it is accumulated."""
    return has_tensor_hooks(param) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def runs_forward_alone(module: nn.Module) -> bool:
    """True if a call of a module is one of its class's forward and of nothing else: there is no hook, of its own or of
    all modules, no forward of the object, and no compiled call."""
    for name in _GLOBAL_HOOKS:
        if getattr(torch_modules, name):
            return False
    return not (has_call_hooks(module) or is_compiled(module) or "forward" in vars(module))


_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre"))


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter by its name, or None where there is none. As an attribute it takes ten times as long."""
    return module._parameters.get(name)


def registered_parameters(module: nn.Module, names: Iterable[str]) -> list[nn.Parameter | None]:
    """`registered_parameter` of each name: of a layer of many experts a call for each would count."""
    registered = module._parameters
    return [registered.get(name) for name in names]


def registered_buffers(module: nn.Module, names: Iterable[str]) -> list[Tensor | None]:
    """`registered_buffer` of each name."""
    registered = module._buffers
    return [registered.get(name) for name in names]


def parameters_or_values(module: nn.Module, names: Iterable[str]) -> list[Any]:
    """What a module has under the names of parameters: these, None where it has none, or what a parametrization
    computes in the place of one. As attributes, but quick as `registered_parameter` is: each layer asks."""
    registered, found = module._parameters, []
    for name in names:
        found.append(registered[name] if name in registered else getattr(module, name))
    return found


def put_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Put a parameter in the place of another, as FSDP2 does where a class leaves `__setattr__` alone: at once, without
    what registering one looks at."""
    module._parameters[name] = param


def registered_buffer(module: nn.Module, name: str) -> Tensor | None:
    """A buffer by its name, or None where there is none; quick as `registered_parameter` is."""
    return module._buffers.get(name)


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Where `nn.Module` keeps the hooks of calls; in public they can be registered, but not listed."""

_LOAD_HOOKS = "_load_state_dict_pre_hooks"
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", _LOAD_HOOKS, "_load_state_dict_post_hooks")


def take_hooks(module: nn.Module, other: nn.Module) -> None:
    """Give a module the hooks of another, in whose place it comes: the tables themselves, which the handles of hooks
    refer to. It must have none of its own."""
    for name in (*HOOKS, *_STATE_HOOKS):
        assert not getattr(module, name), name
        setattr(module, name, getattr(other, name))
    module._is_full_backward_hook = other._is_full_backward_hook
    for hook in getattr(module, _LOAD_HOOKS).values():
        if getattr(hook, "with_module", False):
            vars(hook)["module"] = weakref.ref(module)


@contextmanager
def set_aside(module: nn.Module, kind: type[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters of this very module that are of a class of tensors; meanwhile it has None in their place, which
    `nn.Module._apply` passes over. In public they can be taken out, but not put back in their order."""
    taken = {name: param for name, param in module._parameters.items() if isinstance(param, kind)}
    module._parameters.update(dict.fromkeys(taken))
    try:
        yield list(taken.values())
    finally:
        module._parameters.update(taken)


@needs_attributes("the backward of fused layers")
def take_saved(ctx: Any) -> tuple[Any, ...]:
    """`ctx.saved_tensors` in the backward of an autograd function, which lets go of each as soon as its caller does.

    The public attribute leaves them with the graph until backward has returned. Where the graph is to be kept
    (`retain_graph=True`), so are they. It is what AOTAutograd calls in its own backward.
    """
    saved = tuple(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


def is_kept_output(x: Tensor) -> bool:
    """True if the operation that computed x, seen as it is here or in another shape, keeps it for its own backward.

    Attention does. A graph's nodes are public, and so are their names; what one keeps is told by its attributes
    (`_saved_...`), of which its class is asked: those of a node would unpack what it has kept.
    """
    node: Any = x.grad_fn
    output = x.output_nr
    while node is not None and node.name() in _VIEWS and _RECOMPUTED not in node.metadata:
        node, output = node.next_functions[0]
    if node is None or _RECOMPUTED in node.metadata:
        return False
    return output == 0 and hasattr(type(node), "_saved_output")


_VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose")}

_RECOMPUTED = "recomputed by quantshard"


def mark_recomputed(x: Tensor) -> None:
    """Say of what a checkpointed function has given that nothing of it is kept."""
    node: Any = x.grad_fn
    if node is not None and not torch.compiler.is_compiling():
        node.metadata[_RECOMPUTED] = True


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread. There is no public way to ask."""
    return current_backward() is not None


def current_backward() -> int | None:
    """The number of the backward pass that autograd runs on this thread, the innermost of several; None outside."""
    number: int = _task_id()
    return None if number == -1 else number


@needs_attributes("delayed scaling of gradients")
def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once when the backward pass now running ends. FSDP2 and DDP finish their work in the same way."""
    _engine.queue_callback(callback)


def is_traced(*tensors: Tensor | None) -> bool:
    """True while a graph is traced, or if one of the tensors has a shape but no values, as in tracing.

    Of `FakeTensor`, PyTorch's only name for such a tensor.
    """
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:  # a loop: each layer asks
        if isinstance(tensor, _fake_tensor):
            return True
    return False


def constant_in_graphs(function: Any) -> Any:
    """Let torch.compile call a function while it traces, and take its result for a constant.

    This is the mark that `torch.compiler.assume_constant_result` sets; that imports all of Dynamo to do so, a second of
    every process that starts, whether it compiles anything or not.
    """
    function._dynamo_marked_constant = True
    return function


def keep_address(tensor: Tensor) -> Tensor:
    """Tell torch.compile that a tensor which a function finds is not to be copied to another address, where a CUDA
    graph would have it: of another address there is another CUDA graph.

    This is the mark that `torch._dynamo.mark_static_address(tensor, guard=False)` sets; that imports all of Dynamo.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def keep_order(operator: Any) -> None:
    """Tell torch.compile that an operator does more than it returns: calls are neither dropped, merged nor reordered.

    torch.library has no public name for it yet. Such an operator cannot stand in a checkpointed part of a graph.
    Where it cannot be told, `check_order_is_kept` raises.
    """
    if missing(_register_effect, _ordered) is None:
        _register_effect(operator, _ordered)


def check_order_is_kept() -> None:
    """Called where such an operator is put into a graph: from now on Inductor cuts CUDA graphs at all such operators,
    since their replays would do nothing but what they return.

    It cuts at operators with the tag `cudagraph_unsafe`, but in a graph stands another around one that keeps its order
    (torch 2.11 to 2.13), which has no tags. What it puts in the list by name it knows with what it returns, unlike
    that of its option `custom_should_partition_ops`. Told in tracing: it takes a second to import.

    Raises:
        TorchVersionError: this version of PyTorch was not told of it.
    """
    inductor, unsafe = _inductor(), _unsafe()
    if (error := missing(_register_effect, _ordered, inductor, unsafe)) is not None:
        raise error
    inductor.FORBIDDEN_CUDAGRAPH_OPS = unsafe | {"with_effects"}


def is_recomputed_in_graph() -> bool:
    """True where torch.compile traces what checkpointing inside the graph may run again in backward."""
    return "recompute" in torch.fx.traceback.get_current_meta()
