"""Docstrings, comments and local names read as plain English: limits on the words that made the library hard to read.

The counters are simple. A sentence that passes may still be unclear; CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "quantshard"
NAMES = set(
    "found given told held kept asked wanted known taken made left read own each at others other place seen stored "
    "saved here there anew again one both said shown drawn needed used tried begun written noted chosen joined laid "
    "spent meant".split()
)
"""Participles and pronouns: names that say how a value was obtained, not what it is."""
MARKERS = re.compile(
    r"\b(told|tells?|is said|said|says|besides?|behind|anew|(?:that|those) of|of which|of whom|whose|(?:is|are) none"
    r"|gives none|anybody|nobody|somebody|whoever|wholly|alike|likewise|meanwhile|at hand|may be)\b"
)
NO_SUBJECT = re.compile(r"(Of|What|That of|Those of|The same|By which|Whose|Whom|In which|Which|As of|As)\b")
LIMITS = {"markers per 1000 words": 3.0, "names of locals in 1000": 5.0, "docstrings without a subject in 1000": 5.0}


def texts(source: str, parsed: ast.AST) -> Iterator[tuple[str, bool]]:
    """Docstrings and the strings below constants, and comments; with whether it is a docstring."""
    for node in ast.walk(parsed):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                yield str(child.value.value).strip(), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:)", token.string):
            yield token.string.lstrip("# "), False


def counts(sources: list[str]) -> dict[str, float]:
    words = markers = names = odd_names = docstrings = without_subject = 0
    for source in sources:
        parsed = ast.parse(source)
        for text, is_docstring in texts(source, parsed):
            words += len(text.split())
            markers += len(MARKERS.findall(text))
            docstrings += is_docstring
            without_subject += is_docstring and bool(NO_SUBJECT.match(text))
        stored = [n.id for n in ast.walk(parsed) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        names += len(stored)
        odd_names += sum(name in NAMES for name in stored)
    shares = (markers / max(words, 1), odd_names / max(names, 1), without_subject / max(docstrings, 1))
    return {name: 1000 * share for name, share in zip(LIMITS, shares, strict=True)}


def test_the_package_is_written_in_plain_english() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    above = {name: count for name, count in counts(sources).items() if count > LIMITS[name]}
    assert len(sources) > 200 and not above


def test_dialect_is_counted() -> None:
    source = '"""Of an input all, told to nobody."""\nfound = 1\nvalues = 2  # said behind it\n'
    assert counts([source]) == {
        "markers per 1000 words": 1000 * 4 / 10,
        "names of locals in 1000": 500.0,
        "docstrings without a subject in 1000": 1000.0,
    }
