"""`make_graphed_callables`: modules whose forward and backward are CUDA graphs, which a launch each replays.

What is looked at before anything runs stands here; the graphs themselves are of `module_graph.py`.
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
from quantshard.argument_kinds import suggests_names
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules import capture
from quantshard.modules.contexts import context, recompute
from quantshard.modules.graphs.arguments import GraphArguments
from quantshard.modules.graphs.module_graph import GraphOrder, GraphRecorder, ModuleGraph
from quantshard.recipe import Recipe

_CALL = "make_graphed_callables"
Callables = nn.Module | Callable[..., Any]


class GraphForward:
    """What stands in the place of a module's `forward`, or of a function: its graphs where they serve, else itself.

    Eagerly it runs in eval mode, without gradients, and where torch.compile or another capture takes the launches.
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
        """Give the module its own forward back; the graphs and their memory go when nothing else holds them."""
        if isinstance(self.subject, nn.Module) and vars(self.subject).get("forward") is self:
            del self.subject.forward

    def __reduce__(self) -> Any:
        return _eager, (self.subject,)  # a copy has other parameters than the graphs


def _eager(subject: Callables) -> Any:
    return subject.forward if isinstance(subject, nn.Module) else subject


@suggests_names
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
    """Capture the forward and the backward of modules as a CUDA graph each, which every later call replays.

    The host then launches two graphs and some copies for a layer, instead of hundreds of kernels; every bit is that of
    the eager module. A module is changed in place: its `forward` replays in training mode, and runs eagerly in eval
    mode and under `torch.no_grad()`; `module.forward.reset()` undoes it. Gradients go to `.grad` as always, so that
    they accumulate, and optimizers that write parameters in place, as all of quantshard's and of `torch.optim` do, step
    between the replays. Capturing leaves no trace: amax histories, counts of draws, random generators, buffers and
    `.grad` are as before. Draws are counted on the GPU from then on (`capturable_`).

    What is captured is fixed: shapes, dtypes and constants of the arguments, the recipe, which parameters are trained,
    and where they lie. A call that differs raises. Results lie in memory that the next call writes to: clone what is to
    be kept, and call backward before the next forward.

    Args:
        modules: a module or a function of tensors, or several, as the layers of a model, in the order in which they
            run: they share memory.
        sample_args: positional arguments, a tuple; of several callables a tuple of tuples. Tensors tell shape, dtype
            and `requires_grad` of those of later calls; they are copied, and may be given up.
        num_warmup_iters: how often each runs eagerly before.
        allow_unused_input: allow parameters and arguments that the outputs do not depend on.
        sample_kwargs: keyword arguments, a dict; of several callables a sequence of dicts.
        enabled: as in `autocast`, under which it is captured and is to be called; False outside of any autocast leaves
            it outside. Of several callables also one for each.
        recipe: as in `autocast`.
        amax_reduction_group: as in `autocast`.
        strict: as in `autocast`.
        pool: memory to share with other graphs (`torch.cuda.graph_pool_handle()`), which then run in turn with these:
            a backward raises if callables of another call ran since its forward; other graphs are not seen.

    Returns:
        The modules themselves, and in the place of each function one that replays; a tuple of several.

    Raises:
        ConfigurationError: an argument does not fit, or a module has hooks inside, is captured already, or is not on
            one GPU.
        UnsupportedOperationError: FSDP2 shards the parameters, or DDP is inside.
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
        inside = partial(entered, switches[index])
        graphs.append(ModuleGraph(_eager(subject), arguments, module, inside, allow_unused_input))
    owned = [subject for subject in subjects if isinstance(subject, nn.Module)]
    order = GraphOrder(len(graphs), pool)
    _capture(graphs, owned, GraphRecorder(device, pool), order, device, num_warmup_iters)
    made = [_replaced(subject, graph) for subject, graph in zip(subjects, graphs, strict=True)]
    return tuple(made) if several else made[0]


def _capture(
    graphs: Sequence[ModuleGraph],
    models: Sequence[nn.Module],
    recorder: GraphRecorder,
    order: GraphOrder,
    device: torch.device,
    times: int,
) -> None:
    """Run all of them once to see which draw random words, and once more by counts that a graph sees; then record."""
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
            for graph in reversed(graphs):  # as they run, so that each may use the memory of those that are done
                graph.capture_backward(recorder)


def _replaced(subject: Callables, graph: ModuleGraph) -> Any:
    forward = GraphForward(subject, graph)
    if not isinstance(subject, nn.Module):
        return forward
    setattr(subject, "forward", forward)  # noqa: B010 (a method to mypy)
    return subject


# Before --------------------------------------------------------------------------------------------------------------


def _name(subject: Callables, index: int, several: bool) -> str:
    of_type = type(subject).__name__
    kind = of_type if isinstance(subject, nn.Module) else getattr(subject, "__name__", of_type)
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
    """Arguments of each callable."""
    if not several:
        sample_args, sample_kwargs = (sample_args,), None if sample_kwargs is None else (sample_kwargs,)
    if sample_kwargs is None:
        sample_kwargs = [{} for _ in subjects]
    for name, given, kinds in (("sample_args", sample_args, tuple | list), ("sample_kwargs", sample_kwargs, Mapping)):
        fits = isinstance(given, tuple | list) and len(given) == len(subjects)
        if not fits or not all(isinstance(each, kinds) for each in given):
            each = "tuple of arguments" if name == "sample_args" else "dict of keyword arguments"
            raise ConfigurationError(
                f"{_CALL}({name}): give a {each}" + (f" for each of the {len(subjects)} callables" if several else "")
            )
    if not subjects or len({id(subject) for subject in subjects}) != len(subjects):
        raise ConfigurationError(f"{_CALL}: give callables, each of them once; a copy of a module may share parameters")
    return [tuple(each) for each in sample_args], [dict(each) for each in sample_kwargs]


def _switches(enabled: bool | Sequence[bool], count: int, several: bool) -> list[bool]:
    """`enabled` of each callable."""
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
    own = vars(subject).get("forward")
    if own is not None and getattr(own, "__self__", None) is not subject:
        raise ConfigurationError(f"{_CALL}: {name} has a forward that was set on it, by which it is not captured")
    if not subject.training:
        raise ConfigurationError(f"{_CALL}: {name} is in eval mode, where it runs eagerly; call train() first")
    _check_owners(subject, name)
    for path, module in subject.named_modules():
        inside = f"{name}.{path}" if path else name
        # hooks of the callable itself run outside of its graphs
        if private_torch.is_compiled(module) or (path and private_torch.has_call_hooks(module)):
            raise ConfigurationError(
                f"{_CALL}: {inside} has hooks or was compiled, and Python does not run in a replay; remove them, or "
                "capture without it"
            )
        if any(buffer.requires_grad for buffer in module.buffers(recurse=False)):
            raise ConfigurationError(f"{_CALL}: a buffer of {inside} requires gradients; make it a parameter")
        for key, param in module.named_parameters(recurse=False):
            if private_torch.has_tensor_hooks(param):
                raise ConfigurationError(
                    f"{_CALL}: {inside}.{key} has a hook, which would run in the graph and again outside of it; "
                    "register it after the capture"
                )
            if param.requires_grad and _is_in_graph(param):
                raise ConfigurationError(
                    f"{_CALL}: a graph of autograd holds {inside}.{key}, on a stream that is not captured; delete what "
                    "is left of earlier forwards (the loss), and wrap in DistributedDataParallel after the capture"
                )


def _is_in_graph(param: Tensor) -> bool:
    """True if something holds the node that accumulates a parameter's gradient, as graphs with it do: the backward of a
    capture would let the stream of that node wait, and could not end."""
    mark: Any = get_gradient_edge(param).node.metadata
    mark[_CALL] = True
    del mark
    found: Any = get_gradient_edge(param).node.metadata  # of a new node, unless the first one lives on
    return _CALL in found


def _check_owners(subject: nn.Module, name: str) -> None:
    """Refuse what is FSDP2's or DDP's."""
    sharded = {id(param) for param, _ in private_torch.sharded_parameters()}
    for module in subject.modules():
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedOperationError(limits.refusal("captured replicas", name))
        own = module.parameters(recurse=False)
        if (
            isinstance(module, FSDPModule)
            or any(id(param) in sharded for param in own)
            or private_torch.has_gathered_parameters(module)
        ):
            raise UnsupportedOperationError(limits.refusal("captured shards", name))


def _device(subjects: Sequence[Callables], samples: Sequence[Any]) -> torch.device:
    """The one GPU on which all is."""
    found = [param.device for subject in subjects if isinstance(subject, nn.Module) for param in subject.parameters()]
    waiting = list(samples)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value.device)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, tuple | list):
            waiting += value
    device = found[0] if found else torch.device("cpu")
    if device.type != "cuda" or any(each != device for each in found):
        raise ConfigurationError(
            f"{_CALL}: CUDA graphs are of one GPU, but parameters and sample arguments are on "
            f"{', '.join(sorted({str(each) for each in found})) or 'none'}; run eagerly elsewhere"
        )
    return device
