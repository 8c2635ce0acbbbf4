"""torchtitan on a CPU: a config of its Llama of two small layers on random tokens, and its Trainer.

What its Trainer needs of a GPU is stood in for: the type of the device, the report on its memory, a barrier of NCCL's
and reductions that gloo has not. All else is its own.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

with (
    warnings.catch_warnings(),
    mock.patch("torch._utils._get_available_device_type", return_value="cpu"),  # read once, at the import
):
    warnings.simplefilter("ignore")  # of its own imports
    from torchtitan.components import metrics
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import Llama3Model, model_registry
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.trainer import Trainer

    from quantshard.integrations import torchtitan as integration


param_group = ParamGroupConfig
WORDS, SEQUENCE, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2


def random_tokens(step: int, rank: int, shape: tuple[int, int]) -> Tensor:
    """Two batches of each rank's, in turn."""
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(100 * (step % 2) + rank))


class RandomTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **others: Any) -> None:
        self.rank, self.shape, self.step = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = random_tokens(self.step, self.rank, self.shape)
            self.step += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


INIT = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}


def model(fuse_qkv: bool) -> Llama3Model.Config:
    """Llama 3 of two layers."""
    ones = {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=SEQUENCE, theta=10000)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=ones),
            ffn_norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=ones),
            attention=make_gqa_config(
                dim=WIDTH, n_heads=HEADS, n_kv_heads=HEADS // 2, wqkv_param_init=INIT, wo_param_init=INIT,
                inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=fuse_qkv, rope=rope,
            ),
            feed_forward=make_ffn_config(dim=WIDTH, hidden_dim=144, w1_param_init=INIT, w2w3_param_init=INIT),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    return Llama3Model.Config(
        dim=WIDTH, vocab_size=WORDS, layers=layers,
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS, embedding_dim=WIDTH, param_init={"weight": nn.init.normal_}
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=ones),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=INIT),
    )  # fmt: skip


def tiny(fuse_qkv: bool = False) -> Trainer.Config:
    spec = dataclasses.replace(model_registry("debugmodel"), flavor="tiny", model=model(fuse_qkv))
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(local_batch_size=2, seq_len=SEQUENCE, steps=5, disable_cuda_graphs=True),
        dataloader=RandomTokens.Config(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False, interval=100, last_save_model_only=False),
        activation_checkpoint=None,
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=False),
    )


def fused() -> Trainer.Config:
    return tiny(fuse_qkv=True)


def recomputed() -> Trainer.Config:
    return dataclasses.replace(tiny(), activation_checkpoint=FullAC.Config())


def adapted() -> Trainer.Config:
    """LoRA over layers that are quantized by the converter."""
    config = tiny()
    converters = [integration.TitanConverter.Config(), LoRAConverter.Config(rank=4, target_modules=["wq", "w1"])]
    for converter in converters:
        config.model_spec.model = converter.build().convert(config.model_spec.model)
    return config


class Memory:
    """Of a CPU nothing is told."""

    device_name, device_capacity_gib = "CPU", 1.0

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def trainer_of(folder: object, *arguments: str, config: str = "tiny") -> Trainer:
    """torchtitan's Trainer, built from its command line."""
    logging.disable(logging.WARNING)
    metrics.build_device_memory_monitor = Memory
    utils.set_pg_timeouts = lambda **others: None
    words = ["--module", __name__, "--config", config, "--dump_folder", str(folder), "--debug.seed", "7", *arguments]
    trainer = ConfigManager().parse_args(words).build()
    force_sums(trainer.model_parts[0])
    return trainer


def force_sums(model: nn.Module) -> None:
    """gloo has no reduction that multiplies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def train(trainer: Trainer) -> list[float]:
    """The losses that it logs."""
    losses: list[float] = []
    with (
        mock.patch.object(trainer.metrics_processor, "log", lambda step, loss, *rest, **others: losses.append(loss)),
        mock.patch("torchtitan.trainer.time.sleep"),  # at the end, for other ranks
    ):
        trainer.train()
    return losses
