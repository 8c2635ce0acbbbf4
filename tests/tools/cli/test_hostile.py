"""What a `config.toml` from anybody can do to whoever resumes its run: nothing but one line that says what is wrong."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings, strategies as st

from quantshard.checkpoints.disk import store
from quantshard.foreign import tomllib
from quantshard.tools.trainer import launch, run_dir
from quantshard.tools.trainer.restarts import differences
from quantshard.tools.trainer.run_dir import RunDir, to_toml
from quantshard.tools.trainer.settings.config import KINDS, TrainSettings, from_mapping
from quantshard.tools.trainer.settings.values import SettingType
from tests.tools.cli.hostile import Started, content, made, resumed, told

FILE = r"run/config\.toml"
CASES: list[tuple[Any, str]] = [
    ({"launch": {"processes": 4000}}, r"4000 processes are too many for"),
    ({"launch": {"processes": -2}}, rf"{FILE}: \[launch\]: processes = -2: must be 1 or more"),
    ({"launch": {"processes": True}}, rf"{FILE}: \[launch\]: processes = True must be int: 1 or more"),
    ({"launch": {"processes": 2, "threads": 0}}, r"\[launch\]: threads = 0: must be 1 or more"),
    (
        {"launch": {"processes": 2, "thread": 1}},
        r"no setting 'thread'; did you mean 'threads'\? it has processes, mesh",
    ),
    ({"launch": {}}, r"it lacks \[launch\] with processes"),
    ({"launch": 3}, r"it lacks \[launch\]"),
    ({"corpus": {"files": []}}, r"it lacks \[corpus\] with sha256"),
    (
        {"corpus": {"sha256": "0" * 64, "bytes": 1, "files": ["x"]}},
        r"\[corpus\]: files = \['x'\]: must be a list of st",
    ),
    ({"corpus": {"sha256": "0" * 64, "bytes": 1, "files": ["x" * 80]}}, r"is not a SHA-256, a length and a path"),
    ({"corpus": {"sha256": "0" * 64, "bytes": 1, "files": [f"{'0' * 64} 1 /x"]}}, r"\[corpus\] contradicts itself"),
    ({"corpus": {"sha256": 1.5, "bytes": 1, "files": []}}, r"\[corpus\]: sha256 = 1\.5 must be str"),
    ({"hidden": {"is": 3}}, rf"{FILE}: hidden = {{'is': 3}} must be int: 1 or more, and at most 16,777,216"),
    ({"hidden": "wide"}, r"hidden = 'wide' must be int"),
    ({"hidden": 1 << 40}, r"hidden = 1099511627776: must be 1 or more, and at most 16,777,216"),
    ({"steps": -1}, r"steps = -1: must be 1 or more"),
    ({"global_batch": 0}, r"global_batch = 0: must be"),
    ({"lr": 0}, r"lr = 0\.0: must be more than 0"),
    ({"lr": float("nan")}, r"lr = nan: must be more than 0"),
    ({"weight_decay": float("inf")}, r"weight_decay = inf: must be 0 or more"),
    ({"lr": "1" * 10**6}, r"lr = '1{60,80}\.\.\. must be float"),
    ({"mesh": "tp=" + "9" * 5000}, r"mesh = .* must be text of at most 4096"),
    ({"mesh": "tp=" + "9" * 4000}, r"mesh = 'tp=9+\.\.\.: 'tp=9+\.\.\. must be AXIS=SIZE"),
    ({"mesh": "dp_shard=3,tp=2"}, r"global_batch = 4 cannot|too many"),
    ({"recipe": "\x1b[2J"}, r"unknown recipe '\\x1b\[2J'"),
    ({"recipe": "x" * 5000}, r"recipe = 'x+\.\.\.: must be text of 1 to 4096 characters"),
    ({"recipe": "*=" + "x" * 90}, r"unknown recipe 'x+'"),
    ({"architecture": "rnn"}, r"architecture = 'rnn': choose one of: llama, gpt"),
    ({"hiddn": 3}, r"there is no setting 'hiddn'; did you mean 'hidden'\?"),
    ({"x" * 10**5: 3}, r"there is no setting 'x+\.\.\.; `quantshard train --help`"),
    ({"modes": {"hidden": 3}}, r"there is no setting 'modes'"),
    ({"data": "text"}, r"data = 'text' must be a list of paths"),
    ({"data": ["a", 3]}, r"data = \['a', 3\] must be a list of paths"),
    ({"data": [""]}, r"data = .* must be a list of paths, each of 1 to 4096"),
    ({"data": ["/x\0y"]}, r"data = .* must be a list of paths"),
    ({"data": ["/none"]}, r"there is no data file or folder /none"),
    ({"data": ["/dev/zero"]}, r"/dev/zero is no regular file"),
    ({"data": ["/proc/self/environ"]}, r"no text in /proc/self/environ"),
    ({"tied": 1}, r"tied = 1 must be true or false"),
    (b"hidden = 3\n\xff = 1", rf"{FILE} is not TOML: 'utf-8' codec"),
    ("hidden = ", rf"{FILE} is not TOML: "),
    ("x = " + "[" * 20000, rf"{FILE} is not TOML"),
    ("hidden = " + "9" * 5000, rf"{FILE} is not TOML: .*(more than 64 bits|digits)"),
    ("hidden = 3\nhidden = 3\n", rf"{FILE} is not TOML: Cannot overwrite"),
    ("", r"it lacks \[launch\]"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def not_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture(scope="module")
def sound(run: Path) -> dict[str, Any]:
    """The content of its `config.toml`."""
    return content(run)


def refused(answer: tuple[object, list[str], list[str]], says: str = "") -> None:
    code, out, err = answer
    out = [line for line in out if not line.startswith(("reading the data of the run:", "  "))]
    assert (code, out, len(err)) == (1, [], 1), answer
    assert err[0].startswith("quantshard: ") and re.search(says, err[0]) and len(err[0]) < 1000, err
    assert err[0].isprintable()


def test_a_sound_run_is_resumed(run: Path, sound: dict[str, Any]) -> None:
    assert resumed(run, sound)[::2] == (Started, [])


@pytest.mark.parametrize(("change", "says"), CASES, ids=[says[:40] for _, says in CASES])
def test_each_is_refused_in_one_line(run: Path, sound: dict[str, Any], change: Any, says: str) -> None:
    answer = resumed(run, sound | change if isinstance(change, dict) else change)
    refused(answer, says)


def test_a_large_one_is_not_read(run: Path, sound: dict[str, Any]) -> None:
    with open(run / "config.toml", "wb") as file:
        file.truncate(100 << 20)
    refused(told("resume", run), rf"cannot read .*{FILE}: it has 104857600 bytes, and at most 16777216 are read")


@pytest.mark.parametrize("place", ["config.toml", "text"])
def test_a_pipe_is_not_waited_for(run: Path, sound: dict[str, Any], place: str) -> None:
    file = run / place if place == "config.toml" else run.parent / "pipe"
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    try:
        answer = told("resume", run) if place == "config.toml" else resumed(run, sound | {"data": [str(file)]})
        refused(answer, r"is no regular file")
    finally:
        file.unlink()
    refused(told("train", "--run", run.parent / "other", "--data", "/dev/zero"), r"/dev/zero is no regular file")


def test_records_of_anybody_are_read(run: Path, sound: dict[str, Any]) -> None:
    """Not what was recorded, but no traceback either."""
    folder = RunDir(run)
    lines = [b"[" * 100000, b"\xff", b"1e999", b'{"step": Infinity}', b'{"step": "1"}', b"[[1, 2], 3]", b'"ab"', b"{}"]
    lines += [
        b'{"step": 1, "requantized": 1, "environment": ["\\u001b"]}',
        b'{"step": 2, "environment": {"variables": 3}}',
    ]
    folder.starts.write_bytes(b"\n".join(lines) + b"\n" + b'{"step": 1, "lo')
    assert folder.requantized() == (True, False)
    assert differences(folder.read_starts()[-1].get("environment"), {"torch": "2"}) == ["torch was None, is '2'"]
    assert differences(["\x1b"], {}) == [] and len(differences({"a": "x" * 10**6}, {"a": 1})[0]) < 200
    folder.forget_after(1)
    assert folder.starts.read_bytes() == b"\n".join(lines[:-1]) + b"\n"
    folder.starts.unlink()


# Data


def test_other_files_are_not_read(run: Path, sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are compared before a file is read; what is read, because it has the length, is not told."""
    monkeypatch.setenv("COLUMNS", "10000")
    secret = run.parent / "secret"
    secret.write_text("password: " + "1" * 76533)
    text = (run.parent / "text").read_text()
    opened: list[str] = []
    before = store.open_regular
    monkeypatch.setattr(
        "quantshard.tools.trainer.data.corpus.open_regular", lambda p, **m: opened.append(str(p)) or before(p, **m)
    )
    answer = resumed(run, sound | {"data": [str(secret)]})
    assert answer[1] == [f"reading the data of the run: {secret}"]
    says = rf"{secret} is not the .*text that the run was started with \(1000 bytes, .* its length is another"
    refused((answer[0], [], answer[2]), says)
    assert not opened and not re.search(r"76,?543", answer[2][0])
    secret.write_text("x" + text[1:])
    other = run.parent / "other"
    other.write_text("never read")
    files = [str(secret), str(other)]
    corpus = sound["corpus"] | config_of([text, "never read"])
    answer = resumed(run, sound | {"data": files, "corpus": corpus})
    assert answer[1] == [f"reading the data of the run: {secret}, {other}"]
    refused((answer[0], [], answer[2]), r"its content is another")
    assert opened == [str(secret)]
    assert hashlib.sha256(secret.read_bytes()).hexdigest()[:6] not in answer[2][0]


def config_of(texts: list[str]) -> dict[str, Any]:
    entries = [(hashlib.sha256(text.encode()).hexdigest(), len(text)) for text in texts]
    whole = hashlib.sha256("".join(f"{digest} {size}\n" for digest, size in entries).encode()).hexdigest()
    return {"sha256": whole, "files": [f"{digest} {size} /elsewhere/{n}" for n, (digest, size) in enumerate(entries)]}


def test_the_files_that_were_compared_are_those_that_are_read(
    run: Path, sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[corpus] could say another path for the content that `data` leads to: the processes look for themselves."""
    orders: list[str] = []
    monkeypatch.setattr(launch, "check_processes", lambda processes: None)
    corpus = sound["corpus"] | config_of([(run.parent / "text").read_text()])
    monkeypatch.setattr("quantshard.tools.cli.train._launch", lambda processes, run, order: orders.append(order))
    assert resumed(run, sound | {"corpus": corpus})[0] == 0
    assert orders[0].overrides["data"] == sound["data"]
    assert resumed(run, sound)[0] == 0 and "data" not in orders[1].overrides


def test_what_is_read_is_said_before(run: Path, sound: dict[str, Any]) -> None:
    code, out, err = resumed(run, sound)
    assert code is Started and not err
    assert " ".join(out).split() == f"reading the data of the run: {run.parent / 'text'} starting 2 processes".split()


ODD = {
    b"caf\xe9": r"caf\\udce9",
    b"\x1b[31mred": r"\\x1b\[31mred",
    b"two\nlines": r"two lines",
    b"[red]x": r"\[red\]x",
    "right\u202eleft".encode(): r"right\\u202eleft",
}


@pytest.mark.parametrize("name", ODD, ids=[str(name) for name in ODD])
def test_names_are_shown_without_harm(tmp_path: Path, name: bytes) -> None:
    folder = os.path.join(os.fsencode(tmp_path), name)
    refused(
        told("train", "--run", tmp_path / "r", "--data", os.fsdecode(folder)), "there is no data file or folder|UTF-8"
    )
    with open(folder, "wb") as file:
        file.write(b"short")
    refused(
        told("train", "--run", tmp_path / "r", "--data", os.fsdecode(folder), "--seq-length", 5000), "too few|UTF-8"
    )
    os.unlink(folder)
    os.mkfifo(folder)
    refused(told("train", "--run", tmp_path / "r", "--data", os.fsdecode(folder)), ODD[name])
    refused(told("resume", os.fsdecode(folder)), ODD[name])
    assert not (tmp_path / "r").exists()


def test_folders_of_odd_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a").write_text("0123456789" * 100)
    (folder / "empty").touch()
    (folder / "loop").symlink_to(folder)
    arguments = ("train", "--run", tmp_path / "r", "--nproc-per-node", 1)
    with pytest.warns(UserWarning, match="texts/loop is a link to a folder and not read"):
        assert told(*arguments, "--data", folder)[0] is Started
    shutil.rmtree(tmp_path / "r")
    (folder / "loop").unlink()
    (folder / "loop").symlink_to(folder / "loop")
    refused(told(*arguments, "--data", folder), r"cannot read the data file .*loop: Too many levels")
    (folder / "loop").unlink()
    (folder / "gone").symlink_to(folder / "nowhere")
    refused(told(*arguments, "--data", folder), r"no data file or folder .*gone")
    (folder / "gone").unlink()
    refused(told(*arguments, "--data", folder / "a" / "b"), r"cannot read the data file .*b: Not a directory")
    refused(told(*arguments, "--data", folder / "empty"), r"no text in .*empty")
    (folder / "link").symlink_to(folder / "a")
    assert told(*arguments, "--data", folder)[0] is Started
    assert (tmp_path / "r" / "config.toml").read_text().count(" 1000 ") == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "texts" / "closed").mkdir(parents=True)
    (tmp_path / "texts" / "closed").chmod(0)
    refused(told("train", "--run", tmp_path / "r", "--data", tmp_path / "texts"), "closed: Permission denied")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts" / "closed").mkdir(parents=True)
    (tmp_path / "texts" / "a").write_text("0123456789" * 100)
    before = os.scandir

    def scandir(path: str) -> Any:
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return before(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(told("train", "--run", tmp_path / "r", "--data", tmp_path / "texts"), "closed: Permission denied")


# Options: refused before a folder is made

OPTIONS = {
    "--seed": ["18446744073709551616", "-1"],
    "--weight-decay": ["inf", "nan", "-1"],
    "--lr": ["0", "-1", "nan", "inf", "1e300"],
    "--steps": ["0", "-1", "1000000000000"],
    "--global-batch": ["0"],
    "--hidden": ["0", "1000000000"],
    "--clip": ["inf"],
    "--eps": ["0"],
    "--threads": ["100000"],
    "--mesh": ["", "tp=0", "tp=99999999999999"],
    "--nproc-per-node": ["4000"],
    "--lr-floor": ["2"],
}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, vs in OPTIONS.items() for v in vs if v])
def test_options_are_refused_before_a_folder_is_made(tmp_path: Path, option: str, value: str) -> None:
    name = "processes" if option == "--nproc-per-node" else option[2:].replace("-", "_")
    refused(told("train", "--run", tmp_path / "r", f"{option}={value}"), name)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("option", ["--steps=-1", "--mesh=tp=x", "--nproc-per-node=4000"])
def test_options_of_resume_too(run: Path, sound: dict[str, Any], option: str) -> None:
    resumed(run, sound)
    before = (run / "config.toml").read_bytes()
    code, _, err = told("resume", run, option)
    assert code == 1 and len(err) == 1 and (run / "config.toml").read_bytes() == before


# Properties


def values(kind: SettingType) -> st.SearchStrategy[Any]:
    """Values that a setting may have."""
    if kind.choices:
        return st.sampled_from(kind.choices)
    if kind.type is bool:
        return st.booleans()
    if kind.type is int:
        return st.integers(int(kind.least), int(kind.most))
    if kind.type is float:
        return st.floats(kind.least, kind.most, exclude_min=kind.more, exclude_max=kind.less)
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=int(kind.least), max_size=30)
    return text if kind.type is str else st.lists(text, max_size=4).map(tuple)


WORDS = {"recipe": st.sampled_from(["mxfp8", "nvfp4"]), "mesh": st.sampled_from(["", "dp_shard=2", "tp=4"])}
VALID = st.builds(TrainSettings, **{name: WORDS.get(name, values(kind)) for name, kind in KINDS.items()})


@settings(max_examples=50, deadline=None)
@given(VALID)
def test_valid_settings_come_back(given_: TrainSettings) -> None:
    text = to_toml(given_, {"launch": {}, "corpus": {}})
    assert TrainSettings(**from_mapping(tomllib.loads(text), "it")) == given_


ANY = st.recursive(
    st.one_of(
        st.none().map(lambda _: ""), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(),
        st.text(st.characters(codec="utf-8"), max_size=20), st.dates(), st.just("x" * 10000),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)  # fmt: skip
PLACES = [
    *KINDS,
    "launch",
    "corpus",
    *(f"launch.{n}" for n in run_dir._LAUNCH),
    *(f"corpus.{n}" for n in run_dir._CORPUS),
]


def fits(place: str, value: Any) -> bool:
    """Whether a value is one that the schema allows in a place."""
    table, _, name = place.rpartition(".")
    kinds = {"": KINDS, "launch": run_dir._LAUNCH, "corpus": run_dir._CORPUS}[table]
    if name not in kinds:
        return False
    try:
        return kinds[name].holds(kinds[name].read(value))
    except (TypeError, OverflowError):
        return False


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), value=ANY)
def test_a_changed_value_is_refused_or_fits(run: Path, sound: dict[str, Any], place: str, value: Any) -> None:
    table, _, name = place.rpartition(".")
    changed = sound | ({table: sound[table] | {name: value}} if table else {name: value})
    answer = resumed(run, changed)
    if answer[0] is Started:
        assert fits(place, value) and not answer[2]
    else:
        refused((answer[0], answer[1] if not fits(place, value) else [], answer[2]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), length=st.integers(0, 40), new=st.binary(max_size=20))
def test_changed_bytes_are_refused_or_fit(run: Path, sound: dict[str, Any], at: float, length: int, new: bytes) -> None:
    whole = tomli_w.dumps(sound).encode()
    first = int(at * len(whole))
    code, _, err = resumed(run, whole[:first] + new + whole[first + length :])
    assert (code is Started and not err) or (code == 1 and len(err) == 1 and err[0].startswith("quantshard: ")), err


def test_every_setting_is_bounded() -> None:
    for field in fields(TrainSettings):
        kind = KINDS[field.name]
        kind.read(list(field.default) if kind.type is tuple else field.default)
        assert kind.holds(field.default), field.name
        for wrong in (-(1 << 70), 1 << 70, float("nan"), float("inf"), -float("inf")):
            if kind.type in (int, float):
                assert not kind.holds(wrong), field.name
    assert asdict(TrainSettings()).keys() == KINDS.keys()
