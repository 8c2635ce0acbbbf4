"""Folders from anyone: no code of theirs runs, no name in them is requested, no size in them hangs a command."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from quantshard import checkpoints
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam
from quantshard.tools.trainer import launch, trackers
from quantshard.tools.trainer.data.sources import TextOptions, find, texts
from quantshard.tools.trainer.models import huggingface
from tests.distributed.commands import quantshard
from tests.interop.layouts import models

ROOT = Path(__file__).parents[3]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CODE = {"AutoConfig": "evil/code--evil.C", "AutoModelForCausalLM": "evil/code--evil.M"}
HOSTILE_MODELS: dict[str, dict[str, Any]] = {
    "code": {"model_type": "vit", "auto_map": CODE},
    "code by an alias": {"model_type": "vit", "attribute_map": {"x": "auto_map"}, "x": CODE},
    "detr": {
        "model_type": "detr",
        "architectures": ["DetrForObjectDetection"],
        "backbone": "evil/repo",
        "use_timm_backbone": False,
    },
    "upernet": {
        "model_type": "upernet",
        "architectures": ["UperNetForSemanticSegmentation"],
        "backbone": "evil/repo",
    },
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths requested from a server that stands in for the Hugging Face hub, in this process and its children."""
    paths: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield paths
    server.shutdown()
    server.server_close()


def on_a_terminal(script: str, *arguments: str) -> str:
    """The output of a Python script whose terminal answers every question with y."""
    primary, secondary = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=secondary, stdout=secondary, stderr=secondary, env=environment
    )
    os.close(secondary)
    os.write(primary, b"y\n" * 8)
    output = b""
    try:
        while block := os.read(primary, 4096):
            output += block
    except OSError:  # Linux raises EIO when the last writer has closed
        pass
    process.wait()
    os.close(primary)
    return output.decode()


DESCRIBE = """
import json, sys
from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer import trackers
from quantshard.tools.trainer.settings.config import TrainSettings
for content in json.loads(sys.argv[1]):
    try:
        huggingface.described(content, "config.json", causal=True)
        print("BUILT")
    except ConfigurationError as error:
        print("REFUSED", error)
"""


@pytest.mark.parametrize("content", HOSTILE_MODELS.values(), ids=HOSTILE_MODELS)
def test_a_hostile_configuration_is_refused(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked whether code may run, and no server for it."""

    seen: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *question: seen.append(question) or "y")
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: seen.append(address))
    with pytest.raises(ConfigurationError):
        huggingface.described(content, "config.json", causal=True)
    assert not seen


@pytest.mark.exhaustive
def test_configurations_neither_run_code_nor_make_requests(requests: list[str]) -> None:
    """With a terminal that answers y."""
    output = on_a_terminal(DESCRIBE, json.dumps([*HOSTILE_MODELS.values()]))
    assert output.count("REFUSED") == len(HOSTILE_MODELS), output
    assert "wish to run" not in output
    assert requests == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 4096},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 10**6},
        {"model_type": "vit", "architectures": ["ViTModel"], "num_layers": 10**6},
        {"model_type": "whisper", "architectures": ["WhisperModel"], "encoder_layers": 10**6},
        {"model_type": "timesformer", "layers": 10**9},
        {"text_config": [{"depth": 10**6}]},
    ],
)
def test_configurations_of_too_many_layers(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: \w+ is \d+, and at most 1024 are built"):
        huggingface.described(LLAMA | change, "config.json")


def test_an_alias_of_a_field_is_not_read() -> None:
    content = LLAMA | {"num_hidden_layers": 2, "attribute_map": {"x": "num_hidden_layers"}, "x": 10**9}
    assert huggingface.described(content, "config.json").config.num_hidden_layers == 2


def test_a_dataset_requests_nothing_and_decodes_only_texts(requests: list[str], tmp_path: Path) -> None:
    """Files of a dataset repository that name other places are not read, and images are not decoded."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    hub = os.environ["HF_ENDPOINT"]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = datasets.Dataset.from_list([{"image": {"bytes": b"no image"}, "text": "a"}] * 3, features=features)
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "described").mkdir()
    table.to_parquet(tmp_path / "described" / "train.parquet")
    for name in ("README.md", ".huggingface.yaml"):
        text = f"configs:\n- config_name: default\n  data_files: {hub}/x.parquet\n"
        (tmp_path / "described" / name).write_text(f"---\n{text}---\n" if name == "README.md" else text)
    for name in ("saved", "described"):
        [source] = find([str(tmp_path / name)])
        assert list(texts(source, TextOptions())) == [("a", True)] * 3
        with pytest.raises(ConfigurationError, match="has no 'body', only 'image', 'text'"):
            list(texts(source, TextOptions("body")))
    assert requests == []


SHADOWS = (
    "xxhash.py", "torch.py", "numpy.py", "json.py", "typer.py", "pickle.py", "multiprocessing.py", "sitecustomize.py",
    "usercustomize.py", "quantshard/__init__.py",
)  # fmt: skip


def shadow(folder: Path) -> None:
    """Add modules that would shadow those of libraries if the folder is on the path, and leave a file when imported."""
    (folder / "quantshard").mkdir()
    for name in SHADOWS:
        (folder / name).write_text(f"open({str(folder / 'it-ran')!r}, 'a').write(__file__ + '\\n')\n")


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    shadow(tmp_path)
    return tmp_path


COMMANDS = """#!{python}
import json, os, sys, traceback
from quantshard.__main__ import main
from quantshard.tools.cli import app
import typer
if sys.argv[2] == "Python 3.10":  # which does not read it
    del os.environ["PYTHONSAFEPATH"]
codes = {{}}
if __name__ == "__main__":
    names = [*typer.main.get_command(app()).commands]
    for command in [*([name, "--help"] for name in names), *json.loads(sys.argv[1])]:
        sys.argv = ["quantshard", *command]
        try:
            main()
        except SystemExit as error:
            codes[" ".join(command)] = error.code
        except BaseException:
            traceback.print_exc()
    print("\\n" + json.dumps(codes))
"""


def in_one_process(folder: Path, version: str, commands: list[list[str]], script: Path) -> dict[str, int]:
    """Exit codes of commands, and of the help of each command, called from a script such as pip installs."""
    script.write_text(COMMANDS.format(python=sys.executable))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONSAFEPATH": "" if version == "Python 3.10" else "1"}
    done = subprocess.run(
        [sys.executable, script, json.dumps(commands), version], cwd=folder, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert not (folder / "it-ran").exists(), (folder / "it-ran").read_text()
    codes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert not any(codes.values()) and len(codes) > len(commands) + 10, (codes, done.stderr)
    return codes


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("version", "resumes"),
    [
        ("Python 3.10", False),
        *(pytest.param(version, True, marks=pytest.mark.exhaustive) for version in ("Python 3.10", "PYTHONSAFEPATH")),
    ],
)
def test_commands_import_nothing_from_the_working_directory(tmp_path: Path, version: str, resumes: bool) -> None:
    """A folder with texts and checkpoints is the working directory; or that of a run too, where `resume` starts two
    workers."""
    run, commands = tmp_path / "run", []
    if resumes:
        (tmp_path / "text").write_text("0123456789" * 100)
        options = "--steps 1 --nproc-per-node 2 --recipe mxfp8 --hidden 64 --heads 2 --layers 1 --seq-length 16"
        trained = quantshard("train", "--run", run, "--data", tmp_path / "text", "--global-batch", 4, *options.split())
        assert trained.returncode == 0, trained.stderr
        commands = ["report .", "watch .", "status .", "debug .", "resume . --steps 2", "explain ."]
    else:
        run.mkdir()
    shadow(run)
    (run / "text.jsonl").write_text('{"text": "of anybody"}\n' * 100)
    model = models.build("mxfp8")
    checkpoints.save(run / "saved", model, FusedAdam(model.named_parameters()))
    (run / "config").mkdir()
    (run / "config" / "config.json").write_text(json.dumps(models.CONFIG))
    commands += [
        "tokenize text.jsonl --out tokens --shard-size 1KB", "verify saved", "inspect saved", "diff saved saved",
        "export saved --layout plain-fp32 --out exported --config config",
    ]  # fmt: skip
    in_one_process(run, version, [command.split() for command in commands], tmp_path / "quantshard")
    assert not resumes or len((run / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "safe_path", ["", pytest.param("1", marks=pytest.mark.exhaustive)], ids=["Python 3.10", "PYTHONSAFEPATH"]
)
def test_workers_import_nothing_from_the_working_directory(hostile_folder: Path, safe_path: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": safe_path}
    command = [sys.executable, launch.command_script(), "worker", "--help"]
    done = subprocess.run(command, cwd=hostile_folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "quantshard worker" in done.stdout, done.stderr
    assert not (hostile_folder / "it-ran").exists()


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
@pytest.mark.parametrize("key", ["base_url", "http_proxy"])
def test_settings_of_wandb_in_a_folder_do_not_redirect_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "settings"
    file.write_text("[default]\nentity = mine\nproject = p\n")
    trackers._check_wandb_settings(".")
    file.write_text(f"[default]\n{key} = http://127.0.0.1:9\n")
    with pytest.raises(ConfigurationError, match=rf"{folder}/settings sets '{key}'; delete it"):
        trackers._check_wandb_settings(".")


TRACKED = """
import sys
from pathlib import Path
from quantshard.tools.trainer import trackers
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
(tracker,) = trackers.open_trackers(TrainSettings(wandb="p"), RunDir(Path(".")), 0)
tracker.metrics({"step": 1, "loss": 1.0})
tracker.close(failed=False)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_runs_no_git_and_reads_no_account_of_the_run(tmp_path: Path, mode: str) -> None:
    """Git runs commands that the configuration of a repository names, and wandb asked git about the run's folder."""
    run, programs, log = tmp_path / "run", tmp_path / "programs", tmp_path / "log"
    for folder in (run / ".git", programs, tmp_path / "home"):
        folder.mkdir(parents=True)
    (run / ".git" / "config").write_text("[core]\nfsmonitor = touch it-ran\n")
    for name in (".netrc", "_netrc", "netrc"):
        (run / name).write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
    (run / ".env").write_text(f"WANDB_API_KEY={'k' * 40}\nNETRC=.netrc\n")
    (programs / "git").write_text(f"#!/bin/sh\necho $PWD: git $@ >> {log}\n")
    (programs / "git").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path / "home"), "WANDB_MODE": mode}
    done = subprocess.run(
        [sys.executable, "-c", TRACKED, mode], cwd=run, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    if mode == "online":
        assert "No API key configured" in done.stderr
    else:
        assert done.returncode == 0 and list(run.glob("wandb/offline-run-*")), done.stderr
    assert not log.exists(), log.read_text()
    assert not (run / "it-ran").exists()
