"""Documents that are made from tables in the code. `python -m tests.test_docs` writes them anew."""

from __future__ import annotations

import inspect
from pathlib import Path

from quantshard import modules, recipe
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
- `FusedAdam(master_weights=True)` is the default, and needed where parameters are not float32.
- A stored weight under delayed scaling is first quantized with its own amax, not with scale 1.
- Changing the dtype of a quantized parameter (`.to(torch.float32)`) changes its nominal dtype and no code;
  `dequantize()` gives values.
- There is no pickled extra state: amax histories, random keys and draw counts are ordinary tensors of the state dict.
- FP8 moments have one scale for 128 elements of a row, not one for the tensor, and a positive second moment never
  becomes zero.
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


def test_transformer_engine_page_is_what_the_code_does() -> None:
    path = DOCS / "transformer-engine.md"
    assert path.read_text(encoding="utf-8") == rendered(), "run: python -m tests.test_docs"


if __name__ == "__main__":
    (DOCS / "transformer-engine.md").write_text(rendered(), encoding="utf-8")
