"""Messages become rows: decoded by their topic's schema, and what cannot be decoded is kept, counted or stops the run."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock import cli
from penstock.config import Config
from penstock.connectors.files.sink import read_published
from penstock.connectors.messages import ATTRIBUTES, encode
from penstock.connectors.postgres import Postgres
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError
from penstock.formats import WireSchema
from penstock.pipeline import Pipeline
from penstock.runtime import commands, supervisor
from penstock.runtime.commands import letters_asked
from penstock.runtime.epochs import Manifest, State
from penstock.runtime.epochs.messages import Messages
from penstock.runtime.epochs.stage import Staged
from penstock.runtime.journal.source import JournalSource
from penstock.runtime.messages import codecs
from penstock.runtime.telemetry import Telemetry
from penstock.schema import Readable
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.sink import Receipt, SinkConnector, WriteResult
from penstock.source import Offset, PollingSource, SourceBatch, SourceCheckpoint, SourceEnvelope, SourceRecord
from penstock.testing import ForkEngine
from penstock.testing.postgres import PostgresServer
from penstock.testing.registry import RegistryServer

pytestmark = pytest.mark.processes


class ListedConfig(Config):
    path: Path
    """A file with a JSON value per line: stream, key, payload as text or null."""


class Listed(PollingSource[ListedConfig]):
    """Messages from a file: a line is one message."""

    name = "listed"

    def __init__(self, config: ListedConfig) -> None:
        super().__init__(config)
        self._at = 0

    def schema(self) -> dict[str, pa.Schema]:
        return {}

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        lines = self.config.path.read_text().splitlines()[self._at : self._at + max_records]
        found = []
        for number, line in enumerate(lines, self._at):
            stream, key, payload = json.loads(line)
            record = SourceRecord(stream, None if payload is None else payload.encode(), timestamp_ms=1000 + number)
            if key is not None:
                record = record.with_key(key).with_attribute("site", "north")
            found.append(SourceEnvelope.with_offset(record, Offset("p0", number)))
        self._at += len(lines)
        return found or None

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"at": self._at})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._at = checkpoint.offsets["at"]


class Texts(PollingSource[ListedConfig]):
    """Messages in columns of its own making: keys and payloads are text."""

    name = "texts"

    def __init__(self, config: ListedConfig) -> None:
        super().__init__(config)
        self._at = 0

    def schema(self) -> dict[str, pa.Schema]:
        return {}

    def poll_batch(self, max_records: int) -> SourceBatch | None:
        lines = self.config.path.read_text().splitlines()[self._at :]
        self._at += len(lines)
        _, keys, payloads = zip(*map(json.loads, lines), strict=True) if lines else ((), (), ())
        columns = {
            "key": pa.array(keys, pa.string()),
            "payload": pa.array(payloads, pa.string()),
            "attributes": pa.array([[("site", "north")]] * len(lines), ATTRIBUTES),
            "timestamp": pa.array(range(len(lines)), pa.timestamp("ms", tz="UTC")),
        }
        return SourceBatch(pa.record_batch(columns), stream="a") if lines else None

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"at": self._at})


class SentConfig(Config):
    path: Path
    """Where the payloads go, one after the other."""


class Sent(SinkConnector[SentConfig, Receipt]):
    """A message sink: writes each row as the payload that its topic's schema says."""

    name = "sent"

    def write_batch(self, topic: str, batch: pa.RecordBatch) -> WriteResult:
        encoder = self.context.topic(topic).encoder
        assert encoder is not None
        with open(self.config.path, "ab") as file:
            for payload in encoder.encode(batch).to_pylist():
                file.write(payload)
        return WriteResult(batch.num_rows)


class Tagged(SinkConnector[SentConfig, Receipt]):
    """A message sink that writes the attributes of its messages."""

    name = "tagged"

    def write_batch(self, topic: str, batch: pa.RecordBatch) -> WriteResult:
        with open(self.config.path, "a") as file:
            for _, _, attributes in encode(batch, self.context.topic(topic)).triples():
                file.write(json.dumps(dict(attributes)) + "\n")
        return WriteResult(batch.num_rows)


PIPELINE = """
connector_name = "messages"
delivery = "exactly-once"

[processing]
on_error = "{on_error}"
{processing}

{schemas}

[source]
connector = "test_messages:Listed"
path = "in.jsonl"
{source}

[[routes]]
to = "/{{stream}}"
partitions = {partitions}
key = ["id"]

[sink]
connector = "delta"
path = "lake/{{topic}}"
{sink}
"""

JSON = '[[schemas]]\ntopic = "/a"\nschema_type = "json"\n'
NUMBERED = JSON + 'key = ["id"]\n'


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, *messages: Any, stream: str = "a") -> None:
        with open(self.path / "in.jsonl", "a") as file:
            for each in messages:
                key, payload = each if isinstance(each, tuple) else (None, each)
                text = payload if isinstance(payload, str | None) else json.dumps(payload)
                file.write(json.dumps([stream, key, text]) + "\n")

    def pipeline(self, schemas: str = JSON, on_error: str = "dead_letter", **parts: Any) -> Pipeline:
        (self.path / "in.jsonl").touch()
        values = {"processing": "", "source": "", "sink": "", "partitions": 1, **parts}
        file = self.path / "pipeline.toml"
        file.write_text(PIPELINE.format(schemas=schemas, on_error=on_error, **values))
        return Pipeline.from_toml(file)

    def run(self, schemas: str = JSON, on_error: str = "dead_letter", **parts: Any) -> supervisor.Summary:
        return supervisor.run(self.pipeline(schemas, on_error, **parts), ForkEngine(2), drain=True)

    def rows(self, topic: str = "a") -> list[dict[str, Any]]:
        table = DeltaTable(self.path / "lake" / topic).to_pyarrow_table()
        return sorted(table.to_pylist(), key=repr)

    def letters(self) -> list[dict[str, Any]]:
        path = self.path / "state" / "dead_letters"
        return DeltaTable(path).to_pyarrow_table().to_pylist() if (path / "_delta_log").exists() else []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Home(tmp_path)


def test_json_becomes_typed_rows_and_new_fields_become_columns(home: Home) -> None:
    home.put({"id": 1, "v": 2}, {"id": 2, "v": 2.5, "tags": ["x"]})
    home.run()
    assert home.rows() == [{"id": 1, "v": 2.0, "tags": None}, {"id": 2, "v": 2.5, "tags": ["x"]}]
    home.put({"id": 3, "place": {"lat": 1.5}})
    home.run()
    assert home.rows()[2] == {"id": 3, "v": None, "tags": None, "place": {"lat": 1.5}}


def test_a_schema_finds_its_topic_without_the_leading_slash_too(home: Home) -> None:
    home.put({"id": 1})
    home.run(JSON.replace("/a", "a"))
    assert home.rows() == [{"id": 1}]


@pytest.mark.parametrize("topic", ["#", "+/a", "*/a"])
def test_a_wildcard_that_fits_without_a_slash_is_left_alone_and_a_manifest_finds_its_version(
    home: Home, topic: str
) -> None:
    (entry,) = home.pipeline(JSON.replace("/a", topic)).schemas.entries
    assert entry.place == topic
    assert entry.takes("/a")
    home.put({"id": 1})
    home.run(JSON.replace("/a", topic))
    assert home.rows() == [{"id": 1}]


def test_messages_of_a_source_that_gives_text_are_decoded_and_bad_ones_are_letters(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Listed", Texts)
    home.put(("k", {"id": 1}), ("l", "no JSON"))
    home.run(JSON + 'metadata = ["key"]\n')
    assert home.rows() == [{"id": 1, "_key": b"k"}]
    assert [(each["key"], each["payload"]) for each in home.letters()] == [(b"l", b"no JSON")]


@pytest.mark.parametrize("unknown", [None, [], {}, [{}], {"x": None}, {"x": [], "y": {}}])
def test_what_nothing_is_known_of_has_no_column_until_a_value_shows_its_type(home: Home, unknown: Any) -> None:
    home.put({"id": 1, "v": unknown})
    home.run()
    assert home.rows() == [{"id": 1}]
    home.put({"id": 2, "v": unknown}, {"id": 3, "v": {"x": [4]} if isinstance(unknown, dict) else [{"x": 4}]})
    home.run()
    assert [(row["id"], bool(row["v"])) for row in home.rows()][::2] == [(1, False), (3, True)]
    assert home.letters() == []


@pytest.mark.parametrize("empty", [None, {}, {"id": None}, {"id": []}])
def test_a_row_that_would_have_no_column_is_a_dead_letter_and_comes_back_when_there_is_one(
    home: Home, empty: Any
) -> None:
    home.put(empty)
    home.run()
    assert [letter["rule"] for letter in home.letters()] == ["row.empty"]
    home.put(empty, {"no": 1})
    home.run()
    assert len(home.rows()) == 2
    with pytest.raises(SystemExit, match="0"):
        cli.main(["dlq", str(home.path / "pipeline.toml"), "replay"])
    home.run()
    assert len(home.rows()) == 3
    assert len(home.letters()) == 1


def test_a_payload_may_have_a_column_that_elsewhere_describes_a_change(home: Home) -> None:
    home.put({"id": 1, "_position": "d"})
    home.run()
    home.put({"id": 2, "_txid": "x"})
    home.run()
    assert home.rows() == [{"id": 1, "_position": "d", "_txid": None}, {"id": 2, "_position": None, "_txid": "x"}]


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("first", ["_op", "_position"])
def test_a_field_that_says_what_became_of_a_row_makes_a_letter_of_its_message_alone(
    home: Home, mode: str, first: str
) -> None:
    options = {"schemas": NUMBERED, "sink": f'mode = "{mode}"', "partitions": 2}
    second = "_position" if first == "_op" else "_op"
    for number, odd in enumerate([{first: "x"}, {second: "y"}, {first: "d", second: "9"}, {"_op": None}]):
        home.put({"id": 10 * number}, {"id": 10 * number + 1, **odd})
        home.run(**options)
    home.put(*({"id": n} for n in range(100, 200)))
    home.run(**options)
    rows = {row["id"] for row in home.rows()}
    letters = {json.loads(letter["payload"])["id"]: letter["rule"] for letter in home.letters()}
    assert {*letters.values()} == {"column.reserved"}
    assert {*letters} == ({1, 21} if first == "_op" else {11, 21})
    assert rows == {0, 1, 10, 11, 20, 30, 31, *range(100, 200)} - {*letters}


@pytest.mark.parametrize("name", ["_key", "_Key"])
def test_a_payload_whose_field_is_called_like_what_the_message_has_is_a_letter(home: Home, name: str) -> None:
    home.put(("k", {"id": 1}), ("k", {"id": 2, name: 5}))
    home.run(JSON + 'metadata = ["key"]\n')
    assert home.rows() == [{"id": 1, "_key": b"k"}]
    (letter,) = home.letters()
    assert letter["rule"] == "column.reserved"
    assert f"`{name}`" in letter["reason"]


def test_rows_are_updated_by_the_key_of_their_message(home: Home) -> None:
    entry = '[[schemas]]\ntopic = "/a"\nschema_type = "json"\nmetadata = ["key"]\nkey = ["_key"]\n'
    for value in (1, 2):
        home.put(("k1", {"v": value}), ("k2", {"v": 10 * value}), {"v": 7})
        home.run(entry, sink='mode = "upsert"')
    assert home.rows() == [{"v": 2, "_key": b"k1"}, {"v": 20, "_key": b"k2"}]
    assert [letter["rule"] for letter in home.letters()] == ["key.missing"] * 2


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_name_that_differs_in_case_only_makes_a_dead_letter_of_its_own_message_alone(home: Home, mode: str) -> None:
    options = {"schemas": NUMBERED, "sink": f'mode = "{mode}"'}
    home.put(*({"id": n, "v": n} for n in range(100)), {"id": 100, "V": 1}, {"id": 101, "v": 1, "V": 1})
    home.run(**options)
    home.put({"id": 102, "v": 5}, {"id": 103, "V": 6}, {"id": 104, "new": 7})
    home.run(**options)
    assert sorted(row["id"] for row in home.rows()) == [*range(100), 102, 104]
    assert sorted(json.loads(letter["payload"])["id"] for letter in home.letters()) == [100, 101, 103]


def test_a_name_with_a_nul_character_makes_a_dead_letter_of_its_own_message_alone(home: Home) -> None:
    home.put({"id": 1})
    home.run()
    home.put({"id": 2}, {"id": 3, "\0": 1}, {"id": 4, "to": {"\0": 1}})
    home.run()
    assert [row["id"] for row in home.rows()] == [1, 2]
    assert sorted(json.loads(letter["payload"])["id"] for letter in home.letters()) == [3, 4]


@pytest.mark.parametrize("first", ['{"id": 1, "a": {"b": 1}}', '{"id": 1, "a.b": 1}'])
def test_a_column_that_reads_like_the_path_of_another_in_iceberg_is_a_letter_alone(
    home: Home, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setitem(globals(), "PIPELINE", PIPELINE.replace('"delta"', '"iceberg"'))
    catalog = f'table = "n.{{topic}}"\ncatalog_uri = "sqlite:///{home.path}/catalog.db"'
    home.put(first)
    home.run(sink=catalog)
    home.put('{"id": 2, "a.b": 2, "a": {"b": 3}}', {"id": 3}, '{"id": 4, "c.d": 1}')
    home.run(sink=catalog)
    home.put({"id": 5})
    home.run(sink=catalog)
    assert [json.loads(letter["payload"])["id"] for letter in home.letters()] == [2]


def test_a_topic_may_change_its_format(home: Home) -> None:
    home.put({"id": 1, "v": 2})
    home.run()
    home.put("3,x")
    home.run(JSON.replace("json", "csv"))
    assert home.rows()[1] == {"id": None, "v": None, "column_1": "3", "column_2": "x"}


@pytest.mark.parametrize("partitions", [1, 3])
def test_only_the_bad_messages_become_dead_letters_with_all_that_they_had(home: Home, partitions: int) -> None:
    home.put({"id": 1}, ("k", '{"id": oops'), {"id": 2}, {"id": "text"})
    home.run(partitions=partitions)
    assert home.rows() == [{"id": 1}, {"id": 2}]
    first, second = sorted(home.letters(), key=lambda letter: letter["offset"]["value"])
    assert first["payload"] == b'{"id": oops'
    assert first["key"] == b"k"
    assert first["attributes"] == [("site", "north")]
    assert (first["source"], first["stream"], first["topic"]) == ("listed", "a", "/a")
    assert first["offset"] == {"partition": "p0", "value": "1"}
    assert (first["code"], first["attempt"], first["epoch"], first["kind"]) == ("PEN-3001", 1, 1, "message")
    assert first["rule"].startswith("json.")
    assert second["payload"] == b'{"id": "text"}'


def test_a_bad_message_stops_the_run_unless_told_otherwise(home: Home) -> None:
    home.put({"id": 1}, "{")
    with pytest.raises(ConnectorError, match=r"PEN-3001 .* for topic /a at p0@1 cannot be decoded"):
        home.run(on_error="stop")
    assert home.run(on_error="skip").skipped == 1
    assert home.rows() == [{"id": 1}]


@pytest.mark.parametrize(
    ("pipeline", "source", "route", "kept"),
    [
        ("stop", None, None, "stop"),
        ("stop", "dead_letter", None, "dead_letter"),
        ("dead_letter", "skip", None, "skip"),
        ("dead_letter", "stop", None, "stop"),
        ("stop", None, "dead_letter", "dead_letter"),
        ("dead_letter", None, "skip", "skip"),
        ("stop", "skip", "dead_letter", "dead_letter"),
        ("dead_letter", "dead_letter", "stop", "stop"),
        ("skip", "stop", "skip", "skip"),
    ],
)
def test_the_word_of_a_route_wins_over_that_of_its_source_and_of_the_pipeline(
    home: Home, monkeypatch: pytest.MonkeyPatch, pipeline: str, source: str | None, route: str | None, kept: str
) -> None:
    own = f'on_error = "{route}"\n' if route else ""
    monkeypatch.setattr("test_messages.PIPELINE", PIPELINE.replace("[[routes]]\n", "[[routes]]\n" + own))
    home.put({"id": 1}, "{", {"id": 2})
    settings = {"on_error": pipeline, "source": f'on_error = "{source}"' if source else ""}
    if kept == "stop":
        with pytest.raises(DataError, match="PEN-3001"):
            home.run(**settings)
        return
    summary = home.run(**settings)
    assert [row["id"] for row in home.rows()] == [1, 2]
    assert (len(home.letters()), summary.skipped) == ((1, 0) if kept == "dead_letter" else (0, 1))


def test_metadata_becomes_columns(home: Home) -> None:
    home.put(("k", {"id": 1}))
    home.run(JSON + 'metadata = ["key", "timestamp", "attributes", "offset", "stream"]\n')
    (row,) = home.rows()
    assert row["_key"] == b"k"
    assert row["_timestamp"].timestamp() == 1
    assert row["_attributes"] == [("site", "north")]
    assert row["_offset"] == {"partition": "p0", "value": "0"}
    assert row["_stream"] == "a"


def test_a_tombstone_is_a_row_of_nulls_and_without_its_key_a_dead_letter(home: Home) -> None:
    home.put(("k", {"id": 1}), ("k", None))
    home.run(JSON + 'metadata = ["key"]\n')
    assert home.rows() == [{"id": 1, "_key": b"k"}, {"id": None, "_key": b"k"}]
    home.put(("k", None), stream="b")
    home.run(JSON + '\n[[schemas]]\ntopic = "/b"\nschema_type = "json"\nkey = ["id"]\n')
    (letter,) = home.letters()
    assert (letter["rule"], letter["payload"]) == ("key.missing", None)


def test_a_topic_without_a_schema_carries_the_envelope(home: Home) -> None:
    home.put({"id": 1}, stream="raw")
    home.run()
    assert home.rows("raw")[0]["payload"] == b'{"id": 1}'


def test_avro_by_file_is_registered_and_an_incompatible_change_is_refused_before_anything_starts(home: Home) -> None:
    fastavro = pytest.importorskip("fastavro")
    del fastavro
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
    (home.path / "r.avsc").write_text(json.dumps(schema))
    entry = '[[schemas]]\ntopic = "/a"\nschema_type = "avro"\nschema_file = "r.avsc"\nsubject = "r"\n'
    home.put("\x02", "\x04", "\x06trailing")
    home.run(entry)
    assert home.rows() == [{"id": 1}, {"id": 2}]
    assert len(home.letters()) == 1
    schema["fields"] = [{"name": "id", "type": "string"}]
    (home.path / "r.avsc").write_text(json.dumps(schema))
    home.put("\x08")
    with pytest.raises(ConnectorError, match=r"PEN-4030(.|\n)*id"):
        home.run(entry)
    assert len(home.rows()) == 2


LONGS = '[[schemas]]\ntopic = "/a"\nschema_type = "avro"\nsubject = "r"\n'


def longs(home: Home, *names: str, file: str = "r.avsc") -> None:
    fields = [{"name": name, "type": "long"} for name in names]
    (home.path / file).write_text(json.dumps({"type": "record", "name": "R", "fields": fields}))


def test_a_schema_file_that_goes_back_to_an_earlier_text_is_that_version_again(home: Home) -> None:
    file = LONGS + 'schema_file = "r.avsc"\n'
    for names in ("ab", "ba", "ab"):
        longs(home, *names)
        home.put("\x02\x04")
        home.run(file)
    assert home.rows() == [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 2, "b": 1}]
    home.put("\x02\x04", "\x02\x04")
    home.run(file + 'version_strategy = "latest"\n')  # said, it counts for the file as well
    assert home.rows().count({"a": 2, "b": 1}) == 3


class Halted(ForkEngine):
    """Plans, and comes no further."""

    def run(self, job: Any) -> Any:
        raise FatalError("halted")


@pytest.mark.parametrize(
    ("strategy", "is_asked"),
    [("", False), ('version_strategy = "latest"\n', False), ('version_strategy = "latest"\n', True)],
)
def test_a_planned_epoch_takes_the_file_as_it_is_now_and_a_version_of_the_registry_if_asked(
    home: Home, capsys: pytest.CaptureFixture[str], strategy: str, is_asked: bool
) -> None:
    file = LONGS + 'schema_file = "r.avsc"\n' + strategy
    longs(home, "a", "b")
    home.put("\x02\x04")
    with pytest.raises(FatalError, match="halted"):
        supervisor.run(home.pipeline(file), Halted(1), drain=True)
    longs(home, "b", "a")
    if is_asked:
        with pytest.raises(SystemExit, match="0"):
            cli.main(["offsets", "restage", str(home.path / "pipeline.toml")])
        assert "by the schemas that the file asks for then" in capsys.readouterr().out
    home.run(file)
    assert home.rows() == [{"b": 1, "a": 2} if is_asked or not strategy else {"a": 1, "b": 2}]


def test_a_schema_that_was_too_strict_is_corrected_and_the_run_goes_on(home: Home) -> None:
    entry = '[[schemas]]\ntopic = "/a"\nschema_type = "json_schema"\nschema_file = "o.json"\ncompatibility = "none"\n'
    one = {"type": "object", "properties": {"id": {"type": "integer"}}, "additionalProperties": False}
    (home.path / "o.json").write_text(json.dumps(one))
    home.put({"id": 1}, {"id": 2, "x": 3})
    with pytest.raises(ConnectorError, match="PEN-3001"):
        home.run(entry, on_error="stop")
    one["properties"]["x"] = {"type": "integer"}  # type: ignore[index]
    (home.path / "o.json").write_text(json.dumps(one))
    home.run(entry, on_error="stop")
    assert home.rows() == [{"id": 1, "x": None}, {"id": 2, "x": 3}]


def test_a_recovered_epoch_is_split_as_it_was_planned(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[Any] = []
    real = JournalSource.split
    monkeypatch.setattr("penstock.runtime.journal.source.LEAST_SPLIT_ROWS", 10)
    monkeypatch.setattr(JournalSource, "split", lambda self, a, b: splits.append(real(self, a, b)) or splits[-1])
    home.put(*({"id": n} for n in range(100)))
    with pytest.raises(FatalError, match="halted"):
        supervisor.run(home.pipeline(), Halted(3), drain=True)
    supervisor.run(home.pipeline(), ForkEngine(1), drain=True)  # a smaller machine
    assert len(splits[0]) == 3
    assert splits[1] == splits[0], splits
    assert sorted(row["id"] for row in home.rows()) == [*range(100)]


FIXED = '[[schemas]]\ntopic = "/a"\nschema_type = "json_schema"\nschema_file = "s.json"\nmetadata = ["key"]\n'


@pytest.mark.parametrize(
    ("sink", "properties", "words"),
    [
        ("delta", {"a": {"type": "string"}, "A": {"type": "string"}}, "'a' and 'A' of /a differ in case only"),
        ("delta", {"_op": {"type": "string"}}, "PEN-1020 the schema of /a has a field '_op'"),
        ("delta", {"_key": {"type": "string"}}, "PEN-1020 the schema of /a has a field '_key'"),
        ("postgres", {"ctid": {"type": "string"}}, "can have the name 'ctid'"),
        ("postgres", {"n": {"type": "object", "properties": {"a": {"type": "string"}}}}, "'n' of /a is struct"),
        ("postgres", {f"c{n}": {"type": "string"} for n in range(1700)}, "more than 1,590 columns"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_columns_that_a_target_cannot_have_are_found_before_the_first_message(
    home: Home,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    sink: str,
    properties: Any,
    words: str,
) -> None:
    if sink == "postgres":
        dsn = request.getfixturevalue("server").dsn
        table = f"f{uuid4().hex[:12]}"
        text = f'[sink]\nconnector = "postgres"\ndsn = "{dsn}"\ntable = "public.{table}"\n'
        monkeypatch.setattr("test_messages.PIPELINE", PIPELINE[: PIPELINE.index("[sink]")] + text)
    (home.path / "s.json").write_text(json.dumps({"type": "object", "properties": properties}))
    home.put({"a": "x"})
    home.pipeline(FIXED)
    with pytest.raises(SystemExit):
        cli.main(["check", str(home.path / "pipeline.toml")])
    assert words in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(ConnectorError, match=re.escape(words)):
        home.run(FIXED)
    assert State(home.path / "state", "messages").peek().newest is None


@pytest.mark.parametrize("schema_type", ['"bytes"', '"csv"\ncolumns = ["value", "note"]'])
def test_a_key_that_no_row_can_have_is_found_before_the_first_message(
    home: Home, capsys: pytest.CaptureFixture[str], schema_type: str
) -> None:
    entry = f'[[schemas]]\ntopic = "/a"\nschema_type = {schema_type}\nmetadata = ["key"]\n'
    home.put("x,y")
    home.pipeline(entry + 'key = ["vale"]\n')
    with pytest.raises(SystemExit):
        cli.main(["check", str(home.path / "pipeline.toml")])
    assert "the key of /a names the column 'vale', which its schema does not have" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(ConfigError, match=r"PEN-1020 .*did you mean 'value'"):
        home.run(entry + 'key = ["vale"]\n')
    home.run(entry + 'key = ["value"]\n')


def test_a_schema_that_the_table_cannot_follow_is_found_before_the_first_message(home: Home) -> None:
    for kind in ("integer", "string"):
        (home.path / "s.json").write_text(json.dumps({"type": "object", "properties": {"a": {"type": kind}}}))
        if kind == "integer":
            home.put({"a": 1})
            home.run(FIXED + 'compatibility = "none"\n')
    with pytest.raises(ConnectorError, match="PEN-4001 sink 'delta': the column 'a' of /a is int64 in the target"):
        home.run(FIXED + 'compatibility = "none"\n')


def test_a_pipeline_that_lived_with_letters_for_a_field_starts_again(
    home: Home, server: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its table lost a column's type meanwhile: the schema is the one that it ran with yesterday."""
    table = f"f{uuid4().hex[:12]}"
    text = f'[sink]\nconnector = "postgres"\ndsn = "{server.dsn}"\ntable = "public.{table}"\n'
    monkeypatch.setattr("test_messages.PIPELINE", PIPELINE[: PIPELINE.index("[sink]")] + text)
    properties = {"id": {"type": "integer"}, "v": {"type": "string"}}
    (home.path / "s.json").write_text(json.dumps({"type": "object", "properties": properties}))
    home.put({"id": 1, "v": "x"})
    home.run(FIXED)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {table} ALTER v TYPE date USING NULL")
        home.put({"id": 2}, {"id": 3, "v": "x"})
        with pytest.raises(ConnectorError, match="PEN-4001"):
            home.run(FIXED, on_error="stop")
        said = _misfits_of_check(home, FIXED, capsys)
        assert said == [(True, "such messages become dead letters")]
        assert [ok for ok, _ in _misfits_of_check(home, FIXED, capsys, on_error="stop")] == [False]
        home.run(FIXED)
        home.put({"id": 4}, {"id": 5, "v": "y"})
        with monkeypatch.context() as broken:
            broken.setattr(Postgres, "commit_epoch", _fails)
            with pytest.raises(FatalError):
                home.run(FIXED)
        home.run(FIXED)  # goes on with the epoch that was prepared
        assert connection.execute(f"SELECT id FROM {table} ORDER BY id").fetchall() == [(1,), (2,), (4,)]
    assert sorted(json.loads(letter["payload"])["id"] for letter in home.letters()) == [3, 5]


def _fails(*_: Any) -> None:
    raise FatalError("the process dies here")


def _misfits_of_check(home: Home, schemas: str, capsys: Any, **parts: str) -> list[tuple[bool, str]]:
    """What `check` says of fields that a target has no place for."""
    home.pipeline(schemas, **parts)
    with contextlib.suppress(SystemExit):
        cli.main(["check", str(home.path / "pipeline.toml"), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return [(each["ok"], each["fix"]) for each in findings if "PEN-4001" in each["what"]]


def test_the_columns_of_messages_are_shown_where_they_are_known(home: Home, capsys: Any) -> None:
    both = FIXED + JSON.replace("/a", "/b")
    properties = {"n": {"type": "integer"}, "nothing": {"type": "null"}}
    (home.path / "s.json").write_text(json.dumps({"type": "object", "properties": properties}))

    def shown() -> Any:
        home.pipeline(both)
        with contextlib.suppress(SystemExit):
            cli.main(["check", str(home.path / "pipeline.toml"), "--show-schema", "--json"])
        topics = json.loads(capsys.readouterr().out)["topics"]
        return {
            topic: {n: c for n, c in (about["columns"] or {}).items() if n != "_key"} for topic, about in topics.items()
        }

    assert shown() == {"/a": {"n": {"type": "int64", "delta": None}}, "/b": {}}
    home.put({"n": 1})
    home.put({"x": "y"}, stream="b")
    home.run(both)
    assert shown() == {
        "/a": {"n": {"type": "int64", "delta": "int64"}},
        "/b": {"x": {"type": "string", "delta": "string"}},
    }


def test_an_id_that_the_registry_lacks_is_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        asked = 0

        def fetch_schema_by_id(self, id: int) -> WireSchema:
            self.asked += 1
            if id == 7:
                raise DataError("the registry has no schema with the id 7", code="PEN-3030")
            return WireSchema("avro", '"int"')

    registry, clock = Registry(), [100.0]
    monkeypatch.setattr(codecs.time, "monotonic", lambda: clock[0])
    resolve = codecs.Resolve(registry)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(DataError, match="PEN-3030"):
            resolve(7)
        assert resolve(8).text == '"int"'
    assert registry.asked == 2
    clock[0] += codecs.REFUSED_SECS + 1
    with pytest.raises(DataError, match="PEN-3030"):
        resolve(7)
    assert registry.asked == 3


def test_a_schema_that_one_epoch_has_asked_for_is_not_asked_for_by_the_next(tmp_path: Path) -> None:
    with RegistryServer() as server:
        made = Confluent(ConfluentConfig(url=server.url)).register_schema("s", WireSchema("avro", '"int"'))
        registry = f'[registry]\ntype = "confluent"\nurl = "{server.url}"\n'
        entry = '[[schemas]]\ntopic = "/a"\nschema_type = "avro"\nsubject = "s"\nframing = "confluent"\n'
        ends = '[source]\nconnector = "generator"\n[sink]\nconnector = "console"\n'
        (tmp_path / "p.toml").write_text(f'connector_name = "p"\n{ends}{registry}{entry}')
        run, another = (codecs.Codecs(Pipeline.from_toml(tmp_path / "p.toml").schemas, tmp_path) for _ in range(2))
        first, second, new = (
            pickle.dumps(each.decoders(each.choose(), {}).resolve[None]) for each in (run, run, another)
        )
        assert pickle.loads(first)(made.id).text == '"int"'
        server.calls.clear()
        assert pickle.loads(second)(made.id).text == '"int"'
        assert server.calls == []
        assert pickle.loads(new)(made.id).text == '"int"'  # of another run, whose registry may be another
        assert server.calls != []


def test_two_entries_of_one_subject_use_the_versions_that_each_asks_for(home: Home) -> None:
    for names in ("ab", "ba"):
        longs(home, *names)
        home.run(LONGS + 'schema_file = "r.avsc"\n')
    both = LONGS + "version_strategy = { pinned = 1 }\n" + LONGS.replace("/a", "/b")
    home.put("\x02\x04")
    home.put("\x02\x04", stream="b")
    home.run(both)
    assert (home.rows("a"), home.rows("b")) == ([{"a": 1, "b": 2}], [{"a": 2, "b": 1}])


@pytest.mark.parametrize("second", ['topic = "/b"', 'topic = "/a"\nfor = "sink"'])
def test_two_different_files_for_one_subject_are_refused_with_both_names(home: Home, second: str) -> None:
    longs(home, "a")
    longs(home, "a", "b", file="other.avsc")
    one = LONGS + 'schema_file = "r.avsc"\n' + ('for = "source"\n' if "for" in second else "")
    two = f'[[schemas]]\n{second}\nschema_type = "avro"\nsubject = "r"\nschema_file = "other.avsc"\n'
    home.put("\x02")
    with pytest.raises(
        ConfigError, match=r"PEN-1020(.|\n)*'r' has two schema files that differ(.|\n)*r.avsc(.|\n)*other.avsc"
    ):
        home.run(one + two)
    assert not (home.path / "state" / "schemas").exists()
    longs(home, "a", file="other.avsc")  # two names of one schema are fine
    home.run(one + two)
    assert home.rows() == [{"a": 1}]


def test_only_messages_with_a_new_field_become_letters_of_a_frozen_table(home: Home) -> None:
    frozen = {"sink": 'schema_evolution = "freeze"'}
    home.put({"id": 1, "n": {"a": 1}})
    home.run(**frozen)
    home.put({"id": 2, "z": 1}, {"id": 3}, {"id": 4, "n": {"a": 1, "b": 2}}, {"id": 5, "n": {"a": 2}})
    home.run(**frozen)
    home.put(*({"id": n} for n in range(6, 80)))
    home.run(**frozen)
    assert sorted(row["id"] for row in home.rows()) == [1, 3, *range(5, 80)]
    assert sorted(json.loads(letter["payload"])["id"] for letter in home.letters()) == [2, 4]
    home.put({"id": 80, "z": 1})
    with pytest.raises(ConnectorError, match="PEN-4001"):
        home.run(on_error="stop", **frozen)


@pytest.mark.parametrize("policy", ["discard_row", "discard_value"])
def test_what_fits_is_not_discarded_for_a_field_that_another_message_had(home: Home, policy: str) -> None:
    discards = {"sink": f'schema_evolution = "{policy}"'}
    home.put({"id": 1, "n": {"a": 1}, "l": [{"p": 1}]})
    home.run(**discards)
    home.put({"id": 2, "n": {"a": 2, "b": 1}, "l": [{"p": 2, "q": 3}, {"p": 4}]})
    home.run(**discards)
    home.put({"id": 3, "n": {"a": 3}}, {"id": 4, "n": None, "l": [{"p": 5}, None]}, {"id": 5, "l": []})
    home.run(**discards)
    kept = {"id": 2, "n": {"a": 2}, "l": [{"p": 2}, {"p": 4}]}
    assert home.rows() == [
        {"id": 1, "n": {"a": 1}, "l": [{"p": 1}]},
        *([kept] if policy == "discard_value" else []),
        {"id": 3, "n": {"a": 3}, "l": None},
        {"id": 4, "n": None, "l": [{"p": 5}, None]},
        {"id": 5, "n": None, "l": []},
    ]


def test_most_of_a_topic_does_not_drain_into_the_dead_letters(home: Home) -> None:
    home.put(*({"id": n} for n in range(500)))
    home.put(*(["x"] for _ in range(600)))
    with pytest.raises(ConnectorError, match="PEN-3002"):
        home.run()
    assert home.letters() == []


def test_an_epoch_that_too_many_records_stop_takes_the_corrected_schema(home: Home) -> None:
    schema, closed = home.path / "order.json", {"type": "object", "additionalProperties": False}
    schema.write_text(json.dumps({**closed, "properties": {"id": {"type": "integer"}}}))
    entry = '[[schemas]]\ntopic = "/a"\nschema_type = "json_schema"\nschema_file = "order.json"\n'
    home.put(*({"id": n, "extra": n} for n in range(1000)))
    with pytest.raises(ConnectorError, match=r"PEN-3002(.|\n)*has 'extra', which(.|\n)*correct the schema file"):
        home.run(entry)
    schema.write_text(json.dumps({**closed, "properties": {key: {"type": "integer"} for key in ("id", "extra")}}))
    home.run(entry)
    assert len(home.rows()) == 1000
    assert home.letters() == []


def test_a_replay_in_a_running_pipeline_says_that_it_keeps_its_schema_files(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.path / "order.json").write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    entry = '[[schemas]]\ntopic = "/a"\nschema_type = "json_schema"\nschema_file = "order.json"\n'
    home.put({"id": "x"})
    home.run(entry)
    pipeline = home.pipeline(entry)
    assert len(letters_asked(pipeline, "replay", {}, "test")[1]) == 1
    monkeypatch.setattr(commands, "is_running", lambda state_dir: True)
    assert "start it again, then replay" in letters_asked(pipeline, "replay", {}, "test")[1][1]
    assert len(letters_asked(pipeline, "drop", {}, "test")[1]) == 1


def test_a_topic_does_not_drain_into_the_dead_letters_run_by_run(home: Home) -> None:
    for number in range(3):
        home.put(*([number] for _ in range(450)))
        if number < 2:
            home.run()
    for _ in range(2):  # a scheduler starts it again and again
        with pytest.raises(ConnectorError, match=r"PEN-3002.* 1,350 of the last 1,350 records"):
            home.run()
    assert len(home.letters()) == 900
    home.run(processing="max_error_rate = 1")
    home.put({"id": 1}, "{")
    home.run()  # who changed the limit has seen what came before
    assert len(home.letters()) == 1351


@pytest.mark.parametrize("size", [1, 30, 400, 5000])
def test_what_a_manifest_keeps_of_earlier_records_covers_the_window_and_stays_small(size: int) -> None:
    messages, manifest = (
        Messages(max_error_rate=1.0),
        Manifest(pipeline="p", incarnation="i", number=1, ranges={}, attempts=[]),
    )
    for _ in range(3000 // size + 5):
        recent = messages.check(manifest, Staged(read=size, bad=size // 3))
        manifest = manifest.model_copy(update={"recent": recent})
    assert manifest.recent is not None
    bad, total = (sum(counts) for counts in zip(*manifest.recent.epochs, strict=True))
    assert 1000 <= total < 1000 + max(size, 100)
    assert bad == total // size * (size // 3)
    assert len(manifest.recent.epochs) <= 21
    for _ in range(50):  # epochs without records move nothing out
        manifest = manifest.model_copy(update={"recent": messages.check(manifest, Staged())})
    assert len(manifest.recent.epochs) <= 22


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('topic = "/a"\nschema_type = "jsn"', "did you mean 'json'"),
        ('topic = "/a"\nschema_type = "json"\nmax_deph = 3', "max_depth"),
        ('topic = "/a"\nschema_type = "avro"\nschema_file = "gone.avsc"', "cannot read the schema file"),
        ('topic = "/a"\nschema_type = "string"\nsubject = "x"', "has no schema"),
        ('topic = "/a/#"\nschema_type = "avro"', "names no subject"),
        ('topic = "/a/#"\nschema_type = "avro"\nsubject = "{topic}-value"', "names no subject"),
        ('topic = "/a"\nschema_type = "avro"\nsubject = "{record}"', "no `schema_file`"),
        ('topic = "/a"\nschema_type = "avro"\nexpected_subject = "x"', "looks at the frames"),
        ('topic = "/a"\nschema_type = "avro"\nsubject = "{table}"', "only {topic} and {record}"),
        ('topic = "/a"\nschema_type = "json"\n[[schemas]]\ntopic = "/a"\nschema_type = "csv"', "two .* entries"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said_with_its_place(home: Home, entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        home.pipeline("[[schemas]]\n" + entry + "\n")


@pytest.mark.parametrize(
    ("kind", "text", "record"),
    [
        ("avro", '{"type": "record", "name": "Beat", "namespace": "shop", "fields": []}', "shop.Beat"),
        ("json_schema", '{"title": "Beat", "type": "object"}', "Beat"),
        ("protobuf", 'syntax = "proto3"; package shop; message Beat { int32 a = 1; }', "shop.Beat"),
    ],
)
@pytest.mark.parametrize("subject", ["{topic}-value", "{record}", "{topic}-{record}"])
def test_a_subject_is_named_by_topic_and_record_as_other_clients_do(
    home: Home, kind: str, text: str, record: str, subject: str
) -> None:
    path = home.path / ("beat.proto" if kind == "protobuf" else "beat.json")
    path.write_text(text)
    entry = f'topic = "/shop/#"\nschema_type = "{kind}"\nschema_file = "{path}"\nsubject = "{subject}"\n'
    entry = entry.replace("#", "beats") if "{topic}" in subject else entry
    [found] = home.pipeline("[[schemas]]\n" + entry).schemas.entries
    wanted = subject.replace("{topic}", "shop.beats").replace("{record}", record)
    assert found.subject == wanted
    assert found.file is not None
    assert found.file.subject == wanted


@pytest.mark.parametrize(("kind", "text"), [("avro", '"string"'), ("json_schema", "{}"), ("avro", "{")])
def test_a_subject_by_record_needs_a_schema_with_a_name(home: Home, kind: str, text: str) -> None:
    (home.path / "beat.json").write_text(text)
    entry = f'topic = "/a"\nschema_type = "{kind}"\nschema_file = "{home.path}/beat.json"\nsubject = "{{record}}"\n'
    with pytest.raises(ConfigError, match=r"no name for the \{record\}|not an Avro schema"):
        home.pipeline("[[schemas]]\n" + entry)


def change(op: str, before: Any = None, after: Any = None, lsn: int = 1) -> dict[str, Any]:
    return {"before": before, "after": after, "source": {"lsn": lsn, "ts_ms": 1_700_000_000_000}, "op": op}


def test_a_topic_of_debezium_changes_is_applied_to_an_upsert_table(home: Home) -> None:
    entry = '[[schemas]]\ntopic = "/a"\nschema_type = "debezium"\n'
    upsert = {"sink": 'mode = "upsert"'}
    key = json.dumps({"id": 1})
    home.put(
        (key, change("c", after={"id": 1, "name": "a"}, lsn=1)),
        ('{"id": 2}', change("c", after={"id": 2, "name": "b"}, lsn=2)),
        ('{"id": 3}', change("c", after={"id": 3, "name": "c"}, lsn=3)),
        (key, change("u", after={"id": 1, "name": "z"}, lsn=4)),
        ('{"id": 2}', change("d", before={"id": 2, "name": "b"}, lsn=5)),
        ('{"id": 2}', None),
        (None, None),
        (key, change("?", after={"id": 1, "name": "y"}, lsn=6)),
    )
    home.run(entry, **upsert)
    assert home.rows() == [{"id": 1, "name": "z"}, {"id": 3, "name": "c"}]
    assert sorted(letter["rule"] for letter in home.letters()) == ["debezium.op", "debezium.tombstone"]
    home.put(('{"id": 3}', None), (key, change("u", after={"id": 1, "name": "y", "size": 1.5}, lsn=7)))
    home.run(entry, **upsert)
    assert home.rows() == [{"id": 1, "name": "y", "size": 1.5}]


@pytest.mark.parametrize("is_one_epoch", [True, False])
@pytest.mark.parametrize("tombstone", [None, {"schema": None, "payload": None}])
def test_a_tombstone_after_a_delete_brings_neither_a_row_nor_a_letter(
    home: Home, is_one_epoch: bool, tombstone: Any
) -> None:
    def dressed(value: Any) -> Any:
        return {"schema": {"type": "struct", "fields": [{"field": "id"}]}, "payload": value}

    messages = [
        (json.dumps(dressed({"id": 1})), dressed(change("c", after={"id": 1, "name": "a"}, lsn=1))),
        (json.dumps(dressed({"id": 2})), dressed(change("c", after={"id": 2, "name": "b"}, lsn=2))),
        (json.dumps(dressed({"id": 1})), dressed(change("d", before={"id": 1, "name": "a"}, lsn=3))),
        (json.dumps(dressed({"id": 1})), tombstone),
        (json.dumps(dressed({"id": 2})), {"payload": change("u", after={"id": 2, "name": "c"}, lsn=4), "schema": {}}),
    ]
    for some in [messages] if is_one_epoch else [[each] for each in messages]:
        home.put(*some)
        home.run('[[schemas]]\ntopic = "/a"\nschema_type = "debezium"\n', sink='mode = "upsert"')
    assert home.rows() == [{"id": 2, "name": "c"}]
    assert home.letters() == []


def test_a_fraction_in_one_key_spoils_no_delete_of_another(home: Home) -> None:
    entry, upsert = '[[schemas]]\ntopic = "/a"\nschema_type = "debezium"\n', {"sink": 'mode = "upsert"'}
    home.put(*((json.dumps({"id": n}), change("c", after={"id": n}, lsn=n)) for n in (1, 2, 3, 6)))
    home.run(entry, **upsert)
    bad = ('{"id": 17.5}', change("c", after={"id": 17.5}, lsn=9))
    home.put(('{"id": 6}', change("d", lsn=8)), ('{"id": 3}', None), bad)
    home.run(entry, **upsert)
    assert home.rows() == [{"id": 1}, {"id": 2}]
    assert len(home.letters()) == 1


class TestSchemaCommands:
    """`penstock schemas` and `penstock check` with a pipeline file."""

    AVRO = '[[schemas]]\ntopic = "/a"\nschema_type = "avro"\nschema_file = "r.avsc"\nsubject = "r"\n'

    def call(self, home: Home, capsys: pytest.CaptureFixture[str], *words: str, ok: bool = True) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([words[0], str(home.path / "pipeline.toml"), *words[1:]])
        found = capsys.readouterr()
        assert (ended.value.code == 0) is ok, found.out + found.err
        return found.out

    def write(self, home: Home, kind: str) -> None:
        schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": kind}]}
        (home.path / "r.avsc").write_text(json.dumps(schema))

    def test_files_are_checked_registered_and_shown(self, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        self.write(home, "long")
        home.pipeline(self.AVRO)
        assert "r: the subject is new" in self.call(home, capsys, "check")
        assert "no subjects" in self.call(home, capsys, "schemas", "list")
        assert "version 1" in self.call(home, capsys, "schemas", "register")
        assert '"long"' in self.call(home, capsys, "schemas", "show", "r")
        self.write(home, "string")
        found = self.call(home, capsys, "check", ok=False)
        assert "PEN-4030" in found
        assert "nothing was registered: R.id: long cannot be read as string (avro.type)\n" in found
        assert "PEN-4030" in self.call(home, capsys, "schemas", "check", ok=False)

    def test_a_registry_that_does_not_answer_is_found_by_check(
        self, home: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.write(home, "long")
        home.pipeline(self.AVRO + '[registry]\ntype = "confluent"\nurl = "http://127.0.0.1:9"\n')
        assert "r: PEN-" in self.call(home, capsys, "check", ok=False)

    def test_check_advises_to_pin_what_others_may_change(self, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        self.write(home, "long")
        home.pipeline(self.AVRO)
        self.call(home, capsys, "schemas", "register")
        home.pipeline(self.AVRO.replace('schema_file = "r.avsc"\n', ""))
        assert "pin it with version_strategy" in self.call(home, capsys, "check")
        home.pipeline(self.AVRO.replace('schema_file = "r.avsc"', "version_strategy = { pinned = 1 }"))
        assert "pin it" not in self.call(home, capsys, "check")


def test_letters_are_told_in_the_log_and_counted(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    home.put({"id": 1}, "{")
    pipeline = home.pipeline()
    telemetry = Telemetry.of(pipeline)
    with caplog.at_level("WARNING", "penstock"):
        supervisor.run(pipeline, ForkEngine(2), drain=True, telemetry=telemetry)
    telemetry.close()
    assert "dead_letters=1" in caplog.text
    assert "source=listed stream=a topic=/a PEN-3001" in caplog.text
    assert 'penstock_dead_letters_total{code="PEN-3001"} 1.0' in telemetry.metrics().decode()
    assert telemetry.status()["dead_letters"] == 1


def test_a_store_of_letters_that_is_no_sink_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="no sink is named 'detla'; did you mean 'delta'"):
        home.pipeline(processing='dead_letter_sink = "detla"')


def test_json_comes_in_and_avro_goes_out(home: Home) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
    (home.path / "r.avsc").write_text(json.dumps(schema))
    entries = (
        '[[schemas]]\ntopic = "/a"\nfor = "source"\nschema_type = "json"\n'
        '[[schemas]]\ntopic = "/a"\nfor = "sink"\nschema_type = "avro"\nschema_file = "r.avsc"\nframing = "confluent"\n'
    )
    home.put({"id": 1}, {"id": 2})
    home.pipeline(entries)
    file = home.path / "pipeline.toml"
    text = file.read_text().replace(
        'connector = "delta"\npath = "lake/{topic}"', 'connector = "test_messages:Sent"\npath = "out"'
    )
    file.write_text(text.replace("exactly-once", "at-least-once"))
    pipeline = Pipeline.from_toml(file)
    supervisor.run(pipeline, ForkEngine(1), drain=True)
    assert (home.path / "out").read_bytes() == b"\x00\x00\x00\x00\x01\x02" + b"\x00\x00\x00\x00\x01\x04"


def test_the_schema_that_messages_were_read_by_goes_on_with_them(home: Home) -> None:
    (home.path / "r.json").write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    home.put({"id": 1}, {"id": 2})
    home.pipeline('[[schemas]]\ntopic = "/a"\nfor = "source"\nschema_type = "json_schema"\nschema_file = "r.json"\n')
    file = home.path / "pipeline.toml"
    text = file.read_text().replace(
        'connector = "delta"\npath = "lake/{topic}"', 'connector = "test_messages:Tagged"\npath = "out"'
    )
    file.write_text(text.replace("exactly-once", "at-least-once"))
    supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)
    named = {"penstock.schema_subject": "a", "penstock.schema_version": "1", "penstock.schema_id": "1"}
    assert [json.loads(line) for line in (home.path / "out").read_text().splitlines()] == [named, named]


@pytest.mark.parametrize(
    ("strategy", "version"), [('"latest"', 2), ("{ pinned = 1 }", 1), ("{ minimum = 1 }", 2), ("{ minimum = 2 }", 2)]
)
def test_what_goes_out_is_written_by_the_version_that_was_chosen(home: Home, strategy: str, version: int) -> None:
    fields: list[dict[str, Any]] = [{"name": "id", "type": "long"}]
    home.put({"id": 1})
    incoming = '[[schemas]]\ntopic = "/a"\nfor = "source"\nschema_type = "json"\n'
    sent = '[[schemas]]\ntopic = "/a"\nfor = "sink"\nschema_type = "avro"\nsubject = "r"\nframing = "confluent"\n'
    for more in ([], [{"name": "note", "type": ["null", "string"], "default": None}]):
        schema = {"type": "record", "name": "R", "fields": fields + more}
        (home.path / "r.avsc").write_text(json.dumps(schema))
        home.pipeline(incoming + sent + 'schema_file = "r.avsc"\n')
        with pytest.raises(SystemExit, match="0"):
            cli.main(["schemas", str(home.path / "pipeline.toml"), "register"])
    home.pipeline(incoming + sent + f"version_strategy = {strategy}\n")
    file = home.path / "pipeline.toml"
    text = file.read_text().replace(
        'connector = "delta"\npath = "lake/{topic}"', 'connector = "test_messages:Sent"\npath = "out"'
    )
    file.write_text(text.replace("exactly-once", "at-least-once"))
    supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)
    note = {1: b"", 2: b"\x00"}[version]
    assert (home.path / "out").read_bytes() == b"\x00\x00\x00\x00" + bytes([version]) + b"\x02" + note


def test_a_source_is_given_the_schema_of_each_of_its_topics(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(Listed, "producer_configs", lambda self: given.extend(self.context.produces) or ())
    pipeline = home.pipeline()
    route = replace(pipeline.router.routes[0], stream="a", to="/a")
    supervisor.run(replace(pipeline, router=replace(pipeline.router, routes=(route,))), ForkEngine(1), drain=True)
    assert [each.schema_config for each in given] == [{"topic": "/a", "schema_type": "json"}]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_structs_that_gain_fields_are_followed_by_files(home: Home, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PIPELINE.replace('connector = "delta"', f'connector = "files"\nformat = "{kind}"')
    monkeypatch.setattr("test_messages.PIPELINE", files)
    for number, fields in enumerate([{"x": 1}, {"y": [{"p": 1}]}, {"x": 3, "y": [{"q": 2}]}]):
        home.put({"id": number, "s": fields})
        home.run()
    assert home.letters() == []
    found = read_published(home.path / "lake" / "a").to_pylist()
    assert [row["s"] for row in found] == [
        {"x": 1, "y": None},
        {"x": None, "y": [{"p": 1, "q": None}]},
        {"x": 3, "y": [{"p": None, "q": 2}]},
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"v": "a\0"},
        {"v": "a", "w": ["b", "\0"]},
        {"": 1},
        {"ctid": 1},
        {"x" * 64: 1},
        {"a\0": 1},
        {"s": {"a": 1}},
        {"s": [[1]]},
        {"s": [{"a": 1}]},
    ],
    ids=repr,
)
def test_what_no_table_of_postgres_can_hold_is_a_dead_letter_alone(
    home: Home, server: PostgresServer, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"t{abs(hash(repr(bad)))}"
    sink = PIPELINE[: PIPELINE.index("[sink]")] + f'[sink]\nconnector = "postgres"\ndsn = "{server.dsn}"\n'
    monkeypatch.setattr("test_messages.PIPELINE", sink)
    home.put({"id": 1, "v": "x"}, {"id": 2, **bad}, {"id": 3}, stream=table)
    home.run(JSON.replace("/a", f"/{table}"))
    home.put(*({"id": n} for n in range(4, 80)), stream=table)
    home.run(JSON.replace("/a", f"/{table}"))
    assert [(letter["rule"], json.loads(letter["payload"])["id"]) for letter in home.letters()] == [("sink", 2)]
    with psycopg.connect(server.dsn) as connection:
        found = connection.execute(f"SELECT id FROM {table} ORDER BY id").fetchall()
    assert found == [(n,) for n in (1, *range(3, 80))]


def test_a_message_with_more_columns_than_a_table_of_postgres_has_is_a_dead_letter_alone(
    home: Home, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"w{uuid4().hex[:12]}"
    sink = PIPELINE[: PIPELINE.index("[sink]")] + f'[sink]\nconnector = "postgres"\ndsn = "{server.dsn}"\n'
    monkeypatch.setattr("test_messages.PIPELINE", sink)
    home.put({"id": 1, "v": "x"}, {"id": 2, **{f"c{n}": n for n in range(1700)}}, {"id": 3, "w": 1}, stream=table)
    home.run(JSON.replace("/a", f"/{table}"))
    home.put({"id": 4, "c5": 5}, stream=table)
    home.run(JSON.replace("/a", f"/{table}"))
    assert [(letter["rule"], json.loads(letter["payload"])["id"]) for letter in home.letters()] == [("sink", 2)]
    assert "1,590 columns" in home.letters()[0]["reason"]
    with psycopg.connect(server.dsn) as connection:
        assert connection.execute(f"SELECT id, c5 FROM {table} ORDER BY id").fetchall() == [
            (1, None),
            (3, None),
            (4, 5),
        ]


def test_whole_numbers_and_fractions_that_come_together_are_one_column(home: Home) -> None:
    home.put({"v": 1}, {"v": 2.5}, {"v": 3})
    home.run()
    assert [row["v"] for row in home.rows()] == [1.0, 2.5, 3.0]
    home.put({"v": 4})
    home.run()
    assert len(home.rows()) == 4
    assert home.letters() == []


def test_a_payload_cannot_pass_for_a_change(home: Home) -> None:
    home.put({"id": 1}, {"id": 1, "_op": "d", "_position": "9"}, {"id": 2, "_position": "anything"})
    home.run()
    assert sorted(row["id"] for row in home.rows()) == [1, 2]
    (letter,) = home.letters()
    assert letter["rule"] == "column.reserved"
    home.put({"id": 3})
    home.run()
    assert sorted(row["id"] for row in home.rows()) == [1, 2, 3]


@pytest.mark.parametrize("wrapped", [lambda each: each, lambda each: [each]])
def test_fields_of_objects_that_differ_in_case_only_make_letters_of_their_own_rows(
    home: Home, wrapped: Callable[[Any], Any]
) -> None:
    home.put({"id": 1, "n": wrapped({"a": 1})}, {"id": 2, "n": wrapped({"A": 2})}, {"id": 3})
    home.run()
    home.put(
        {"id": 4, "n": wrapped({"a": 4, "A": 4})}, {"id": 5, "n": wrapped({"a": 5})}, {"id": 6, "n": wrapped({"A": 6})}
    )
    home.run()
    assert [row["id"] for row in home.rows()] == [1, 3, 5]
    assert [row["n"] for row in home.rows()] == [wrapped({"a": 1}), None, wrapped({"a": 5})]
    assert sorted(json.loads(each["payload"])["id"] for each in home.letters()) == [2, 4, 6]
    assert {each["code"] for each in home.letters()} == {"PEN-4001"}


ODD_NAMES = ["a", "A", "b", "a.b", "c", "", "_key", "_op", "\0", "é", "e\u0301", "id"]
ODD_VALUES = [1, 2.5, "x", None, True, "", -0.0, 1e300, 2**53 + 1, 2**70, "2026-01-01", [], {}]


def odd(choice: random.Random, depth: int = 0) -> Any:
    """A value of any shape, with names and numbers that no table likes."""
    kind = choice.random()
    if depth > 4 or kind < 0.35:
        return choice.choice(ODD_VALUES)
    if kind < 0.6:
        return [odd(choice, depth + 1) for _ in range(choice.randint(0, 3))]
    return {choice.choice(ODD_NAMES): odd(choice, depth + 1) for _ in range(choice.randint(0, 4))}


@pytest.mark.parametrize("sink", ["delta", "iceberg", "files"])
def test_whatever_comes_each_message_is_a_row_or_a_letter(
    home: Home, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_messages.PIPELINE", PIPELINE.replace('connector = "delta"', f'connector = "{sink}"'))
    choice, sent = random.Random(5), 0
    for _ in range(3):
        for _ in range(60):
            value = odd(choice)
            text = json.dumps(value if choice.random() < 0.1 else {"id": sent, "o": value})
            home.put(text if choice.random() < 0.95 else text[: len(text) // 2])
            sent += 1
        home.run(processing="max_error_rate = 1.0")
    pipeline = home.pipeline()
    (made,) = pipeline.sinks.values()
    made.open()
    found = made.read_topic("/a") if isinstance(made, Readable) else None
    assert found is not None
    assert found.num_rows + len(home.letters()) == sent
    assert 10 < found.num_rows < sent


@pytest.mark.parametrize(
    "wrapped", [lambda each: each, lambda each: {"p": each}, lambda each: [each], lambda each: [{"p": each}]]
)
def test_an_object_whose_first_fields_differ_in_case_only_makes_a_letter_of_its_message_alone(
    home: Home, wrapped: Callable[[Any], Any]
) -> None:
    home.put({"id": 1}, {"id": 2, "n": wrapped({"a": 1, "A": 2})}, {"id": 3})
    home.run()
    assert home.rows() == [{"id": 1}, {"id": 3}]
    home.put({"id": 4, "n": wrapped({"a": 4})}, {"id": 5, "n": wrapped({"A": 5})})
    home.run()
    found = {row["id"]: row["n"] for row in home.rows()}
    assert found == {1: None, 3: None, 4: wrapped({"a": 4})}
    assert sorted(json.loads(each["payload"])["id"] for each in home.letters()) == [2, 5]


def test_a_new_member_of_an_object_is_followed_or_left_out_by_itself(home: Home) -> None:
    for policy, wanted in (("evolve", 2), ("discard_value", None)):
        home.path = home.path / policy
        home.path.mkdir()
        parts = {"sink": f'schema_evolution = "{policy}"'}
        for n in ({"a": 1}, {"a": 2, "b": 2}, {"a": 3}):
            home.put({"id": n["a"], "n": n})
            home.run(**parts)
        assert [row["n"]["a"] for row in home.rows()] == [1, 2, 3]
        assert home.rows()[1]["n"].get("b") == wanted
        assert home.letters() == []


def test_check_takes_a_subject_that_another_entry_of_the_file_brings(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.path / "order.avsc").write_text(
        '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'
    )
    one = '[[schemas]]\ntopic = "/out"\nfor = "sink"\nschema_type = "avro"\nschema_file = "order.avsc"\nsubject = "orders"\n'
    home.pipeline(one + '[[schemas]]\ntopic = "/a"\nschema_type = "avro"\nsubject = "orders"\n')
    with pytest.raises(SystemExit):
        cli.main(["check", str(home.path / "pipeline.toml")])
    out = capsys.readouterr().out
    assert out.count("orders: the subject is new") == 2
    assert "PEN-1031" not in out
