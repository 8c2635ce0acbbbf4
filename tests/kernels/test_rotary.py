"""The rotation equals the oracle's and autograd's, to the bit."""

import itertools

import pytest
import torch

from tests.covering import exhaustive

pytest.importorskip("triton")

from quantshard.kernels.fused import rotary as kr
from quantshard.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.kernels.cases.fused import rotary_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1, 2), (3, 2, 3, 8), (2, 1, 40, 20)]  # s, b, h, d


def queries(s, b, h, d, tensor_format, dtype, seed=0):
    shape = (s, b, h, d) if tensor_format == "sbhd" else (b, s, h, d)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("interleaved", "dtype", "percent"),
    exhaustive(
        itertools.product((False, True), (torch.bfloat16, torch.float32), (1.0, 0.5)),
        [(False, torch.bfloat16, 1.0), (True, torch.float32, 0.5)],
    ),
)
def test_both_directions_are_the_oracles(interleaved, dtype, percent):
    for tensor_format in ("sbhd", "bshd"):
        for s, b, h, d in SHAPES:
            if int(d * percent) % 2:
                continue
            t = queries(s, b, h, d, tensor_format, dtype).requires_grad_()
            dy = queries(s, b, h, d, tensor_format, dtype, seed=1)
            angles = RotaryPositionEmbedding(d, percent, interleaved=interleaved)(s + 2, offset=1000, device=DEVICE)
            want = apply_rotary_pos_emb(t, angles, tensor_format, interleaved=interleaved)
            (wanted,) = torch.autograd.grad(want, t, dy)
            both = rotary_tables(angles)
            got = kr.rotate(t.detach(), *both, tensor_format, interleaved=interleaved)
            assert torch.equal(got, want)
            got = kr.rotate(dy, *both, tensor_format, interleaved=interleaved, backward=True)
            assert torch.equal(got, wanted)


def test_each_feature_has_its_own_angle():
    """The module's tables repeat an angle for both features of a plane; others need not."""
    t, angles = queries(4, 2, 3, 6, "sbhd", torch.float32), torch.randn(4, 1, 1, 6, device=DEVICE)
    for interleaved in (False, True):
        leaf = t.clone().requires_grad_()
        want = apply_rotary_pos_emb(leaf, angles, interleaved=interleaved)
        assert torch.equal(kr.rotate(t, *rotary_tables(angles), interleaved=interleaved), want)
        (wanted,) = torch.autograd.grad(want, leaf, t)
        assert torch.equal(kr.rotate(t, *rotary_tables(angles), interleaved=interleaved, backward=True), wanted)


def test_strides_are_followed():
    """Heads that lie in a wider projection, features apart, and a result that goes where it came from."""
    whole = queries(5, 2, 7, 8, "sbhd", torch.bfloat16)
    both = rotary_tables(RotaryPositionEmbedding(8)(5, device=DEVICE))
    part, apart = whole[:, :, 2:5], whole[:, :, 2:5].transpose(2, 3).contiguous().transpose(2, 3)
    want = kr.rotate(part.contiguous(), *both)
    assert torch.equal(kr.rotate(part, *both), want) and torch.equal(kr.rotate(apart, *both), want)
    rest = whole[:, :, 5:].clone()
    assert kr.rotate(part, *both, out=part).data_ptr() == part.data_ptr()
    assert torch.equal(part, want) and torch.equal(whole[:, :, 5:], rest)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (5, 0, 3, 8), (5, 2, 0, 8)])
def test_nothing_gives_nothing(shape):
    both = rotary_tables(RotaryPositionEmbedding(8)(5, device=DEVICE))
    assert kr.rotate(torch.empty(shape, device=DEVICE), *both).shape == shape


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_angles_of_each_sequence(tensor_format, kernels_on_cpu):
    """One new token of several sequences, each at a position of its own: kernels, which read angles by position, leave
    it to the oracle."""
    t, angles = queries(1, 3, 2, 8, tensor_format, torch.float32), torch.randn(1, 3, 1, 8, device=DEVICE)
    got = apply_rotary_pos_emb(t, angles, tensor_format)
    for number in range(3):
        one = t.narrow(tensor_format.index("b"), number, 1)
        want = apply_rotary_pos_emb(one, angles[:, number : number + 1], tensor_format)
        assert torch.equal(got.narrow(tensor_format.index("b"), number, 1), want)


def test_heads_that_lie_far_apart(kernels_on_cpu):
    """2**31 elements and more, of memory that is taken where it is used."""
    t = torch.empty_strided((1, 1, 3, 8), (8, 8, 2**30, 1), dtype=torch.bfloat16, device=DEVICE)
    t.copy_(queries(1, 1, 3, 8, "sbhd", torch.bfloat16))
    both = rotary_tables(RotaryPositionEmbedding(8)(1, device=DEVICE))
    assert torch.equal(kr.rotate(t, *both), kr.rotate(t.contiguous(), *both))
