"""A TOML file as data, with the line of each key (which `tomllib` does not give)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

Where = tuple[str | int, ...]
"""The way to a value: keys and places in arrays, as in `("routes", 1, "match", "site")`."""

_SECRET = re.compile(
    r"pass(word|wd|phrase)?|secret|token|credential|api_?key|private_?key|access_?key|auth", re.IGNORECASE
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*):\S*@")
_IN_DSN = re.compile(
    r"(pass(?:word|wd)?\s*=\s*)(?!\{\s*(?:env|file)\b)(?:'(?:\\.|[^'\\])*'|[^\s;&]+)", re.IGNORECASE
)  # not of a reference to a secret, which may be shown
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL)
_SPACE = re.compile(r"(?:[ \t\r]|#[^\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")


@dataclass(frozen=True)
class TomlFile:
    """The data of a file, and its lines."""

    path: Path
    data: dict[str, Any]
    lines: Mapping[Where, int]

    def line(self, where: Sequence[str | int]) -> int:
        """The line of a key, or of the nearest table around it."""
        way = tuple(where)
        while way and way not in self.lines:
            way = way[:-1]
        return self.lines.get(way, 1)


def read(path: Path) -> TomlFile:
    """Read and parse a file; an error names its line."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}", code="PEN-1015", hint="check the name") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", code="PEN-1015") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path.name}:{line}: not UTF-8 text", code="PEN-1001", hint="save it as UTF-8") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = _malformed(path, text, str(error))
    else:
        return TomlFile(path, data, key_lines(text))
    raise ConfigError(message, code="PEN-1001", hint="see https://toml.io for the syntax")


def is_secret(where: Sequence[str | int]) -> bool:
    """True when a key's name says that its value must not be printed."""
    return any(isinstance(part, str) and _SECRET.search(part) for part in where)


def without_password(text: str) -> str:
    """An address or connection string without the password in it."""
    return _IN_DSN.sub(r"\1…", _IN_ADDRESS.sub(r"\1:…@", text))


def key_lines(text: str) -> dict[Where, int]:
    """The line of every table header, key and array element of a valid document."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    """Walks a document that `tomllib` has accepted, so it need not doubt anything."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Where, int] = {}
        self._newlines = 0
        self._counted = 0
        self._elements: dict[Where, int] = {}

    def document(self) -> None:
        table: Where = ()
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            table = self._header() if self.text[self.at] == "[" else self._pair(table)
            self._skip(_SPACE_AND_LINES)

    def _header(self) -> Where:
        line = self._line()
        double = self.text.startswith("[[", self.at)
        self.at += 2 if double else 1
        keys = self._keys()
        self.at += 2 if double else 1
        way: Where = ()
        for key in keys[:-1]:
            way = self._last((*way, key))
        way = (*way, keys[-1])
        if double:
            self._elements[way] = self._elements.get(way, -1) + 1
            self.lines.setdefault(way, line)
        way = self._last(way)
        self.lines[way] = line
        return way

    def _last(self, way: Where) -> Where:
        """The last element so far, when `way` is an array of tables."""
        return (*way, self._elements[way]) if way in self._elements else way

    def _pair(self, table: Where) -> Where:
        line = self._line()
        way = table
        for key in self._keys():
            way = (*way, key)
            self.lines.setdefault(way, line)
        self.at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(way)
        return table

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_SPACE)
            if self.text[self.at] in "\"'":
                quoted = self._take(_STRING)
                keys.append(next(iter(tomllib.loads(f"{quoted} = 0"))))
            else:
                keys.append(self._take(_BARE))
            self._skip(_SPACE)
            if self.text[self.at] != ".":
                return keys
            self.at += 1

    def _value(self, way: Where) -> None:
        first = self.text[self.at]
        if first in "\"'":
            self._take(_STRING)
        elif first == "[":
            self._array(way)
        elif first == "{":
            self._inline_table(way)
        else:
            self._take(_SCALAR)

    def _array(self, way: Where) -> None:
        self.at += 1
        place = 0
        self._skip(_SPACE_AND_LINES)
        while self.text[self.at] != "]":
            self.lines[(*way, place)] = self._line()
            self._value((*way, place))
            place += 1
            self._next_item()
        self.at += 1

    def _inline_table(self, way: Where) -> None:
        self.at += 1
        self._skip(_SPACE_AND_LINES)
        while self.text[self.at] != "}":
            self._pair(way)
            self._next_item()
        self.at += 1

    def _next_item(self) -> None:
        self._skip(_SPACE_AND_LINES)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_SPACE_AND_LINES)

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        assert found is not None, f"no {pattern.pattern} at line {self._line()}"
        self.at = found.end()
        return found.group()

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)

    def _line(self) -> int:
        self._newlines += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._newlines + 1


def _malformed(path: Path, text: str, message: str) -> str:
    lines = text.split("\n")
    found = _AT.search(message)
    number = int(found[1]) if found and found[1] else len(lines)
    column = int(found[2]) if found and found[2] else len(lines[-1]) + 1
    reason = _AT.sub("", message)
    shown = without_password(lines[number - 1].rstrip("\r"))
    key = next((line for line in reversed(lines[:number]) if "=" in line), "")
    if is_secret([key.partition("=")[0], shown]):
        return f"{path.name}:{number}:{column}: {reason}"
    return f"{path.name}:{number}:{column}: {reason}\n    {shown}\n    {' ' * (column - 1)}^"
