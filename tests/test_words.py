"""Plain words: messages, docstrings, comments and pages without a few words that readers stumbled over."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted([*ROOT.glob("src/penstock/**/*.py"), *ROOT.glob("examples/*.py")])
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/penstock/cli/templates/*")])

BANNED = {
    r"anew": "again, or from the beginning",
    r"mend(s|ed|ing)?": "fix, correct, repair",
    r"told": "say who learns what: reports, asks, acknowledges",
    r"stands?": "is",
    r"of those (that|which|who)": "name them",
    r"behind": "after, in an order; behind is for lag only",
    r"so long": "for this long, at most this long",
    r"of before": "earlier",
    r"goes? before": "takes precedence over",
    r"put back from": "restored from",
    r"whoever": "the process, the thread, the caller that",
}

WAIVED = re.compile(
    r"left[^.]{0,40}behind|leaves[^.]{0,10}\s*(nothing behind)|how far a source is behind"  # its ordinary senses
    r"|journal\.told|`told`|def told|stand still|long-stand\w+|stand-in|stand in for|so long as",
    re.IGNORECASE | re.DOTALL,
)
_WORDS = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Strings and comments of a Python file, with the line on which each begins; of any other file, the whole."""
    whole = path.read_text()
    if path.suffix != ".py":
        yield 1, whole
        return
    for node in ast.walk(ast.parse(whole)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(whole).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found(line: int, text: str) -> Iterator[str]:
    waived = [match.span() for match in WAIVED.finditer(text)]
    for match in _WORDS.finditer(text):
        if not any(start <= match.start() and match.end() <= end for start, end in waived):
            word = next(why for pattern, why in BANNED.items() if re.fullmatch(pattern, match.group(), re.IGNORECASE))
            yield f"line {line + text.count(chr(10), 0, match.start())}: {match.group()!r} (better: {word})"


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_its_words_are_plain(path):
    assert [each for line, text in texts(path) for each in found(line, text)] == []


def test_a_banned_word_is_found_and_an_ordinary_one_is_not():
    assert list(found(1, "the copy begins\nanew")) == ["line 2: 'anew' (better: again, or from the beginning)"]
    assert list(found(1, "how far a source is behind, and what a crash left behind")) == []
