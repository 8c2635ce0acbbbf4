"""Modules that consist of other modules and have no parameters of their own."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from quantshard.collectives.process_groups import Group


class CompositeModule(nn.Module):
    """A module that has no parameters of its own, only children with parameters."""

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Put the parameters of all children on the tensor-parallel axis of a mesh; see `Linear.set_device_mesh`."""
        for child in self._cut():
            child.set_device_mesh(tp_mesh, weight_mesh)
        self._on_mesh()

    def set_tensor_parallel_group(self, tp_group: Group) -> None:
        """Set the tensor-parallel process group of all children; under FSDP2 use `set_device_mesh`."""
        for child in self._cut():
            child.set_tensor_parallel_group(tp_group)
        self._on_mesh()

    def _on_mesh(self) -> None:
        """Check or adapt the children after a mesh was set."""

    def set_context_parallel_group(self, *args: Any, **kwargs: Any) -> None:
        """Let ranks share sequences; see `DotProductAttention.set_context_parallel_group`."""
        for child in self.children():
            getattr(child, "set_context_parallel_group", lambda *_, **__: None)(*args, **kwargs)

    def _cut(self) -> Iterable[Any]:
        """The children that tensor parallelism applies to."""
        return self.children()

    def need_backward_dw(self) -> bool:
        """Return whether weight gradients of a child wait for `backward_dw`."""
        return any(child.need_backward_dw() for child in self._with_wgrads())

    def backward_dw(self) -> None:
        """Compute the weight gradients of all children that wait; see `Linear.backward_dw`."""
        for child in self._with_wgrads():
            child.backward_dw()

    def _with_wgrads(self) -> Iterable[Any]:
        """Children whose weight gradients can wait."""
        return [child for child in self.children() if hasattr(child, "need_backward_dw")]

    def reset_parameters(self) -> None:
        """Fill the parameters of all children with their initial values; see `Linear.reset_parameters`."""
        for child in self.children():
            reset: Any = getattr(child, "reset_parameters", None)
            if reset is not None:
                reset()


def child_name(parent: str | None, child: str) -> str | None:
    """The qualified name of a child; None if the parent has no name."""
    return None if parent is None else f"{parent}.{child}"
