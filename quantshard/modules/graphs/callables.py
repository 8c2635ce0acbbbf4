"""`make_graphed_callables`: captures modules so that a CUDA graph replays each forward and each backward.

This file checks everything before anything runs; `module_graph.py` has the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules import capture
from quantshard.modules.contexts import context, recompute
from quantshard.modules.graphs.arguments import GraphArguments
from quantshard.modules.graphs.module_graph import GraphOrder, GraphRecorder, ModuleGraph
from quantshard.recipe import Recipe

_CALL = "make_graphed_callables"
Callables = nn.Module | Callable[..., Any]


class GraphForward:
    """Replaces a module's `forward`, or a function: replays its graphs if possible, otherwise calls the original.

    It runs eagerly in eval mode, without gradients, under torch.compile, and during another capture.
    """

    def __init__(self, subject: Callables, graph: ModuleGraph) -> None:
        self.subject, self.graph = subject, graph
        self.eager = graph.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or kernel_dispatch.is_capturing():
            return self.eager(*args, **kwargs)
        if isinstance(self.subject, nn.Module) and not self.subject.training:
            return self.eager(*args, **kwargs)
        if recompute.in_region():
            raise UnsupportedOperationError(limits.refusal("captured region", self.graph.owner))
        return self.graph(args, kwargs)

    def reset(self) -> None:
        """Restore the module's own forward. The graphs and their memory are freed when nothing else refers to them."""
        if isinstance(self.subject, nn.Module) and vars(self.subject).get("forward") is self:
            del self.subject.forward

    def __reduce__(self) -> Any:
        # a copy has other parameters than the graphs
        return _eager, (self.subject,)


def _eager(subject: Callables) -> Any:
    return subject.forward if isinstance(subject, nn.Module) else subject


def make_graphed_callables(
    modules: Callables | Sequence[Callables],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    enabled: bool | Sequence[bool] = True,
    recipe: str | Recipe | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    strict: bool = False,
    pool: Any = None,
) -> Any:
    """Capture the forward and the backward of each module as a CUDA graph that later calls replay.

    The host then launches two graphs and a few copies per layer instead of hundreds of kernels. The results have the
    bits of the eager module. A module is changed in place: its `forward` replays in training mode, and runs eagerly in
    eval mode and under `torch.no_grad()`; `module.forward.reset()` undoes the change.

    Gradients accumulate in `.grad` as usual. Optimizers that update parameters in place, such as quantshard's and those
    in `torch.optim`, can step between replays. Capturing leaves amax histories, draw counters, random generators,
    buffers and `.grad` unchanged. From then on the GPU counts random draws (`capturable_`).

    A graph fixes shapes, dtypes and constants of the arguments, the recipe, which parameters are trained, and their
    addresses. A call that differs raises. The next call overwrites the results: clone results that you keep, and call
    backward before the next forward.

    Args:
        modules: a module or a function of tensors, or several of them, such as the layers of a model, in the order in
            which they run. They share memory.
        sample_args: tuple of positional arguments; for several callables a tuple of tuples. The tensors fix shape,
            dtype and `requires_grad` for later calls. They are copied, and can be freed.
        num_warmup_iters: number of eager runs of each callable before the capture.
        allow_unused_input: allow parameters and arguments that the outputs do not depend on.
        sample_kwargs: dict of keyword arguments; for several callables a sequence of dicts.
        enabled: see `autocast`. The callables are captured and must be called under such an autocast; with False
            outside of any autocast, no autocast is entered. For several callables this can be a sequence.
        recipe: see `autocast`.
        amax_reduction_group: see `autocast`.
        strict: see `autocast`.
        pool: memory pool to share with other graphs (`torch.cuda.graph_pool_handle()`), which must then run in turn
            with these. A backward raises if callables of another `make_graphed_callables` call ran since its forward;
            graphs from elsewhere are not detected.

    Returns:
        The modules themselves, and a replaying function in place of each function; a tuple for several callables.

    Raises:
        ConfigurationError: an argument does not fit, or a module has inner hooks, is already captured, or is not on one
            GPU.
        UnsupportedOperationError: FSDP2 shards the parameters, or a module contains DDP.
    """
    several = isinstance(modules, tuple | list | nn.ModuleList)
    subjects: list[Callables] = list(modules) if isinstance(modules, Iterable) and several else [modules]  # type: ignore[list-item]
    names = [_name(subject, index, several) for index, subject in enumerate(subjects)]
    args, kwargs = _samples(subjects, sample_args, sample_kwargs, several)
    context.check_flags(_CALL, strict=strict, allow_unused_input=allow_unused_input)
    switches = _switches(enabled, len(subjects), several)
    _check_surroundings(num_warmup_iters)
    for subject, name in zip(subjects, names, strict=True):
        _check(subject, name)
    device = _device(subjects, [*args, *kwargs])

    def entered(switch: bool) -> AbstractContextManager[Any]:
        if not switch and not context.in_autocast():
            return nullcontext()
        return context.autocast(switch, recipe=recipe, amax_reduction_group=amax_reduction_group, strict=strict)

    graphs = []
    for index, subject in enumerate(subjects):
        module = subject if isinstance(subject, nn.Module) else None
        arguments = GraphArguments(names[index], args[index], kwargs[index])
        make_context = partial(entered, switches[index])
        graphs.append(ModuleGraph(_eager(subject), arguments, module, make_context, allow_unused_input))
    models = [subject for subject in subjects if isinstance(subject, nn.Module)]
    order = GraphOrder(len(graphs), pool)
    _capture(graphs, models, GraphRecorder(device, pool), order, device, num_warmup_iters)
    results = [_replaced(subject, graph) for subject, graph in zip(subjects, graphs, strict=True)]
    return tuple(results) if several else results[0]


def _capture(
    graphs: Sequence[ModuleGraph],
    models: Sequence[nn.Module],
    recorder: GraphRecorder,
    order: GraphOrder,
    device: torch.device,
    times: int,
) -> None:
    """Run all callables once to see if they draw random words, run them again with draw counters that a graph can see,
    then record them."""
    with capture.states_preserved(models, device), recorder.warming():
        before = capture.draw_counts(models)
        for graph in graphs:
            graph.warm(1)
        draws = capture.draw_counts(models) != before
    with capture.capturable_unless_failed(models if draws else ()), capture.states_preserved(models, device):
        with recorder.warming():
            for graph in graphs:
                graph.warm(times)
        with recorder.recording():
            for index, graph in enumerate(graphs):
                graph.capture_forward(recorder, order, index, draws)
            # in the order of execution, so that a graph can reuse the memory of finished ones
            for graph in reversed(graphs):
                graph.capture_backward(recorder)


def _replaced(subject: Callables, graph: ModuleGraph) -> Any:
    forward = GraphForward(subject, graph)
    if not isinstance(subject, nn.Module):
        return forward
    setattr(subject, "forward", forward)  # noqa: B010 (a method to mypy)
    return subject


# Checks before a capture ---------------------------------------------------------------------------------------------


def _name(subject: Callables, index: int, several: bool) -> str:
    type_name = type(subject).__name__
    kind = type_name if isinstance(subject, nn.Module) else getattr(subject, "__name__", type_name)
    return f"{kind} ({index})" if several else kind


def _check_surroundings(num_warmup_iters: int) -> None:
    if isinstance(num_warmup_iters, bool) or not isinstance(num_warmup_iters, int) or num_warmup_iters < 1:
        raise ConfigurationError(
            f"{_CALL}(num_warmup_iters={num_warmup_iters!r}): kernels are compiled in a run before the capture; give 1 "
            "or more"
        )
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise ConfigurationError(
            f"{_CALL} under torch.autocast(cache_enabled=True): a graph would keep weights that were cast before; give "
            "torch.autocast(cache_enabled=False)"
        )


def _samples(
    subjects: Sequence[Callables], sample_args: Any, sample_kwargs: Any, several: bool
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and keyword arguments of each callable."""
    if not several:
        sample_args, sample_kwargs = (sample_args,), None if sample_kwargs is None else (sample_kwargs,)
    if sample_kwargs is None:
        sample_kwargs = [{} for _ in subjects]
    for name, samples, kinds in (("sample_args", sample_args, tuple | list), ("sample_kwargs", sample_kwargs, Mapping)):
        fits = isinstance(samples, tuple | list) and len(samples) == len(subjects)
        if not fits or not all(isinstance(item, kinds) for item in samples):
            item = "tuple of arguments" if name == "sample_args" else "dict of keyword arguments"
            raise ConfigurationError(
                f"{_CALL}({name}): give a {item}" + (f" for each of the {len(subjects)} callables" if several else "")
            )
    if not subjects or len({id(subject) for subject in subjects}) != len(subjects):
        raise ConfigurationError(f"{_CALL}: give callables, each of them once; a copy of a module may share parameters")
    return [tuple(item) for item in sample_args], [dict(item) for item in sample_kwargs]


def _switches(enabled: bool | Sequence[bool], count: int, several: bool) -> list[bool]:
    """Return `enabled` of each callable."""
    switches: list[Any] = list(enabled) if several and isinstance(enabled, tuple | list) else [enabled] * count
    if len(switches) != count:
        raise ConfigurationError(
            f"{_CALL}(enabled={enabled!r}): give one flag, or one for each of the {count} callables"
        )
    for switch in switches:
        context.check_flags(_CALL, enabled=switch)
    return switches


def _check(subject: Callables, name: str) -> None:
    if not isinstance(subject, nn.Module):
        if not callable(subject) or isinstance(subject, GraphForward):
            raise ConfigurationError(f"{_CALL}: {name} is no module or function that is not captured yet")
        return
    if isinstance(vars(subject).get("forward"), GraphForward):
        raise ConfigurationError(f"{_CALL}: {name} is captured already; call its forward.reset() first")
    forward = vars(subject).get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not subject:
        raise ConfigurationError(f"{_CALL}: {name} has a forward that was set on it, by which it is not captured")
    if not subject.training:
        raise ConfigurationError(f"{_CALL}: {name} is in eval mode, where it runs eagerly; call train() first")
    _check_owners(subject, name)
    for path, module in subject.named_modules():
        label = f"{name}.{path}" if path else name
        # hooks of the callable itself run outside of its graphs
        if private_torch.is_compiled(module) or (path and private_torch.has_call_hooks(module)):
            raise ConfigurationError(
                f"{_CALL}: {label} has hooks or was compiled, and Python does not run in a replay; remove them, or "
                "capture without it"
            )
        if any(buffer.requires_grad for buffer in module.buffers(recurse=False)):
            raise ConfigurationError(f"{_CALL}: a buffer of {label} requires gradients; make it a parameter")
        for key, param in module.named_parameters(recurse=False):
            if private_torch.has_tensor_hooks(param):
                raise ConfigurationError(
                    f"{_CALL}: {label}.{key} has a hook, which would run in the graph and again outside of it; "
                    "register it after the capture"
                )
            if param.requires_grad and _is_in_graph(param):
                raise ConfigurationError(
                    f"{_CALL}: a graph of autograd holds {label}.{key}, on a stream that is not captured; delete what "
                    "is left of earlier forwards (the loss), and wrap in DistributedDataParallel after the capture"
                )


def _is_in_graph(param: Tensor) -> bool:
    """Return True if something refers to the node that accumulates a parameter's gradient, as autograd graphs do. The
    captured backward would make the stream of that node wait, and the capture could not end."""
    mark: Any = get_gradient_edge(param).node.metadata
    mark[_CALL] = True
    del mark
    # a new node, unless something keeps the first one alive
    metadata: Any = get_gradient_edge(param).node.metadata
    return _CALL in metadata


def _check_owners(subject: nn.Module, name: str) -> None:
    """Raise if FSDP2 or DDP manages the parameters."""
    sharded = {id(param) for param in private_torch.sharded_parameters()}
    for module in subject.modules():
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedOperationError(limits.refusal("captured replicas", name))
        parameters = module.parameters(recurse=False)
        if (
            isinstance(module, FSDPModule)
            or any(id(param) in sharded for param in parameters)
            or private_torch.has_gathered_parameters(module)
        ):
            raise UnsupportedOperationError(limits.refusal("captured shards", name))


def _device(subjects: Sequence[Callables], samples: Sequence[Any]) -> torch.device:
    """Return the GPU that all parameters and samples are on."""
    devices = [param.device for subject in subjects if isinstance(subject, nn.Module) for param in subject.parameters()]
    pending = list(samples)
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            devices.append(value.device)
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, tuple | list):
            pending += value
    device = devices[0] if devices else torch.device("cpu")
    if device.type != "cuda" or any(item != device for item in devices):
        raise ConfigurationError(
            f"{_CALL}: CUDA graphs are of one GPU, but parameters and sample arguments are on "
            f"{', '.join(sorted({str(item) for item in devices})) or 'none'}; run eagerly elsewhere"
        )
    return device
