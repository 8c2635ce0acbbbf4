"""The model of a run: built, sharded over the mesh, and filled with its initial weights; its losses and samples.

Losses take logits of any dtype and make no float32 copy of them. Logits are the largest tensor of a small model: 3.1
GiB in bfloat16 for 32,768 tokens and 50,304 entries. A float32 copy raises the peak of a GPT-2 small step in BF16 on an
H200 from 17.0 to 35.4 GiB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from quantshard import kernel_dispatch, numerics
from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader
from quantshard.interop.conversion import attention
from quantshard.interop.conversion.convert import ConversionReport
from quantshard.modules import chunked_loss
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.stacked_experts import StackedExperts, distribute_experts
from quantshard.numerics import distributions
from quantshard.optimizers.averaging import reshard
from quantshard.tools.trainer.data.packing import IGNORED, Documents
from quantshard.tools.trainer.data.tokenizer import BYTES, VOCABULARY, Tokenizer
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.decoder import LanguageModel, recipes_of
from quantshard.tools.trainer.models.mixture import MixtureLayer
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import EP, STREAM, TP, LayerRecipes, MeshSpec

_SAMPLE_STREAM = 1


class MeshParts(NamedTuple):
    """The submeshes of a mesh: `data` and (for expert weights) `experts` for `fully_shard`, and the axes ep and tp."""

    data: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh | None
    tp: DeviceMesh | None


def split(mesh: DeviceMesh) -> MeshParts:
    """Split a mesh with named axes. Collective if the mesh has the axis ep."""
    names = mesh.mesh_dim_names or ()
    if EP in names:
        outer = tuple(name for name in names if name != EP)
        shape = (*(mesh[name].size() for name in outer[:-1]), mesh[outer[-1]].size() * mesh[EP].size())
        data = init_device_mesh(mesh.device_type, shape, mesh_dim_names=outer)
        return MeshParts(data, mesh[outer], mesh[EP], None)
    if TP not in names:
        return MeshParts(mesh, mesh, None, None)
    data = mesh[tuple(name for name in names if name != TP)]
    return MeshParts(data, data, None, mesh[TP])


@dataclass(frozen=True)
class ModelSpec:
    """The description of a run's model. `configuration`: of a transformers model; None for the built-in decoder."""

    settings: TrainSettings
    configuration: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Check that a transformers model has room for the data's tokens and sequences."""
        if self.configuration is None:
            return
        where, settings = self.settings.model, self.settings
        fields, tokens = FieldReader(self.configuration, where), settings.vocabulary or VOCABULARY
        size = fields.integer("vocab_size", 1, 1 << 40)
        if size is None:
            raise fields.wrong("vocab_size", "given")
        if size < tokens or (size != tokens and not settings.vocabulary):
            raise ConfigurationError(
                f"model = {where} has {size} tokens, not {tokens}; name its --tokenizer, or give --vocabulary"
            )
        longest = huggingface.longest_sequence(self.configuration)
        if longest is not None and longest < settings.seq_length:
            raise ConfigurationError(f"seq_length = {settings.seq_length}, but model = {where} has {longest} positions")

    def converted(
        self, tp_mesh: DeviceMesh | None = None, sequence_parallel: bool = False, ep_mesh: DeviceMesh | None = None
    ) -> tuple[nn.Module, ConversionReport | None]:
        """Build the model on meta with quantized layers; also return the conversion report of a transformers model."""
        settings = self.settings
        if self.configuration is not None:
            recipes = LayerRecipes.parse(settings.recipe)
            model, report = huggingface.converted(self.configuration, settings.model, recipes, causal=True)
            if settings.packing != STREAM:
                attention.register(model)
            if settings.recompute == "layer":
                names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
                enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
                enable({"use_reentrant": False})
            if ep_mesh is not None:
                distribute_experts(model, ep_mesh)
            return model, report
        return LanguageModel(settings, recipes_of(settings), "meta", tp_mesh, sequence_parallel, ep_mesh=ep_mesh), None


def _expert_modules(layer: nn.Module) -> list[Any]:
    """Return what `fully_shard` wraps of the distributed experts of a layer."""
    if isinstance(layer, MixtureLayer):
        return [[layer.mlp.gate, layer.mlp.up, layer.mlp.down]]
    return [module for module in layer.modules() if isinstance(module, StackedExperts)]


def build(spec: ModelSpec, mesh: DeviceMesh, *, random: bool = True) -> nn.Module:
    """Build the model, shard it over the mesh and fill it with its initial weights. Collective.

    The mesh has the named axes of `mesh.MeshSpec`. The tp axis shards the layers; `fully_shard` gets the other axes.
    The model is built on the meta device and filled shard by shard, so that no rank ever holds all of it.

    Random keys of the weights come from torch's generator, which is seeded here. With `random=False`, the weights of a
    transformers model stay uninitialized until they are loaded.
    """
    settings = spec.settings
    torch.manual_seed(settings.seed)
    parts = split(mesh)
    tp_size = 1 if parts.tp is None else parts.tp.size()
    axes = MeshSpec(dp_shard=parts.data.size() // settings.axes(1).cp, tp=tp_size)
    model, _ = spec.converted(parts.tp, settings.divides_sequences(axes), parts.ep)
    layers = huggingface.repeated_layers(model)
    # dtype of gradient sums over ranks and micro-batches
    policy = MixedPrecisionPolicy(reduce_dtype=settings.torch_reduce_dtype)
    fsdp_options: dict[str, Any] = {"reshard_after_forward": True, "mp_policy": policy}
    for layer in layers:
        if settings.compile:
            layer.compile()
        if parts.ep is not None:
            for experts in _expert_modules(layer):
                fully_shard(experts, mesh=parts.experts, **fsdp_options)
        fully_shard(layer, mesh=parts.data, **fsdp_options)
    fully_shard(model, mesh=parts.data, **fsdp_options)
    # FSDP2 prefetches by default in backward only
    for layer, next_layer in pairwise(layers):
        cast(FSDPModule, layer).set_modules_to_forward_prefetch([cast(FSDPModule, next_layer)])
    if spec.configuration is not None:
        huggingface.leave_meta(model, torch.device(mesh.device_type))
        if random:
            huggingface.initialize(model, settings.seed)
        return model
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.reset_parameters()
    return model


def logits(model: nn.Module, tokens: Tensor, documents: Documents | None = None) -> Tensor:
    """Compute logits [batch, sequence, vocabulary] of tokens, which attend within their document (default: the row)."""
    if isinstance(model, LanguageModel):
        return cast(Tensor, model(tokens, documents=documents))
    return cast(Tensor, huggingface.run_model(model, tokens, documents).logits)


def losses(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    z_loss: float = 0.0,
    documents: Documents | None = None,
    count: Tensor | None = None,
) -> "TokenLosses":
    """Compute the losses of a training pass. `z_loss`: factor of the z-loss in `trained_loss`. `documents`: see
    `logits`. `count`: see `token_losses`.

    More logits than one chunk of `linear_cross_entropy` are computed chunk by chunk (for transformers models without
    z-loss only). Nothing else uses those of the built-in decoder, so backward overwrites them with their gradient.
    """
    is_decoder = isinstance(model, LanguageModel)
    vocabulary = model.vocabulary if isinstance(model, LanguageModel) else huggingface.chunked_vocabulary(model)
    if tokens.numel() * vocabulary <= chunked_loss.LOGITS_AT_ONCE or (z_loss and not is_decoder):
        return token_losses(logits(model, tokens, documents), targets, is_decoder, count)
    if not is_decoder:
        labels = {"labels": targets, "shift_labels": targets, "num_items_in_batch": count}
        total = huggingface.run_model(model, tokens, documents, **labels).loss
        return TokenLosses(total, torch.zeros_like(total))
    total, z_part = model(tokens, targets, documents, z_loss=z_loss, num_items_in_batch=count)
    # the gradient of both comes through `total`
    return TokenLosses(total - z_part, z_part / z_loss if z_loss else z_part)


def loss(logits: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return token_losses(logits, targets, count=count).cross_entropy


def trained_loss(model: nn.Module, losses: "TokenLosses", settings: TrainSettings) -> Tensor:
    """Sum the cross-entropy and the auxiliary losses: the value that backward starts from."""
    total = losses.cross_entropy
    if settings.z_loss:
        total = total + settings.z_loss * losses.z_loss
    if isinstance(model, LanguageModel):
        # cleared, because the losses keep the graph of this forward alive
        routing, model.routing = model.routing, []
        for name, weight in (("balance_loss", settings.balance_loss), ("z_loss", settings.router_z_loss)):
            if weight and routing:
                total = total + weight * sum(getattr(of_layer, name) / len(routing) for of_layer in routing)
    return total


def expert_counts(model: nn.Module) -> Tensor | None:
    """Return the counts of `Routing` in the last forward, float64 [layers, experts + 1], or None without experts.
    Call it before `trained_loss`."""
    routing = model.routing if isinstance(model, LanguageModel) else []
    return torch.stack([of_layer.counts for of_layer in routing]).double() if routing else None


@torch.no_grad()
def move_biases(model: nn.Module, counts: Tensor, rate: float) -> None:
    """Add `rate` to the biases of experts below the mean load, and subtract it above: loss-free balancing (Wang et al.,
    2024, arXiv:2408.15664, algorithm 1).

    `counts`: rows of each expert in a step on all ranks, float64 [layers, experts], exact on any number of ranks.
    """
    signs = (counts.sum(1, keepdim=True) - counts * counts.shape[1]).sign()
    for layer, step in zip(cast(LanguageModel, model).layers, rate * signs.float(), strict=True):
        cast(MixtureLayer, layer).mlp.router.get_buffer("expert_bias").add_(step)


@torch.no_grad()
def generate(
    model: nn.Module,
    settings: TrainSettings,
    prompt: Sequence[int],
    length: int,
    tokenizer: Tokenizer = BYTES,
    *,
    seed: int = 0,
    temperature: float = 0.8,
) -> list[int]:
    """Continue a prompt, which begins a document, by `length` tokens. Collective: rank 0 samples each token."""
    device = next(model.parameters()).device
    tokens, vocabulary = [tokenizer.end_of_document, *prompt], tokenizer.vocabulary
    random_bits = numerics.random_words(seed, 0, _SAMPLE_STREAM, (1, length))[0]
    training = model.training
    model.eval()
    for sample in distributions.uniform(random_bits).tolist():
        # identical rows, because one row cannot be divided over tp
        rows = [tokens[-settings.seq_length :]] * getattr(model, "batch_multiple", 1)
        window = torch.tensor(rows, dtype=torch.int64, device=device)
        probabilities = (logits(model, window)[0, -1, :vocabulary].double() / temperature).softmax(-1)
        token = torch.searchsorted(probabilities.cumsum(-1), torch.tensor([sample], dtype=torch.float32, device=device))
        token.clamp_(max=vocabulary - 1)
        if dist.is_initialized():
            dist.broadcast(token, 0)
        tokens.append(int(token))
    model.train(training)
    reshard(model)
    return tokens[1 + len(prompt) :]


def reduce_gradients(model: nn.Module, *, now: bool) -> None:
    """Set whether the next backward reduces gradients over ranks or only accumulates them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(now, recurse=False)


class TokenLosses(NamedTuple):
    """Means over tokens, float32 scalars: the cross-entropy in nats, and the z-loss."""

    cross_entropy: Tensor
    z_loss: Tensor


def token_losses(logits: Tensor, targets: Tensor, overwrites: bool = False, count: Tensor | None = None) -> TokenLosses:
    """Return the mean cross-entropy and the mean z-loss of a batch of tokens.

    The z-loss is log(Z)^2, where Z is the denominator of the softmax; it keeps logits from drifting away (Chowdhery et
    al., 2022, arXiv:2204.02311). Sums are float32, and the gradient is rounded to the logits' dtype once. If a target's
    logit is -inf, the loss is infinite and the gradient finite, as in `torch.nn.functional.cross_entropy`.

    Args:
        logits: floating [..., vocabulary].
        targets: int64 [...].
        count: divisor of the sums over targets that are not IGNORED. Default: every target counts, and the mean is
            over all.
        overwrites: let backward write the gradient over the logits, if they are contiguous, to save memory. Other
            operations must not need the logits' values then: if one saved them for backward, or on a second backward,
            PyTorch raises its error for tensors modified in place.
    """
    return TokenLosses(*_TokenLosses.apply(logits.flatten(0, -2), targets.flatten(), overwrites, count))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, overwrites: bool, count: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights = None if count is None else (targets != IGNORED) / count
        targets = targets if weights is None else targets.clamp(min=0)
        losses, log_z = kernel_dispatch.cross_entropy_of(logits).cross_entropies(logits, targets)
        ctx.save_for_backward(logits, targets, log_z, weights)
        ctx.overwrites = overwrites and logits.is_contiguous()
        if weights is None:
            return losses.mean(), log_z.square().mean()
        return (losses * weights).sum(), (log_z.square() * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, log_z, weights = ctx.saved_tensors
        grad_entropy, grad_z = (grad / len(logits) if weights is None else grad * weights for grad in grads)
        # factor of each row's probabilities
        factors = grad_entropy + 2 * grad_z * log_z
        out = logits.detach() if ctx.overwrites else None
        of_entropy = grad_entropy.expand(len(logits))
        gradient_of = kernel_dispatch.cross_entropy_of(logits).logits_gradient
        grad_logits = gradient_of(logits, targets, log_z, factors, of_entropy, out)
        # kernels write without autograd's knowledge
        if out is not None:
            torch.autograd.graph.increment_version(logits)
        return grad_logits, None, None, None
