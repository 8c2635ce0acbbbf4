"""A layer keeps for backward what docs/performance.md says, and the peak of a step follows from that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import quantshard as qs
from benchmarks import memory
from benchmarks.memory import SMALL
from quantshard import kernels, private_torch
from quantshard.gemm import operands
from tests.pages import section

if not kernels.USABLE:
    pytest.skip("counted with the kernels, which need Triton", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA_8B = {"h": 4096, "f": 14336, "k": 1024, "n": 32}
SIZES = {"h": SMALL.hidden, "f": SMALL.ffn, "k": SMALL.kv_heads * SMALL.head, "n": SMALL.heads}
SECTION = "docs/performance.md#what-a-layer-keeps-for-backward"
RECIPES = ("delayed", "current", "block", "mxfp8")
STORED = "f + f/32"
"""Of gate and of up with activation_storage="fp8": codes and scales."""
MADE_AGAIN = 2
"""How many of the last rows are not kept with recompute_activation=True."""


def rows() -> list[list[str]]:
    """Of the table: tensor, bytes for a token, recipes, and the bytes of Llama-3-8B."""
    table = section(SECTION).split("| tensor | bytes for a token |")[1].split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def size(formula: str, sizes: dict[str, int]) -> float:
    """Of "2h + 4k" and the like."""
    return float(eval(re.sub(r"(\d)([a-z])", r"\1*\2", formula), {}, dict(sizes)))


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_table_is_what_a_layer_keeps(recipe: str, recomputes: bool, stores: bool) -> None:
    told = rows()[:-MADE_AGAIN] if recomputes else rows()
    expected: list[float] = []
    for name, formula, recipes, _ in told:
        if recipes == "all" or recipe in recipes:
            codes = stores and name in ("gate", "up")
            expected += [size(each, SIZES) for each in (STORED.split(" + ") if codes else [formula])]
    kept = memory.saved_storages(recipe, recomputes, stores)
    assert [each.bytes for each in kept if each.bytes > 4] == expected  # but for statistics of rows


def test_the_table_for_llama_8b() -> None:
    assert [size(formula, LLAMA_8B) for _, formula, _, _ in rows()] == [float(bytes_) for *_, bytes_ in rows()]


def test_what_codes_of_gate_and_up_take_for_llama_8b() -> None:
    """Totals of the text, and peaks that are planned."""
    text = " ".join(section(SECTION).split())
    assert f"gate and up take {STORED} bytes each" in text
    fewer = 2 * (size("2f", LLAMA_8B) - size(STORED, LLAMA_8B))
    for before, after in (("108,672", "80,896"), ("109,120", "81,344"), ("94,336", "66,560")):
        assert int(before.replace(",", "")) - fewer == int(after.replace(",", "")) and before in text and after in text
    subject = next(iter(memory.BLOCKS))
    planned = [f"{memory.planned_gib(subject, f'delayed{way}, stored'):.2f}" for way in ("", ", recomputed")]
    assert "planned to peak at {} GiB, and {}".format(*planned) in text


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_peak_of_a_step(recomputes: bool) -> None:
    """Current scaling keeps what delayed scaling keeps; the peak adds what docs/performance.md#kernels says."""
    h, f = SIZES["h"], SIZES["f"]
    added = {recipe: memory.peak(recipe, recomputes) for recipe in ("delayed", "current", "block")}
    assert added["current"].after_forward <= added["delayed"].after_forward
    assert added["current"].in_backward <= added["delayed"].in_backward
    for recipe, found in added.items():
        scales = 1.04 if recipe == "block" else 1.0
        most = (4 * f + h if recomputes else 2 * f + 4 * f - f) * scales
        assert 0.95 * most < found.in_backward - found.after_forward <= most + 16, recipe


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_emulated_products_take_no_more_than_native_ones(recipe: str) -> None:
    """Of large gradients, whose values are twice the bytes of codes, no two wait for their products."""
    emulated, native = (memory.peak(recipe, capability=capability) for capability in ((9, 0), (10, 0)))
    assert emulated.after_forward == native.after_forward and emulated.in_backward < 1.01 * native.in_backward


def test_planned_peaks_are_those_measured_on_gpus() -> None:
    """The table of RESULTS.md; of the models of transformers by `benchmarks/memory.py --against` alone."""
    text = (Path(__file__).parents[1] / "benchmarks" / "RESULTS.md").read_text()
    blocks, steps = ([m for m in memory.MEASURED if m.subject in those] for those in (memory.BLOCKS, memory.STEPS))
    arms = [*blocks, *steps]
    assert (len(blocks), len(steps)) == (8, 10)
    for subject, arm, day, gib in arms:
        found = memory.planned_gib(subject, arm)
        assert abs(found / gib - 1) < 0.07, (subject, arm, found)
        assert f"| {subject} | {arm} | {day} | {gib:.2f} | {found:.2f} | {found / gib - 1:+.1%} |" in text


def test_attention_that_is_run_again_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the codes are kept of its output, which are half of it; else the gradients are the same without them."""
    monkeypatch.setattr(operands, "LARGE", 0)

    def run(**options: bool) -> tuple[list[torch.Tensor], list[bool]]:
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="current"):
            module = qs.MultiheadAttention(64, 4, attention_dropout=0.0, bias=False, params_dtype=torch.bfloat16)
        x = torch.randn(8, 2, 64).bfloat16().requires_grad_()
        seen: list[bool] = []
        with monkeypatch.context() as patch:
            if not options.pop("keeps_output", True):
                patch.setattr(private_torch, "is_kept_output", lambda x: False)
            real = private_torch.is_kept_output
            patch.setattr(private_torch, "is_kept_output", lambda x: seen.append(real(x)) or seen[-1])
            with qs.autocast(recipe="current"):
                y = module(x, **options)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(p.grad for p in (x, *module.parameters()))], seen

    found, seen = run()
    codes_kept, _ = run(keeps_output=False)
    again, not_seen = run(checkpoint_core_attention=True)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(found, codes_kept, again, strict=True))
    assert any(seen) and not any(not_seen)
