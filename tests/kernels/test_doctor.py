"""The self-test of `quantshard doctor`: all checks pass, and each kind of them fails where a kernel is wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quantshard import kernel_dispatch
from quantshard.doctor import checks, experts, fused, steps
from quantshard.formats import FORMATS
from quantshard.modules.gemms import grouped
from quantshard.optimizers import kernel_step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = (5, 34)
IRREGULAR, *OTHERS = checks.INTERPRETED


@pytest.mark.slow
@pytest.mark.parametrize("shape", [IRREGULAR, *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in OTHERS)])
def test_all_kernels_are_right(shape: checks.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter one shape at a time, the irregular one first."""
    monkeypatch.setattr(checks, "INTERPRETED", (shape,))
    results = checks.run_checks(DEVICE)
    assert [result for result in results if result.state == "WRONG"] == []
    absent = [r.name for r in results if r.state == "not here" and not r.name.startswith(("oracle", "native"))]
    assert absent == ["quantize fp16_1x128"]
    assert len(results) > 150


def spoiled(module, name, spoil):
    """A function of a module, with what `spoil` makes of its result and arguments."""
    right = getattr(module, name)

    def wrong(*arguments, **named):
        return spoil(right(*arguments, **named), *arguments)

    return module, name, wrong


def off(tensor: torch.Tensor) -> None:
    """A single element, by half."""
    tensor[-1, -1] += 0.5 + tensor[-1, -1].abs()


def codes_off(targets, *_):
    targets[0].codes[-1, -1] ^= 1
    return targets


def high_off(outputs) -> None:
    if outputs.high is not None:
        off(outputs.high)


def right(make, *options) -> bool:
    case = make(checks.random(SHAPE, DEVICE), *options)
    return case.is_right(case.call())


CASES = {
    "norm": (lambda: fused.norm(SHAPE, DEVICE, True), fused.kn, "normalize_and_quantize",
             lambda out, *a: high_off(a[3])),
    "norm's gradient": (lambda: fused.norm(SHAPE, DEVICE, False), fused.kn, "norm_backward",
                        lambda out, *a: (out[0], out[1] * 1.01, out[2])),
    "norm's codes": (lambda: fused.norm_codes(SHAPE, DEVICE, FORMATS["mxfp8_32x32"]), fused.kn,
                     "normalize_and_quantize", lambda out, *a: codes_off(out) if out[0] else out),
    "activation": (lambda: fused.activation(SHAPE, DEVICE, "gelu"), fused.ka, "activate_and_quantize",
                   lambda out, *a: high_off(a[3])),
    "activation's gradient": (lambda: fused.activation(SHAPE, DEVICE, "swiglu"), fused.ka,
                              "activate_backward_and_quantize", lambda out, *a: high_off(a[5])),
    "activation's codes": (lambda: fused.activation_codes(SHAPE, DEVICE, FORMATS["fp8_1x128"]), fused.ka,
                           "activate_and_quantize", lambda out, *a: codes_off(out) if out[0] else out),
    "gradient's codes": (lambda: fused.gradient_codes(SHAPE, DEVICE, FORMATS["fp8_e5m2"]), fused.ka,
                         "quantize_gradient", codes_off),
    "rotary": (lambda: fused.rotary(SHAPE, DEVICE, False), fused.kr, "rotate",
               lambda out, *a: -out),
    "gradients that are not finite": (lambda: steps.too_large(SHAPE, DEVICE), steps.multi_tensor, "exceeding",
                                      lambda out, *a: out.flip(0)),
    "quantize": (lambda: right(checks.cases.quantize_case, FORMATS["fp8_1x128"], False, False),
                 checks.cases, "quantize_matrix", codes_off),
    "amax": (lambda: right(checks.cases.amax_case, FORMATS["fp8_e4m3"]),
             checks.cases.amax, "block_amax", lambda out, *a: out * 2),
    "experts' codes": (lambda: experts.are_right("delayed", SHAPE, DEVICE), grouped.grouped_kernel,
                       "quantize_expert_rows", lambda out, *a: out ^ 1),
    "experts' blocks": (lambda: experts.are_right("mxfp8", SHAPE, DEVICE), grouped.grouped_kernel,
                        "quantize_expert_blocks", lambda out, *a: (out[0].codes.bitwise_xor_(1), out)[1]),
    "experts' outputs": (lambda: experts.are_right("current", SHAPE, DEVICE), experts.grouped_matmul,
                         "rows_times_weights", lambda out, *a: -out),
    "experts' weights": (lambda: experts.are_right("block", SHAPE, DEVICE), experts.grouped_matmul,
                         "weight_gradients", lambda out, *a: out * 1.02),
    "scales": (lambda: right(checks.cases.scales_case, FORMATS["fp8_e4m3"]),
               checks.cases.scales, "scales", lambda out, *a: (out[0], out[1] * 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_kernel_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_right, module, function, spoil = CASES[name]
    assert is_right()
    monkeypatch.setattr(*spoiled(module, function, spoil))
    assert not is_right()


def test_a_wrong_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [(3, 34), (2, 5)]
    assert steps.has_oracles_bits("mxfp8", small, DEVICE.type)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_step.KernelStep, "update", lambda self, skip: [])
        assert not steps.has_oracles_bits("mxfp8", small, DEVICE.type)
    assert steps.histories(SHAPE, DEVICE)
    monkeypatch.setattr(kernel_dispatch.history_kernel, "record", lambda histories, amaxes: None)
    assert not steps.histories(SHAPE, DEVICE)
