"""Processes that are started and told to stop: which line is said, which exit code, and that none is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from quantshard.tools import cli
from quantshard.tools.trainer import launch
from quantshard.tools.trainer.data import corpus

pytestmark = pytest.mark.distributed

HEEDS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[2] == "heeds":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "number", "code", "says"),
    [
        pytest.param("heeds", signal.SIGINT, 130, "", marks=pytest.mark.exhaustive),
        ("heeds", signal.SIGTERM, None, ""),
        pytest.param("does not", signal.SIGINT, 130, "stopped before training began", marks=pytest.mark.exhaustive),
        ("does not", signal.SIGTERM, 1, "stopped before training began"),
    ],
)
def test_a_signal_ends_all_processes(tmp_path: Path, how: str, number: int, code: int | None, says: str) -> None:
    """2 ranks."""
    (tmp_path / "worker.py").write_text(HEEDS)
    begun = tmp_path / "begun"
    begun.mkdir()

    def stop() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not all((begun / rank).exists() for rank in "01"):
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    found, said = None, ""
    try:
        launch.launch(2, [str(tmp_path / "worker.py"), str(begun), how])
    except launch.LaunchError as error:
        found, said = error.exit_code, str(error)
    except SystemExit as end:
        found = end.code
    assert (found, bool(said)) == (code, bool(says)) and says in said
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((begun / rank).read_text()), 0)


def test_an_interrupted_command_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also before processes are started."""

    def interrupted(*paths: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(corpus, "collect", interrupted)
    with patch.object(sys, "argv", ["quantshard", "train", "--run", "r"]), pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert caught.value.code == 130 and not shown.err.strip() and not shown.out
