"""GroupedLinear: one linear layer per expert, each applied to its own tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.collectives import process_groups
from quantshard.distributed import experts
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.formats import ALL, E4M3, E5M2, Orientation
from quantshard.gemm import predictions
from quantshard.modules.base import checks
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.base.module import QuantizedModule, by_own_recipe
from quantshard.modules.contexts import context, recompute
from quantshard.modules.contexts.context import InitPlan
from quantshard.modules.gemms import functional, grouped, linear_state
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import Recipe, TensorRole
from quantshard.recipe_table import OPERANDS
from quantshard.tensor import parameter_state
from quantshard.tensor.quantized_tensor import QuantizedTensor

_OF_EXPERT = re.compile(r"(?:weight|bias|gemm)(\d+)(?:_|$)")


class GroupedLinear(QuantizedModule):
    """`num_gemms` linear layers. Rows of the input go to the first layer, then to the second, and so on, by `m_splits`.

    Parameters: `weight0` [out_features, in_features], `weight1`, ..., stored quantized under `quantized_model_init`,
    and `bias0`, ... Each GEMM is quantized separately: the input and output gradient of an expert have their own scales
    and, under delayed scaling, amax histories (`gemm0_input_amax_history`, ...). An expert without tokens gets zero
    gradients.

    Under expert parallelism a rank holds `num_gemms` / ranks experts under their global names: with 8 experts, rank 1
    of 2 has `weight4` to `weight7`. Initial values do not depend on the number of ranks, and checkpoints load on any
    number of ranks. `experts.dispatch_tokens` sends the tokens. Delayed scaling then reduces amaxes over the ranks that
    hold the same experts, and ignores `amax_reduction_group`.

    Args:
        num_gemms: number of experts on all ranks.
        init_method: function that fills each full (unsharded) weight in place. Default: N(0, 0.023**2), drawn by global
            element index.
        bias: add biases [out_features], kept in high precision.
        return_bias: return (output without bias, list of this rank's biases or None) instead of adding the biases.
        parallel_mode: dim of each weight that tensor parallelism shards: "column" (out_features; the output stays
            sharded) or "row" (in_features; the input must be sharded). All ranks of the group must have the same
            tokens.
        ep_mesh: mesh axis over which the experts are distributed, such as `mesh["ep"]`.
        in_features, out_features, params_dtype, device, name, fuse_wgrad_accumulation, delay_wgrad_compute: see
            `Linear`.
        tp_group, tp_size, tp_mesh: see `module_meshes.TensorParallelConfig`.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        ep_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, tp_mesh=tp_mesh))
        self.num_gemms, self.in_features, self.out_features, self.name = num_gemms, in_features, out_features, name
        self.use_bias, self.return_bias, self.ep_mesh = bias, return_bias, ep_mesh
        self.local_gemms = experts.local_experts("GroupedLinear", num_gemms, ep_mesh)
        self._layers = []
        self._reader = grouped.ExpertsReader()
        for index in range(num_gemms):
            if index in self.local_gemms:
                layer = self._add_projection(
                    {"": out_features}, in_features, init_method, bias, prefix=f"gemm{index}_", suffix=str(index),
                    mode=parallel_mode,
                )  # fmt: skip
                self._layers.append(layer)
            else:
                # skip the key of another rank's expert, so that keys do not depend on the mesh
                parameter_state.random_key()
        self._weight_names = [layer.weights[0] for layer in self._layers]
        self._bias_names = [layer.biases[0] for layer in self._layers]
        prefixes = [layer.prefix for layer in self._layers]
        self._history_names = {role: [p + name for p in prefixes] for role, name in linear_state.HISTORIES.items()}
        self._set_wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute)
        self._note_spread()

    def _note_spread(self) -> None:
        """Mark parameters as expert-parallel, for optimizers. `__setattr__` marks the shards of FSDP2."""
        if (expert_axis := self._spread_axis) is not None:
            for param in self.parameters(recurse=False):
                process_groups.spread_over(param, expert_axis.get_group())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # FSDP2 replaces parameters by shards on a mesh that lacks the expert axis
        is_shard = isinstance(value, DTensor) and isinstance(value, nn.Parameter)
        if is_shard and not process_groups.is_expert_parallel(value) and (axis := self._spread_axis) is not None:
            process_groups.spread_over(value, axis.get_group())

    @property
    def _spread_axis(self) -> DeviceMesh | None:
        """Mesh axis with more than one rank over which the experts are distributed, or None."""
        return self.ep_mesh if self.ep_mesh is not None and self.ep_mesh.size() > 1 else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters; see `QuantizedModule.reset_parameters`."""
        super().reset_parameters()
        self._note_spread()

    def take_plan(self, plan: InitPlan, name: str, has_own_recipe: bool) -> None:
        """Convert to an init plan; see `QuantizedModule.take_plan`."""
        super().take_plan(plan, name, has_own_recipe)
        self._note_spread()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        super()._apply(fn, recurse)
        self._note_spread()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_spread()

    def is_traced(self, setting: str, inp: Tensor) -> bool:
        return False  # splits would be constants of graphs, and differ each time

    @by_own_recipe
    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> Any:
        """Apply the experts: [..., in_features] -> [..., out_features], in the input's dtype or the dtype of
        `torch.autocast`.

        Args:
            inp: the input, read as [tokens, in_features].
            m_splits: number of consecutive rows for each expert of this rank, as ints or an integer tensor [experts]. A
                tensor on a GPU stays there if all experts run in one kernel; otherwise the host waits for its values
                (`limits.FALLBACKS`, "waits for token counts").

        Returns:
            The output; with `return_bias` a tuple (output, list of biases or None).

        Raises:
            ConfigurationError: `m_splits` does not fit the input or the number of experts. If a kernel reads
                `m_splits`, a wrong sum raises a RuntimeError at the next synchronization instead.
            FallbackError: `autocast` is strict and the host would have to wait for `m_splits`.
        """
        inp = self._input(inp)
        tokens = inp.reshape(-1, inp.shape[-1])
        out = functional.shaped_as(self._of_experts(tokens, self._checked_splits(m_splits, tokens)), inp.shape)
        if not self.return_bias:
            return out
        return out, [self._joined_bias(layer, out.dtype) for layer in self._layers] if self.use_bias else None

    def _of_experts(self, tokens: Tensor, splits: list[int] | Tensor) -> Tensor:
        """Multiply tokens with the weights of their experts: all in one kernel if possible, otherwise one by one."""
        layer = self._together(tokens, splits)
        if layer is not None:
            return grouped.grouped_linear(tokens, layer)
        if isinstance(splits, Tensor):
            plain = self._plain_together(tokens, splits)
            if plain is not None:
                return grouped.plain_grouped_linear(tokens, plain)
            splits = counts_on_host(splits, self.label(self._weight_names[0]))
            splits = self._fitting_splits(splits, tokens.shape[0])
        outputs = [
            self._project(part, layer, with_bias=not self.return_bias)[0]
            for part, layer in zip(tokens.split(splits), self._layers, strict=True)
        ]
        return torch.cat(outputs)

    def _together(self, tokens: Tensor, splits: Sequence[int] | Tensor) -> grouped.ExpertsLayer | None:
        """Return all experts as one layer, or None. Kernels must be able to quantize and multiply all of them at once,
        faster than one by one or without waiting for the splits."""
        if self.tp_size > 1 or isinstance(tokens, DTensor):
            return None
        if tokens.shape[1] != self.in_features or not kernel_dispatch.has_float_kernels(tokens):
            return None
        weights = private_torch.registered_parameters(self, self._weight_names)
        if not isinstance(weights[0], QuantizedTensor):
            return None
        call = recompute.linear_context((id(self), ("experts",)), True, self.training)
        block = block_together(call.recipe)
        rows, shape = 0 if isinstance(splits, Tensor) else tokens.shape[0], (self.out_features, self.in_features)
        eval_rows = None if self.training or self.ep_mesh is not None else tokens.shape[0]
        is_native = block is not None and grouped.multiplies_codes(
            block, len(self._layers), shape, tokens.device, eval_rows
        )
        if not (is_native or is_faster_together(rows, len(self._layers), shape)):
            return None
        if block is None:
            if call.strict:
                fallbacks = self.joint_fallbacks(call.recipe, tokens.device)
                checks.refuse_fallbacks(self.label(self._weight_names[0]), fallbacks)
            return None
        biases = self._added_biases()
        if not grouped.are_readable(weights, biases, call.recipe.weight, tokens, self._reader):
            return None
        if call.strict:
            for name, weight in zip(self._weight_names, self._locals(self._weight_names), strict=True):
                self._check_weight(name, weight, call, tokens.device)
        amax_histories = self._histories(call.recipe)
        expert_axis = self._spread_axis if amax_histories else None
        group = call.group if expert_axis is None else private_torch.other_axes(expert_axis)
        return grouped.ExpertsLayer(
            weights, biases, splits, block, call, amax_histories, call.record, group, self._reader,
            self._weight_gradients(self._weight_names, weights), is_native=is_native,
        )  # fmt: skip

    def _added_biases(self) -> list[Tensor]:
        """Return the biases that this module adds itself."""
        added = () if self.return_bias else private_torch.registered_parameters(self, self._bias_names)
        return [bias for bias in added if bias is not None]

    def _plain_together(self, tokens: Tensor, splits: Tensor) -> grouped.PlainExperts | None:
        """Return all experts as one layer if PyTorch can multiply their values at once, otherwise None."""
        if self.tp_size > 1:
            return None
        parameters = private_torch.registered_parameters(self, self._weight_names)
        weights: list[Tensor] = [weight for weight in parameters if weight is not None]
        is_quantized = isinstance(weights[0], QuantizedTensor)
        call = recompute.linear_context((id(self), ("experts",)), is_quantized, self.training)
        if predictions.quantized_gemms(call.recipe) or bool(call.recipe.table) is not is_quantized:
            return None
        if not grouped.multiplies_plain(tokens, weights):
            return None
        if is_quantized:
            for name, weight in zip(self._weight_names, self._locals(self._weight_names), strict=True):
                self._check_weight(name, weight, call, tokens.device)
        wgrads = self._weight_gradients(self._weight_names, weights)
        return grouped.PlainExperts(weights, self._added_biases(), splits, wgrads=wgrads)

    def joint_fallbacks(self, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
        """Return the names in `limits.FALLBACKS` that a recipe causes because there are several experts."""
        return () if len(self._layers) == 1 else joint_fallbacks(recipe, device)

    def _histories(self, recipe: Recipe) -> dict[TensorRole, Sequence[Tensor]]:
        """Return the amax histories of all experts that the recipe needs."""
        histories_by_role: dict[TensorRole, Sequence[Tensor]] = {}
        for role, length in recipe.histories.items():
            names = self._history_names[role]
            histories = private_torch.registered_buffers(self, names)
            if any([history is None or history.numel() != length for history in histories]):
                make = partial(linear_state.activation_history, self)
                pairs = zip(names, self._weight_names, strict=True)
                histories = [make(name, length, weight, recipe) for name, weight in pairs]
            histories_by_role[role] = histories
        return histories_by_role

    def _checked_splits(self, m_splits: Sequence[int] | Tensor, tokens: Tensor) -> list[int] | Tensor:
        """Return splits that were checked, or a tensor that the kernel will check."""
        rows, experts = tokens.shape[0], len(self._layers)
        if not isinstance(m_splits, Tensor):
            return self._fitting_splits(list(m_splits), rows)
        is_integer = not (m_splits.is_floating_point() or m_splits.is_complex() or m_splits.dtype is torch.bool)
        fits = is_integer and m_splits.shape == (experts,)
        if fits and m_splits.device.type == "cpu" and not kernel_dispatch.kernels_on(m_splits.device):
            return self._fitting_splits(m_splits.tolist(), rows)
        if not fits or m_splits.device != tokens.device:
            actual = f"{m_splits.dtype} {list(m_splits.shape)} on {m_splits.device}"
            raise ConfigurationError(f"GroupedLinear: m_splits is {actual}; give ints [{experts}] on {tokens.device}")
        m_splits = m_splits.to(torch.int64).contiguous()
        if experts > 1 and rows > 0:
            return m_splits
        private_torch.assert_on_device(
            (m_splits.sum() == rows) & (m_splits >= 0).all(), f"m_splits does not sum to the {rows} rows of the input"
        )
        # one expert, or no rows: the host knows the splits
        return [rows] * experts

    def _fitting_splits(self, splits: list[int], tokens: int) -> list[int]:
        if len(splits) != len(self._layers) or sum(splits) != tokens or min(splits) < 0:
            problem = f"GroupedLinear: m_splits has {len(splits)} entries that sum to {sum(splits)}"
            raise ConfigurationError(f"{problem}; give {len(self._layers)} counts, of {tokens} rows in total")
        return splits

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState:
        state = super()._linear_state(weights, recipe, prefix)
        expert_axis = self._spread_axis
        if expert_axis is None:
            return state
        # an expert gets the tokens of all ranks of the axis
        axes = [mesh.get_group() for mesh in (expert_axis, self.tp_mesh) if mesh is not None]
        amax_group = private_torch.other_axes(expert_axis) if recipe.histories else None
        return replace(state, data_group=tuple(axes), amax_group=amax_group)

    def is_held_elsewhere(self, key: str) -> bool:
        """Return True if a state dict key, without this module's prefix, belongs to an expert of another rank."""
        match = _OF_EXPERT.match(key)
        return match is not None and int(match[1]) < self.num_gemms and int(match[1]) not in self.local_gemms

    def of_every_expert(self, name: str) -> list[str]:
        """Return the names of a parameter in all experts of all ranks: for `weight4`, `weight0`, `weight1`, ..."""
        match = _OF_EXPERT.match(name)
        assert match is not None, f"{name} is of no expert"
        before, after = name[: match.start(1)], name[match.end(1) :]
        return [f"{before}{number}{after}" for number in range(self.num_gemms)]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load this rank's experts from a state dict that can have more experts."""
        entries = {key: v for key, v in state_dict.items() if not self.is_held_elsewhere(key.removeprefix(prefix))}
        super()._load_from_state_dict(entries, prefix, *args)
        # assign=True replaced the parameters
        self._note_spread()

    def extra_repr(self) -> str:
        local = "" if self.ep_mesh is None else f", held={self.local_gemms.start}..{self.local_gemms.stop - 1}"
        return (
            f"num_gemms={self.num_gemms}{local}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}{self._formats_repr()}"
        )


# All experts in one kernel -------------------------------------------------------------------------------------------

LARGEST_GROUPED: Final = 1 << 35
"""Most multiplications in the fprop of an expert, averaged over experts, for which one kernel multiplies codes as FP16.
Beyond this, PyTorch's FP8 products save more time on an H200 than their launches cost (benchmarks/experts.py). Products
of codes in FP8 (`grouped.multiplies_codes`) have no limit."""


def block_together(recipe: Recipe) -> int | None:
    """Number of elements along the summed dim under one scale, if a recipe lets one kernel multiply all experts.

    0: each expert's input, weight and gradient has one scale. None: experts run one at a time, because a role has not
    one 8-bit format, rounded to nearest, in all GEMMs, or blocks other than these.
    """
    blocks = []
    for role in TensorRole:
        specs = {recipe.table.get((role, gemm)) for gemm, roles in OPERANDS.items() if role in roles}
        spec = specs.pop()
        if specs or spec is None or spec.scaling.stochastic_rounding or spec.scaling.random_hadamard:
            return None
        copies = spec.format.copies
        if len(copies) > 1 or copies[Orientation.ROWWISE].codes.encoding not in (E4M3, E5M2):
            return None
        blocks.append(copies[Orientation.ROWWISE].block)
    if set(blocks) == {(ALL, ALL)}:
        return 0
    weight_block, *activation_blocks = blocks
    size = weight_block[0]
    fits = size in (32, 128) and weight_block == (size, size) and set(activation_blocks) == {(1, size)}
    return size if fits else None


def joint_fallbacks(recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
    """Return the names in `limits.FALLBACKS` that a recipe causes for several experts."""
    if recipe is None or not predictions.quantized_gemms(recipe) or not kernel_dispatch.kernels_on(device):
        return ()
    return ("one expert at a time",) if block_together(recipe) is None else ()


def counts_on_host(counts: Tensor, label: str) -> list[int]:
    """Copy the number of rows of each expert to the host. Raises if a strict autocast or a CUDA graph forbids it."""
    if context.is_strict():
        checks.refuse_fallbacks(label, ("waits for token counts",))
    if kernel_dispatch.is_capturing():
        raise UnsupportedOperationError(f"{label}: in a CUDA graph {limits.FALLBACKS['waits for token counts']}")
    on_host: list[int] = counts.tolist()
    return on_host


def is_faster_together(rows: int, experts: int, shape: tuple[int, int]) -> bool:
    """Whether one kernel multiplies `rows` rows of `experts` experts faster than a product per expert does."""
    # kernels index the elements of a weight in 32 bits
    return experts > 1 and rows * shape[0] * shape[1] <= experts * LARGEST_GROUPED and shape[0] * shape[1] < 1 << 31
