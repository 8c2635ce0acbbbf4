"""Each private name of PyTorch taken away by itself: plain training goes on, and what needs it raises by its name.

Runs on 1 rank, so that there are sharded parameters too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import ScalingType
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard import checkpoints, private_torch
from quantshard.checkpoints import Manager
from quantshard.errors import CheckpointError, QuantshardError, TorchVersionError
from quantshard.private_torch import lookup
from quantshard.tensor import components
from tests.distributed.pool import run_ranks
from tests.private_torch.test_lookup import CENTRAL

pytestmark = pytest.mark.distributed


@contextlib.contextmanager
def without(path: str) -> Iterator[None]:
    """Within it private_torch is as if this version of PyTorch had no such name."""
    found, missing = lookup.resolve_name(path), lookup.MissingName(path, lookup.NAMES[path])
    changed: list[tuple[Any, str, Any]] = []
    files = [
        file for name, file in sys.modules.items() if name.startswith(private_torch.__name__) and file is not lookup
    ]
    for file in files:
        for name, value in list(vars(file).items()):
            # a class method is another object each time that it is looked up
            if value is found or (isinstance(value, types.MethodType) and value == found):
                changed.append((file, name, value))
                setattr(file, name, missing)
            elif isinstance(value, functools.partial) and value.args[:1] == (path,):  # a name that is looked up later
                changed.append((file, name, value))
                setattr(file, name, lambda: missing)
            elif isinstance(value, tuple) and any(each is found for each in value):
                changed.append((file, name, value))
                setattr(file, name, tuple(missing if each is found else each for each in value))
    assert changed, f"{path} is nowhere"
    try:
        yield
    finally:
        for file, name, value in changed:
            setattr(file, name, value)


def built(recipe: str = "mxfp8", sharded: bool = False) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(qs.Linear(32, 32), qs.Linear(32, 32))
    if sharded:
        for module in (*model, model):
            fully_shard(module)
    return model, qs.optimizers.FusedAdam(model.parameters(), lr=1e-3)


def trained(recipe: str = "mxfp8", sharded: bool = False, region: Any = None) -> list[float]:
    """Losses of two steps."""
    model, optimizer = built(recipe, sharded)
    losses = []
    for _ in range(2):
        with qs.autocast(recipe=recipe):
            x = torch.ones(4, 32, requires_grad=True)
            loss = (model(x) if region is None else region(model, x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(folder: Path, **options: Any) -> None:
    manager = Manager(folder / "run", **options)
    try:
        manager.save(0, *built())
        manager.wait()
    finally:
        manager.close()


def loaded(folder: Path) -> None:
    checkpoints.load(folder / "loads", *built())


def sharded_state(folder: Path) -> None:
    built(sharded=True)[0].state_dict()


def compiled(folder: Path) -> None:
    """What torch.compile runs instead of an operator while it traces."""
    with FakeTensorMode():
        torch.ops.quantshard.record_forward_amaxes()


def wrapped(folder: Path) -> None:
    model, _ = built()
    model[0] = checkpoint_wrapper(model[0])
    assert components.named_parameters(model).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def offset(folder: Path) -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (1,))
    return private_torch.global_offset(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))


def fake(folder: Path) -> None:
    with FakeTensorMode():
        assert private_torch.is_traced(torch.ones(2))


def product(folder: Path) -> None:
    """Of tensors on a CPU, which torch 2.11 has no such product for."""
    codes, one, whole = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(()), (ScalingType.TensorWise.value,)
    with contextlib.suppress(NotImplementedError):
        private_torch.scaled_mm(codes, codes.t(), [one], whole, (), [one], whole, (), None, torch.bfloat16, (), False)


_DCP, _DTENSOR, _CHECKPOINT = "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.utils.checkpoint"
_RING = f"{_DTENSOR}.experimental._context_parallel._attention"
_RECOMPUTED: list[Callable[[Path], object]] = [
    lambda _: trained(region=partial(checkpoint, use_reentrant=False)),
    lambda _: trained(region=partial(checkpoint, use_reentrant=True)),
]


def planned(_: Path) -> object:
    with torch.device("meta"), qs.quantized_model_init(recipe="mxfp8"):
        model = torch.nn.Sequential(qs.Linear(64, 64, params_dtype=torch.bfloat16))
    inputs = qs.TrainingStep(
        2, 16, loss=lambda model, tokens, targets: model(tokens.bfloat16()[..., None].expand(2, 16, 64)).sum()
    )
    return qs.plan(model, {}, step=inputs)


def ring(_: Path) -> None:
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    private_torch.ring_attention(q, q, q, dist.group.WORLD, "flash", True, None).sum().backward()


def shared(_: Path) -> None:
    with private_torch.shared_sequences(init_device_mesh("cpu", (1,)), "allgather", torch.ones(1, 4)):
        pass


def snapshot(_: Path) -> None:
    try:
        private_torch.begin_memory_history(torch.device("cpu"))
        private_torch.end_memory_history(None)
    except TorchVersionError:
        raise
    except (AttributeError, RuntimeError):  # PyTorch without CUDA has the functions, and nothing below them
        pass


USES: dict[str, list[Callable[[Path], object]]] = {
    "torch._scaled_mm_v2": [product],
    "torch.autograd.Variable._execution_engine": [lambda _: trained("delayed")],
    "torch._subclasses.fake_tensor.FakeTensor": [fake],
    "torch.utils._python_dispatch": [planned],
    "torch._higher_order_ops.effects._register_effectful_op": [compiled],
    "torch._higher_order_ops.effects._EffectType.ORDERED": [compiled],
    "torch._inductor.utils": [compiled],
    "torch._inductor.utils.FORBIDDEN_CUDAGRAPH_OPS": [compiled],
    "torch.distributed._composable_state._module_state_mapping": [lambda _: built()[0][0].reset_parameters()],
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": [lambda _: qs.explain(built(sharded=True)[0])],
    "torch._C._autograd._top_saved_tensors_default_hooks": _RECOMPUTED,
    "torch._C._autograd._pop_saved_tensors_default_hooks": _RECOMPUTED,
    "torch._C._autograd._push_saved_tensors_default_hooks": _RECOMPUTED,
    f"{_CHECKPOINT}._CheckpointFrame": _RECOMPUTED,
    f"{_CHECKPOINT}._checkpoint_hook": _RECOMPUTED,
    f"{_CHECKPOINT}._recomputation_hook": _RECOMPUTED,
    f"{_CHECKPOINT}.CheckpointFunction.forward.__code__": _RECOMPUTED,
    f"{_CHECKPOINT}.CheckpointFunction.backward.__code__": _RECOMPUTED,
    f"{_DCP}._state_dict_stager.StateDictStager": [partial(saved, async_="thread")],
    f"{_DCP}.filesystem._StorageInfo": [loaded],
    f"{_DCP}._nested_dict.flatten_state_dict": [loaded],
    f"{_DCP}.state_dict_saver._save_state_dict": [saved],
    f"{_DCP}.state_dict_loader._load_state_dict": [loaded],
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_PREFIX": [wrapped],
    f"{_DTENSOR}._dtensor_spec.DTensorSpec": [sharded_state],
    f"{_DTENSOR}._dtensor_spec.TensorMeta": [sharded_state],
    f"{_DTENSOR}._utils._compute_local_shape_and_global_offset": [offset],
    f"{_RING}._cp_options": [lambda _: private_torch.rotates_by_all_to_all(), ring],
    f"{_RING}._templated_ring_attention": [ring],
    f"{_RING}._templated_ring_attention_backward": [ring],
    f"{_RING}.context_parallel": [shared],
    f"{_RING}.set_rotate_method": [shared],
    f"{_DTENSOR}.placement_types._StridedShard": [
        lambda _: private_torch.is_strided_over(_StridedShard(0, split_factor=2), 2)
    ],
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": [
        lambda _: private_torch.plain(AsyncCollectiveTensor(torch.ones(2)))
    ],
    "torch.cuda.memory._record_memory_history": [snapshot],
    "torch.cuda.memory._dump_snapshot": [snapshot],
    "torch._assert_async": [lambda _: private_torch.assert_on_device(torch.ones(()), "never")],
    "torch.distributed.distributed_c10d._resolve_process_group": [
        lambda _: private_torch.process_group(dist.group.WORLD.group_name)
    ],
    "torch._has_compatible_shallow_copy_type": [lambda _: private_torch.takes_data(torch.ones(1), torch.ones(1))],
}
"""What needs each name. It works where nothing is missing, and raises the name without it."""

SILENT = {
    "torch._disable_dynamo": "a compiled layer without kernels raises an error",
    "torch._scaled_mm": "on a GPU a compiled layer raises an error",
    "torch._inductor.config": "graphs of compiled layers are not read from another process",
    "torch._inductor.lowering.add_needs_realized_inputs": "compiled layers write an input more than once",
    "torch._dynamo.utils.compilation_time_metrics": "a captured step does not wait for compilations",
    "torch._C._will_engine_execute_node": "zero-bubble schedules compute products again",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module": "main_grad under DDP is not refused",
    "torch._C._set_throw_on_mutable_data_ptr": "C++ code that reads from a null pointer crashes in place of an error",
}
"""Names without which nothing is lost but words."""


def each_name(ranks: int) -> list[str]:
    """What goes on in silence though a name is missing, or fails though it is not needed."""
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        checkpoints.save(Path(name, "loads"), *built(), {"step": 1})
        expected = trained()
        for path, uses in USES.items():
            for number, use in enumerate(uses):
                use(Path(tempfile.mkdtemp(dir=name)) if use is not loaded else Path(name))
                with without(path):
                    if trained() != expected:
                        wrong.append(f"{path}: plain training has other losses")
                    try:
                        use(Path(tempfile.mkdtemp(dir=name)) if use is not loaded else Path(name))
                        wrong.append(f"{path}: use {number} raises nothing")
                    except QuantshardError as error:
                        if f"has no {path}, without which {lookup.NAMES[path]} cannot work" not in str(error):
                            wrong.append(f"{path}: use {number} raises {error}")
                        if isinstance(error, CheckpointError) or isinstance(error, TorchVersionError):
                            continue
                        wrong.append(f"{path}: use {number} raises {type(error)}")
        for path in SILENT:
            with without(path):
                assert trained() == expected
    return wrong


def test_a_missing_name_costs_its_feature_alone() -> None:
    """1 rank."""
    assert USES.keys() | SILENT.keys() | set(CENTRAL) == lookup.NAMES.keys()
    (wrong,) = run_ranks(1, each_name, 1)
    assert not wrong, "\n".join(wrong)
