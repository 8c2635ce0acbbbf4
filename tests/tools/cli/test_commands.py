"""What the command line refuses before it starts a process: one line, exit code, nothing written."""

import re
from dataclasses import fields, replace

import pytest

from quantshard.tools import cli
from quantshard.tools.trainer import launch, worker
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec


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
        (["train", "--run", "r", "--recipe", "fp7"], 1, "unknown recipe 'fp7'; choose one of: auto"),
        (["train", "--run", "r", "--data", "none"], 1, "there is no data file or folder"),
        (["train", "--run", "r", "--data", "text", "--seq-length", "2000"], 1, "too few for seq_length = 2000"),
        (["train", "--run", "r", "--hidden", "97"], 1, "hidden = 97 over heads = 4"),
        (["train", "--run", "r", "--global-batch", "6", "--nproc-per-node", "4"], 1, "cannot be split evenly"),
        (["train", "--run", "r", "--config", "none.toml"], 1, "there is nothing at none.toml"),
        (["train", "--run", "r", "--config", "txet"], 1, "there is nothing at txet"),
        (["train", "--run", "r", "--data", "tetx"], 1, "there is no data file or folder"),
        (["train", "--run", "r", "--init-from", "tetx"], 1, "nothing at tetx; name a checkpoint"),
        (["train", "--run", "r", "--init-from", "."], 1, "--init-from . is no complete checkpoint"),
        (
            ["train", "--run", "r", "--preset", "lean"],
            1,
            "preset = 'lean': there is no such preset; did you mean 'lean8'?",
        ),
        (
            ["train", "--run", "r", "--preset", "lean8", "--exp-avg-dtype", "float32"],
            1,
            "preset = 'lean8' has exp_avg_",
        ),
        (
            ["train", "--run", "r", "--schedule", "cosin"],
            1,
            "did you mean 'cosine'? choose one of: cosine, linear, wsd, constant",
        ),
        (["train", "--run", "r", "--recipe", "mxpf8"], 1, "recipe 'mxpf8'; did you mean 'mxfp8'? choose one of: auto"),
        (["train", "--run", "r", "--optimizer", "adamm"], 1, "did you mean 'adamw'? choose one of: adamw"),
        (["train", "--run", "r", "--mesh", "dp_shrd=2"], 1, "there is no axis 'dp_shrd'; did you mean 'dp_shard'?"),
        (["resume", "--run", "r"], 2, "No such option: --run (see --help)"),
        (["resume", "r", "--mehs", "1"], 2, "--mehs (Possible options: --mesh) (see --help)"),
        (["plan", "r", "--lr", "1"], 2, "(see --help)"),
        (["resume", "r", "--recipe"], 2, "requires an argument. (see --help)"),
        (["train", "--run", "r", "stray"], 1, "unexpected argument 'stray'"),
        (["train", "--run", "r", "--steps", "many"], 2, "'--steps'"),
        (["train", "--run", "r", "--stesp", "1"], 2, "--steps, --threads) (see --help)"),
        (["train", "--run", "text"], 1, "text exists"),
        (["train", "--run", "text/r", "--data", "text"], 1, "cannot write text/r: Not a directory"),
        (["train", "--steps", "3"], 2, "--run"),
        (["train", "--run", "r", "--data", "text", "--checkpoints", "text"], 1, "text cannot be read (Not a directory"),
        (["train", "--run", "r", "--recipe", ""], 1, "recipe = '': must be text of 1 to 4096 characters"),
        (["inspect", "text"], 1, "text is not a complete checkpoint"),
        (["resume", "none"], 1, "there is no run in none"),
        (["trian"], 2, "'train'? (see --help)"),
    ],
)
def test_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments, code, says):
    found, lines = run(monkeypatch, capsys, *arguments)
    assert found == code and len(lines) == 1 and says in lines[0], lines
    assert lines[0].startswith("quantshard: ") and sorted(p.name for p in tmp_path.iterdir()) == ["text"]


def test_a_flag_that_contradicts_the_preset_of_a_file_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: None)
    (tmp_path / "some.toml").write_text('preset = "lean8"\nseq_length = 16\n')
    command = ["train", "--run", "r", "--data", "text", "--config", "some.toml", "--nproc-per-node", "1"]
    code, (line,) = run(monkeypatch, capsys, *command, "--exp-avg-dtype", "float32")
    assert code == 1 and "'float32' is given; leave one of the two out, or give preset = 'none'" in line
    flags = ("--preset", "none", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "auto")
    assert run(monkeypatch, capsys, *command, *flags) == (0, [])
    settings = RunDir(tmp_path / "r").read_config()[0]
    assert (settings.preset, settings.exp_avg_dtype, settings.exp_avg_sq_dtype) == ("", "fp8", "float32")


def test_run_that_saved_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: None)
    assert run(monkeypatch, capsys, "train", "--run", "r", "--data", "text", "--nproc-per-node", 2) == (0, [])
    before = (tmp_path / "r" / "config.toml").read_bytes()
    _, (line,) = run(monkeypatch, capsys, "train", "--run", "r", "--data", "text")
    assert "r exists: go on with it by `quantshard resume r`" in line
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
    assert given[0][1][:2] == [launch.command_script(), "worker"]


def shown_by(monkeypatch, capsys, *arguments):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["quantshard", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_lists_all_if_asked(monkeypatch, capsys):
    short = shown_by(monkeypatch, capsys, "train", "--help")
    assert len(short.splitlines()) < 60 and "--kv-heads" not in short
    assert all(
        f"--{name}" in short for name in ("run", "model", "data", "recipe", "save-every", "nproc-per-node", "mesh")
    )
    whole = shown_by(monkeypatch, capsys, "train", "--help-all")
    for setting in fields(TrainSettings):
        name = setting.name.replace("_", "-")
        assert f"--no-{name} " in whole if setting.default is True else f"--{name} " in whole
    assert len(shown_by(monkeypatch, capsys, "train", "--help").splitlines()) == len(short.splitlines())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--mesh", "dp_shard=2,tp=2", "--nproc-per-node", "3"],
            "dp_shard=2,tp=2 is of 4 processes, but 3 are started",
        ),
        (["--mesh", "dp_shard=2,pp=2"], "there is no axis 'pp'"),
        (["--mesh", "dp_shard=3", "--global-batch", "4"], "cannot be split evenly over 3 data-parallel processes"),
    ],
)
def test_mesh_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments, says):
    found, lines = run(monkeypatch, capsys, "train", "--run", "r", "--data", "text", *arguments)
    assert found == 1 and len(lines) == 1 and re.search(says, lines[0]), lines
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text"]


def recorded(folder):
    """What a run's file says of its mesh: the setting, and how it was started."""
    settings, launched, _ = RunDir(folder).read_config()
    return settings.mesh, launched["mesh"], launched["processes"]


def test_mesh_gives_the_processes_and_is_kept(monkeypatch, capsys, tmp_path):
    given = []
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: given.append(processes))
    sizes = ["--data", "text", "--global-batch", "12"]
    assert run(monkeypatch, capsys, "train", "--run", "r", "--mesh", "tp=2,dp_shard=2", *sizes) == (0, [])
    assert run(monkeypatch, capsys, "train", "--run", "s", "--mesh", "tp=2", "--nproc-per-node", 2, *sizes) == (0, [])
    assert run(monkeypatch, capsys, "train", "--run", "t", "--nproc-per-node", 4, *sizes)[0] == 0
    assert recorded(tmp_path / "r") == ("dp_shard=2,tp=2", "dp_shard=2,tp=2", 4)
    assert recorded(tmp_path / "t") == ("", "dp_shard=4", 4)
    assert given == [4, 2, 4]
    assert run(monkeypatch, capsys, "train", "--run", "u", "--config", "r/config.toml", *sizes) == (0, [])
    assert recorded(tmp_path / "u") == recorded(tmp_path / "r")


def test_resume_onto_a_mesh(monkeypatch, capsys, tmp_path):
    given = []
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: given.append(processes))
    sizes = ["--data", "text", "--global-batch", "12"]
    run(monkeypatch, capsys, "train", "--run", "r", "--mesh", "dp_shard=2,tp=2", *sizes)
    run(monkeypatch, capsys, "train", "--run", "t", "--nproc-per-node", 4, *sizes)
    for folder in ("r", "t"):
        saved = tmp_path / folder / "checkpoints" / "step-000002"
        saved.mkdir(parents=True)
        (saved / ".metadata").touch()
    given.clear()
    for arguments in ([], ["--mesh", "dp_shard=3"], ["--nproc-per-node", 6], ["--mesh", "tp=2"]):
        assert run(monkeypatch, capsys, "resume", "r", *arguments) == (0, []), arguments
    for arguments in ([], ["--mesh", "tp=2"], ["--nproc-per-node", 6], ["--mesh", "dp_replicate=4"]):
        assert run(monkeypatch, capsys, "resume", "t", *arguments) == (0, []), arguments
    assert given == [4, 3, 6, 2, 4, 2, 6, 4]
    for arguments, says in (
        (["--mesh", "dp_shard=4", "--nproc-per-node", 2], "dp_shard=4 is of 4 processes, but 2 are started"),
        (["--nproc-per-node", 5], "cannot be split evenly over 5 data-parallel processes"),
        (["--copy-to", "text"], "text exists; name another folder with --copy-to"),
    ):
        found, lines = run(monkeypatch, capsys, "resume", "r", *arguments)
        assert found == 1 and len(lines) == 1 and re.search(says, lines[0]), lines


def test_changed_mesh():
    of_run = replace(TrainSettings(), mesh="dp_shard=2,tp=2").resolved()
    assert worker.changed(of_run, {}, 4).mesh == "dp_shard=2,tp=2"
    assert worker.changed(of_run, {}, 3).axes(3) == MeshSpec(dp_shard=3)  # which `resume` says aloud
    assert worker.changed(of_run, {"mesh": "tp=4"}, 3).mesh == "dp_shard=1,tp=4"  # refused by check_ranks
