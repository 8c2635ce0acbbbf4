"""The page of `report` in a real browser: what its script draws and runs.

Chromium runs without a window; without one these tests are skipped (CONTRIBUTING.md says how to get it).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from quantshard.tools.report.history import read_history
from quantshard.tools.report.page import render
from tests.tools.report.runs import made_run, sampled, write
from tests.tools.report.test_page import BAD

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: apt install chromium, or the like"),
    pytest.mark.slow,
]
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --v=0"
).split()


def browse(page: Path, *options: str) -> str:
    """What Chromium prints of a page, its own log on standard error included."""
    folder = page.parent / f"{page.stem}-profile"
    line = [str(BROWSER), *QUIET, f"--user-data-dir={folder}", *options, page.as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return done.stdout


def test_a_page_in_a_browser(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "one"), made_run(tmp_path / "two", steps=30, recipe="nvfp4", planned=50)]
    write(runs[1] / "metrics.jsonl", [{"step": 31, "loss": "nan", "of_ours": 7}, {"step": 32, "of_ours": 8}], "a")
    write(runs[0] / "statistics.jsonl", [sampled(50, amax="nan")], "a")
    page = tmp_path / "page.html"
    page.write_text(render([read_history(run) for run in runs]), encoding="utf-8")
    shown = browse(page, "--dump-dom")
    assert 'data-drawn="7"' in shown and shown.count("<canvas") == 7
    assert "two: heldout_loss" in shown and "weight: sqnr_db" in shown
    assert "layers.0.proj.weight, step 50: not finite" in shown


def test_the_page_runs_its_own_script_alone(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=3)
    (run / "config.toml").write_text(f"note = {json.dumps(BAD)}\n" + (run / "config.toml").read_text())
    write(run / "metrics.jsonl", [{"step": 4, "loss": 1, BAD[:70]: 3}], "a")
    write(run / "statistics.jsonl", [{"step": 4, "rows": [{"name": BAD, "role": BAD, BAD: "inf"}]}], "a")
    page = tmp_path / "page.html"
    text = render([read_history(run)])
    page.write_text(text, encoding="utf-8")
    shown = browse(page, "--dump-dom")
    assert 'data-drawn="7"' in shown and "<title>run – quantshard report</title>" in shown
    other = '<script>document.documentElement.dataset.drawn = "other"</script></body>'
    page.write_text(text.replace("</body>", other), encoding="utf-8")
    with pytest.raises(AssertionError, match="Content Security Policy"):
        browse(page, "--dump-dom")
