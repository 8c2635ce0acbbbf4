"""`quantshard explain`, `plan` and `inspect`: of runs, configurations and checkpoints, in 80 columns."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quantshard as qs
from quantshard import recipe
from quantshard.readable import by_pattern, united_groups
from quantshard.tools.cli import explain
from quantshard.tools.trainer.models.decoder import LanguageModel
from quantshard.tools.trainer.models.model import token_losses
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.interop.layouts import models
from tests.tools.cli.hostile import made, told

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single process, which is meant

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100}  # fmt: skip


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Any, Path]:
    """A model, its optimizer that knows names, and their checkpoint."""
    model = models.build("mxfp8")
    optimizer = models.trained(model, exp_avg_dtype=torch.uint8)
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    qs.checkpoints.save(path, model, optimizer)
    return model, optimizer, path


def lines_of(*arguments: Any) -> list[str]:
    code, out, err = told(*arguments)
    assert code == 0 and not err, err
    return out


def json_of(*arguments: Any) -> dict[str, Any]:
    return json.loads("\n".join(lines_of(*arguments, "--json")))


def rows(report: qs.observe.Report) -> list[dict[str, Any]]:
    return json.loads(report.to_json())["rows"]


def config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_a_configuration_is_converted_and_fits_80_columns(tmp_path: Path) -> None:
    out = lines_of("explain", config(tmp_path))
    assert max(len(line) for line in out if str(tmp_path) not in line) <= 80  # a path is not cut in two
    text = "\n".join(out)
    assert len(out) < 40 and out[3].split()[:2] == ["this", "rank"], text
    assert "layers.{0-11}.self_attn.{q,k,v,o}" in text and "gathered" not in text
    assert "lm_head [100, 64]: the head" in text
    wide = lines_of("explain", tmp_path / "config.json", "--wide")
    assert sum("q_proj.weight" in line and "fp8_e4m3" in line for line in wide) == 12
    found = json_of("explain", tmp_path, "--recipe", "nvfp4")
    weights = {row["name"]: row for row in found["rows"]}
    assert len(weights) == 3 + 12 * 9 and found["source"][0].endswith("LlamaForCausalLM, by recipe 'nvfp4'")
    assert weights["model.layers.3.mlp.up_proj.weight"]["format"] == "nvfp4_16x16"
    assert weights["lm_head.weight"]["format"] == "bfloat16"
    bf16 = json_of("explain", tmp_path, "--recipe", "bf16")
    assert {row["format"] for row in bf16["rows"]} == {"bfloat16"}


def test_a_model_of_two_kinds_of_layers_fits_a_screen(tmp_path: Path) -> None:
    recipes = "*.layers.0.*=bf16,*.layers.3.*=bf16,*=mxfp8"
    folder = config(tmp_path, num_hidden_layers=4)
    for command, most in (("explain", 45), ("plan", 50)):
        out = lines_of(command, folder, "--recipe", recipes)
        text = "\n".join(out)
        assert len(out) <= most and "GEMM native" not in text, text
        assert sum(line.startswith("emulated: ") for line in out) == 1, text
        left = "  model.layers.{0,3}.self_attn.{q,k,v,o}_proj x8: recipe bf16"
        assert (left in out) == (command == "explain")
        assert left in lines_of(command, folder, "--recipe", recipes, "--wide")
        assert "GEMM native: high precision: LossLinear is not" in "\n".join(lines_of(command, folder, "--wide"))
    step = lines_of("plan", folder, "--recipe", recipes, "--batch", 2, "--seq-length", 64, "--memory", 80)
    assert len(step) <= 50, "\n".join(step)


def test_names_are_united_by_their_modules() -> None:
    """Those of one module and one key alone; a number is not united with a name."""
    names = ["a.0.q_proj.weight", "a.1.q_proj.weight", "a.0.k_proj.weight", "a.1.k_proj.weight", "a.0.q_proj.bias",
             "a.1.q_proj.bias", "a.0.fc1_up_weight", "a.0.fc2_weight", "a.0.norm_1.weight", "a.0.norm_2.weight",
             "b.0.weight", "b.x.weight", "b", "c"]  # fmt: skip
    found = [(name, len(members)) for name, members in united_groups((name, "", name) for name in names)]
    assert found == [
        ("a.{0-1}.{q,k}_proj.weight", 4), ("a.{0-1}.q_proj.bias", 2), ("a.0.{fc1_up,fc2}_weight", 2),
        ("a.0.norm_{1,2}.weight", 2), ("b.0.weight", 1), ("b.x.weight", 1), ("{b,c}", 2),
    ]  # fmt: skip
    assert len(united_groups((name, name, name) for name in names)) == len(names)


def test_plan_is_that_of_python(tmp_path: Path) -> None:
    """The mesh, the layers and the cuts of tensor parallelism that the command chooses, beside those by hand."""
    found = json_of("plan", config(tmp_path), "--mesh", "dp_shard=4,tp=2", "--rank", 5, "--preset", "lean8")
    model = explain.find_model(str(tmp_path), None).model
    cuts = {f"{name}_proj.weight": int(name in "o down") for name in ("q", "k", "v", "o", "gate", "up", "down")}
    layers = model.model.layers
    by_hand = qs.plan(model, {"dp_shard": 4, "tp": 2}, layers=layers, rank=5, tensor_parallel=cuts,
                      preset="lean8", capability=(9, 0))  # fmt: skip
    assert found["rows"] == rows(by_hand) and found["totals"]["bytes"] == by_hand.totals.bytes
    assert found["source"][-1] == "rank 5 of mesh dp_shard=4,tp=2"
    assert json_of("plan", tmp_path)["source"][-1] == "rank 0 of mesh dp_shard=8"


def test_paths_are_those_of_the_named_gpu(tmp_path: Path) -> None:
    """MXFP8 is native from compute capability 10.0 on; `explain` of a run tells of this machine, and of its states."""
    run = made(tmp_path)
    for capability, path in (("9.0", "emulated"), ("10.0", "native")):
        found = json_of("plan", run, "--compute-capability", capability, "--recipe", "mxfp8")
        weights = [row for row in found["rows"] if row["format"].startswith("mxfp8")]
        assert weights and all(
            row["gemm"] == path and f"capability {capability}" in row["gemm_reason"] for row in weights
        )
    here = json_of("explain", run)
    assert here["totals"]["optimizer_bytes"] > 0


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_tensor_parallelism_cuts_what_the_modules_cut(architecture: str) -> None:
    """Of the command's own model: the dims that its modules would hand to DTensor, biases among them."""
    settings = TrainSettings(architecture=architecture, hidden=64, heads=2, layers=1).resolved()
    model = LanguageModel(settings, recipe.resolve("mxfp8"), "meta")
    cuts, seen = explain._cuts(model, 2), set()
    for prefix, module in model.named_modules():
        for leaf, dim in getattr(module, "_cuts", {}).items():
            name = f"{prefix}.{leaf}"
            assert next((dim for end, dim in cuts.items() if name.endswith(end)), None) == dim, name
            seen.add(dim)
    assert seen == {None, 0, 1}


def test_a_run_has_its_mesh_recipe_and_moments(tmp_path: Path) -> None:
    run = made(tmp_path)
    found = json_of("plan", run)
    assert found["source"][-1] == "rank 0 of mesh dp_shard=2"
    assert {row["format"] for row in found["rows"]} == {"mxfp8_32x32", "bfloat16"}
    assert all(row["mesh"] == {"dp_shard": 2} for row in found["rows"])
    inner = next(row for row in found["rows"] if row["name"].startswith("layers.0."))
    assert inner["backward_gather_bytes"] > 0  # its layers are sharded one by one
    code, out, err = told("plan", run, "--mesh", "tp=3")
    assert code == 1 and not out and "dim 0 of 64 over 3 ranks of 'tp'" in " ".join(err)
    other = json_of("explain", run / "config.toml", "--recipe", "block")
    assert "fp8_128x128" in {row["format"] for row in other["rows"]}
    text = (run / "config.toml").read_text()
    for name, command in (("muon", "plan"), ("muon", "explain"), ("lion", "plan")):
        (run / "config.toml").write_text(text.replace('optimizer = "adamw"', f'optimizer = "{name}"'))
        states = {row["name"]: set(row["optimizer"]) for row in json_of(command, run)["rows"]}
        matrices = [states[each] for each in states if each.startswith("layers.0.") and each.endswith("weight")
                    and "norm_weight" not in each]  # fmt: skip
        moment = {"muon": "momentum_buffer", "lion": "exp_avg"}[name]
        assert matrices and all(each == {moment, "master_param"} for each in matrices)
        assert ("exp_avg_sq" in states["head.weight"]) == (name == "muon")
    code, out, err = told("plan", run, "--optimizer", "muno")
    assert code == 1 and not out and "--optimizer muno: did you mean 'muon'?" in " ".join(err)


def test_plan_tells_the_peak_of_a_step(tmp_path: Path) -> None:
    """Of a run's own batch, or of one that is given; ."""
    run = made(tmp_path)
    found = json_of("plan", run)["memory"]
    file = run / "config.toml"
    plain = file.read_text()
    file.write_text(plain.replace("z_loss = 0.0", "z_loss = 1e-4").replace("compile = false", "compile = true"))
    more_loss = json_of("plan", run, "--batch", 512)
    file.write_text(plain)
    same = json_of("plan", run, "--batch", 512)["memory"]["peak_bytes"]
    assert more_loss["memory"]["peak_bytes"] == same  # of logits no float32 copy is there, for the z-loss neither
    assert found["step"] == "2 x 16 tokens on compute capability 9.0" and "fits" not in found
    assert found["peak_bytes"] == max(phase["total"] for phase in found["phases"].values())
    assert found["phases"]["optimizer step"]["temporary"] >= 16 * 257 * 64 // 2  # squares of the head's gradient
    more = ["--batch", 4, "--seq-length", 8, "--memory", 1, "--recompute", "--compute-capability", "10.0"]
    found = json_of("plan", run, *more)["memory"]
    assert found["step"] == "4 x 8 tokens, layers recomputed on compute capability 10.0"
    assert " x 8 tokens fit in 1.0 GiB" in found["fits"]
    model = explain.find_model(str(run), None).model
    step = qs.TrainingStep(4, 8, loss=lambda model, *batch: token_losses(model(batch[0]), batch[1])[0])
    by_hand = qs.plan(model, {}, layers=model.layers, step=step).memory
    assert by_hand is not None
    alone = json_of("plan", run, "--mesh", "none", "--batch", 4, "--seq-length", 8)
    assert alone["memory"]["phases"]["forward"]["activations"] == by_hand.phases[0].bytes["activations"]
    assert "one process without FSDP2" in alone["source"]
    lines = lines_of("plan", run)
    assert max(map(len, lines)) <= 80 and any("most memory of a step" in line for line in lines)
    folder = config(tmp_path)
    assert "memory" not in json_of("plan", folder) and any("give --batch" in line for line in lines_of("plan", folder))
    table = lines_of("plan", folder, "--batch", 2, "--seq-length", 64)
    assert any("optimizer states" in line for line in table) and max(map(len, table[2:])) <= 80
    under_tp = json_of("plan", folder, "--mesh", "dp_shard=2,tp=2")
    assert "memory" not in under_tp and any("tensor parallelism" in line for line in under_tp["source"])


def test_inspect_has_a_row_for_each_pattern(checkpoint: tuple[torch.nn.Module, Any, Path]) -> None:
    *_, path = checkpoint
    out = lines_of("inspect", path)
    assert max(map(len, out)) <= 80 and "saturated" not in "".join(out)
    wide = lines_of("inspect", path, "--wide")
    assert sum("fc1_up_weight" in line for line in wide) == 2 and any("saturated" in line for line in wide)


def test_summary_adds_up(checkpoint: tuple[torch.nn.Module, Any, Path]) -> None:
    report = qs.explain(checkpoint[0], checkpoint[1])
    summary = report.summary()
    assert len(summary.rows) < len(report.rows) and summary.totals == report.totals
    for name in ("code_bytes", "scale_bytes", "bf16_bytes", "optimizer_bytes"):
        assert sum(getattr(row, name) for row in summary.rows) == getattr(report.totals, name)
    for figures in (lambda row: row.elements, lambda row: sum(row.state_sizes.values())):
        assert sum(map(figures, summary.rows)) == sum(map(figures, report.rows))
    one = replace(report, rows=report.rows[:1])
    assert asdict(one.summary().rows[0]) == asdict(one.rows[0])


def test_names_from_anybody_are_patterns_too() -> None:
    names = ["a.{}.0", "a.{}.1", "a.{x}.1", f"b.{'9' * 5000}.c", "0", "1", "d.00", "d.01"]
    found = [(pattern, count) for pattern, count, _ in by_pattern((name, "") for name in names)]
    assert found == [("a.{}.{0-1}", 2), ("a.{x}.1", 1), (names[3], 1), ("{0-1}", 2), ("d.00", 1), ("d.01", 1)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "confg"], "there is nothing at confg; name a run or a config.json"),
        (["plan", "far/away"], "there is nothing at far/away"),
        (["inspect", "tetx"], "there is nothing at tetx"),
        (["explain", "text"], "text has no config.toml of a run and no config.json"),
        (["inspect", ""], "there is nothing at an empty path"),
        (["explain", "config.json", "--recipe", "mxpf8"], "unknown recipe 'mxpf8'"),
        (["plan", "config.json", "--mesh", "dp_shrad=2"], "there is no axis 'dp_shrad'; did you mean 'dp_shard'?"),
        (["plan", "config.json", "--mesh", "dp_shard=4", "--rank", "4"], "there is no rank 4"),
        (
            ["plan", "config.json", "--preset", "laen6"],
            "preset = 'laen6': there is no such preset; did you mean 'lean6'?",
        ),
        (["plan", "config.json", "--mesh", "tp=5"], "q_proj.weight (64, 64), dim 0 of 64 over 5 ranks of 'tp'"),
        (["plan", "config.json", "--wdie"], "--wdie"),
        (
            ["plan", "config.json", "--batch", "2"],
            "the memory of a step cannot be computed: give --batch and --seq-length",
        ),
        (["plan", "config.json", "--memory", "80"], "give --batch and --seq-length"),
        (["plan", "saved"], "inspect shows a checkpoint"),
        (["plan", "config.json", "--mesh", "tp=2", "--batch", "1", "--seq-length", "8"], "parallelism, tp=2"),
        (["plan", "config.json", "--compute-capability", "nine"], "--compute-capability nine: give two numbers"),
        (["explain", "bad.json"], "Unrecognized model identifier: lama"),
        (["explain", "other.json"], "transformers cannot build it"),
        (["explain", "large.json"], "num_hidden_layers is 100000000, and at most 1024"),
        (["plan", "gpt2.json"], "no layer of this model can be converted"),
        (
            ["plan", "gpt2.json", "--mesh", "tp=2", "--recipe", "bf16"],
            "'tp' cuts no weight of this model",
        ),
    ],
)
def test_mistakes_are_one_line(
    checkpoint: tuple[torch.nn.Module, Any, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(config(tmp_path))
    (tmp_path / "text").write_text("x")
    (tmp_path / "saved").symlink_to(checkpoint[2])
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    made_ = {"bad": {**LLAMA, "model_type": "lama"}, "other": {**LLAMA, "hidden_size": "many"}, "gpt2": gpt2,
             "large": {**LLAMA, "num_hidden_layers": 10**8}}  # fmt: skip
    for name, content in made_.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    code, out, err = told(*arguments)
    assert code in (1, 2) and not out and len(err) == 1 and says in err[0], (code, out, err)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = told("explain", config(tmp_path))
    assert code == 1 and not out and len(err) == 1 and "pip install 'quantshard[transformers]'" in err[0], err


def test_version() -> None:
    import tomllib

    content = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert content["project"]["dynamic"] == ["version"] and "version" not in content["project"]
    where = Path(__file__).parents[3] / content["tool"]["hatch"]["version"]["path"]
    assert f'\n__version__ = "{qs.__version__}"\n' in where.read_text()
    assert lines_of("--version") == [f"quantshard {qs.__version__}"]
