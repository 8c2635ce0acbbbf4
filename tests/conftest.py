"""Settings of every test: one thread per process, the same hypothesis examples in every run, tables at its end.

Without a GPU, Triton's interpreter runs the kernels, on the CPU.
"""

import gc
import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks started by a test inherit it

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before quantshard is imported

# `determinism.VARIABLES`: one process runs many tests, and its GPU may be in use when one asks for deterministic mode
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_ALGO", "Ring")

# Inductor otherwise compiles and loads a program for each new cache, to see whether the CPU has AVX as its flags say
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

pytest_plugins = ("tests.journal",)

# Tests leave little garbage in cycles; to look for it as often as Python does takes a sixth of their time.
gc.set_threshold(100_000, 20, 100)

settings.register_profile("house", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("house")

TABLE = "table"
SHARING = "tests/interop/layouts/"
"""A folder whose tests share checkpoints."""
POOL = r"from tests\.(distributed\.(pool|commands|forked)|faults\.drill) import"
PROGRAMS = r"from tests\.(pages|distributed\.(commands|forked|test_cli)|faults\.drill) import"


@cache
def pool_of(file: Path) -> str:
    """Which of two pools of ranks (`tests/distributed/pool.py`) the tests of a file run on; empty if on none.

    Commands, scripts of the documents, and frameworks take as long as all other tests on ranks.
    """
    text, is_distributed = file.read_text(encoding="utf-8"), "tests/distributed/" in file.as_posix()
    if is_distributed and not re.search(PROGRAMS, text):
        return "ranks"
    return "programs" if is_distributed or re.search(POOL, text) else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that use ranks come first: they are the longest units of work."""
    items.sort(key=lambda item: not pool_of(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadscope` keeps each file on one worker, and on one those that share ranks or checkpoints."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file.startswith(SHARING):
                return SHARING
            return pool_of(config.rootpath / file) or file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """What was imported is no garbage; to look through it takes longer than most tests."""
    from tests import once  # the process that hands tests out needs no quantshard

    once.draw_weights_once()
    once.seed_cpu_only()
    once.build_commands_once()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """A worker has imported its tests, and has run none of them."""
    if any(pool_of(item.path) for item in session.items):
        from tests.distributed import pool

        pool.fork_server()


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter() -> Iterator[None]:
    from tests.interpreter import prepared_once

    with prepared_once() if find_spec("triton") else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _no_warnings_given_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which warnings this process has given once, so that no test depends on the ones before it."""
    monkeypatch.setattr("quantshard.errors._warned_topics", set())


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a text at the end of the run; pytest-xdist's workers have no terminal, but hand on properties of tests."""
    return partial(record_property, TABLE)


def tables(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str]]:
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == TABLE and report.when == "call":
                    yield report.nodeid, value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """In the order of their tests' names: the order of workers is that of chance."""
    found = sorted(set(tables(terminalreporter)))
    if found:
        terminalreporter.section("tables")
    for test, text in found:
        terminalreporter.write_line(f"\n{test}\n{text}")
