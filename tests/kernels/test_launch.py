"""Launches of kernels: what Triton compiled is called again for arguments of its kind, and those alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

from quantshard.kernels import launch
from quantshard.kernels.launch import launch_kernel

KNOWN_TRITON = launch.KNOWN_TRITON
pytestmark = pytest.mark.skipif(not KNOWN_TRITON, reason="all launches are Triton's own")


class Where(NamedTuple):
    """Arguments of a kernel."""

    out: Any
    rows: Any
    more: Any = None


class Constants(NamedTuple):
    """A constant of a kernel."""

    size: int
    rounds: bool = False


# Which compiled kernel is called -------------------------------------------------------------------------------------


def example(x, y, where, n, loose, H: tl.constexpr, SIZE: tl.constexpr, MORE: tl.constexpr = None):
    """What a kernel takes; nothing runs it."""


class Device:
    """In the place of Triton and a GPU: a kernel is compiled once for each of Triton's own keys, and calls are noted.

    `own`: how many launches were Triton's own. `direct`: those that were not, with the key that was compiled for.
    """

    def __init__(self) -> None:
        self.current, self.own, self.entered = 0, 0, [0]
        self.direct: list[tuple[Any, tuple[Any, ...]]] = []
        self.compiled: dict[Any, Any] = {}

    def key(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Triton's own key."""
        binder = create_function_from_signature(kernel.signature, kernel.params, BaseBackend)
        _, specialization, rest = binder(*args, **options)
        return self.current, tuple(specialization), str(sorted(rest.items()))

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """`JITFunction.run`."""
        self.own += 1
        key = self.key(kernel, args, options)
        if key not in self.compiled:
            compiled = self.compiled[key] = launch.CompiledKernel.__new__(launch.CompiledKernel)
            compiled.module, compiled.function, compiled.packed_metadata = None, len(self.compiled), (4, 1, 0)
            compiled._run = lambda *given: self.direct.append((key, given))
        return self.compiled[key]

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self.current = self.current, index
        self.entered[0] += 1
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(launch, "_VARIANTS", {})
    monkeypatch.setattr(launch, "current_device_index", lambda: found.current)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda i: 70 + i)))
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: found.run(kernel, *args, **options))
    return found


@pytest.fixture
def kernel() -> Any:
    return JITFunction(example, do_not_specialize=["loose"])


X = torch.zeros(64, dtype=torch.bfloat16)
BASE: dict[str, Any] = {
    "x": X, "y": None, "where": Where(X, 17), "n": 17, "loose": 3, "H": Constants(4), "SIZE": 32, "num_warps": 4,
    "device": torch.device("cuda", 0),
}  # fmt: skip
ANEW: list[dict[str, Any]] = [
    {},
    {"x": X[1:]},
    {"x": X.float()},
    {"x": X.view(torch.int16)},
    {"x": None},
    {"y": X},
    {"y": X[1:]},
    *({"n": n} for n in (1, 0, 2**31, 2**31 + 1, 2**63, True, 1.0, None)),
    *({"loose": n} for n in (2**31, 2**63, 0.5, X)),
    {"where": None},
    {"where": Where(X[1:], 17)},
    {"where": Where(X.float(), 17)},
    {"where": Where(None, 17)},
    {"where": Where(X, 1)},
    {"where": Where(X, 16)},
    {"where": Where(X, 2**31)},
    {"where": Where(X, 17, X)},
    {"where": Where(X, (17, 16))},
    {"where": Where(X, (16, 17))},
    {"where": Where(X, 17, Where(X, 17))},
    {"where": Where(X, 17, Where(X, 1))},
    {"H": Constants(8)},
    {"H": Constants(4, True)},
    {"H": None},
    {"SIZE": 64},
    {"num_warps": 8},
    {"maxnreg": 64},
    {"num_stages": 64},
    {"device": torch.device("cuda", 1)},
]
"""Arguments that differ from the base in what Triton compiles anew for, and each from the others."""
ALIKE: list[dict[str, Any]] = [
    {"x": X[8:]},
    {"x": torch.zeros(3, dtype=torch.bfloat16)},
    {"n": 18},
    {"n": -1},
    {"where": Where(X[16:], 19)},
    {"H": Constants(4)},
]
"""Arguments of the base's kind."""


def launched(kernel: Any, changes: dict[str, Any], grid: tuple[int, ...] = (5, 6)) -> tuple[tuple[Any, ...], dict]:
    options = BASE | changes
    args = tuple(options.pop(name) for name in ("x", "y", "where", "n", "loose", "H"))
    launch_kernel(kernel, grid, options.pop("device"), *args, **options)
    return args, options


def test_a_kernel_is_called_for_arguments_it_was_compiled_for(device: Device, kernel: Any) -> None:
    launched(kernel, {})  # makes the kernel known
    for changes in ANEW:
        launched(kernel, changes)
    assert device.own == len(ANEW) + 1 and not device.direct, "kinds of arguments are taken for one another"
    assert len(device.compiled) == len(ANEW), "Triton compiles some of these once"
    order = random.Random(0).choices(ANEW + ALIKE, k=300)
    for changes in order:
        args, options = launched(kernel, changes)
        key, given = device.direct[-1]
        with device.device((BASE | changes)["device"].index):
            assert key == device.key(kernel, args, options)
            assert given[:5] == (5, 6, 1, 70 + device.current, device.compiled[key].function)
        assert given[5:9] == ((4, 1, 0), None, None, None) and len(given) == 9 + len(kernel.params)
        assert all(one is other for one, other in zip(given[9:], args, strict=False))
    assert device.own == len(ANEW) + 1 and len(device.direct) == len(order)


def test_arguments_that_are_not_specialized_compile_nothing_anew(device: Device, kernel: Any) -> None:
    for loose in [1, 16, 17] * 3:
        launched(kernel, {"loose": loose})
    assert len(device.compiled) == 1 and device.own == 4 and len(device.direct) == 5


@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)], ids=len)
def test_a_grid_has_one_to_three_dims(device: Device, kernel: Any, grid: tuple[int, ...]) -> None:
    for _ in range(3):
        launched(kernel, {}, grid)
    assert device.direct[0][1][:3] == (*grid, 1, 1)[:3]


def test_the_device_of_the_tensors_is_made_the_current_one(device: Device, kernel: Any) -> None:
    for _ in range(3):
        launched(kernel, {"device": torch.device("cuda", 1)})
    assert device.entered == [3] and device.current == 0 and len(device.direct) == 1
    launched(kernel, {})
    assert device.entered == [3]


def watched(name: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a profiler or debugger look at launches."""
    runtime = launch.knobs.runtime

    def hook(*args: Any, **kwargs: Any) -> None:
        pass

    if name == "hook of the kernel":
        kernel.add_pre_run_hook(hook)
    elif name == "instrumentation":
        monkeypatch.setattr(launch.knobs.compilation, "instrumentation_mode", "print")
    elif name == "debug":
        monkeypatch.setattr(runtime, "debug", True)
    elif name.startswith("one of "):
        chain = getattr(runtime, name.removeprefix("one of "))
        monkeypatch.setattr(chain, "calls", chain.calls)  # the list is emptied by `unwatched`
        chain.add(hook)
    else:
        monkeypatch.setattr(runtime, name, hook)


HOOKS = ("launch_enter_hook", "launch_exit_hook")


@pytest.mark.parametrize(
    "name",
    ["hook of the kernel", "instrumentation", "debug", "add_stages_inspection_hook"]
    + [f"{of}{hook}" for hook in HOOKS for of in ("", "one of ")],
)
def test_launches_that_somebody_watches_are_of_triton(
    name: str, device: Device, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        launched(kernel, {})
    assert (device.own, len(device.direct)) == (2, 1)
    with monkeypatch.context() as patch:
        watched(name, kernel, patch)
        launched(kernel, {})
        assert (device.own, len(device.direct)) == (3, 1)
    kernel.pre_run_hooks.clear()
    for hook in HOOKS:
        getattr(launch.knobs.runtime, hook).calls.clear()
    launched(kernel, {})
    assert (device.own, len(device.direct)) == (3, 2)


def test_hooks_of_the_compilation_watch_no_launch(device: Device, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.knobs.runtime, "jit_post_compile_hook", lambda **told: None)
    for _ in range(3):
        launched(kernel, {})
    assert len(device.direct) == 1


def unknown_version(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "KNOWN_TRITON", False)


def of_amd(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def constants_first(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.params.reverse()


def other_result(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: run(*args, **options) and None)


def other_class(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "JITFunction", type("Other", (JITFunction,), {}))


@pytest.mark.parametrize("change", [unknown_version, of_amd, constants_first, other_result, other_class])
def test_what_is_not_known_is_launched_by_triton(
    change: Any, device: Device, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(kernel, monkeypatch)
    monkeypatch.setattr(Device, "key", lambda device, kernel, args, options: 0)
    for _ in range(4):
        launched(kernel, {})
    assert device.own == 4 and not device.direct


def test_arguments_by_name_are_bound_by_triton(device: Device, kernel: Any) -> None:
    launched(kernel, {})
    for _ in range(3):
        launch_kernel(kernel, (1,), BASE["device"], X, None, where=Where(X, 1), n=1, loose=2, H=None, SIZE=1)
    assert device.own == 4 and not device.direct


def test_a_bounded_number_is_kept(device: Device, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_VARIANTS", 8)
    for size in range(40):
        launched(kernel, {"SIZE": size})
        assert len(launch._VARIANTS) == 1
        assert all(len(variants.compiled) <= 8 for variants in launch._VARIANTS.values())


# What it computes ----------------------------------------------------------------------------------------------------

ON_GPU = torch.cuda.is_available()


@triton.jit(do_not_specialize=["shift"])
def sum_of_two_kernel(x, y, where, n, shift, SIZE: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) + shift
    if y is not None:
        total += tl.load(y + at, mask=at < n, other=0.0).to(tl.float32)
    if TWICE:
        total *= 2
    tl.store(where.out + at * where.rows, total, mask=at < n)


def summed(x: Tensor, y: Tensor | None, shift: int, twice: bool, out: Tensor) -> Tensor:
    n = len(x)
    launch_kernel(
        sum_of_two_kernel, (triton.cdiv(n, 128),), x.device,
        x, y, Where(out, out.stride(0)), n, shift, SIZE=128, TWICE=twice, num_warps=1,
    )  # fmt: skip
    return out


def cases(device: str) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Arguments of `summed` of many kinds, and what is expected."""
    generator = torch.Generator().manual_seed(0)
    every = product((1, 16, 17), (0, 1), (1, 16, 17), (None, 0, 1))
    for number, (n, first, stride, other) in enumerate(every):
        dtype = (torch.bfloat16, torch.float32)[number // 3 % 2]
        x, y = (torch.randn(n + 1, generator=generator).to(device, dtype) for _ in range(2))
        x, added = x[first:][:n], None if other is None else y[other:][:n]
        shift, twice = (1, 16, 17)[number % 3], number // 2 % 2 == 1
        out = torch.zeros((n + 1) * stride, device=device)[number % 2 :][::stride][:n]
        expected = (x.float() + shift + (0 if added is None else added.float())) * (1 + twice)
        yield (x, added, shift, twice, out), expected


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_VARIANTS", {})


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_direct_launches_have_the_bits_of_triton(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(cases("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(launch, "KNOWN_TRITON", False)
        for args, expected in every:
            assert torch.equal(summed(*args), expected)
        assert not launch._VARIANTS
    for _ in range(2):  # the kernel becomes known, then each kind is kept
        for args, expected in every:
            args[-1].zero_()
            assert torch.equal(summed(*args), expected)
    monkeypatch.setattr(KernelInterface, "__getitem__", None)  # from now on no launch is Triton's own
    for args, expected in random.Random(0).sample(every, len(every)):
        args[-1].zero_()
        assert torch.equal(summed(*args), expected), args


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_direct_launches_go_to_the_current_stream_and_into_graphs(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    for _ in range(2):
        summed(x, None, 0, True, out)
    monkeypatch.setattr(KernelInterface, "__getitem__", None)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        summed(x.add_(1), None, 0, True, out)
    stream.synchronize()
    assert torch.equal(out, 2 * x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        summed(x, None, 0, True, out)
    x.normal_()
    graph.replay()
    assert torch.equal(out, 2 * x)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_threads_launch_directly(fresh: None) -> None:
    def run(number: int) -> bool:
        x = torch.full((100 + number,), float(number), device="cuda")
        return all(torch.equal(summed(x, x, n, False, torch.zeros_like(x)), 2 * x + n) for n in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(32)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_direct_launches_go_to_the_device_of_the_tensors(fresh: None) -> None:
    for index in (0, 1, 1, 0, 0, 1):
        x = torch.randn(100, device=f"cuda:{index}")
        assert torch.equal(summed(x, None, 0, True, torch.zeros_like(x)), 2 * x)
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(ON_GPU, reason="of the interpreter")
def test_the_interpreter_launches_by_itself() -> None:
    for args, expected in cases("cpu"):
        assert torch.equal(summed(*args), expected), args
    assert id(sum_of_two_kernel) not in launch._VARIANTS
