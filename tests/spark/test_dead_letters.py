"""Rows that fail in a query, or that a sink refuses of its results, become dead letters, and can be replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from spark_connectors import Keyed, KeyedConfig

from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.errors import DataError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Route, Router
from penstock.runtime.epochs import State
from penstock.runtime.messages.letters import rows_of
from penstock.runtime.messages.replay import ReplayRequests, Step
from penstock.sink import DeliveryGuarantee, Topic, WriteResult
from penstock.spark import sieve

ROWS = 12
"""Enough to be halved a few times: each query that fails takes a worker of Python with it."""


class Choosy(FilesSink):
    """Refuses one row, until a file says that it was corrected."""

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        is_corrected = Path(self.config.path).parent.parent.joinpath("corrected").exists()
        if not is_corrected and pc.any(pc.equal(batch.column("row"), 14)).as_py():
            raise DataError("14 is refused")
        return super().write_batch(topic, batch)


@pytest.fixture
def drained(tmp_path: Path, spark: Any) -> Callable[..., Any]:
    def drained(*routes: Route, kind: type[FilesSink] = FilesSink, **processing: Any) -> Any:
        settings = {"state_dir": tmp_path / "state", "on_error": "dead_letter", "max_retries": 0, **processing}
        return Pipeline(
            "sql-letters",
            sources={"source": Keyed(KeyedConfig(rows=ROWS))},
            sinks={"lake": kind(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
            router=Router(routes, ("lake",)),
            delivery=DeliveryGuarantee.EXACTLY_ONCE,
            processing=Processing(**settings),
        ).run(spark=spark, drain=True)

    return drained


def numbers(tmp_path: Path, topic: str = "rows") -> list[int]:
    return sorted(read_published(tmp_path / "lake" / topic)["row"].to_pylist())


def letters(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "state" / "dead_letters"
    return sorted(
        DeltaTable(path).to_pyarrow_table().to_pylist(), key=lambda letter: rows_of(letter["payload"])["row"][0].as_py()
    )


def ask(tmp_path: Path) -> None:
    state = State(tmp_path / "state", "sql-letters").peek()
    assert state.newest is not None
    step = Step(verb="replay", incarnation=state.identity.incarnation, epoch=state.newest.number)
    ReplayRequests.of(tmp_path / "state").add(step)


DIVIDED = "SELECT key, row, 100 DIV ((row - 3) * (row - 9)) AS share FROM input"
FIXED = "SELECT key, row, 100 DIV nullif((row - 3) * (row - 9), 0) AS share FROM input"


def test_rows_that_a_query_fails_on_become_letters_and_come_back_after_a_fix(drained: Any, tmp_path: Path) -> None:
    summary = drained(Route(sql=DIVIDED), Route(to="/raw"))
    assert numbers(tmp_path) == [row for row in range(ROWS) if row not in (3, 9)]
    assert numbers(tmp_path, "raw") == list(range(ROWS))
    assert summary.rows_in == ROWS
    found = letters(tmp_path)
    assert [rows_of(letter["payload"])["row"][0].as_py() for letter in found] == [3, 9]
    assert {(letter["code"], letter["rule"], letter["topic"], letter["sink"]) for letter in found} == {
        ("PEN-3003", "sql", "/rows", None)
    }
    assert {letter["kind"] for letter in found} == {"input"}
    assert "DIVIDE_BY_ZERO" in found[0]["reason"]
    ask(tmp_path)
    drained(Route(sql=FIXED), Route(to="/raw"))
    assert numbers(tmp_path) == list(range(ROWS))
    assert numbers(tmp_path, "raw") == list(range(ROWS))
    assert len(letters(tmp_path)) == 2


def test_rows_of_a_query_that_a_sink_refuses_become_letters_and_go_to_that_sink_past_the_query(
    drained: Any, tmp_path: Path
) -> None:
    route = Route(sql="SELECT key, row * 2 AS row FROM input WHERE row < 10")
    drained(route, kind=Choosy)
    assert numbers(tmp_path) == [0, 2, 4, 6, 8, 10, 12, 16, 18]
    (letter,) = letters(tmp_path)
    assert (letter["sink"], letter["kind"], letter["stream"]) == ("lake", "row", "rows")
    (tmp_path / "corrected").touch()
    ask(tmp_path)
    drained(route, kind=Choosy)
    assert numbers(tmp_path) == list(range(0, 20, 2))


def test_a_query_that_fails_on_too_many_rows_stops_the_run(
    drained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sieve, "TRIES", 5)
    with pytest.raises(DataError, match="PEN-3003"):
        drained(Route(sql=DIVIDED))


MESSAGES = """
connector_name = "sql-letters"
delivery = "exactly-once"
[processing]
on_error = "dead_letter"
[[schemas]]
topic = "/a"
schema_type = "json"
[[schemas]]
topic = "/chosen"
schema_type = "json"
[source]
connector = "test_messages:Listed"
path = "in.jsonl"
[[routes]]
to = "/a"
sql = "SELECT * FROM input"
[[routes]]
to = "/chosen"
sql = "SELECT id, `a.b` + 1 AS more FROM input"
[sink]
connector = "delta"
path = "lake/{topic}"
"""


def test_a_message_with_an_odd_name_makes_no_query_of_its_topic_fail(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    odd = [{"ID": 2}, {"id": 3, "a.b": 1}, {"id": 4, "a`b": 1}, {"id": 5, "o": {"x": 1, "X": 2}}, {"id": 6, "": 1}]
    lines = [json.dumps(["s", None, json.dumps(each)]) for each in ({"id": 1}, *odd)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "pipeline.toml").write_text(MESSAGES)
    Pipeline.from_toml(tmp_path / "pipeline.toml").run(spark=spark, drain=True)
    whole, chosen = (DeltaTable(tmp_path / "lake" / name).to_pyarrow_table() for name in ("a", "chosen"))
    assert sorted(whole["id"].to_pylist()) == [1, 3, 4, 6]
    assert sorted(row["id"] for row in whole.to_pylist() if row["a.b"] or row["a`b"] or row[""]) == [3, 4, 6]
    assert sorted(chosen["id"].drop_null().to_pylist()) == [1, 3, 4, 5, 6]
    assert {row["id"]: row["more"] for row in chosen.to_pylist()}[3] == 2
    found = DeltaTable(tmp_path / "state" / "dead_letters").to_pyarrow_table().to_pylist()
    assert {letter["topic"] for letter in found} == {"/a"}
    assert sorted(rows_of(letter["payload"])["id"][0].as_py() or 2 for letter in found) == [2, 5]
    assert all("differ in case only" in letter["reason"] for letter in found)


@pytest.mark.parametrize(
    ("counts", "bad", "most"),
    [
        ([300], [(0, 299)], 10),
        ([300], [(0, 7)], 15),
        ([0, 300, 0], [(1, 0), (1, 7), (1, 213)], 31),
        ([4, 300], [(0, 3), (1, 5)], 21),
        ([1], [(0, 0)], 1),
    ],
)
def test_every_row_at_fault_is_found_and_a_half_that_must_hold_one_is_not_asked(
    counts: list[int], bad: list[tuple[int, int]], most: int
) -> None:
    asked = []

    def fails(task: int, low: int, high: int) -> DataError | None:
        asked.append((task, low, high))
        held = any(task == where and low <= row < high for where, row in bad)
        return DataError(f"row {low}") if held else None

    found = sieve.find(counts, fails, DataError("the whole"))
    assert [(task, row) for task, rows in found.items() for row in sorted(rows)] == bad
    assert {why for rows in found.values() for why in rows.values()} == {f"row {row}" for _, row in bad}
    assert len(asked) <= most


def test_a_query_stops_the_run_where_rows_may_not_become_letters(drained: Any) -> None:
    with pytest.raises(DataError, match="PEN-3003"):
        drained(Route(sql=DIVIDED), on_error="skip")
