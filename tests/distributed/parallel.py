"""What the tests of tensor parallelism run on each rank: operands cut into pieces, and layers cut over a group.

A rank returns what it found wrong instead of raising, so that the others are not left waiting in a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from quantshard import numerics, recipe, sharding
from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit
from quantshard.recipe import QuantSpec
from quantshard.sharding import Shard
from quantshard.tensor.parameter_state import GRADIENT_STREAM, STREAMS_PER_RANK
from quantshard.tensor.storage import QuantizedStorage
from tests.distributed.models import RECIPES
from tests.oracle import encode_scales, scales

CELLS: tuple[QuantSpec, ...] = tuple(
    dict.fromkeys(cell for name in RECIPES.values() for cell in recipe.resolve(name).table.values())
)
"""Every cell of every recipe's table, weights' too."""

KEY = 0x1234_5678_9ABC_DEF0


class Wire(TorchDispatchMode):
    """Counts the collectives that this rank calls, and the bytes that it gives to each: (kind, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        if namespace in ("c10d", "_c10d_functional"):
            given = args[0] if "allreduce" in name else args[1]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            self.calls.append((name.split(".")[0].strip("_"), sum(t.numel() * t.itemsize for t in tensors)))
        return func(*args, **(kwargs or {}))


def words_of(shard: Shard, stream: int = GRADIENT_STREAM, device: str = "cpu") -> Tensor:
    return numerics.random_words(KEY, 3, stream, shard.global_shape, shard.origin, shard.shape, device=device)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but for those of NaN."""
    if a.is_floating_point() and a.shape == b.shape:
        nan = torch.isnan(a)
        return torch.equal(nan, torch.isnan(b)) and torch.equal(a[~nan], b[~nan]) and a.dtype == b.dtype
    return torch.equal(a, b) and a.dtype == b.dtype


# Operands cut into pieces


@dataclass(frozen=True)
class Piece:
    """An operand that is cut along `dim`, and the shape of a rank's piece; `bad`: NaN and infinity are in one piece."""

    cell: QuantSpec
    shape: tuple[int, int]
    dim: int
    dtype: torch.dtype
    bad: bool = False
    device: str = "cpu"

    def whole(self, ranks: int) -> Tensor:
        rows, cols = self.shape
        sizes = (rows * ranks, cols) if self.dim == 0 else (rows, cols * ranks)
        generator = torch.Generator().manual_seed(sum(sizes))
        values = torch.randn(sizes, generator=generator)
        values *= torch.arange(sizes[0]).remainder(5).exp2()[:, None] * torch.arange(sizes[1]).remainder(7).exp2()
        if self.bad:
            values[0, 0], values[1, 0] = float("nan"), float("inf")
        values = values.to(self.device, self.dtype)
        return values if self.dim == 0 else values.t().contiguous().t()  # as wgrad turns an activation

    def separable(self, ranks: int) -> bool:
        """What `operands.gathers_codes` must say, written down once more."""
        cols = self.shape[1]
        four_bits = self.cell.format.components[0].encoding.bits == 4
        mixed = (self.cell.scaling.random_hadamard and cols % 16 > 0) or (four_bits and cols % 2 > 0)
        return ranks == 1 or self.dim == 0 or not mixed


def oracle(values: Tensor, cell: QuantSpec, amax: Tensor | None) -> QuantizedStorage:
    """The whole, quantized by `numerics` alone."""
    padded = numerics.hadamard16(values) if cell.scaling.random_hadamard else values
    shard = sharding.whole((padded.shape[0], padded.shape[1]))
    if amax is None:
        words = dict.fromkeys(Orientation, words_of(shard, device=str(values.device)))
        return QuantizedStorage(cell, shard, numerics.quantize(values, cell.format, cell.scaling, words=words))
    grids = {"scale_inv": amax.view(1, 1)}
    parts = scales(grids, cell.format, cell.scaling, values.dtype)
    multipliers = encode_scales(grids, cell.format, cell.scaling, values.dtype)
    codes = numerics.quantize_codes(values, cell.format.copies[Orientation.ROWWISE], multipliers)
    return QuantizedStorage(cell, shard, parts | {"codes": codes})


class Checks:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def that(self, right: bool, *what: object) -> None:
        if not right:
            self.wrong.append(" ".join(map(str, what)))

    def equal(self, found: QuantizedStorage, expected: QuantizedStorage, *what: object) -> None:
        self.that(found.components.keys() == expected.components.keys(), *what, "components")
        for name, part in expected.components.items():
            self.that(same(found.components[name], part), *what, name)
            self.that(found.components[name].is_contiguous(), *what, name, "is a view of something larger")
        self.that(found.shard == expected.shard, *what, "shard", found.shard)


def quantized_in_pieces(cases: list[Piece]) -> list[str]:
    """What is wrong with the pieces of each case, with what is gathered from them, and with what goes over the wire."""
    checks = Checks()
    for case in cases:
        one_operand(case, checks)
    return checks.wrong


def one_operand(case: Piece, checks: Checks) -> None:
    ranks, rank, cell, dim = dist.get_world_size(), dist.get_rank(), case.cell, case.dim
    split, values = OperandSplit(dim, dist.group.WORLD), case.whole(ranks)
    chunk = case.shape[dim]
    piece = values.narrow(dim, rank * chunk, chunk)
    amax = torch.tensor(3.0, device=case.device) if cell.scaling.history else None
    expected = oracle(values, cell, amax)
    separable = case.separable(ranks)
    checks.that(operands.gathers_codes(cell, case.shape, split) == separable, case, "gathers_codes")

    def draw(shard: Shard) -> Tensor:
        checks.that(cell.scaling.stochastic_rounding, case, "words are asked for in vain")
        return words_of(shard, device=case.device)

    if separable:
        with Wire() as measuring:
            local = operands.quantize_operand(piece, cell, amax=amax, words=draw, split=split)
        of_whole = expected if ranks == 1 else expected.piece(dim, rank * chunk, chunk).map(Tensor.contiguous)
        checks.equal(local, of_whole, case, "piece")
        with Wire() as gathering:
            checks.equal(operands.gather(local, split), expected, case, "gathered")
        check_wire(case, local, measuring, gathering, checks)
    else:
        with Wire() as wire:
            try:
                operands.quantize_operand(piece, cell, split=split)
            except ConfigurationError as error:
                checks.that("need a multiple of" in str(error), case, error)
            else:
                checks.that(False, case, "is not refused")
        checks.that(not wire.calls, case, wire.calls)
    with Wire() as both:
        found = quantized_whole(piece, cell, split, amax=amax, words=draw)
    checks.equal(found, expected, case, "quantized_whole")
    if separable:
        checks.that(both.calls == measuring.calls + gathering.calls, case, both.calls)
    else:
        checks.that(both.calls == [("allgather_base", piece.numel() * piece.itemsize)], case, both.calls)


def quantized_whole(piece: Tensor, cell: QuantSpec, split: OperandSplit, **options: Any) -> QuantizedStorage:
    """A matrix of which each rank has a piece: codes are gathered, or values where codes cannot be."""
    if operands.gathers_codes(cell, (piece.shape[0], piece.shape[1]), split):
        return operands.gather(operands.quantize_operand(piece, cell, split=split, **options), split)
    return operands.quantize_operand(operands.gather(piece, split), cell, **options)


def check_wire(case: Piece, local: QuantizedStorage, measuring: Wire, gathering: Wire, checks: Checks) -> None:
    """One reduction of what ranks share, unless that is nothing; one gather of what they do not."""
    ranks = dist.get_world_size()
    shared = sent = 0
    for component in case.cell.format.components:
        part = local.components[component.name]
        blocks = component.block_shape[case.dim]
        whole_grid = blocks > 1 << 32 or (component.role != "codes" and case.shape[case.dim] % blocks > 0)
        if whole_grid:
            shared += part.numel() * 4  # amaxes
        else:
            sent += part.numel() * part.itemsize
    if ranks == 1 or case.cell.scaling.history:
        shared = 0
    if ranks == 1:
        sent = 0
    checks.that(measuring.calls == [("allreduce", shared)] * (shared > 0), case, measuring.calls, shared)
    checks.that(gathering.calls == [("allgather_base", sent)] * (sent > 0), case, gathering.calls, sent)


def wire_of(cell: QuantSpec, shape: tuple[int, int], dim: int) -> list[tuple[str, int]]:
    """What ranks communicate to quantize a matrix from bfloat16 pieces."""
    with Wire() as wire:
        quantized_whole(
            torch.randn(shape, dtype=torch.bfloat16), cell, OperandSplit(dim, dist.group.WORLD), words=words_of
        )
    return wire.calls


# Random words


def rounded_by_group(cell: QuantSpec) -> dict[str, Any]:
    """A gradient of each data-parallel rank, cut over its tensor-parallel group (dp 2, tp 2), and its number."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = mesh.get_local_rank("dp")
    split = OperandSplit(0, mesh.get_group("tp"))
    base = tensor_parallel.stream_base(mesh.get_group("tp"))
    rows = gradient_of(data)
    found = quantized_whole(
        rows.chunk(2)[split.rank], cell, split, words=lambda shard: words_of(shard, stream_of(base))
    )
    return {
        "data": data,
        "tp": base,
        "dp": tensor_parallel.stream_base(mesh.get_group("dp")),
        "index in tp": split.rank,
        "world": tensor_parallel.stream_base(dist.group.WORLD),
        "codes": found.components["codes"],
    }


def gradient_of(data: int) -> Tensor:
    return torch.randn(10, 24, generator=torch.Generator().manual_seed(data))


def stream_of(base: int) -> int:
    return base * STREAMS_PER_RANK + GRADIENT_STREAM


# Layers cut over a group


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """-1, 0 and 1, of which also the sums of products below are exact in any order."""
    values = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_()


def block(tensors: dict[str, Tensor], w1: Tensor, w2: Tensor, tp: TensorParallel) -> Tensor:
    """A norm's weight, a column-parallel layer, a product, a row-parallel layer with bias, a residual connection."""
    if not tp.sequence_parallel:
        u = tensor_parallel.copy_to_group(tensors["x"] * tensors["gamma"], tp)
        z = u @ w1.t()
        return tensor_parallel.reduce_from_group((z * z) @ w2.t(), tp) + tensors["bias"] + tensors["x"]
    x = tensor_parallel.split_rows(tensors["x"], tp)
    u = tensor_parallel.gather_rows(x * tensor_parallel.all_reduce_gradient(tensors["gamma"], tp), tp)
    z = u @ w1.t()
    y = (
        tensor_parallel.scatter_rows((z * z) @ w2.t(), tp)
        + tensor_parallel.all_reduce_gradient(tensors["bias"], tp)
        + x
    )
    return tensor_parallel.join_rows(y, tp)


def block_gradients(rows: int, sequence_parallel: bool, penalty: bool, device: str, alone: bool) -> dict[str, Tensor]:
    """The block's output and gradients, those of the weights whole; `alone`: of one process that has all of it."""
    group = None if alone else dist.group.WORLD
    tp = TensorParallel.of(group, "column", sequence_parallel)
    shapes = {"x": (rows, 2, 5), "gamma": (5,), "bias": (5,)}
    tensors = {name: integers(*shape, seed=len(name), device=device) for name, shape in shapes.items()}
    w1, w2 = integers(7, 5, seed=7, device=device), integers(5, 7, seed=8, device=device)  # pieces of 7 are uneven
    cut1, cut2 = w1.tensor_split(tp.size)[tp.rank], w2.tensor_split(tp.size, 1)[tp.rank]
    out = block(tensors, cut1, cut2, tp)
    loss = (out * out * integers(rows, 2, 5, seed=9, device=device).detach()).sum()
    if penalty:
        (dx,) = torch.autograd.grad(loss, tensors["x"], create_graph=True)
        loss = (dx * dx).sum()
    loss.backward()
    for w in (w1, w2):
        if not alone and w.grad is not None:
            dist.all_reduce(w.grad)  # zero outside of this rank's piece
    named = {"out": out.detach(), "w1": w1.grad, "w2": w2.grad, **{name: t.grad for name, t in tensors.items()}}
    return {name: t for name, t in named.items() if t is not None}


def layers_cut(rows: list[int], device: str = "cpu") -> list[str]:
    """What differs between a block that is cut over the ranks and one that is not."""
    checks = Checks()
    for number in rows:
        for sequence_parallel in (False, True):
            for penalty in (False, True):
                args = (number * dist.get_world_size(), sequence_parallel, penalty, device)
                expected, found = block_gradients(*args, alone=True), block_gradients(*args, alone=False)
                checks.that(expected.keys() == found.keys(), args, found.keys())
                for name, value in expected.items():
                    checks.that(torch.equal(found[name], value), args, name)
    return checks.wrong


OPERATIONS = {
    "copy": tensor_parallel.copy_to_group,
    "reduce": tensor_parallel.reduce_from_group,
    "gather_rows": tensor_parallel.gather_rows,
    "scatter_rows": tensor_parallel.scatter_rows,
    "split_rows": tensor_parallel.split_rows,
    "join_rows": tensor_parallel.join_rows,
    "all_reduce_gradient": tensor_parallel.all_reduce_gradient,
}


def one_by_one(dtype: torch.dtype, rows: int, device: str = "cpu") -> dict[str, Any]:
    """Each operation of [rows, 2, 3], the same values on each rank but for a factor rank + 1."""
    tp = TensorParallel.of(dist.group.WORLD, sequence_parallel=True)
    found = {}
    for name, operation in OPERATIONS.items():
        x = (integers(rows, 2, 3, seed=8, dtype=dtype, device=device) * (tp.rank + 1)).detach().requires_grad_()
        with Wire() as forward:
            out = operation(x, tp)
        grad = torch.arange(out.numel(), device=device).remainder(5).view(out.shape).to(out.dtype) * (tp.rank + 1)
        with Wire() as backward:
            out.backward(grad)
        assert x.grad is not None
        kept = {"out": out.detach().cpu(), "grad": x.grad.cpu(), "given": grad.cpu(), "x": x.detach().cpu()}
        found[name] = kept | {"forward": forward.calls, "backward": backward.calls}
        found[name]["is a view"] = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return found


def refusals(rows: int) -> list[str]:
    """The errors of rows that cannot be divided; no rank waits for another."""
    tp = TensorParallel.of(dist.group.WORLD, sequence_parallel=True)
    said = []
    for operation in (tensor_parallel.scatter_rows, tensor_parallel.split_rows):
        try:
            operation(torch.zeros(rows, 4), tp)
        except ConfigurationError as error:
            said.append(str(error))
    return said
