"""The wheel and the sdist: what they contain, and that they work when nothing of the source tree is importable."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from quantshard import __version__

ROOT = Path(__file__).parents[1]

TRAIN = """
import torch, quantshard as qs
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
qs.convert(model)
optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-3, preset="lean8")
model(torch.randn(4, 32).bfloat16()).square().mean().backward()
optimizer.step()
qs.checkpoints.save("checkpoint", model, optimizer)
qs.checkpoints.load("checkpoint", model, optimizer)
print(qs.__version__, qs.__file__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    """The sdist of the tree, and the wheel built from this sdist; by suffix."""
    folder = tmp_path_factory.mktemp("packages")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return {path.suffix: path for path in folder.iterdir() if path.suffix in (".whl", ".gz")}


def test_packages_contain_the_tree(packages):
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "quantshard").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    wheel = {*zipfile.ZipFile(packages[".whl"]).namelist()}
    assert packages[".whl"].name == f"quantshard-{__version__}-py3-none-any.whl"
    assert {name for name in wheel if name.startswith("quantshard/")} == package
    with tarfile.open(packages[".gz"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert package <= sdist and {"README.md", "LICENSE", "pyproject.toml", "tests/test_release.py"} <= sdist


@pytest.mark.exhaustive
def test_a_clean_install_trains_and_has_its_command(packages, tmp_path):
    """Dependencies come from this environment, whose own quantshard must not be imported."""
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, packages[".whl"],
        cwd=tmp_path)  # fmt: skip
    version, path = run(sys.executable, "-c", TRAIN, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert version == __version__ and Path(path).is_relative_to(site)
    help_text = run(site / "bin" / "quantshard", "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "train" in help_text and "doctor" in help_text


@pytest.mark.exhaustive
def test_a_new_environment_installs_all_dependencies(packages, tmp_path):
    """From the package index, as a user does; takes minutes."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", f"{packages['.whl']}[cli]", "-c", ROOT / "constraints.txt", cwd=tmp_path)
    version, path = run(python, "-c", TRAIN, cwd=tmp_path).split()
    assert version == __version__ and Path(path).is_relative_to(tmp_path / "venv")
    assert "train" in run(python.parent / "quantshard", "--help", cwd=tmp_path)
