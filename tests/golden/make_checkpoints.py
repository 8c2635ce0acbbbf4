"""Write tiny checkpoints of the present layout, one of each recipe, and the digests of what is in them.

    python -m tests.golden.make_checkpoints

writes `checkpoints-LAYOUT.tar.xz` beside this file, and prints the digests that tests/checkpoints/test_versions.py
holds. Run it when the layout changes; LAYOUT then has another name, and the file of the layout before stays.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import nn

from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.checkpoints.small import built, written
from tests.distributed.models import RECIPES

LAYOUT = "v1"
"""The version of the format."""

SHAPES = ((21, 6), (6, 3))
FOLDER = Path(__file__).parent


def options(recipe: str) -> dict[str, object]:
    """FP8 moments on every other recipe."""
    moment = torch.uint8 if list(RECIPES).index(recipe) % 2 else torch.float32
    return {"shapes": SHAPES, "exp_avg_dtype": moment, "exp_avg_sq_dtype": moment}


def archive(layout: str) -> Path:
    """Where the checkpoints of a layout are."""
    return FOLDER / f"checkpoints-{layout}.tar.xz"


def digest(model: nn.Module, optimizer: FusedAdam) -> str:
    """Of all that a checkpoint holds, and of the values that the weights stand for."""
    found = hashlib.sha256()
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in sorted(entries.items()):
            add(found, f"{index}.{key}", value)
    for key, value in sorted(model.state_dict().items()):
        add(found, key, value)
    for name, param in model.named_parameters():
        if components.quantized_local(param) is not None:
            add(found, f"values of {name}", components.storage_of(param).dequantize())
    return found.hexdigest()[:32]


def add(found: hashlib._Hash, key: str, value: torch.Tensor) -> None:
    found.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
    found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            written(Path(folder) / recipe, recipe, **options(recipe))
            print(f'        "{recipe}": "{digest(*built(recipe, **options(recipe)))}",')
        with lzma.open(archive(LAYOUT), "wb", preset=9 | lzma.PRESET_EXTREME) as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for path in sorted(Path(folder).rglob("*")):
                    info = tarfile.TarInfo(path.relative_to(folder).as_posix())
                    if path.is_file():
                        info.size = path.stat().st_size
                        with open(path, "rb") as file:
                            tar.addfile(info, file)


if __name__ == "__main__":
    main()
