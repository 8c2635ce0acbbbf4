"""`linear_cross_entropy` against float64 logits, within bounds that follow from the dtypes; what it allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.modules import chunked_loss

BATCH, LENGTH, FEATURES, VOCABULARY = 3, 90, 24, 301
U32 = 2.0**-24
CHUNKS = {"one chunk": 1 << 28, "three chunks": 128 * VOCABULARY}
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, smoothed": {"reduction": "sum", "label_smoothing": 0.1},
    "each token, with z-loss": {"reduction": "none", "z_loss": 0.01},
    "each token, smoothed, with z-loss": {"reduction": "none", "label_smoothing": 0.3, "z_loss": 0.01},
    "items of the batch": {"num_items_in_batch": 1000, "z_loss": 0.01},
    "another index": {"ignore_index": 7, "label_smoothing": 0.1},
}


def inputs(dtype: torch.dtype, has_bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden states, weight, labels (some are -100 or 7), and bias."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, LENGTH, FEATURES, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, FEATURES, generator=generator) / 3).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if has_bias else None
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, :40] = -100
    labels[1, 3:9] = 7
    return hidden, weight, labels, bias


class Reference:
    """Losses of each token and gradients in float64, each with a bound of our error.

    With u of the dtype and u32 of float32: a logit is off by e = u |logit| + (features + 2) u32 |hidden| |weight|; the
    probabilities by a factor of exp(2 e) and the errors of float32 sums; the gradient of a logit is rounded to the
    dtype. Gradients are sums of products with these, in float32, and rounded once.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, options: Any) -> None:
        ignore = options.get("ignore_index", -100)
        self.smoothing, self.z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
        self.u = torch.finfo(hidden.dtype).eps / 2
        self.hidden, self.weight = hidden.detach().double().flatten(0, -2), weight.detach().double()
        self.labels = labels.flatten()
        self.valid = self.labels != ignore
        columns = torch.where(self.valid, self.labels, 0)
        offset = 0.0 if bias is None else bias.detach().double()
        logits = self.hidden @ self.weight.t() + offset
        size = self.hidden.abs() @ self.weight.abs().t() + (0.0 if bias is None else offset.abs())
        self.error = (self.u * logits.abs() + (FEATURES + 2) * U32 * size).amax(-1)
        self.log_z = logits.logsumexp(-1)
        self.log_z_error = self.error + (VOCABULARY + 8) * U32 + 4 * U32 * self.log_z.abs()
        target = F.one_hot(columns, len(self.weight)).double()
        self.q = (1 - self.smoothing) * target + self.smoothing / len(self.weight)
        self.p = (logits - self.log_z[:, None]).exp()
        losses = self.log_z - (self.q * logits).sum(-1) + self.z * self.log_z**2
        self.losses = torch.where(self.valid, losses, 0.0)
        self.losses_error = self.log_z_error * (2 + 2 * self.z * self.log_z.abs()) + 8 * U32 * self.losses.abs()

    def gradients(self, factors: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Gradients of hidden, weight and bias with their bounds. `factors`: gradient of each token's loss."""
        factors = torch.where(self.valid, factors.double(), 0.0)[:, None]
        of_p = (1 + 2 * self.z * self.log_z)[:, None] * self.p
        d = factors * (of_p - self.q)
        relative = torch.expm1(2 * self.error + 2 * self.log_z_error)[:, None] + 2 * self.z * self.log_z_error[:, None]
        bound = factors.abs() * (of_p.abs() * relative + self.u * (of_p + self.q) + 1e-9)
        sums = (VOCABULARY + len(self.labels)) * U32
        pairs = []
        for product, size in (
            (d @ self.weight, bound @ self.weight.abs() + sums * (d.abs() @ self.weight.abs())),
            (d.t() @ self.hidden, bound.t() @ self.hidden.abs() + sums * (d.abs().t() @ self.hidden.abs())),
            (d.sum(0), bound.sum(0) + sums * d.abs().sum(0)),
        ):
            pairs.append((product, size + 2 * self.u * product.abs()))
        return pairs


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    excess = ((found.double() - expected).abs() / bound.clamp(min=1e-30)).max()
    assert excess <= 1, f"{float(excess):.3g} times the bound"


TRANSFORMS: dict[str, dict[str, Any]] = {
    "scaled": {"logit_scale": 0.3, "z_loss": 0.01},
    "capped": {"softcap": 2.0, "reduction": "sum"},
    "scaled, capped and smoothed": {"logit_scale": 1.7, "softcap": 4.0, "label_smoothing": 0.2, "z_loss": 0.01},
    "scaled and smoothed, each token": {"logit_scale": 1.7, "label_smoothing": 0.2, "reduction": "none"},
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_and_capped_logits(dtype: torch.dtype, transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors relative to the largest value: of float32 sums, or of four roundings of each logit to bfloat16."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", CHUNKS["three chunks"])
    options = dict(TRANSFORMS[transform])
    hidden, weight, labels, bias = inputs(dtype)
    loss = qs.linear_cross_entropy(hidden, weight, labels, bias, **options)
    loss.sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*exact).flatten(0, 1) * options.get("logit_scale", 1.0)
    if softcap := options.get("softcap"):
        logits = softcap * (logits / softcap).tanh()
    targets = labels.flatten()
    expected = F.cross_entropy(
        logits, targets, label_smoothing=options.get("label_smoothing", 0.0), reduction="none"
    ) + torch.where(targets == -100, 0.0, options.get("z_loss", 0.0) * logits.logsumexp(-1).square())
    if options.get("reduction") == "none":
        expected = expected.view(labels.shape)
    else:
        expected = expected.sum() / ((targets != -100).sum() if "reduction" not in options else 1)
    expected.sum().backward()
    bound = {torch.float32: VOCABULARY * U32, torch.bfloat16: 4 * 2.0**-8}[dtype]
    pairs = [(loss, expected), *((x.grad, y.grad) for x, y in zip((hidden, weight, bias), exact, strict=True))]
    assert all((a - b).abs().max() <= bound * b.abs().max() for a, b in pairs)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_float64(
    dtype: torch.dtype, options: str, chunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", CHUNKS[chunk])
    has_bias = options != "mean"
    hidden, weight, labels, bias = inputs(dtype, has_bias)
    arguments = OPTIONS[options]
    if "ignore_index" in arguments:
        labels = torch.where(labels == -100, arguments["ignore_index"], labels)
    reference = Reference(hidden, weight, labels, bias, arguments)
    loss = qs.linear_cross_entropy(hidden, weight, labels, bias, **arguments)
    assert loss.dtype == torch.float32
    if arguments.get("reduction") == "none":
        assert_within(loss.flatten(), reference.losses, reference.losses_error)
        grad = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1))
        factors = grad.flatten()
    else:
        count = 1 if "reduction" in arguments else arguments.get("num_items_in_batch", int(reference.valid.sum()))
        total, size = reference.losses.sum() / count, reference.losses.abs().sum() / count
        assert_within(loss, total, reference.losses_error.sum() / count + labels.numel() * U32 * size)
        grad = torch.tensor(1.7)
        factors = torch.full((labels.numel(),), 1.7 / count, dtype=torch.float64)
    loss.backward(grad)
    for leaf, (expected, bound) in zip((hidden, weight, bias), reference.gradients(factors), strict=True):
        if leaf is not None:
            assert leaf.grad is not None and leaf.grad.dtype == dtype
            assert_within(leaf.grad.view(expected.shape), expected, bound)


def test_a_second_call_has_the_same_bits_and_no_gradients_leave_the_loss_alone() -> None:
    hidden, weight, labels, bias = inputs(torch.bfloat16)
    results = []
    for _ in range(2):
        hidden.grad = weight.grad = None
        loss, z_loss = qs.linear_cross_entropy(hidden, weight, labels, bias, z_loss=0.1, return_z_loss=True)
        loss.backward()
        results.append((loss, z_loss, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[0][1].requires_grad
    with torch.no_grad():
        assert torch.equal(qs.linear_cross_entropy(hidden, weight, labels, bias, z_loss=0.1), results[0][0])


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_required_gradients_are_computed(trained: str) -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    expected = torch.autograd.grad(qs.linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    leaves = {"hidden": hidden, "weight": weight}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == trained)
    qs.linear_cross_entropy(hidden, weight, labels).backward()
    for (name, leaf), grad in zip(leaves.items(), expected, strict=True):
        assert (leaf.grad is None) == (name != trained)
        assert leaf.grad is None or torch.equal(leaf.grad, grad)


class Largest(TorchDispatchMode):
    """Records the largest number of elements that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_tensor_is_larger_than_a_chunk(smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, features, vocabulary = 4096, 8, 700
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 128 * vocabulary)
    hidden, weight = torch.randn(tokens, features), torch.randn(vocabulary, features)
    labels = torch.randint(vocabulary, (tokens,))
    head = chunked_loss.ChunkedHead(hidden, weight, None, labels, -100, smoothing, 0.0, 1.0, 0.0, vocabulary, 0, "")
    with Largest() as largest:
        head.computed(torch.ones(tokens), [True, True, False])
    assert largest.elements == 128 * vocabulary  # also the size of the loss's temporaries


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction: str) -> None:
    """In one graph, with the same bits."""
    hidden, weight, labels, bias = inputs(torch.bfloat16)

    def step(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        return qs.linear_cross_entropy(hidden * 2, weight, labels, bias, reduction=reduction, z_loss=0.01).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        loss = function(hidden, weight, labels, bias)
        results.append([loss, *torch.autograd.grad(loss, [hidden, weight, bias])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_casts_as_a_linear_layer() -> None:
    hidden, weight, labels, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = qs.linear_cross_entropy(hidden, weight, labels, bias, label_smoothing=0.1)
    loss.backward()
    h, w, b = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias))
    expected = qs.linear_cross_entropy(h, w, labels, b, label_smoothing=0.1)
    expected.backward()
    assert (
        torch.equal(loss, expected) and torch.equal(weight.grad, w.grad.float()) and weight.grad.dtype == torch.float32
    )


@pytest.mark.parametrize("tokens", [0, 5])
def test_without_tokens_the_loss_is_nan_and_the_gradient_zero(tokens: int) -> None:
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = qs.linear_cross_entropy(hidden, weight, torch.full((tokens,), -100))
    loss.backward()
    assert loss.isnan() and not hidden.grad.any() and not weight.grad.any()


def test_a_label_outside_the_vocabulary_makes_the_loss_nan() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(9, 4)
    for label in (9, -1):
        losses = qs.linear_cross_entropy(hidden, weight, torch.tensor([0, label, -100]), reduction="none")
        assert losses.isnan().tolist() == [False, True, False]


def test_mistakes() -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    with pytest.raises(ConfigurationError, match="choose one of"):
        qs.linear_cross_entropy(hidden, weight, labels, reduction="average")
    with pytest.raises(ConfigurationError, match=r"labels .* must be \["):
        qs.linear_cross_entropy(hidden, weight, labels[:, 1:])
