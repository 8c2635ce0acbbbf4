"""Activations with quantization of their results, forward and backward; gradients of biases.

    forward    h      = act(gate)              or, gated, act(gate) * up
    backward   d_gate = dh * act'(gate)        or, gated, dh * up * act'(gate)
               d_up   = dh * act(gate)

in float32, rounded once to the dtype of `gate`. `KernelOutputs` selects the outputs. The same kernels can return only
amaxes, which current scaling needs first. With u = 2**-24 and s(z) = 1 / (1 + exp(-z)), the functions are

    relu    max(x, 0)               exact; the slope at NaN is NaN
    srelu   max(x, 0)**2            operations and order of the oracle: equal bits
    silu    x * s(x)
    qgelu   x * s(1.702 x)
    sigmoid s(x)
    gelu    x * s(2 sqrt(2 / pi) (x + 0.044715 x**3)), which is the tanh form, without its cancellation for x < 0

exp multiplies by log2(e) before the hardware's power of two. Its argument is off by u |z|, so the relative error of
s(z) is at most (|z| + 8) u (for gelu, z itself adds 4 u |z|). For s(z) < 2**-126 exp overflows and s(z) is 0. So before
the rounding

    |h      - exact| <= (5 |z| + 12) u |h|                           + 2**-126 |x up|
    |d_gate - exact| <= (5 |z| + 16) u |dh up| (1 + 3 |z|) s(z)      + 2**-126 |dh up| (1 + 3 |z|)

where 3 is needed only for gelu (x z' <= 3 z) and is 1 otherwise. Results with 8 or 11 significant bits differ from the
oracle's, which has an error of some u itself, by at most one neighbour, unless they are near a zero of act'.
"""

from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.fused import epilogue
from quantshard.kernels.fused.epilogue import KernelOutputs, Targets, deliver, load_tile
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import tile_of
from quantshard.kernels.quantize.random_words import RANDOM, RANDOM_OF_PARTS, key_of, random_arguments_of

GATED: Final = dict(geglu="gelu", reglu="relu", swiglu="silu", sreglu="srelu", qgeglu="qgelu", glu="sigmoid")
"""Gated activations, with two inputs, and the function of their gate."""

# right operands of a tile: Triton 3.7's interpreter treats constant * tile as a constant
QUICK = tl.constexpr(1.702)
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)
SATURATED = tl.constexpr(1e4)  # x**2 from which gelu is x or 0; larger ones would overflow

RANDOM_TWICE = [f"{of}_{name}" for of in ("gate", "up") for name in RANDOM]


SIGMOID = tl.constexpr(
    "{.reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
    "rcp.approx.ftz.f32 $0, e;}"
)
"""1 / (1 + 2**(-z log2(e))) in four instructions; the compiler uses four times as many to keep subnormals."""


@triton.jit
def sigmoid(z):
    if ql.INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-z))  # exp may overflow: 1 / inf is the right 0
    else:
        return tl.inline_asm_elementwise(SIGMOID, "=f,f", [z], tl.float32, is_pure=True, pack=1)


@triton.jit
def logit(x, KIND: tl.constexpr):
    """z of x * s(z), and dz / dx."""
    if KIND == "silu":
        return x, tl.zeros_like(x) + 1.0
    elif KIND == "qgelu":
        return x * QUICK, tl.zeros_like(x) + QUICK
    else:
        tl.static_assert(KIND == "gelu")
        square = tl.minimum(x * x, SATURATED)
        return x * ((1.0 + square * CUBIC) * TWICE_ROOT), (1.0 + square * (3.0 * CUBIC)) * TWICE_ROOT


@triton.jit
def value(x, KIND: tl.constexpr):
    if KIND == "relu" or KIND == "srelu":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive if KIND == "relu" else positive * positive
    elif KIND == "sigmoid":
        return sigmoid(x)
    else:
        z, _ = logit(x, KIND)
        return x * sigmoid(z)


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """act(x) and act'(x) = s + x s (1 - s) z'."""
    if KIND == "relu":
        return value(x, KIND), tl.where(x == x, (x > 0).to(tl.float32), x)
    elif KIND == "srelu":
        positive = value(x, "relu")
        return positive * positive, 2.0 * positive
    elif KIND == "sigmoid":
        s = sigmoid(x)
        return s, s * (1.0 - s)
    else:
        z, slope = logit(x, KIND)
        s = sigmoid(z)
        h = x * s
        return h, s + h * (1.0 - s) * slope


@triton.jit(do_not_specialize=RANDOM)
def activate_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, where, sink, out, other_where, other_out,
    k0, k1, draw, stream, width, other_stream, other_width,
    KIND: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    position = tile_of(where, TILE)
    _, _, i, j, valued = position
    h = value(load_tile(gate_ptr, gate_stride, i, j, valued), KIND)
    if up_ptr is not None:
        h = h * load_tile(up_ptr, up_stride, i, j, valued)
    deliver(
        h, position, where, sink, out, other_where, other_out, (k0, k1, draw), stream, width, other_stream, other_width,
        gate_ptr.dtype.element_ty, H, T,
    )  # fmt: skip


writes(activate_kernel, "out", "other_out")


@triton.jit(do_not_specialize=RANDOM_TWICE)
def activate_backward_kernel(
    dh_ptr, dh_stride, gate_ptr, gate_stride, up_ptr, up_stride, where,
    gate_sink, gate_out, gate_other_where, gate_other_out,
    gate_k0, gate_k1, gate_draw, gate_stream, gate_width, gate_other_stream, gate_other_width,
    up_sink, up_out, up_other_where, up_other_out,
    up_k0, up_k1, up_draw, up_stream, up_width, up_other_stream, up_other_width,
    KIND: tl.constexpr, TILE: tl.constexpr,
    GATE_H: tl.constexpr, GATE_T: tl.constexpr, UP_H: tl.constexpr, UP_T: tl.constexpr,
):  # fmt: skip
    position = tile_of(where, TILE)
    _, _, i, j, valued = position
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    dh = load_tile(dh_ptr, dh_stride, i, j, valued)
    h, slope = value_and_slope(load_tile(gate_ptr, gate_stride, i, j, valued), KIND)
    if up_ptr is not None:
        deliver(
            dh * h, position, where, up_sink, up_out, up_other_where, up_other_out,
            (up_k0, up_k1, up_draw), up_stream, up_width, up_other_stream, up_other_width, dtype, UP_H, UP_T,
        )  # fmt: skip
        if UP_T is not None or TILE.rows * TILE.cols > 8192:
            # too many values for the registers: load the tile again, from the L1 cache
            tl.debug_barrier()
            dh = load_tile(dh_ptr, dh_stride, i, j, valued)
            _, slope = value_and_slope(load_tile(gate_ptr, gate_stride, i, j, valued), KIND)
        dh = dh * load_tile(up_ptr, up_stride, i, j, valued)
    deliver(
        dh * slope, position, where, gate_sink, gate_out, gate_other_where, gate_other_out,
        (gate_k0, gate_k1, gate_draw), gate_stream, gate_width, gate_other_stream, gate_other_width,
        dtype, GATE_H, GATE_T,
    )  # fmt: skip


writes(activate_backward_kernel, "gate_out", "gate_other_out", "up_out", "up_other_out")


@triton.jit(do_not_specialize=RANDOM_OF_PARTS)
def deliver_kernel(
    x_ptrs, x_stride, where, sinks, outs, other_where, other_outs,
    k0, k1, draw, k2, k3, draw1, k4, k5, draw2, stream, width, other_stream, other_width,
    PARTS: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    position = tile_of(where, TILE)
    _, _, i, j, valued = position
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            x = load_tile(x_ptrs[part], x_stride, i, j, valued)
            key = key_of(part, (k0, k1, draw), (k2, k3, draw1), (k4, k5, draw2))
            deliver(
                x, position, where, sinks[part], outs[part], other_where, other_outs[part],
                key, stream, width, other_stream, other_width, x_ptrs[part].dtype.element_ty, H, T,
            )  # fmt: skip


writes(deliver_kernel, "outs.*", "other_outs.*")


def activate_and_quantize(gate: Tensor, activation: str, up: Tensor | None, outputs: KernelOutputs) -> Targets:
    """Quantize act(gate) or act(gate) * up for [R, C], as `outputs` requests; oracle: `layernorm_mlp.activate`."""
    plan = epilogue.plan_epilogue(outputs, gate)
    gate, up = epilogue.by_rows(gate), None if up is None else epilogue.by_rows(up)
    if gate.numel() > 0:
        launch_kernel(
            activate_kernel, plan.programs, gate.device,
            gate, gate.stride(0), up, 0 if up is None else up.stride(0), *plan.arguments,
            KIND=GATED.get(activation, activation), **plan.constants, enable_fp_fusion=False,
        )  # fmt: skip
    return plan.finish()


def activate_backward_and_quantize(
    dh: Tensor, gate: Tensor, activation: str, up: Tensor | None, d_gate: KernelOutputs,
    d_up: KernelOutputs | None = None,
) -> tuple[Targets, Targets]:  # fmt: skip
    """Compute and quantize the gradients of `gate` and `up` from `dh` [R, C], in one pass over the inputs.

    `d_gate`, `d_up`: outputs for the gradients, with one origin and padding; `d_up` is None without `up`.
    """
    gate_plan = epilogue.plan_epilogue(d_gate, gate, d_up, backward=True)
    up_plan = epilogue.plan_epilogue(d_up or KernelOutputs(), gate, d_gate, backward=True)
    options = {name: value for name, value in gate_plan.constants.items() if name not in ("H", "T")}
    dh, gate, up = epilogue.by_rows(dh), epilogue.by_rows(gate), None if up is None else epilogue.by_rows(up)
    if gate.numel() > 0:
        launch_kernel(
            activate_backward_kernel, gate_plan.programs, gate.device,
            dh, dh.stride(0), gate, gate.stride(0), up, 0 if up is None else up.stride(0),
            *gate_plan.arguments, *up_plan.arguments[1:], KIND=GATED.get(activation, activation),
            GATE_H=gate_plan.constants["H"], GATE_T=gate_plan.constants["T"],
            UP_H=up_plan.constants["H"], UP_T=up_plan.constants["T"], **options, enable_fp_fusion=False,
        )  # fmt: skip
    return gate_plan.finish(), up_plan.finish()


def quantize_gradients(grads: Sequence[Tensor], outputs: Sequence[KernelOutputs]) -> list[Targets]:
    """Quantize gradients [R, C] of linear layers' outputs with one kernel; `sums` are bias gradients.

    All have one shape, row stride, dtype, device and specs. With random words there are at most `KEYS` of them.
    """
    plans = [epilogue.plan_epilogue(requested, grad) for requested, grad in zip(outputs, grads, strict=True)]
    grads = [epilogue.by_rows(grad) for grad in grads]
    if grads[0].numel() > 0:
        region, _, _, other_region, *_ = plans[0].arguments
        _, sinks, outs, _, transposed, *_ = zip(*[plan.arguments for plan in plans], strict=True)
        keys, streams, _ = random_arguments_of(outputs)
        launch_kernel(
            deliver_kernel, (*plans[0].programs, len(grads)), grads[0].device,
            tuple(grads), grads[0].stride(0), region, sinks, outs, other_region, transposed, *keys, *streams,
            PARTS=len(grads), **plans[0].constants, enable_fp_fusion=False,
        )  # fmt: skip
    return [plan.finish() for plan in plans]
