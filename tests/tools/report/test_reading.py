"""What is read of a run's files: all of it, in bounded memory, whatever else stands there."""

from __future__ import annotations

import functools
import http.server
import math
import os
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import fsspec
import numpy as np
import pytest

from quantshard.checkpoints.disk.store import LocalStore, locate
from quantshard.errors import ConfigurationError
from quantshard.tools.report import records
from quantshard.tools.report.history import RunWatch, read_history, step_line
from quantshard.tools.report.page import thinned
from quantshard.tools.report.records import MOST_SAMPLES, MetricTable, RecordFile, StatisticsReader, number
from tests.covering import exhaustive
from tests.tools.report.runs import NAMES, entry, made_run, sampled, write


def steps_of(file: RecordFile) -> list[int]:
    return [record["step"] for record in file.records()]


def test_the_line_of_a_step() -> None:
    figures = entry(3, loss=1.5, skipped_steps=2, heldout_loss=2.0, heldout_loss_ema="nan")
    assert step_line(figures, 9) == (
        "step 3/9  loss 1.5000  lr 1.00e-03  2,048 tokens/s  2 steps skipped  held-out loss 2.0000  of the average nan"
    )
    odd = {"step": 1, "loss": "\x1b[2J", "lr": [], "skipped_steps": {}}
    assert step_line(odd, 3) == "step 1/3  loss \x1b[2J  lr []  None tokens/s"  # escaped where it is shown


def test_only_what_was_added_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "metrics.jsonl", []
    before = LocalStore.read_range
    monkeypatch.setattr(LocalStore, "read_range", lambda s, p, a, b: asked.append(b - a) or before(s, p, a, b))
    file = RecordFile(LocalStore(), str(path))
    assert not file.was_rewritten() and steps_of(file) == []
    write(path, [entry(step) for step in range(1, 1501)])
    assert steps_of(file) == list(range(1, 1501))
    with open(path, "a") as out:
        out.write('{"step": 1501, "lo')
    assert not file.was_rewritten() and steps_of(file) == [] and file.torn
    with open(path, "a") as out:
        out.write('ss": 3}\n')
    asked.clear()
    assert not file.was_rewritten() and steps_of(file) == [1501] and not file.torn
    assert sum(asked) < 200, "the whole file was read again"


def test_a_file_that_was_written_anew_is_read_again(tmp_path: Path) -> None:
    """As a resume does it: shorter, or by now as long as before."""
    path = tmp_path / "metrics.jsonl"
    file = RecordFile(LocalStore(), str(path))
    write(path, [entry(step) for step in range(1, 7)])
    assert steps_of(file) == [1, 2, 3, 4, 5, 6]
    write(path, [entry(step) for step in range(1, 4)])
    assert file.was_rewritten() and steps_of(file) == [1, 2, 3] and not file.was_rewritten()
    write(path, [entry(step, loss=1.0) for step in range(1, 9)])
    assert file.was_rewritten() and steps_of(file) == list(range(1, 9))


def test_lines_that_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "AT_ONCE", 4096)
    path = tmp_path / "metrics.jsonl"
    bad = [b"[" * 3000, b"\xff\xfe", b"[1]", b'{"a": [1', b"2]}", b"9" * 3500, b"", b'{"x": "' + b"y" * 20000 + b'"}']
    lines = [b'{"step": 1}', *bad, b'{"step": 2}', b'{"step": 3}, {"step": 4}', b'{"step": 5}']
    path.write_bytes(b"\n".join(lines) + b'\n{"step": 6')
    file = RecordFile(LocalStore(), str(path))
    assert steps_of(file) == [1, 2, 5] and file.broken == len(bad) + 1 and file.torn


def test_figures_of_any_kind() -> None:
    table = MetricTable.of([
        {"step": 1, "loss": 2, "text": "x", "flag": True, "memory.weights_bytes": 3, "big": 10**400},
        {"step": 2, "loss": "nan", "new": 1.5}, {"step": -1, "loss": 1}, {"loss": 1}, {"step": "3"}, {"step": 3},
        {"step": 4, "loss": math.nan, "new": "inf", "big": 1},
    ])  # fmt: skip
    assert table.steps.tolist() == [1, 2, 3, 4] and set(table.columns) == {"loss", "memory.weights_bytes", "new", "big"}
    assert np.isinf(table.columns["loss"]).tolist() == [False, True, False, True]
    assert table.there("loss")[1].tolist() == [2.0]
    assert table.there("new")[0].tolist() == [2] and math.isnan(table.columns["new"][2])
    assert number("nan") == number("-inf") == number(math.nan) == math.inf and math.isnan(number([1]))


def test_steps_that_were_trained_twice_count_once() -> None:
    table = MetricTable.of(
        {"step": step, "loss": 10 * at + step}
        for at, steps in enumerate(([1, 2, 3, 4, 5], [3, 4], [4, 5, 6]))
        for step in steps
    )
    assert table.steps.tolist() == [1, 2, 3, 4, 5, 6] and table.columns["loss"].tolist() == [1, 2, 13, 24, 25, 26]


def test_columns_have_a_bound() -> None:
    table = MetricTable.of([{"step": 1, **{f"key{number}": 1 for number in range(500)}}])
    assert len(table.columns) == records.MOST_COLUMNS


def test_thinned_curves_keep_their_spikes() -> None:
    values = np.sin(np.arange(100_003) / 5000)
    values[[31_415, 100_002]] = 9, -9
    for most in (4, 5, 100, 1999):
        kept = thinned(values, most)
        assert len(kept) <= most and {0, 31_415, 100_002} <= set(kept.tolist()) and (np.diff(kept) > 0).all()
    assert thinned(values[:7], 7).tolist() == list(range(7))


def test_samples_are_spread_over_the_run() -> None:
    reader = StatisticsReader()
    reader.add(sampled(step) for step in range(10, 100_001, 10))
    steps = [step for step, _ in reader.samples]
    assert steps[0] == 10 and len(set(np.diff(steps).tolist())) == 1 and steps[-1] > 98_000
    assert MOST_SAMPLES <= len(steps) < 2 * MOST_SAMPLES
    assert reader.samples[-1][1]["input", "amax"][NAMES[0]] == 1.0 + steps[-1]


def test_a_step_that_comes_again_replaces_later_samples() -> None:
    reader = StatisticsReader()
    reader.add(sampled(step, amax=9.0) for step in range(1, 101))
    reader.add([sampled(50, amax=2.0), sampled(51, amax=2.0)])
    assert [step for step, _ in reader.samples] == [*range(1, 52)]
    assert [sample[1]["input", "amax"][NAMES[0]] for sample in reader.samples[-3:]] == [9.0, 2.0, 2.0]


def test_alarms_and_rows_of_anybody() -> None:
    reader = StatisticsReader()
    odd = [
        {"step": 1, "rows": 3, "alarms": "x"},
        {"step": 2, "rows": [1, {"name": 3}, {"name": "a", "role": [], "x": "y"}]},
    ]
    reader.add([*odd, {"step": 3, "rows": [{"name": "n" * 9999, "amax": "inf"}], "alarms": [1, {"kind": ["k"] * 999}]}])
    reader.add([{"step": 4, "alarms": [{"kind": "nan", "text": "t" * 9999}] * 1000}])
    assert reader.counts["nan"] == 1000 and len(reader.alarms) == 400 and len(reader.alarms[-1].text) == 300
    assert reader.samples == [(3, {("", "amax"): {"n" * 300: math.inf}})]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of a folder, by a server that knows no ranges."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_run_is_read_by_path_and_by_url(tmp_path: Path, served: str) -> None:
    run = made_run(tmp_path / "run")
    memory = fsspec.filesystem("memory")
    memory.put(str(run) + "/", "/report-test/run/", recursive=True)
    try:
        found = [read_history(where) for where in (run, f"file://{run}", f"{served}/run", "memory://report-test/run")]
    finally:
        memory.rm("/report-test", recursive=True)
    for read in found:
        assert read.name == "run" and read.metrics.steps.tolist() == list(range(1, 41)) and not read.notes
        assert read.starts[1]["step"] == 20 and read.config["launch.processes"] == 2
        assert len(read.statistics.samples) == 40
        assert read.tokens()[-1] == 40 * 2048 and read.seconds()[-1] == pytest.approx(40)


def test_what_a_server_without_ranges_sends_is_cut(tmp_path: Path, served: str) -> None:
    run = made_run(tmp_path / "run")
    write(run / "metrics.jsonl", [entry(41)], "a")
    store, place = locate(f"{served}/run/metrics.jsonl")
    file = RecordFile(store, place)
    assert steps_of(file) == list(range(1, 42)) and file.broken == 0


def test_no_link_is_followed_and_damage_is_named(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    secret = tmp_path / "secret.jsonl"
    write(secret, [{"step": 1, "password": 1234}])
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(ConfigurationError, match=r"metrics.jsonl: it is a link, and links are not followed here"):
        read_history(run)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(ConfigurationError, match=r"it is no regular file but a pipe"):
        read_history(run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_text('x\n{"step": 1, "loss": 2}\n{"st')
    read = read_history(run)
    assert [note.rpartition("metrics.jsonl: ")[2] for note in read.notes] == [
        "1 line is no record, and left out",
        "its last line was cut off, or is still being written, and is left out",
    ]
    (run / "config.toml").unlink()
    with pytest.raises(ConfigurationError, match=r"there is no run in .*run: it has no config.toml$"):
        read_history(run)


@pytest.mark.parametrize(
    ("line", "name"),
    exhaustive(
        product([b"\n", b"x\n", None], ["metrics.jsonl", "starts.jsonl"]),
        [(b"\n", "metrics.jsonl"), (b"x\n", "starts.jsonl"), (None, "metrics.jsonl")],
    ),
    ids=repr,
)
def test_reading_takes_seconds_whatever_a_file_holds(tmp_path: Path, name: str, line: bytes | None) -> None:
    """4 MB of lines that are no records, or, with None, 20 GB of zeros in a file that has no blocks for them."""
    run = made_run(tmp_path / "run", planned=50)
    with open(run / name, "ab") as file:
        if line is None:
            file.truncate(20 << 30)
        else:
            file.write(line * ((4 << 20) // len(line)))
    began = time.process_time()
    read = read_history(run)
    watch = RunWatch(run)
    watch.poll(10)
    assert time.process_time() - began < 6
    if line is not None or name != "metrics.jsonl":  # otherwise only the last bytes are read, which are zeros
        assert (read.metrics.steps.tolist(), watch.step) == (list(range(1, 41)), 40)
    if line is None and name == "metrics.jsonl":
        assert any("were not read" in note for note in read.notes)


def test_the_end_of_long_statistics_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "AT_ONCE", 4096)
    monkeypatch.setattr(records, "MOST_BYTES", 10 * 4096)
    run, alarm = made_run(tmp_path / "run", steps=10), {"kind": "loss", "text": "a spike"}
    write(run / "statistics.jsonl", [sampled(step, (alarm,) if step in (1, 2000) else ()) for step in range(1, 2001)])
    read = read_history(run)
    assert 1800 < read.statistics.samples[0][0] < 2000 and read.statistics.samples[-1][0] > 1900
    assert [entry.step for entry in read.statistics.alarms] == [2000]
    (note,) = read.notes
    assert "statistics.jsonl" in note and "were not read" in note
