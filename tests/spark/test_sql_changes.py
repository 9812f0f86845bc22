"""SQL over a topic of changes: what a query leaves out must leave the target of a sink that applies changes by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from spark_connectors import Scripted, ScriptedConfig

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.errors import ConfigError, SchemaError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Route, Router
from penstock.sink import DeliveryGuarantee

ADULTS = "SELECT id, upper(name) AS name, age, _op, _position, _unchanged, _old_key FROM input WHERE age >= 18"


def change(op: str, id: int | None, age: int | None = None, **more: Any) -> dict[str, Any]:
    return {"_op": op, "id": id, "age": age, "name": None if op in "dt" else f"name-{id}", **more}


def run(spark: Any, path: Path, sql: str, *epochs: list[dict[str, Any]], **options: Any) -> None:
    sinks = {
        "table": Delta(DeltaConfig(path=str(path / "table" / "{topic}"), mode="upsert")),
        "log": Delta(DeltaConfig(path=str(path / "log" / "{topic}"), mode="changes")),
    }
    Pipeline(
        "sql-changes",
        sources={"source": Scripted(ScriptedConfig(epochs=epochs))},
        sinks=sinks,
        router=Router((Route(to="/people", sql=sql, **options),), tuple(sinks)),
        delivery=DeliveryGuarantee.EXACTLY_ONCE,
        processing=Processing(state_dir=path / "state", max_retries=0, max_epoch_rows=1),
    ).run(spark=spark, drain=True)


def table(path: Path) -> dict[int, tuple[str, int]]:
    found = DeltaTable(str(path / "table" / "people")).to_pyarrow_table().to_pylist()
    rows = {row["id"]: (row["name"], row["age"]) for row in found}
    assert len(rows) == len(found), "one row per key"
    return rows


def log(path: Path) -> list[tuple[str, int]]:
    found = DeltaTable(str(path / "log" / "people")).to_pyarrow_table().sort_by("_position").to_pylist()
    return [(row["_op"], row["id"]) for row in found]


def test_rows_leave_and_come_back_with_the_filter(spark: Any, tmp_path: Path) -> None:
    first = [change("c", 1, 30), change("c", 2, 10), change("c", 3, 40), change("c", 4, 50), change("c", 5, 60)]
    run(spark, tmp_path, ADULTS, first)
    assert table(tmp_path) == {n: (f"NAME-{n}", age) for n, age in ((1, 30), (3, 40), (4, 50), (5, 60))}
    # Out of the filter, into it, a delete that carries nothing but its key; out and back in within one epoch.
    second = [
        change("u", 1, 5),
        change("u", 2, 20),
        change("d", 3),
        change("u", 4, 7),
        change("u", 4, 44),
        change("u", 5, 66),
        change("u", 5, 6),
    ]
    run(spark, tmp_path, ADULTS, first, second)
    assert table(tmp_path) == {2: ("NAME-2", 20), 4: ("NAME-4", 44)}
    run(spark, tmp_path, ADULTS, first, second, [change("u", 1, 31), change("d", 4)])
    assert table(tmp_path) == {1: ("NAME-1", 31), 2: ("NAME-2", 20)}
    assert log(tmp_path) == [("c", 1), ("c", 3), ("c", 4), ("c", 5), ("u", 2), ("u", 4), ("u", 5), ("u", 1)]


@pytest.mark.parametrize("kept", [", _old_key", ""])
def test_a_row_that_moves_leaves_its_old_key_whether_it_comes_out_or_not(spark: Any, tmp_path: Path, kept: str) -> None:
    sql = f"SELECT id, name, age, _op, _position, _unchanged{kept} FROM input WHERE age >= 18"
    first = [change("c", 1, 30), change("c", 2, 40), change("c", 3, 50)]
    run(spark, tmp_path, sql, first, [change("u", 11, 31, old=1), change("u", 12, 4, old=2)])
    assert table(tmp_path) == {3: ("name-3", 50), 11: ("name-11", 31)}


def test_a_truncate_passes_every_filter(spark: Any, tmp_path: Path) -> None:
    run(spark, tmp_path, ADULTS, [change("c", 1, 30)], [change("c", 2, 40), change("t", None), change("c", 3, 50)])
    assert table(tmp_path) == {3: ("NAME-3", 50)}


def test_an_epoch_of_which_nothing_comes_out_still_removes_rows(spark: Any, tmp_path: Path) -> None:
    run(spark, tmp_path, ADULTS, [change("c", 1, 30), change("c", 2, 40)], [change("d", 1)])
    assert table(tmp_path) == {2: ("NAME-2", 40)}


def test_a_value_that_was_not_sent_is_kept_if_the_query_hands_it_on(spark: Any, tmp_path: Path) -> None:
    sql = "SELECT * FROM input WHERE age >= 18"
    kept = {**change("u", 1, 31), "name": None, "_unchanged": ["name"]}
    run(spark, tmp_path, sql, [change("c", 1, 30)], [kept])
    assert table(tmp_path) == {1: ("name-1", 31)}


@pytest.mark.parametrize("sql", [ADULTS, "SELECT id, name, age, _op, _position FROM input"])
def test_a_value_that_was_not_sent_cannot_be_computed_on(spark: Any, tmp_path: Path, sql: str) -> None:
    kept = {**change("u", 1, 31), "name": None, "_unchanged": ["name"]}
    with pytest.raises(SchemaError, match=r"PEN-4003 .*unchanged value of name"):
        run(spark, tmp_path, sql, [change("c", 1, 30)], [kept])
    assert table(tmp_path)[1][1] == 30


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT id + 1 AS id, name, _op, _position FROM input", "changes id"),
        ("SELECT id, name, 'c' AS _op, _position FROM input", "changes _op"),
        ("SELECT * FROM input UNION ALL SELECT * FROM input", "uses Union"),
        ("SELECT id, _op, max(_position) AS _position FROM input GROUP BY id, _op", "changes _position"),
    ],
)
def test_a_query_that_does_not_look_at_changes_one_by_one_is_refused(
    spark: Any, tmp_path: Path, sql: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(spark, tmp_path, sql, [change("c", 1, 30)], per_epoch=True)
