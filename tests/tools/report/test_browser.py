"""The page of `report` in a real browser: what its script draws, in light and dark, on a phone, and what it runs.

Chromium runs without a window; without one these tests are skipped (CONTRIBUTING.md says how to get it).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from quantshard.tools.report.history import read_history
from quantshard.tools.report.page import render
from tests.tools.report.runs import made_run, write
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

CHECK = """
<script>
const found = {errors: [], width: innerWidth};
onerror = (text) => found.errors.push(String(text));
document.addEventListener("securitypolicyviolation", (event) => found.errors.push(event.violatedDirective));
const all = (what) => [...document.querySelectorAll(what)];
const lengths = () => all(".chart svg").map((each) => each.querySelectorAll("path.curve").length);
const labels = () => all(".chart svg")[0].textContent;
const point = (kind, share) => {
  const picture = all(".chart svg")[0], box = picture.getBoundingClientRect();
  const at = {clientX: box.left + share * box.width, clientY: box.top + 50, bubbles: true};
  picture.dispatchEvent(new PointerEvent(kind, at));
};
addEventListener("load", () => {
  found.drawn = document.documentElement.dataset.drawn;
  found.unseen = ["whole", "map-controls"].filter((id) => document.getElementById(id).offsetParent === null);
  found.curves = lengths();
  found.finite = !all("path, line, circle").some((each) => /NaN|Infinity/.test(each.outerHTML));
  found.restarts = all(".chart svg")[0].querySelectorAll(".restart").length;
  found.bad = all(".chart svg .bad").length;
  found.overflow = document.documentElement.scrollWidth - innerWidth;
  found.paper = getComputedStyle(document.body).backgroundColor;
  const {width, height} = document.querySelector("canvas"), pixels = document.querySelector("canvas").getContext("2d");
  const painted = pixels.getImageData(0, 0, width, height).data.filter((_, at) => at % 4 === 3);
  found.map = [width, height, painted.every((alpha) => alpha === 255)];
  found.statistics = all("#map-statistic option").map((each) => each.value);
  point("pointermove", 0.5);
  found.tip = document.querySelector(".tip:not([hidden])").innerText;
  const before = labels();
  document.querySelector("#axis input[value=time]").click();
  found.time = labels() !== before && labels().includes(" s");
  document.querySelector("#axis input[value=step]").click();
  document.querySelector(".chart figcaption input").click();
  found.log = labels() !== before;
  document.querySelector(".chart figcaption input").click();
  point("pointerdown", 0.3); point("pointermove", 0.6); point("pointerup", 0.6);
  found.zoomed = labels() !== before && !document.getElementById("whole").hidden;
  document.getElementById("whole").click();
  found.whole = labels() === before;
  document.querySelector("#runs input").click();
  found.hidden = lengths();
  const said = {id: "found", textContent: JSON.stringify(found)};
  parent.document.body.append(Object.assign(parent.document.createElement("pre"), said));
});
</script>
"""


def browse(page: Path, *options: str) -> str:
    """What Chromium prints of a page, its own log on standard error included."""
    folder = page.parent / f"{page.stem}-profile"
    line = [str(BROWSER), *QUIET, f"--user-data-dir={folder}", *options, page.as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return done.stdout


def checked(folder: Path, text: str, width: int, *options: str) -> dict[str, Any]:
    """What a script finds that is added to a page, whose policy allows it then. The page is in a frame, since a window
    of Chromium's has 500 pixels at least."""
    page = folder / f"checked-{width}.html"
    allowed = re.sub(r"(script-src) &#39;sha256-[^&]+&#39;", r"\1 'unsafe-inline'", text)
    inner = escape(allowed.replace("<style>", CHECK + "<style>", 1))
    frame = f'<!doctype html><meta charset="utf-8"><iframe width="{width}" height="844" srcdoc="{inner}"></iframe>'
    page.write_text(frame, encoding="utf-8")
    shown = browse(page, "--dump-dom", "--window-size=1400,900", *options)
    return json.loads(unescape(re.findall(r'<pre id="found">(.*?)</pre>', shown, re.S)[0]))


def test_a_page_in_a_browser(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "one"), made_run(tmp_path / "two", steps=30, recipe="nvfp4", planned=50)]
    write(runs[1] / "metrics.jsonl", [{"step": 31, "loss": "nan", "of_ours": 7}, {"step": 32, "of_ours": 8}], "a")
    text = render([read_history(run) for run in runs])
    phone, found = checked(tmp_path, text, 390), checked(tmp_path, text, 1280, "--force-dark-mode")
    assert phone["width"] == 390 and phone["overflow"] <= 0 and found["width"] == 1280
    assert [found["paper"], phone["paper"]] == ["rgb(20, 23, 26)", "rgb(255, 255, 255)"]
    for each in (phone, found):
        assert each["errors"] == [] and each["finite"] and each["drawn"] == "7"
        assert each["curves"] == [4, 2, 2, 2, 2, 2, 1] and each["hidden"] == [2, 1, 1, 1, 1, 1, 1]
        assert each["unseen"] == ["whole"]  # until something is enlarged
        assert each["restarts"] == 2 and each["bad"] == 1
        assert each["map"] == [40, 2, True] and each["statistics"] == ["amax", "sqnr_db"]
        assert re.search(r"step \d+\s+one: loss", each["tip"]) and each["time"] and each["log"]
        assert each["zoomed"] and each["whole"]


def test_curves_of_many_steps_in_a_browser(tmp_path: Path) -> None:
    """Steps that are equally far apart are told by the first and their distance."""
    text = render([read_history(made_run(tmp_path / "run", steps=150))])
    assert '{"first":1,"apart":1}' in text
    found = checked(tmp_path, text, 1280)
    assert found["errors"] == [] and found["finite"] and found["curves"] == [2, 1, 1, 1, 1, 1]
    assert re.search(r"step (7\d|8\d)\s+run: loss", found["tip"]), found["tip"]  # in the middle


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
