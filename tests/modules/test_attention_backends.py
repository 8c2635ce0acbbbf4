"""Which backend of PyTorch's attention is tried where, and that the choice changes nothing but the way."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.modules import attention_backends as attention
from quantshard.modules.attention_backends import AUTO, BACKENDS, backend_order
from quantshard.tools.observe import explain
from tests.covering import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
SDPA = ("flash", "cudnn", "efficient", "math")
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_cudnn_is_first_where_it_was_measured(hopper: None) -> None:
    for dtype, size in ((BF16, 128), (torch.float16, 64), (BF16, 8)):
        assert backend_order(AUTO, GPU, dtype, size, True) == CUDNN_FIRST
    for dtype, size, plain in ((torch.float32, 128, True), (BF16, 132, True), (BF16, 136, True), (BF16, 100, True)):
        assert backend_order(AUTO, GPU, dtype, size, plain) == ()
    assert backend_order(AUTO, GPU, BF16, 128, False) == ()  # a mask, or dropout


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((10, 0), None), ((9, 0), "6.4")])
def test_elsewhere_pytorch_chooses(capability, hip, hopper, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert backend_order(AUTO, GPU, BF16, 128, True) == ()
    assert backend_order(AUTO, torch.device("cpu"), BF16, 128, True) == ()


def test_deterministic_algorithms_leave_cudnn_out(hopper: None, deterministic: None) -> None:
    assert (
        backend_order(AUTO, GPU, BF16, 128, True)
        == backend_order(AUTO, GPU, BF16, 128, False)
        == ("flash", "efficient", "math")
    )


def test_what_the_caller_disabled_stays_so(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert backend_order(AUTO, GPU, BF16, 128, True) == ()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert backend_order(AUTO, GPU, BF16, 128, True) == ("cudnn", "math")
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert backend_order(AUTO, GPU, BF16, 128, True) == ("math",)


@pytest.mark.parametrize("asked", SDPA)
def test_what_is_asked_for_is_tried_alone(asked: str, hopper: None, deterministic: None) -> None:
    assert backend_order(asked, GPU, torch.float32, 3, False) == (asked,)


def heads(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 2, 6, 16), (7, 2, 2, 16), (7, 2, 2, 16)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def attended(backend: str, qkv: list[Tensor]) -> list[Tensor]:
    out = qs.DotProductAttention(6, 16, 2, attention_backend=backend)(*qkv)
    return [out, *torch.autograd.grad(out, qkv, out.detach())]


@pytest.mark.parametrize("asked", BACKENDS[1:])
def test_backends_agree_or_are_refused(asked: str) -> None:
    """The CPU has flash and math. What PyTorch was told before is as it was."""
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    if asked in ("flash", "math", "unfused"):
        for a, b in zip(attended(asked, heads()), attended(AUTO, heads()), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    else:
        reason = rf"attention by {asked} is not available for queries \(2, 6, 7"
        if asked not in SDPA:
            reason = rf"attention_backend='{asked}' does not support torch.float32 on cpu with 16 features"
        with pytest.raises(ConfigurationError, match=reason):
            attended(asked, heads())
    assert before == (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())


def test_other_errors_are_pytorchs() -> None:
    q, k, v = heads()
    with pytest.raises(RuntimeError, match="dtype"):
        attention.attend(("math",), q.to(BF16), k, v)


def test_the_first_that_works_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(attention, "backend_order", lambda *_: ("cudnn", "efficient", "math"))
    monkeypatch.setattr(attention, "sdpa_kernel", lambda *a, **k: told.append((a, k)) or sdpa_kernel(*a, **k))
    found = attended(AUTO, heads())
    in_order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert told == [((in_order,), {"set_priority": True})]
    for a, b in zip(found, attended("math", heads()), strict=True):
        assert torch.equal(a, b)


def test_a_checkpointed_core_keeps_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(attention, "backend_order", lambda *_: chosen.append(1) or ("math",))
    qkv = heads()
    out = qs.DotProductAttention(6, 16, 2)(*qkv, checkpoint_core_attention=True)
    assert all(map(torch.equal, torch.autograd.grad(out, qkv, out.detach()), attended("math", heads())[1:]))
    assert len(chosen) == 2  # of the two forwards


def test_layers_hand_it_down_and_other_names_are_refused() -> None:
    layer = qs.TransformerLayer(24, 40, 4, attention_backend="math")
    core = layer.self_attention.core_attention
    assert core.attention_backend == "math" and "attention_backend='math'" in repr(core)
    with pytest.raises(ConfigurationError, match=r"attention_backend='xformers'.*auto, flash, cudnn"):
        qs.MultiheadAttention(24, 4, attention_backend="xformers")


def test_the_order_is_a_constant_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's settings, which it is made from, are not traced."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    function = torch.compile(
        lambda x: x + len(backend_order(AUTO, GPU, BF16, 128, True)), fullgraph=True, backend="eager"
    )
    assert function(torch.zeros(())) == 4


@torch.compiler.assume_constant_result
def as_on_hopper(*_: object) -> tuple[str, ...]:
    return CUDNN_FIRST


@pytest.mark.parametrize(
    ("asked", "backend"),
    exhaustive(
        itertools.product(("math", AUTO, "as on Hopper"), ("aot_eager", "inductor")),
        [("math", "aot_eager"), (AUTO, "aot_eager"), ("as on Hopper", "aot_eager")],
    ),
)
def test_one_graph_with_any_choice(backend: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, PyTorch's own, and an order of several."""
    torch._dynamo.reset()
    if asked == "as on Hopper":
        monkeypatch.setattr(attention, "backend_order", as_on_hopper)
    attend = qs.DotProductAttention(6, 16, 2, attention_backend="math" if asked == "math" else AUTO)
    found = []
    for run in (torch.compile(attend, fullgraph=True, backend=backend), attend):
        qkv = heads()
        out = run(*qkv)
        found.append([out, *torch.autograd.grad(out, qkv, out.detach())])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*found, strict=True))


def test_explain_tells_the_backend(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.ModuleList(qs.TransformerLayer(32, 40, 4, params_dtype=BF16, device="meta") for _ in range(3))
    report = explain(layers)
    assert report.attention == ("0.self_attention.core_attention and 2 more: attention by PyTorch's own choice",)
    assert report.attention[0] in " ".join(str(report).split()) and report.attention[0] in report.to_json()
    monkeypatch.setattr(sys.modules["quantshard.tools.observe.explain"], "_device", lambda _: GPU)
    assert explain(layers[0]).attention == (
        "self_attention.core_attention: attention by cudnn, else flash, efficient, math",
    )
    assert explain(torch.nn.Linear(3, 3)).attention == ()


@gpu
def test_on_hopper_cudnn_runs_and_agrees() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    found = {}
    for name in BACKENDS:
        # PyTorch 2.11 has "efficient" for as many heads of keys as of queries alone, and these have a third
        with suppress(ConfigurationError) if name == "efficient" else nullcontext():
            found[name] = attended(name, heads(BF16, "cuda"))
    exact = attended("math", [x.detach().double().requires_grad_() for x in heads(BF16, "cuda")])
    for name, tensors in found.items():
        for a, b in zip(tensors, exact, strict=True):
            assert (a.double() - b).norm() <= 2**-6 * b.norm(), name
    for name in (AUTO, "cudnn", "flash"):
        core = qs.DotProductAttention(6, 16, 2, attention_backend=name)
        node, names = core(*heads(BF16, "cuda")).grad_fn, []
        while node is not None:
            names.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        assert any(("Flash" if name == "flash" else "Cudnn") in each for each in names), names
