"""Files of settings: a user's TOML and the `config.toml` of a run, read, checked, merged with flags and written.

A setting comes from its flag, then from `--config FILE`, then from the default. The settings of a run are written to
`config.toml` in its folder, which `--config` of another run and `resume` can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from quantshard import foreign
from quantshard.errors import ConfigurationError
from quantshard.foreign import FILE_BYTES
from quantshard.tools.trainer.settings.config import COUNT, KINDS, SIZE, STEPS, TrainSettings
from quantshard.tools.trainer.settings.recipes import text_of
from quantshard.tools.trainer.settings.schema import SettingType, read_table

TABLES = ("launch", "corpus")
"""Tables of a run's `config.toml` in addition to the settings; `--config` skips them."""

_LAUNCH = {
    "processes": SettingType(int, 1, COUNT),
    "mesh": KINDS["mesh"],
    "threads": SettingType(int, 1, 4096),
    "python": SettingType(str, most=200),
    "torch": SettingType(str, most=200),
}
_CORPUS = {
    "sha256": SettingType(str, 64, 64),
    "bytes": SettingType(int, 0, (1 << 63) - 1),
    "files": SettingType(list, 68, 4200),
    "sources": SettingType(list, 1, 100),
    "heldout_files": SettingType(int, 0, STEPS),
    "tokenizer": SettingType(str, 64, 64),
    "vocabulary": SettingType(int, 1, SIZE),
    "end_of_document": SettingType(int, 0, SIZE),
}
_NEEDED = {"launch": ("processes",), "corpus": ("sha256", "bytes", "files")}


def from_mapping(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check names, types and ranges of settings from a file or another process; `TABLES` are left out."""
    settings = {name: value for name, value in values.items() if name not in TABLES}
    if isinstance(table := settings.get("recipe"), dict):
        settings["recipe"] = text_of(table, where)
    return read_table(settings, KINDS, where, "`quantshard train --help` lists them")


def launch_table(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the table [launch] of a run's `config.toml`."""
    return _table("launch", _LAUNCH, content, where)


def corpus_table(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the table [corpus] of a run's `config.toml`."""
    return _table("corpus", _CORPUS, content, where)


def _table(name: str, kinds: Mapping[str, SettingType], content: Mapping[str, Any], where: str) -> dict[str, Any]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where} is not the configuration of a run: it lacks [launch] or [corpus]")
    for key in _NEEDED[name]:
        if key not in table:
            raise ConfigurationError(f"{where} is not the configuration of a run: [{name}] lacks {key}")
    return read_table(table, kinds, f"{where}: [{name}]", f"it has {', '.join(kinds)}")


def read_settings_file(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a TOML file. `follow`: accept a link, if the user named the file."""
    return foreign.read_toml(path, FILE_BYTES["run"], follow=follow)


def given_values(flags: Mapping[str, Any], config: Path | None) -> dict[str, Any]:
    """Merge the explicit settings of flags and file; flags take precedence."""
    values = from_mapping(read_settings_file(config, follow=True), str(config)) if config is not None else {}
    return values | {name: value for name, value in flags.items() if value is not None}


def given_processes(config: Path | None) -> int:
    """Return the number of ranks in a run's `config.toml`; 0 if the file belongs to no run."""
    content = read_settings_file(config, follow=True) if config is not None else {}
    return int(launch_table(content, str(config))["processes"]) if "launch" in content else 0


def to_toml(settings: TrainSettings, tables: Mapping[str, Any]) -> str:
    """Serialize the settings, then the tables, as `config.toml`."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    return tomli_w.dumps(values) + "\n" + tomli_w.dumps(dict(tables), multiline_strings=False)
