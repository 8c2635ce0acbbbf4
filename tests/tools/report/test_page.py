"""The page of `report`: what it says, how large it is, and that texts of other people stay texts."""

from __future__ import annotations

import json
import re
import resource
import time
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quantshard.tools.report.history import read_history
from quantshard.tools.report.page import differences, final_figures, is_report, labels, render
from tests.tools.report.runs import entry, made_run, write

NOW = datetime(2026, 11, 24, 7, 30, tzinfo=timezone.utc)


class PageReader(HTMLParser):
    """The tables of a page as lists of cells, and its elements and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, text: str) -> None:
        last = self.elements[-1][0] if self.elements else ""
        if last in ("td", "th", "meter") and text.strip():
            self.rows[-1][-1] += text.strip()
        if last == "script" and text.strip():
            self.scripts.append(text)

    @property
    def data(self) -> dict[str, Any]:
        """What the script of the page draws."""
        return json.loads(self.scripts[0])


def test_what_a_page_says(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "one"), made_run(tmp_path / "two", steps=30, lr=3e-3, recipe="nvfp4", planned=50)]
    text = render([read_history(run) for run in runs], NOW)
    page = PageReader(text)
    for row in (
        ["", "one", "two"],
        ["steps", "40 of 40", "30 of 50"],
        ["best held-out loss", "2.5250 (step 40)", "2.5333 (step 30)"],
        ["tokens", "81,920", "61,440"],
        ["tokens/s (median)", "2,048", "2,048"],
        ["peak memory", "1.0 GiB", "1.0 GiB"],
        ["time in steps", "0:00:40", "0:00:30"],
        ["alarms", "1 saturation", "1 saturation"],
        ["lr", "0.001", "0.003"],
        ["recipe", "mxfp8", "nvfp4"],
        ["NCCL_ALGO", "Ring"],
        ["3", "saturation", "a fifth of the codes is the largest one"],
    ):
        assert row in page.rows, row
    assert ["global_batch", "16", "16"] not in page.rows  # equal, and only in the list of all settings
    assert [chart["title"] for chart in page.data["charts"]][:2] == ["Loss", "Tokens per second"]
    one, two = page.data["runs"]
    assert one["curves"]["heldout_loss"][0] == [10, 20, 30, 40] and two["restarts"] == [15]
    assert one["axes"]["tokens"][1][-1] == 81920 and one["axes"]["time"][1][-1] == 40
    amax = page.data["maps"][0]["maps"][0]
    assert (amax["role"], amax["statistic"], len(amax["rows"])) == ("weight", "amax", 2)
    assert amax["rows"][1][:3] == [1, 2.0, 3.0] and len(amax["rows"][0]) == 1 + 40
    assert is_report(text[:4096].encode()) and not is_report(b"<!doctype html><title>quantshard report</title>")


def test_it_asks_nobody_for_anything(tmp_path: Path) -> None:
    text = render([read_history(made_run(tmp_path / "run"))])
    page = PageReader(text)
    assert "http:" not in text and "https:" not in text and "url(" not in text
    assert not [
        at for tag, at in page.elements if tag in ("link", "img", "iframe", "object") or {"src", "srcset"} & at.keys()
    ]
    assert all(str(at["href"]).startswith("#") for _, at in page.elements if "href" in at)
    policy = next(at["content"] for _, at in page.elements if at.get("http-equiv") == "Content-Security-Policy")
    assert re.fullmatch(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='", str(policy))


BAD = "</script></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e\x1b[2J{{ 7 * 7 }}"


def test_texts_of_anybody_stay_texts(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    bad = json.dumps(BAD)[1:-1]
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f'note = "{bad}"\n"{bad}" = 1\n' + config)
    write(run / "metrics.jsonl", [{"step": 41, "loss": 1, BAD[:70]: 3, "x": BAD}], "a")
    write(run / "starts.jsonl", [{"step": BAD, "mesh": BAD, "environment": {BAD: BAD, "variables": BAD}}], "a")
    row = {"name": BAD, "role": BAD, BAD: 1.0}
    write(run / "statistics.jsonl", [{"step": 41, "rows": [row], "alarms": [{"kind": BAD, "text": BAD}]}], "a")
    history = read_history(run)
    page = PageReader(text := render([history]))
    assert "<img" not in text and len(page.scripts) == 2 and "owned" not in page.scripts[1]
    assert not {"\x1b", "\u202e"} & set(text) and "49" not in [cell for row in page.rows for cell in row]
    assert any(BAD[:40] in cell for row in page.rows for cell in row)  # it is shown, as it is
    assert page.data["charts"][-1]["title"] == BAD[:70]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    histories = [read_history(made_run(tmp_path / folder / "run", steps=2)) for folder in ("a", "b")]
    assert labels(histories) == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_a_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 3\n")
    history = read_history(tmp_path)
    assert final_figures(history)["steps"] == "0 of 3" and PageReader(render([history])).data["charts"] == []


def test_figures_in_words() -> None:
    assert differences([{"a": 1, "b": True}, {"a": 1, "b": False, "c": ["x"]}]) == [
        ("b", ["on", "off"]),
        ("c", ["–", "x"]),
    ]
    assert differences([{"a": "x" * 9999}, {"a": 1}])[0][1][0].endswith("…")


@pytest.mark.parametrize("steps", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_pages_of_long_runs_are_small_and_soon_made(tmp_path: Path, steps: int) -> None:
    """A million steps in 20 s and 5 MB; no spike is lost."""
    run = made_run(tmp_path / "run", steps=10, planned=steps)
    spike = steps * 2 // 3
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            more = {"mfu": 0.4 + step % 7 / 100, "data_wait_s": step % 11 / 1e4, "loss": 2 + step * 37 % 97 / 97}
            file.write(json.dumps(entry(step, **more | ({"loss": 31.0} if step == spike else {}))) + "\n")
    began = time.process_time()
    page = render([read_history(run)])
    seconds = time.process_time() - began
    assert seconds < 20 and len(page.encode()) < 5_000_000, (seconds, len(page))
    curve = PageReader(page).data["runs"][0]["curves"]["loss"]
    assert curve[1][curve[0].index(spike)] == 31 and len(curve[0]) <= 2002 and len(curve[2][0]) == 150
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB
