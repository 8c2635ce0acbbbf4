"""Reads: operations that write nothing return what they return for the dequantized values, also through DTensor."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils

import quantshard as qs
from quantshard import limits
from quantshard.errors import FallbackError, UnsupportedOperationError
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.reads import ReadOnlyView
from tests.tensor.test_tensor import CELLS, MXFP8, contents, differing, every_cell, same, weight

ROWS, COLS = 48, 40
X = torch.randn(5, COLS, generator=torch.Generator().manual_seed(3))

READS: dict[str, Callable[[Any], Any]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda w: torch.full_like(w, 3),
    "rand_like": torch.rand_like,
    "randn_like": lambda w: torch.randn_like(w, dtype=torch.float64),
    "norm": lambda w: w.norm(),
    "mean": lambda w: w.mean(),
    "mean of columns": lambda w: w.mean(dim=0),
    "std": lambda w: w.std(),
    "var": lambda w: torch.var(w, dim=1),
    "sum": lambda w: w.sum(),
    "abs max": lambda w: w.abs().max(),
    "isfinite": lambda w: torch.isfinite(w).all(),
    "isnan": lambda w: w.isnan().any(),
    "eq": lambda w: w == 0,
    "gt": lambda w: w > 0.1,
    "equal": lambda w: torch.equal(w, w),
    "mul": lambda w: w * 2,
    "rsub": lambda w: 1 - w,
    "linear": lambda w: F.linear(like(X, w), w),
    "matmul": lambda w: like(X, w) @ w.T,
    "slice": lambda w: w[:, 3:7],
    "step": lambda w: w[:, ::2],
    "select": lambda w: w[:, 1],
    "transpose": lambda w: w.transpose(0, 1),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "expand": lambda w: w.expand(2, -1, -1),
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, w], dim=1),
    "foreach norms": lambda w: torch._foreach_norm([w, w])[1],
    "total norm": lambda w: utils.get_total_norm([w, w]),
    "bool": lambda w: w.bool(),
    "plain.copy_": lambda w: torch.zeros_like(w).copy_(w),
    "plain.lerp_": lambda w: torch.ones_like(w).lerp_(w, 0.1),
    "plain.mul_": lambda w: torch.full_like(w, 0.5).mul_(w),
    "plain += alpha w": lambda w: torch.ones_like(w).add_(w, alpha=0.1),
}
"""Reads of a weight [48, 40], or its shard, that DTensor has a rule for."""

PLAIN_READS: dict[str, Callable[[Any], Any]] = {
    "allclose": lambda w: torch.allclose(w, w),
    "histc": lambda w: w.float().histc(10),
    "view": lambda w: w.view(COLS, ROWS),
    "reshape": lambda w: w.reshape(2, -1),
    "view dtype": lambda w: w.view(torch.uint8),
    "index": lambda w: w[[3, 1]],
    "row": lambda w: w[-1],
    "rows": lambda w: w[1:24],
    "unbind": lambda w: w.unbind()[2],
    "split sizes": lambda w: w.split([8, 40])[1],
    "embedding": lambda w: F.embedding(torch.tensor([4, 2]), w),
    "einsum": lambda w: torch.einsum("oi,bi->bo", w, X),
    "parameters_to_vector": lambda w: utils.parameters_to_vector([w, torch.ones(2, dtype=w.dtype)]),
    "item": lambda w: w[3, 3].item(),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.float().numpy().tobytes(),
    "asarray": lambda w: np.asarray(w.float()).sum(),
    "long": lambda w: w.long(),
    "foreach add": lambda w: torch._foreach_add([torch.ones_like(w)], [w], alpha=0.1)[0],
    "mul out": lambda w: torch.mul(w, 2, out=torch.empty(ROWS, COLS, dtype=w.dtype)),
    "repr": lambda w: repr(w[0])[-40:-1] if type(w) is Tensor else repr(w[0])[-41:-2],
}


def like(plain: Tensor, w: Tensor) -> Any:
    """A tensor that can be multiplied with a weight: a DTensor if the weight is one."""
    plain = plain.to(w.dtype)
    if not hasattr(w, "device_mesh"):
        return plain
    return torch.distributed.tensor.DTensor.from_local(plain, w.device_mesh, [torch.distributed.tensor.Replicate()])


def result_of(read: Callable[[Any], Any], w: Any) -> Any:
    torch.manual_seed(5)
    result = read(w)
    return result.to_local() if hasattr(result, "to_local") else result


def differing_reads(reads: dict[str, Callable[[Any], Any]], w: Any, values: Any) -> list[str]:
    """Names of the reads that return something else for a weight than for its values."""
    names = []
    for name, read in reads.items():
        result, expected = result_of(read, w), result_of(read, values)
        if isinstance(expected, Tensor):
            is_view = isinstance(result, ReadOnlyView)
            equal = (is_view or type(result) is Tensor) and same(result.dequantize() if is_view else result, expected)
        else:
            equal = type(result) is type(expected) and result == expected
        if not equal:
            names.append(name)
    return names


@every_cell
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_read_is_the_operation_on_the_values(cell: Any, mode: Any) -> None:
    tensor = weight(cell, ROWS, COLS)
    before, values = contents(tensor), tensor.dequantize()
    with mode():
        assert differing_reads({**READS, **PLAIN_READS}, tensor, values) == []
    assert not differing(before, contents(tensor))


@pytest.mark.filterwarnings("ignore:aten.*reads the dequantized values")
def test_gradients_reach_the_weight() -> None:
    x = X.bfloat16().requires_grad_()
    for read in (
        lambda w: F.linear(x, w, torch.ones(ROWS, dtype=w.dtype)),
        lambda w: x @ w.t() + w[:, 0] * w.norm(),
        lambda w: torch.cat([w.view(-1), w[3:7].flatten()]).sin(),
        lambda w: torch.compile(lambda x, w: F.linear(x, w) + w[:, 3], backend="aot_eager", fullgraph=True)(x, w),
    ):
        param = nn.Parameter(weight(MXFP8, ROWS, COLS, dtype=torch.bfloat16))
        plain = nn.Parameter(param.dequantize().detach())
        grads = []
        for w in (param, plain):
            x.grad = None
            read(w).square().sum().backward()
            grads.append((w.grad, x.grad))
        for grad, expected in zip(*grads, strict=True):
            assert expected is None or same(grad, expected)


def test_float_returns_plain_values_in_float32() -> None:
    """The values are not rounded to bfloat16 first. A parameter stays quantized, as `nn.Module.float()` needs it."""
    tensor = weight(CELLS["current"], ROWS, COLS, dtype=torch.bfloat16)
    values = tensor.dequantize(dtype=torch.float32)
    for cast in (tensor.float(), nn.Parameter(tensor).detach().float()):
        assert type(cast) is Tensor and torch.equal(cast, values)
    assert not torch.equal(values, tensor.dequantize().float())
    assert type(tensor.half()) is Tensor and tensor.bfloat16().dtype == torch.bfloat16
    cast = nn.Parameter(tensor).float()
    assert isinstance(cast, QuantizedTensor) and cast.dtype == torch.float32 and torch.equal(cast.t(), values.t())


# Views ---------------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "w[0] = 1": lambda w: w.__setitem__(0, 1.0),
    "w[1:3] = 1": lambda w: w.__setitem__(slice(1, 3), 1.0),
    "w[:2] = plain": lambda w: w.__setitem__(slice(0, 2), torch.ones(2, COLS)),
    "w[0].zero_()": lambda w: w[0].zero_(),
    "w.data[0].zero_()": lambda w: w.data[0].zero_(),
    "w.T.add_": lambda w: w.T.add_(1),
    "w.view(40, 48).copy_": lambda w: w.view(COLS, ROWS).copy_(torch.ones(COLS, ROWS)),
    "view of a view": lambda w: w.t()[0].detach().fill_(0),
    "foreach": lambda w: torch._foreach_mul_([w[0], w[1]], 2),
    "out": lambda w: torch.mul(torch.ones(COLS), 2, out=w[0]),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_to_a_view_raises(name: str, mode: Any) -> None:
    """It would change a copy, and no code."""
    param = nn.Parameter(weight(MXFP8, ROWS, COLS))
    before = contents(param)
    with mode(), pytest.raises(UnsupportedOperationError, match=r"view of its values.*requantize_\(\[\(parameter"):
        WRITES[name](param)
    assert not differing(before, contents(param))


def test_copies_of_a_view_are_plain() -> None:
    view = weight(MXFP8, ROWS, COLS)[3]
    for copied in (view.clone(), copy.deepcopy(view), pickle.loads(pickle.dumps(view)), view.dequantize(), view.half()):
        assert type(copied) is Tensor and torch.equal(copied.zero_(), torch.zeros(COLS))


# Strict mode and the warning -----------------------------------------------------------------------------------------


def test_strict_mode_rejects_reads() -> None:
    tensor = weight(MXFP8, ROWS, COLS)
    for read in (torch.Tensor.norm, lambda w: w[0], lambda w: F.linear(X, w), torch.zeros_like(tensor).copy_):
        with qs.autocast(recipe="mxfp8", strict=True), pytest.raises(FallbackError) as caught:
            read(tensor)
        assert str(limits.FALLBACKS["read"]) in str(caught.value)
        with qs.autocast(recipe="mxfp8"), torch.no_grad():
            read(tensor)
    with qs.autocast(recipe="mxfp8", strict=True):
        tensor.dequantize().norm()
        torch.zeros_like(tensor)  # as FSDP2 calls it in backward


def test_a_product_outside_of_a_module_warns_once() -> None:
    param = nn.Parameter(weight(MXFP8, ROWS, COLS))
    with torch.no_grad():
        F.linear(X, param)
    param.norm(), param[0]
    with pytest.warns(UserWarning, match="aten.mm.default .*reads the dequantized values") as caught:
        for _ in range(2):
            F.linear(X, param)
    assert len(caught) == 1


# Pickle --------------------------------------------------------------------------------------------------------------


@every_cell
def test_pickle_keeps_every_bit(cell: Any) -> None:
    tensor = weight(cell, ROWS, COLS, dtype=torch.bfloat16, keep_high_precision=True)
    param = nn.Parameter(tensor)
    param.tag = "kept"  # type: ignore[attr-defined]
    file = io.BytesIO()
    torch.save([param, param], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded[0] is loaded[1] and isinstance(loaded[0], nn.Parameter) and loaded[0].tag == "kept"
    for twin in (pickle.loads(pickle.dumps(param)), loaded[0]):
        assert type(twin) is QuantizedTensor and twin.dtype == torch.bfloat16 and twin.requires_grad
        assert not differing(contents(param), contents(twin))
        assert torch.equal(twin.get_high_precision_init_val(), tensor.get_high_precision_init_val())
    assert copy.copy(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_pickled_model_trains_on(recipe: str) -> None:
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(qs.Linear(64, 64), qs.LayerNormMLP(64, 128))

    def losses(model: nn.Module) -> list[float]:
        optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2)
        result = []
        for step in range(3):
            with qs.autocast(recipe=recipe):
                loss = model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result

    losses(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert losses(torch.load(file, weights_only=False)) == losses(model)


# Other libraries -----------------------------------------------------------------------------------------------------


def test_wandb_and_tensorboard_log_weights(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with qs.quantized_model_init(recipe="mxfp8"):
        model = qs.Linear(64, 64)
    logged: dict[str, Any] = {}
    history = wandb.integration.torch.wandb_torch.TorchHistory()
    run = type("Run", (), {"_log": lambda self, row, commit: logged.update(row), "history": None})()
    monkeypatch.setattr(wandb, "run", run)
    history.log_tensor_stats(model.weight.data, "weight")
    assert logged
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        writer.add_histogram("weight", model.weight)
