"""How the GEMMs of a weight will run, and why, also on a GPU that is only described."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantshard import kernel_dispatch, kernels
from quantshard.formats import ALL, Orientation
from quantshard.gemm import hardware
from quantshard.gemm.hardware import NEVER, Capability, ScaledProduct, flat, stored_kind
from quantshard.recipe import Gemm, QuantSpec, Recipe
from quantshard.recipe_table import OPERANDS
from quantshard.tensor.storage import QuantizedStorage


def fallbacks(stored: QuantizedStorage | None, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
    """The `limits.FALLBACKS` that the GEMMs of one linear layer take.
    `stored`: the weight, if it is quantized. `recipe`: autocast's; None assumes one that fits the weight."""
    if recipe is not None and not recipe.table:
        return () if stored is None else ("dequantized",)
    spec = stored.spec if stored is not None else recipe.weight if recipe is not None else None
    names = ["emulated"] if gemm_path(spec, device, recipe)[0] == "emulated" else []
    if spec is not None and device.type in kernel_dispatch.KERNEL_DEVICES and not kernels.USABLE:
        names.append("no kernels")
    if stored is None:
        return (*names, "quantized each forward") if spec is not None else ()
    fmt, gemms = stored.spec.format, tuple(Gemm) if recipe is None else quantized_gemms(recipe)
    if not fmt.serves_columns and Gemm.DGRAD in gemms:
        names.append("dgrad dequantizes")
    # FSDP2's shards are gathered before a GEMM, so only cuts by tensor parallelism matter
    is_operand = stored.gathered or stored.mesh is not None
    blocks = zip(stored.shard.origin, fmt.copies[Orientation.ROWWISE].block, strict=True)
    starts_on_blocks = all(cover == ALL or start % cover == 0 for start, cover in blocks)
    if is_operand and gemms and "emulated" not in names and not starts_on_blocks:
        names.append("cut blocks")
    if stored.gathered and not stored.has(Orientation.ROWWISE):
        names.append("extra gather")
    return tuple(names)


def quantized_gemms(recipe: Recipe) -> tuple[Gemm, ...]:
    """GEMMs of two quantized operands. The others run in high precision, on dequantized values."""
    return tuple(gemm for gemm, roles in OPERANDS.items() if all((role, gemm) in recipe.table for role in roles))


def gemm_path(spec: QuantSpec | None, device: torch.device, recipe: Recipe | None = None) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, with `recipe` all of them: ("native" or "emulated", reason)."""
    if spec is None:
        return "native", "high precision"
    if recipe is not None and recipe.table and not quantized_gemms(recipe):
        return "native", "high precision, on dequantized weights"
    product = f"{spec.format.copies[Orientation.ROWWISE].codes.encoding.name} matrix product"
    capability = hardware.capability_of(device)
    if capability is None:
        owner = "a CPU" if device.type == "cpu" else f"{device.type} without a known GPU"
        return "emulated", f"{owner} has no {product}"
    version, candidates = _dotted(capability), products_of(spec)
    native = next((candidate for candidate in candidates if candidate.is_of(capability)), None)
    if native is not None:
        emulated = () if recipe is None or recipe.weight != spec else emulated_gemms(recipe, capability)
        if emulated:
            names = " and ".join(gemm.value for gemm in emulated)
            return "emulated", f"compute capability {version} has no product of the formats of {names}"
        note = "" if native.seen else ", not yet run on this hardware"
        return "native", f"{product} of compute capability {version}{note}"
    product += f" with the scales of {spec.format.name}"
    if not candidates:
        return "emulated", f"PyTorch has no {product}"
    needs = ", ".join(
        _dotted(item.since) + (f" up to {_dotted(item.before)}" if item.before < NEVER else " and newer")
        for item in candidates
    )
    return "emulated", f"compute capability {version} has no {product} (such products: {needs})"


def products_of(spec: QuantSpec) -> list[ScaledProduct]:
    """The scaled products that accept a weight as right operand, on any hardware."""
    kind = stored_kind(spec.format)
    products = (product for (_, right), product in hardware.NATIVE.items() if right in (kind, flat(kind)))
    return list(dict.fromkeys(products))


def emulated_gemms(recipe: Recipe, capability: Capability) -> tuple[Gemm, ...]:
    """GEMMs without a native product of their two formats on this hardware, except "dgrad dequantizes"."""
    gemms = []
    for gemm, roles in OPERANDS.items():
        left, right = (recipe.table.get((role, gemm)) for role in roles)
        if left is None or right is None or (gemm is Gemm.DGRAD and not right.format.serves_columns):
            continue
        product = hardware.product_of_kinds(stored_kind(left.format), stored_kind(right.format))
        if product is None or not product.is_of(capability):
            gemms.append(gemm)
    return tuple(gemms)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


@contextmanager
def described_gpu(capability: Capability) -> Iterator[None]:
    """Give the meta device the kernels, which do nothing, and scaled products of a GPU of this compute capability.

    The caller must answer PyTorch's scaled products if this version does not support them on meta tensors.
    """
    devices_before, capability_before = kernel_dispatch.KERNEL_DEVICES, hardware.META_CAPABILITY
    kernel_dispatch.KERNEL_DEVICES, hardware.META_CAPABILITY = devices_before | {"meta"}, capability
    hardware.capability_of.cache_clear()
    try:
        yield
    finally:
        kernel_dispatch.KERNEL_DEVICES, hardware.META_CAPABILITY = devices_before, capability_before
        hardware.capability_of.cache_clear()
