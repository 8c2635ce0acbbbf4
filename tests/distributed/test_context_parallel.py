"""Layers inside PyTorch's `context_parallel`, against one process with the whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

import quantshard as qs
from quantshard.errors import ConfigurationError
from tests.distributed.pool import run_ranks
from tests.interpreter import kernels_on
from tests.pages import snippets

pytestmark = pytest.mark.distributed

HEADS, GROUPS, SIZE = 4, 2, 16
TOLERANCE = 2e-6
"""Relative: float32 sums over at most 24 keys and over ranks, in another order."""
RING, GATHER = "alltoall", "allgather"


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


@contextmanager
def shared(mesh: DeviceMesh, rotation: str, dim: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield this rank's tokens of tensors, inside `context_parallel`."""
    set_rotate_method(rotation)
    buffers = [x.detach().clone() for x in tensors]
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[dim] * len(buffers)):
            yield [x.clone() for x in buffers]
    finally:
        set_rotate_method(GATHER)


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()


# The core ------------------------------------------------------------------------------------------------------------

Case = tuple[str, dict[str, Any], dict[str, Any]]


def attended(rotation: str, cases: list[Case], by_group: bool) -> list[float]:
    """The largest difference of each case from one process: of outputs and of gradients."""
    mesh, tokens = cp_mesh(), 8 * dist.get_world_size()
    return [difference(mesh, tokens, rotation, by_group, *case) for case in cases]


def difference(
    mesh: DeviceMesh, tokens: int, rotation: str, by_group: bool, layout: str, options: Any, arguments: Any
) -> float:
    shape = {"sbhd": (tokens, 2), "bshd": (2, tokens), "thd": (tokens,)}[layout]
    dim, generator = int(layout == "bshd"), torch.Generator().manual_seed(0)
    qkv = [torch.randn(*shape, heads, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
    dy = torch.randn(*shape, HEADS * SIZE, generator=generator)
    core = qs.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format=layout, device="cpu", **options)
    if core.attn_mask_type == "padding_causal":
        lengths = [[3, 0, tokens - 8, 4, 1], [tokens - 2, 2, 0, 0, 0]]
        boundaries = torch.tensor([[0, *accumulate(row)] for row in lengths], dtype=torch.int32)
        arguments = arguments | {"cu_seqlens_q": boundaries[0] if layout == "thd" else boundaries}
    whole = [x.requires_grad_() for x in qkv]
    wanted = core(*whole, **arguments)
    wanted.backward(dy)
    with shared(mesh, rotation, dim, *qkv, dy, wanted, *(x.grad for x in whole)) as (q, k, v, dy, *wanted_here):
        if by_group:
            core.set_context_parallel_group(mesh.get_group(), cp_comm_type="p2p" if rotation == RING else "all_gather")
        part = [x.requires_grad_() for x in (q, k, v)]
        out = core(*part, **arguments)
        out.backward(dy)
    return max(map(off, [out, *(x.grad for x in part)], wanted_here))


PLAIN: list[Case] = [
    ("sbhd", {}, {}),
    ("bshd", {}, {}),
    ("bshd", {"attn_mask_type": "no_mask"}, {}),
    ("bshd", {"softmax_scale": 0.5}, {"checkpoint_core_attention": True}),
]
PACKED = {"attn_mask_type": "padding_causal"}
OTHERS: list[Case] = [
    ("bshd", {"window_size": (5, 0)}, {}),
    ("sbhd", {"softmax_type": "off-by-one", "softcap": 3.0}, {}),
    ("bshd", {}, {"core_attention_bias_type": "alibi"}),
    ("bshd", {"attention_backend": "unfused"}, {}),
    ("bshd", PACKED, {}),
    ("sbhd", {**PACKED, "softcap": 2.0}, {}),
    ("thd", PACKED, {}),
    ("thd", {**PACKED, "window_size": (4, 0)}, {}),
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_attention_is_that_of_whole_sequences(ranks: int) -> None:
    for rotation, cases in ((RING, PLAIN), (GATHER, PLAIN + OTHERS)):
        for by_group in (False, True):
            for found in run_ranks(ranks, attended, rotation, cases, by_group):
                assert max(found) <= TOLERANCE, dict(zip(map(str, cases), found, strict=True))


def refusals() -> list[str]:
    mesh, found = cp_mesh(), []
    core = qs.DotProductAttention(2, 8, qkv_format="bshd", device="cpu")
    padding = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        (GATHER, 5, {}),
        (RING, 4, {"window_size": (2, 0)}),
        (GATHER, 4, {"window_size": (2, 2), "attn_mask_type": "no_mask"}),
        (GATHER, 4, {"attn_mask_type": "padding", "attention_mask": (padding, padding)}),
        (GATHER, 4, {"attn_mask_type": "arbitrary", "attention_mask": padding[..., :4]}),
    ]
    for rotation, tokens, arguments in cases:
        x = torch.zeros(1, tokens, 2, 8)
        with shared(mesh, rotation, 1, torch.zeros(1, 8)):
            try:
                core(x, x, x, **arguments)
            except ConfigurationError as error:
                found.append(str(error))
    return found


def test_what_is_not_supported_is_named_on_every_rank() -> None:
    for odd, ring, later, padding, mask in run_ranks(2, refusals):
        assert odd.endswith("does not support 5 tokens per rank; make the sequence a multiple of 4")
        assert ring.startswith("ring attention does not support a sliding window; use set_rotate_method('allgather')")
        assert later.endswith("windows with later keys; use window_size=(left, 0)")
        assert padding.endswith("padding; pack the sequences with qkv_format='thd'")
        assert mask.endswith("attention_mask [1, 1, 1, 4]; give it this rank's queries and all keys")


# Layers --------------------------------------------------------------------------------------------------------------

HIDDEN, BATCH = 64, 2


def layer(recipe: str, **options: Any) -> qs.TransformerLayer:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        return qs.TransformerLayer(
            HIDDEN, 128, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
            normalization="RMSNorm", device="cpu", **options,
        )  # fmt: skip


def run(module: qs.TransformerLayer, recipe: str, x: Tensor, dy: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward, after a first forward; return the queries and the output."""
    seen: list[Tensor] = []
    with module.self_attention.layernorm_qkv.register_forward_hook(lambda *args: seen.append(args[2][0])):
        for _ in range(2):
            with qs.autocast(recipe=recipe):
                out = module(x, rotary_pos_emb=angles)
    out.backward(dy)
    return seen[-1].detach(), out.detach()


def layer_differences(recipe: str, rotation: str, wrapping: str, tokens: int = 768) -> dict[str, float]:
    generator, mesh = torch.Generator().manual_seed(1), cp_mesh()
    x, dy = (torch.randn(BATCH, tokens, HIDDEN, generator=generator) for _ in range(2))
    angles = qs.RotaryPositionEmbedding(HIDDEN // HEADS)(x.shape[1], device="cpu")
    plain, module = layer(recipe), layer(recipe)
    whole = x.clone().requires_grad_()
    queries, wanted = run(plain, recipe, whole, dy, angles)
    if wrapping == "fsdp":
        fully_shard(module, mesh=mesh)
    with shared(mesh, rotation, 1, x, dy, queries, wanted, whole.grad) as (x, dy, queries, wanted, dx):
        # angles of the whole sequence or of this rank's tokens
        here = angles if rotation == RING else module.self_attention.core_attention.context_parallel().local(angles)
        out_queries, out = run(module, recipe, x.requires_grad_(), dy, here)
    found = {"bits before attention": float(not torch.equal(out_queries, queries))}
    found |= {"output": off(out, wanted), "input": off(x.grad, dx)}
    for (name, param), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        grad = param.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor() * dist.get_world_size()
        else:
            dist.all_reduce(grad)
        found[name] = off(grad, other.grad)
    return found


LAYER_TOLERANCES = {"bf16": 5e-6, "block": 1e-2, "mxfp8": 1e-2, "delayed": 1e-2, "current": 1e-2}
"""Relative. In FP8, a last bit of attention changes a code in ten thousand or so, by a step of 2**-4 or 2**-3."""


@pytest.mark.parametrize(
    ("recipe", "rotation", "wrapping", "ranks"),
    [
        ("bf16", RING, "fsdp", 2),
        ("bf16", GATHER, "", 3),
        ("block", GATHER, "fsdp", 3),
        ("mxfp8", RING, "", 2),
        ("delayed", GATHER, "fsdp", 2),
        ("current", GATHER, "fsdp", 3),
        ("current", RING, "", 2),
    ],
)
def test_layers_are_those_of_whole_sequences(recipe: str, rotation: str, wrapping: str, ranks: int) -> None:
    """Everything before the attention of the first forward and of the second has the same bits."""
    for found in run_ranks(ranks, layer_differences, recipe, rotation, wrapping):
        assert found.pop("bits before attention") == 0.0
        assert max(found.values()) <= LAYER_TOLERANCES[recipe], found


def on_kernels(recipe: str) -> dict[str, float]:
    with kernels_on():
        return layer_differences(recipe, GATHER, "", 48)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are on the CPU, where the interpreter runs then")
def test_kernels_scale_by_the_amaxes_of_all_ranks() -> None:
    pytest.importorskip("triton")
    for found in run_ranks(2, on_kernels, "current"):
        assert found.pop("bits before attention") == 0.0
        assert max(found.values()) <= LAYER_TOLERANCES["current"], found


def run_snippet() -> float:
    (snippet,) = snippets("docs/distributed.md#context-parallelism")
    x, angles = torch.ones(1, 8, HIDDEN), qs.RotaryPositionEmbedding(HIDDEN // HEADS)(8, device="cpu")
    names: dict[str, Any] = {"qs": qs, "mesh": cp_mesh(), "layer": layer("current"), "x": x, "angles": angles}
    exec(snippet, names)
    loss: Tensor = names["loss"].detach()
    assert x.shape == (1, 8, HIDDEN) and loss > 0
    return loss.item()


def test_the_snippet_runs() -> None:
    run_ranks(2, run_snippet)
