"""`quantshard doctor`: describes this machine, and compares its kernels and GEMMs with the oracle.

For each recipe: kernels quantize a matrix into every format of the recipe, with the bits of the oracle on the CPU; the
products of its formats, native or emulated, are close to float64; and kernels make an optimizer step with the bits of
plain PyTorch. The report contains no host name, no user name and no path.
"""

import datetime
import json
import platform
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn
from typer import Option

from quantshard import kernel_dispatch, kernels, recipe as recipes, sharding
from quantshard.gemm import backend, operands, predictions
from quantshard.optimizers import FusedAdam
from quantshard.readable import human_bytes
from quantshard.recipe import QuantSpec, Recipe
from quantshard.recipe_table import OPERANDS
from quantshard.tensor import parameter_state, storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.observe.table import plain_table
from quantshard.tools.terminal.screen import Screen, say_whole
from quantshard.version import __version__

OK, WRONG, NOT_HERE = "ok", "WRONG", "not here"

VERSION = 2
"""Version of the JSON keys; it increases if a key changes its meaning."""

COMPILED = ((131, 257), (1024, 2048))
"""Shapes for compiled kernels: one that no tile size divides, and a large one."""
INTERPRETED = ((5, 34),)
"""Shapes for kernels in Triton's interpreter, which is slow."""

_STYLES = {OK: "green", WRONG: "bold red", NOT_HERE: "dim"}


def doctor(json_: bool = Option(False, "--json", help="print the report as JSON")) -> None:
    """Describe this machine, and compare its kernels and GEMMs with the reference implementation for each recipe.

    On a GPU this compiles kernels, which takes a few minutes. The report has no names of hosts, users or files. The
    exit code is 1 if a line says WRONG.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    results = []
    with Screen(stderr=True, soft_wrap=True).status("testing") as status:
        for name, check in checks(device):
            status.update(name)
            state, reason = _result(check)
            results.append({"name": name, "state": state, "reason": reason})
    ok = all(result["state"] != WRONG for result in results)
    report = {**describe_machine(device), "checks": results, "ok": ok}
    if json_:
        say_whole(json.dumps(report, indent=1))
    else:
        Screen().print(_tables(report))
    if not ok:
        raise typer.Exit(1)


def recipe_names() -> list[str]:
    return list({kind: name for name, kind in reversed(recipes.NAMES.items())}.values())[::-1]


def checks(device: torch.device) -> Iterator[tuple[str, Callable[[], bool] | None]]:
    """Iterate over names and checks, which return whether the results are right; None: kernels are missing here."""
    has_kernels = not why_no_kernels(device)
    for name in recipe_names():
        recipe = recipes.resolve(name)
        if recipe.weight is not None:
            yield f"{name}: quantize", partial(is_quantized_right, recipe, device) if has_kernels else None
        if predictions.quantized_gemms(recipe):
            yield f"{name}: GEMMs", partial(is_multiplied_right, recipe, device)
        yield f"{name}: optimizer step", partial(is_stepped_right, recipe, device) if has_kernels else None


def is_quantized_right(recipe: Recipe, device: torch.device) -> bool:
    """Whether kernels quantize to the bits of the oracle on the CPU, in every format of the recipe."""
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
    """Whether products of quantized operands are close to float64: within 2**-7 of the sum of magnitudes."""
    for gemm, (left, right) in OPERANDS.items():
        left_spec, right_spec = recipe.table.get((left, gemm)), recipe.table.get((right, gemm))
        if left_spec is None or right_spec is None:
            continue
        for m, n, k in ((5, 7, 33), (256, 384, 512)):
            a = operands.quantize_operand(_random((m, k), device), QuantSpec(left_spec.format))
            b = operands.quantize_operand(_random((n, k), device), QuantSpec(right_spec.format))
            product = backend.matmul(a, b, torch.bfloat16, transpose_b=True)
            x, y = a.dequantize().double(), b.dequantize().double()
            exact = x @ y.t()
            tolerance = 2.0**-7 * (x.abs() @ y.abs().t()) + torch.finfo(product.dtype).eps * exact.abs() + 1e-30
            if not ((product.double() - exact).abs() <= tolerance).all():
                return False
    return True


def is_stepped_right(recipe: Recipe, device: torch.device) -> bool:
    """Whether weights and states after two steps of `FusedAdam` have the bits of plain PyTorch."""
    stored = []
    for types in ((device.type,), ()):
        # Keys of random bits come from torch's generator.
        torch.manual_seed(0)
        params = []
        for shape in INTERPRETED if kernels.INTERPRETED else COMPILED:
            x = _random(shape, device)
            if recipe.weight is not None:
                state = parameter_state.weight_state(recipe.weight, device)
                storage = storages.empty(recipe.weight, sharding.whole(shape), device, state)
                x = QuantizedTensor(storage, x.dtype).quantize_(x)
            params.append(nn.Parameter(x))
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


def _result(check: Callable[[], bool] | None) -> tuple[str, str]:
    if check is None:
        return NOT_HERE, "needs kernels"
    try:
        return (OK, "") if check() else (WRONG, "differs from the oracle")
    except torch.cuda.OutOfMemoryError:
        return NOT_HERE, "the device has not enough free memory"
    # A kernel that fails to compile must not stop the report. Its message can contain paths.
    except Exception as error:
        traceback.print_exc()
        return WRONG, type(error).__name__


def describe_machine(device: torch.device) -> dict[str, Any]:
    no_kernels = why_no_kernels(device)
    triton = import_module("triton").__version__ if find_spec("triton") else None
    has_nccl = dist.is_available() and dist.is_nccl_available()
    named = {name: recipes.resolve(name) for name in recipe_names()}
    paths = {name: predictions.gemm_path(recipe.weight, device, recipe) for name, recipe in named.items()}
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
    gpu, count = torch.cuda.get_device_properties(device), torch.cuda.device_count()
    details = {"capability": [gpu.major, gpu.minor], "memory_bytes": gpu.total_memory}
    return {"type": device.type, "name": gpu.name, "count": count, **details}


def _tables(report: dict[str, Any]) -> Group:
    device, collectives = report["device"], report["collectives"]
    name = f"{device['count']} x {device['name']}" if device["type"] == "cuda" else device["name"]
    if "capability" in device:
        capability = ".".join(map(str, device["capability"]))
        name += f", compute capability {capability}, {human_bytes(device['memory_bytes'])}"
    machine = (
        ("device", name),
        ("system", report["system"]),
        ("Python", report["python"]),
        ("torch", f"{report['torch']} ({'CUDA ' + report['cuda'] if report['cuda'] else 'without CUDA'})"),
        ("Triton", report["triton"] or "not installed"),
        ("kernels", report["kernels"]["reason"] or report["kernels"]["run"]),
        ("gloo", "yes" if collectives["gloo"] else "no"),
        ("NCCL", collectives["nccl"] or "no"),
        ("quantshard", report["quantshard"]),
    )
    products = ((recipe, path, report["reasons"][recipe]) for recipe, path in report["recipes"].items())
    states = [check["state"] for check in report["checks"]]
    tests = ((c["name"], Text(c["state"], style=_STYLES[c["state"]]), c["reason"]) for c in report["checks"])
    summary = "self-test: " + ", ".join(f"{states.count(state)} {state}" for state in _STYLES)
    return Group(
        plain_table(("this machine", ""), machine, texts=2),
        plain_table(("recipe", "GEMMs", "why"), products, texts=3),
        plain_table(("self-test", "", "reason"), tests, texts=3),
        Text(summary, style=_STYLES[OK if report["ok"] else WRONG]),
    )
