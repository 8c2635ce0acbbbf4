"""Every block of code of the docs runs in some test; here those that have no test of their own. 1 and 2 ranks."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import quantshard
from quantshard import optimizers
from quantshard.modules.base.initialization import default_device
from quantshard.optimizers import FusedAdam
from quantshard.tools import cli
from tests.distributed.models import Case, batch, bits, build
from tests.distributed.pool import run_ranks
from tests.pages import ROOT, section, snippets

HERE = "tests/distributed/test_snippets.py"
DOCS = "tests/distributed/test_"
INTEROP = "tests/interop/"
RUN_BY = {
    "README.md": f"{DOCS}readme.py",
    "docs/frameworks.md#accelerate-peft-and-trl": f"{INTEROP}frameworks/test_examples.py",
    "docs/checkpoints.md#checkpoints-of-a-run": f"{DOCS}checkpoints_doc.py",
    "docs/checkpoints.md#going-on-from-a-transformerengine-checkpoint": f"{INTEROP}transformer_engine/test_convert.py",
    "docs/distributed.md#context-parallelism": f"{DOCS}context_parallel.py",
    "docs/distributed.md#determinism": HERE,
    "docs/existing-models.md": HERE,
    "docs/distributed.md#experts": "tests/distributed/experts.py",
    "docs/format.md": f"{DOCS}format_doc.py",
    "docs/existing-models.md#from-bf16": f"{INTEROP}conversion/test_pages.py",
    "docs/existing-models.md#from-torchao-float8": f"{INTEROP}conversion/test_pages.py",
    "docs/performance.md#layers-make_graphed_callables": "tests/modules/test_graphs.py",
    "docs/performance.md#the-whole-step-stepgraph": "tests/modules/test_step_graph.py",
    "docs/frameworks.md#transformers": f"{INTEROP}frameworks/test_transformers.py",
    "docs/layouts.md": "tests/tools/cli/test_exchange.py",
    "docs/frameworks.md#lightning-and-torchtitan": f"{INTEROP}frameworks/test_lightning.py",
    "docs/optimizers.md": HERE,
    "docs/serving.md": f"{DOCS}serving.py",
    "docs/recipes.md": "tests/modules/test_recipes_by_name.py",
    "docs/checkpoints.md": f"{DOCS}saving_doc.py",
    "docs/distributed.md": HERE,
    "docs/command-line.md#statistics-and-alarms": "tests/tools/statistics/test_page.py",
    "docs/distributed.md#tensor-parallelism": f"{DOCS}tp_doc.py",
    "docs/transformer-engine.md": HERE,
    "docs/tutorial.md": f"{DOCS}tutorial.py",
}
"""Pages and chapters that have Python, and the file that runs it."""


def snippet_with(page: str, words: str) -> str:
    """The one snippet of a page that has these words."""
    (found,) = (snippet for snippet in snippets(page) if words in snippet)
    return found


def test_an_average_of_values_is_none_of_codes() -> None:
    with quantshard.quantized_model_init():
        model = quantshard.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    names = {
        "quantshard": quantshard,
        "model": model,
        "optimizer": quantshard.optimizers.FusedAdam(model.named_parameters()),
    }
    exec(snippet_with("docs/optimizers.md", "mean.lerp(values"), names)
    assert torch.equal(names["average"]["weight"], model.weight.dequantize(dtype=torch.float32))


def test_every_page_with_code_has_a_test() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8").count("\n```python\n") for page in pages}
    run = Counter[str]()
    for link, file in RUN_BY.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"{re.escape(link)}(?!#)", text), f"{file} does not run {link}"
        run[link.partition("#")[0]] += len(snippets(link))
    assert run == Counter(blocks)
    assert [len(snippets(link)) for link, file in RUN_BY.items() if file == HERE] == [1, 2, 9, 1, 1]


# Commands ------------------------------------------------------------------------------------------------------------


def commands(page: str) -> list[list[str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"quantshard [a-z]", line)]


def unknown(command: list[str]) -> list[str]:
    """The name of a command, or of its options, that the command line does not have."""
    known: Any = typer.main.get_command(cli.app())
    if command[0] not in known.commands:
        return command[:1]
    options = {name for each in known.commands[command[0]].params for name in (*each.opts, *each.secondary_opts)}
    return [word for word in command if word.startswith("--") and word not in options]


def test_commands_and_options_of_the_docs_exist() -> None:
    found = [(page, command) for page in ("README.md", "docs/command-line.md") for command in commands(page)]
    assert len(found) >= 13
    assert [(page, command) for page, command in found if unknown(command)] == []
    assert unknown(["trian"]) == ["trian"] and unknown(["resume", "DIR", "--mehs", "tp=2"]) == ["--mehs"]


# Python --------------------------------------------------------------------------------------------------------------


def test_determinism() -> None:
    (snippet,) = snippets("docs/distributed.md#determinism")
    try:
        before, part = snippet.split("with quantshard")
        exec(before, {})
        assert torch.are_deterministic_algorithms_enabled()
        exec("import quantshard\nwith quantshard" + part, {})
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        quantshard.deterministic(False)


def test_a_model_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, and prints what the page says."""
    page = "docs/existing-models.md"
    names: dict[str, Any] = {}
    exec(snippets(page)[0], names)
    assert capsys.readouterr().out in section(page)
    assert names["loss"] < names["model"].config.vocab_size and names["step"] == 4


def test_transformer_engines_names() -> None:
    (snippet,) = snippets("docs/transformer-engine.md")
    names: dict[str, Any] = {"x": torch.randn(6, 2, 1024, device=default_device(), requires_grad=True)}
    with pytest.warns(UserWarning, match="an amax history was made in this forward"):  # as the page says
        exec(snippet, names)
    names["out"].sum().backward()
    assert names["out"].shape == (6, 2, 1024)
    assert names["x"].grad.isfinite().all() and names["layer"].fc1_weight.grad is not None


def test_an_optimizer_of_ones_own() -> None:
    """It trains a quantized weight; `tests/optimizers/test_elementwise.py` has its bits."""
    with quantshard.quantized_model_init(recipe="block"):
        model = quantshard.Linear(150, 70, params_dtype=torch.bfloat16)
    before = model.weight.detach().dequantize()
    names: dict[str, Any] = vars(optimizers) | {"torch": torch, "model": model}
    exec(snippet_with("docs/optimizers.md", "class Momentum"), names)
    model(torch.ones(3, 150, dtype=torch.bfloat16, device=default_device())).float().square().mean().backward()
    names["optimizer"].step()
    assert not torch.equal(before, model.weight.detach().dequantize())


@pytest.mark.parametrize("words", ["Muon(groups", "import Lion"])
def test_other_optimizers(words: str) -> None:
    with quantshard.quantized_model_init(recipe="mxfp8"):
        model = nn.Module()
        model.layer = quantshard.Linear(64, 96, params_dtype=torch.bfloat16)
    model.lm_head = nn.Linear(96, 7, dtype=torch.bfloat16, device=default_device())
    weights, names = bits(model), {"model": model, "torch": torch}
    exec(snippet_with("docs/optimizers.md", words), names)
    before = [state["master_param"].clone() for state in names["optimizer"].state.values()]
    model.lm_head(model.layer(torch.randn(5, 64, dtype=torch.bfloat16, device=default_device()))).sum().backward()
    names["optimizer"].step()
    states = [next(iter(names["optimizer"].state[param])) for param in model.parameters()]
    assert states == ["momentum_buffer" if "Muon" in words else "exp_avg", *["exp_avg"] * 3]
    masters = [state["master_param"] for state in names["optimizer"].state.values()]
    assert not any(torch.equal(master, old) for master, old in zip(masters, before, strict=True))
    assert bits(model) != weights


def test_an_average_of_the_weights() -> None:
    with quantshard.quantized_model_init(recipe="mxfp8"):
        model = quantshard.Linear(64, 64, params_dtype=torch.bfloat16)
    seen: list[dict[str, str]] = []
    names: dict[str, Any] = {"FusedAdam": FusedAdam, "quantshard": quantshard, "model": model, "lr": 1e-2}
    first, last = snippet_with("docs/optimizers.md", "averaged_weights(model").split("...\n")
    exec(first, names)
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16, device=default_device())).float().square().sum().backward()
        names["optimizer"].step()
    before = bits(model)
    exec(last, names | {"evaluate": lambda model: seen.append(bits(model))})
    assert bits(model) == before != seen[0]


def test_going_on_with_adamw() -> None:
    """It makes the step that FusedAdam makes, from codes as moments too, but for roundings."""
    with quantshard.quantized_model_init(recipe="mxfp8"):
        model = quantshard.Linear(64, 64, params_dtype=torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, exp_avg_dtype=torch.uint8)
    float32_model = torch.nn.Linear(64, 64, device=default_device())
    for number in range(3):
        model(
            torch.ones(2, 64, dtype=torch.bfloat16, device=default_device()) * number
        ).float().square().sum().backward()
        if number == 2:
            exec(snippet_with("docs/optimizers.md", "plain.state[own]"), names := vars() | {"torch": torch})
            with pytest.raises(KeyError, match="step"):
                torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.state_dict())
            for param, own in zip(model.parameters(), float32_model.parameters(), strict=True):
                own.grad = param.grad.float()
            names["plain"].step()
        optimizer.step()
        optimizer.zero_grad()
    for param, own in zip(model.parameters(), float32_model.parameters(), strict=True):
        torch.testing.assert_close(
            own.detach(), optimizer.get_unscaled_state(param, "master_param"), rtol=1e-5, atol=1e-6
        )


def masters_by_hand(case: Case) -> tuple[dict[str, str], dict[str, str]]:
    """Bits of model and optimizer with the masters of the document, and as `FusedAdam` takes them itself."""
    found = []
    for snippet in (
        snippet_with("docs/optimizers.md", "set_scaled_state"),
        "optimizer = FusedAdam(model.named_parameters())",
    ):
        names: dict[str, Any] = {"FusedAdam": FusedAdam, "quantshard": quantshard, "model": build(case)}
        exec(snippet, names)
        found.append(bits(names["model"], names["optimizer"]))
    return found[0], found[1]


@pytest.mark.distributed
def test_masters_set_by_hand() -> None:
    """1 and 2 ranks."""
    for ranks in (1, 2):
        for by_hand, by_itself in run_ranks(ranks, masters_by_hand, Case("block", (ranks,))):
            assert sorted(by_hand.values()) == sorted(by_itself.values())


def test_scaled_float16() -> None:
    """The step is that of unscaled gradients; infinite ones are skipped."""
    snippet, found = snippet_with("docs/optimizers.md", "decoupled_grad"), []
    for scale in (1024.0, 1.0, math.inf):
        torch.manual_seed(0)
        model = nn.Linear(8, 4, dtype=torch.float16)
        born = model.weight.detach().clone()
        loss = model(torch.ones(3, 8, dtype=torch.float16)).float().square().mean()
        exec(snippet, {"FusedAdam": FusedAdam, "model": model, "loss": loss, "scale": scale})
        found.append(model.weight.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], born)
    assert torch.equal(found[2], born)


def data_parallel(_: object) -> list[Tensor]:
    """Weights after a step of replicas that were born from different seeds."""
    torch.manual_seed(dist.get_rank())
    with quantshard.quantized_model_init(recipe="block"):
        model = nn.Sequential(quantshard.Linear(96, 300), quantshard.Linear(300, 1))
    (snippet,) = snippets("docs/distributed.md")
    names: dict[str, Any] = {"quantshard": quantshard, "model": model}
    names["DistributedDataParallel"] = nn.parallel.DistributedDataParallel
    exec(snippet, names)
    optimizer = FusedAdam(model.parameters())
    x, y = (each.to(default_device()) for each in batch(0, Case("block")))
    with quantshard.autocast(recipe="block"):
        out = names["model"](x.float())
    (out - y).square().mean().backward()
    optimizer.step()
    quantshard.check_replicas(model)
    return [param.detach().dequantize() if isinstance(param, quantshard.QuantizedTensor) else param.detach()
            for param in model.parameters()]  # fmt: skip


@pytest.mark.distributed
def test_replicas() -> None:
    """2 ranks."""
    one, two = run_ranks(2, data_parallel, None)
    assert all(map(torch.equal, one, two)) and len(one) == 4
