"""What a transformer layer keeps for backward, tensor by tensor, and the most memory of a forward and backward.

    python benchmarks/memory.py [--recipes delayed,current,block] [--layers 4] [--hidden 256] [--ffn 896] [--heads 8]
        [--kv-heads 2] [--tokens 1024]

Needs no GPU: kernels and scaled products do nothing (`host.without_device`), but memory is asked for as on a GPU that
has all of these products. (One that is emulated dequantizes its operands besides.) Sizes are bytes for a token, of the
storages of tensors, without weights, their gradients, and the input of the first layer. Layers are those of
block_step.py, and taken for large ones (`operands.LARGE`); "recomputed" is with recompute_activation=True. A GPU's
allocator rounds sizes up.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import host  # the first: it says that kernels are to be interpreted
from benchmarks.block_step import Ours, Shape, data

import quantshard as qs  # isort: skip
from quantshard.gemm import operands  # isort: skip
from quantshard.tensor.quantized_tensor import QuantizedTensor  # isort: skip

SMALL = Shape(layers=4, hidden=256, ffn=896, heads=8, kv_heads=2, batch=1, tokens=1024, device="cpu")
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
SCALARS = 1024
"""Storages up to so many bytes are not counted: scales, and amaxes, of whole tensors."""


class Kept(NamedTuple):
    """A storage that backward will read: which function of the library saved it, its dtype, and bytes for a token."""

    step: str
    dtype: torch.dtype
    bytes: float


class Peak(NamedTuple):
    """Bytes for a token of all layers: when forward is through, and the most while backward runs."""

    kept: float
    most: float


class _Piece:
    def __init__(self, storage: torch.UntypedStorage, born: int) -> None:
        self.reference, self.bytes, self.born, self.died = StorageWeakRef(storage), storage.nbytes(), born, sys.maxsize


class Timeline(TorchDispatchMode):
    """When which storages of results of operations are made, and are gone; but for those of what is `given`."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now, self.pieces, self._live = 0, list[_Piece](), dict[int, _Piece]()
        self._given = {_address(tensor): tensor for tensor in given}  # held: an address is another's later

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.look()
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, QuantizedTensor):
                self._add(tensor.untyped_storage())
        return out

    def look(self) -> None:
        """Note what is gone by now."""
        self.now += 1
        for address in [address for address, piece in self._live.items() if piece.reference.expired()]:
            self._live.pop(address).died = self.now

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() <= SCALARS:
            return
        piece = _Piece(storage, self.now)
        address = piece.reference.cdata
        if address not in self._live and address not in self._given:
            self._live[address] = piece
            self.pieces.append(piece)

    def held(self, moment: int, without: set[int]) -> int:
        """Bytes that lived at a moment, but for storages of these addresses that live still."""
        left = {id(piece) for address, piece in self._live.items() if address in without}
        return sum(p.bytes for p in self.pieces if p.born <= moment < p.died and id(p) not in left)


@mock.patch.object(operands, "LARGE", 0)
def kept(recipe: str, recomputes: bool = False, shape: Shape = SMALL) -> list[Kept]:
    """What the second of two layers keeps, in the order in which it is saved, but for scalars and the angles."""
    model, x, _ = _made(recipe, recomputes, dataclasses.replace(shape, layers=2))
    found: dict[int, Kept] = {}
    held: list[Tensor] = []  # so that no address is another's

    def pack(tensor: Tensor) -> Tensor:
        storage = None if isinstance(tensor, QuantizedTensor) else tensor.untyped_storage()
        if storage is not None and storage.nbytes() > SCALARS and storage.data_ptr() not in found:
            size = storage.nbytes() / (shape.batch * shape.tokens)
            found[storage.data_ptr()] = Kept(_saving_step(), tensor.dtype, size)
            held.append(tensor)
        return tensor

    first, second = model.layers
    with host.without_device(), qs.autocast(recipe=recipe):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = first(x, rotary_pos_emb=model.angles)
            before = len(found)
            second(y, rotary_pos_emb=model.angles)
    return list(found.values())[before:]


def _saving_step() -> str:
    """The function of the library, or of PyTorch's attention, that calls the operation whose tensors are saved."""
    frame: Any = sys._getframe(2)
    while "quantshard/modules" not in frame.f_code.co_filename:
        frame = frame.f_back
    name: str = frame.f_code.co_name
    return name


@mock.patch.object(operands, "LARGE", 0)
def peak(recipe: str, recomputes: bool = False, shape: Shape = SMALL) -> Peak:
    """Of one step."""
    model, x, dy = _made(recipe, recomputes, shape)
    with host.without_device(), Timeline([x, dy, *model.state_dict().values(), *model.buffers()]) as timeline:
        with qs.autocast(recipe=recipe):
            y = model(x)
        timeline.look()
        forward = timeline.now
        y.backward(dy)
    gradients = {_address(p.grad) for p in model.parameters() if p.grad is not None}
    tokens = shape.batch * shape.tokens
    most = max(timeline.held(moment, gradients) for moment in range(forward, timeline.now + 1))
    return Peak(timeline.held(forward, gradients) / tokens, most / tokens)


def _address(tensor: Tensor) -> int:
    found: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return found


def _made(recipe: str, recomputes: bool, shape: Shape) -> tuple[Ours, Tensor, Tensor]:
    torch.manual_seed(0)
    return Ours(shape, recipe, "flash", recomputes), *data(shape)


def tables(recipes: list[str], shape: Shape) -> Iterator[str]:
    """In Markdown."""
    ways = [(recipe, recomputes) for recipe in recipes for recomputes in (False, True)]
    yield "| recipe | kept by a layer: function, dtype, bytes for a token | together |"
    yield "|---|---|---|"
    for recipe, recomputes in ways:
        found = kept(recipe, recomputes, shape)
        told = "; ".join(f"{each.step} {str(each.dtype)[6:]} {each.bytes:g}" for each in found)
        yield f"| {recipe}{', recomputed' * recomputes} | {told} | {sum(each.bytes for each in found):g} |"
    yield ""
    yield f"| recipe | bytes for a token kept by {shape.layers} layers | most in backward |"
    yield "|---|---|---|"
    for recipe, recomputes in ways:
        found_peak = peak(recipe, recomputes, shape)
        yield f"| {recipe}{', recomputed' * recomputes} | {found_peak.kept:g} | {found_peak.most:g} |"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(SMALL, name))
    asked = vars(parser.parse_args(given))
    recipes = asked.pop("recipes").split(",")
    for line in tables(recipes, dataclasses.replace(SMALL, **asked)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
