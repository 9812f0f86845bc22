"""Write topics to PostgreSQL tables, appended or applied by key, every table of an epoch in one transaction."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa

from penstock.changes import own_columns
from penstock.connectors import upsert
from penstock.connectors.postgres import columns
from penstock.connectors.postgres.commit import DriverSide
from penstock.connectors.postgres.config import PostgresSinkConfig, StagedTables
from penstock.connectors.postgres.fit import holds_beyond, make_empty, refuse_columns
from penstock.connectors.postgres.session import Markers, Seeded, Session
from penstock.connectors.postgres.task import TaskSide
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import quoted
from penstock.durable import canonical
from penstock.errors import SchemaError
from penstock.schema import key_of
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Positions,
    SinkConnector,
    SinkConnectorCapabilities,
    SinkContext,
    Task,
    Topic,
    WriteResult,
)
from penstock.source import Finding, HealthStatus


class Postgres(SinkConnector[PostgresSinkConfig, StagedTables]):
    """
    Each task copies its rows, in binary, into staging tables of its own; the driver applies all topics of an epoch in one
    transaction, together with the markers that say which epoch each table holds. Columns are added and widened there as
    well. Tables are never dropped, renamed or created again: their indexes, grants and further columns stay.

    Supports exactly-once: the markers are locked and looked at in the very transaction that moves them. Readers see all
    tables at one epoch. Foreign keys between the tables must be deferrable. `changes` adds the capability changelog, and
    `upsert` upsert, changelog and idempotent. For `upsert`, two keys are the same if the table's own `=` says so.
    """

    name = "postgres"
    capabilities = SinkConnectorCapabilities().with_exactly_once().with_two_phase_commit().with_schema_evolution()

    def __init__(self, config: PostgresSinkConfig) -> None:
        super().__init__(config)
        self._session: Session | None = None
        self._task: TaskSide | None = None
        self._committed: set[Topic] = set()
        if self.config.mode != "append":
            self.capabilities = self.capabilities.with_changelog()
        if self.config.mode == "upsert":
            self.capabilities = self.capabilities.with_upsert().with_idempotent()

    # -- open and close ------------------------------------------------------------------------------------------

    def open(self, context: SinkContext = SinkContext()) -> None:
        self.close()
        super().open(context)
        upsert.check_options(self.config)
        self._session = Session(self.config)
        self._session.make_own_tables()

    def close(self) -> None:
        self._task = None
        if self._session is not None:
            self._session.close()

    @property
    def session(self) -> Session:
        """The sink's connection to the server."""
        assert self._session is not None, "the sink is not open"
        return self._session

    # -- in tasks ------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        if self._task is not None:  # what it has staged must not be in the next transaction
            self.close()
        stem = f"{staging_prefix(self, epoch)}{epoch.stem(task)}"
        self._task = TaskSide(self.session, stem, self.policy, lambda topic: self.context.topic(topic).keeps_refused)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._task is not None
        return self._task.write(topic, batch)

    def flush(self) -> None:
        assert self._task is not None
        self._task.flush()

    def pre_commit(self, epoch: Epoch) -> StagedTables:
        assert self._task is not None
        receipt = self._task.finish()
        self._task = None
        return receipt

    # -- on the driver -------------------------------------------------------------------------------------------

    def commit_epoch(self, epoch: Epoch, receipts: Sequence[StagedTables], end: Positions) -> None:
        driver = DriverSide(self.session, self.policy, lambda topic: self.context.topic(topic).source_schema)
        self._committed |= driver.commit(epoch, receipts, end, self._committed, staging_prefix(self, epoch))

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        marker = Markers(self.session).read(pipeline, topic)
        if marker is not None:
            self._committed.add(topic)
        return marker

    def sweep(self, epoch: Epoch, keep: Sequence[StagedTables]) -> None:
        kept = {part.table for receipt in keep for parts in receipt.staged.values() for part in parts}
        prefix = f"{staging_prefix(self, epoch)}{epoch.stem()}-"

        def drop(connection: psycopg.Connection[Any]) -> None:
            left = [self.session.own(name) for name in self.session.staged(connection, prefix) if name not in kept]
            if left:
                connection.execute(f"DROP TABLE IF EXISTS {', '.join(left)}")

        self.session.ask(drop)

    def is_seeded(self, topic: Topic) -> bool:
        return Seeded(self.session).has(topic)

    def mark_seeded(self, topic: Topic) -> None:
        def mark(connection: psycopg.Connection[Any]) -> None:
            with connection.transaction():
                _make_empty(self, connection, topic)
                Seeded(self.session).add(connection, topic)

        self.session.ask(mark)

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of the table; more may come."""
        target = self.session.target(topic)
        return target and target.schema()

    def check_columns(self, topic: Topic, columns: pa.Schema) -> None:
        refuse_columns(topic, columns, self.session.target(topic), self.policy(topic))

    takes_nested = False

    def read_topic(self, topic: Topic) -> pa.Table | None:
        return _rows(self.session, topic)

    def first_rows(self, topic: Topic, rows: int) -> pa.Table | None:
        return _rows(self.session, topic, f" LIMIT {rows:d}")

    def can_be_double(self, topic: Topic, column: str) -> bool:
        target = self.session.target(topic)
        if target is None or column not in target.columns:
            return True
        if any(column in each for each in target.unique):
            return False
        return not self.session.ask(lambda connection: holds_beyond(connection, target.name, column))

    def check(self) -> Sequence[Finding]:
        return self.session.ask(lambda connection: list(_findings(connection)))

    def health_check(self) -> HealthStatus:
        with (
            failures.errors(failures.NO_ANSWER),
            contextlib.closing(connections.connect(self.config)) as connection,
        ):
            row = connection.execute(
                "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'"
            ).fetchone()
        return HealthStatus.unhealthy("the server takes no writes") if row == (True,) else HealthStatus.healthy()


def staging_prefix(sink: Postgres, epoch: Epoch) -> str:
    """How the names of all staging tables begin, and of no other pipeline's or sink's."""
    whose = canonical([epoch.pipeline, sink.config.table, sink.config.mode])
    return f"{hashlib.sha256(whose.encode()).hexdigest()[:8]}-"


def _make_empty(sink: Postgres, connection: psycopg.Connection[Any], topic: Topic) -> None:
    """If no rows came: readers find the table empty, and not missing."""
    name, now = sink.session.name(topic), sink.context.topic(topic).source_schema
    if now is None or sink.session.catalog.find(connection, name) is not None:
        return
    upserts = sink.config.mode == "upsert"
    key = (sink.config.key or key_of(now)) if upserts else ()
    own = columns.picked(now, own_columns(now)) if upserts else now
    # A column without a place there is refused with the first row that has it.
    with contextlib.suppress(SchemaError, psycopg.ProgrammingError), connection.transaction():
        empty = columns.plain(topic, pa.RecordBatch.from_pylist([], schema=own))
        if key or not upserts:
            make_empty(connection, name, empty.schema, key, sink.config.soft_delete)


def _rows(session: Session, topic: Topic, limit: str = "") -> pa.Table | None:
    target = session.target(topic)
    if target is None:
        return None
    schema = target.schema()
    query = f"SELECT {', '.join(map(quoted, schema.names))} FROM {target.name.sql}{limit}"
    rows = session.ask(lambda connection: connection.execute(query).fetchall())
    arrays = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(schema)]
    return pa.Table.from_arrays(arrays, schema.names)


def _findings(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT current_setting('fsync'), pg_is_in_recovery(), has_database_privilege(current_database(), 'CREATE')"
    ).fetchone()
    assert row is not None
    fsync, standby, may_create = row
    fix = "point `dsn` at the primary" if standby else ""
    yield Finding(not standby, f"the server is a {'standby' if standby else 'primary'}", fix)
    fix = "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf()" if fsync == "off" else ""
    risk = ": a crash of the server may lose epochs that it has committed" if fsync == "off" else ""
    yield Finding(True, f"fsync is {fsync}{risk}", fix)
    fix = "" if may_create else "create the schemas yourself, or GRANT CREATE ON DATABASE … TO CURRENT_USER"
    yield Finding(True, f"the user {'may' if may_create else 'may not'} create schemas", fix)
