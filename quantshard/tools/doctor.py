"""Self-test of `quantshard doctor`: describes this machine and compares its kernels and GEMMs with the oracle.

For each recipe: kernels quantize a matrix into every format of the recipe, with the bits of the oracle on the CPU; the
products of its formats, native or emulated, are close to float64; and kernels make an optimizer step with the bits of
plain PyTorch. The report contains no host name, no user name and no path.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text
from torch import Tensor, nn

from quantshard import kernel_dispatch, kernels
from quantshard import recipe as recipes
from quantshard.gemm import backend, hardware, operands
from quantshard.optimizers import FusedAdam
from quantshard.readable import human_bytes
from quantshard.recipe import OPERANDS, QuantSpec, Recipe, TensorRole
from quantshard.tensor.quantized_tensor import QuantizedTensor, quantize_weight
from quantshard.tensor.storage import QuantizedStorage
from quantshard.tools.observe.table import plain_table
from quantshard.version import __version__

OK, WRONG, NOT_HERE = "ok", "WRONG", "not here"

VERSION = 2
"""Version of the JSON keys; it increases if a key changes its meaning."""

COMPILED = ((131, 257), (1024, 2048))
"""Shapes for compiled kernels: one that no tile size divides, and a large one."""
INTERPRETED = ((5, 34),)
"""Shapes for kernels in Triton's interpreter, which is slow."""

_STYLES = {OK: "green", WRONG: "bold red", NOT_HERE: "dim"}
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:\\|~?/)[^\s'\"`,;:()]+")
_LONGEST = 200


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. `state`: `OK`, `WRONG` or `NOT_HERE`. `reason`: explanation of the last two."""

    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class MachineReport:
    """The result of `diagnose`; rich prints it as tables. `about`: the keys of the JSON before "checks"."""

    about: dict[str, Any]
    checks: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no check is `WRONG`."""
        return all(result.state != WRONG for result in self.checks)

    def to_json(self) -> str:
        """Return the whole report; docs/command-line.md#quantshard-doctor documents the keys."""
        return json.dumps({**self.about, "checks": [asdict(result) for result in self.checks], "ok": self.ok}, indent=1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _render(self)


def diagnose(
    device: torch.device | None = None, on_check: Callable[[str], object] = lambda name: None
) -> MachineReport:
    """Describe this machine and run the self-test.

    Args:
        device: default: the first GPU, or the CPU without a GPU.
        on_check: called with the name of each check before it runs.
    """
    device = device or (torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    results = []
    for name, check in checks(device):
        on_check(name)
        results.append(_result(name, check))
    return MachineReport(describe_machine(device), tuple(results))


def recipe_names() -> list[str]:
    """Primary name of each recipe."""
    return list({kind: name for name, kind in reversed(recipes.NAMES.items())}.values())[::-1]


# -------------------------------------------------------------------------------------------------------------- checks


class _UnavailableError(Exception):
    """Raised by a check if this machine lacks what the check needs."""


def checks(device: torch.device) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Iterate over names and checks; a check returns whether the results are right."""
    for name in recipe_names():
        recipe = recipes.resolve(name)
        if recipe.weight is not None:
            yield f"{name}: quantize", partial(is_quantized_right, recipe, device)
            yield f"{name}: GEMMs", partial(is_multiplied_right, recipe, device)
        yield f"{name}: optimizer step", partial(is_stepped_right, recipe, device)


def is_quantized_right(recipe: Recipe, device: torch.device) -> bool:
    """Whether kernels quantize to the bits of the oracle on the CPU, in every format of the recipe."""
    _need_kernels(device)
    formats = {spec.format.name: spec.format for spec in recipe.table.values() if spec is not None}
    for shape in INTERPRETED if kernels.INTERPRETED else COMPILED:
        x = _random(shape, torch.device("cpu"))
        for fmt in formats.values():
            with kernel_dispatch.kernels_only_on(device.type):
                storage = operands.quantize_operand(x.to(device), QuantSpec(fmt))
            with kernel_dispatch.kernels_only_on():
                expected = operands.quantize_operand(x, QuantSpec(fmt))
            if not all(torch.equal(part.cpu(), expected.components[name]) for name, part in storage.components.items()):
                return False
    return True


def is_multiplied_right(recipe: Recipe, device: torch.device) -> bool:
    """Whether the recipe's products of two quantized operands are close to float64.

    Tensor cores and emulated products lose at most 2**-7 of the sum of magnitudes, before one final rounding.
    """
    for gemm, (left, right) in OPERANDS.items():
        specs = recipe.table.get((left, gemm)), recipe.table.get((right, gemm))
        if specs[0] is None or specs[1] is None:
            continue
        for m, n, k in ((5, 7, 33), (256, 384, 512)):
            a, b = (
                _operand(_random((rows, k), device), spec, role)
                for rows, spec, role in ((m, specs[0], left), (n, specs[1], right))
            )
            product = backend.matmul(a, b, torch.bfloat16, transpose_b=True)
            x, y = a.dequantize().double(), b.dequantize().double()
            exact = x @ y.t()
            tolerance = 2.0**-7 * (x.abs() @ y.abs().t()) + torch.finfo(product.dtype).eps * exact.abs() + 1e-30
            if not ((product.double() - exact).abs() <= tolerance).all():
                return False
    return True


def _operand(x: Tensor, spec: QuantSpec, role: TensorRole) -> QuantizedStorage:
    plain = QuantSpec(spec.format)
    if role is TensorRole.WEIGHT:
        return quantize_weight(x, plain).quantized_storage
    return operands.quantize_operand(x, plain)


def is_stepped_right(recipe: Recipe, device: torch.device) -> bool:
    """Whether weights and states after two steps of `FusedAdam` have the bits of plain PyTorch."""
    _need_kernels(device)
    stored = []
    for types in ((device.type,), ()):
        # Keys of random bits come from torch's generator.
        torch.manual_seed(0)
        params = []
        for shape in INTERPRETED if kernels.INTERPRETED else COMPILED:
            x = _random(shape, device)
            params.append(nn.Parameter(x if recipe.weight is None else quantize_weight(x, recipe.weight)))
            params[-1].grad = _random(shape, device) * 1e-3
        optimizer = FusedAdam(params, lr=1e-3, weight_decay=0.1)
        with kernel_dispatch.kernels_only_on(*types):
            optimizer.step()
            optimizer.step()
        states = chain.from_iterable(state.values() for state in optimizer.state.values())
        stored.append([part for tensor in (*params, *states) for part in _parts(tensor)])
    return all(torch.equal(*(part.view(torch.uint8) for part in parts)) for parts in zip(*stored, strict=True))


def _parts(tensor: Tensor) -> list[Tensor]:
    value = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    parts = value.quantized_storage.components.values() if isinstance(value, QuantizedTensor) else [value]
    return [part.contiguous().view(-1) for part in parts]


def _random(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return a bfloat16 matrix with values of many magnitudes, and a zero."""
    generator = torch.Generator().manual_seed(1)
    x, exponents = (torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu") for _ in range(2))
    x *= torch.exp(exponents)
    x[0, 0] = 0
    return x.bfloat16().to(device)


def why_no_kernels(device: torch.device) -> str:
    """Reason why kernels do not run on this device; empty if they run."""
    if device.type == "cpu" and not kernels.INTERPRETED:
        return "kernels do not run on a CPU; plain PyTorch does their work"
    if not kernels.USABLE:
        return "Triton is not installed, or this torch was not built with CUDA; plain PyTorch does the kernels' work"
    return ""


def _need_kernels(device: torch.device) -> None:
    if why_no_kernels(device):
        raise _UnavailableError("needs kernels")


def _result(name: str, check: Callable[[], bool]) -> CheckResult:
    try:
        return CheckResult(name, OK) if check() else CheckResult(name, WRONG, "differs from the oracle")
    except _UnavailableError as error:
        return CheckResult(name, NOT_HERE, str(error))
    except torch.cuda.OutOfMemoryError:
        return CheckResult(name, NOT_HERE, "the device has not enough free memory")
    # A kernel that fails to compile must not stop the report.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # Compiler errors end with the cause. Paths can contain user names.
        text = lines[0] + (f" ... {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else "")
        return CheckResult(name, WRONG, f"{type(error).__name__}: {_PATH.sub('<path>', text)}"[:_LONGEST])


# ------------------------------------------------------------------------------------------------------------- machine


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the keys of the JSON that need no check."""
    no_kernels = why_no_kernels(device)
    triton = import_module("triton").__version__ if find_spec("triton") else None
    has_nccl = dist.is_available() and dist.is_nccl_available()
    paths = {name: hardware.gemm_path(recipes.resolve(name).weight, device) for name in recipe_names()}
    return {
        "version": VERSION,
        "quantshard": __version__,
        "date": datetime.date.today().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "device": _device(device),
        "collectives": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        },
        "kernels": {
            "run": "no" if no_kernels else "interpreted" if kernels.INTERPRETED else "compiled",
            "reason": no_kernels,
        },
        "recipes": {name: path for name, (path, _) in paths.items()},
        "reasons": {name: reason for name, (_, reason) in paths.items()},
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": platform.machine(), "count": 1, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
    }


# ------------------------------------------------------------------------------------------------------------- printing


def _render(report: MachineReport) -> Group:
    about, device, collectives = report.about, report.about["device"], report.about["collectives"]
    name = f"{device['count']} x {device['name']}" if device["type"] == "cuda" else device["name"]
    if "capability" in device:
        capability = ".".join(map(str, device["capability"]))
        name += f", compute capability {capability}, {human_bytes(device['memory_bytes'])}"
    machine = plain_table("this machine", "", texts=2)
    for key, value in (
        ("device", name),
        ("system", about["system"]),
        ("Python", about["python"]),
        ("torch", f"{about['torch']} ({'CUDA ' + about['cuda'] if about['cuda'] else 'without CUDA'})"),
        ("Triton", about["triton"] or "not installed"),
        ("kernels", about["kernels"]["reason"] or about["kernels"]["run"]),
        ("gloo", "yes" if collectives["gloo"] else "no"),
        ("NCCL", collectives["nccl"] or "no"),
        ("quantshard", about["quantshard"]),
    ):
        machine.add_row(key, Text(value))
    products = plain_table("recipe", "GEMMs", "why", texts=3)
    for recipe, path in about["recipes"].items():
        products.add_row(recipe, path, Text(about["reasons"][recipe]))
    tests = plain_table("self-test", "", "reason", texts=3)
    for result in report.checks:
        tests.add_row(result.name, Text(result.state, style=_STYLES[result.state]), Text(result.reason))
    count = {state: sum(result.state == state for result in report.checks) for state in _STYLES}
    summary = "self-test: " + ", ".join(f"{number} {state}" for state, number in count.items())
    return Group(machine, products, tests, Text(summary, style=_STYLES[OK if report.ok else WRONG]))
