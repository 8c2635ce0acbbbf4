"""ARCHITECTURE.md is true: every file and name in it exists, and its glossary has the words of all names."""

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

ORDINARY = set(
    "accelerate adapter add arguments base batch bias choice class cli command common compat configuration content "
    "conversion convert converted copied counts data demo device dict diff dir disk doctor dora encoded engine "
    "environment error extra factory field file fill filter fit fitted flush form from global input integrations "
    "interface io join left lightning linear load loading lookup loop lora manager max member meshes missing multi "
    "name named needs no non on option output partial patterns peft place private progress protocol pytorch quantshard "
    "reading reason reduction registered report resolved restored running save saving schema screen selection "
    "sequence shape sharding share size suffixes sum system table take terminal timing to torch torchtitan total "
    "totals train trainer training transformers type variant version warning writing".split()
)
"""Words in their everyday sense, which no glossary need explain."""


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


def words_of(name: str) -> set[str]:
    """As {"quantized", "tensor"} of "QuantizedTensor", and {"from", "rank0"} of "from_rank0"."""
    parts = re.findall(r"[A-Z]+\d*(?=[A-Z][a-z])|[A-Z][a-z0-9]+|[A-Z]+\d*|[a-z0-9]+", name)
    return {part.lower() for part in parts}


def singular(word: str) -> str:
    return {"axes": "axis", "axis": "axis", "entries": "entry"}.get(word, word.removesuffix("s"))


def unexplained(glossary: set[str], names: set[str]) -> dict[str, str]:
    """Words of names that neither the glossary nor `ORDINARY` has, in singular or plural, with a name each."""
    known = {singular(word) for word in glossary | ORDINARY}
    return {word: name for name in sorted(names) for word in words_of(name) if singular(word) not in known}


def glossary(text: str) -> set[str]:
    table = text.split("\n## Glossary\n")[1]
    return {word for first in re.findall(r"^\| ([^|]+) \|", table, re.M) for word in re.split(r"[, ]+", first)}


def names_of_package() -> set[str]:
    names = set()
    for file in PACKAGE.rglob("*.py"):
        names |= {part.removesuffix(".py") for part in file.relative_to(PACKAGE).parts} - {"__init__", "__main__"}
        names |= {n.name for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.ClassDef)}
    return names


def test_files_and_names_exist():
    found = wrong(PAGE.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("`formats.py` `Format.by_name`, `tests/test_house.py`, `cli/`, `torch.optim`, `strict=True`", 0),
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


def test_the_glossary_has_all_words():
    found = unexplained(glossary(PAGE.read_text(encoding="utf-8")), names_of_package())
    assert not found, f"not in the glossary of ARCHITECTURE.md: {found}"


def test_unknown_words_are_found():
    assert unexplained({"shard", "axes"}, {"ShardedAxis", "from_shards"}) == {"sharded": "ShardedAxis"}


def test_the_page_stays_short():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 360
