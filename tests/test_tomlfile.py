from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.toml import key_lines, read, without_password

DOCUMENT = '''\
# a comment = "with an equals sign"
name = "x" # [not] a = table

[processing]   # comment
a.b = 1
"quoted key" = 2
'literal.key' = 3

[source]
text = """
[not.a.header]
fake = 1
  \\""" still inside """
literal = \'\'\'
also = "not a key"
\'\'\'
list = [
  "one",   # ] not the end
  "t]w,o",
  { x = 1, y = { z = [ 1,
      2 ] } },
]
after = true
when = 2020-01-01T00:00:00Z

[[routes]]
from = "a#b"
match = { site = "a,}b", "k.e=y" = 'v' }
[routes.nested.deep]
inner = 1

[[routes]]
from = "b"
  [[routes.subs]]
  n = 1
  [[routes.subs]]
  n = 2
[top.dotted."x.y"]
end = 5
'''


def every_way(value: Any, way: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in children for found in [(*way, key), *every_way(child, (*way, key))]]


def line_of(needle: str, nth: int = 1) -> int:
    lines = [number for number, line in enumerate(DOCUMENT.split("\n"), 1) if needle in line]
    return lines[nth - 1]


class TestLines:
    @pytest.mark.parametrize(
        ("way", "needle", "nth"),
        [
            (("name",), 'name = "x"', 1),
            (("processing",), "[processing]", 1),
            (("processing", "a", "b"), "a.b", 1),
            (("processing", "quoted key"), "quoted key", 1),
            (("processing", "literal.key"), "literal.key", 1),
            (("source", "text"), 'text = """', 1),
            (("source", "literal"), "literal = '", 1),
            (("source", "list", 1), "t]w,o", 1),
            (("source", "list", 2, "x"), "x = 1", 1),
            (("source", "list", 2, "y", "z", 1), "2 ] } }", 1),
            (("source", "after"), "after", 1),
            (("source", "when"), "when", 1),
            (("routes", 0), "[[routes]]", 1),
            (("routes", 0, "match", "k.e=y"), "match", 1),
            (("routes", 0, "nested", "deep", "inner"), "inner", 1),
            (("routes", 1), "[[routes]]", 2),
            (("routes", 1, "from"), 'from = "b"', 1),
            (("routes", 1, "subs", 0, "n"), "n = 1", 1),
            (("routes", 1, "subs", 1, "n"), "  n = 2", 1),
            (("top", "dotted", "x.y", "end"), "end = 5", 1),
        ],
    )
    def test_a_key_stands_on_this_line(self, way, needle, nth):
        assert key_lines(DOCUMENT)[way] == line_of(needle, nth)

    def test_every_key_that_tomllib_finds_has_a_line_and_no_other_has(self):
        found = set(key_lines(DOCUMENT))
        ways = set(every_way(tomllib.loads(DOCUMENT)))
        assert found <= ways
        # Tables that only a longer header implies have no line of their own.
        assert ways - found == {("top",), ("top", "dotted"), ("routes", 0, "nested")}

    def test_windows_line_ends_count_as_one(self):
        assert key_lines(DOCUMENT.replace("\n", "\r\n")) == key_lines(DOCUMENT)

    @pytest.mark.parametrize(
        "text", ["", "\n\n# only a comment", "a = 1", "a = []", "a = {}", 'a = ""', "a = [[], [1, [2]]]"]
    )
    def test_small_documents_are_read_to_their_end(self, text):
        assert set(key_lines(text)) == set(every_way(tomllib.loads(text)))

    def test_a_string_may_end_in_quotes_of_its_own(self):
        text = "a = \"\"\"x\"\"\"\"\"\nb = '''y'''''\nc = 1"
        assert key_lines(text) == {("a",): 1, ("b",): 2, ("c",): 3}

    def test_an_unknown_way_has_the_line_of_the_table_around_it(self, tmp_path):
        path = tmp_path / "f.toml"
        path.write_text("a = 1\n[b]\nc = 2\n")
        file = read(path)
        assert file.line(("b", "missing")) == 2
        assert file.line(("nowhere", "at all")) == 1


class TestRefusals:
    def refused(self, tmp_path: Path, content: bytes | str) -> str:
        path = tmp_path / "pipeline.toml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError) as caught:
            read(path)
        return str(caught.value)

    def test_malformed_text_is_shown_with_line_and_column(self, tmp_path):
        message = self.refused(tmp_path, 'a = 1\nb == 2\nc = "x"\n')
        assert message.startswith("PEN-1001 pipeline.toml:2:4: ")
        assert "\n    b == 2\n       ^\n" in message

    def test_an_end_that_comes_too_soon_is_on_the_last_line(self, tmp_path):
        assert self.refused(tmp_path, "a = 1\nb = [1,\n2").startswith("PEN-1001 pipeline.toml:3:")

    @pytest.mark.parametrize(
        "text",
        [
            'password = hunter2"\n',
            'x = 1\ndb = "postgres://u:hunter2@h/d\n',
            'api_key = """\nhunter2 \\q\n"""',
            "p = { token = hunter2 }",
        ],
    )
    def test_a_malformed_line_does_not_show_a_secret(self, tmp_path, text):
        message = self.refused(tmp_path, text)
        assert message.startswith("PEN-1001")
        assert "hunter2" not in message

    def test_text_that_is_not_utf_8_is_told_by_line(self, tmp_path):
        assert self.refused(tmp_path, b"a = 1\nb = '\xff'\n").startswith("PEN-1001 pipeline.toml:2: not UTF-8")

    def test_a_byte_order_mark_is_no_mistake(self, tmp_path):
        path = tmp_path / "f.toml"
        path.write_bytes(b"\xef\xbb\xbfa = 1\n")
        assert read(path).data == {"a": 1}

    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"PEN-1015 .*nothing.toml"):
            read(tmp_path / "nothing.toml")

    def test_a_directory_is_no_file(self, tmp_path):
        with pytest.raises(ConfigError, match="PEN-1015"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgres://u:p@ss@h/d", "postgres://u:…@h/d"),
        ("host=h password=secret dbname=d", "host=h password=… dbname=d"),
        ("host=h password='a b' dbname=d", "host=h password=… dbname=d"),
        ("https://h/path?a=b", "https://h/path?a=b"),
        ('password = { env = "DB_PASSWORD" }', 'password = { env = "DB_PASSWORD" }'),
        ('password={file="pw"}', 'password={file="pw"}'),
        ("password={hunter2", "password=…"),
        ("lake/{topic}", "lake/{topic}"),
    ],
)
def test_passwords_are_cut_out_of_addresses(text, clean):
    assert without_password(text) == clean
