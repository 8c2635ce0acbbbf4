"""What works without the packages of the command line, and what `quantshard` says there."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from quantshard.__main__ import EXTRA
from quantshard.foreign import tomllib

PACKAGE = Path(__file__).parents[3] / "quantshard"
HIDDEN = f"import sys; sys.modules.update(dict.fromkeys({EXTRA}))\n"
ABOVE = ("__main__", "cli", "trainer")
"""What needs them."""


def without(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDDEN + code], text=True, capture_output=True, timeout=600)


def test_the_extra_is_what_is_looked_for() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]["cli"]
    assert sorted(name.replace("-", "_") for name in declared) == sorted(EXTRA)


@pytest.mark.parametrize("arguments", [["demo"], ["--version"], []])
def test_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """As `python -m quantshard` runs it; a text that a process ends with is shown on stderr, with exit code 1."""
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["quantshard", *arguments])
    monkeypatch.delitem(sys.modules, "quantshard.__main__")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("quantshard", run_name="__main__")
    assert end.value.code == "quantshard: missing packages; run: pip install tomli_w typer"
    assert capsys.readouterr() == ("", "")


def test_the_library_needs_none_of_them() -> None:
    """All modules but those of the command line, and of other frameworks, are imported; Dynamo waits for its use."""
    files = [file.relative_to(PACKAGE.parent).with_suffix("") for file in PACKAGE.rglob("*.py")]
    modules = sorted(
        ".".join(file.parts).removesuffix(".__init__")
        for file in files
        if not {*ABOVE, "integrations", "frameworks"} & set(file.parts)
    )
    assert len(modules) > 150
    imports = f"for name in {modules}: importlib.import_module(name)"
    done = without(f"import importlib, quantshard\nprint('torch._dynamo' in sys.modules)\n{imports}")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
