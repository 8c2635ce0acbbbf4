"""Private parts of modules, autograd and torch.compile."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from quantshard.private_torch.lookup import MissingName, missing, private_name, private_name_later

_task_id = private_name("torch._C._current_graph_task_id", "telling forward from backward, and so every layer,")
top_saved_tensor_hooks = private_name(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "recomputation by torch.utils.checkpoint of layers that are quantized",
)
_engine = private_name("torch.autograd.Variable._execution_engine", "delayed scaling of gradients")
_executes = private_name("torch._C._will_engine_execute_node", "weight gradients outside of autograd")
_active_ddp = private_name(
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module", "weight gradients outside of autograd"
)
_fake_tensor = private_name("torch._subclasses.fake_tensor.FakeTensor", "a layer on tensors without values")
_COMPILED = "torch.compile of a layer"
_inductor = private_name_later("torch._inductor.utils", _COMPILED)
_lowering = private_name_later("torch._inductor.lowering.add_needs_realized_inputs", "the speed of compiled layers")
_inductor_options = private_name_later("torch._inductor.config", "reading compiled layers from another process")
_unsafe = private_name_later("torch._inductor.utils.FORBIDDEN_CUDAGRAPH_OPS", _COMPILED)
_compile_times = private_name_later("torch._dynamo.utils.compilation_time_metrics", "graphs of compiled layers")
_disable = private_name("torch._disable_dynamo", _COMPILED)
_register_effect = private_name("torch._higher_order_ops.effects._register_effectful_op", _COMPILED)
_ordered = private_name("torch._higher_order_ops.effects._EffectType.ORDERED", _COMPILED)


def has_call_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def forward_hooks(module: nn.Module) -> list[Any]:
    """Hooks that see, or change, the inputs or outputs of a module's forward, as under FSDP2."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def is_compiled(module: nn.Module) -> bool:
    """True if a call of a module runs the result of its `compile()`, or the module is a result of torch.compile."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def accumulate_grad_hooks(param: Tensor) -> list[Any]:
    """Return the hooks that run after a gradient was added to `param.grad`; FSDP2 calls them for its shards."""
    return [*(param._post_accumulate_grad_hooks or {}).values()]  # type: ignore[attr-defined]


def has_tensor_hooks(tensor: Tensor) -> bool:
    """True if a tensor has hooks on its gradient. Tensors store them under a name that modules have too."""
    return any(getattr(tensor, name, None) for name in HOOKS)


def has_gradient_hooks(param: Tensor) -> bool:
    return has_tensor_hooks(param) or bool(accumulate_grad_hooks(param))


def runs_forward_alone(module: nn.Module) -> bool:
    """True if a call of a module runs only the forward of its class: without hooks, other forwards or compilation."""
    global_hooks = any(getattr(torch_modules, name) for name in _GLOBAL_HOOKS)
    return not (global_hooks or has_call_hooks(module) or is_compiled(module) or "forward" in vars(module))


_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre"))


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter by name, or None; ten times as fast as reading the attribute."""
    return module._parameters.get(name)


def registered_parameters(module: nn.Module, names: Iterable[str]) -> list[nn.Parameter | None]:
    """`registered_parameter` of each name, for layers with many experts."""
    return [module._parameters.get(name) for name in names]


def parameters_or_values(module: nn.Module, names: Iterable[str]) -> list[Any]:
    """Each parameter, None, or the result of a parametrization, as fast as `registered_parameter`."""
    registered, values = module._parameters, []
    for name in names:  # a loop is faster than a comprehension, and each layer calls this
        values.append(registered[name] if name in registered else getattr(module, name))
    return values


def put_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Replace a parameter without the checks of registration, as FSDP2 does unless a class overrides `__setattr__`."""
    module._parameters[name] = param


def registered_buffer(module: nn.Module, name: str) -> Tensor | None:
    """A buffer by name, or None; as fast as `registered_parameter`."""
    return module._buffers.get(name)


def registered_buffers(module: nn.Module, names: Iterable[str]) -> list[Any]:
    """`registered_buffer` of each name, for layers with many experts."""
    return [module._buffers.get(name) for name in names]


HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
"""Attributes in which `nn.Module` keeps the hooks of calls. The public API registers hooks, but does not list them."""

_LOAD_HOOKS = "_load_state_dict_pre_hooks"
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", _LOAD_HOOKS, "_load_state_dict_post_hooks")


def take_hooks(module: nn.Module, other: nn.Module) -> None:
    """Give a module without hooks the hooks of the one that it replaces: the tables, to which their handles refer."""
    for name in (*HOOKS, *_STATE_HOOKS):
        assert not getattr(module, name), name
        setattr(module, name, getattr(other, name))
    module._is_full_backward_hook = other._is_full_backward_hook
    for hook in getattr(module, _LOAD_HOOKS).values():
        if getattr(hook, "with_module", False):
            vars(hook)["module"] = weakref.ref(module)


@contextmanager
def set_aside(module: nn.Module, kind: type[Tensor]) -> Iterator[list[Tensor]]:
    """Replace a module's own parameters of a tensor class by None, which `nn.Module._apply` skips, and yield them."""
    params = {name: param for name, param in module._parameters.items() if isinstance(param, kind)}
    module._parameters.update(dict.fromkeys(params))
    try:
        yield list(params.values())
    finally:
        module._parameters.update(params)


def take_saved(ctx: Any) -> tuple[Any, ...]:
    """`ctx.saved_tensors`, which the graph releases now instead of after backward, unless `retain_graph=True`."""
    tensors = tuple(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return tensors


def is_kept_output(x: Tensor) -> bool:
    """True if the operation that computed x, or the tensor that x is a view of, saved its output for its own backward.
    Only the class of a node is inspected, since reading its attribute would unpack the saved tensor."""
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
    """Record that a checkpointed function saved nothing of its output `x`."""
    node: Any = x.grad_fn
    if node is not None and not torch.compiler.is_compiling():
        node.metadata[_RECOMPUTED] = True


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread."""
    return current_backward() is not None


def current_backward() -> int | None:
    """Number of the innermost backward pass that autograd runs on this thread, or None."""
    number: int = _task_id()
    return None if number == -1 else number


def may_be_checkpointed() -> bool:
    """True if the calling code can run in a checkpointed region: without gradients, under saved-tensor hooks, or in
    backward. Each call of a layer asks, and `checkpointed_regions` takes longer."""
    if _task_id() != -1 or not torch.is_grad_enabled():
        return True
    return type(top_saved_tensor_hooks) is not MissingName and top_saved_tensor_hooks(True) is not None


will_execute: Callable[[Any], bool] = _executes if type(_executes) is not MissingName else lambda node: True
"""Whether the running backward passes on a gradient to a node. RuntimeError: `torch.autograd.grad` returns that of a
leaf."""


def gradients_in_pass(ctx: Any) -> list[bool | None]:
    """For each tensor argument of an autograd function, whether the running backward passes on its gradient (None: it
    requires none). The context's `needs_input_grad` is the same in all passes."""
    edges: list[bool | None] = []
    for node, _ in ctx.next_functions:
        try:
            edges.append(None if node is None else will_execute(node))
        except RuntimeError:
            edges.append(True)
    return edges


def in_ddp_forward() -> bool:
    """True if DistributedDataParallel runs the calling code in its forward."""
    return missing(_active_ddp) is None and _active_ddp() is not None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, at the end of the current backward pass, as FSDP2 and DDP do."""
    _engine.queue_callback(callback)


def is_traced(*tensors: Tensor | None) -> bool:
    """True while a graph is traced, or if one of the tensors has a shape but no values, as in tracing."""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:  # a loop is faster than any(), and each layer calls this
        if isinstance(tensor, _fake_tensor):
            return True
    return False


def constant_in_graphs(function: Any) -> Any:
    """`torch.compiler.assume_constant_result` without the import of Dynamo, which takes a second."""
    function._dynamo_marked_constant = True
    return function


def put_in_graphs(function: Any) -> None:
    """Make Dynamo put calls of a function into its graphs, where AOTAutograd traces it; call this in tracing."""
    torch._dynamo.allow_in_graph(function)


def keep_in_caches(function: Any, version: str) -> None:
    """Let compile caches keep graphs with a function of `put_in_graphs`, whose code has a version, and `keep_order`."""
    if missing(options := _inductor_options()) is None:
        names = f"{function.__module__}.{function.__qualname__}", "torch.ops.higher_order.with_effects"
        options.unsafe_marked_cacheable_functions |= dict.fromkeys(names, version)


def define_operator(
    name: str, schema: str, body: Callable[..., Any], shapes: Callable[..., Any], *tags: torch.Tag
) -> Any:
    """Define and return the operator `quantshard::name` of graphs. `shapes`: makes its results without values."""
    full = f"quantshard::{name}"
    torch.library.define(full, schema, tags=tags)
    torch.library.impl(full, "default", body)
    torch.library.register_fake(full, shapes)
    return getattr(torch.ops.quantshard, name).default


def eager_in_graphs(reason: str) -> Callable[[Any], Any]:
    """`torch.compiler.disable(reason=)` without the import of Dynamo: a function that is called between graphs."""

    def decorate(function: Any) -> Any:
        if missing(_disable) is not None:
            return _disable  # its call raises
        outside = _disable(function)
        outside._torchdynamo_disable = True
        outside._torchdynamo_disable_msg = reason
        return outside

    return decorate


def keep_address(tensor: Tensor) -> Tensor:
    """`torch._dynamo.mark_static_address(tensor, guard=False)` without the import of Dynamo, for CUDA graphs."""
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def keep_order(operator: Any) -> None:
    """Register an operator's side effects, so that torch.compile does not drop, merge or reorder its calls.

    If this version of PyTorch cannot register them, `check_order_is_kept` raises.
    """
    if missing(_register_effect, _ordered) is None:
        _register_effect(operator, _ordered)


def without_dynamo(function: Any) -> Any:
    """A function whose calls Dynamo does not trace. The first call imports Dynamo."""
    return function if missing(_disable) is not None else _disable(function)


def num_compilations() -> int:
    """A number that grows whenever torch.compile compiles something in this process."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    times = _compile_times()
    return 0 if missing(times) else sum(map(len, times.values()))


def check_order_is_kept() -> None:
    """Make Inductor split CUDA graphs at operators of `keep_order`, as it does by the tag `cudagraph_unsafe`, which
    torch 2.11 to 2.13 hide in an operator without tags. Call this in tracing: the import takes a second."""
    inductor, unsafe = _inductor(), _unsafe()
    if (error := missing(_register_effect, _ordered, inductor, unsafe)) is not None:
        raise error
    inductor.FORBIDDEN_CUDAGRAPH_OPS = unsafe | {"with_effects"}


def write_inputs_once(operator: Any) -> None:
    """Make Inductor write each input of an operator to memory once, not once per call; call this in tracing."""
    if missing(add := _lowering()) is None:
        add(operator)


def is_recomputed_in_graph() -> bool:
    """True while torch.compile traces code that checkpointing inside the graph may run again in backward."""
    return "recompute" in torch.fx.traceback.get_current_meta()
