"""Dead letters are brought back by a source: exactly once, by a position in the manifest, to where they were going."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from rich.console import Console

from penstock import cli
from penstock.cli import dlq
from penstock.config import Config
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.errors import DataError
from penstock.formats import Failures
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Route, Router
from penstock.runtime import supervisor
from penstock.runtime.epochs import State, reset
from penstock.runtime.job import Job, Part
from penstock.runtime.messages import letters
from penstock.runtime.messages.box import Store
from penstock.runtime.messages.letters import LETTERS, REPLAY
from penstock.runtime.messages.replay import Replay, ReplayConfig, Replayed, ReplayRequests, Step, parse_where
from penstock.runtime.reading import Reading, Rows
from penstock.sink import DeliveryGuarantee, Epoch, Topic, WriteResult
from penstock.source import ENVELOPE_SCHEMA, Position, RangeSource, ReadLimit, SourceBatch
from penstock.testing import ForkEngine
from penstock.testing.database import MemoryDatabase, MemoryTables, MemoryTablesConfig
from test_messages import JSON, Home

pytestmark = pytest.mark.processes

NUMBERS = '[[schemas]]\ntopic = "/a"\nschema_type = "json"\nkey = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Home(tmp_path)


def ask(home: Home, verb: Any = "replay", **where: str) -> None:
    """As `penstock dlq` does."""
    state = State(home.path / "state", "messages").peek()
    assert state.newest is not None
    requests = ReplayRequests.of(home.path / "state")
    requests.add(Step(verb=verb, incarnation=state.identity.incarnation, epoch=state.newest.number, where=where))


def attempts(home: Home) -> list[int]:
    return sorted(letter["attempt"] for letter in home.letters())


def test_after_a_fix_the_letters_become_rows_once(home: Home) -> None:
    home.put({"id": 1}, {"no": 2}, {"id": 3})
    home.run(NUMBERS)
    assert (len(home.rows()), len(home.letters())) == (2, 1)
    ask(home)
    home.run(JSON)
    assert [row["id"] for row in home.rows()] == [1, 3, None]
    assert ReplayRequests.of(home.path / "state").pending() == []
    ask(home)  # a second time there is nothing left to replay
    home.run(JSON)
    assert len(home.rows()) == 3
    assert attempts(home) == [1]


def test_a_record_that_fails_again_is_a_letter_of_the_next_attempt(home: Home) -> None:
    home.put({"id": 1}, {"no": 2})
    home.run(NUMBERS)
    for _ in range(2):
        ask(home)
        home.run(NUMBERS)
    assert attempts(home) == [1, 2, 3]
    assert {letter["payload"] for letter in home.letters()} == {b'{"no": 2}'}
    ask(home)
    home.run(JSON)
    assert sorted(home.rows(), key=repr) == [{"id": 1, "no": None}, {"id": None, "no": 2}]
    assert attempts(home) == [1, 2, 3]


def test_many_letters_that_fail_again_do_not_stop_the_pipeline(home: Home) -> None:
    home.put(*({"id": n} for n in range(1200)), *({"no": n} for n in range(1100)))
    home.run(NUMBERS, processing="max_error_rate = 0.5")
    ask(home)
    home.run(NUMBERS, processing="max_error_rate = 0.5", on_error="stop")
    assert len(home.letters()) == 2200


def test_only_the_letters_that_are_asked_for_come_back(home: Home) -> None:
    both = NUMBERS + NUMBERS.replace("/a", "/b")
    home.put({"id": 1}, {"no": 1})
    home.put({"id": 1}, {"no": 2}, stream="b")
    home.run(both)
    ask(home, topic="/b")
    loose = JSON + JSON.replace("/a", "/b")
    home.run(loose)
    assert (len(home.rows("a")), len(home.rows("b"))) == (1, 2)
    ask(home)
    home.run(loose)
    assert (len(home.rows("a")), len(home.rows("b"))) == (2, 2)


def test_what_is_dropped_does_not_come_back(home: Home) -> None:
    home.put({"id": 1}, {"no": 2}, "{")
    home.run(NUMBERS)
    ask(home, "drop", rule="key.missing")
    ask(home)
    home.run(JSON)
    assert len(home.rows()) == 1
    assert sorted(letter["attempt"] for letter in home.letters()) == [1, 1, 2]


def test_a_drop_wins_over_a_replay_that_was_asked_for_before_and_has_not_begun(home: Home) -> None:
    home.put({"id": 1}, {"no": 2}, "{")
    home.run(NUMBERS)
    ask(home)
    ask(home, "drop", rule="key.missing")
    home.run(JSON)
    assert len(home.rows()) == 1
    assert attempts(home) == [1, 1, 2]
    assert sorted(Store(home.pipeline()).states()) == ["dropped", "open", "replayed"]


class Back(RangeSource[Config, Position]):
    """Brings these letters back."""

    def __init__(self, letters: pa.RecordBatch) -> None:
        self.letters = letters

    def read(self, split: Any) -> Iterator[SourceBatch]:
        yield SourceBatch(self.letters, stream=letters.TOPIC)


def reading(found: pa.RecordBatch, *routes: Route, wanted: Any = lambda target: True) -> tuple[Reading, list[Rows]]:
    """What a task makes of letters that come back."""
    job = Job(
        Epoch("p", "i", 5, "t"),
        [Part(0, REPLAY, None)],
        {REPLAY: Back(found)},
        {},
        Router(routes, ("one", "two")),
        letters="one",
    )
    reading = Reading(job, job.parts, wanted)
    return reading, list(reading)


def message(place: letters.Place, site: str = "north") -> pa.RecordBatch:
    record = {"stream": "a", "payload": b"{}", "attributes": [("site", site)], "timestamp": 0}
    envelope = pa.RecordBatch.from_pylist([record], schema=ENVELOPE_SCHEMA)
    return letters.of_messages(envelope, Failures.of({0: ("r", "why")}), place, Epoch("p", "i", 1, "t"))


def test_a_letter_whose_route_or_sink_is_gone_stays_a_letter() -> None:
    place = letters.Place("s", "a", "/a")
    for gone in (message(place, "south"), message(replace(place, sink="old")), message(replace(place, stream="b"))):
        read, (rows,) = reading(gone, Route(stream="a", match=(("site", "north"),)))
        assert rows.target.topic == letters.TOPIC
        assert rows.batch.select(["rule", "attempt", "epoch", "payload"]).to_pylist() == [
            {"rule": "route.gone", "attempt": 2, "epoch": 5, "payload": b"{}"}
        ]
        assert read.tallies[0].letters == {"/a": 1}
        assert reading(gone, Route(stream="x"), wanted=lambda target: target.topic == "/a")[1] == []


def test_letters_go_to_the_sinks_and_topics_that_lack_them() -> None:
    routes = Route(to="/a", sinks=("one",)), Route(to="/a"), Route(to="/b")
    place = letters.Place("s", "a", "/a")
    _, found = reading(message(place), *routes)  # a letter of before the second route
    assert [(rows.target.topic, rows.target.sinks) for rows in found] == [("/a", ("one",)), ("/a", ("two",))]
    _, found = reading(message(replace(place, sink="two")), *routes)
    assert [(rows.target.topic, rows.target.sinks) for rows in found] == [("/a", ("two",))]


def test_a_row_that_sql_made_goes_to_its_sink_past_the_sql() -> None:
    row = pa.RecordBatch.from_pylist([{"id": 1, "name": "x"}])
    place = letters.Place("s", "a", "/a", "two")
    letter = letters.of_rows(row, "PEN-3000", "sink", "why", place, Epoch("p", "i", 1, "t"))
    route = Route(to="/a", sql="SELECT 1 FROM input", partitions=3)
    _, (rows,) = reading(letter, route)
    assert (rows.target.sinks, rows.target.route.sql, rows.target.route.partitions) == (("two",), None, 1)
    assert rows.batch == row
    assert rows.place.attempt == 2


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_topic_that_had_the_message_does_not_get_it_again(home: Home, partitions: int) -> None:
    routes = '[[routes]]\nto = "/raw/{stream}"\n\n[[routes]]\nto = "/{stream}"'
    home.put({"id": 1}, {"no": 2})
    for schemas in (NUMBERS, JSON):
        home.pipeline(schemas, partitions=partitions)
        file = home.path / "pipeline.toml"
        file.write_text(file.read_text().replace('[[routes]]\nto = "/{stream}"', routes))
        supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)
        ask(home)
    supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)
    assert (len(home.rows()), len(home.rows("raw/a"))) == (2, 2)


def test_routes_that_meet_in_a_topic_get_their_own_letters(home: Home) -> None:
    home.put({"id": 1}, {"no": 2})
    for schemas in (NUMBERS, JSON):
        home.pipeline(schemas)
        file = home.path / "pipeline.toml"
        text = file.read_text().replace("[sink]", '[[sinks]]\nname = "one"')
        text = text.replace('key = ["id"]\n\n[[sinks]]', 'key = ["id"]\nsinks = ["one"]\n\n[[sinks]]')
        more = (
            '[[routes]]\nfrom = "a"\nto = "/{stream}"\nsinks = ["two"]\n[[sinks]]\nname = "two"\nconnector = "delta"\n'
        )
        file.write_text(text + more + 'path = "second/{topic}"\n')
        supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)
        ask(home)
    supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)
    assert sorted(letter["sink"] for letter in home.letters()) == ["one", "two"]
    assert len(home.rows()) == 2
    assert len(home.rows("../second/a")) == 2


def test_a_drain_replays_what_was_asked_for_before_it_and_no_later(tmp_path: Path) -> None:
    source = Replay(ReplayConfig(path=tmp_path, incarnation="x"))
    source.open(source.context.__class__(tmp_path / "sources" / REPLAY))
    requests = ReplayRequests.of(tmp_path)
    first = requests.add(Step(verb="replay", incarnation="x", epoch=1))
    until = source.latest(Replayed(), ReadLimit())
    requests.add(Step(verb="replay", incarnation="x", epoch=2))
    end = source.latest(Replayed(), ReadLimit(until=until))
    assert end.requests == (first.name,)
    assert source.latest(source.next_start(end, ()), ReadLimit(until=until)) == end


def test_a_request_for_another_incarnation_is_done_with_and_replays_nothing(tmp_path: Path) -> None:
    source = Replay(ReplayConfig(path=tmp_path, incarnation="new"))
    source.open(source.context.__class__(tmp_path / "sources" / REPLAY))
    requests = ReplayRequests.of(tmp_path)
    requests.add(Step(verb="replay", incarnation="old", epoch=9))
    end = source.latest(Replayed(), ReadLimit())
    assert (end.steps, len(end.requests)) == ((), 1)
    source.ack(end)
    assert requests.pending() == []


def test_the_position_does_not_grow_with_every_replay() -> None:
    source = Replay(ReplayConfig(path=Path("x"), incarnation="x"))
    steps = [Step(verb="replay", incarnation="x", epoch=n, where={"topic": "/a"}) for n in range(1, 9)]
    assert source.next_start(Replayed(steps=tuple(steps)), ()).steps == (steps[-1],)
    every = Step(verb="drop", incarnation="x", epoch=8)
    assert source.next_start(Replayed(steps=(*steps, every)), ()).steps == (every,)
    lost = Step(verb="replay", incarnation="of a state that was lost", epoch=99)
    assert source.next_start(Replayed(steps=(lost, every)), ()).steps == (every,)
    later = Step(verb="replay", incarnation="x", epoch=9, where={"topic": "/a"})
    assert source.next_start(Replayed(steps=(every, later)), ()).steps == (every, later)


class TestCommands:
    """`penstock dlq`."""

    def call(self, home: Home, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["dlq", str(home.path / "pipeline.toml"), *words])
        found = capsys.readouterr()
        assert ended.value.code == 0, found.err
        return found.out

    def test_a_user_sees_the_letters_replays_some_and_drops_the_rest(
        self, home: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        home.put({"id": 1}, {"no": 2}, ("k", "{"), {"no": 3})
        home.run(NUMBERS)
        shown = self.call(home, capsys, "show", "--sample", "1")
        assert re.search(r"2 +/a +PEN-3001 +key.missing +1", shown)
        assert "listed/a → /a at p0@" in shown
        (letter,) = json.loads(self.call(home, capsys, "show", "--where", "rule=json.syntax", "--json"))
        assert (letter["payload"], letter["key"], letter["state"]) == ("{", "k", "open")
        assert "replay 2 dead letters" in self.call(home, capsys, "replay", "--where", "rule=key.missing")
        assert "asked for: replay rule=key.missing" in self.call(home, capsys, "show")
        home.run(JSON)
        assert len(home.rows()) == 3
        assert "key.missing" not in self.call(home, capsys, "show")
        assert "drop 1 dead letter:" in self.call(home, capsys, "drop", "--topic", "/a", "--code", "PEN-3001")
        home.run(JSON)
        assert "has no open dead letters" in self.call(home, capsys, "show")
        assert "has no open dead letters" in self.call(home, capsys, "replay")
        every = json.loads(self.call(home, capsys, "show", "--all", "--json"))
        assert sorted(each["state"] for each in every) == ["dropped", "replayed", "replayed"]

    def test_a_payload_cannot_reach_the_terminal(self, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        home.put("\x1b]0;title\a")
        home.run(NUMBERS)
        shown = self.call(home, capsys, "show", "--sample", "9")
        assert "\\x1b]0;title\\x07" in shown
        assert "\x1b" not in shown

    def test_letters_of_an_incarnation_that_was_given_up_are_not_replayed(
        self, home: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        home.put({"no": 2})
        home.run(NUMBERS)
        reset(home.path / "state", "messages")
        assert "has no open dead letters" in self.call(home, capsys, "replay")

    def test_a_topic_may_be_named_without_its_slash(self, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        home.put({"no": 2})
        home.run(NUMBERS)
        assert "key.missing" in self.call(home, capsys, "show", "--topic", "a")
        assert "replay 1 dead letter" in self.call(home, capsys, "replay", "--where", "topic=a")

    @pytest.mark.parametrize(
        "words", [["replay", "--where", "tpic=/a"], ["replay", "show"], ["replay", "a", "b"], ["drop", "--sample", "3"]]
    )
    def test_what_cannot_be_meant_is_refused(
        self, home: Home, capsys: pytest.CaptureFixture[str], words: list[str]
    ) -> None:
        home.pipeline()
        with pytest.raises(SystemExit) as ended:
            cli.main(["dlq", str(home.path / "pipeline.toml"), *words])
        assert ended.value.code == 2
        for example in re.findall(r"--where (\w+=\S+)[,;]", capsys.readouterr().err):
            assert parse_where([example]), "the advice can be followed"


def test_lines_that_a_source_cannot_read_are_kept_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"id": 1}\n{"id": \xff}\n{"id": 2}\nnonsense\n')
    file = tmp_path / "pipeline.toml"
    file.write_text("""
connector_name = "messages"
[processing]
on_error = "dead_letter"
[source]
connector = "files"
path = "in"
format = "jsonl"
columns = { id = "int64" }
[[routes]]
to = "/a"
[[routes]]
to = "/b"
partitions = 2
key = ["id"]
[sink]
connector = "delta"
path = "lake/{topic}"
""")
    home = Home(tmp_path)
    summary = supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)
    assert summary.rows_in == 4, "those that are letters came in as well"
    assert home.rows("a") == home.rows("b") == [{"id": 1}, {"id": 2}]
    found = home.letters()
    assert sorted(letter["payload"] for letter in found) == [b"nonsense", b'{"id": \xff}']
    assert {(letter["kind"], letter["source"], letter["rule"]) for letter in found} == {("record", "files", "source")}
    console = Console(record=True, width=300)
    dlq.command(Pipeline.from_toml(file), "replay", {}, console)
    assert "2 of them will fail again, since the source could not read them" in console.export_text()
    supervisor.run(Pipeline.from_toml(file), ForkEngine(2), drain=True)
    again = [letter for letter in home.letters() if letter["attempt"] == 2]
    assert len(again) == 2
    assert "correct it there" in again[0]["reason"]


class Choosy(Delta):
    """Refuses one row, until a file says that it was corrected."""

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        is_corrected = Path(self.config.path).parent.parent.joinpath("corrected").exists()
        if not is_corrected and "bad" in batch.column("note").to_pylist():
            raise DataError("the note is refused")
        return super().write_batch(topic, batch)


def test_a_row_of_a_table_that_a_sink_refuses_becomes_a_letter_and_its_table_goes_on(tmp_path: Path) -> None:
    (tmp_path / "database").mkdir()
    database = MemoryDatabase(tmp_path / "database")
    for number in range(5):
        database.put("shop", number, "bad" if number == 3 else "good")

    def run() -> None:
        sink = Choosy(DeltaConfig(path=str(tmp_path / "lake" / "{topic}"), mode="upsert"))
        pipeline = Pipeline(
            "messages",
            sources={"tables": MemoryTables(MemoryTablesConfig(path=tmp_path / "database"))},
            sinks={"lake": sink},
            router=Router((), ("lake",)),
            delivery=DeliveryGuarantee.EXACTLY_ONCE,
            processing=Processing(state_dir=tmp_path / "state", on_error="dead_letter"),
        )
        supervisor.run(pipeline, ForkEngine(2), drain=True)

    home = Home(tmp_path)
    run()
    database.put("shop", 9, "good")
    run()
    assert [row["id"] for row in home.rows("shop")] == [0, 1, 2, 4, 9]
    (letter,) = home.letters()
    assert (letter["kind"], letter["stream"], letter["sink"]) == ("row", "shop", "lake")
    (tmp_path / "corrected").touch()
    ask(home)
    run()
    assert [row["id"] for row in home.rows("shop")] == [0, 1, 2, 3, 4, 9]


def test_a_row_that_sql_failed_on_goes_through_the_sql_again() -> None:
    row = pa.RecordBatch.from_pylist([{"id": 1}])
    place = letters.Place("s", "a", "/a", "two")
    letter = letters.of_rows(row, "PEN-3003", "sql", "why", place, Epoch("p", "i", 1, "t"), "input")
    routes = Route(to="/a", sql="SELECT 1 FROM input", sinks=("one",)), Route(to="/a", sql="SELECT 2 FROM input")
    _, (rows,) = reading(letter, *routes)
    assert (rows.target.sinks, rows.target.route.sql) == (("two",), "SELECT 2 FROM input")


def test_names_with_brackets_are_shown_as_they_are(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.put({"no": 1}, stream="a[/x]")
    home.run(NUMBERS.replace("/a", "/#"))
    for words in (["dlq", "show"], ["offsets", "show"], ["schemas", "check"]):
        file = str(home.path / "pipeline.toml")
        with pytest.raises(SystemExit, match="0"):
            cli.main([words[0], file, words[1]] if words[0] != "offsets" else [*words, file])
    shown = capsys.readouterr().out
    assert "/a[/x]" in shown
    assert "no [[schemas]] that" in shown


def test_a_few_letters_are_shown_without_reading_the_payloads_of_all(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('connector_name = "l"\n[source]\nconnector = "generator"\n[sink]\nconnector = "console"\n')
    pipeline = Pipeline.from_toml(file)
    state = State(pipeline.processing.state_dir, "l")
    state.open()
    state.close()
    fixed = {
        "kind": "message",
        "topic": "/t",
        "incarnation": state.identity.incarnation,
        "attempt": 1,
        "failed_at": datetime.now(UTC),
    }
    for epoch in range(12):
        bodies = [os.urandom(200_000) for _ in range(4)]
        rows = [{**fixed, "epoch": epoch, "payload": each} for each in bodies]
        texts = {"source": "s", "stream": "s", "code": "PEN-3001", "rule": "json.syntax", "reason": f"{epoch}"}
        write_deltalake(
            tmp_path / "state" / "dead_letters",
            pa.Table.from_pylist([{**r, **texts} for r in rows], LETTERS),
            mode="append",
        )
    read = lambda: int(Path("/proc/self/io").read_text().split()[1])  # noqa: E731
    before = read()
    store = Store(pipeline)
    newest = store.newest(5, {})
    assert read() - before < 4_000_000, "of 9.6 MB"
    assert [letter["epoch"] for letter, _ in newest] == [10, 11, 11, 11, 11]
    assert {letter["payload"] for letter, _ in newest[1:]} == set(bodies)
    assert store.chosen({})[0].num_rows == 48
