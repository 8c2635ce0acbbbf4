"""The launcher of all kernels. Kernels that Triton has compiled before are called directly, in a fraction of the time.

`kernel[grid](...)` binds, hashes and prints all arguments before each launch. `launch_kernel` runs it once for each
combination of argument kinds, and caches the compiled kernel under a key that is at least as fine as Triton's own.

Internals of Triton that only this file uses, as they are in 3.6 to 3.9:

- `runtime.jit.native_specialize_impl`: the kind of an argument, computed in C: for a pointer its dtype, and whether the
  address is a multiple of 16; for an integer its bits, and whether it is 1 or a multiple of 16; tuples by entry. Here
  all arguments are included, even the ones in `do_not_specialize`, so the key can only be finer.
- `JITFunction.params` and `pre_run_hooks`; `CompiledKernel.run`, `function` and `packed_metadata`. `JITFunction.run`
  ends with the same call. The slots of constants are filled with any values; globals of kernels are constants here.
- `runtime.driver.active.get_current_stream`: PyTorch's current stream, possibly one under graph capture.
- `knobs`: hooks and modes of profilers and debuggers. While any is set, launches go through Triton.

So do launches in other versions, and of kernels that are interpreted, autotuned, or not on NVIDIA GPUs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.accelerator import current_device_index

from quantshard.kernels import graph_launch, tracing

KNOWN_TRITON: Final = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)

if KNOWN_TRITON:
    from triton import knobs
    from triton.backends.compiler import BaseBackend
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, native_specialize_impl

    # empty until a knob is set or a profiler adds hooks
    _ENTER, _EXIT = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    _RUNTIME, _COMPILATION = vars(knobs.runtime), vars(knobs.compilation)

MOST_VARIANTS: Final = 4096
"""The most compiled variants kept for one kernel; all are dropped when there are more."""


class KernelVariants:
    """Compiled variants of one kernel, keyed by the kinds of its arguments before the constants."""

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel = kernel  # so that no other kernel gets its id
        self.hooks = kernel.pre_run_hooks
        self.parameters = len(kernel.params)
        self.arguments = sum(not parameter.is_constexpr for parameter in kernel.params)
        self.tuples = [index for index, arg in enumerate(args[: self.arguments]) if isinstance(arg, tuple)]
        self.compiled: dict[Any, tuple[Any, ...]] = {}

    def keep(self, key: Any, compiled: Any, given: int) -> None:
        """Store a compiled kernel, unless it is of an unknown type; `given`: number of positional arguments."""
        if type(compiled) is not CompiledKernel:
            return
        if len(self.compiled) >= MOST_VARIANTS:
            self.compiled.clear()
        placeholders = (None,) * (self.parameters - given)
        stream = driver.active.get_current_stream
        self.compiled[key] = compiled.run, stream, compiled.function, compiled.packed_metadata, placeholders, compiled


_VARIANTS: dict[int, KernelVariants] = {}


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any
) -> tuple[Any, ...] | None:
    """Run `kernel[grid](*args, **options)` on a device; nothing on the meta device.

    Returns the compiled variant if it was launched directly. `args`: the kernel's arguments in order, optionally
    followed by the first of its constants. `options`: the other constants, and compiler options.
    """
    if tracing.on:
        graph_launch.record(kernel, grid, args, options)
        return None
    index = device.index
    if index is None:  # the CPU, or the current device
        if device.type != "meta":
            kernel[grid](*args, **options)
        return None
    if index != current_device_index():  # Triton launches on the current device, wherever the tensors are
        with torch.cuda.device(index):
            launch_kernel(kernel, grid, device, *args, **options)
        return None
    variants = _VARIANTS.get(id(kernel))
    if (
        variants is None
        or len(args) < variants.arguments  # some arguments are among the options
        or ((_ENTER or _EXIT or _RUNTIME or _COMPILATION or variants.hooks) and _are_watched(variants))
    ):
        kernel[grid](*args, **options)
        if variants is None and _is_known(kernel):
            _VARIANTS[id(kernel)] = KernelVariants(kernel, args)
        return None
    count = variants.arguments
    arguments: Any = args[:count]
    if variants.tuples:  # as plain tuples: Triton would copy named tuples twice
        arguments = list(arguments)
        for position in variants.tuples:
            if isinstance(arguments[position], tuple):
                arguments[position] = tuple(arguments[position])
        arguments = tuple(arguments)
    kinds = native_specialize_impl(BaseBackend, arguments, False, True, True)
    key = (index, kinds, args[count:], *options, *options.values())
    variant = variants.compiled.get(key)
    if variant is None:
        variants.keep(key, kernel[grid](*args, **options), len(args))
        return None
    run, stream, function, metadata, placeholders, _ = variant
    dims = len(grid)
    run(
        grid[0], grid[1] if dims > 1 else 1, grid[2] if dims > 2 else 1, stream(index), function, metadata,
        None, None, None, *args, *placeholders,
    )  # fmt: skip
    return variant


class RepeatedLaunch:
    """A launch whose tensors alone differ between calls, and integers that kernels are not specialized for.

    Its variants are found by the kinds of the tensors. `arguments_of`: fills these into the arguments.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments_of: Callable[..., tuple[Any, ...]], options: dict[str, Any]
    ) -> None:
        self.kernel, self.grid, self.arguments_of, self.options = kernel, grid, arguments_of, options
        self.padded_grid = (*grid, 1, 1)[:3]
        self.variants: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        tensors = (*written, *read)
        device = tensors[0].device
        key = None
        if KNOWN_TRITON:
            key = device.index, native_specialize_impl(BaseBackend, tensors, False, True, True)
            variant = self.variants.get(key)
            if (
                variant is not None
                and device.index == current_device_index()
                and not (_ENTER or _EXIT or _RUNTIME or _COMPILATION or self.kernel.pre_run_hooks)
            ):
                run, stream, function, metadata, placeholders, _ = variant
                run(
                    *self.padded_grid, stream(device.index), function, metadata, None, None, None,
                    *self.arguments_of(written, read), *placeholders,
                )  # fmt: skip
                return
        variant = launch_kernel(self.kernel, self.grid, device, *self.arguments_of(written, read), **self.options)
        if variant is not None:
            self.variants[key] = variant


graph_launch.register(RepeatedLaunch)


def _is_known(kernel: Any) -> bool:
    """Return True if `launch_kernel` can launch such a kernel directly: this Triton, an NVIDIA GPU, constants last."""
    if not KNOWN_TRITON or torch.version.cuda is None or type(kernel) is not JITFunction:
        return False
    constant = [parameter.is_constexpr for parameter in kernel.params]
    return constant == sorted(constant)


def _are_watched(variants: KernelVariants) -> bool:
    """Return True if launches have hooks or kernels are compiled for debugging. Compilation hooks do not count."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return bool(
        variants.hooks
        or any(getattr(hook, "calls", True) for hook in hooks)
        or knobs.runtime.debug
        or knobs.runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )
