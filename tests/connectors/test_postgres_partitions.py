"""Partitions that come, go and are emptied as a whole, of which the log of their root says nothing; against a real PostgreSQL."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random

import psycopg
import pytest

from mirrored import Lake, database_on
from penstock.connectors.postgres_cdc import source
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.errors import RetryableError

_NUMBERS = itertools.count()

ROOT = [
    "CREATE TABLE {t} (id int8, part int, note text, story text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
    "CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES IN (1)",
    "CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES IN (2)",
    "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES IN (3) PARTITION BY RANGE (id)",
    "CREATE TABLE {t}_3a PARTITION OF {t}_3 FOR VALUES FROM (0) TO (7)",
    "CREATE TABLE {t}_3b PARTITION OF {t}_3 FOR VALUES FROM (7) TO (1000)",
    "INSERT INTO {t} SELECT i, 1 + i % 3, 'n' || i, repeat(md5(i::text), 200) FROM generate_series(1, 12) i",
]
ALONE = "CREATE TABLE {t}_4 (id int8 NOT NULL, part int NOT NULL, note text, story text)"
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_4 FOR VALUES IN (4)"
FILL = "INSERT INTO {t}_4 SELECT i, 4, 'attached', repeat(md5(i::text), 200) FROM generate_series(1, 5) i"

COPIED = {
    "truncated": ["TRUNCATE {t}_1", "INSERT INTO {t} VALUES (1, 1, 'after')"],
    "truncated_below": ["TRUNCATE {t}_3"],
    "truncated_and_rewritten": ["TRUNCATE {t}_3b", "INSERT INTO {t} VALUES (8, 3, 'after')", "VACUUM FULL {t}_3b"],
    "truncated_one_by_one": ["TRUNCATE {t}_1, {t}_2, {t}_3a, {t}_3b", "INSERT INTO {t} VALUES (1, 1, 'after')"],
    "truncated_like_its_root": ["BEGIN; TRUNCATE {t}; INSERT INTO {t} VALUES (1, 1), (2, 2); TRUNCATE {t}_1; COMMIT"],
    "made_and_truncated": [
        "CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4)",
        "INSERT INTO {t} VALUES (1, 4), (2, 4)",
        "TRUNCATE {t}_4",
    ],
    "attached": [ALONE, FILL, ATTACH],
    "attached_at_once": [f"BEGIN; {ALONE}; {FILL}; {ATTACH}; COMMIT"],
    "attached_behind_a_savepoint": [f"BEGIN; {ALONE}; SAVEPOINT s; {FILL}; RELEASE s; {ATTACH}; COMMIT"],
    "attached_and_changed": [
        ALONE,
        FILL,
        ATTACH,
        "UPDATE {t} SET note = 'u' WHERE part = 4 AND id < 3",  # the story is not sent, and the target has never had it
        "UPDATE {t} SET part = 1 WHERE part = 4 AND id = 4",
        "DELETE FROM {t} WHERE part = 4 AND id = 5",
    ],
    "attached_and_truncated": [ALONE, FILL, ATTACH, "INSERT INTO {t} VALUES (9, 4, 'logged')", "TRUNCATE {t}_4"],
    "attached_with_partitions": [
        f"{ALONE} PARTITION BY RANGE (id)",
        "CREATE TABLE {t}_4a PARTITION OF {t}_4 FOR VALUES FROM (0) TO (1000)",
        FILL,
        ATTACH,
    ],
    "attached_below": [
        "CREATE TABLE {t}_5 PARTITION OF {t} FOR VALUES IN (5) PARTITION BY RANGE (id)",
        "CREATE TABLE {t}_5a (LIKE {t})",
        "INSERT INTO {t}_5a VALUES (1, 5, 'attached')",
        "ALTER TABLE {t}_5 ATTACH PARTITION {t}_5a FOR VALUES FROM (0) TO (1000)",
    ],
    "detached": ["UPDATE {t} SET note = 'u' WHERE part = 1", "ALTER TABLE {t} DETACH PARTITION {t}_1"],
    "detached_while_read": ["ALTER TABLE {t} DETACH PARTITION {t}_1 CONCURRENTLY"],
    "detached_with_partitions": ["ALTER TABLE {t} DETACH PARTITION {t}_3"],
    "dropped": ["DROP TABLE {t}_2"],
    "dropped_and_made": ["DROP TABLE {t}_2", "CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES IN (2)"],
    "attached_again": [
        "ALTER TABLE {t} DETACH PARTITION {t}_1",
        "DELETE FROM {t}_1 WHERE id > 5",
        "UPDATE {t}_1 SET note = 'aside'",
        "ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES IN (1)",
    ],
    "attached_again_with_partitions": [
        "ALTER TABLE {t} DETACH PARTITION {t}_3",
        "DELETE FROM {t}_3 WHERE id < 9",
        "ALTER TABLE {t} ATTACH PARTITION {t}_3 FOR VALUES IN (3)",
    ],
}
NOT_COPIED = {
    "made_and_filled": [
        "BEGIN; CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4) PARTITION BY RANGE (id);"
        "CREATE TABLE {t}_4a PARTITION OF {t}_4 FOR VALUES FROM (0) TO (1000); INSERT INTO {t} VALUES (1, 4, 'new'); COMMIT"
    ],
    "attached_empty": [ALONE, ATTACH],
    "attached_and_emptied": [ALONE, FILL, ATTACH, "DELETE FROM {t} WHERE part = 4"],
    "rewritten": ["VACUUM FULL {t}_1", "UPDATE {t} SET note = 'u' WHERE part = 1", "CLUSTER {t}_2 USING {t}_2_pkey"],
    "made_and_rewritten": [
        "CREATE TABLE {t}_4 PARTITION OF {t} FOR VALUES IN (4)",
        "INSERT INTO {t} VALUES (1, 4, 'new')",
        "VACUUM FULL {t}_4",
    ],
    "emptied": ["TRUNCATE {t}", "INSERT INTO {t} VALUES (1, 1, 'after'), (2, 3, 'after')"],
    "emptied_with_another": ["TRUNCATE {t}, {t}_1", "INSERT INTO {t} VALUES (1, 1, 'after')"],
    "nearly_detached": ["BEGIN; ALTER TABLE {t} DETACH PARTITION {t}_1; ROLLBACK", "UPDATE {t} SET note = 'u'"],
}
CASES = {**COPIED, **NOT_COPIED}


@pytest.fixture
def database(server):
    with database_on(server, f"parts_{next(_NUMBERS)}") as made:
        yield made


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr(source, "LOOKED_SECS", 0.0)


def make(database, table="parts"):
    database.run(*(statement.format(t=table) for statement in ROOT))


def do(database, *statements, table="parts"):
    database.run(*(statement.format(t=table) for statement in statements))


def same(lake, database, table="parts"):
    return lake.table(f"public.{table}") == database.table(table)


def copies(lake, table="parts"):
    return lake.position.tables[f"public.{table}"].copies


@pytest.fixture(scope="module", params=["running", "down"])
def followed(server, tmp_path_factory, request):
    """
    All of them at once, each with a root of its own, while the pipeline is running or down; then changes as they come.

    Gives per root whether the mirror was equal after each of the two, and how often it was copied.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(source, "LOOKED_SECS", 0.0)
        database = stack.enter_context(database_on(server, f"followed_{request.param}"))
        for table in CASES:
            make(database, table)
        path, roots = tmp_path_factory.mktemp("followed"), [f"public.{table}" for table in CASES]
        with Lake(path, database.source(tables=roots)) as lake:
            lake.catch_up()
            if request.param == "running":
                for table, statements in CASES.items():
                    do(database, *statements, table=table)
                lake.catch_up()
        if request.param == "down":
            for table, statements in CASES.items():
                do(database, *statements, table=table)
        with Lake(path, database.source(tables=roots)) as lake:
            lake.catch_up()
            first = {table: same(lake, database, table) for table in CASES}
            for table in CASES:
                do(database, "UPDATE {t} SET note = 'last' WHERE id % 2 = 0", "DELETE FROM {t} WHERE id = 3", table=table)
            lake.catch_up()
            yield {table: (first[table], same(lake, database, table), copies(lake, table)) for table in CASES}


@pytest.mark.parametrize("what", CASES)
def test_what_happens_to_a_partition_as_a_whole_is_followed(followed, what):
    first, second, _ = followed[what]
    assert first
    assert second


@pytest.mark.parametrize("what", CASES)
def test_a_root_is_copied_anew_only_if_its_log_is_not_enough(followed, what):
    assert followed[what][2] == (2 if what in COPIED else 1)
