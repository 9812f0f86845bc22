"""Rooms that a reader can take in: files, classes and functions of a bounded size."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent

FILE_LINES = 500
CLASS_METHODS = 20
FUNCTION_LINES = 60

WAIVED: dict[str, str] = {}
"""What is still too large. An entry goes when the room is divided; none is added."""


def too_large(path: Path) -> Iterator[tuple[str, str]]:
    """The file, and what in it is over a limit: its name, and how large it is."""
    name, text = str(path.relative_to(PACKAGE)), path.read_text()
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield name, f"{lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            if methods > CLASS_METHODS:
                yield f"{name}:{node.name}", f"{methods} methods"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name}:{node.name}", f"{length} lines"


@cache
def found() -> dict[str, str]:
    """All of it; not at import, which every worker pays for."""
    return {name: size for path in sorted(PACKAGE.rglob("*.py")) for name, size in too_large(path)}


def test_nothing_is_larger_than_a_reader_can_take_in():
    assert {name: size for name, size in found().items() if name not in WAIVED} == {}


def test_every_waiver_is_still_needed():
    assert sorted(WAIVED.keys() - found().keys()) == [], "small enough now: take it off the list"


def test_what_is_over_a_limit_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(CLASS_METHODS + 1))
    body = "    x = 1\n" * FUNCTION_LINES
    (tmp_path / "large.py").write_text(f"class Large:\n{methods}\ndef long():\n{body}" + "\n" * FILE_LINES)
    large = dict(too_large(tmp_path / "large.py"))
    assert set(large) == {"large.py", "large.py:Large", "large.py:long"}


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone: of two that are the same, one ends every run before its first test."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
