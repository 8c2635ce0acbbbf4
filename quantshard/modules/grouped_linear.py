"""GroupedLinear: one linear layer for each expert, each over its own share of the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.argument_kinds import WHOLE_NUMBER, check_arguments
from quantshard.collectives import process_groups
from quantshard.distributed import experts
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.gemm import backend
from quantshard.modules.base.module import InitMethod, QuantizedModule
from quantshard.modules.base.own_recipe import HISTORIES, by_own_recipe
from quantshard.modules.base.shared_arguments import parallelism, shows_parallelism
from quantshard.modules.contexts import context, recompute, unsupported
from quantshard.modules.contexts.context import InitPlan
from quantshard.modules.gemms import functional, grouped, grouped_plain
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import Recipe, TensorRole
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor

_OF_EXPERT = re.compile(r"(?:weight|bias|gemm)(\d+)(?:_|$)")


class GroupedLinear(QuantizedModule):
    """`num_gemms` linear layers: rows of the input go to the first, then to the second, ... as `m_splits` says.

    Parameters: `weight0` [out_features, in_features], `weight1`, ..., stored quantized if built under
    `quantized_model_init`, and `bias0`, ... Each GEMM is quantized on its own: an expert's input and the gradient of
    its output have their own scales and, under delayed scaling, amax histories (`gemm0_input_amax_history`, ...). An
    expert without tokens has gradients of zeros.

    Under expert parallelism a rank holds `num_gemms` / ranks of them, under their global names: of 8 experts rank 1 of
    2 has `weight4` to `weight7`. They are born as without, and a checkpoint loads on any number of ranks.
    `experts.dispatch_tokens` brings the tokens. Delayed scaling then reduces amaxes over the ranks that hold the same
    experts, whatever `amax_reduction_group` says.

    Args:
        num_gemms: how many, of all ranks.
        init_method: fills each whole weight in place (default: N(0, 0.023**2) by the counter generator).
        bias: add biases [out_features], kept in high precision.
        return_bias: return (output without bias, list of this rank's biases or None) instead of adding them.
        parallel_mode: how tensor parallelism cuts each weight: "column" (out_features; the output stays cut) or "row"
            (in_features; the input is cut). All ranks of the group have the same tokens.
        ep_mesh: the axis of a mesh that the experts are spread over, e.g. `mesh["ep"]`.
        in_features, out_features, params_dtype, device, name: see `Linear`.
        **others: tensor parallelism's (`module_meshes.TensorParallelConfig`) and TransformerEngine's (`unsupported`).

    Raises:
        ConfigurationError: on every rank, if `ep_mesh` or `tp_mesh` does not fit.
    """

    @shows_parallelism(before="ep_mesh")
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
        ep_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(device, params_dtype, parallelism("GroupedLinear", others))
        self.num_gemms, self.in_features, self.out_features, self.name = num_gemms, in_features, out_features, name
        self.use_bias, self.return_bias, self.ep_mesh = bias, return_bias, ep_mesh
        check_arguments("GroupedLinear", WHOLE_NUMBER, num_gemms=num_gemms)
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
                storages.random_key()  # of another rank: the next weight, here and elsewhere, has its own on any mesh
        self._weight_names = [layer.weights[0] for layer in self._layers]
        self._bias_names = [layer.biases[0] for layer in self._layers]
        self._history_names = {
            role: [layer.prefix + name for layer in self._layers] for role, name in HISTORIES.items()
        }
        self._note_spread()

    def _note_spread(self) -> None:
        """Tell optimizers that other ranks hold other experts; `fully_shard` puts parameters of its own in their place,
        whose mesh tells them."""
        if (spread := self._spread_axis) is not None:
            for param in self.parameters(recurse=False):
                process_groups.spread_over(param, spread.get_group())

    @property
    def _spread_axis(self) -> DeviceMesh | None:
        """The axis that other ranks hold other experts on."""
        return self.ep_mesh if self.ep_mesh is not None and self.ep_mesh.size() > 1 else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As of all modules."""
        super().reset_parameters()
        self._note_spread()

    def take_plan(self, plan: InitPlan, name: str) -> None:
        """As of all modules."""
        super().take_plan(plan, name)
        self._note_spread()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        super()._apply(fn, recurse)
        self._note_spread()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_spread()

    @by_own_recipe
    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor, **others: Any) -> Any:
        """Input [..., in_features] -> [..., out_features], in the input's dtype, or that of `torch.autocast`.

        With `return_bias` a tuple. `m_splits`: how many rows, of the input as [tokens, in_features], go to each expert
        of this rank: ints, or an integer tensor. One that lies on a GPU is read there, where all experts are computed
        at once, and otherwise waited for (`limits.FALLBACKS`, "counts read").

        Raises:
            ConfigurationError: `m_splits` does not fit the input or the number of experts. Of a tensor that is read on
                a GPU the device tells of a wrong sum, as a RuntimeError where it is next waited for.
            FallbackError: strict, and the device would be waited for.
        """
        unsupported.refuse("GroupedLinear.forward", others)
        inp = self._input(inp)
        tokens = inp.reshape(-1, inp.shape[-1])
        out = functional.shaped_as(self._of_experts(tokens, self._checked_splits(m_splits, tokens)), inp)
        if not self.return_bias:
            return out
        return out, [self._joined_bias(layer, out.dtype) for layer in self._layers] if self.use_bias else None

    def _of_experts(self, tokens: Tensor, splits: list[int] | Tensor) -> Tensor:
        """Tokens times the weights of their experts, by whichever way is there."""
        together = self._together(tokens, splits)
        if together is not None:
            return grouped.grouped_linear(tokens, together)
        if isinstance(splits, Tensor):
            plain = self._plain_together(tokens)
            if plain is not None:
                return grouped_plain.grouped_linear(tokens, splits, *plain)
            splits = self._fitting_splits(self._read(splits), tokens.shape[0])
        return self._one_by_one(tokens, splits)

    def _read(self, splits: Tensor) -> list[int]:
        """Splits that lie on a GPU, where the host must know them."""
        if context.is_strict():
            self._refuse_fallbacks(self._weight_names[0], ("counts read",))
        if kernel_dispatch.is_capturing():
            raise UnsupportedOperationError(
                f"GroupedLinear.{self._weight_names[0]}: in a CUDA graph {limits.FALLBACKS['counts read']}"
            )
        found: list[int] = splits.tolist()
        return found

    def _one_by_one(self, tokens: Tensor, splits: Sequence[int]) -> Tensor:
        outputs = [
            self._project(part, layer, with_bias=not self.return_bias)[0]
            for part, layer in zip(tokens.split(splits), self._layers, strict=True)
        ]
        return torch.cat(outputs)

    def _together(self, tokens: Tensor, splits: Sequence[int] | Tensor) -> grouped.ExpertsLayer | None:
        """All experts as one layer, where kernels quantize and multiply them at once and that is faster, or the host
        knows no splits; else None."""
        if not self._may_be_together(tokens, isinstance(splits, Tensor)):
            return None
        weights = private_torch.registered_parameters(self, self._weight_names)
        if not isinstance(weights[0], QuantizedTensor):
            return None
        call = recompute.linear_context((id(self), "experts"), True, self.training)
        block = backend.block_together(call.recipe)
        if block is None:
            if call.strict:
                self._refuse_fallbacks(self._weight_names[0], self.joint_fallbacks(call.recipe, tokens.device))
            return None
        biases = self._added_biases()
        if not grouped.are_readable(weights, biases, call.recipe.weight, tokens, self._reader):
            return None
        if call.strict:
            for name in self._weight_names:
                self.weight_operand(name, call, tokens.device)
        histories = self._histories(call.recipe)
        spread = self._spread_axis if histories else None
        group = call.group if spread is None else private_torch.other_axes(spread)
        return grouped.ExpertsLayer(weights, biases, splits, block, call, histories, call.record, group, self._reader)

    def _added_biases(self) -> list[Tensor]:
        """The biases of the experts that are added here."""
        added = () if self.return_bias else private_torch.registered_parameters(self, self._bias_names)
        return [bias for bias in added if bias is not None]

    def _plain_together(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]] | None:
        """Weights and biases in high precision that PyTorch multiplies at once with these tokens; else None."""
        if torch.compiler.is_compiling() or self.tp_size > 1:
            return None
        found = private_torch.registered_parameters(self, self._weight_names)
        weights: list[Tensor] = [weight for weight in found if weight is not None]
        if not grouped_plain.multiplies(tokens, weights):
            return None
        call = recompute.linear_context((id(self), "experts"), False, self.training)
        return None if call.recipe.table else (weights, self._added_biases())

    def joint_fallbacks(self, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
        """Names in `limits.FALLBACKS` of what the experts take under a recipe because they are many."""
        if recipe is None or not recipe.table or len(self._layers) == 1 or not kernel_dispatch.kernels_on(device):
            return ()
        return ("one by one",) if backend.block_together(recipe) is None else ()

    def _may_be_together(self, tokens: Tensor, on_device: bool) -> bool:
        """What is compiled goes one by one: there splits are numbers of a graph that may differ each time.

        `on_device`: whether splits lie there, so that one by one would wait for them.
        """
        if torch.compiler.is_compiling() or self.tp_size > 1 or isinstance(tokens, DTensor):
            return False
        if tokens.shape[1] != self.in_features or not kernel_dispatch.has_float_kernels(tokens):
            return False
        shape = (self.out_features, self.in_features)
        return backend.is_faster_together(0 if on_device else tokens.shape[0], len(self._layers), shape)

    def _histories(self, recipe: Recipe) -> dict[TensorRole, Sequence[Tensor]]:
        """The amax histories of all experts that the recipe needs."""
        found: dict[TensorRole, Sequence[Tensor]] = {}
        for role, length in recipe.histories.items():
            names = self._history_names[role]
            there = [history for history in private_torch.registered_buffers(self, names) if history is not None]
            if len(there) < len(names) or set(map(Tensor.numel, there)) != {length}:
                pairs = zip(names, self._weight_names, strict=True)
                there = [self._history(name, length, weight, recipe) for name, weight in pairs]
            found[role] = there
        return found

    def _checked_splits(self, m_splits: Sequence[int] | Tensor, tokens: Tensor) -> list[int] | Tensor:
        """Splits that fit, or that the device is to check."""
        rows, experts = tokens.shape[0], len(self._layers)
        if not isinstance(m_splits, Tensor):
            return self._fitting_splits(list(m_splits), rows)
        is_whole = not (m_splits.is_floating_point() or m_splits.is_complex() or m_splits.dtype is torch.bool)
        if not is_whole or m_splits.shape != (experts,):
            raise ConfigurationError(
                f"GroupedLinear: m_splits is a tensor of {m_splits.dtype} {list(m_splits.shape)}; it must be of "
                f"integers [{experts}], a number for each of the {experts} experts{self._here()}"
            )
        if m_splits.device.type == "cpu" and not kernel_dispatch.kernels_on(m_splits.device):
            return self._fitting_splits(m_splits.tolist(), rows)
        if m_splits.device != tokens.device:
            raise ConfigurationError(
                f"GroupedLinear: m_splits is on {m_splits.device} and the input on {tokens.device}; put it there, or "
                "pass m_splits.tolist()"
            )
        m_splits = m_splits.to(torch.int64).contiguous()
        if experts > 1 and rows > 0:
            return m_splits
        private_torch.assert_on_device(
            (m_splits.sum() == rows) & (m_splits >= 0).all(), f"m_splits does not sum to the {rows} rows of the input"
        )
        return [rows] * experts  # which the host knows

    def _fitting_splits(self, splits: list[int], tokens: int) -> list[int]:
        """Splits that are checked."""
        if len(splits) != len(self._layers) or sum(splits) != tokens or min(splits) < 0:
            raise ConfigurationError(
                f"GroupedLinear: m_splits {_shown(splits)} has {len(splits)} entries that sum to {sum(splits)}; it "
                f"must have one of 0 or more for each of the {len(self._layers)} experts{self._here()}, and sum to the "
                f"{tokens} rows of the input"
            )
        return splits

    def _here(self) -> str:
        return "" if len(self._layers) == self.num_gemms else f" of the {self.num_gemms} on this rank"

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState:
        state = super()._linear_state(weights, recipe, prefix)
        spread = self._spread_axis
        if spread is None:
            return state
        # an expert's tokens are those of the whole axis, on whichever of its ranks it stands
        axes = [mesh.get_group() for mesh in (spread, self.tp_mesh) if mesh is not None]
        state = replace(state, data_group=tuple(axes))
        return replace(state, amax_group=private_torch.other_axes(spread)) if recipe.histories else state

    def is_held_elsewhere(self, key: str) -> bool:
        """True for a key of a state dict, without this module's prefix, of an expert that another rank holds."""
        found = _OF_EXPERT.match(key)
        return found is not None and int(found[1]) < self.num_gemms and int(found[1]) not in self.local_gemms

    def of_every_expert(self, name: str) -> list[str]:
        """The names of one parameter's like, of all ranks' experts: of `weight4` `weight0`, `weight1`, ..."""
        found = _OF_EXPERT.match(name)
        assert found is not None, f"{name} is of no expert"
        before, after = name[: found.start(1)], name[found.end(1) :]
        return [f"{before}{number}{after}" for number in range(self.num_gemms)]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """A state dict of more experts is taken; each rank loads its own of it."""
        own = {key: v for key, v in state_dict.items() if not self.is_held_elsewhere(key.removeprefix(prefix))}
        super()._load_from_state_dict(own, prefix, *args)
        self._note_spread()  # assign=True has put others in their place

    def extra_repr(self) -> str:
        held = "" if self.ep_mesh is None else f", held={self.local_gemms.start}..{self.local_gemms.stop - 1}"
        return (
            f"num_gemms={self.num_gemms}{held}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}{self._formats_repr()}"
        )


def _shown(splits: list[int]) -> str:
    return str(splits) if len(splits) <= 16 else f"[{', '.join(map(str, splits[:16]))}, ...]"
