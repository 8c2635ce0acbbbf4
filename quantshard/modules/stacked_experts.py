"""The base of modules whose experts' weights are stacked in one parameter [experts, rows, columns] per projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, sharding
from quantshard.errors import ConfigurationError
from quantshard.gemm import predictions
from quantshard.modules import grouped_linear
from quantshard.modules.base import checks
from quantshard.modules.base.initialization import WeightSpec
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts import recompute
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import graph_state, grouped, stacked
from quantshard.modules.gemms.row_exchange import NO_EXCHANGE, RowExchange
from quantshard.modules.gemms.stacked import StackedLayer
from quantshard.recipe import Recipe
from quantshard.tensor import moves, parameter_state, requantize, storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage


class StackedExperts(QuantizedModule):
    """Experts whose weights are quantized as stacks: each matrix has its own scales, as if it were a parameter.

    `set_device_mesh(mesh["ep"])` distributes the experts over a mesh axis: each rank keeps `num_stacked` / ranks.

    `is_transposed`: whether the matrices are stored as [in_features, out_features]. `num_stacked`: number of experts on
    all ranks.
    """

    is_transposed: bool
    num_stacked: int

    def init_empty(self, name: str, like: Tensor) -> None:
        """Give a module that has just become an instance of this class the attributes of one without weights.
        `like`: one of its stacks."""
        empty = vars(QuantizedModule(like.device, like.dtype))
        vars(self).update({key: value for key, value in empty.items() if key not in vars(self)})
        self._handle = graph_state.handle(self, like.device)
        self._readers: dict[str, grouped.ExpertsReader] = {}
        self.name, self.num_stacked, self.use_fp8_dispatch = name, len(like), False
        for bias, param in self.named_parameters(recurse=False):
            if param.ndim == 2 and len(param) == len(like):
                self._vectors[bias], self._cuts[bias] = 0.0, 0

    @torch.no_grad()
    def quantize_stack(self, name: str, old: nn.Parameter, keep_values: bool) -> None:
        """Replace a parameter [experts, rows, columns] by a quantized one with its values, if it has any."""
        spec = self._plan.recipe.weight
        assert spec is not None
        _, rows, cols = old.shape
        shape = (old.shape[0] * rows, cols)
        state = parameter_state.weight_state(spec, old.device)
        self._weights[name], self._cuts[name] = WeightSpec(shape), 0
        self._born_states[name] = {key: value.clone() for key, value in state.items()}
        storage = storages.empty(spec.stacked(rows), sharding.whole(shape), old.device, state)
        new = nn.Parameter(QuantizedTensor(storage, old.dtype), requires_grad=old.requires_grad)
        if not old.is_meta:
            values = old.detach().reshape(shape)
            requantize.requantize_([(new, values)], names=[f"{self.name}.{name}"])
            if keep_values:
                storage.keep_initial_values(values.cpu().clone())
        new.__dict__.update(moves.set_attributes(old))
        setattr(self, name, new)
        self._readers[name] = grouped.ExpertsReader()

    def multiply(
        self, name: str, x: Tensor, counts: list[int] | Tensor, bias: str | None = None,
        exchange: RowExchange = NO_EXCHANGE,
    ) -> Tensor:  # fmt: skip
        """Multiply rows, ordered by expert, with the weights of their experts: [rows, in] -> [rows, out].

        `counts`: number of rows of each expert of this rank. `bias`: name of a parameter [experts, out_features].
        `exchange`: exchange of rows with other ranks, before or after the product.
        """
        weight, bias_value = self._locals([name, bias]) if bias else (*self._locals([name]), None)
        call = recompute.linear_context((id(self), (name,)), True, self.training)
        self._check_weight(name, weight, call, x.device)
        in_features = weight.shape[1 if self.is_transposed else 2]
        if x.shape[-1] != in_features:
            raise checks.wrong_features(self, name, in_features, x.shape, None)
        layer = self._grouped_layer(name, weight, bias_value, x, counts, call, exchange)
        if layer is not None:
            return grouped.grouped_linear(x, layer)
        is_plain = bool(call.recipe.table) and not predictions.quantized_gemms(call.recipe) and exchange.route is None
        if is_plain and len(x) and kernel_dispatch.has_float_kernels(x) and grouped.multiplies_plain(x, [weight]):
            biases = [] if bias_value is None else [bias_value]
            return grouped.plain_grouped_linear(x, grouped.PlainExperts([weight], biases, counts, self.is_transposed))
        if isinstance(counts, Tensor):
            counts = grouped_linear.counts_on_host(counts, self.label(name))
        group = None if self.tp_mesh is None else self.tp_mesh.get_group()
        stack = StackedLayer(
            weight, bias_value, counts, self.is_transposed, call, group, self.gemm_plans, call.record, exchange
        )
        return stacked.stacked_linear(x, stack)

    def _fallbacks(self, storage: QuantizedStorage | None, recipe: Recipe, device: torch.device) -> tuple[str, ...]:
        if storage is None or 0 in storage.shape:
            return ()
        return (*super()._fallbacks(storage.matrix(0), recipe, device), *self.joint_fallbacks(recipe, device))

    def __delattr__(self, name: str) -> None:
        # PEFT's adapters of `target_parameters` are parametrizations that last for one forward
        nn.Module.__delattr__(self, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        nn.Module.register_parameter(self, name, param)

    joint_fallbacks = staticmethod(grouped_linear.joint_fallbacks)

    def _grouped_layer(
        self, name: str, weight: QuantizedTensor, bias: Tensor | None, x: Tensor, counts: list[int] | Tensor,
        call: LinearContext, exchange: RowExchange,
    ) -> grouped.ExpertsLayer | None:  # fmt: skip
        """Return all experts as one layer if kernels can quantize and multiply them at once; otherwise None."""
        block, rows = grouped_linear.block_together(call.recipe), 0 if isinstance(counts, Tensor) else sum(counts)
        _, *shape = weight.shape
        if block is None or not kernel_dispatch.has_float_kernels(x):
            return None
        eval_rows = None if self.training or exchange.route is not None else len(x)
        is_native = grouped.multiplies_codes(block, len(weight), shape, x.device, eval_rows)
        if not (is_native or grouped_linear.is_faster_together(rows, len(weight), (shape[0], shape[1]))):
            return None
        biases, reader = [] if bias is None else [bias], self._readers[name]
        if not grouped.are_readable([weight], biases, call.recipe.weight, x, reader):
            return None
        return grouped.ExpertsLayer(
            [weight], biases, counts, block, call, {}, call.record, None, reader,
            is_stack=True, is_transposed=self.is_transposed, exchange=exchange, is_native=is_native,
        )  # fmt: skip

    def is_traced(self, setting: str, inp: Tensor) -> bool:
        return False  # the rows of each expert differ from step to step

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={list(getattr(self, name).shape)}" for name in self._weights)
        return shapes + self._formats_repr()


def distribute_experts(model: nn.Module, ep_mesh: DeviceMesh, use_fp8_dispatch: bool = False) -> None:
    """Distribute the stacked experts of a converted model over a mesh axis, such as `mesh["ep"]`.

    Each rank keeps an equal number of the experts of every layer, and tokens are sent to the experts that the router
    chooses. Call it after `convert` and before `fully_shard`, whose mesh for an experts module has the other axes only.

    Args:
        use_fp8_dispatch: send tokens and gradients of outputs as FP8 codes and scales also in `mxfp8`, `block` and
            `rowwise`. Weight gradients are then computed from these codes, on any number of ranks.

    Raises:
        ConfigurationError: the model has no such experts, the mesh is not one axis, its size does not divide the
            number of experts, the model is sharded already, or a module has other parameters, which ranks would train
            apart. No module has changed.
    """
    if not isinstance(ep_mesh, DeviceMesh) or ep_mesh.ndim != 1:
        raise ConfigurationError('distribute_experts needs one axis of a device mesh, such as mesh["ep"]')
    modules = {name: module for name, module in model.named_modules() if isinstance(module, StackedExperts)}
    if not modules:
        raise ConfigurationError("distribute_experts: this model has no quantized stacks of experts; convert it first")
    for name, module in modules.items():
        params = dict(module.named_parameters())
        replicated = next((param for param in params if module._cuts.get(param) is None), None)
        if any(isinstance(param, DTensor) for param in params.values()):
            problem = "is sharded already; call distribute_experts once, and before fully_shard"
        elif module.num_stacked % ep_mesh.size():
            problem = f"has {module.num_stacked} experts, which {ep_mesh.size()} ranks cannot share equally"
        elif replicated is not None:
            problem = f"has {replicated}, which ranks would train apart; leave its experts on all ranks"
        else:
            continue
        raise ConfigurationError(f"distribute_experts: {name} {problem}")
    for module in modules.values():
        module.set_device_mesh(ep_mesh)
        module.use_fp8_dispatch = use_fp8_dispatch
