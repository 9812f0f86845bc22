"""Tables of a PostgreSQL in Iceberg and in Delta at once, every type of them: two formats, one log of changes."""

from __future__ import annotations

import itertools

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from test_postgres_types import CASES, SET_UP

from mirrored import Lake, database_on
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.connectors.postgres_cdc import plan
from penstock.testing.mirror import replayed

_NUMBERS = itertools.count()


@pytest.fixture
def database(server):
    with database_on(server, f"iceberg_{next(_NUMBERS)}") as made:
        yield made


@pytest.fixture
def lake(database, tmp_path):
    sinks = {
        "ice": Iceberg(IcebergConfig(path=f"{tmp_path}/ice/{{topic}}", table="lake.{topic}", mode="changes")),
        "delta": Delta(DeltaConfig(path=f"{tmp_path}/delta/{{topic}}", mode="changes")),
    }
    return Lake(tmp_path, database.source(seed_chunk_rows=20), sinks)


def logs(path, table):
    """What each of the two holds, in order."""
    catalog = SqlCatalog("default", uri=f"sqlite:///{path}/ice/catalog.db")
    (name,) = (name for name in catalog.list_tables("lake.public") if name[-1] == table)
    ice = catalog.load_table(name).scan().to_arrow()
    delta = DeltaTable(f"{path}/delta/public.{table}").to_pyarrow_table()
    assert sorted(ice.column_names) == sorted(delta.column_names)
    return [found.select(delta.column_names).sort_by("_position").combine_chunks() for found in (ice, delta)]


def by_key(rows, key):
    return {tuple(row[name] for name in key): row for row in rows}


def test_many_tables_that_change_are_one_log_in_both(database, lake, monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
    database.run(
        "CREATE TABLE orders (id int8 PRIMARY KEY, note text, amount numeric(10, 2))",
        "CREATE TABLE items (region text, number int4, at timestamptz, PRIMARY KEY (region, number))",
        "CREATE TABLE nothing (id int8 PRIMARY KEY)",
        "INSERT INTO orders SELECT i, 'n' || i, i / 3.0 FROM generate_series(1, 100) i",
        "INSERT INTO items SELECT chr(97 + i % 5), i, now() FROM generate_series(1, 50) i",
    )
    with lake:
        lake.catch_up()
        database.run(
            "UPDATE orders SET note = 'x' WHERE id < 10",
            "DELETE FROM items WHERE number > 40",
            "ALTER TABLE orders ADD COLUMN more text",
            "UPDATE orders SET more = 'm', id = id + 1000 WHERE id BETWEEN 20 AND 25",
            "TRUNCATE items",
            "INSERT INTO items VALUES ('z', 1, now())",
        )
        lake.catch_up()
    for table, key in (("orders", ["id"]), ("items", ["region", "number"])):
        ice, delta = (log.to_pylist() for log in logs(lake.path, table))
        assert ice == delta
        assert by_key(replayed(ice, key), key) == by_key(database.table(table), key)
    assert [log.num_rows for log in logs(lake.path, "nothing")] == [0, 0]


def test_every_type_is_the_same_in_both(database, lake):
    kinds = {f"c{number}": (kind, values) for number, (kind, (values, *_)) in enumerate(CASES.items())}
    count = max(len(values) for _, values in kinds.values())
    database.run(*([SET_UP] if isinstance(SET_UP, str) else SET_UP))
    database.run(
        f"CREATE TABLE kinds (id int8 PRIMARY KEY, {', '.join(f'{n} {kind}' for n, (kind, _) in kinds.items())})"
    )
    for row in range(count):
        given = [values[row % len(values)] for _, values in kinds.values()]
        marks = ", ".join(f"%s::text::{kind}" for kind, _ in kinds.values())
        database.connection.execute(f"INSERT INTO kinds VALUES ({row}, {marks})", given)
    with lake:
        lake.catch_up()
        database.run("UPDATE kinds SET id = id + 1000")
        lake.catch_up()
    ice, delta = logs(lake.path, "kinds")
    assert ice.num_rows == delta.num_rows == 2 * count
    for name, (kind, _) in kinds.items():
        assert ice[name].cast(delta[name].type).equals(delta[name]), kind
