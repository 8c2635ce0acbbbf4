"""The Trainer's checkpoints, of architectures saved under other names too: read bit for bit, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import SaveStrategy

import quantshard as qs
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.integrations.transformers import QuantizedTraining, trainer as checkpoint
from quantshard.optimizers import FusedAdam
from tests.covering import exhaustive
from tests.distributed.models import bits
from tests.interop.frameworks import test_trl
from tests.interop.frameworks.test_transformers import differing, tiny
from tests.interop.frameworks.test_transformers_trainer import LossTrainer, QuantizedLossTrainer, arguments, data

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SIZES}
SPEECH = {
    "vocab_size": 101, "num_mel_bins": 16, "d_model": 64, "max_source_positions": 16, "max_target_positions": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None,
    **{f"{part}_{name}": size for part in ("encoder", "decoder")
       for name, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 128))},
}  # fmt: skip
RENAMED: dict[str, Callable[[], PreTrainedModel]] = {
    "ViT": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SIZES)
    ),
    "GPTNeoX": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TEXT)),
    # 11: a sort of names as text would put the last one before the third
    "Mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=11, num_key_value_heads=2, **TEXT)
    ),
}
TIED: dict[str, Callable[[], PreTrainedModel]] = {
    "Gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(head_dim=16, num_key_value_heads=2, **TEXT)
    ),
    "Bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=101, **SIZES)),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=101, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    ),
    "Whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SPEECH)),
    "Marian": lambda: transformers.MarianMTModel(
        transformers.MarianConfig(
            decoder_start_token_id=0, **{k: SPEECH[k] for k in SPEECH if "layer" in k or "ffn" in k or "heads" in k},
            vocab_size=101, d_model=64, pad_token_id=0, max_position_embeddings=32,
        )
    ),
}  # fmt: skip


def made(build: Callable[[], PreTrainedModel], seed: int = 0, recipe: str | None = "mxfp8") -> PreTrainedModel:
    torch.manual_seed(seed)
    model = build()
    if recipe is not None:
        # stacks of experts are split in files only if they are not quantized
        has_experts = type(model).__name__.startswith("Mixtral")
        qs.convert(model, {"*.experts": "bf16", "*": recipe} if has_experts else recipe)
    return model


def small() -> PreTrainedModel:
    return tiny(num_hidden_layers=1)


def rows(name: str) -> list[dict[str, torch.Tensor]]:
    if name != "ViT":
        return data()
    drawn = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 32, 32, generator=drawn), "labels": torch.tensor(i % 3)} for i in range(64)]


# Bit for bit


@pytest.mark.parametrize("name", RENAMED)
def test_renamed_weights_are_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """In a model of other values: the losses, weights and states of training that went on."""
    model, other = (made(RENAMED[name], seed) for seed in (0, 1))
    saving = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer = QuantizedLossTrainer(model, saving, train_dataset=rows(name))
    trainer.train()
    files = set(load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    assert files - model.state_dict().keys()
    before = {name: id(param) for name, param in other.named_parameters()}
    resumed = QuantizedLossTrainer(other, arguments(tmp_path), train_dataset=rows(name))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.losses == trainer.losses[2:]
    assert bits(other, resumed.optimizer.optimizer) == bits(model, trainer.optimizer.optimizer)
    assert {name: id(param) for name, param in other.named_parameters()} == before


@pytest.mark.parametrize(
    ("name", "whole"),
    exhaustive(
        product([*RENAMED, *TIED], [True, False]),
        [(name, turn % 2 == 0) for turn, name in enumerate([*RENAMED, *TIED])],
    ),
)
def test_every_weight_comes_back_from_one_file_and_from_many(name: str, whole: bool, tmp_path: Path) -> None:
    """Of tied weights one name is in files, of sinusoids none; what `from_pretrained` has made is read alike."""
    build = (RENAMED | TIED)[name]
    model, other = made(build, recipe="nvfp4"), made(build, 1, "nvfp4")
    model.save_pretrained(tmp_path, max_shard_size="5GB" if whole else "20KB")
    assert (len(checkpoint.weight_files(str(tmp_path))) > 1) != whole
    ties = {name: id(param) for name, param in other.named_parameters(remove_duplicate=False)}
    checkpoint.load_weights(other, str(tmp_path))
    assert differing(model, other) == []
    assert {name: id(param) for name, param in other.named_parameters(remove_duplicate=False)} == ties
    again = type(model).from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "again")
    checkpoint.load_weights(other := made(build, 1, "nvfp4"), str(tmp_path / "again"))
    assert differing(model, other) == []


class Best(TrainerCallback):
    """Notes the model's bits when the best metric so far is saved."""

    def __init__(self) -> None:
        self.bits: Any = None

    def on_save(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if state.best_model_checkpoint == str(Path(args.output_dir) / f"checkpoint-{state.global_step}"):
            self.bits = bits(found["model"])


def test_the_best_model_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """Of an architecture with other names in files, whose metric grows worse."""
    noted = Best()
    given = arguments(
        tmp_path, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=0.3,
        load_best_model_at_end=True, max_steps=3,
    )  # fmt: skip
    model = made(RENAMED["ViT"])
    trainer = QuantizedLossTrainer(
        model, given, train_dataset=rows("ViT"), eval_dataset=rows("ViT")[:8], callbacks=[noted]
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint != str(tmp_path / "checkpoint-3")
    assert bits(model) == noted.bits
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_a_model_of_no_class_of_transformers_is_resumed_by_its_own_names(tmp_path: Path) -> None:
    """The Trainer writes its state dict then."""
    model, other = (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)) for _ in range(2))
    for each in (model, other):
        qs.convert(each, "mxfp8", filter="*")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    checkpoint.load_weights(other, str(tmp_path))
    assert differing(model, other) == []
    entries = model.state_dict()
    save_file({k: v for k, v in entries.items() if k != "1.weight_scale_inv"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 weights of this Sequential .*: 1\.weight_scale_inv; resume"):
        checkpoint.load_weights(other, str(tmp_path))


@pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found:UserWarning")
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* is deprecated:FutureWarning")  # TRL asks for it
def test_the_trainer_of_trl_resumes_bit_for_bit(is_ours: bool, tmp_path: Path) -> None:
    """With `QuantizedTraining` in front, and by itself with `FusedAdam`."""
    plain = test_trl.trl()[1]
    kind = type("Quantized", (QuantizedTraining, plain), {}) if is_ours else plain

    def trained(seed: int, resumed: str | None = None) -> Any:
        model = made(small, seed)
        options = {} if is_ours else {"optimizers": (FusedAdam(model.named_parameters(), lr=1e-2), None)}
        given = test_trl.arguments(tmp_path)
        given["args"].save_strategy, given["args"].save_steps = SaveStrategy.STEPS, 2
        trainer = kind(model, **given, **options)
        trainer.train(resume_from_checkpoint=resumed)
        return bits(model, trainer.optimizer.optimizer)

    wanted = trained(0)
    assert trained(1, str(tmp_path / "checkpoint-2")) == wanted


# What is refused


def saved_without(build: Callable[[], PreTrainedModel], out: Path, pattern: str, **more: torch.Tensor) -> set[str]:
    """A checkpoint's files with tensors taken out, whose names are returned, and others put in."""
    made(build).save_pretrained(out)
    entries = load_file(out / "model.safetensors")
    taken = {name for name in entries if re.search(pattern, name)}
    kept = {name: value for name, value in entries.items() if name not in taken}
    save_file({**kept, **more}, out / "model.safetensors", metadata={"format": "pt"})
    return taken


CASES = {
    "head": ("GPTNeoX", r"^embed_out", r"1 weights of .*: lm_head\.weight; resume"),
    "codes": (
        "ViT",
        r"query\.weight|key\.weight",
        r": 2 weights of .*: vit\.layers\.0\.attention\.q_proj\.weight, vit\S+k_proj\.weight; resume",
    ),
    "expert": ("Mixtral", r"experts\.\d+\.w[123]", r"experts\.gate_up_proj, .*experts\.down_proj"),
    "part": ("Mixtral", r"experts\.3\.w1", r"experts\.gate_up_proj cannot be assembled"),
    "tied": ("Gemma3", r"embed_tokens", r"2 weights of .*: model\.embed_tokens\.weight, lm_head\.weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_in_no_file_is_named(case: str, tmp_path: Path) -> None:
    """Where the Trainer would train on with what the model has; nothing is loaded then."""
    name, pattern, wanted = CASES[case]
    more = {"other": torch.zeros(1)} if case == "head" else {}
    assert saved_without((RENAMED | TIED)[name], tmp_path, pattern, **more)
    other = made((RENAMED | TIED)[name], 1)
    before = bits(other)
    with pytest.raises(CheckpointError, match=wanted) as caught:
        QuantizedLossTrainer(other, arguments(tmp_path), train_dataset=rows(name)).train(
            resume_from_checkpoint=str(tmp_path)
        )
    assert str(caught.value).startswith(f"{tmp_path}: ") and bits(other) == before


def test_tensors_that_the_model_has_not_are_told(tmp_path: Path) -> None:
    saved_without(RENAMED["GPTNeoX"], tmp_path, "^$", other=torch.zeros(1))
    with pytest.warns(UserWarning, match=r"ignored 1 tensors that the model does not have: other"):
        checkpoint.load_weights(made(RENAMED["GPTNeoX"], 1), str(tmp_path))


def resumed_error(model: PreTrainedModel, folder: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        QuantizedLossTrainer(model, arguments(folder), train_dataset=data()).train(resume_from_checkpoint=str(folder))
    return str(caught.value)


def test_a_checkpoint_of_another_form_is_refused(tmp_path: Path) -> None:
    """Codes into values, packed or in parts; values, and another program's layout, into codes."""
    made(small).save_pretrained(tmp_path / "codes")
    made(small, recipe=None).save_pretrained(tmp_path / "values")
    made(small).save_pretrained(tmp_path / "served", layout="compressed-tensors")
    told = resumed_error(made(small, recipe=None), tmp_path / "codes")
    assert (
        "q_proj.weight is mxfp8_32x32 in the checkpoint, but plain in the model; convert with the saved recipe" in told
    )
    for folder, dtype in (("values", "bfloat16"), ("served", "float8_e4m3fn")):
        told = resumed_error(made(small), tmp_path / folder)
        assert f"q_proj.weight is torch.{dtype} in the checkpoint, but mxfp8_32x32 in the model" in told
    for parts in (False, True):
        if parts:
            entries = made(small).state_dict()
            save_file(entries, tmp_path / "codes" / "model.safetensors", metadata={"format": "pt"})
        told = resumed_error(made(small, recipe="nvfp4"), tmp_path / "codes")
        assert "q_proj.weight is mxfp8_32x32 in the checkpoint, but nvfp4_16x16 in the model" in told
        assert "mxfp8_32x32 in the checkpoint, but plain" in resumed_error(made(small, recipe=None), tmp_path / "codes")


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    for content in ({}, {"weight_map": {"a": 1}}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"index.json is damaged: it has no weight_map of names"):
            checkpoint.weight_files(str(tmp_path))


def test_the_trainer_keeps_what_it_says_of_other_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder without weights, and of a best model that is gone."""
    made(small).save_pretrained(tmp_path / "codes")
    trainer = QuantizedLossTrainer(made(small, 1), arguments(tmp_path), train_dataset=data())
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        trainer._load_from_checkpoint(str(tmp_path))
    said: list[str] = []
    for module in (checkpoint._LOGGER, transformers.trainer.logger):
        monkeypatch.setattr(module, "warning", lambda text, *args: said.append(text))
    trainer.state.best_model_checkpoint = str(tmp_path / "gone")
    trainer._load_best_model()
    assert len(said) == 1 and "Could not locate the best model" in said[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_and_shards_are_left_to_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a file of weights too."""
    model = made(small)
    model.save_pretrained(tmp_path)
    trainer = QuantizedLossTrainer(model, arguments(tmp_path), train_dataset=data())
    adapted = get_peft_model(made(small), LoraConfig(r=2, target_modules=["lm_head"]))
    read = [checkpoint._is_read_here(trainer, each, str(tmp_path)) for each in (model, adapted)]
    setattr(model, checkpoint.ADAPTERS_ALONE, True)  # as add_adapter does
    read.append(checkpoint._is_read_here(trainer, model, str(tmp_path)))
    for how in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        with monkeypatch.context() as patched:
            patched.setattr(trainer, how, True)
            read.append(checkpoint._is_read_here(trainer, made(small), str(tmp_path)))
    assert read == [True, False, False, False, False]
    with pytest.raises(ConfigurationError, match=r"layout='native'\): only adapters are written"):
        model.save_pretrained(tmp_path / "adapters", layout="native")


def test_a_plain_model_warns(tmp_path: Path) -> None:
    """It trains as by the Trainer alone."""
    plain = LossTrainer(made(small, recipe=None), arguments(tmp_path, max_steps=1), train_dataset=data())
    plain.train()
    trainer = QuantizedLossTrainer(made(small, recipe=None), arguments(tmp_path, max_steps=1), train_dataset=data())
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM has no quantized weight.*call quantshard.convert"):
        trainer.train()
    assert trainer.losses[0] == plain.losses[0] and type(trainer.optimizer.optimizer) is torch.optim.AdamW


def test_a_layout_for_no_quantized_weight_is_refused(tmp_path: Path) -> None:
    """A name that nobody knows before that; without layout= it is saved as ever."""
    model, around = made(small, recipe=None), made(small, recipe=None)
    qs.convert(around, "mxfp8", filter="lm_head")
    for part in (model, model.model, around.model):
        for layout, wanted in (
            ("compressed-tensor", "unknown layout 'compressed-tensor'; did you mean 'compressed-tensors'"),
            ("compressed-tensors", f"{type(part).__name__} has no quantized weight"),
            ("native", f"{type(part).__name__} has no quantized weight"),
        ):
            with pytest.raises(ConfigurationError, match=re.escape(wanted)):
                part.save_pretrained(tmp_path, layout=layout)
    assert list(tmp_path.iterdir()) == []
    model.save_pretrained(tmp_path, layout=None)
    assert differing(model, type(model).from_pretrained(tmp_path)) == []


def test_a_layout_for_a_part_that_is_quantized_is_written(tmp_path: Path) -> None:
    """Of a model around it too."""
    model = made(small, recipe=None)
    qs.convert(model.model.layers[0].mlp, "mxfp8")
    model.save_pretrained(tmp_path, layout="compressed-tensors")
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] != "quantshard"
