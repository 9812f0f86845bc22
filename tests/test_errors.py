"""Errors end up in logs, manifests and `status.json`: what libraries say is repeated without the rows' values."""

from __future__ import annotations

import io
import json
import os
from base64 import b64encode
from collections.abc import Callable
from decimal import Decimal
from urllib.parse import quote, quote_plus, unquote_plus

import httpx
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pytest

from penstock.connectors.files import Files, FilesConfig
from penstock.errors import ConnectorError, DataError, keep_credentials, keep_secret, reason_of
from penstock.source import ReadLimit, SourceContext


def csv(text: str, kind: pa.DataType) -> object:
    options = pyarrow.csv.ConvertOptions(column_types={"v": kind})
    return pyarrow.csv.read_csv(io.BytesIO(text.encode()), convert_options=options)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.errors._secrets", set())


@pytest.mark.usefixtures("kept")
def test_a_secret_is_left_out_in_every_form_in_which_it_travels() -> None:
    secret = 'p@ss w"ord+1/é'
    keep_secret(secret)
    keep_credentials("me", secret)
    in_an_address = f"https://host/items?key={quote(secret)}&k={quote(secret, safe='')}&w={quote_plus(secret)}"
    in_a_header = f"Authorization: {httpx_basic('me', secret)}"
    for text in (
        f"no {secret}",
        in_an_address,
        in_a_header,
        json.dumps({"said": secret}),
        json.dumps([secret], ensure_ascii=False),
    ):
        shown = ConnectorError(text, hint=text)
        for said in (shown.message, shown.hint):
            assert "…" in said
            assert "p@ss" not in unquote_plus(said)
            assert "ord+1" not in said
            assert b64encode(f"me:{secret}".encode()).decode() not in said


def httpx_basic(user: str, password: str) -> str:
    request = next(httpx.BasicAuth(user, password).auth_flow(httpx.Request("GET", "http://host")))
    return request.headers["Authorization"]


@pytest.mark.usefixtures("kept")
def test_of_secrets_of_which_one_begins_with_another_nothing_is_left() -> None:
    for number in range(20):
        keep_secret("walrus" * (number + 1))
    assert ConnectorError(f"no {'walrus' * 20}").message == "no …"


REFUSED: dict[str, Callable[[], object]] = {
    "text that is no number": lambda: pa.array(["s3cret"]).cast(pa.int64()),
    "text with a quote and a line break": lambda: pa.array(["o'\ns3cret"]).cast(pa.int64()),
    "a number that is too large": lambda: pa.array([73737373]).cast(pa.int8()),
    "a fraction": lambda: pa.array([73737373.5]).cast(pa.int64()),
    "a time that is too precise": lambda: pa.array([73737373], pa.timestamp("us")).cast(pa.timestamp("s")),
    "an object of another type": lambda: pa.array(["s3cret"], pa.int64()),
    "a decimal": lambda: pa.array([Decimal("73737373.5")], pa.decimal128(5, 2)),
    "a date in text": lambda: pa.array(["s3cret"]).cast(pa.timestamp("us")),
    "a value of a CSV file": lambda: csv("v\ns3cret\n", pa.int64()),
    "a row of a CSV file": lambda: csv("v\n1\ns3cret,2,3\n", pa.string()),
    "a line of JSON": lambda: pyarrow.json.read_json(io.BytesIO(b'{"v": 1}\n{"v": "s3cret"}\n')),
}


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_what_arrow_says_of_a_row_is_repeated_without_its_value(work):
    with pytest.raises((pa.ArrowException, ValueError, TypeError)) as refused:
        work()
    reason = reason_of(refused.value)
    assert "s3cret" not in reason
    assert "73737373" not in reason
    assert "\n" not in reason
    assert len(reason) > 10, "a reason must still say something"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            '[CAST_INVALID_INPUT] The value \'s3cret\' of the type "STRING" cannot be cast to "INT".\nmore',
            '[CAST_INVALID_INPUT] The value … of the type "STRING" cannot be cast to "INT".',
        ),
        (
            '[CAST_OVERFLOW] The value 73737373L of the type "BIGINT" cannot be cast to "INT".',
            '[CAST_OVERFLOW] The value … of the type "BIGINT" cannot be cast to "INT".',
        ),
        (
            "[NUMERIC_VALUE_OUT_OF_RANGE.WITH_SUGGESTION] 73737373.5 cannot be represented as Decimal(3, 1).",
            "[NUMERIC_VALUE_OUT_OF_RANGE.WITH_SUGGESTION] … cannot be represented as Decimal(3, 1).",
        ),
        ("[DIVIDE_BY_ZERO] Division by zero.", "[DIVIDE_BY_ZERO] Division by zero."),
    ],
)
def test_what_spark_says_of_a_row_is_repeated_without_its_value(text, left):
    assert reason_of(text) == left


def test_the_name_of_a_column_stays():
    assert reason_of("column 'v' is string, not int64: Failed to parse string: 's3cret'").startswith("column 'v' is")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"v": 1}\n{"v": "s3cret"}\n'),
        ("a.jsonl", '{"v": 1}\nhalf of s3cret\n'),
        ("a.csv", "v,w\n1,2\ns3cret,3\n"),
        ("a.csv", "v,w\n1,2\n3,4,s3cret\n"),
    ],
)
def test_a_bad_row_of_a_file_is_named_by_its_place_and_not_quoted(name, text, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    os.utime(tmp_path / "in" / name, (0, 0))
    source = Files(FilesConfig(path=str(tmp_path / "in"), scan_interval_ms=0, columns={"v": "int64", "w": "int64"}))
    source.open(SourceContext(state_dir=tmp_path / "state"))
    end = source.latest(source.initial(), ReadLimit(rows=1000))
    (split,) = source.split(source.initial(), end)
    with pytest.raises(DataError) as refused:
        list(source.read(split))
    assert "s3cret" not in str(refused.value)
    assert name in refused.value.message
    assert "line 2" in refused.value.message or "row 2" in refused.value.message or "line 3" in refused.value.message
