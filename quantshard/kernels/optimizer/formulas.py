"""Formulas of optimizers on float32 tiles, with the operations of `numerics`, in the same order.

`settings` points to a row with the columns of `stored.SETTINGS`, which have constants here.
"""

import triton
import triton.language as tl

from quantshard.kernels import language as ql
from quantshard.kernels.optimizer.stored import SETTINGS

LR, BETA1, REST1, BETA2, REST2, CORRECTION1, CORRECTION2, EPS, L2, DECAY, RATIO, MOST, SHARE, KEPT, NESTEROV = (
    tl.constexpr(column) for column in range(len(SETTINGS))
)


def _quotient_by_root() -> str:
    """PTX of a / (sqrt(b) + c) for four elements, each operation rounded to nearest even.

    Square roots and divisions take the same steps as in the compiler's code: an approximation, then Newton steps on
    remainders that a fused multiply-add computes exactly. The result is correctly rounded if no intermediate leaves the
    normal numbers: b in [2**-101, 2**128), c in [0, 2**60] and |a| in [2**-60, 2**60] suffice. The compiler checks this
    twice per element, this code once for four elements. If the check fails, all four use the general instructions.
    """
    low_a, low_b, high_c = (127 - 60) << 24, (127 - 101) << 23, (127 + 60) << 23
    lines = ["{.reg .pred p; .reg .b32 s, t, u, v; .reg .f32 d, e, h, q, r; mov.b32 u, 0; mov.b32 v, 0;"]
    for a, b in zip(range(4, 8), range(8, 12), strict=True):
        lines.append(f"mov.b32 s, ${a}; add.u32 s, s, s; sub.u32 s, s, {low_a}; max.u32 u, u, s;")
        lines.append(f"mov.b32 t, ${b}; sub.u32 t, t, {low_b}; max.u32 v, v, t;")
    lines.append(f"setp.gt.u32 p, u, {120 << 24}; setp.gt.or.u32 p, v, {(254 << 23) - low_b + 0x7FFFFF}, p;")
    lines.append(f"mov.b32 s, $12; setp.gt.or.u32 p, s, {high_c}, p; @p bra ANY;")
    for out, a, b, c in zip(range(4), range(4, 8), range(8, 12), range(12, 16), strict=True):
        lines.append(f"rsqrt.approx.ftz.f32 r, ${b}; mul.ftz.f32 q, ${b}, r; mul.ftz.f32 r, r, 0f3F000000;")
        lines.append(f"neg.f32 e, q; fma.rn.f32 e, e, q, ${b}; fma.rn.f32 d, e, r, q; add.rn.f32 d, d, ${c};")
        lines.append("rcp.approx.ftz.f32 r, d; neg.f32 e, d; fma.rn.f32 h, e, r, 0f3F800000; fma.rn.f32 r, r, h, r;")
        lines.append(f"mul.rn.f32 q, ${a}, r; fma.rn.f32 h, e, q, ${a}; fma.rn.f32 ${out}, r, h, q;")
    lines.append("bra DONE; ANY:")
    for out, a, b, c in zip(range(4), range(4, 8), range(8, 12), range(12, 16), strict=True):
        lines.append(f"sqrt.rn.f32 d, ${b}; add.rn.f32 d, d, ${c}; div.rn.f32 ${out}, ${a}, d;")
    return "".join([*lines, "DONE:}"])


QUOTIENT_BY_ROOT = tl.constexpr(_quotient_by_root())


@triton.jit
def quotient_by_root(a, b, c):
    """a / (sqrt(b) + c), each operation rounded to nearest even; a and b are float32 tiles, c is a scalar."""
    if ql.INTERPRETED:
        return tl.div_rn(a, tl.sqrt_rn(b) + c)
    else:
        return tl.inline_asm_elementwise(
            QUOTIENT_BY_ROOT, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f", [a, b, c], tl.float32, is_pure=True, pack=4
        )


@triton.jit
def adam(grad, master, exp_avg, exp_avg_sq, settings, BOUND: tl.constexpr):
    """One step of `numerics.adam.adam`: new master, exp_avg, exp_avg_sq; zero outside. BOUND: an `adam.Bound`."""
    lr, beta1, rest1 = tl.load(settings + LR), tl.load(settings + BETA1), tl.load(settings + REST1)
    beta2, rest2 = tl.load(settings + BETA2), tl.load(settings + REST2)
    correction1, correction2 = tl.load(settings + CORRECTION1), tl.load(settings + CORRECTION2)
    eps, l2, decay = tl.load(settings + EPS), tl.load(settings + L2), tl.load(settings + DECAY)
    if l2 != 0:
        grad = grad + l2 * master
    if BOUND == 1:
        limit = tl.load(settings + RATIO) * tl.sqrt_rn(exp_avg_sq)
        exp_avg = tl.where(exp_avg > limit, limit, exp_avg)
        exp_avg = tl.where(exp_avg < -limit, -limit, exp_avg)
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    update = quotient_by_root(exp_avg * correction1, exp_avg_sq * correction2, eps)
    if eps < 2.0**-60:
        update = tl.where(exp_avg_sq == 0, 0.0, update)
    if BOUND == 2:
        update = ql.saturate(update, tl.load(settings + MOST))
    if decay != 0:
        update = update + decay * master
    master = master - lr * update
    return master, exp_avg, exp_avg_sq


@triton.jit
def lion(grad, master, exp_avg, settings):
    """One step of `numerics.lion.lion`: new master and exp_avg; zero outside."""
    lr, decay = tl.load(settings + LR), tl.load(settings + DECAY)
    beta1, rest1 = tl.load(settings + BETA1), tl.load(settings + REST1)
    beta2, rest2 = tl.load(settings + BETA2), tl.load(settings + REST2)
    mean = beta1 * exp_avg + rest1 * grad
    update = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))
    if decay != 0:
        update = update + decay * master
    return master - lr * update, beta2 * exp_avg + rest2 * grad


@triton.jit
def momentum(grad, buffer, settings):
    """The new buffer of `numerics.muon.momentum`."""
    return between(buffer, grad, tl.load(settings + BETA1), tl.load(settings + REST1))


@triton.jit
def nesterov(grad, buffer, settings):
    """The update of `numerics.muon.momentum`, from its new buffer: the matrix to orthogonalize."""
    update = between(grad, buffer, tl.load(settings + BETA2), tl.load(settings + REST2))
    return tl.where(tl.load(settings + NESTEROV) != 0, update, buffer)


@triton.jit
def between(start, end, weight, rest):
    """Interpolate between two tiles as `numerics.muon` does; `rest`: 1 - weight."""
    difference = end - start
    return tl.where(weight < 0.5, start + weight * difference, end - rest * difference)


@triton.jit
def muon(master, direction, settings):
    """`numerics.muon.muon`, with a learning rate adjusted to the matrix shape."""
    return master * tl.load(settings + KEPT) - tl.load(settings + LR) * direction
