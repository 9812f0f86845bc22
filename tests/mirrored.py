"""A database of its own on a shared server, and a pipeline that mirrors it into Delta tables without a JVM."""

from __future__ import annotations

import contextlib
import json
import time

import psycopg
import psycopg.rows
from deltalake import DeltaTable

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.errors import RetryableError
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.source import Note, ReadLimit
from penstock.testing.engine import ForkEngine

PATIENCE_SECS = 120


class Database:
    """The options that capture it, and a connection that writes to it."""

    def __init__(self, server, name):
        self.name = name
        self.dsn = server.dsn.rpartition("/")[0] + f"/{name}"
        self.connection = psycopg.connect(self.dsn, autocommit=True)

    def run(self, *statements):
        for statement in statements:
            self.connection.execute(statement)

    def rows(self, query):
        return self.connection.execute(query).fetchall()

    def source(self, **options):
        options = {"dsn": self.dsn, "slot": self.name, "tables": ["public.*"], **options}
        return PostgresCdc(PostgresCdcConfig.model_validate(options))

    def table(self, name, columns="*"):
        """The rows of a table as dicts, sorted."""
        with contextlib.closing(self.connection.cursor(row_factory=psycopg.rows.dict_row)) as cursor:
            return sorted(cursor.execute(f"SELECT {columns} FROM {name}").fetchall(), key=repr)


@contextlib.contextmanager
def database_on(server, name, kind=Database):
    """Made, and dropped with its slots whoever still reads them."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    made = kind(server, name)
    try:
        yield made
    finally:
        made.connection.close()
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            sessions = "FROM pg_stat_activity WHERE datname = %s"
            connection.execute(f"SELECT pg_terminate_backend(pid) {sessions}", [name])
            while connection.execute(f"SELECT {sessions}", [name]).fetchall():
                time.sleep(0.01)
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", [name]
            )
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


class Lake:
    """Mirrors a source, into Delta tables in upsert mode by default; the tasks are forked, the rest is this process."""

    def __init__(self, path, source, sinks=None, **sink_options):
        self.path = path
        self.source = source
        self.sink = Delta(DeltaConfig(path=str(path / "lake/{topic}"), mode="upsert", **sink_options))
        self.sinks = sinks or {"lake": self.sink}

    def __enter__(self):
        self.state = State(self.path / "state", "lake")
        self.state.open()
        parts = {"source": self.source}, self.sinks, Router((), tuple(self.sinks)), ForkEngine(2)
        self.loop = EpochLoop(self.state, *parts)
        self.loop.contexts.open()
        self.loop.start([])
        return self

    def __exit__(self, *exc):
        self.source.close()
        for sink in self.sinks.values():
            sink.close()
        self.state.close()

    def catch_up(self):
        """Commit epochs until nothing is left to read; how many those were."""
        epochs, until = 0, time.monotonic() + PATIENCE_SECS
        while time.monotonic() < until:
            if self.loop.step() is not None:
                epochs += 1
            elif not self.position.copying and not self.loop.unacked:
                return epochs
        raise AssertionError(f"not caught up after {PATIENCE_SECS} s: {self.position}")

    @property
    def position(self):
        newest = self.state.newest
        if newest is None:
            return self.source.initial()
        end = self.source.position_type.model_validate(newest.ranges["source"].end)
        return self.source.next_start(end, newest.notes.get("source", ()))

    def table(self, name, columns=None):
        """The rows of a mirrored table as dicts, sorted."""
        rows = DeltaTable(str(self.path / "lake" / name)).to_pyarrow_table(columns=columns).to_pylist()
        return sorted(rows, key=repr)


class Reading:
    """The source's epochs in small steps: plan one, read one split after the other, acknowledge it."""

    def __init__(self, source):
        self.source = source
        self.position = source.initial()
        self.end, self.splits, self.notes = None, [], []
        self.log = []

    def step(self):
        """True if there was something to do; who waits for a lock tries again, as the runtime does."""
        try:
            return self._step()
        except RetryableError:
            return True

    def _step(self):
        if self.end is None:
            end = self.source.latest(self.position, ReadLimit(rows=6, parallelism=2))
            if end == self.position:
                return False
            self.splits, self.notes = list(self.source.split(self.position, end)), []
            self.end = end
        elif self.splits:
            found = list(self.source.read(self.splits[0]))
            self.splits.pop(0)
            self.notes += [json.loads(json.dumps(item.value)) for item in found if isinstance(item, Note)]
            self.log += [row for item in found if not isinstance(item, Note) for row in item.records.to_pylist()]
        else:
            self.position = self.source.next_start(self.end, self.notes)
            self.source.ack(self.position)
            self.end = None
        return True

    def finish(self):
        while self.step() or self.position.copying:
            pass
