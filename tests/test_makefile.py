"""`make test-gpu` runs every test file that does something else where there is a GPU."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

QUESTIONS = {"torch.cuda.is_available", "torch.cuda.device_count"}
"""What a test calls that does something else where there is a GPU."""

ONLY_WITHOUT = {
    "tests/modules/test_weight_gradients.py": "its tensors are on the CPU, and kernels are interpreted",
    "tests/modules/test_graphs.py": "its tensors are on the CPU, and skipped where kernels are compiled",
    "tests/test_benchmarks.py": "it counts the host's work on a machine without a GPU",
    "tests/distributed/test_on_kernels.py": "its ranks are on the CPU, and skipped where kernels are compiled",
    "tests/distributed/test_context_parallel.py": "its ranks are on the CPU, and skipped where kernels are compiled",
    "tests/distributed/test_pipelining.py": "its ranks are on the CPU, and experts skipped where kernels are compiled",
    "tests/modules/test_capture.py": "its tensors are on the CPU, and skipped where kernels are compiled",
}
"""Test files that ask for a GPU in order to leave something out, each with its reason."""


def gpu_tests(makefile: str) -> set[str]:
    """The files and folders of GPU_TESTS."""
    [words] = re.findall(r"^GPU_TESTS := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    prefixed = r"\$\(addprefix ([^,]*),([^)]*)\)"
    found = set(re.sub(prefixed, "", words).replace("\\\n", " ").split())
    return found | {
        prefix + name for prefix, names in re.findall(prefixed, words) for name in names.replace("\\\n", " ").split()
    }


def asks_for_a_gpu(source: str) -> bool:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func) in QUESTIONS for call in calls)


def offences(sources: dict[str, str], listed: set[str], without: set[str]) -> list[str]:
    """What GPU_TESTS lacks, and what is listed there, or as an exception, and is no such file. Sources by path."""

    def covers(entry: str, path: str) -> bool:
        return path == entry or path.startswith(f"{entry}/")

    asking = {path for path, source in sources.items() if asks_for_a_gpu(source)}
    found = [f"{path} is missing" for path in asking - without if not any(covers(entry, path) for entry in listed)]
    found += [f"{entry} does not exist" for entry in listed if not any(covers(entry, path) for path in sources)]
    return sorted([*found, *(f"{path} does not ask for a GPU, or is listed" for path in without - (asking - listed))])


def test_every_file_that_asks_for_a_gpu_is_among_the_gpu_tests() -> None:
    """Others may be there too: ranks have GPUs without a question of the test's own."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py")]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    listed = gpu_tests((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert offences(sources, listed, {*ONLY_WITHOUT}) == []


def test_what_the_list_lacks_is_told() -> None:
    asking = "import torch\nON_GPU = torch.cuda.is_available()"
    told = {"a/test_x.py": asking, "a/test_y.py": "import torch", "b/test_z.py": "torch.cuda.device_count() > 1"}
    assert offences(told, {"a", "b/test_z.py"}, set()) == []
    assert offences(told, {"a/test_x.py"}, set()) == ["b/test_z.py is missing"]
    assert offences(told, {"a/test_x.py"}, {"b/test_z.py"}) == []
    assert offences(told, {"a", "b", "c"}, {"a/test_y.py"}) == [
        "a/test_y.py does not ask for a GPU, or is listed",
        "c does not exist",
    ]
    makefile = "X := 1\nGPU_TESTS := a b/c.py \\\n  $(addprefix d/test_,e.py \\\n  f.py) g\n\ntest:\n\techo a"
    assert gpu_tests(makefile) == {"a", "b/c.py", "d/test_e.py", "d/test_f.py", "g"}
