"""Rows of files that cannot be used: each falls out alone, as it was found, and nothing is swallowed or rounded."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine

PIPELINE = """
connector_name = "letters"
delivery = "exactly-once"

[processing]
on_error = "dead_letter"
max_error_rate = 1.0

[source]
connector = "files"
path = "in"
{columns}

[sink]
connector = "delta"
path = "lake"
"""

LARGE = 2**53 + 1


def run(path: Path, name: str, content: bytes | pa.Table, columns: str = "") -> tuple[list[Any], list[Any]]:
    """The rows of one file, and the payload and reason of each letter."""
    place = path / "in" / name
    place.parent.mkdir()
    if isinstance(content, bytes):
        place.write_bytes(content)
    else:
        pq.write_table(content, place)
    os.utime(place, (1_700_000_000, 1_700_000_000))
    file = path / "pipeline.toml"
    file.write_text(PIPELINE.format(columns=f"columns = {{ {columns} }}" if columns else ""))
    supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)
    letters = DeltaTable(path / "state" / "dead_letters").to_pyarrow_table().to_pylist()
    assert {(each["kind"], each["code"]) for each in letters} <= {("record", "PEN-3001")}
    found = DeltaTable(path / "lake").to_pyarrow_table().to_pylist()
    return found, [(each["payload"], each["offset"]["value"].rpartition(", ")[2], each["reason"]) for each in letters]


UNCLOSED = "a quote that is opened here is never closed"


@pytest.mark.parametrize("zipped", [False, True])
def test_a_quote_that_is_never_closed_costs_its_own_line_and_no_other(tmp_path: Path, zipped: bool) -> None:
    text = b'id,note\n1,a\n2,"many\nlines"\n3,"open\n4,d\n5,e\n'
    content = gzip.compress(text) if zipped else text
    rows, letters = run(tmp_path, "a.csv.gz" if zipped else "a.csv", content)
    assert [(row["id"], row["note"]) for row in rows] == [
        (1, "a"),
        (2, "many\nlines"),
        (4, "d"),
        (5, "e"),
    ]
    assert letters == [(b'3,"open', "line 5", UNCLOSED)]


def test_a_literal_quote_alone_is_no_open_one(tmp_path: Path) -> None:
    rows, letters = run(tmp_path, "a.csv", b'id,note\n1,5" pipe\n2,b\nx,c\n', 'id = "int64", note = "string"')
    assert [(row["id"], row["note"]) for row in rows] == [(1, '5" pipe'), (2, "b")]
    assert [each[:2] for each in letters] == [(b"x,c", "row 3")]


def test_a_letter_of_a_csv_row_holds_its_bytes(tmp_path: Path) -> None:
    text = b'id,note\n1,a\nx,"say ""hi"", t\xc3\xbc"\n2\n3,c\n'
    rows, letters = run(tmp_path, "a.csv", text, 'id = "int64", note = "string"')
    assert [row["id"] for row in rows] == [1, 3]
    assert {each[0] for each in letters} == {'x,"say ""hi"", tü"'.encode(), b"2"}


def test_a_letter_of_a_json_line_holds_its_bytes(tmp_path: Path) -> None:
    text = b'{"id": 1}\n{"id":  "x"}\n{"id": \xff}\n{"id": 2}\n'
    rows, letters = run(tmp_path, "a.jsonl", text, 'id = "int64"')
    assert [row["id"] for row in rows] == [1, 2]
    assert [each[:2] for each in letters] == [(b'{"id":  "x"}', "line 2"), (b'{"id": \xff}', "line 3")]


def test_a_letter_of_a_parquet_row_is_its_json(tmp_path: Path) -> None:
    rows, letters = run(tmp_path, "a.parquet", pa.table({"id": [1, 2**40]}), 'id = "int32"')
    assert [row["id"] for row in rows] == [1]
    assert [each[:2] for each in letters] == [(b'{"id": 1099511627776}', "row 2")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", f"id,v\n1,0.5\n2,{LARGE}\n3,1e300\n4,{2**53}\n5,\n"),
        (
            "a.jsonl",
            f'{{"id":1,"v":0.5}}\n{{"id":2,"v":{LARGE}}}\n{{"id":3,"v":1e300}}\n{{"id":4,"v":{2**53}}}\n{{"id":5}}\n',
        ),
    ],
)
@pytest.mark.parametrize("columns", ["", 'id = "int64", v = "float64"'])
def test_a_whole_number_that_a_double_would_round_falls_out_alone(
    tmp_path: Path, name: str, text: str, columns: str
) -> None:
    rows, letters = run(tmp_path, name, text.encode(), columns)
    assert {row["id"]: row["v"] for row in rows} == {1: 0.5, 3: 1e300, 4: float(2**53), 5: None}
    assert [each[0] for each in letters] == [text.encode().splitlines()[2 if name == "a.csv" else 1]]
