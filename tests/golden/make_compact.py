"""Cut the recorded outputs of TransformerEngine (8 MB) down to what the repository carries.

    python tests/golden/make_compact.py ../shared/golden/transformer-engine-2.20-h200.pt.xz

writes `transformer-engine-2.20-h200-compact.pt.xz` beside this file. Same keys and layout; what is left of each entry:

- `inputs`, `quantize`: whole 128x128 blocks (`BLOCKS`), among them the one with the largest element, so that scales of
  the whole tensor are those of the cut one, and for `zeros` an all-zero one. The transposed codes of `zeros` are left
  out where they are the transpose of the others (all but block1d).
- `linear_in`: everything, since each result depends on a whole row or column. `linear`: the first 64 rows and columns
  of y, dx and dw.
- `adam`: one block, with the largest master weight; its place is `adam_origin`.
"""

import io
import lzma
import sys
from pathlib import Path

import torch

COMPACT = Path(__file__).with_name("transformer-engine-2.20-h200-compact.pt.xz")
BLOCKS = {"randn": ([1], [1]), "zeros": ([0, 1], [0, 2])}
"""Block rows and block columns of a 256x384 tensor that are kept, by kind of input."""
KEPT_OUTPUTS = 64
ADAM_ORIGIN = (0, 128)
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]  # 2-byte numbers


def load(path):
    return torch.load(io.BytesIO(lzma.open(path).read()), weights_only=True)


def cut(x, rows, cols, per_row=128, per_col=128):
    """The given block rows and columns of `x`, whose blocks are per_row x per_col entries."""

    def entries(blocks, size):
        return torch.cat([torch.arange(b * size, (b + 1) * size) for b in blocks])

    return x.index_select(0, entries(rows, per_row)).index_select(1, entries(cols, per_col)).contiguous()


def cut_quantized(name, entry):
    """One entry of `quantize`, cut to the blocks of its kind."""
    recipe, kind = name.split("/")
    rows, cols = BLOCKS[kind]
    one_dim = recipe.startswith("block1d")
    layouts = {
        "data": (rows, cols, 128, 128),
        "rowwise_data": (rows, cols, 128, 128),
        "transpose": (cols, rows, 128, 128),
        "columnwise_data": (cols, rows, 128, 128),
        "rowwise_scale_inv": (cols, rows, 1, 128) if one_dim else (rows, cols, 1, 1),
        "columnwise_scale_inv": (rows, cols, 1, 128) if one_dim else (cols, rows, 1, 1),
    }
    left_out = {"transpose", "columnwise_data"} if kind == "zeros" and not one_dim else set()
    return {
        key: value if value.numel() == 1 else cut(value, *layouts[key])
        for key, value in entry.items()
        if key not in left_out
    }


def compact(full):
    rows, cols = (slice(at, at + 128) for at in ADAM_ORIGIN)
    return {
        "inputs": {kind: cut(x, *BLOCKS[kind]) for kind, x in full["inputs"].items()},
        "quantize": {name: cut_quantized(name, entry) for name, entry in full["quantize"].items()},
        "linear_in": full["linear_in"],
        "linear": {
            recipe: [
                {k: v[:KEPT_OUTPUTS, :KEPT_OUTPUTS].clone() if k in ("y", "dx", "dw") else v for k, v in i.items()}
                for i in iterations
            ]
            for recipe, iterations in full["linear"].items()
        },
        "adam": {
            name: [{k: v[rows, cols].clone() for k, v in step.items()} for step in steps]
            for name, steps in full["adam"].items()
        },
        "adam_origin": list(ADAM_ORIGIN),
    }


def main(source):
    buffer = io.BytesIO()
    torch.save(compact(load(source)), buffer)
    COMPACT.write_bytes(lzma.compress(buffer.getvalue(), format=lzma.FORMAT_XZ, filters=FILTERS))
    print(f"{COMPACT}: {COMPACT.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
