"""Opens folders of Hugging Face datasets, after checks: the `datasets` library trusts their contents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from quantshard import foreign
from quantshard.errors import ConfigurationError
from quantshard.foreign import shown
from quantshard.read_limits import DESCRIPTION_VALUES, FILE_BYTES
from quantshard.tools.trainer.data.tokenizer import library

DEFAULT_SPLIT = "train"

_YAML_MARKS = ",:-?[{"
"""Characters of which each value of a YAML text needs at least one."""


def open_dataset(path: Path, split: str, column: str) -> Any:
    """Open one column of a dataset: memory-mapped if `save_to_disk` saved it, otherwise streamed.

    Images and sounds in other columns are not decoded.

    Raises:
        ConfigurationError: the dataset cannot be read, lacks the split or column, or the column is not text.
    """
    datasets = library("datasets", f"the dataset in {path}")
    with reading_dataset(path):
        if os.path.lexists(path / "dataset_dict.json"):
            splits = foreign.read_json(path / "dataset_dict.json", FILE_BYTES["configuration"]).get("splits") or []
            _check_split(splits, path, split)
            _check_saved(path / split)
            data = datasets.load_from_disk(str(path / split))
        elif os.path.lexists(path / "state.json"):
            if split != DEFAULT_SPLIT:
                raise ConfigurationError(
                    f"the dataset in {path} was saved as one split, without names, so there is no {split!r} in "
                    "it; leave --data-split out to read all of it"
                )
            _check_saved(path)
            data = datasets.load_from_disk(str(path))
        else:
            _check_description(path)
            loaded = datasets.load_dataset(str(path), streaming=True)
            _check_split(list(loaded), path, split)
            data = loaded[split]
        check_column(list(data.column_names or next(iter(data), {})), column, str(path))
        if data.features and getattr(data.features[column], "dtype", "") not in ("string", "large_string"):
            raise ConfigurationError(
                f"{path}: the column {column!r} holds {shown(data.features[column])}, no text; name another with "
                "--text-field"
            )
        return data.select_columns(column)


@contextmanager
def reading_dataset(path: Path | str) -> Iterator[None]:
    """Convert errors of the dataset libraries to a one-line ConfigurationError."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"cannot read the dataset in {path}: {' '.join(str(error).split())[:200]}") from None


def check_column(names: Sequence[str], column: str, where: str) -> None:
    """Refuse a table without the text column."""
    if column not in names:
        raise ConfigurationError(
            f"{where} has no column {column!r}, only {', '.join(map(shown, names[:8]))}; name the text with "
            "--text-field"
        )


def _check_split(splits: Sequence[str], path: Path, split: str) -> None:
    if split not in splits:
        raise ConfigurationError(
            f"the dataset in {path} has no split {split!r}, only {', '.join(map(shown, splits[:8]))}; name one with "
            "--data-split"
        )


def _check_saved(folder: Path) -> None:
    """Refuse a saved dataset that names files outside its folder."""
    state = foreign.read_json(folder / "state.json", FILE_BYTES["configuration"])
    for entry in state.get("_data_files") or ():
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or "/" in name or name.startswith(".") or os.path.islink(folder / name):
            raise ConfigurationError(f"{folder / 'state.json'}: {shown(name)} is not the name of a file beside it")
    _check_labels(foreign.read_json(folder / "dataset_info.json", FILE_BYTES["configuration"]), folder)


def _check_description(folder: Path) -> None:
    """Refuse a README or `.huggingface.yaml` that expands to too many values or names files outside its folder."""
    yaml = library("yaml", f"the dataset in {folder}")
    blocks = library("huggingface_hub.repocard", f"the dataset in {folder}").REGEX_YAML_BLOCK
    for file in (folder / "README.md", folder / ".huggingface.yaml"):
        if not os.path.lexists(file):
            continue
        text = foreign.read_regular(file, FILE_BYTES["configuration"]).decode("utf-8")
        if file.suffix == ".md":
            block = blocks.search(text)
            text = block[2] if block else ""
        _check_size(yaml, text, file)
        content = yaml.safe_load(text)
        _check_labels(content, file)
        configs = content.get("configs") if isinstance(content, dict) else None
        for config in configs if isinstance(configs, list) else ():
            places = [config.get(key) for key in ("data_files", "data_dir")] if isinstance(config, dict) else []
            for entry in _below(places):
                if isinstance(entry, str) and (
                    "://" in entry or entry.startswith(("/", "~")) or ".." in PurePath(entry).parts
                ):
                    raise ConfigurationError(
                        f"{file} names files outside its folder: {shown(entry)}; download them, and name them with "
                        "--data"
                    )


def _check_size(yaml: Any, text: str, file: Path) -> None:
    """Refuse YAML with too many values. Aliases count each time they are used: ten lines can expand to 10^9 values."""
    count = sum(map(text.count, _YAML_MARKS))
    nodes = [] if count > DESCRIPTION_VALUES else [yaml.compose(text, yaml.SafeLoader)]
    for node in nodes:
        if isinstance(node, yaml.CollectionNode):
            is_mapping = isinstance(node, yaml.MappingNode)
            nodes.extend(part for pair in node.value for part in pair) if is_mapping else nodes.extend(node.value)
        if (count := len(nodes)) > DESCRIPTION_VALUES:
            break
    if count > DESCRIPTION_VALUES:
        raise ConfigurationError(f"{file} has more than {DESCRIPTION_VALUES} values; delete its description")


def _check_labels(content: Any, where: Path) -> None:
    """Refuse an unlisted large number of labels, because `datasets` creates a name for each."""
    for value in _below([content]):
        if isinstance(value, dict):
            numbers = [value.get("num_classes"), *(key for key in value if str(key).isdecimal())]
            if any(str(number).isdecimal() and int(number) > DESCRIPTION_VALUES for number in numbers):
                raise ConfigurationError(f"{where} describes a column of more than {DESCRIPTION_VALUES} labels")


def _below(values: list[Any]) -> list[Any]:
    """Return the values and everything nested in their lists and dicts."""
    for value in values:
        if isinstance(value, dict | list):
            values.extend(value.values() if isinstance(value, dict) else value)
    return values
