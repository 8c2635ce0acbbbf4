"""A vLLM engine in its own process and virtual environment, driven by lines of JSON; see tests/interop/test_vllm.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update({
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
})  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

# virtual machines can report AMX tiles and trap their use
torch.cpu._is_amx_tile_supported = lambda: False

import safetensors.torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.weight_transfer import base, factory, packed_tensor  # noqa: E402

import quantshard as qs  # noqa: E402
from quantshard import serving  # noqa: E402
from tests.interop.hashes import sha  # noqa: E402

FOLDER, TP = sys.argv[1], int(sys.argv[3])
BUFFER_BYTES = 300_000


class MemoryInitInfo(base.WeightTransferInitInfo):
    pass


class MemoryUpdateInfo(base.WeightTransferUpdateInfo):
    """Tensors by name, or `packed`: the arguments of vLLM's `unpack_tensor`."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]] | None = None, packed: list[Any] | None = None) -> None:
        self.weights = weights if packed is None else packed_tensor.unpack_tensor(*packed)


class MemoryEngine(base.WeightTransferEngine[MemoryInitInfo, MemoryUpdateInfo]):
    """What vLLM's IPC engine does in the worker, for tensors of the same process, which a CPU can do."""

    init_info_cls, update_info_cls = MemoryInitInfo, MemoryUpdateInfo

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader import reload

        reload.finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: MemoryUpdateInfo) -> None:
        self.model.load_weights(update_info.weights)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def shutdown(self) -> None:
        pass


factory.WeightTransferEngineFactory.register_engine("memory", MemoryEngine)


def logprobs(tokens: list[int]) -> dict[str, Any]:
    """Log-probabilities of a prompt's tokens, and the version of the weights that computed them."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    (out,) = receiver.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    values = [entry[token].logprob for token, entry in zip(tokens[1:], out.prompt_logprobs[1:], strict=True)]
    return {"logprobs": values, "version": receiver.version}


def parameters(rank: int = 0) -> dict[str, list[Any]]:
    """dtype, shape and a hash of the bytes of each parameter, as a rank of the engine computes with it."""
    named = llm.apply_model(_parameters)[rank]
    return {name: [str(value.dtype), list(value.shape), _sha(value)] for name, value in named.items() if value.numel()}


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.data.clone() for name, param in model.named_parameters()}


def _sha(value: torch.Tensor) -> str:
    # FP8 weights are stored transposed
    return sha(value.t() if value.ndim == 2 and value.dtype == torch.float8_e4m3fn else value)


def linear(layer: str, x: list[list[float]]) -> list[list[float]]:
    """Output of one of the engine's linear layers."""
    inp = torch.tensor(x, dtype=torch.bfloat16)
    (out,) = llm.apply_model(lambda model: model.get_submodule(layer)(inp))
    values: list[list[float]] = out[0].float().tolist()
    return values


class MemoryTrainer(base.TrainerWeightTransferEngine[Any]):
    """What vLLM's NCCL and IPC trainer engines do with packed=True, for the worker above."""

    buffers = 0

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> MemoryTrainer:
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        self.client.start_weight_update()
        tensors = iter(self.source)
        while chunk := packed_tensor.pack_tensors(tensors, lambda entry: entry[1], BUFFER_BYTES):
            packed = [chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes]
            self.client.update_weights({"packed": packed})
            self.buffers += 1
        self.client.finish_weight_update("from the source")


def send(sizes: dict[str, Any], layout: str) -> list[Any]:
    """Send a model of this process through vLLM's interface: a hash of each tensor, the version, number of buffers."""
    import transformers

    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    source = serving.weight_source(serving.LiveWeights(qs_converted(model, layout), layout))
    assert isinstance(source, base.WeightSource) and source.held_names() is None
    described = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert described == [(name, value.dtype, tuple(value.shape)) for name, value in source]
    assert sum(len(names) for names, _ in source.iter_groups()) == len(described)
    trainer = MemoryTrainer.trainer_init(None, client=receiver, source=source)
    trainer.send_weights()
    return [{name: sha(value) for name, value in source}, receiver.version, trainer.buffers]


def qs_converted(model: Any, layout: str) -> Any:
    if layout != "plain-bf16":
        qs.convert(model, qs.recipe.Float8RowwiseScaling(use_power_2_scales=False))
    return model


def transfer(version: str, count: int | None) -> None:
    """vLLM's protocol with the tensors of a published version; with `count`, the trainer dies after so many."""
    (file,) = (Path(FOLDER) / version).glob("*.safetensors")
    weights = list(safetensors.torch.load_file(file).items())
    receiver.init_weight_transfer_engine({})
    receiver.start_weight_update()
    receiver.update_weights({"weights": weights[:count]})
    if count is None:
        receiver.finish_weight_update(version)


CALLS = {
    "logprobs": logprobs, "parameters": parameters, "transfer": transfer, "update": lambda: receiver.update(FOLDER),
    "linear": linear, "send": send,
}  # fmt: skip

# vLLM's tensor-parallel workers import this file
if __name__ == "__main__":
    llm = LLM(
        str(serving.published(FOLDER)[-1]), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
        max_num_seqs=4, dtype="bfloat16", weight_transfer_config={"backend": "memory"}, tensor_parallel_size=TP,
    )  # fmt: skip
    receiver = serving.VLLMReceiver(llm)
    replies = os.fdopen(int(sys.argv[2]), "w")
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            reply = {"result": CALLS[name](*arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps(reply), file=replies, flush=True)
