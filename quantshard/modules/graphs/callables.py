"""`make_graphed_callables`: captures modules so that a CUDA graph replays each forward and each backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from quantshard import limits, private_torch
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.contexts import context, settings
from quantshard.modules.graphs import recorder as recorders
from quantshard.modules.graphs.module_graph import GraphOrder, ModuleGraph
from quantshard.modules.graphs.recorder import GraphRecorder
from quantshard.recipe import Recipe

_CALL = "make_graphed_callables"
Callables = nn.Module | Callable[..., Any]


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

    The results have the bits of the eager module. A module is changed in place: its `forward` replays in training mode,
    and runs eagerly in eval mode and under `torch.no_grad()`; `module.forward.reset()` undoes the change. Gradients
    accumulate in `.grad` as usual, and optimizers that update parameters in place can step between replays.

    Capturing leaves amax histories, draw counters, random generators, buffers and `.grad` unchanged. From then on the
    GPU counts random draws (`capturable_`). A graph fixes shapes, dtypes and constants of the arguments, the recipe,
    which parameters are trained, and their addresses; a call that differs raises. The next call overwrites the results:
    clone results that you keep, and call backward before the next forward.

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
    """
    several = isinstance(modules, tuple | list | nn.ModuleList)

    def each(value: Any) -> list[Any]:
        return list(value) if several else [value]

    subjects, args = each(modules), each(sample_args)
    kwargs = [{} for _ in subjects] if sample_kwargs is None else each(sample_kwargs)
    switches: list[Any] = each(enabled) if isinstance(enabled, tuple | list) else [enabled] * len(subjects)
    fits = len(subjects) == len(args) == len(kwargs) == len(switches)
    if not fits or not all(isinstance(item, tuple | list) for item in args):
        raise ConfigurationError(f"{_CALL}: give one tuple of sample_args, sample_kwargs and enabled= per callable")
    settings.check_flags(_CALL, allow_unused_input=allow_unused_input)
    for switch in switches:
        settings.check_flags(_CALL, enabled=switch)
    recorders.check_autocast_cache(_CALL)
    names = [_name(subject, index, several) for index, subject in enumerate(subjects)]
    for subject, name in zip(subjects, names, strict=True):
        _check(subject, name)
    models = [subject for subject in subjects if isinstance(subject, nn.Module)]
    params = [param for model in models for param in model.parameters()]
    device = recorders.graph_device(_CALL, [*params, *recorders.tensors_in([args, kwargs])])

    def entered(switch: bool) -> AbstractContextManager[Any]:
        if not switch and not context.in_autocast():
            return nullcontext()
        return context.autocast(switch, recipe=recipe, amax_reduction_group=amax_reduction_group, strict=strict)

    graphs = [
        ModuleGraph(
            subject, names[i], (tuple(args[i]), dict(kwargs[i])), partial(entered, switches[i]), allow_unused_input
        )
        for i, subject in enumerate(subjects)
    ]
    order = GraphOrder(len(graphs), pool)
    _capture(graphs, models, GraphRecorder(device, pool), order, device, num_warmup_iters)
    results: list[Any] = []
    for subject, graph in zip(subjects, graphs, strict=True):
        if isinstance(subject, nn.Module):
            setattr(subject, "forward", graph)  # noqa: B010 (a method to mypy)
        results.append(subject if isinstance(subject, nn.Module) else graph)
    return tuple(results) if several else results[0]


def _capture(
    graphs: Sequence[ModuleGraph], models: Sequence[nn.Module], recorder: GraphRecorder, order: GraphOrder,
    device: torch.device, times: int,
) -> None:  # fmt: skip
    """Run all callables to see if they draw random words, again with counters for a graph, then record them."""
    with recorders.states_preserved(models, device), recorder.warming():
        before = recorders.draw_counts(models)
        for graph in graphs:
            graph.warm(1)
        draws = recorders.draw_counts(models) != before
    with recorders.states_preserved(models, device, capturable=draws):
        with recorder.warming():
            for graph in graphs:
                graph.warm(times)
        with recorder.recording():
            for index, graph in enumerate(graphs):
                graph.capture_forward(recorder, order, index, draws)
            # in the order of execution, so that a graph can reuse the memory of finished ones
            for graph in reversed(graphs):
                graph.capture_backward(recorder)


# Checks before a capture ---------------------------------------------------------------------------------------------


def _name(subject: Callables, index: int, several: bool) -> str:
    type_name = type(subject).__name__
    kind = type_name if isinstance(subject, nn.Module) else getattr(subject, "__name__", type_name)
    return f"{kind} ({index})" if several else kind


def _check(subject: Callables, name: str) -> None:
    if not isinstance(subject, nn.Module):
        if not callable(subject) or isinstance(subject, ModuleGraph):
            raise ConfigurationError(f"{_CALL}: {name} is no module or function that is not captured yet")
        return
    forward = vars(subject).get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not subject:
        raise ConfigurationError(f"{_CALL}: {name} is captured, or has another forward; call its forward.reset()")
    _check_not_sharded(subject, name)
    recorders.check_not_replicated(subject, name)
    for path, module in subject.named_modules():
        label = f"{name}.{path}" if path else name
        # hooks of the callable itself run outside of its graphs
        if private_torch.is_compiled(module) or (path and private_torch.has_call_hooks(module)):
            raise ConfigurationError(f"{_CALL}: {label} has hooks or was compiled, which replays ignore; remove them")
        for key, param in module.named_parameters(recurse=False):
            if private_torch.has_tensor_hooks(param):
                raise ConfigurationError(f"{_CALL}: {label}.{key} has a hook; register it after the capture")


def _check_not_sharded(subject: nn.Module, name: str) -> None:
    sharded = {id(param) for param in private_torch.sharded_parameters()}
    for module in subject.modules():
        if (
            isinstance(module, FSDPModule)
            or any(id(param) in sharded for param in module.parameters(recurse=False))
            or private_torch.has_gathered_parameters(module)
        ):
            raise UnsupportedOperationError(limits.refusal("captured shards", name))
