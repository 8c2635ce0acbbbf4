"""`linear_cross_entropy` with a sharded vocabulary, and converted models with it under FSDP2 and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

import quantshard as qs
from quantshard.interop.conversion.head_loss import DeferredLogits
from quantshard.modules import chunked_loss
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
TOKENS, FEATURES, VOCABULARY = 300, 16, 301
LAYOUTS = ("plain", "replicated", "sequence parallel")


def generated(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_a_sharded_vocabulary(layout: str, options: dict[str, Any]) -> list[Tensor]:
    """Loss and gradients of hidden, weight and bias, less those of float64, relative to the largest."""
    chunked_loss.LOGITS_AT_ONCE = 128 * VOCABULARY  # type: ignore[misc]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = [
        generated(TOKENS, FEATURES, seed=0),
        generated(VOCABULARY, FEATURES, seed=1),
        generated(VOCABULARY, seed=2),
    ]
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(3))
    labels[:20] = -100
    hidden: Tensor = values[0].clone().requires_grad_()
    weight, bias = (distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in values[1:])
    if layout != "plain":
        hidden = distribute_tensor(
            values[0], mesh, [Replicate() if layout == "replicated" else Shard(0)]
        ).requires_grad_()
    loss = qs.linear_cross_entropy(hidden, weight, labels, bias, **options)
    loss.sum().backward()
    exact = [x.double().requires_grad_() for x in values]
    scale, softcap = options.get("logit_scale", 1.0), options.get("softcap", 0.0)
    logits = F.linear(*exact) * scale
    logits = (logits / softcap).tanh() * softcap if softcap else logits
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    expected = expected + torch.where(labels == -100, 0.0, z_loss * logits.logsumexp(-1).square())
    if options.get("reduction") != "none":
        expected = expected.sum() / (labels != -100).sum()
    expected.sum().backward()
    results = [loss, *(x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in (hidden, weight, bias))]
    pairs = zip(results, [expected, *(x.grad for x in exact)], strict=True)
    return [((found - wanted).abs().max() / wanted.abs().max()).detach() for found, wanted in pairs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sharded_vocabulary_gives_the_loss_and_gradients_of_the_whole(ranks: int, layout: str) -> None:
    """Within the error of float32 sums of 301 terms; 301 rows are divided unevenly."""
    smoothed = {"label_smoothing": 0.1, "z_loss": 0.01}
    for options in ({}, {"reduction": "none", **smoothed}, {"logit_scale": 0.7, "softcap": 3.0, **smoothed}):
        for errors in run_ranks(ranks, with_a_sharded_vocabulary, layout, options):
            assert max(errors) <= VOCABULARY * 2.0**-24


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip


def of_a_model(loss: str, sharding: str, tied: bool, recipe: Any = "block") -> tuple[Tensor, dict[str, Tensor], bool]:
    """Loss of a converted Llama, its gradients, and whether its logits were deferred."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    kind, config = (Gemma2ForCausalLM, Gemma2Config) if tied else (LlamaForCausalLM, LlamaConfig)
    model = kind(config(**SIZES, tie_word_embeddings=tied))
    qs.convert(model, recipe, loss=loss)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    if sharding == "tp":
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    else:
        tokens = tokens[dist.get_rank() :][:1]
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if sharding == "fsdp, head by itself":
            fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits.argmax(-1).shape == tokens.shape
    output.loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if "lm_head" in name or "embed" in name}
    full = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return output.loss.detach(), full, isinstance(output.logits, DeferredLogits)


@pytest.mark.parametrize(
    ("sharding", "tied", "recipe"),
    [
        ("fsdp", True, "block"),
        pytest.param("fsdp", False, "block", marks=pytest.mark.exhaustive),
        ("fsdp, head by itself", False, "block"),
        ("fsdp, head by itself", False, {"lm_head": "mxfp8", "*": "block"}),
        pytest.param("fsdp", False, {"lm_head": "mxfp8", "*": "block"}, marks=pytest.mark.exhaustive),
        ("tp", False, "block"),
    ],
)
def test_a_sharded_model_has_the_loss_of_its_logits(sharding: str, tied: bool, recipe: Any) -> None:
    """The tied model caps its logits."""
    chunked, plain = (run_ranks(2, of_a_model, loss, sharding, tied, recipe) for loss in ("chunked", "model"))
    for (loss, grads, is_deferred), (plain_loss, plain_grads, _) in zip(chunked, plain, strict=True):
        assert is_deferred
        torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
        for name, grad in grads.items():
            # gradients of the head; those of the embedding also come through quantized GEMMs
            if "lm_head" in name:
                assert (grad - plain_grads[name]).norm() <= 1e-5 * grad.norm()
            assert (grad - plain_grads[name]).norm() <= 0.1 * grad.norm()
