"""Kernel launches in compiled graphs: each becomes one small operator, which Inductor schedules like any other.

While AOTAutograd traces eager code (`traced_launches`), `launch_kernel` adds an operator to the graph instead:

    launch(str program, Tensor(a!)[] written, Tensor[] read)

or `launch_drawing`, which no CUDA graph contains, for a launch that reads numbers on the CPU (`HostNumber`). A program
is the pickled kernel, grid and Python expression of the arguments, so another process can run a graph from a compile
cache. Dynamo rejects tuples as arguments of PyTorch's `triton_op`.
"""

import base64
import importlib
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantshard.kernels import tracing
from quantshard.kernels.quantize.targets import StoredBytes

_WRITTEN: dict[tuple[str, str], list[list[str]]] = {}
"""(module, name) of a kernel -> paths of the arguments that it writes."""
_WRITTEN_FIELDS: dict[type, frozenset[str]] = {}


def writes(kernel: Any, *paths: str) -> None:
    """Declare the tensors that a kernel writes; `writes_fields` does so for fields of named tuples.

    A path is the name of a parameter, followed by positions in tuples: "matrices.*.1" is the second entry of each.
    """
    _WRITTEN[kernel.fn.__module__, kernel.fn.__name__] = [path.split(".") for path in paths]


def writes_fields(kind: type, *fields: str) -> None:
    _WRITTEN_FIELDS[kind] = frozenset(fields)


@contextmanager
def traced_launches(step: Any = None) -> Iterator[None]:
    """Make launches on this thread operators of the graph that is traced. `step`: its `GraphStep`."""
    before = tracing.on, tracing.step
    tracing.on, tracing.step = True, step
    try:
        yield
    finally:
        tracing.on, tracing.step = before


class HostNumber:
    """An integer argument of a launch: an entry of a tensor on the CPU, which each run of a graph reads.

    Kernels must not be specialized for such arguments (`do_not_specialize`), because a graph keeps compiled variants.
    """

    def __init__(self, numbers: Tensor, row: int, column: int) -> None:
        self.numbers, self.row, self.column = numbers, row, column


class LaunchArguments:
    """Expressions of a launch's arguments in terms of `constants` and of the tensors, `written` and `read`."""

    def __init__(self, kernel: Any) -> None:
        self.written_paths = _WRITTEN[kernel.fn.__module__, kernel.fn.__name__]
        self.written: list[Tensor] = []
        self.read: list[Tensor] = []
        self.constants: list[Any] = []
        self.has_numbers = False

    def expression(self, value: Any, path: Sequence[str], is_written: bool = False) -> str:
        """Return the expression of `value`, at `path`. `is_written`: it is a written field of a named tuple."""
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", None)
            if fields is None:
                return f"({''.join([f'{self.expression(item, (*path, str(n)))}, ' for n, item in enumerate(value)])})"
            written_fields = _WRITTEN_FIELDS.get(type(value), ())
            items = [
                self.expression(item, (*path, field), field in written_fields)
                for field, item in zip(fields, value, strict=True)
            ]
            return f"{self._constant(type(value))}({', '.join(items)})"  # kernels read fields of its class
        if type(value) is HostNumber:
            self.has_numbers = True
            return f"int({self._tensor(value.numbers, False)}[{value.row}, {value.column}])"
        as_bytes = type(value) is StoredBytes
        if not (as_bytes or isinstance(value, Tensor)):
            return self._constant(value)
        is_written = is_written or any(
            len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True))
            for pattern in self.written_paths
        )
        tensor = self._tensor(value.base if as_bytes else value, is_written)
        return f"StoredBytes({tensor})" if as_bytes else tensor

    def _tensor(self, tensor: Tensor, is_written: bool) -> str:
        for name, tensors in (("written", self.written), ("read", self.read)):
            for index, other in enumerate(tensors):
                if other is tensor:
                    assert name == "written" or not is_written, "a kernel writes a tensor that it also reads"
                    return f"{name}[{index}]"
        name, tensors = ("written", self.written) if is_written else ("read", self.read)
        tensors.append(tensor)
        return f"{name}[{len(tensors) - 1}]"

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"constants[{len(self.constants) - 1}]"


def record(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]) -> None:
    key = kernel.fn.__module__, kernel.fn.__name__
    arguments = LaunchArguments(kernel)
    values = [arguments.expression(value, (name,)) for name, value in zip(kernel.arg_names, args, strict=False)]
    # compiled: a call for each argument would take the host longer than the launch
    source = f"lambda written, read: ({''.join(f'{value}, ' for value in values)})"
    pickled = pickle.dumps((key, tuple(map(int, grid)), source, arguments.constants, options))
    launch = torch.ops.quantshard.launch_drawing if arguments.has_numbers else torch.ops.quantshard.launch
    launch(base64.b85encode(zlib.compress(pickled)).decode(), arguments.written, arguments.read)


def _sum_rows(x: Tensor) -> Tensor:
    return x.sum(0)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    # an operator may not return its argument
    return x.to(dtype, copy=True)


def sum_rows(x: Tensor) -> Tensor:
    """x.sum(0), in the order of eager code: Inductor would add in another order."""
    total: Tensor = torch.ops.quantshard.sum_rows(x) if tracing.on else _sum_rows(x)
    return total


def register(launch_of: Callable[..., Callable[[list[Tensor], list[Tensor]], None]]) -> None:
    @lru_cache(4096)
    def decoded(program: str) -> Callable[[list[Tensor], list[Tensor]], None]:
        (module, name), grid, source, constants, options = pickle.loads(zlib.decompress(base64.b85decode(program)))
        arguments_of = eval(source, {"constants": constants, "StoredBytes": StoredBytes})
        return launch_of(getattr(importlib.import_module(module), name), grid, arguments_of, options)

    def launch(program: str, written: list[Tensor], read: list[Tensor]) -> None:
        decoded(program)(written, read)

    def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Any = ()) -> None:
        torch.library.define(f"quantshard::{name}", schema, tags=tags)
        torch.library.impl(f"quantshard::{name}", "default", run)
        torch.library.register_fake(f"quantshard::{name}", fake)

    define("sum_rows", "(Tensor x) -> Tensor", _sum_rows, _sum_rows)
    define("rounded", "(Tensor x, ScalarType dtype) -> Tensor", _rounded, _rounded)
    for name, tags in (("launch", ()), ("launch_drawing", (torch.Tag.cudagraph_unsafe,))):
        schema = "(str program, Tensor(a!)[] written, Tensor[] read) -> ()"
        define(name, schema, launch, lambda program, written, read: None, tags)
