"""The meta device as a stand-in for a GPU: meta tensors go through the same kernels and products.

This counts the memory of a step without a GPU and without data: every tensor that a GPU would allocate is created with
its shape and dtype, but without bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from quantshard import kernel_dispatch
from quantshard.gemm import hardware
from quantshard.gemm.hardware import Capability


@contextmanager
def described_gpu(capability: Capability) -> Iterator[None]:
    """Give the meta device the kernels and scaled products of a GPU with this compute capability.

    Other devices are unchanged. Kernel launches do nothing (`kernels.launch`). Scaled products are PyTorch's; the
    caller must answer them if this version of PyTorch does not support them on meta tensors.
    """
    devices_before, capability_before = kernel_dispatch.KERNEL_DEVICES, hardware.META_CAPABILITY
    kernel_dispatch.KERNEL_DEVICES, hardware.META_CAPABILITY = devices_before | {"meta"}, capability
    hardware.capability_of.cache_clear()
    try:
        yield
    finally:
        kernel_dispatch.KERNEL_DEVICES, hardware.META_CAPABILITY = devices_before, capability_before
        hardware.capability_of.cache_clear()
