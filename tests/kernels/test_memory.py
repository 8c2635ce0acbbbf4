"""`tests.memory` finds a kernel that reads or writes outside of tensors, and no other."""

import pytest
import torch

from tests.memory import memory_checked

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no interpreter")

COUNT = 24


@triton.jit
def _copy(x_ptr, y_ptr, read, write, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < read, other=0.0), mask=at < write)


@triton.jit
def _by_address(table, y_ptr, at):
    x_ptr = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.atomic_add(y_ptr, tl.load(x_ptr + at))


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        (COUNT, COUNT, ""),
        (COUNT + 1, COUNT, "create_masked_load: 1 of 25 elements of 4 bytes are in no tensor, the first 4 bytes past"),
        (COUNT, COUNT + 8, "create_masked_store: 8 of 32 elements of 4 bytes are in no tensor, the first 4 bytes past"),
    ],
)
def test_accesses_by_pointers(read: int, write: int, message: str) -> None:
    x, y = torch.randn(COUNT), torch.zeros(COUNT)
    with memory_checked() as memory:
        if message:
            with pytest.raises(Exception, match=message):
                _copy[(1,)](x, y, read, write, 32)
        else:
            _copy[(1,)](x, y, read, write, 32)
            assert torch.equal(x, y) and memory.accesses == 2


@pytest.mark.parametrize(("at", "is_inside"), [(COUNT - 1, True), (COUNT, False), (-1, False)])
def test_accesses_by_an_address_in_a_table(at: int, is_inside: bool) -> None:
    """Tables of optimizers hold addresses, of tensors that no argument of a kernel is."""
    x, y = torch.randn(COUNT), torch.zeros(1)
    table = torch.tensor([x.data_ptr()])
    with memory_checked() as memory:
        if is_inside:
            _by_address[(1,)](table, y, at)
            assert y == x[at] and memory.accesses == 3
        else:
            with pytest.raises(Exception, match="in no tensor"):
                _by_address[(1,)](table, y, at)


def test_a_view_ends_where_its_tensor_does() -> None:
    x, y = torch.randn(COUNT), torch.zeros(COUNT)
    with memory_checked():
        _copy[(1,)](x[:4], y, COUNT, COUNT, 32)  # of the same memory
        with pytest.raises(Exception, match="1 of 21 elements"):
            _copy[(1,)](x[4:], y, COUNT - 3, 0, 32)
