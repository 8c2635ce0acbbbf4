"""The one place that launches kernels. What Triton compiled before is called directly, in a fraction of the time.

`kernel[grid](...)` binds, hashes and prints all arguments before each launch. `launch_kernel` lets it do so once for
each kind of arguments, and keeps the compiled kernel by a key that tells apart whatever Triton compiles anew for.

What is used of Triton's inside, here and nowhere else, as it is in 3.6 to 3.9:

- `runtime.jit.native_specialize_impl`: the kind of an argument, in C. Of a pointer it tells the dtype and whether the
  address is a multiple of 16; of an integer whether it is 1 or a multiple of 16, and the bits that it takes; None,
  bool and float by their types; tuples entry by entry. Triton's own key is made of it. Here it is asked about every
  argument, those of `do_not_specialize` too, which tells more kinds apart and never fewer.
- `JITFunction.params` and `pre_run_hooks`; `CompiledKernel.run`, `function` and `packed_metadata`. `JITFunction.run`
  ends with the same call. In the places of constants anything may stand, but something must. Globals that a kernel
  reads, which Triton compares before each launch, are constants here.
- `runtime.driver.active.get_current_stream`: PyTorch's stream, which may be one that a graph is captured from.
- `knobs`: hooks and modes of profilers and debuggers. While there are some, launches are Triton's own.

So they are under any other version, and of kernels for other devices, interpreted or autotuned.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch.accelerator import current_device_index

FIRST_TRITON, LAST_TRITON = (3, 6), (3, 9)
"""The first and the last minor version of Triton whose launches are known."""

KNOWN_TRITON: Final = FIRST_TRITON <= tuple(map(int, triton.__version__.split(".")[:2])) <= LAST_TRITON

if KNOWN_TRITON:
    from triton import knobs
    from triton.backends.compiler import BaseBackend
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, native_specialize_impl

    # empty until a knob is set, or a profiler adds its hooks
    _ENTER, _EXIT = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    _RUNTIME, _COMPILATION = vars(knobs.runtime), vars(knobs.compilation)

MOST_VARIANTS: Final = 4096
"""Of one kernel. Before one more is kept, all are dropped."""


class KernelVariants:
    """What Triton has compiled of a kernel, by the kinds of its arguments, as `launch_kernel` calls it.

    `arguments`: how many parameters stand before the constants. `tuples`: which of these were tuples at first.
    """

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel = kernel  # so that no other kernel gets its id
        self.hooks = kernel.pre_run_hooks
        self.parameters = len(kernel.params)
        self.arguments = sum(not parameter.is_constexpr for parameter in kernel.params)
        self.tuples = [place for place, each in enumerate(args[: self.arguments]) if isinstance(each, tuple)]
        self.compiled: dict[Any, tuple[Any, ...]] = {}

    def keep(self, key: Any, compiled: Any, given: int) -> None:
        """Keep what was compiled for such a key, if it is what is known here; `given`: how many arguments and constants
        stood in order."""
        if type(compiled) is not CompiledKernel:
            return
        if len(self.compiled) >= MOST_VARIANTS:
            self.compiled.clear()
        rest = (None,) * (self.parameters - given)
        stream = driver.active.get_current_stream
        self.compiled[key] = compiled.run, stream, compiled.function, compiled.packed_metadata, rest, compiled


_VARIANTS: dict[int, KernelVariants] = {}
"""Of each kernel that is launched directly, by its id."""


def launch_kernel(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)` on a device; nothing on the meta device, whose tensors have no values.

    Args:
        kernel: as `triton.jit` made it.
        grid: programs along one to three dims.
        device: that of the tensors.
        args: the kernel's arguments in order, and perhaps the first of its constants.
        options: its other constants, and how it is compiled.
    """
    index = device.index
    if index is None:  # the CPU, or whatever device is the current one
        if device.type != "meta":
            kernel[grid](*args, **options)
        return
    if index != current_device_index():  # which Triton takes, wherever the tensors are
        with torch.cuda.device(index):
            launch_kernel(kernel, grid, device, *args, **options)
        return
    variants = _VARIANTS.get(id(kernel))
    if (
        variants is None
        or len(args) < variants.arguments  # some are among the options
        or ((_ENTER or _EXIT or _RUNTIME or _COMPILATION or variants.hooks) and _are_watched(variants))
    ):
        kernel[grid](*args, **options)
        if variants is None and _is_known(kernel):
            _VARIANTS[id(kernel)] = KernelVariants(kernel, args)
        return
    count = variants.arguments
    arguments: Any = args[:count]
    if variants.tuples:  # without their names: of named tuples Triton would make two more
        arguments = list(arguments)
        for place in variants.tuples:
            if isinstance(arguments[place], tuple):
                arguments[place] = tuple(arguments[place])
        arguments = tuple(arguments)
    kinds = native_specialize_impl(BaseBackend, arguments, False, True, True)
    key = (index, kinds, args[count:], *options, *options.values())
    found = variants.compiled.get(key)
    if found is None:
        variants.keep(key, kernel[grid](*args, **options), len(args))
        return
    run, stream, function, metadata, rest, _ = found
    dims = len(grid)
    run(
        grid[0], grid[1] if dims > 1 else 1, grid[2] if dims > 2 else 1, stream(index), function, metadata,
        None, None, None, *args, *rest,
    )  # fmt: skip


def _is_known(kernel: Any) -> bool:
    """True if launches of such a kernel are known here: by this Triton, for an NVIDIA GPU, with its constants last."""
    if not KNOWN_TRITON or torch.version.cuda is None or type(kernel) is not JITFunction:
        return False
    constant = [parameter.is_constexpr for parameter in kernel.params]
    return constant == sorted(constant)


def _are_watched(variants: KernelVariants) -> bool:
    """True if launches of a kernel have hooks, or kernels are compiled for debugging; hooks of the compilation alone do
    not count."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return bool(
        variants.hooks
        or any(getattr(hook, "calls", True) for hook in hooks)
        or knobs.runtime.debug
        or knobs.runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )
