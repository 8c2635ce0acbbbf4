"""Small data of every kind, with the texts that are in them, and a tokenizer that was trained on them."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

WORDS = "shard scale block tensor weight gradient amax codes the of and is in a to".split()
END = "<|end|>"


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of a few lines each, all different."""
    return [
        "\n".join(
            " ".join(WORDS[(seed + i * 7 + j * (k + 3)) % len(WORDS)] for j in range(9)) for k in range(i % 4 + 1)
        )
        + f" no. {seed + i} \u00e9\u4e2d\U0001f600"
        for i in range(count)
    ]


@cache
def tokenizer_json() -> str:
    """A byte-level BPE of 400 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END, "<|other|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(texts(200), trainer)
    return made.to_str()


def tokenizer_folder(folder: Path, **config: object) -> Path:
    """A folder with tokenizer.json and, if anything is to be said there, tokenizer_config.json, as transformers writes
    it: of what has no length, the length is int(1e30)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": int(1e30)}))
    return folder


def jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    """JSON lines, packed if the name says so."""
    content = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(documents)).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        import pyarrow

        content = pyarrow.compress(content, "zstd", asbytes=True)
    path.write_bytes(content)
    return path


def parquet(path: Path, documents: list[str]) -> Path:
    """Parquet of small row groups."""
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"id": list(range(len(documents))), "text": documents}), path, row_group_size=7)
    return path
