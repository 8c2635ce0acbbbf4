"""Documents that are made from tables in the code. `python -m tests.test_docs` writes them anew."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from quantshard import limits, modules, recipe
from quantshard.modules import unsupported

DOCS = Path(__file__).parents[1] / "docs"

HEAD = """# Coming from TransformerEngine

The names are TransformerEngine's, so that `import quantshard as te` carries most of a training script. Weights are
quantized under `quantized_model_init(recipe=...)`, GEMMs under `autocast(recipe=...)`; recipes also go by name. An
argument that means something here is accepted; one that does not is known by name and refused with a sentence, unless
its value asks for what happens anyway; a name that neither library has is a TypeError.

What differs on purpose:

- `MXFP8BlockScaling(enable_2d_quantization=True)` is the default: weights are kept once, in 32x32 blocks, in half the
  memory of BF16.
- `FusedAdam(master_weights=True)` is the default. Without masters the weights of every recipe are updated, with
  stochastic rounding; with `capturable=True` quantized weights must have masters. `step(grad_scaler=...)` is refused:
  call `grad_scaler.step(optimizer)`.
- States of fewer than 32 bits are rounded stochastically, by seed and global index. A BF16 parameter with a remainder
  is the master rounded to nearest, ties away from zero; the remainder is `master_param_low`, uint8 [..., 2].
- A stored weight under delayed scaling is first quantized with its own amax, not with scale 1.
- Changing the dtype of a quantized parameter (`.to(torch.float32)`) changes its nominal dtype and no code;
  `dequantize()` gives values.
- There is no pickled extra state: amax histories, random keys and draw counts are ordinary tensors of the state dict.
- FP8 moments, and FP16 moments and masters, have one scale for 128 elements of a row, not one for the tensor; a
  positive second moment never becomes zero.
"""


def rendered() -> str:
    lines = [HEAD, "## Arguments", "", "| class or method | accepted | refused |", "|---|---|---|"]
    names = [n for n in modules.__all__ if inspect.isclass(getattr(modules, n)) or n in unsupported.ARGUMENTS]
    for name in names:
        kind = getattr(modules, name)
        for owner, target in ((name, kind), (f"{name}.forward", getattr(kind, "forward", kind))):
            accepted = [p for p in inspect.signature(target).parameters if p not in ("self", "others")]
            refused = unsupported.ARGUMENTS.get(owner, {})
            accepted = [argument for argument in accepted if argument not in refused]
            if owner == name or refused:
                lines.append(f"| `{owner}` | {', '.join(accepted)} | {', '.join(sorted(refused)) or '-'} |")
    lines += ["", "## Recipes", "", "| class | name | arguments |", "|---|---|---|"]
    for kind in dict.fromkeys(recipe.NAMES.values()):
        called = ", ".join(f'"{name}"' for name, other in recipe.NAMES.items() if other is kind)
        lines.append(
            f"| `recipe.{kind.__name__}` | {called} | {', '.join(inspect.signature(kind).parameters) or '-'} |"
        )
    return "\n".join(lines) + "\n"


LIMITS_HEAD = """# Limits

Made from the tables in `quantshard/limits.py`, from which the errors and `explain` are made too.

A *fallback* gives the right numbers by a slower or larger path than the native one. `explain(model, optimizer, recipe)`
names those that each parameter takes; `explain(..., strict=True)` and, for what a layer's forward can see,
`autocast(strict=True)` raise instead. What is *refused* always raises, with this sentence and the tensor's name.
Arguments of TransformerEngine that are refused are listed in [transformer-engine.md](transformer-engine.md).
"""


def limits_page() -> str:
    lines = [LIMITS_HEAD]
    for title, table in (("Fallbacks", limits.FALLBACKS), ("Refused", limits.REFUSALS)):
        lines += [f"## {title}", "", "| name | what happens | because | instead |", "|---|---|---|---|"]
        lines += [f"| {name} | {at.happens} | {at.because} | {at.instead} |" for name, at in table.items()]
        lines += [""]
    return "\n".join(lines)


PAGES = {"transformer-engine.md": rendered, "limits.md": limits_page}


@pytest.mark.parametrize("page", PAGES)
def test_page_is_what_the_code_does(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == PAGES[page](), "run: python -m tests.test_docs"


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
