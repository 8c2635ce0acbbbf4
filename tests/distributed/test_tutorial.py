"""The commands and scripts of docs/tutorial.md, with fewer steps."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(start: str) -> list[str]:
    """The command of the page that begins with `start`, as arguments of this Python."""
    text = re.search(rf"^(?:\$ )?({re.escape(start)}(?:.*\\\n)*.*)$", PAGE, re.M)
    assert text is not None, start
    words = shlex.split(text[1].replace("\\\n", " "))
    assert words[0] == "quantshard"
    return [sys.executable, "-m", "quantshard", *words[1:]]


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_tutorial(tmp_path: Path) -> None:
    """Training is killed after its second checkpoint; the resumed run equals one that was never killed."""
    model, generate = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    (tmp_path / "texts").mkdir()
    for page in DOCS.glob("*.md"):
        shutil.copy(page, tmp_path / "texts")
    run([sys.executable, "-c", model], tmp_path)
    train = [*command("quantshard train"), "--steps", "12", "--save-every", "4"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(train, cwd=tmp_path, env=ENVIRONMENT, stdout=log, start_new_session=True)
        while "step 9/12" not in (tmp_path / "log").read_text():
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert "resumed after step 8" in run(command("quantshard resume run"), tmp_path)
    run([*train, "--run", "other"], tmp_path)

    def at_step_12(words: list[str]) -> list[str]:
        return [word.replace("step-000100", "step-000012") for word in words]

    assert "equal: " in run(at_step_12(command("quantshard diff")), tmp_path)
    assert "14 weights exact, 0 requantized" in run(at_step_12(command("quantshard export")), tmp_path)
    assert "A checkpoint" in run([sys.executable, "-c", generate], tmp_path)
