"""What is shown: nothing that a terminal obeys, in any encoding, and no markup read in texts of other people."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from quantshard.tools import cli
from quantshard.tools.observe import explain
from quantshard.tools.terminal import screen
from quantshard.tools.terminal.screen import Screen
from quantshard.tools.trainer import launch
from quantshard.tools.trainer.progress import Progress
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.worker import how_started
from tests.tools.cli.hostile import Started, content, made, told

BAD = "a\x1b[2J\x9b1mb\x07\u202ec\udcffd[red]e"
GOOD = "a\\x1b[2J\\x9b1mb\\x07\\u202ec\\udcffd[red]e"


def test_all_that_is_shown_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say(BAD, "two\nlines")
    screen.complain(f"{BAD}\nx")
    shown = capsys.readouterr()
    assert shown.out == f"{GOOD}\ntwo\nlines\n" and shown.err == f"quantshard: {GOOD} x\n"
    Screen(soft_wrap=True).print(BAD, Text(BAD.replace("\x07", "")))  # which rich leaves out of its own
    table = Table()
    table.add_column("name")
    table.add_row(BAD)
    Screen().print(table, BAD)
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out and shown.out.count(GOOD) == 3 and GOOD.replace("\\x07", "") in shown.out


def test_colors_and_bars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    console = Screen()
    console.print(BAD, style="bold red")
    with console.status("working"):
        pass
    assert (
        "\x1b[1;31m" in out.getvalue() and GOOD in out.getvalue().replace("\n", "") and "\x1b[2J" not in out.getvalue()
    )
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    Screen().print("x", style="bold red")
    assert "31m" not in out.getvalue()


def test_tables_of_explain_read_no_markup() -> None:
    model = nn.ModuleDict({f"layer{BAD}": nn.Linear(4, 4, dtype=torch.float32)})
    report = explain(model)
    assert f"layer{GOOD}.weight" in str(report)
    out = io.StringIO()
    Console(file=out, width=300).print(report)
    assert f"layer{GOOD}.weight" in out.getvalue()


def test_a_warning_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    screen.prepare_output()
    assert (
        warnings.formatwarning(UserWarning(f"{BAD}\nmore"), UserWarning, "f", 1)
        == f"quantshard: WARNING: {GOOD} more\n"
    )


def commands(run: str, text: str) -> list[list[str]]:
    return [
        ["--help"], ["train", "--help"], ["resume", run], ["resume", run + "caf\u00e9 \u202e\u2713"],
        ["train", "--run", run + "2", "--data", text + "\udcff"], ["inspect", run + "\u2713"], ["diff", run, "\u2713"],
        ["trian"], ["train", "--run", "x", "--recipe", "\u2713"],
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii"])
def test_every_encoding_can_show_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """On streams that are as strict as Python opens them, which the command makes lenient."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which commands replace
    for name, value in {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    run, codes, shown = made(tmp_path / "caf\u00e9"), [], []
    for line in commands(str(run), str(tmp_path / "text")):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            patched.setattr(sys, "argv", ["quantshard", *line])
            patched.setattr(launch, "launch", lambda *arguments: None)
            with pytest.raises(SystemExit) as end:
                cli.main()
            Progress(TrainSettings(), shown=True).note("generated: caf\u00e9 \u2713 \ufffd")
        codes.append(end.value.code)
        for stream in streams:
            stream.flush()
        shown.append([stream.buffer.getvalue().decode(encoding) for stream in streams])  # type: ignore[attr-defined]
    assert codes == [0, 0, 0, 1, 1, 1, 2, 2, 1]
    assert all("generated: caf\\xe9 \\u2713 \\ufffd" in out for out, _ in shown)
    err = [line for _, text in shown for line in text.splitlines()]
    assert "\x1b" not in "".join(out + text for out, text in shown)
    assert len(err) == 6 and all(line.startswith("quantshard: ") for line in err), err


COMMAND_NAMES = [
    "",
    *"train resume report watch demo debug explain plan diff inspect verify export import convert-te doctor".split(),
]


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name of an option is cut, and no paragraph is broken where the source is."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMAND_NAMES:
        code, out, err = told(*([name] if name else []), "--help")
        assert code == 0 and not err and len(out) > 10
        assert max(map(len, out)) <= 80 and not [line for line in out if "…" in line], name
    _, out, _ = told("doctor", "--help")
    assert "which takes a few minutes. The report has no names" in " ".join(" ".join(out).split())


def test_version_is_said() -> None:
    code, (line,), err = told("--version")
    assert code == 0 and line.startswith("quantshard ") and not err


def test_lines_fit_80_columns_and_paths_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is no terminal too, whatever others of the process's streams are; and what Python prints."""
    path, words = "a/" * 50, "some words " * 12
    for columns, allowed in ((None, 80), ("120", 120)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "stdout", out := io.StringIO())
        screen.say(f"  {words}", path)
        Progress(TrainSettings(), shown=True).note(words)
        Progress(TrainSettings(), shown=True).report(explain(nn.Linear(4, 4, dtype=torch.float32)))
        print(explain(nn.Linear(4, 4, dtype=torch.float32)))
        lines = out.getvalue().splitlines()
        assert path in lines and lines[1].startswith("    ")
        lines.remove(path)
        assert allowed - 20 < max(map(len, lines)) <= allowed and not any(line.endswith(" ") for line in lines)


def test_tables_fit_80_columns() -> None:
    model = nn.ModuleDict(
        {"a_module_with_quite_a_long_name": nn.ModuleDict({"x": nn.Linear(4, 4, dtype=torch.float32)})}
    )
    shown = {}
    for width in (80, 240):
        Console(file=(out := io.StringIO()), width=width).print(explain(model))
        shown[width] = out.getvalue()
        assert max(map(len, out.getvalue().splitlines())) <= width
    assert "gathered forward" not in shown[80] and "stored as" in shown[80] and "GEMM" in shown[80]
    assert "gathered forward" in shown[240]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--no-deterministic", "--tied"], {"deterministic": False, "tied": True}),
        (["--deterministic", "--no-tied"], {"deterministic": True, "tied": False}),
        ([], {"deterministic": False, "tied": True}),  # of the file
    ],
)
def test_switches(tmp_path: Path, flags: list[str], says: dict[str, bool]) -> None:
    (tmp_path / "text").write_text("0123456789" * 100)
    (tmp_path / "c.toml").write_text("deterministic = false\ntied = true\nglobal_batch = 4\n")
    run = ("train", "--run", tmp_path / "r", "--data", tmp_path / "text", "--config", tmp_path / "c.toml", *flags)
    assert told(*run)[0] is Started
    written = content(tmp_path / "r")
    assert {name: written[name] for name in says} == says


def test_threads_are_those_of_openmp(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert how_started(TrainSettings(), 1)["threads"] == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert how_started(TrainSettings(), 2)["threads"] == 1
