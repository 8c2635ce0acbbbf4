"""The meta device in the place of a GPU: tensors without values go through the same kernels and products as there.

So the memory of a step is counted where there is no GPU, and no data: every tensor that a GPU would allocate is made,
of its shape and dtype, and has no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quantshard import kernel_dispatch
from quantshard.gemm import scaled_products
from quantshard.gemm.scaled_products import Capability


@contextmanager
def described_gpu(capability: Capability) -> Iterator[None]:
    """Within it the meta device has the kernels, and the scaled products, of a GPU of this compute capability.

    Other devices are as before. Launches do nothing (`kernels.launch`); a scaled product is PyTorch's, which is for its
    caller to answer where this version of PyTorch knows none of tensors without values.
    """
    devices, known = kernel_dispatch.KERNEL_DEVICES, scaled_products.META_CAPABILITY
    kernel_dispatch.KERNEL_DEVICES, scaled_products.META_CAPABILITY = devices | {"meta"}, capability
    scaled_products.capability_of.cache_clear()
    try:
        yield
    finally:
        kernel_dispatch.KERNEL_DEVICES, scaled_products.META_CAPABILITY = devices, known
        scaled_products.capability_of.cache_clear()
