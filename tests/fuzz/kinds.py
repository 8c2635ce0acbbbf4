"""The kinds of files that anybody may have written: a whole one of each, how it is changed, and what reads it."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

import quantshard as qs
from quantshard import checkpoints, layouts, transformer_engine
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.manifest import METADATA_FILE
from quantshard.checkpoints.inspection import inspect_checkpoint, verify
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.interop.layouts import names
from quantshard.optimizers import FusedAdam
from quantshard.tools.cli import exchange
from quantshard.tools.report.history import RunWatch, read_history
from quantshard.tools.report.page import render
from quantshard.tools.trainer.data import Corpus, collect, load_tokenizer
from quantshard.tools.trainer.data.corpus import Preparation
from quantshard.tools.trainer.data.shards import ShardedSource
from quantshard.tools.trainer.data.sources import INDEX, TextOptions, find
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.fuzz.mutations import PLAIN, changed_bytes, trees
from tests.golden.make_transformer_engine_checkpoints import ARCHIVE
from tests.interop.layouts import models
from tests.tools.cli import hostile, sources
from tests.tools.report import runs

Mutant = Mapping[str, bytes | int | None]
"""Files by path that replace those of the whole. int: a sparse file of this length; None: the file is removed."""

Reading = tuple[str, Callable[[], Any], object]
"""The name of what reads, the reading, and what it must give if it gives anything (None: anything)."""


@dataclass(frozen=True)
class Kind:
    """`whole`: a folder; `mutants` of it; `readings` of a folder that one was written into, or of the whole itself."""

    name: str
    whole: Path
    mutants: SearchStrategy[Mutant]
    readings: Callable[[Path, Mutant], list[Reading]]


SIZES: dict[str, Any] = {"hidden": 64, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 64, "seq_length": 16}
CONFIG = models.CONFIG | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 16,
}  # fmt: skip
_FOLDER, _CHANGED = "out", "changed"


def _fresh(path: Path) -> Path:
    """Where a reading may write."""
    out = path.parent / _FOLDER
    shutil.rmtree(out, ignore_errors=True)
    return out


# Checkpoints of ours --------------------------------------------------------------------------------------------------


def _model(recipe: str, seed: int) -> tuple[nn.Module, FusedAdam]:
    model = models.build(recipe, seed, **SIZES)
    return model, FusedAdam(model.named_parameters(), exp_avg_dtype=torch.uint8)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for value in [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]:
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest() + repr(optimizer.state_dict()["param_groups"])


def _saved(path: Path, recipe: str) -> Path:
    model = models.build(recipe, **SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = models.trained(model, exp_avg_dtype=torch.uint8)
        checkpoints.save(path, model, optimizer, {"step": 1, "name": "run", "words": torch.arange(5)})
    return path


def _checkpoint_readings(recipe: str, whole: Path) -> Callable[[Path, Mutant], list[Reading]]:
    model, optimizer = _model(recipe, seed=1)
    before = _digest(model, optimizer)
    checkpoints.load(whole, model, optimizer)
    expected = _digest(model, optimizer)
    assert before != expected

    def loaded(path: Path) -> str:
        checkpoints.load(path, model, optimizer)
        return _digest(model, optimizer)

    def readings(path: Path, mutant: Mutant) -> list[Reading]:
        is_known = manifest.MANIFEST not in mutant or mutant[manifest.MANIFEST] is not None
        return [
            ("load", lambda: loaded(path), expected if is_known else None),
            ("compare", lambda: compare(path, whole).differences and None, None),
            ("verify", lambda: verify(path).problems and None, None),
            ("inspect", lambda: inspect_checkpoint(path).to_json() and None, None),
            ("export", lambda: layouts.export(path, "plain-fp32", _fresh(path), config=CONFIG) and None, None),
        ]

    return readings


def _altered(whole: Path, name: str) -> SearchStrategy[Mutant]:
    """Other bytes; the manifest says what they were."""
    return changed_bytes((whole / name).read_bytes()).map(lambda content: {name: content})


def _one_altered(whole: Path, files: Sequence[str]) -> SearchStrategy[Mutant]:
    return st.sampled_from(files).flatmap(lambda name: _altered(whole, name))


def run_code() -> None:
    """What no reading may call."""
    raise AssertionError("code of a file was run")


class Code:
    """Whatever unpickles it calls `run_code`."""

    def __reduce__(self) -> Any:
        return run_code, ()


@st.composite
def _metadata(draw: DrawFn, whole: Path, name: str = METADATA_FILE, dropped: str = manifest.MANIFEST) -> Mutant:
    """Metadata of which one or two fields are others, or that run code, and no manifest."""
    found = SafeReader((whole / name).parent, packed=True).metadata
    chunks = [chunk for entry in found.state_dict_metadata.values() for chunk in getattr(entry, "chunks", ())]
    places = [*found.state_dict_metadata.values(), *chunks, *found.storage_data, *found.storage_data.values()]
    for _ in range(draw(st.integers(1, 2))):
        fields = vars(draw(st.sampled_from(draw(st.sampled_from([[found], places])))))
        if fields:
            field = draw(st.sampled_from(sorted(fields)))
            near = [torch.Size(fields[field])] if isinstance(fields[field], tuple) else [fields[field]]
            fields[field] = draw(PLAIN | st.sampled_from([(1 << 61, 1 << 61), (2, 3), (), Code(), b"x", {1}, *near]))
    return {name: pickle.dumps(found), dropped: None}


@st.composite
def _entry(draw: DrawFn, whole: Path, folder: str = "") -> Mutant:
    """An entry that says something else, in another place that the metadata know, and no manifest."""
    start = folder and f"{folder}/"
    found = SafeReader(whole / folder, packed=True).metadata
    index, info = draw(st.sampled_from(sorted(found.storage_data.items(), key=lambda item: str(item[0]))))
    content = (whole / folder / info.relative_path).read_bytes()
    with zipfile.ZipFile(io.BytesIO(content[info.offset : info.offset + info.length])) as archive:
        listed = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    if draw(st.booleans()):
        listed["data.pkl"] = draw(changed_bytes(listed["data.pkl"]))
        entry = _zipped(listed)
    elif draw(st.booleans()):
        which = draw(st.sampled_from(sorted(listed)))
        entry = _zipped(listed | {which: draw(changed_bytes(listed[which]))})
    else:
        file = io.BytesIO()
        torch.save(draw(PLAIN | st.sampled_from([torch.zeros(2, 3), torch.eye(9).to_sparse(), Code()])), file)
        entry = file.getvalue()
    moved = {**found.storage_data, index: _StorageInfo(info.relative_path, len(content), len(entry))}
    told = Metadata(found.state_dict_metadata, found.planner_data, moved)
    return {
        f"{start}{info.relative_path}": content + entry,
        f"{start}{METADATA_FILE}": pickle.dumps(told),
        f"{start}{manifest.MANIFEST}": None,
    }


def _zipped(listed: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in listed.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def checkpoint_kinds(folder: Path) -> list[Kind]:
    """`manifest.json`, `.metadata` and the data of a checkpoint, whose bytes are altered, or that say other things."""
    found = []
    for recipe in ("nvfp4", "mxfp8"):
        whole = _saved(folder / recipe, recipe)
        readings = _checkpoint_readings(recipe, whole)
        data = sorted(path.name for path in whole.glob("*.distcp"))
        said = trees(json.loads((whole / manifest.MANIFEST).read_bytes()))
        told = said.map(lambda tree: {manifest.MANIFEST: json.dumps(tree).encode()})
        found += [
            Kind(f"manifest.json, {recipe}", whole, told | _altered(whole, manifest.MANIFEST), readings),
            Kind(f".metadata, {recipe}", whole, _metadata(whole), readings),
            Kind(f".metadata, bytes, {recipe}", whole, _altered(whole, METADATA_FILE), readings),
            Kind(f".distcp, {recipe}", whole, _entry(whole), readings),
            Kind(f".distcp, bytes, {recipe}", whole, _one_altered(whole, data), readings),
        ]
    return found


# Files of other programs ----------------------------------------------------------------------------------------------


def _exported_readings(path: Path, mutant: Mutant) -> list[Reading]:
    model = models.build("mxfp8", 1, **SIZES)
    checkpoint = path.parent / "checkpoint"
    return [
        ("load", lambda: layouts.load(path, model, lossy=True).lines() and None, None),
        ("import", lambda: exchange.import_(path, str(_fresh(path)), "mxfp8", None, lossy=True), None),
        ("export", lambda: layouts.export(checkpoint, "sglang-mxfp8", _fresh(path), config=path) and None, None),
    ]


@st.composite
def _header(draw: DrawFn, whole: Path) -> Mutant:
    """A safetensors file whose header says something else."""
    name = draw(st.sampled_from(sorted(path.name for path in whole.glob("*.safetensors"))))
    content = (whole / name).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(draw(trees(json.loads(content[8 : 8 + length])))).encode()
    return {name: struct.pack("<Q", len(header)) + header + content[8 + length :]}


def _json(whole: Path, name: str) -> SearchStrategy[Mutant]:
    said = trees(json.loads((whole / name).read_bytes()))
    return said.map(lambda tree: {name: json.dumps(tree).encode()}) | _altered(whole, name)


def exported_kinds(folder: Path) -> list[Kind]:
    """Safetensors with their index and configuration; the map of names that an export is told."""
    checkpoint = _saved(folder / "checkpoint", "mxfp8")
    whole = folder / "exported"
    layouts.export(checkpoint, "sglang-mxfp8", whole, config=CONFIG, max_shard_bytes=30_000)
    some = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(some) > 1
    return [
        Kind("safetensors", whole, _header(whole) | _one_altered(whole, some), _exported_readings),
        Kind("index.json", whole, _json(whole, "model.safetensors.index.json"), _exported_readings),
        Kind("config.json", whole, _json(whole, "config.json"), _exported_readings),
        _names_kind(folder),
    ]


def _names_kind(folder: Path) -> Kind:
    whole = folder / "named"
    whole.mkdir()
    plain = dict(names.LLAMA.plain)
    fused = {ours: {"rows": order, "into": list(into)} for ours, (order, into) in names.LLAMA.fused.items()}
    tree = {"names": plain, "fused": fused}
    (whole / "map.toml").write_text(tomli_w.dumps(tree))

    def readings(path: Path, mutant: Mutant) -> list[Reading]:
        def read() -> None:
            found = names.read_names(path / "map.toml")
            layouts.export(path.parent / "checkpoint", "sglang-mxfp8", _fresh(path), names=found, config=CONFIG)

        return [("export", read, None)]

    said = trees(tree).map(lambda changed: _toml("map.toml", changed))
    return Kind("map of names", whole, said | _altered(whole, "map.toml"), readings)


def _toml(name: str, tree: Any) -> Mutant:
    try:
        return {name: tomli_w.dumps(tree).encode("utf-8", "surrogatepass")}
    except (TypeError, ValueError, AttributeError):  # TOML has no such thing
        return {name: json.dumps(tree).encode()}


def transformer_engine_kinds(folder: Path) -> list[Kind]:
    """TransformerEngine's checkpoint, and the one of ours that says what it is to become."""
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    found = []
    for recipe in ("mxfp8", "nvfp4"):
        whole = folder / f"both-{recipe}"
        whole.mkdir()
        (folder / recipe).rename(whole / "te")
        size = next(iter(SafeReader(whole / "te", packed=True).entries.values())).size[0]  # type: ignore[union-attr]
        with qs.quantized_model_init(recipe=models.RECIPES[recipe]):
            model = nn.Sequential(qs.Linear(size, size, params_dtype=torch.bfloat16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.save(whole / "like", model, FusedAdam(model.named_parameters()))
        theirs = sorted(f"te/{path.name}" for path in (whole / "te").glob("*.distcp"))
        mutants = st.one_of(
            _metadata(whole, f"te/{METADATA_FILE}", "te/none"),
            _metadata(whole, f"like/{METADATA_FILE}", f"like/{manifest.MANIFEST}"),
            _entry(whole, "te"),
            _entry(whole, "like"),
            _one_altered(whole, theirs),
        )
        found.append(Kind(f"TransformerEngine, {recipe}", whole, mutants, _conversion_readings))
    return found


def _conversion_readings(path: Path, mutant: Mutant) -> list[Reading]:
    def read() -> None:
        transformer_engine.convert(path / "te", path / "like", _fresh(path), lossy=True).lines()

    return [("convert-te", read, None)]


# Runs -----------------------------------------------------------------------------------------------------------------


def run_kinds(folder: Path) -> list[Kind]:
    """`config.toml` and the records of a run that somebody else has made, as `resume` reads them."""
    whole = hostile.made(folder)
    config = trees(hostile.content(whole)).map(lambda tree: _toml("config.toml", tree))
    records = [{"step": 0, "torch": "2.13.0"}, {"step": 2, "requantized": ["a"], "lossy": True}]
    (whole / "starts.jsonl").write_bytes(_lines(records))
    starts = trees(records).map(lambda tree: {"starts.jsonl": _lines(tree)})

    def readings(path: Path, mutant: Mutant) -> list[Reading]:
        return [("resume", lambda: hostile.read(path), None)]

    return [
        Kind("config.toml", whole, config | _altered(whole, "config.toml"), readings),
        Kind("starts.jsonl", whole, starts | _altered(whole, "starts.jsonl"), readings),
    ]


# Data -----------------------------------------------------------------------------------------------------------------


def data_kinds(folder: Path) -> list[Kind]:
    """Token shards with their index, and a tokenizer."""
    whole, tokenizer = folder / "shards", folder / "tokenizer"
    sources.tokenizer_folder(tokenizer, eos_token=sources.END)
    [source] = find([str(sources.jsonl(folder / "texts.jsonl", sources.texts(30)))])
    ShardedSource(source, load_tokenizer(str(tokenizer)), str(tokenizer), TextOptions(), 1000).write(whole)
    digest = collect([str(whole)], like=Corpus((), vocabulary=400, end_of_document=0)).sha256
    index = json.loads((whole / INDEX).read_text())
    shards = [shard["file"] for shard in index["shards"]]

    def read(path: Path, mutant: Mutant) -> list[Reading]:
        def prepared() -> str:
            settings = TrainSettings(seq_length=16, data=(str(path),))
            return Preparation(settings).collected(path / "none")[1].sha256

        return [("train", prepared, None if INDEX in mutant else digest)]

    def load(path: Path, mutant: Mutant) -> list[Reading]:
        return [("tokenizer", lambda: load_tokenizer(str(path)).encode(["a b"]) and None, None)]

    trees_ = trees(index).map(lambda tree: {INDEX: json.dumps(tree).encode()})
    files = ["tokenizer.json", "tokenizer_config.json"]
    config = trees(json.loads(sources.tokenizer_json())).map(lambda tree: {"tokenizer.json": json.dumps(tree).encode()})
    return [
        Kind("token shards", whole, trees_ | _one_altered(whole, shards) | _altered(whole, INDEX), read),
        Kind("tokenizer", tokenizer, config | _one_altered(tokenizer, files), load),
    ]


REPORTED = ("config.toml", "metrics.jsonl", "starts.jsonl", "statistics.jsonl")


def report_kinds(folder: Path) -> list[Kind]:
    """What a run has written, as `report` and `watch` read it."""
    whole = runs.made_run(folder / "run", steps=5)

    def changed(name: str) -> SearchStrategy[Mutant]:
        if name == "config.toml":
            return trees(hostile.content(whole)).map(lambda tree: _toml(name, tree))
        lines = [json.loads(line) for line in (whole / name).read_text().splitlines()]
        return trees(lines).map(lambda tree: {name: _lines(tree)})

    def readings(path: Path, mutant: Mutant) -> list[Reading]:
        return [
            ("report", lambda: render([read_history(path)]), None),
            ("watch", lambda: "".join(RunWatch(path).poll(99)), None),
        ]

    return [Kind(name, whole, changed(name) | _altered(whole, name), readings) for name in REPORTED]


def _lines(records: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in (records if isinstance(records, list) else [records]))


def built(folder: Path) -> list[Kind]:
    """All kinds, with their whole files in a folder."""
    return [
        kind
        for name, make in (
            ("ours", checkpoint_kinds), ("exported", exported_kinds), ("te", transformer_engine_kinds),
            ("runs", run_kinds), ("data", data_kinds), ("reported", report_kinds),
        )
        for kind in make(_made(folder / name))
    ]  # fmt: skip


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
