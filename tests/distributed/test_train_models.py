"""Models that `quantshard train` builds: of a Hugging Face configuration, of sizes by name, by recipes of layers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, masking_utils

from quantshard import QuantizedTensor, private_torch, recipe
from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.data import collect
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer, make_optimizer
from quantshard.tools.trainer.models import huggingface, initialization, model as models
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import SIZES, LayerRecipes, MeshSpec
from tests.distributed.commands import quantshard
from tests.distributed.pool import run_ranks
from tests.distributed.test_cli import metrics
from tests.tools.cli.sources import END, jsonl, texts, tokenizer_folder

SIZED = {
    "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 263, "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3_text"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}
"""Families of transformers, with what sets them apart: biases, norms, tables, tied weights, stacked experts."""

SHORT = replace(TrainSettings(), seq_length=16, global_batch=6, warmup=2)
ANY = "model.json"
"""Where a configuration came from: it is in no file."""


def whole(param: Tensor) -> Tensor:
    local = private_torch.local_tensor(param)
    if not isinstance(local, QuantizedTensor):
        return param.full_tensor() if isinstance(param, DTensor) else param
    found = local.dequantize()
    return DTensor.from_local(
        found, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    ).full_tensor()


def digests(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter and buffer, whole."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: hashlib.sha256(whole(each).float().detach().numpy().tobytes()).hexdigest() for name, each in named}


def add_one(counts: list[int], place: int) -> None:
    counts[place] += 1


def born(settings: TrainSettings, kinds: Sequence[str]) -> dict[str, tuple[dict[str, str], float, int]]:
    """By kind: digests of what was made, the loss, and how many parameters have a gradient."""
    mesh = MeshSpec(dp_shard=dist.get_world_size()).device_mesh("cpu")
    found = {}
    for kind in kinds:
        spec = models.ModelSpec(replace(settings, model=ANY), SIZED | KINDS[kind])
        model = models.build(spec, mesh)
        made = digests(model)
        tokens, computed = torch.arange(34).view(2, 17), [0, 0]
        for number, layer in enumerate(model.model.layers):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, n=number, c=computed: add_one(c, n))
        loss = models.loss(models.logits(model, tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        assert computed == [1 + (settings.recompute == "layer")] * 2
        found[kind] = made, loss.item(), sum(param.grad is not None for param in model.parameters())
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kinds", [("llama, tied", "mixtral"), pytest.param(("llama", "qwen3", "gemma3"), marks=pytest.mark.exhaustive)]
)
def test_models_of_transformers_are_born_the_same_on_any_number_of_ranks(kinds):
    """1 and 3 ranks, the latter with recomputation; sizes that nothing divides, tied weights, buffers."""
    alone = run_ranks(1, born, SHORT, kinds)[0]
    for found in run_ranks(3, born, replace(SHORT, recompute="layer"), kinds):
        assert found == alone
    for kind, (made, _, trained) in alone.items():
        head = {made["lm_head.weight"], made["model.embed_tokens.weight"]}
        assert len(head) == (1 if kind in ("llama, tied", "gemma3") else 2)
        names = [name for name in made if "inv_freq" not in name and "embed_scale" not in name]
        assert len(set(made[name] for name in names if "proj" in name)) == sum("proj" in name for name in names)
        assert trained == len(names) - (kind in ("llama, tied", "gemma3"))


def test_recipes_by_layer():
    settings = replace(SHORT, hidden=32, heads=2, layers=3, ffn=64).resolved()
    model = models.ModelSpec(replace(settings, recipe="layers.0=bf16, layers.2=block,*=mxfp8")).converted()[0]
    formats = [
        {param.quantized_storage.spec.format.name for param in layer.parameters() if isinstance(param, QuantizedTensor)}
        for layer in model.layers
    ]
    wanted = [None, recipe.resolve("mxfp8").weight, recipe.resolve("block").weight]
    assert formats == [set() if cell is None else {cell.format.name} for cell in wanted]
    content = SIZED | {"model_type": "llama"}
    spec = models.ModelSpec(replace(SHORT, model=ANY, recipe="layers.0.*=bf16,*.down_proj=block,*=mxfp8"), content)
    kinds = {
        name: param.quantized_storage.spec.tag
        for name, param in spec.converted()[0].named_parameters()
        if isinstance(param, QuantizedTensor)
    }
    assert len(kinds) == 7 and {tag for name, tag in kinds.items() if "down_proj" in name} == {wanted[2].tag}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mxfp7", "unknown recipe 'mxfp7'"),
        ("layers.0=bf16,mxfp8", "'mxfp8' must be PATTERN=RECIPE"),
        ("layers.0=bf17,*=mxfp8", "unknown recipe 'bf17'"),
        ("*=bf16,*=mxfp8", "'*=mxfp8' is there twice"),
        (
            "layers.7=bf16,*=mxfp8",
            "'layers.7' matches no layer, or only those of an earlier pattern; the linear layers",
        ),
        ("*.fc1=bf16,*=mxfp8", "'*.fc1' matches no layer"),
        ("*=mxfp8,layers.0=bf16", "recipe: earlier patterns match all layers of 'layers.0'"),
        ("layers.[01]=bf16,layers.1=block,*=mxfp8", "recipe: earlier patterns match all layers of 'layers.1'"),
    ],
)
def test_recipes_that_are_refused(text, says):
    with pytest.raises(ConfigurationError) as caught:
        models.ModelSpec(replace(TrainSettings(), recipe=text).resolved()).converted()[0]
    assert says in str(caught.value) and "\n" not in str(caught.value)


MILLIONS = {
    "llama3-8b": 8030, "llama3.2-1b": 1236, "qwen3-8b": 8191, "qwen3-0.6b": 596, "smollm2-135m": 134.5,
    "gpt2-small": 124.4, "moe-small": 223.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_are_those_models(name):
    """Parameters in millions, by the cards of these models; of the tokens that they have."""
    vocabulary = {"gpt2-small": 50257, "smollm2-135m": 49152}.get(name, 151936 if "qwen3" in name else 128256)
    settings = replace(TrainSettings(), **SIZES[name], vocabulary=vocabulary).resolved()
    settings.check()
    model = models.ModelSpec(settings).converted()[0]
    count = sum(param.numel() for param in model.parameters())
    assert count / 1e6 == pytest.approx(MILLIONS[name], rel=1e-3)


def mixtures(text: str) -> dict[str, list[float]]:
    """Figures of two steps of a mixture of experts, by what is recomputed, how far a router moved, and a text."""
    found, place = {}, ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    settings = replace(
        SHORT, hidden=32, heads=2, layers=2, ffn=48, experts=4, params_dtype="float32", recipe="bf16", balance_loss=1.0
    )
    cases = {
        "none": settings,
        "layer": replace(settings, recompute="layer"),
        "free": replace(settings, balance_loss=0.0),
    }
    for recompute, case in cases.items():
        run = RunDir(Path(text).parent / f"none-{place.ranks}")
        trainer = Trainer(case.resolved(), collect([text]), run, place, StopFlag())
        router = trainer.model.layers[0].mlp.router.weight
        before = whole(router).clone()
        found[recompute] = [value for step in (1, 2) for value in trainer.step(step)[:2]]
        found[f"{recompute}, moved"] = [(whole(router) - before).norm().item()]
        found[f"{recompute}, generated"] = models.generate(trainer.model, trainer.settings, b"def", 4)
    return found


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_a_mixture_of_experts_learns_alike_on_any_number_of_ranks(folder):
    """1 and 3 ranks, in float32, where sums of 3 parts are taken in another order; routers learn."""
    [alone], together = run_ranks(1, mixtures, str(folder / "text")), run_ranks(3, mixtures, str(folder / "text"))
    for found in together:
        assert found == together[0]
        for name, values in alone.items():
            assert found[name] == pytest.approx(values, rel=1e-4)
            assert values == alone[name.replace("layer", "none")]
    assert alone["free"][1] != alone["none"][1] and alone["none, moved"][0] > 1e-4  # the first gradient's norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of transformers with weights, and text to learn."""
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZED, "dtype": "bfloat16"})).to(torch.bfloat16).save_pretrained(path / "llama")
    (path / "text").write_bytes(Path(__file__).read_bytes()[:6000])
    return path


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A Llama with its tokenizer, as transformers saves them, and documents in JSON lines."""
    path = tmp_path_factory.mktemp("tokenized")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZED, "dtype": "bfloat16", "vocab_size": 416})).to(torch.bfloat16)
    model.save_pretrained(path / "llama")
    tokenizer_folder(path / "llama", tokenizer_class="PreTrainedTokenizerFast", eos_token=END)
    jsonl(path / "corpus.jsonl", texts(60))
    return path


FLAGS = "--seq-length 16 --global-batch 6 --micro-batch 1 --warmup 1 --eval-sequences 3 --save-every 2 --decay-steps 9"
FLAGS += " --z-loss 1e-4 --schedule wsd --recompute layer --profile 1 --sample-tokens 4"


@pytest.mark.distributed
@pytest.mark.parametrize("numbers", [(3,), pytest.param((1, 3), marks=pytest.mark.exhaustive)])
def test_a_folder_of_transformers_is_trained_resumed_and_exported(tokenized, tmp_path, numbers):
    """2 processes; then others; then to transformers, which generates text with the tokenizer."""
    run, out, data = tmp_path / "run", tmp_path / "out", tokenized / "corpus.jsonl"
    line = ["train", "--run", run, "--model", tokenized / "llama", "--data", data, "--recipe", "mxfp8"]
    begun = quantshard(*line, "--nproc-per-node", 2, "--steps", 3, *FLAGS.split())
    assert begun.returncode == 0, begun.stderr
    done = RunDir(run).last_complete()
    before = metrics(run)[:done]
    for ranks in numbers:
        resumed = quantshard("resume", run, "--nproc-per-node", ranks, "--steps", done + ranks)
        assert resumed.returncode == 0, resumed.stderr
    found = metrics(run)
    assert [entry["step"] for entry in found] == list(range(1, done + 4)) and found[:done] == before
    assert found[-1]["loss"] < found[0]["loss"]
    trained = RunDir(run).read_config()[0]
    assert (trained.vocabulary, trained.tokenizer) == (400, str(tokenized / "llama"))  # the model's own
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["step"] == 0 and samples[-1]["step"] == done + 3
    assert json.loads((run / "profile" / "rank-0.json").read_text())["traceEvents"]
    last = run / "checkpoints" / f"step-{done + 3:06d}"
    for arguments in (["explain", run], ["plan", run], ["verify", last], ["status", run]):
        result = quantshard(*arguments)
        assert result.returncode == 0, result.stderr
    exported = quantshard("export", last, "--layout", "plain-bf16", "--out", out)
    assert exported.returncode == 0, exported.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("shard scale block", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=8, do_sample=False)[0])
    assert isinstance(model, LlamaForCausalLM) and text.startswith("shard scale block") and len(text) > 20


def packed_steps(folder: str) -> list[list[float]]:
    """Loss and gradient norm of each of three steps over documents, and of the third in a resumed run."""
    place = ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    content = SIZED | {"model_type": "mistral", "sliding_window": 6, "dtype": "float32"}
    settings = replace(SHORT, model=ANY, recipe="bf16", recompute="layer", steps=3, packing="documents").resolved()
    run, corpus, results = RunDir(Path(folder) / f"packed-{place.ranks}"), collect([f"{folder}/corpus.jsonl"]), []
    for done in (0, 2):
        trainer = Trainer(settings, corpus, run, place, StopFlag(), "" if done == 0 else None, content)
        assert trainer.model.config._attn_implementation == "quantshard"
        if done:
            assert trainer.restore().step == done
        with mock.patch.object(masking_utils, "sdpa_mask", side_effect=AssertionError("a dense mask")):
            for step in range(done + 1, 4):
                results.append([*trainer.step(step)[:2]])
                if step == 2:
                    trainer.save(step)
                    trainer.manager.close()
    return results


@pytest.mark.distributed
def test_documents_of_transformers_models_resume_bitwise(tokenized):
    """On 1 and 3 ranks, which agree up to the order of float32 sums; no dense mask is built."""
    found = {ranks: run_ranks(ranks, packed_steps, str(tokenized)) for ranks in (1, 3)}
    for results in found.values():
        assert results == [results[0]] * len(results) and results[0][3] == results[0][2] and len(results[0]) == 4
    assert found[3][0] == [pytest.approx(values, rel=1e-5) for values in found[1][0]]


def test_what_a_configuration_of_anybody_may_not_do():
    """Have code fetched, name another kind of model, or ask for all memory."""
    content = SIZED | {"model_type": "llama", "attn_implementation": "org/kernel", "architectures": ["LlamaModel"]}
    model, _ = huggingface.converted(content, ANY, LayerRecipes.parse("mxfp8"), causal=True)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config._attn_implementation == "sdpa"
    for name in ("decoder_layers", "n_routed_experts", "num_hidden_layers"):
        with pytest.raises(ConfigurationError, match=f"{name} is 1000000000, and at most"):
            huggingface.described(SIZED | {"model_type": "llama", name: 10**9}, ANY)
    huggingface.described(SIZED | {"model_type": "llama", "shared_expert_intermediate_size": 20480}, ANY)


def test_what_is_named_goes_before_what_is_implied(folder, tmp_path):
    """Flags, then the sizes of a flag's model, then a file, then those of weights; contradictions are refused."""
    file = {"hidden": 48, "layers": 1, "model": "llama3-8b"}
    found = initialization.chosen({"model": "gpt2-small", "layers": 3}, file)
    assert (found["hidden"], found["layers"], found["architecture"]) == (768, 3, "gpt")
    assert initialization.chosen({}, file)["hidden"] == 48 and initialization.chosen({}, file)["ffn"] == 14336
    llama = str(folder / "llama")
    with pytest.raises(
        ConfigurationError, match="model = 'gpt2-small' has architecture = 'gpt', but the model of init_from"
    ):
        initialization.chosen({"model": "gpt2-small", "init_from": llama}, {})
    of_run = {"model": llama, "hidden": 256, "tokenizer": ""}  # as the config.toml of a run says it
    assert initialization.chosen({}, of_run)["init_from"] == llama
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((folder / "llama" / "config.json").read_text())
    (other / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="has no safetensors beside it"):
        initialization.chosen({"model": str(other)}, {})
    assert "init_from" not in initialization.chosen({"model": str(other), "random_weights": True}, {})


def test_stacked_experts_decay(monkeypatch):
    content = SIZED | {"model_type": "mixtral", "num_local_experts": 4}
    model, _ = huggingface.converted(content, ANY, LayerRecipes.parse("mxfp8"))
    huggingface.leave_meta(model, torch.device("cpu"))
    huggingface.initialize(model, 0)
    first, second = make_optimizer(model, SHORT).param_groups
    assert {param.ndim for param in first["params"]} == {2, 3} and {param.ndim for param in second["params"]} == {1}


@pytest.mark.distributed
def test_the_weights_of_a_folder_are_told(folder, tmp_path):
    line = ["train", "--run", tmp_path / "run", "--model", folder / "llama", "--data", folder / "text", "--steps", 1]
    line += ["--vocabulary", 257, "--warmup", 0]
    result = quantshard(*line, "--global-batch", 2, "--eval-sequences", 1, "--weight-decay", 0.2)
    assert result.returncode == 0, result.stderr
    assert "defaults for fine-tuning: lr = 1e-05, seq_length = 64\n" in result.stdout
    settings, *_ = RunDir(tmp_path / "run").read_config()
    assert (settings.lr, settings.weight_decay, settings.seq_length) == (1e-5, 0.2, 64)
    assert "7 tensors copied bit for bit, 14 weights quantized" in result.stdout
    assert "1 file of 6001 tokens; deterministic mode is on" in result.stdout  # a byte each, and the end of the text
    assert "not converted: 1 linear layers" in result.stdout and "lm_head" in result.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "llama3-8B"], "is no folder or size; did you mean 'llama3-8b'? known: "),
        (["--model", "FOLDER", "--hidden", "64"], "hidden is decided by model = "),
        (["--model", "FOLDER", "--tied"], "tied is decided by model = "),
        (["--model", "FOLDER/none"], "there is nothing at "),
        (["--model", "FOLDER", "--seq-length", "65"], "seq_length = 65, but model = "),
        (["--model", "FOLDER", "--mesh", "tp=2"], "a transformers model cannot be combined with tp in the mesh"),
        (["--model", "FOLDER", "--dropout", "0.1"], "a transformers model cannot be combined with dropout"),
        (["--model", "FOLDER", "--recompute", "activation"], "cannot be combined with recompute = 'activation'"),
        (["--model", "FOLDER", "--seq-length", "9", "--recipe", "*.up_prj=bf16,*=mxfp8"], "matches none of the"),
        (["--model", "FOLDER", "--random-weights", "--init-from", "FOLDER"], "names weights; give one"),
        (["--recompute", "all"], "choose one of: none, activation, layer"),
        (
            ["--micro-batch", "5"],
            "global_batch = 16 cannot be split evenly over 1 data-parallel processes x micro_batch = 5",
        ),
        (["--decay-share", "2"], "decay_share = 2.0: must be 0 or more"),
        (["--z-loss", "-1"], "z_loss = -1.0: must be 0 or more"),
        (["--experts", "4", "--experts-per-token", "5"], "experts_per_token = 5, but there are experts = 4"),
        (["--experts", "4", "--mesh", "tp=2"], "experts cannot be combined with tp in the mesh"),
        (["--experts", "4", "--architecture", "gpt"], "experts cannot be combined with architecture = 'gpt'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_made(folder, tmp_path, flags, says):
    flags = [flag.replace("FOLDER", str(folder / "llama")) for flag in flags]
    if "--model" in flags:
        flags += ["--vocabulary", "257"]
    result = quantshard("train", "--run", tmp_path / "run", "--data", folder / "text", *flags)
    assert result.returncode == 1 and says in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_what_would_train_on_something_else_is_refused(folder, tmp_path):
    """Encoders, and folders without weights or a tokenizer."""
    model = folder / "llama"
    with pytest.raises(ConfigurationError, match="has no safetensors beside it; give --random-weights"):
        (tmp_path / "bare").mkdir()
        shutil.copy(model / "config.json", tmp_path / "bare")
        initialization.chosen({"model": str(tmp_path / "bare")}, {})
    spec = models.ModelSpec(replace(SHORT, model=str(model), seq_length=16), huggingface.read_configuration(str(model)))
    with pytest.raises(ConfigurationError, match=r"has \d+ tokens, not 257; .*--vocabulary"):
        spec.check()
    for kind in ("bert", "roberta", "electra"):
        content = {"model_type": kind, "num_hidden_layers": 1, "architectures": ["BertForMaskedLM"]}
        with pytest.raises(ConfigurationError, match=f"{kind} is an encoder; set is_decoder"):
            huggingface.described(content, ANY, causal=True)
    huggingface.described(content | {"is_decoder": True}, ANY, causal=True)
    huggingface.described(SIZED | {"model_type": "llama"}, ANY, causal=True)


def file_masters(path: str, text: str) -> tuple[int, list[str]]:
    """How many quantized weights a trainer that begins with a folder has, and whose masters are not the file's."""
    folder = Path(path)
    content = json.loads((folder / "config.json").read_text())
    place = ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    settings = replace(SHORT, model=path, init_from=path, recipe="mxfp8").resolved()
    trainer = Trainer(settings, collect([text]), RunDir(folder.parent / "masters"), place, StopFlag(), path, content)
    values, count, different = load_file(folder / "model.safetensors"), 0, []
    for name, param in trainer.model.named_parameters():
        if isinstance(private_torch.local_tensor(param), QuantizedTensor):
            count += 1
            master = whole(trainer.optimizer.state[param]["master_param"])
            if not torch.equal(master.float(), values[name].float()):
                different.append(name)
    return count, different


@pytest.mark.distributed
def test_masters_begin_with_the_values_of_the_file(folder):
    assert run_ranks(2, file_masters, str(folder / "llama"), str(folder / "text")) == [(14, [])] * 2


def test_weights_begin_a_fine_tuning(folder, tmp_path):
    model, defaults = str(folder / "llama"), initialization.fine_tuning_defaults
    assert defaults({"model": model, "init_from": model}) == {"lr": 1e-5, "weight_decay": 0.01, "seq_length": 64}
    assert defaults({"init_from": model, "lr": 1.0, "seq_length": 8}) == {"weight_decay": 0.01}
    assert defaults({"model": model, "init_from": ""}) == {}
    longer = tmp_path / "config.json"
    longer.write_text(json.dumps({"max_position_embeddings": 131072}))
    assert defaults({"model": str(longer), "init_from": model})["seq_length"] == 2048


def test_weights_that_a_folder_lacks_are_told(folder, tmp_path):
    shutil.copytree(folder / "llama", tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    line = ["train", "--run", tmp_path / "run", "--data", folder / "text", "--seq-length", 16, "--vocabulary", 257]
    says = f"{tmp_path / 'llama'} has no model.layers.1.mlp.up_proj.weight"
    result = quantshard(*line, "--model", tmp_path / "llama")
    assert result.returncode == 1 and says in result.stderr
    other = tmp_path / "other"
    shutil.copytree(folder / "llama", other)
    result = quantshard(*line, "--model", other, "--init-from", tmp_path / "llama")
    assert result.returncode == 1 and says in result.stderr
