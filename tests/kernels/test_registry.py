"""The case table of kernels: no Triton kernel lacks a row, every case is right and detects one wrong element, and the
benchmarks and the tests run every row."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import quantshard
from benchmarks import kernel_speed as benchmark
from tests.kernels import cases as table
from tests.kernels.cases.base import TOO_FAR, Bound, KernelCase, agrees, bytes_of, values_of
from tests.memory import memory_checked

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = Path(quantshard.__file__).parent / "kernels"
LEAST, SMALL, FULL = (1, 1), (5, 34), (131, 257)
BF16 = torch.bfloat16
ONE_PROGRAM = {"corrections_kernel"}
"""It has a program for each group of parameters."""

EVERY = [(row, name) for row in table.ROWS for name in row.cases]
FIRST = [(row, next(iter(row.cases))) for row in table.ROWS]
BOUNDED = [(row, name) for row, name in EVERY if row.otherwise == TOO_FAR]


def cells():
    """(Row, case, shape), of each row every sixth where programs of a kernel are not full, and every third where there
    are few programs; of each optimizer a step (tests/optimizers/test_on_kernels.py has all recipes and states)."""
    for number, row in enumerate(table.ROWS):
        for turn, name in enumerate(row.cases):
            if row.uneven == SMALL:
                chosen = turn < 4
            else:
                chosen = turn % 6 == 0 and (turn == 0 or len(row.cases) > 4)
                if not chosen:
                    # Another format than in the row before; beyond the first, of every second three.
                    left = turn % 3 > 0 and (turn % 3 == 1 + (turn // 3 + number) % 2 or turn // 3 % 2 == 1)
                    marks = pytest.mark.exhaustive if left else ()
                    yield pytest.param(row, name, SMALL, id=f"{name}, small", marks=marks)
            yield pytest.param(row, name, row.uneven, id=name, marks=() if chosen else pytest.mark.exhaustive)


@pytest.fixture(autouse=True, scope="module")
def _in_tensors_alone():
    """No kernel reads or writes outside of a tensor."""
    with memory_checked():
        yield


def case_of(row, name, shape, dtype=BF16) -> KernelCase:
    return row.make(values_of(shape, DEVICE).to(dtype), **row.cases[name])


def spoiled(x: Tensor) -> Tensor:
    """With a single element, the last one, off: by a bit, or of a float by more than its size."""
    x = x.clone().contiguous()
    last = x.view(-1)[-1:]
    if x.is_floating_point():
        last.copy_(torch.where(last.isfinite(), last + 0.5 + last.abs(), 0.0))
    else:
        last ^= 1
    return x


def check(case: KernelCase) -> list[Tensor | None]:
    """It is right, and told to be wrong where any of its results is. Returns the results."""
    launched = list(case.launch())
    results = list(zip(launched, case.oracle(), strict=True))
    assert [place for place, (found, expected) in enumerate(results) if not agrees(found, expected)] == []
    for place, (found, expected) in enumerate(results):
        if found is not None and found.numel():
            assert not agrees(spoiled(found), expected), place
            assert not agrees(found, None) and not agrees(None, expected)
    return launched


@pytest.mark.parametrize(("row", "name", "shape"), [*cells()])
def test_kernels_are_their_oracles(row, name, shape):
    """Where programs of a kernel are not full; what must be moved are results at least."""
    case = case_of(row, name, shape)
    assert case.moved >= bytes_of(*check(case))


def bounded():
    """(Row, case, dtype): one of the two dtypes of every second, in turns."""
    for turn, (row, name) in enumerate(BOUNDED):
        for place, dtype in enumerate((torch.float32, torch.float16)):
            marks = () if turn % 4 == 2 * place else pytest.mark.exhaustive
            yield pytest.param(row, name, dtype, id=f"{name}-{dtype}", marks=marks)


@pytest.mark.parametrize(("row", "name", "dtype"), [*bounded()])
def test_bounds_of_other_dtypes(row, name, dtype):
    check(case_of(row, name, row.uneven, dtype))


def tiles():
    """(Row, case, shape, dtype) of one element, and of whole tiles in `make test-all`."""
    for row, name in FIRST:
        yield pytest.param(row, name, LEAST, torch.float32, id=f"{name}-least")
        yield pytest.param(row, name, FULL, torch.float16, id=f"{name}-full", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("row", "name", "shape", "dtype"), [*tiles()])
def test_one_element_and_whole_tiles(row, name, shape, dtype):
    check(case_of(row, name, shape, dtype))


# No kernel without a row, and no row without its kernels


parsed = cache(ast.parse)


def launched_from_python(sources: dict[str, str]) -> set[str]:
    """Names of functions that are decorated with `triton.jit` and whose names end in `_kernel`, or are what
    `launch_kernel` launches."""
    trees = [parsed(source) for source in sources.values()]
    every = [node for tree in trees for node in ast.walk(tree)]
    launched = {
        ast.unparse(node.args[0]).split(".")[-1]
        for node in every
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch_kernel"
    }
    compiled = [
        node.name
        for node in every
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]
    found = [name for name in compiled if name.endswith("_kernel") or name in launched]
    assert len(set(found)) == len(found), "two kernels have one name"
    return set(found)


def without_rows(sources: dict[str, str]) -> set[str]:
    return launched_from_python(sources) - {name for row in table.ROWS for name in row.kernels}


def test_every_kernel_has_a_row():
    sources = {str(path): path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")}
    assert len(launched_from_python(sources)) == len({name for row in table.ROWS for name in row.kernels}) >= 30
    assert without_rows(sources) == set()
    new = "@triton.jit\ndef {}(x):\n    pass\n\n\ndef run(x):\n    launch_kernel(module.{}, (1,), x.device, x)\n"
    assert without_rows(sources | {"new.py": new.format("new_kernel", "new_kernel")}) == {"new_kernel"}
    assert without_rows(sources | {"new.py": new.format("other", "other")}) == {"other"}
    assert without_rows(sources | {"new.py": new.format("called_by_kernels", "sum_kernel")}) == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: next(iter(row.cases)))
def test_a_row_launches_its_kernels_in_several_programs(row, launches):
    """All of them in the cases that say so, and others only that have rows of their own."""
    seen: set[str] = set()
    for name in row.cases:
        case = case_of(row, name, row.uneven)
        launches.clear()
        case.launch()
        assert {kernel for kernel, _ in launches} <= {kernel for other in table.ROWS for kernel in other.kernels}
        seen |= {kernel for kernel, programs in launches if programs > (kernel not in ONE_PROGRAM)}
        if seen >= set(row.kernels):
            return
    raise AssertionError(f"no case launches {set(row.kernels) - seen}, or none in several programs")


# Who runs the rows


@pytest.fixture
def ran(monkeypatch) -> Counter[str]:
    """How often a case of each row was made; it is right without a kernel."""
    made: Counter[str] = Counter()

    def counted(first, x, **options):
        made[first] += 1
        return KernelCase(list, list, 1)

    rows = [row._replace(make=partial(counted, next(iter(row.cases)))) for row in table.ROWS]
    monkeypatch.setattr(table, "ROWS", tuple(rows))
    return made


def test_the_benchmarks_run_every_row(ran):
    timed = benchmark.cases(torch.ones(1, 1))
    assert all(make().is_right() for make in timed.values())
    assert ran == {next(iter(row.cases)): len(row.timed) for row in table.ROWS} and min(ran.values()) > 0


def test_every_row_is_tested():
    cases = [name for _, name in EVERY]
    assert len(set(cases)) == len(cases) == sum(len(row.cases) for row in table.ROWS)
    assert [row for row, _ in FIRST] == list(table.ROWS)


def test_no_bound_holds_for_what_is_no_number():
    exact, error = torch.tensor([1.0, 3e38, 1e39], dtype=torch.float64), torch.full((3,), 1e-3, dtype=torch.float64)
    assert agrees(torch.tensor([1.0009, 3e38, float("inf")]), Bound(exact, error))
    for wrong in (
        [float("nan"), 3e38, 3e38],
        [1.0, float("inf"), 3e38],
        [1.0, 3e38, float("nan")],
        [1.002, 3e38, 3e38],
    ):
        assert not agrees(torch.tensor(wrong), Bound(exact, error))
    assert not agrees(torch.ones(1), Bound(exact, error)) and not agrees(torch.ones(3).half(), torch.ones(3))
