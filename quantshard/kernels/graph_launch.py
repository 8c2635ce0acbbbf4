"""Kernel launches in compiled graphs: each becomes one small operator, which Inductor schedules like any other.

While AOTAutograd traces eager code (`traced_launches`), `launch_kernel` adds an operator to the graph instead:

    launch(str program, Tensor(a!)[] written, Tensor[] read)

or `launch_drawing`, which no CUDA graph contains, for a launch that reads numbers on the CPU (`HostNumber`). A program
is the pickled kernel, grid and arguments with tensors replaced by their places, so another process can run a graph from
a compile cache. Dynamo rejects tuples as arguments of PyTorch's `triton_op`.
"""

import base64
import importlib
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

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


def written_paths(kernel: Any) -> list[list[str]]:
    return _WRITTEN[kernel.fn.__module__, kernel.fn.__name__]


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


class _NumberPlace(NamedTuple):
    """Place of a `HostNumber`. `position`: of its tensor in the list of tensors that are read."""

    position: int
    row: int
    column: int


class _TensorPlace(NamedTuple):
    """Place of a tensor argument in the lists of an operator. `as_bytes`: the kernel takes its bytes."""

    is_written: bool
    position: int
    as_bytes: bool


class _NamedTuple(NamedTuple):
    """A named tuple among the arguments, whose class a kernel reads fields of."""

    kind: type
    values: tuple[Any, ...]


class LaunchArguments:
    def __init__(self, written_paths: list[list[str]]) -> None:
        self.written_paths = written_paths
        self.written: list[Tensor] = []
        self.read: list[Tensor] = []
        self.has_numbers = False

    def template(self, value: Any, path: Sequence[str], is_written: bool = False) -> Any:
        """`value`, at `path`, with tensors replaced by places. `is_written`: it is a written field of a named tuple."""
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", None)
            if fields is None:
                return tuple([self.template(item, (*path, str(index))) for index, item in enumerate(value)])
            written_fields = _WRITTEN_FIELDS.get(type(value), ())
            return _NamedTuple(type(value), tuple([
                self.template(item, (*path, field), field in written_fields)
                for field, item in zip(fields, value, strict=True)
            ]))  # fmt: skip
        if type(value) is HostNumber:
            self.has_numbers = True
            return _NumberPlace(self._place(value.numbers, False, False).position, value.row, value.column)
        as_bytes = type(value) is StoredBytes
        if not (as_bytes or isinstance(value, Tensor)):
            return value
        is_written = is_written or any(
            len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True))
            for pattern in self.written_paths
        )
        return self._place(value.base if as_bytes else value, is_written, as_bytes)

    def _place(self, tensor: Tensor, is_written: bool, as_bytes: bool) -> _TensorPlace:
        for listed_as_written, tensors in ((True, self.written), (False, self.read)):
            for index, other in enumerate(tensors):
                if other is tensor:
                    assert listed_as_written or not is_written, "a kernel writes a tensor that it also reads"
                    return _TensorPlace(listed_as_written, index, as_bytes)
        tensors = self.written if is_written else self.read
        tensors.append(tensor)
        return _TensorPlace(is_written, len(tensors) - 1, as_bytes)


def record(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]) -> None:
    key = kernel.fn.__module__, kernel.fn.__name__
    arguments = LaunchArguments(written_paths(kernel))
    templates = [arguments.template(value, (name,)) for name, value in zip(kernel.arg_names, args, strict=False)]
    plain_grid = tuple([int(programs) for programs in grid])
    program = base64.b85encode(zlib.compress(pickle.dumps((key, plain_grid, templates, options)))).decode()
    operators = torch.ops.quantshard
    launch = operators.launch_drawing if arguments.has_numbers else operators.launch
    launch(program, arguments.written, arguments.read)


def _sum_rows(x: Tensor) -> Tensor:
    return x.sum(0)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    # an operator may not return its argument
    return x.to(dtype, copy=True)


def sum_rows(x: Tensor) -> Tensor:
    """x.sum(0), in the order of eager code: Inductor would add in another order."""
    total: Tensor = torch.ops.quantshard.sum_rows(x) if tracing.on else _sum_rows(x)
    return total


MOST_PROGRAMS: Final = 4096

ArgumentsOf = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Any, ...]]
"""Function that fills the tensors of a launch into the places of its arguments."""


def _decoded(program: str) -> tuple[Any, tuple[int, ...], ArgumentsOf, dict[str, Any]]:
    (module, name), grid, templates, options = pickle.loads(zlib.decompress(base64.b85decode(program)))
    constants: list[Any] = []
    # compiled: a call for each argument would take the host longer than the launch
    arguments_of = eval(
        f"lambda written, read: ({''.join(f'{_expression(template, constants)}, ' for template in templates)})",
        {"constants": constants, "StoredBytes": StoredBytes},
    )
    return getattr(importlib.import_module(module), name), grid, arguments_of, options


def _expression(template: Any, constants: list[Any]) -> str:
    """A Python expression of an argument in terms of the lists of tensors and of constants, which it appends to."""
    if type(template) is _TensorPlace:
        tensor = f"{'written' if template.is_written else 'read'}[{template.position}]"
        return f"StoredBytes({tensor})" if template.as_bytes else tensor
    if type(template) is _NumberPlace:
        return f"int(read[{template.position}][{template.row}, {template.column}])"
    if type(template) is _NamedTuple:
        constants.append(template.kind)
        kind = f"constants[{len(constants) - 1}]"
        return f"{kind}({', '.join(_expression(item, constants) for item in template.values)})"
    if type(template) is tuple:
        return f"({''.join(f'{_expression(item, constants)}, ' for item in template)})"
    constants.append(template)
    return f"constants[{len(constants) - 1}]"


def register(launch_of: Callable[..., Callable[[list[Tensor], list[Tensor]], None]]) -> None:
    @lru_cache(MOST_PROGRAMS)
    def decoded(program: str) -> Callable[[list[Tensor], list[Tensor]], None]:
        return launch_of(*_decoded(program))

    def launch(program: str, written: list[Tensor], read: list[Tensor]) -> None:
        decoded(program)(written, read)

    torch.library.define("quantshard::sum_rows", "(Tensor x) -> Tensor")
    torch.library.impl("quantshard::sum_rows", "default", _sum_rows)
    torch.library.register_fake("quantshard::sum_rows", _sum_rows)
    torch.library.define("quantshard::rounded", "(Tensor x, ScalarType dtype) -> Tensor")
    torch.library.impl("quantshard::rounded", "default", _rounded)
    torch.library.register_fake("quantshard::rounded", _rounded)
    for name, tags in (("launch", ()), ("launch_drawing", (torch.Tag.cudagraph_unsafe,))):
        full = f"quantshard::{name}"
        torch.library.define(full, "(str program, Tensor(a!)[] written, Tensor[] read) -> ()", tags=tags)
        torch.library.impl(full, "default", launch)
        torch.library.register_fake(full, lambda program, written, read: None)
