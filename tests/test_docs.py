"""Documents that are made from tables in the code. `python -m tests.test_docs` writes them anew."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import quantshard
from benchmarks.convergence_table import bytes_of
from quantshard import limits, recipe
from quantshard.compat.transformer_engine.arguments import ARGUMENTS, LEAVE_OUT
from quantshard.formats import ALL
from quantshard.interop.layouts.conversion import shapes
from quantshard.interop.layouts.table import EXACT, LAYOUTS, Layout, Verdict, import_verdict, said, verdict
from quantshard.state_storage import PRESETS, StateOptions
from quantshard.tensor.arithmetic import IN_PLACE
from quantshard.tensor.quantized_tensor import RULES

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "quantshard"

HEAD = """# Coming from TransformerEngine

`quantshard.compat.transformer_engine` runs TransformerEngine scripts after a change of imports:

```python
import quantshard.compat.transformer_engine.pytorch as te  # was: import transformer_engine.pytorch as te
from quantshard.compat.transformer_engine.common.recipe import DelayedScaling, Format

recipe = DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
layer = te.LayerNormMLP(1024, 4096, seq_length=512, micro_batch_size=2)
with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
    out = te.checkpoint(layer, x)
```

The classes are quantshard's, with its defaults. `te.checkpoint` is reentrant by default.
`te.is_fp8_available()` and the like return whether GEMMs are native; others are emulated.
`te.make_graphed_callables` captures [CUDA graphs](performance.md). For a missing name, AttributeError
suggests a replacement if there is one. `quantshard convert-te` converts
[checkpoints](checkpoints.md#going-on-from-a-transformerengine-checkpoint).

## Differences

For delayed scaling build layers with high-precision weights under `quantized_model_init(enabled=False, recipe=recipe)`.
Otherwise the first forward creates their amax histories, which a new process cannot load, and warns.

| topic | quantshard |
|---|---|
| `MXFP8BlockScaling` | `enable_2d_quantization=True` by default: weights are kept once, in 32x32 blocks |
| `FusedAdam` | `master_weights=True` by default; `capturable=True` needs masters of quantized weights |
| `step(grad_scaler=...)` | refused; call `grad_scaler.step(optimizer)` |
| weights without masters | updated with stochastic rounding, for every recipe |
| states of fewer than 32 bits | rounded stochastically, by seed and global index |
| FP8 and FP16 states | a power-of-two scale per 128 elements; a positive second moment never becomes 0 |
| `store_param_remainders` | a weight is its master rounded to nearest, ties away from 0 |
| Adam's bias correction | multiplies by 1 / (1 - beta**step) instead of dividing |
| sums of FP8 GEMMs | float32 (for TransformerEngine's: `fp8_gemm_fprop=MMParams(use_split_accumulator=False)`) |
| delayed scaling | a stored weight is first quantized with its own amax, not with scale 1 |
| `.to(torch.float32)` | changes the nominal dtype, not the codes; `float()` returns values, except of parameters |
| gated `fc1_weight` | two parameters, `fc1_gate_weight` and `fc1_up_weight`; `fc1_weight` can be read, not assigned |
| state dict | no pickled extra state: amax histories, random keys and draw counts are tensors |

## torch.autocast

Under `torch.autocast` a module casts its inputs to autocast's dtype and returns that dtype, as in TransformerEngine,
with the bits of inputs cast by hand. So do `LayerNorm` and `RMSNorm`, whereas PyTorch's return float32.
`quantshard.autocast` nests with `torch.autocast` in any order.

- Gradients have the dtypes of their tensors, for quantized weights the nominal dtype.
- Weights that a recipe quantizes are not cast; other weights are, as in `nn.Linear`.
- A returned bias (`return_bias`) has the dtype of the output. float64 is not cast.
- Recomputation, `torch.compile` and FSDP2's `MixedPrecisionPolicy` keep the bits. In a backward inside
  `torch.autocast`, PyTorch's attention rounds differently.

## Attention

| option | meaning |
|---|---|
| `qkv_format="thd"`, `cu_seqlens_q`, `max_seqlen_q` | packed sequences, with a `padding` mask type |
| `window_size=(left, right)` | sliding window; -1: no limit |
| `softmax_type="learnable"` | attention sinks |
| `softcap` | limit of scores (not in TransformerEngine) |
| `layer_type="decoder"` | cross-attention to `encoder_output` |

Without `max_seqlen_q` the host waits for the GPU. `explain` shows the backend: on GPUs PyTorch's `varlen_attn`
(FlashAttention) for packed sequences and windows, `flex_attention` for sinks.

## Weight gradients

- `fuse_wgrad_accumulation=True` adds unrounded gradients to the float32 `weight.main_grad` that you set; `grad` stays
  None (zeros with `grad_added_to_main_grad`). `overwrite_main_grad` and `is_first_microbatch=True`
  replace instead of add. quantshard's optimizers and `clip_grad_norm_` use `main_grad` plus `grad`, and `zero_grad`
  clears both. **PyTorch's optimizers and `GradScaler.unscale_` do not see `main_grad`.**
- `delay_wgrad_compute=True`: call `backward_dw()` once per backward.
- Both options raise under FSDP2 and DDP. Without them, FSDP2 of torch 2.15 with `reduce_dtype=torch.float32` gets
  unrounded gradients.
- Gradients of BF16 experts are rounded before they are added.
"""

ARGUMENTS_HEAD = """
## Arguments

All arguments of quantshard's [modules](api.md) work. These arguments of TransformerEngine have no effect, except for
`is_first_microbatch` with `fuse_wgrad_accumulation`:

| argument | of |
|---|---|"""

REFUSED_HEAD = """
These are accepted with TransformerEngine's default or None; other values raise.

| argument | of | instead |
|---|---|---|"""

LEFT_OUT_HEAD = """
These too accept only the default or None. They have no replacement; leave them out.

| argument | of |
|---|---|"""


RECIPES = {kind.__name__: kind for kind in recipe.NAMES.values() if isinstance(kind, type)}


def argument_rows(is_hint: bool, is_left_out: bool = True) -> list[str]:
    """Return a row for each set of classes and methods: the arguments that only TransformerEngine's versions have."""
    owners: dict[tuple[str, str], list[str]] = {}
    for owner in sorted(ARGUMENTS.keys() - RECIPES.keys()):
        for name, argument in ARGUMENTS[owner].items():
            if argument.hint is is_hint and (is_hint or (argument.instead == LEAVE_OUT) is is_left_out):
                owners.setdefault((name, argument.instead), []).append(f"`{owner}`")
    rows: dict[tuple[str, str], list[str]] = {}
    for (name, instead), members in sorted(owners.items()):
        rows.setdefault((", ".join(members), instead), []).append(name)
    return [
        f"| {', '.join(names)} | {members} |" + ("" if is_left_out else f" {instead} |")
        for (members, instead), names in rows.items()
    ]


def rendered() -> str:
    common = set.intersection(*({*ARGUMENTS[name]} for name in RECIPES.keys() & ARGUMENTS.keys()))
    lines = [HEAD + ARGUMENTS_HEAD, *argument_rows(True), REFUSED_HEAD, *argument_rows(False, False)]
    lines += [LEFT_OUT_HEAD, *argument_rows(False)]
    lines += [
        "",
        "## Recipes",
        "",
        f"Accepted with TransformerEngine's default only: {', '.join(sorted(common))}, and the last column.",
        "",
        "| class | name | arguments | default only |",
        "|---|---|---|---|",
    ]
    for kind in RECIPES.values():
        called = ", ".join(f'"{name}"' for name, other in recipe.NAMES.items() if other is kind)
        fixed = ", ".join(name for name in ARGUMENTS.get(kind.__name__, {}) if name not in common)
        free = ", ".join(inspect.signature(kind).parameters)
        lines.append(f"| `recipe.{kind.__name__}` | {called} | {free or '-'} | {fixed or '-'} |")
    return "\n".join(lines) + "\n"


LIMITS_HEAD = """# Limits

This page lists what runs on a slower path (a *fallback*, with the right numbers) and what is refused, in the words of
warnings and errors. Some [arguments of TransformerEngine](transformer-engine.md#arguments) are refused too.

    print(quantshard.explain(model, optimizer, recipe))  # names the fallbacks of each parameter

`explain(..., strict=True)` raises for any fallback, `autocast(strict=True)` for those that a forward can detect.
"""


OPERATIONS_HEAD = """## Operations on quantized weights

Other operations read: they return plain tensors of dequantized values, also through DTensor, and
`autocast(strict=True)` rejects them. Other writes raise.

| operations | result |
|---|---|"""

BY_HAND = "## Other limits\n"


def operation_rows() -> list[str]:
    """Return a row for each kind of result, with the ATen operations that have rules."""
    names = {str(operation).split(".")[1] for operation in RULES}
    arithmetic = {f"{name}_" for name in IN_PLACE}
    assert names > arithmetic | {f"_foreach_{name}" for name in arithmetic}
    others = sorted(name for name in names - arithmetic if not name.startswith("_"))
    return [
        f"| {' '.join(f'`{name}`' for name in others)} | handles, copies or placeholders for FSDP2 |",
        f"| {' '.join(f'`{name}`' for name in sorted(arithmetic))}, also `_foreach_` | stochastically rounded values |",
        "| `weight.T`, `weight[0]` | read-only views; `clone()` is plain |",
        "| `F.linear` outside of a module | slower; training warns once |",
        "| `torch.save(model)`, `deepcopy` | every bit; of a shard only `deepcopy` |",
    ]


def limits_page() -> str:
    """What stands from `BY_HAND` on is written by hand."""
    lines = [LIMITS_HEAD]
    for title, table in (("Fallbacks", limits.FALLBACKS), ("Refused", limits.REFUSALS)):
        names = {name: f"{name}: " if table is limits.FALLBACKS else "" for name in table}  # as explain prints them
        lines += [f"## {title}", "", "| what happens | because | instead |", "|---|---|---|"]
        lines += [f"| {names[name]}{at.happens} | {at.because} | {at.instead} |" for name, at in table.items()]
        lines += [""]
    lines += [OPERATIONS_HEAD, *operation_rows(), ""]
    _, mark, rest = (DOCS / "limits.md").read_text(encoding="utf-8").partition(BY_HAND)
    return "\n".join([*lines, mark + rest])


LAYOUTS_HEAD = """# Layouts: weights to and from other programs

`quantshard export` writes a checkpoint's model as safetensors for another program, with `config.json` and its
`quantization_config`; `quantshard import` reads such files.

```sh
quantshard export run/checkpoints/step-000100 --layout compressed-tensors --out served
quantshard export run/checkpoints/step-000100 --layout plain --out plain
quantshard export run/checkpoints/step-000100 --layout hf-fp8-block --lossy --max-shard-size 1GB --out blocks
quantshard import served --out imported
quantshard import plain --recipe nvfp4 --out requantized
```

`--layout` takes a layout of the [export table](#export), or a family (`compressed-tensors`, `modelopt`, `plain`) to
select its first exact layout. Codes and scales are copied as bytes. If a weight cannot be copied exactly, the command
fails, unless you pass `--lossy` to requantize it (from its master if there is one).

| option | effect |
|---|---|
| `--config DIR` | Hugging Face configuration and tokenizer to copy; by default those of the run or import |
| `--max-shard-size` | size of a file (default 5 GB) |
| `--values` | `weights`: write the weights instead of the masters (`plain`); `ema`: write their averages |
| `--names MAP` | TOML map of parameter names |
| `--zero-centered`, `--no-zero-centered` | whether norms store gamma - 1, for checkpoints that do not record it |

To continue training from an export or an import, use `quantshard train --init-from DIR`.

In Python, each rank of a sharded model reads only its slices. An optimizer built afterwards starts its masters from
the file's values if they are in high precision, otherwise from the weights:

```python
import quantshard as qs

done = qs.layouts.export("run/checkpoints/step-000100", "modelopt", "modelopt", config="served")
print("\\n".join(done.lines()))
done = qs.layouts.load("modelopt", model)  # on every rank; lossy=True requantizes what cannot be copied
optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-3, weight_decay=0.01)
```

## Details

- Converted models keep their parameter names. Models of `TransformerLayer` with RMSNorm and SwiGLU get the names of
  Llama and Qwen3 in transformers; fused qkv weights are split.
- Embeddings, norms and the output head are not quantized; a tied head is written once.
- Masters are found by name, so build the optimizer over `model.named_parameters()`.
- NVFP4 is exported weight-only. Values agree within 5 half-ulps of float32, and importing the export restores every
  bit. So does exporting an import, except for the last bit of some second scales of ModelOpt.
- For norms with `zero_centered_gamma` exports add 1 to gamma and imports subtract 1, except for Gemma, Nemotron and
  Qwen3-Next. A report names rounded sums.
- No file is unpickled ([security](security.md)).

## Limits of other programs

- vLLM fuses q, k, v and gate, up [under one scale per tensor](serving.md). It also requires multiples of 128 per
  tensor-parallel shard for 128x128 blocks.
- transformers 5 dequantizes `hf-fp8-block` wrongly if a side of a weight is not a multiple of 128.

These readers were tested on a CPU: transformers (`plain`, `hf-fp8-block`, `hf-fp8`, channel, MXFP8 and NVFP4 of
compressed-tensors), compressed-tensors (all layouts), PyTorch's `QuantizedHuggingFaceStorageReader` (`hf-fp8-block`)
and [vLLM](serving.md). SGLang and TensorRT-LLM have not yet been run.

## Export
"""

EXACT_HEAD = """Checkpoints of these recipes are exported exactly. For others the layout has different codes, larger
blocks, power-of-two scales or too few digits. `modelopt-fp8` needs delayed scaling, because its readers need a scale
of the activations.
"""

IMPORT_HEAD = """
## Import

Models of these recipes load a layout exactly; the notes are conditions. Others need `--lossy`, which requantizes or,
for `bf16`, dequantizes the weights. `plain` layouts can be quantized without it.
"""

VARIANTS = {
    "current": recipe.Float8CurrentScaling(),
    "current (powers of two)": recipe.Float8CurrentScaling(use_power_2_scales=True),
    "delayed": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
    "block (float32 scales)": recipe.Float8BlockScaling(use_f32_scales=True),
    "fp8-weights": recipe.resolve("fp8-weights"),
    "rowwise": recipe.Float8RowwiseScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8-weights": recipe.resolve("mxfp8-weights"),
    "mxfp8 (two copies)": recipe.MXFP8BlockScaling(enable_2d_quantization=False),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "nvfp4-weights": recipe.resolve("nvfp4-weights"),
    "nvfp4 (two copies)": recipe.NVFP4BlockScaling(disable_2d_quantization=True),
    "bf16": recipe.HighPrecision(),
}


def exact_recipes(judge: Callable[[recipe.QuantSpec | None, Layout], Verdict]) -> list[str]:
    """Return rows for layouts that are exact for the same recipes, one row per condition; notes below hold these."""
    notes: dict[str, int] = {}
    rows: dict[str, list[str]] = {}
    for layout in LAYOUTS.values():
        groups: dict[str, list[str]] = {}
        for name, kind in VARIANTS.items():
            result = judge(kind.weight, layout)
            if result.kind == EXACT:
                groups.setdefault(result.why, []).append(name)
        cells = []
        for why, names in groups.items():
            conditions = why.removeprefix("if ").split(" and ") if why else []
            marks = ", ".join(str(notes.setdefault(condition, len(notes) + 1)) for condition in conditions)
            cells.append(f"{'all' if len(names) == len(VARIANTS) else ', '.join(names)} | {marks} |")
        rows.setdefault("\n| | ".join(cells), []).append(f"`{layout.name}`")
    lines = ["| layouts | exact for | note |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {cells}" for cells, names in rows.items()]
    return [*lines, "", *(f"{number}. {why}" for why, number in notes.items())]


def layouts_page() -> str:
    lines = [
        LAYOUTS_HEAD,
        "| layout | tensors of a weight `X.weight` [N, K] | block | readers |",
        "|---" * 4 + "|",
    ]
    for layout in LAYOUTS.values():
        tensors = f"`X.weight` {str(layout.dtype).removeprefix('torch.')}"
        block = "-"
        if not layout.is_plain:
            block = said(layout.block)
            tensors = ", ".join(
                f"`X.{key}` {str(dtype).removeprefix('torch.')}" for key, (dtype, _) in shapes(layout, 256, 256).items()
            )
            tensors += f", `X.{layout.input_scale}` float32" if layout.input_scale else ""
        lines.append(f"| `{layout.name}` | {tensors} | {block} | {layout.readers} |")
    lines += ["", EXACT_HEAD, *exact_recipes(verdict)]
    return "\n".join([*lines, IMPORT_HEAD, *exact_recipes(import_verdict)]) + "\n"


PAGES = {
    "transformer-engine.md": rendered,
    "limits.md": limits_page,
    "layouts.md": layouts_page,
}


@pytest.mark.parametrize("page", PAGES)
def test_page_is_what_the_code_does(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == PAGES[page](), "run: python -m tests.test_docs"


# Links (mkdocs, in `make check`, sees to those between the pages of docs/) -------------------------------------------


def missing_targets(page: Path) -> list[str]:
    """What a page links to in this repository, and is not there."""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "ARCHITECTURE.md"])
def test_links_lead_somewhere(page: str, tmp_path: Path) -> None:
    assert missing_targets(ROOT / page) == []
    (tmp_path / "page.md").write_text("[a](none.md) [b](page.md#x) [c](https://example.org/none)", encoding="utf-8")
    assert missing_targets(tmp_path / "page.md") == ["none.md"]


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md")))
def test_rows_of_tables_can_be_read(page: str) -> None:
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert not [row for row in rows if len(row) > 400], "put a list beneath the table, or in its place"


def test_every_page_is_in_the_index() -> None:
    """Of the site, and of docs/index.md; the README names most."""
    pages = {page.name for page in DOCS.glob("*.md")}
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"^ +- (?:[\w ]+: )?([\w-]+\.md)$", site, re.M)) | {"index.md"} == pages
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(([\w-]+\.md)\)", index)) | {"index.md"} == pages


def preset_rows() -> list[str]:
    """Of docs/optimizers.md: options and bytes of each preset, the weight in one scale for a tensor."""
    weight = recipe.resolve("current").weight
    assert weight is not None
    rows = []
    for name, options in {
        "none": StateOptions(),
        **{f"`{name}`": PRESETS[name] for name in ("lean6", "lean8")},
    }.items():
        size = bytes_of(options, weight.format)
        told = (options.master_weight_dtype, options.store_param_remainders)
        told = (*told, options.exp_avg_dtype, options.exp_avg_sq_dtype)
        cells = [name, *(f"`{each}`" for each in told), *(f"{each:.10g}" for each in (*size, size.together))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_presets_are_told_with_the_bytes_of_their_formats() -> None:
    page = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    table = page.partition("## Presets")[2].partition("\n\n- **")[0]
    assert all(row in table.splitlines() for row in preset_rows()), "\n".join(preset_rows())
    assert {f"`{name}`" for name in PRESETS} == set(re.findall(r"^\| (`\w+`) ", table, re.M))


def test_serving_names_exact_layouts() -> None:
    """The table has a layout that the code calls exact for each recipe, without the scales that vLLM fuses."""
    table = (DOCS / "serving.md").read_text(encoding="utf-8").partition("## Exact layouts")[2].partition("\n\n[")[0]
    rows = re.findall(r"^\| (`.+`) \| `(\S+)` \|$", table, re.M)
    pairs = [(name, LAYOUTS[layout]) for names, layout in rows for name in re.findall(r"`(\S+)`", names)]
    assert sorted(name for name, _ in pairs) == sorted(name for name in VARIANTS if "(" not in name)
    kinds = {(name, layout.name): verdict(VARIANTS[name].weight, layout).kind for name, layout in pairs}
    assert {pair for pair, kind in kinds.items() if kind != EXACT} == set()
    quantized = [layout for _, layout in pairs if not layout.is_plain]
    assert not [layout.name for layout in quantized if layout.second or layout.block == (ALL, ALL)]


def test_the_readme_and_the_docs_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md")) <= 25_000


def test_the_reference_has_every_public_module() -> None:
    """mkdocstrings shows what their `__all__` names."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    modules_ = [value for name in quantshard.__all__ if inspect.ismodule(value := getattr(quantshard, name))]
    assert set(re.findall(r"^::: (\S+)$", text, re.M)) == {"quantshard", *(each.__name__ for each in modules_)}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
