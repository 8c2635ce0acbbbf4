"""Fallbacks and refusals: the one table that errors, `explain` and docs/limits.md are made from.

A fallback computes the right numbers on a slower path or with more memory. `explain` reports it, and
`autocast(strict=True)` and `explain(strict=True)` turn it into an error. A refusal always raises.
"""

from dataclasses import dataclass
from typing import Any, Final

from quantshard.errors import FallbackError, warn_once


@dataclass(frozen=True, slots=True)
class Limit:
    """One fallback or refusal: what happens or is not supported, the reason, and what the user can do instead."""

    happens: str
    because: str
    instead: str

    def __str__(self) -> str:
        return f"{self.happens}, because {self.because}; {self.instead}"


FALLBACKS: Final[dict[str, Limit]] = {
    "emulated": Limit(
        "its GEMMs dequantize both operands and multiply in float32 (16-bit layers on a GPU: bfloat16)",
        "PyTorch has no matrix product of this format for this device",
        "expect right numbers, slower than BF16; explain names GPUs with native GEMMs",
    ),
    "no kernels": Limit(
        "it is quantized and dequantized in plain PyTorch, many times slower",
        "Triton is not installed, or this torch was not built with CUDA",
        "install Triton (on Linux, torch for CUDA includes it)",
    ),
    "dgrad dequantizes": Limit(
        "its dgrad reads dequantized values",
        "the stored copy has no scale blocks along the dim that dgrad sums over",
        "use a recipe whose weights have square blocks or two copies",
    ),
    "cut blocks": Limit(
        "its GEMMs on this rank dequantize both operands",
        "tensor parallelism cuts the weight inside a scale block",
        "choose sizes whose share per rank is a multiple of the block, such as 128",
    ),
    "quantized each forward": Limit(
        "the weight is requantized in every forward and backward",
        "it is stored in high precision and autocast's recipe quantizes weights",
        "build the module under quantized_model_init with that recipe",
    ),
    "dequantized": Limit(
        "its GEMMs run in high precision, on dequantized values",
        "the weight is stored quantized and no autocast with a quantizing recipe is active",
        "call the module under autocast with the recipe that the weight was built with",
    ),
    "extra gather": Limit(
        "activation recomputation gathers the rowwise copy in a collective of its own",
        "FSDP2 gathered only the columnwise copy for backward",
        "use a recipe whose weights have one copy, or reshard_after_forward=False",
    ),
    "foreign module": Limit(
        "its GEMMs run in high precision",
        "it is not one of quantshard's modules",
        "build it from quantshard.Linear, unless high precision is intended, as for heads and routers",
    ),
    "one expert at a time": Limit(
        "experts are quantized and multiplied one after another, a dozen launches each",
        "kernels for all experts need 8-bit codes rounded to nearest, with scales per tensor, 32 or 128 values",
        "use delayed, current, block or mxfp8 scaling",
    ),
    "waits for token counts": Limit(
        "the host waits for the number of tokens of each expert",
        "m_splits is on the device, and these experts run one after another",
        "use delayed, current, block or mxfp8, or bf16 with multiples of 8 features",
    ),
    "mlp not fused": Limit(
        "an MLP of convert(modules='fused') calls its layers one by one, with the roundings of its own code",
        "one of its layers has hooks or was wrapped or replaced",
        "use modules='linear' if that is intended, as for adapters",
    ),
    "between graphs": Limit(
        "a compiled function runs it eagerly, between two graphs",
        "it has tensor parallelism, experts, main_grad, backward_dw, FP8 activations of an unfused MLP, or no kernels",
        "compile only other layers, or expect graph breaks",
    ),
    "late amax history": Limit(
        "an amax history was made in this forward, so a new process has no entry to load it into",
        "the module was built for another recipe",
        "build the model under quantized_model_init(enabled=False, recipe=...) with autocast's recipe",
    ),
    "replicated scales": Limit(
        "every rank stores the scales of the whole weight, more than a tenth of its codes",
        "shards are thinner than scale blocks",
        "shard over fewer ranks and replicate over the others (HSDP)",
    ),
    "read": Limit(
        "an operation outside of a module reads the dequantized values of a weight",
        "only quantshard's modules compute with codes",
        "call the module, or keep the layer in high precision with convert(filter=...)",
    ),
    "float32 states": Limit(
        "its states stay in float32 although FP8 or FP16 was requested",
        "states with scales need 2-D parameters",
        "no action is needed: such parameters are small",
    ),
}
"""Fallbacks by name: right numbers, slower or with more memory."""

_WRITE = "write quantshard.requantize_([(parameter, values)]) on every rank"
_DDP = "for DDP with init_sync=False call quantshard.broadcast_(model) first"

REFUSALS: Final[dict[str, Limit]] = {
    "uneven axis": Limit(
        "tensor parallelism does not cut a dim that its mesh axis does not divide",
        "DTensor misplaces uneven shards that three or more FSDP ranks cut again (a bug of PyTorch)",
        "choose a multiple of the axis, or replicate the parameter over it",
    ),
    "cut in a byte": Limit(
        "a cut cannot separate two codes that share a byte",
        "each byte belongs to one rank",
        "make in_features a multiple of the axis times the codes in a byte (2 * tp for 4-bit codes)",
    ),
    "misplaced shards": Limit(
        "a parameter with wrong shard offsets in DTensor is neither trained nor saved",
        "PyTorch miscomputes offsets if three or more FSDP ranks cut an uneven shard",
        "make the dim a multiple of the tensor-parallel axis, or use at most two FSDP ranks",
    ),
    "reshard to fewer ranks": Limit(
        "fully_shard(reshard_after_forward=<int>) is not supported",
        "FSDP2 can do this for plain tensors only",
        "use True or False",
    ),
    "other placements": Limit(
        "FSDP2 can shard quantized weights along dim 0 only",
        "it gathers tensor subclasses along dim 0 only",
        "leave shard_placement_fn at Shard(0)",
    ),
    "changed resharding": Limit(
        "whether FSDP2 frees a weight of two copies between passes cannot change after its first gather",
        "the gather buffers of each pass have fixed sizes",
        "call set_reshard_after_forward and set_reshard_after_backward before the first forward",
    ),
    "other stages": Limit(
        "delayed scaling does not reduce amaxes over other stages of a pipeline",
        "stages end their passes at different times, so ranks would wait for each other",
        "pass the ranks of this stage as autocast(amax_reduction_group=) (docs/distributed.md)",
    ),
    "captured rounding": Limit(
        "stochastic rounding is not captured in a CUDA graph before quantshard.capturable_(model)",
        "random draws are counted on the host, so replays would repeat them",
        "call quantshard.capturable_(model), run a step, then capture; or round to nearest",
    ),
    "captured shards": Limit(
        "make_graphed_callables does not take parameters that FSDP2 shards",
        "FSDP2 gathers them at another address in each pass",
        "capture the whole step with quantshard.StepGraph (docs/performance.md), or replicate the model (DDP)",
    ),
    "captured replicas": Limit(
        "make_graphed_callables and StepGraph do not take DistributedDataParallel",
        "Python hooks start its gradient reduction",
        "capture the module or its layers by make_graphed_callables, then wrap it",
    ),
    "captured region": Limit(
        "a captured callable is not called in a checkpointed function",
        "its activations have fixed addresses, so checkpointing would save no memory",
        "checkpoint inside of what is captured, with use_reentrant=False and preserve_rng_state=False",
    ),
    "overwritten activations": Limit(
        "the backward of a captured callable does not run twice, or after another forward in the same pool",
        "its activations were overwritten",
        "call backward before the next forward, or capture a callable for each pending forward",
    ),
    "changed outputs": Limit(
        "the backward of a captured callable does not run after its output was changed in place",
        "its activations may be in that memory, and autograd cannot tell",
        "change a new tensor: y = y + 1 instead of y += 1",
    ),
    "second derivative": Limit(
        "create_graph=True through a quantized layer is not supported",
        "the backward of a quantized linear layer has no derivative",
        "build this layer in high precision, outside of autocast, for a gradient penalty",
    ),
    "derivative of codes": Limit(
        "create_graph=True through an activation whose inputs are stored as codes is not supported",
        "codes have no derivative",
        "build the module with activation_storage='high_precision'",
    ),
    "unknown first forward": Limit(
        "a layer with quantized weights or delayed scaling cannot be recomputed in backward here",
        "outside of torch.utils.checkpoint the recipe and scales of its first forward are not known",
        "recompute with quantshard.checkpoint or torch.utils.checkpoint",
    ),
    "assigned data": Limit(
        ".data of a quantized tensor accepts only a tensor of its format, shape and shard",
        "quantizing new values needs the amaxes of all ranks",
        "use quantize_() or quantshard.requantize_() for new values",
    ),
    "parameter dtype": Limit(
        "FusedAdam trains quantized, float32, bfloat16 and float16 parameters; MasterWeights also float64",
        "masters and arithmetic are float32",
        "cast the parameter, freeze it, or give it to an optimizer of torch.optim",
    ),
    "unnamed states": Limit(
        "checkpoints.save and load do not take this optimizer of a model with expert parallelism",
        "its states have numbers instead of names, and do not exist before a step",
        "use FusedAdam, Lion, Muon or MasterWeights over named_parameters() (docs/distributed.md#experts)",
    ),
    "closure optimizer": Limit(
        "checkpoints.save does not take an optimizer whose step() needs a closure",
        "a new process could not create its states without a training step",
        "save the model with optimizer=None, and optimizer.state_dict() with torch.save",
    ),
    "pickle": Limit(
        "a shard of a quantized tensor is not pickled",
        "only its own rank can read it",
        "save with quantshard.checkpoints.save, or torch.save(module.state_dict(), path)",
    ),
    "copied values": Limit(
        "copy_ does not quantize values",
        "scales need the amaxes of all ranks",
        "use quantshard.requantize_ on every rank, checkpoints.load_high_precision for values, load_from_rank0 for "
        "codes, quantshard.broadcast_(model) before DDP(init_sync=False), FusedAdam(ema_decay=0.999) for averages",
    ),
    "replaced weight": Limit(
        "parametrizations, pruning and FSDP1 do not take a quantized weight",
        "they replace it",
        "build the module under quantized_model_init(enabled=False), or use fully_shard",
    ),
    "shared memory": Limit(
        "share_memory_ of a quantized tensor is not supported",
        "it has no storage of its own that could be shared",
        "share the tensors of module.state_dict() instead",
    ),
}
"""Refusals by name."""


def refusal(name: str, subject: object) -> str:
    """Return the error message of a refusal about `subject`, for example a tensor."""
    return f"{subject}: {REFUSALS[name]}"


def fallback_error(names: tuple[str, ...], subject: str) -> FallbackError:
    """Return the error that strict mode raises for the fallbacks of the parameter `subject`."""
    return FallbackError(f"strict: {subject}: " + "; and ".join(str(FALLBACKS[name]) for name in names))


def warn(name: str, subject: str, if_intended: str) -> None:
    """Warn once per process that `subject` takes the fallback `name`. `if_intended`: how to silence the warning."""
    warn_once(name, f"{subject}: {FALLBACKS[name]}; if intended: {if_intended}")


_FUSED = (
    "torch.optim with fused=True needs plain parameters: use foreach=True, quantshard.optimizers.FusedAdam (for "
    "AdamW: weight_decay=0.01) or MasterWeights; with transformers' Trainer use "
    "quantshard.integrations.transformers.QuantizedTraining"
)
_HINTS: Final = {
    "broadcast_": _DDP,
    **dict.fromkeys([f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")], _FUSED),
}
"""What to do instead of operations that popular code calls, by name."""


def unsupported(operation: Any) -> str:
    """Return the error message for an ATen operation that writes to a quantized tensor or to a view of its values."""
    instead = _HINTS.get(operation.__name__.partition(".")[0], _WRITE)
    return f"{operation} on a quantized tensor, or on a view of its values, would write no scales; {instead}"
