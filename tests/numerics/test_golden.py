"""The oracle against recorded outputs of TransformerEngine 2.20 on an H200.

`golden/make_compact.py` says what the repository's copy holds; the full recordings, where they lie beside the
repository, are tested as well.

What they show about TransformerEngine:

- Codes are x * scale in float32, rounded; scale_inv is 1 / scale and is not used to quantize.
- Linear, delayed: iteration 0 quantizes everything with scale 1; iteration 1 with the scales that iteration 0 left, max
  over the history window including the newest amax. The bias gradient is the sum of dy before it is quantized.
- Linear, block: activations and gradients are quantized twice, along the dim that each GEMM sums over.
- Adam: the master starts from the *dequantized* weight. m and v use 1 - beta computed in float32, and the bias
  corrections the same; the updated master is requantized with its own amax (current, block), and under delayed scaling
  with scale 1: the weight's amax reaches the history only through a forward pass, and there was none.
"""

import math
from pathlib import Path

import pytest
import torch

from quantshard import numerics
from quantshard.formats import FP8_1X128, FP8_128X128, FP8_E4M3, FP8_E5M2, Orientation, Scaling
from tests import oracle
from tests.golden.make_compact import COMPACT, compact, load

FULL = Path(__file__).parents[3] / "shared" / "golden" / "transformer-engine-2.20-h200.pt.xz"
SOURCES = {"compact": COMPACT} | ({"full": FULL} if FULL.exists() else {})

PER_TENSOR = {"e4m3": FP8_E4M3, "e5m2": FP8_E5M2}
KINDS = ["randn", "zeros"]
RECIPES = ["bf16", "current", "block", "delayed"]


@pytest.fixture(scope="module", params=SOURCES)
def golden(request):
    return load(SOURCES[request.param])


def rowwise(fmt):
    return fmt.copies[Orientation.ROWWISE]


def with_scale(x, fmt, scale):
    """Components under a given forward scale, as a delayed recipe has it."""
    multiplier = torch.as_tensor(scale, dtype=torch.float32).reshape(1, 1)
    codes = numerics.quantize_codes(x, rowwise(fmt), {"scale_inv": multiplier})
    return {"codes": codes, "scale_inv": torch.ones(1, 1) / multiplier}


def test_compact_is_cut_from_full():
    if not FULL.exists():
        pytest.skip("no full recordings")
    made, kept = compact(load(FULL)), load(COMPACT)

    def same(a, b):
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    assert same(made, kept)


# Codes and scales, bit for bit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", PER_TENSOR)
@pytest.mark.parametrize("recipe", ["current", "current_pow2", "delayed"])
def test_per_tensor(golden, recipe, element, kind):
    fmt, x = PER_TENSOR[element], golden["inputs"][kind]
    if recipe == "delayed":
        parts = with_scale(x, fmt, 37.5)
    else:
        parts = numerics.quantize(x, fmt, Scaling(power_of_two=recipe.endswith("pow2")))
    first, _, pow2 = recipe.partition("_")
    recorded = golden["quantize"]["_".join(filter(None, (first, element, pow2))) + f"/{kind}"]
    assert torch.equal(parts["codes"], recorded["data"])
    assert torch.equal(parts["scale_inv"].flatten(), recorded["scale_inv"])
    if "transpose" in recorded:
        turned = oracle.transpose_parts(fmt, parts, tuple(x.shape))
        assert torch.equal(turned["codes"], recorded["transpose"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pow2", [True, False])
def test_block_2d(golden, pow2, kind):
    x = golden["inputs"][kind]
    parts = numerics.quantize(x, FP8_128X128, Scaling(power_of_two=pow2))
    turned = oracle.transpose_parts(FP8_128X128, parts, tuple(x.shape))
    recorded = golden["quantize"][f"block2d_pow2{pow2}/{kind}"]
    for side, mine in (("rowwise", parts), ("columnwise", turned)):
        if f"{side}_data" in recorded:
            assert torch.equal(mine["codes"], recorded[f"{side}_data"])
        real = mine["scale_inv"].shape[1]  # the rest is padding
        assert torch.equal(mine["scale_inv"], recorded[f"{side}_scale_inv"][:, :real])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pow2", [True, False])
def test_block_1d(golden, pow2, kind):
    x = golden["inputs"][kind]
    recorded = golden["quantize"][f"block1d_pow2{pow2}/{kind}"]
    for side, values in (("rowwise", x), ("columnwise", x.t())):
        parts = numerics.quantize(values, FP8_1X128, Scaling(power_of_two=pow2))
        assert torch.equal(parts["codes"], recorded[f"{side}_data"])
        assert torch.equal(parts["scale_inv"].t(), recorded[f"{side}_scale_inv"])


def test_recordings_reach_the_rule_for_zero_amaxes(golden):
    """The kind `zeros` has zero blocks in both block layouts, or the tests above would not see the rule."""
    scale = golden["quantize"]["block2d_pow2False/zeros"]["rowwise_scale_inv"]
    assert scale[0, 0] == 1
    scales = golden["quantize"]["block1d_pow2False/zeros"]
    assert (scales["rowwise_scale_inv"] == 1).any() and (scales["columnwise_scale_inv"] == 1).any()


# A linear layer


def values(x, fmt, scaling=Scaling()):  # noqa: B008
    return numerics.dequantize(rowwise(fmt), numerics.quantize(x, fmt, scaling), tuple(x.shape)).double()


def operands(golden, recipe, iteration):
    """What the GEMMs multiply, float64: x and w of fprop, dy and w of dgrad, dy and x of wgrad; and dy itself."""
    w, x, dy = (golden["linear_in"][name] for name in ("w", "x", "dy"))
    x, dy = x * (1 + iteration), dy * 2.0**-iteration
    if recipe == "block":
        scaling = Scaling(power_of_two=True)
        along_rows, along_cols = (
            [values(v, FP8_1X128, scaling) for v in (x, dy)],
            [values(v.t(), FP8_1X128, scaling).t() for v in (x, dy)],
        )
        return *along_rows, *along_cols, values(w, FP8_128X128, scaling), dy
    if recipe == "bf16":
        x_, dy_, w_ = x.double(), dy.double(), w.double()
    elif recipe == "current":
        x_, dy_, w_ = values(x, FP8_E4M3), values(dy, FP8_E5M2), values(w, FP8_E4M3)
    else:
        x_, dy_, w_ = delayed_operands(x, dy, w, delayed_scales(golden, iteration))
    return x_, dy_, x_, dy_, w_, dy


def delayed_scales(golden, iteration):
    """Scales of (x, dy, w): 1 before any, then those that the iteration before left."""
    if iteration == 0:
        return 1.0, 1.0, 1.0
    before = golden["linear"]["delayed"][iteration - 1]
    return before["scaling_fwd_scale"][0], before["scaling_bwd_scale"][0], before["scaling_fwd_scale"][1]


def delayed_operands(x, dy, w, scales):
    rows = zip((x, dy, w), (FP8_E4M3, FP8_E5M2, FP8_E4M3), scales, strict=True)
    return [
        numerics.dequantize(rowwise(fmt), with_scale(v, fmt, scale), tuple(v.shape)).double() for v, fmt, scale in rows
    ]


def excess(recorded, exact, magnitude, accumulation):
    """Largest error of a bf16 result as a multiple of what is allowed.

    Allowed is `accumulation` * sum |a b| for the GEMM, and then half a bf16 ulp, at most 2**-8 of the value. A float32
    sum of K products errs by at most K * 2**-24 * sum |a b|. Hopper's FP8 tensor cores align each addend to the largest
    of its group of 32 products and the accumulator, and cut it after 13 fraction bits. A cut is at most 2**-13 * M, and
    M, the largest addend, is about 7 times the mean |a b| for normal operands. The K + K/32 cuts have the signs of
    the addends, so they add up as a random walk: std 2**-13 * 7 / sqrt(3 K) * sum |a b|, for K = 256 and more at most
    about 2**-15 * sum |a b|. 2**-12 is 8 of those; half of one is what the recordings reach.
    """
    rows, cols = recorded.shape
    exact, magnitude = exact[:rows, :cols], magnitude[:rows, :cols]
    allowed = accumulation * magnitude
    allowed = allowed + 2.0**-8 * (exact.abs() + allowed)
    return ((recorded.double() - exact).abs() / allowed).max().item()


def gemms(x, dy, x_cols, dy_cols, w):
    return {"y": (x, w.t()), "dx": (dy, w), "dw": (dy_cols.t(), x_cols)}


@pytest.mark.parametrize("iteration", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(golden, recipe, iteration):
    *factors, dy = operands(golden, recipe, iteration)
    recorded, bias = golden["linear"][recipe][iteration], golden["linear_in"]["b"].double()
    for name, (a, b) in gemms(*factors).items():
        accumulation = a.shape[1] * 2.0**-24 if recipe == "bf16" else 2.0**-12
        added = bias if name == "y" else torch.zeros(())
        ratio = excess(recorded[name], a @ b + added, a.abs() @ b.abs() + added.abs(), accumulation)
        assert ratio <= 1, (name, ratio)
    total, magnitude = dy.double().sum(0), dy.double().abs().sum(0)
    assert excess(recorded["db"][None], total[None], magnitude[None], len(dy) * 2.0**-24) <= 1


def test_bound_tells_scales_apart(golden):
    """With any other scale, and with unquantized operands, results leave the bound: it is not too wide to see them."""
    w, x, dy = (golden["linear_in"][name] for name in ("w", "x", "dy"))
    others = {
        "unquantized": [v.double() for v in (x, dy, w)],
        "own amax": [values(x, FP8_E4M3), values(dy, FP8_E5M2), values(w, FP8_E4M3)],
        "one step up": delayed_operands(x, dy, w, (1.125, 1.125, 1.125)),
    }
    for x_, dy_, w_ in others.values():
        for name, (a, b) in gemms(x_, dy_, x_, dy_, w_).items():
            added = golden["linear_in"]["b"].double() if name == "y" else torch.zeros(())
            recorded = golden["linear"]["delayed"][0][name]
            assert excess(recorded, a @ b + added, a.abs() @ b.abs(), 2.0**-12) > 4


@pytest.mark.parametrize("iteration", [0, 1])
def test_delayed_scales_follow_the_history(golden, iteration):
    """Scales are max / (largest amax of the window); a tensor that was never seen keeps its scale of 1."""
    recorded = golden["linear"]["delayed"][iteration]
    for side, fmts in (("fwd", [FP8_E4M3] * 3), ("bwd", [FP8_E5M2] * 2)):
        window = recorded[f"scaling_{side}_hist"].amax(0)
        for amax, scale, fmt in zip(window, recorded[f"scaling_{side}_scale"], fmts, strict=True):
            grids = {"scale_inv": amax.reshape(1, 1)}
            assert torch.equal(oracle.encode_scales(grids, fmt, Scaling())["scale_inv"].reshape(()), scale)
    x, w = golden["linear_in"]["x"], golden["linear_in"]["w"]
    newest = recorded["scaling_fwd_hist"][-1]
    seen = [numerics.amaxes(v, FP8_E4M3)["scale_inv"].item() for v in (x * (1 + iteration), w)]
    assert newest.tolist() == [*seen, 0]


# One step of Adam


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_adam(golden, recipe):
    """Beta, learning rate and epsilon are float32, so 1 - beta is not 0.1 and 0.001.

    m and v are exact. The update is about 1 and has a few roundings, and fast division and square root on the GPU: at
    most 8 ulps, times lr; then the master is rounded once here and once there.
    """
    rows, cols = (slice(at, None if at is None else at + 128) for at in golden.get("adam_origin", (None, None)))
    w = golden["linear_in"]["w"]
    grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    beta1, beta2, lr, eps = (torch.tensor(v, dtype=torch.float32) for v in (0.9, 0.999, 1e-2, 1e-8))
    m, v = (1 - beta1) * grad, (1 - beta2) * grad * grad
    start = requantized(w, recipe)
    update = (m / (1 - beta1)) / ((v / (1 - beta2)).sqrt() + eps)
    master = start - lr * update

    recorded = golden["adam"][recipe + "/{}"][0]
    assert torch.equal(m[rows, cols], recorded["m"])
    assert torch.equal(v[rows, cols], recorded["v"])
    error = (master[rows, cols] - recorded["master"]).abs()
    half_ulp = 2.0**-24 * torch.maximum(master.abs(), start.abs())[rows, cols]
    assert (error <= 8 * 2.0**-24 * lr + 2 * half_ulp).all()
    assert torch.equal(requantized(recorded["master"], recipe), recorded["w"])
    if recipe != "delayed":  # where scale 1 leaves so few codes that none changes: the master is not rounded to bf16
        assert not torch.equal(requantized(recorded["master"].bfloat16(), recipe), recorded["w"])


def requantized(w, recipe):
    """float32 values of the weight after quantization by the recipe's rule for weights."""
    if recipe == "delayed":
        parts, fmt = with_scale(w, FP8_E4M3, 1.0), FP8_E4M3
    else:
        fmt = FP8_E4M3 if recipe == "current" else FP8_128X128
        parts = numerics.quantize(w, fmt, Scaling(power_of_two=recipe == "block"))
    assert math.prod(parts["codes"].shape) == w.numel()
    return numerics.dequantize(rowwise(fmt), parts, tuple(w.shape))
