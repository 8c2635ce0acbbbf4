"""The journal of a run of tests: whatever ends a run, failures are in it, and the next run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import journal

ROOT = Path(__file__).parents[1]

TESTS = """
import os, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "a number\\n" + "line\\n" * 40 + "the end"
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_without_fixture(broken): pass
def test_dies(): os._exit(7)
def test_behind(): pass
def test_last(): pass
"""


def outcomes(folder: Path, *arguments: str) -> dict[str, str]:
    """What the journal holds after a run."""
    plugins = ["-p", "xdist.plugin", "-p", "tests.journal", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-c", os.devnull, f"--rootdir={folder}"]
    command += ["--import-mode=importlib", f"--journal={folder}/j", *arguments, str(folder)]
    few = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take longer than the tests
    done = subprocess.run(command, cwd=ROOT, env=few, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    rows = journal.read(folder / "j")
    return {test.split("test_")[-1]: row["outcome"] for test, row in rows.items()}


@pytest.mark.exhaustive
def test_a_run_that_is_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    ended = {"passes": "passed", "fails": "failed", "skipped": "skipped", "without_fixture": "failed"}
    assert outcomes(tmp_path) == ended | {"dies": "began"}  # all at once
    rows = journal.read(tmp_path / "j")
    told = "\n".join(journal.summary(rows))
    assert told.startswith("1 passed, 1 skipped, 2 failed, 1 cut off\n") and "CUT OFF test_some.py::test_dies" in told
    assert "test_some.py:5: AssertionError: a number\n  line\n" in told and "the end\nassert 1 == 2" in told
    assert told.count(" line\n") == 13 and "ValueError: no fixture" in told
    with (tmp_path / "j").open("a") as file:
        file.write('{"test": "test_some.py::test_behind", "outc')  # cut off in the midst of a line
    half = ended | {"behind": "passed", "last": "passed", "dies": "failed"}
    assert outcomes(tmp_path, "--left", "-n", "1", "--dist", "loadfile") == half  # a worker is lost, and replaced
    (tmp_path / "test_some.py").write_text(TESTS.replace("1 == 2", "1 == 1").replace("os._exit(7)", "pass"))
    assert outcomes(tmp_path, "--failed", "--minutes", "0") == half | {"fails": "passed"}
    assert outcomes(tmp_path, "--failed") == half | {"fails": "passed", "dies": "passed"}
    assert len(outcomes(tmp_path, "--minutes", "0")) == 1  # anew
