"""Every file and name on ARCHITECTURE.md exists."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from functools import cache, reduce
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quantshard"
PAGE = ROOT / "ARCHITECTURE.md"


def tokens(text: str) -> list[tuple[int, str]]:
    """What stands in backticks, and the files in fenced blocks, each with the number of its line."""
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            found += [(number, path) for path in re.findall(r"[\w/]+\.py\b", line)]
        else:
            found += [(number, token) for token in re.findall(r"`([^`]+)`", line)]
    return found


def is_path(token: str) -> bool:
    return bool(re.fullmatch(r"[\w./]*(?:/|\.(?:py|md))", token))


def is_name(token: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", token))


def located(path: str) -> Path | None:
    """The file or folder that a path of the page means."""
    return next((at for at in (PACKAGE / path, ROOT / path) if at.exists()), None)


@cache
def defined(file: Path) -> set[str]:
    """Names that a file defines: `function`, `Class`, `Class.member`, and `member` alone; arguments too."""
    names: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.update({child.name, prefix + child.name})
                inner = f"{child.name}." if isinstance(child, ast.ClassDef) else prefix
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.update({child.id, prefix + child.id})
            elif isinstance(child, ast.arg):
                names.add(child.arg)
            visit(child, inner)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return names


def in_torch(name: str) -> bool:
    head, *rest = name.split(".")
    return head == "torch" and reduce(lambda at, part: getattr(at, part, None), rest, torch) is not None


def paragraphs(text: str) -> list[list[tuple[int, str]]]:
    """The tokens of each paragraph; a row of a table and an item of a list are paragraphs too."""
    starts = [n for n, line in enumerate(text.splitlines(), 1) if not line.strip() or re.match(r"[|-] |\d+\. ", line)]
    found: dict[int, list[tuple[int, str]]] = {}
    for number, token in tokens(text):
        found.setdefault(bisect_right(starts, number), []).append((number, token))
    return list(found.values())


def wrong(text: str) -> list[str]:
    """The files and names of a page that do not exist.

    A name must be defined in the file before it or behind it in its paragraph, or, where that names no file of Python,
    somewhere in the package.
    """
    everywhere = set().union(*map(defined, PACKAGE.rglob("*.py")))
    found = []
    for paragraph in paragraphs(text):
        files = [located(token) if is_path(token) else None for _, token in paragraph]
        sources = [at if at is not None and at.suffix == ".py" else None for at in files]
        for index, (number, token) in enumerate(paragraph):
            if is_path(token):
                found += [f"line {number}: there is no {token}"] if files[index] is None else []
            elif is_name(token) and not in_torch(token):
                before, behind = reversed(sources[:index]), iter(sources[index:])
                near = [at for at in (next(filter(None, before), None), next(filter(None, behind), None)) if at]
                if token not in (set().union(*map(defined, near)) if near else everywhere):
                    found.append(f"line {number}: {token} is not in {[at.name for at in near] or 'the package'}")
    return found


def test_files_and_names_exist():
    found = wrong(PAGE.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("`formats.py` `Format.by_name`, `tests/test_house.py`, `tools/cli/`, `torch.optim`, `strict=True`", 0),
        ("See `limits.py`\nand there `refusal`.", 0),
        ("`format.py` and `tests/test_nothing.py`", 2),
        ("`formats.py` `quantize_codes`", 1),
        ("`formats.py` `Format.by_nam`, `torch.optimm`", 2),
        ("`formats.py`\n\n`recipe.py` `encode`", 1),
        ("`formats.py` `Format` `errors.py` `limits.py` `Format` `limits.py`", 1),
        ("`thereisnone`", 1),
        ("```\na[nothing.py]\n```", 1),
    ],
)
def test_wrong_names_are_found(text: str, count: int):
    assert len(found := wrong(text)) == count, found


def test_the_page_stays_short():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 360


def test_the_spine_can_be_read_in_a_day() -> None:
    """At most 45 files and 9,500 lines explain how the library works; the page says how many."""
    text = PAGE.read_text(encoding="utf-8")
    spine = re.findall(r"^\| `(\S+\.py)` \|", text.partition("## The spine")[2].partition("\n## ")[0], re.MULTILINE)
    lines = sum(len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in spine)
    assert f"These {len(spine)} files ({lines:,} lines)" in text
    assert len(spine) <= 45 and lines <= 9500


def test_the_package_stays_small() -> None:
    """Before code is added, code that it replaces goes. A capability that needs more lines raises the limit."""
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    assert len(sources) <= 300 and sum(len(source.splitlines()) for source in sources) <= 53_000
