"""What sinks that send messages share: payloads, keys, attributes, names, the window; and rows that the other side refuses."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from penstock.config import Config
from penstock.connectors.kafka.rows import as_messages
from penstock.connectors.messages import (
    ATTRIBUTES,
    ID,
    SUBJECT,
    VERSION,
    Messages,
    Template,
    Window,
    encode,
    text_column,
)
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError
from penstock.formats import WireSchema
from penstock.formats.avro import Avro, AvroConfig
from penstock.formats.plain import String, StringConfig
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.messages.box import Store
from penstock.schema import is_envelope, with_key, with_ref
from penstock.sink import Receipt, SinkConnector, TopicContext, WriteResult
from penstock.source import ENVELOPE_SCHEMA
from penstock.testing import ForkEngine

ROWS = pa.record_batch({"id": [1, 2], "to": ["Bern", None], "tag": [b"\x00", b"\x01"]})
JSON = TopicContext()


def listed(messages: Messages) -> list[Any]:
    return list(messages.triples())


def test_rows_without_a_schema_entry_are_sent_as_json() -> None:
    sent = encode(ROWS.select(["id", "to"]), JSON)
    assert [json.loads(p) for p in sent.payloads.to_pylist()] == [{"id": 1, "to": "Bern"}, {"id": 2, "to": None}]
    assert sent.keys.null_count == 2
    assert sent.nbytes == sum(map(len, sent.payloads.to_pylist()))


def test_rows_are_encoded_by_the_schema_of_their_topic() -> None:
    context = TopicContext(encoder=String(StringConfig()))
    assert encode(pa.record_batch({"value": ["a", "b"]}), context).payloads.to_pylist() == [b"a", b"b"]


def test_messages_that_came_go_on_as_they_are() -> None:
    attributes = pa.array([[("a", "b")], None], ENVELOPE_SCHEMA.field("attributes").type)
    came = pa.record_batch(
        {
            "stream": ["s", "s"],
            "key": pa.array([b"k", None], pa.binary()),
            "payload": pa.array([b"{", None], pa.binary()),
            "attributes": attributes,
            "timestamp": pa.array([0, 1], pa.timestamp("ms", tz="UTC")),
        }
    )
    assert listed(encode(came, JSON)) == [(b"k", b"{", [("a", "b")]), (None, None, [])]
    named = encode(came, JSON, key=["_stream"], attributes=["_stream", "_timestamp"])
    beside = [("_stream", "s"), ("_timestamp", "1970-01-01T00:00:00.000Z")]
    assert listed(named)[0] == (b"s", b"{", [("a", "b"), *beside])
    assert listed(named)[1] == (b"s", None, [("_stream", "s"), ("_timestamp", "1970-01-01T00:00:00.001Z")])
    assert listed(encode(came, JSON, attributes=["_stream"]))[0] == (b"k", b"{", [("a", "b"), ("_stream", "s")])
    with pytest.raises(SchemaError, match="PEN-4002"):
        encode(came, JSON, key=["bed"])


def test_the_key_is_made_of_columns_and_they_stay_in_the_payload() -> None:
    assert encode(ROWS, JSON, key=["id"]).keys.to_pylist() == [b"1", b"2"]
    assert encode(ROWS, JSON, key=["tag"]).keys.to_pylist() == [b"\x00", b"\x01"]
    assert encode(ROWS, JSON, key=["id", "to"]).keys.to_pylist() == [b'{"id":1,"to":"Bern"}', b'{"id":2,"to":null}']
    keyed = ROWS.replace_schema_metadata(with_key(ROWS.schema, ["id"]).metadata)
    sent = encode(keyed, JSON)
    assert sent.keys.to_pylist() == [b"1", b"2"]
    assert json.loads(sent.payloads[0].as_py())["id"] == 1


def test_attributes_leave_the_payload_and_nulls_are_left_out() -> None:
    sent = encode(ROWS.select(["id", "to"]), JSON, attributes=["to"])
    assert listed(sent) == [(None, b'{"id":1}', [("to", "Bern")]), (None, b'{"id":2}', [])]


def test_key_and_attributes_that_a_message_came_with_go_out_again() -> None:
    came = pa.record_batch(
        {
            "id": [1, 2],
            "_key": pa.array([b"k", None], pa.binary()),
            "_attributes": pa.array([[("a", "b"), ("id", "old")], None], ENVELOPE_SCHEMA.field("attributes").type),
        }
    )
    assert listed(encode(came, JSON)) == [(b"k", b'{"id":1}', [("a", "b"), ("id", "old")]), (None, b'{"id":2}', [])]
    assert listed(encode(came, JSON, attributes=["id"]))[0] == (b"k", b"{}", [("a", "b"), ("id", "1")])


def test_the_schema_of_the_registry_goes_with_each_message() -> None:
    read = WireSchema("avro", '"string"', "orders", 2, 7)
    rows = ROWS.select(["id", "to"]).replace_schema_metadata(with_ref(ROWS.schema, read).metadata)
    named = [(SUBJECT, "orders"), (VERSION, "2"), (ID, "7")]
    assert listed(encode(rows, JSON)) == [
        (None, b'{"id":1,"to":"Bern"}', named),
        (None, b'{"id":2,"to":null}', named),
    ]
    assert [each[2] for each in listed(encode(rows, JSON, attributes=["to"]))] == [[("to", "Bern"), *named], named]
    came = rows.append_column("_attributes", pa.array([[("a", "b"), (ID, "1")], None], ATTRIBUTES))
    assert [each[2] for each in listed(encode(came, JSON))] == [[("a", "b"), *named], named]


def test_the_schema_by_which_a_payload_is_written_goes_with_it_in_its_frame_or_beside_it() -> None:
    read, written = (WireSchema("avro", '"string"', name, 1, at) for at, name in enumerate(("came", "goes"), 7))
    rows = pa.record_batch({"value": ["a"]}).replace_schema_metadata(with_ref(pa.schema([]), read).metadata)
    beside = encode(rows, TopicContext(encoder=Avro(AvroConfig(), written)))
    assert listed(beside) == [(None, b"\x02a", [(SUBJECT, "goes"), (VERSION, "1"), (ID, "8")])]
    framed = encode(rows, TopicContext(encoder=Avro(AvroConfig(framing="confluent"), written)))
    assert listed(framed) == [(None, b"\0\0\0\0\x08\x02a", [])]
    text = encode(
        rows, TopicContext(encoder=String(StringConfig()))
    )  # what has no schema of its own keeps the one it came by
    assert listed(text)[0][2][0] == (SUBJECT, "came")


@pytest.mark.parametrize(
    "row",
    [
        {"key": 1, "payload": "x", "attributes": {"a": 1}, "timestamp": 5},
        {"key": "k", "payload": {"a": 1}, "attributes": ["x"], "timestamp": "now"},
        {"id": 1, "_attributes": "oops"},
        {"id": 1, "_attributes": {"a": "b"}},
    ],
)
def test_a_payload_whose_fields_are_called_like_those_of_a_message_goes_on_whole(row: dict[str, Any]) -> None:
    rows = pa.RecordBatch.from_pylist([row])
    assert not is_envelope(rows.schema)
    assert [(json.loads(payload), pairs) for _, payload, pairs in listed(encode(rows, JSON))] == [(row, [])]


def test_a_decoded_row_with_the_very_columns_of_a_message_is_a_row() -> None:
    assert is_envelope(ENVELOPE_SCHEMA)
    assert not is_envelope(with_ref(ENVELOPE_SCHEMA, WireSchema("avro", "{}", "events", 1, 1)))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary_view()], ids=str)
def test_messages_that_a_query_gave_as_text_go_on_under_their_keys(kind: pa.DataType) -> None:
    came = pa.record_batch(
        {
            "key": pa.array([b"k", None]).cast(kind),
            "payload": pa.array([b'{"id":1}', None]).cast(kind),
            "attributes": pa.array([[("a", "b")], []], ATTRIBUTES),
            "timestamp": pa.array([1, 2], pa.timestamp("us", tz="UTC")),
        }
    )
    assert is_envelope(came.schema)
    assert listed(encode(came, JSON)) == [(b"k", b'{"id":1}', [("a", "b")]), (None, None, [])]
    records = as_messages(
        came, JSON, SimpleNamespace(mode="append", key=[], keep_timestamps=True, partition_column=None)
    )
    assert records.batch.select(["key", "value"]).to_pylist()[0] == {"key": b"k", "value": b'{"id":1}'}


def test_a_column_that_is_not_there_is_named() -> None:
    for wanted in ({"key": ["no"]}, {"attributes": ["no"]}):
        with pytest.raises(SchemaError, match="'no'"):
            encode(ROWS, JSON, **wanted)
    with pytest.raises(SchemaError, match="'no'"):
        Template("a/{no}").names("/t", ROWS)


def test_names_are_made_of_the_topic_and_of_columns() -> None:
    assert Template("out/{topic}").names("/lake/orders", ROWS).to_pylist() == ["out/lake/orders"] * 2
    assert Template("{topic}/{id}/x").names("/t", ROWS).to_pylist() == ["t/1/x", "t/2/x"]
    with pytest.raises(DataError) as caught:
        Template("{to}").names("/t", ROWS)
    assert caught.value.rows == [1]


@pytest.mark.parametrize("text", ["a{", "a}", "{}", "{a}{", "{{a}}"])
def test_a_template_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PEN-1003"):
        Template(text)


def test_values_in_names_and_attributes_are_plain_text() -> None:
    values = pa.array([0, None], pa.timestamp("s", tz="UTC"))
    assert text_column(values, "at").to_pylist() == ["1970-01-01T00:00:00Z", None]
    assert text_column(pa.array([True, None]), "b").to_pylist() == ["true", None]
    assert text_column(pa.array(["x", None]).dictionary_encode(), "d").to_pylist() == ["x", None]


# -- the window -----------------------------------------------------------------------------------------------------------


def test_the_window_waits_for_room_and_for_the_last_answer() -> None:
    window = Window(most=2, timeout_secs=60)
    window.enter()
    window.enter()
    entered = threading.Event()
    thread = threading.Thread(target=lambda: (window.enter(), entered.set()))
    thread.start()
    assert not entered.wait(0.05)
    window.leave()
    assert entered.wait(60)
    for _ in range(2):
        window.leave()
    window.settle()
    thread.join()


def test_the_first_failure_is_raised_and_silence_is_one() -> None:
    window = Window(most=1, timeout_secs=0.01)
    window.enter()
    with pytest.raises(RetryableError, match="PEN-2003"):
        window.settle()
    window.leave(FatalError("first"))
    window.fail(FatalError("second"))
    with pytest.raises(FatalError, match="first"):
        window.enter()
    with pytest.raises(FatalError, match="first"):
        window.settle()


# -- rows that the other side refuses ----------------------------------------------------------------------------------------


class PickyConfig(Config):
    path: Path
    """Where rows go."""


class Picky(SinkConnector[PickyConfig, Receipt]):
    """Sends every row, and hears afterwards that the odd ones were refused."""

    name = "picky"

    def write_batch(self, topic: str, batch: pa.RecordBatch) -> WriteResult:
        ids = batch.column("id").to_pylist()
        with open(self.config.path, "a") as file:
            file.writelines(f"{each}\n" for each in ids if each % 2 == 0)
        odd = [at for at, each in enumerate(ids) if each % 2]
        if odd:
            error = DataError("refused")
            error.rows, error.others_written = odd, True
            raise pickle.loads(pickle.dumps(error))
        return WriteResult(batch.num_rows)


class Busy(SinkConnector[PickyConfig, Receipt]):
    """Its service answers the first calls with 429."""

    name = "busy"

    def write_batch(self, topic: str, batch: pa.RecordBatch) -> WriteResult:
        with open(self.config.path, "a+") as file:
            file.seek(0)
            if len(file.readlines()) < 3:
                file.write("busy\n")
                raise RetryableError("too many requests", code="PEN-2002")
            file.write("".join(f"{each}\n" for each in batch.column("id").to_pylist()))
        return WriteResult(batch.num_rows)


def test_what_is_throttled_is_tried_again_and_makes_no_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {each}}}\n' for each in range(10)))
    (tmp_path / "pipeline.toml").write_text(
        """
connector_name = "busy"
[processing]
on_error = "dead_letter"
retry_backoff_ms = 1
[source]
connector = "files"
path = "in.jsonl"
[sink]
connector = "test_message_sinks:Busy"
path = "out"
"""
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pipeline = Pipeline.from_toml(tmp_path / "pipeline.toml")
    supervisor.run(pipeline, ForkEngine(1), drain=True)
    assert (tmp_path / "out").read_text().split() == ["busy"] * 3 + [str(each) for each in range(10)]
    assert Store(pipeline).letters.num_rows == 0


def test_rows_that_were_taken_are_not_sent_again_beside_those_that_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {each}}}\n' for each in range(10)))
    (tmp_path / "pipeline.toml").write_text(
        """
connector_name = "picky"
delivery = "at-least-once"
[processing]
on_error = "dead_letter"
[source]
connector = "files"
path = "in.jsonl"
[sink]
connector = "test_message_sinks:Picky"
path = "out"
"""
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    summary = supervisor.run(Pipeline.from_toml(tmp_path / "pipeline.toml"), ForkEngine(1), drain=True)
    assert summary is not None
    assert (tmp_path / "out").read_text().split() == ["0", "2", "4", "6", "8"]
