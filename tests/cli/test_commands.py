"""What the command line refuses before it starts a process: one line, exit code, nothing written."""

import pytest

from quantshard import cli
from quantshard.cli import launch


@pytest.fixture(autouse=True)
def starts_nothing(monkeypatch, tmp_path):
    def started(processes, arguments):
        raise AssertionError("processes were started")

    monkeypatch.setattr(launch, "launch", started)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "text").write_text("0123456789" * 100)


def run(monkeypatch, capsys, *arguments):
    """Exit code, and the lines on stderr."""
    monkeypatch.setattr("sys.argv", ["quantshard", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "--run", "r", "--recipe", "fp7"], 1, "unknown recipe 'fp7'; choose one of: delayed"),
        (["train", "--run", "r", "--data", "none"], 1, "there is no data file or folder"),
        (["train", "--run", "r", "--data", "text", "--seq-length", "2000"], 1, "too few for seq_length = 2000"),
        (["train", "--run", "r", "--hidden", "97"], 1, "hidden = 97 over heads = 4"),
        (["train", "--run", "r", "--global-batch", "6", "--nproc-per-node", "4"], 1, "cannot be split evenly"),
        (["train", "--run", "r", "--config", "none.toml"], 1, "cannot read the configuration none.toml"),
        (["train", "--run", "r", "stray"], 1, "unexpected argument 'stray'"),
        (["train", "--run", "r", "--steps", "many"], 2, "--steps"),
        (["train", "--run", "r", "--stesp", "1"], 2, "--stesp"),
        (["train", "--run", "text"], 1, "text exists"),
        (["train", "--run", "text/r", "--data", "text"], 1, "cannot write the run folder"),
        (["train", "--steps", "3"], 2, "--run"),
        (["resume", "none"], 1, "there is no run in none"),
        (["trian"], 2, "trian"),
    ],
)
def test_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments, code, says):
    found, lines = run(monkeypatch, capsys, *arguments)
    assert found == code and len(lines) == 1 and says in lines[0], lines
    assert lines[0].startswith("quantshard: ") and sorted(p.name for p in tmp_path.iterdir()) == ["text"]


def test_run_that_saved_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: None)
    assert run(monkeypatch, capsys, "train", "--run", "r", "--data", "text", "--nproc-per-node", 2) == (0, [])
    before = (tmp_path / "r" / "config.toml").read_bytes()
    _, (line,) = run(monkeypatch, capsys, "train", "--run", "r", "--data", "text")
    assert "r exists: it holds no checkpoint" in line
    _, (line,) = run(monkeypatch, capsys, "resume", "r")
    assert "no complete checkpoint" in line and "--config r/config.toml" in line
    assert (tmp_path / "r" / "config.toml").read_bytes() == before


def test_several_data_after_one_flag(monkeypatch, capsys, tmp_path):
    given = []
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: given.append((processes, arguments)))
    (tmp_path / "more").write_text("abc" * 100)
    assert run(monkeypatch, capsys, "train", "--run", "r", "--data", "text", "more", "--steps", 3) == (0, [])
    config = (tmp_path / "r" / "config.toml").read_text()
    assert str(tmp_path / "text") in config and str(tmp_path / "more") in config and "steps = 3" in config
    assert given[0][1][:3] == ["-m", "quantshard", "worker"]


def test_help_lists_commands_and_settings(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["quantshard", "train", "--help"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"--{name}" in shown for name in ("run", "recipe", "kv-heads", "save-every", "nproc-per-node"))
