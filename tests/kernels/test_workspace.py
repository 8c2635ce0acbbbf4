"""Zeroed scalars: each is handed out once, also to threads that ask at the same time."""

import pytest
import torch

pytest.importorskip("triton")

from quantshard.kernels import graph_launch, workspace

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class RacingList(list[torch.Tensor]):
    """Scalars of which another thread takes the last between a look and the taking."""

    def __len__(self) -> int:
        return 1

    def pop(self, *_: object) -> torch.Tensor:
        raise IndexError("pop from empty list")


def test_the_last_scalar_may_be_taken_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = workspace.launch_queue(DEVICE)
    monkeypatch.setattr(workspace, "_FREE", {queue: RacingList()})
    one, other = workspace.zero(DEVICE), workspace.zero(DEVICE)
    assert one.data_ptr() != other.data_ptr() and len(workspace._FREE[queue]) == workspace.SCALARS - 2


def test_scalars_are_zero_and_can_be_seen_as_bytes() -> None:
    scalars = [workspace.zero(DEVICE) for _ in range(2 * workspace.SCALARS)]
    assert all(each.item() == 0 and each.view(torch.uint8).shape == (1, 4) for each in scalars)
    with graph_launch.traced_launches():
        one, other = workspace.zero(DEVICE), workspace.zero(DEVICE)
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_a_write_to_one_scalar_leaves_what_backward_saved_of_others() -> None:
    """Tensor parallelism writes a reduced amax into one, while an earlier layer's scale is saved in another."""
    scale, amax = workspace.zero(DEVICE), workspace.zero(DEVICE)
    reduction = torch.ops.aten._foreach_copy_.default
    scale.fill_(3)
    x = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    y = x * scale
    before = scale._version
    reduction([amax], [torch.full_like(amax, 5)])
    assert scale._version == before and (scale.item(), amax.item()) == (3, 5)
    y.backward()
    assert x.grad is not None and x.grad.item() == 3
    with torch.inference_mode():
        inferred = workspace.zero(DEVICE)
    inferred.add_(1)  # outside of it, and seen by its counter
    assert not inferred.is_inference() and inferred._version > 0
