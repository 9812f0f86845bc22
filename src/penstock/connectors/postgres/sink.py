"""Write topics to PostgreSQL tables, appended or applied by key, every table of an epoch in one transaction."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import psycopg
import pyarrow as pa
from pydantic import Field

from penstock import failpoints
from penstock.changes import is_changelog, own_columns
from penstock.changes.checks import check_changes
from penstock.connectors.postgres import apply, columns
from penstock.connectors.postgres.apply import Part, Plan, StagedPart, Upsert, by_topic
from penstock.connectors.postgres.stage import Known, Open, Stage, exact, refusals
from penstock.connectors.postgres.target import (
    DELETED,
    Catalog,
    Column,
    Names,
    Target,
    alterations,
    altered,
    creation,
    known_types,
    refuse_unfit,
    widened,
)
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.config import PostgresConfig
from penstock.connectors.postgresql.types import quoted
from penstock.durable import canonical
from penstock.errors import ConfigError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import key_of
from penstock.schema.evolution import EvolutionConfig, fit
from penstock.sink import (
    CommittedEpoch,
    Epoch,
    Positions,
    Receipt,
    SinkConnector,
    SinkConnectorCapabilities,
    SinkContext,
    Task,
    Topic,
    WriteResult,
    is_committed,
)
from penstock.source import Finding, HealthStatus

T = TypeVar("T")

IDLE_SECS = 10
"""The server ends a commit whose driver says nothing for so long: a run that is stopped must not keep others waiting."""

DROPPED = 100
"""Staging tables that are dropped at once; each takes room in the server's table of locks."""

LOCK_SECS = 30
"""Longest wait for a table or a marker that another session holds; then the commit is tried again."""

_UNUSED = ("_txid", "_committed_at")
"""Change columns that play no part in an upsert."""


class PostgresSinkConfig(PostgresConfig, EvolutionConfig):
    identity = PostgresConfig.identity | {"key", "soft_delete"}

    table: str = "{schema}.{table}"
    """
    The table of a topic, as `schema.table`. `{table}` is the last part of the topic's name, `{schema}` the one before it
    (`public` if there is none), where parts end at `/` and `.`; `{topic}` is the whole name without its leading slash.
    """

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `upsert` keeps one row per key, as the changes leave it; `changes` adds
    every change with the columns that describe it."""

    key: tuple[str, ...] = ()
    """Columns that make the key of a row, for `upsert`; by default those that the topic's schema names."""

    soft_delete: bool = False
    """Mark deleted rows in a column `_deleted` instead of removing them; for `upsert`."""

    staging_schema: str = "_penstock"
    """The schema of the sink's own tables: what is staged, and which epochs are committed. It is made if it is missing."""


class StagedTables(Receipt):
    staged: dict[Topic, list[StagedPart]] = Field(default_factory=dict)
    key: dict[Topic, list[str]] = Field(default_factory=dict)

    def topics(self) -> Iterable[Topic]:
        return self.staged


class Postgres(SinkConnector[PostgresSinkConfig, StagedTables]):
    """
    Each task copies its rows, in binary, into staging tables of its own; the driver applies all topics of an epoch in one
    transaction, together with the markers that say which epoch each table holds. Columns are added and widened there as
    well. Tables are never dropped, renamed or made anew: their indexes, grants and further columns stay.

    Supports exactly-once: the markers are locked and looked at in the very transaction that moves them. Readers see all
    tables at one epoch. Foreign keys between the tables must be deferrable, or not be there. `changes` adds the
    capability changelog, and `upsert` upsert, changelog and idempotent.
    """

    name = "postgres"
    capabilities = SinkConnectorCapabilities().with_exactly_once().with_two_phase_commit().with_schema_evolution()

    def __init__(self, config: PostgresSinkConfig) -> None:
        super().__init__(config)
        self._connection: psycopg.Connection[Any] | None = None
        self._stage: Stage | None = None
        self._catalog = Catalog()
        self._committed: set[Topic] = set()
        self._upserts = self.config.mode == "upsert"
        if self.config.mode != "append":
            self.capabilities = self.capabilities.with_changelog()
        if self._upserts:
            self.capabilities = self.capabilities.with_upsert().with_idempotent()

    # -- open and close ------------------------------------------------------------------------------------------

    def open(self, context: SinkContext = SinkContext()) -> None:
        self.close()
        super().open(context)
        for option in ("key", "soft_delete"):
            if getattr(self.config, option) and not self._upserts:
                raise ConfigError(
                    f'`{option}` has no meaning for mode = "{self.config.mode}"',
                    code="PEN-1003",
                    hint='use mode = "upsert"',
                )
        self._names = Names(self.config.table, self.config.staging_schema)
        self._ask(self._make_own_tables)

    def close(self) -> None:
        self._stage = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Put a question over the sink's connection, which is made again after it broke."""
        with failures.errors("PostgreSQL does not answer"):
            if self._stage is not None:
                return question(self._stage.connection)  # a new one would not know what is staged
            if self._connection is None or self._connection.closed:
                self._connection = connections.connect(self.config)
                self._connection.execute(_durable())
                self._connection.execute(
                    f"SET lock_timeout = '{LOCK_SECS}s'; SET idle_in_transaction_session_timeout = '{IDLE_SECS}s'"
                )
            return question(self._connection)

    def _own(self, table: str) -> str:
        return f"{quoted(self.config.staging_schema)}.{quoted(table)}"

    def _make_own_tables(self, connection: psycopg.Connection[Any]) -> None:
        is_there = "SELECT to_regclass(%s) IS NOT NULL"
        if connection.execute(is_there, [self._own("seeded")]).fetchone() == (True,):
            return
        with connection.transaction():  # tasks and other pipelines may be here at the same time
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('penstock'), hashtext(%s))", [self._own("")])
            named = [self.config.staging_schema]
            if connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", named).fetchone() is None:
                connection.execute(f"CREATE SCHEMA {quoted(self.config.staging_schema)}")
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._own('epochs')} (pipeline text, topic text, target text, incarnation text, "
                'number int8, "end" text, columns text[], committed_at timestamptz, PRIMARY KEY (pipeline, topic, target))'
            )
            connection.execute(f"CREATE TABLE IF NOT EXISTS {self._own('seeded')} (topic text, target text, made bool, "
                               "PRIMARY KEY (topic, target))")  # fmt: skip

    # -- in tasks ------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        if self._stage is not None:
            self.close()
        stem = self._stem(epoch, task)
        self._stage = self._ask(lambda connection: Stage(connection, self.config.staging_schema, stem))

    def _stem(self, epoch: Epoch, task: Task | None = None) -> str:
        """The beginning of every staged name of this try, and of no other pipeline's or sink's."""
        whose = canonical([epoch.pipeline, self.config.table, self.config.mode])
        return f"{hashlib.sha256(whose.encode()).hexdigest()[:8]}-{epoch.stem(task)}"

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        key = self._key(topic, batch.schema)
        stage = self._stage
        known = stage.targets.get(topic) or self._meet(topic, key)
        dropped = [name for name in _UNUSED if self._upserts and is_changelog(batch.schema)]
        rows = batch.drop_columns([name for name in dropped if name in batch.schema.names])
        rows = self._with_known_types(rows, known) if self._upserts else rows
        rows = columns.plain(topic, rows)
        discarded = 0
        if self.config.soft_delete and DELETED in rows.schema.names:
            raise SchemaError(
                f"{topic} has a column {DELETED} of its own, and soft_delete marks rows there",
                code="PEN-4002",
                hint="rename it in the route's SQL",
            )
        if known.target is not None:
            rows = rows.drop_columns([name for name in known.generated if name in rows.schema.names])
            own = _picked(rows.schema, own_columns(rows.schema)) if self._upserts else rows.schema
            kinds = known.altered.get(exact(own))
            if kinds is None:
                kinds = self._ask(lambda c: altered(c, topic, known.target, own, self.policy(topic)))  # type: ignore[arg-type]
                known.altered[exact(own)] = kinds
            wider = widened(topic, known.target.schema(), own, self.policy(topic))
            rows, discarded = fit(topic, rows, wider, self.policy(topic), key)
            known.refuse_values(topic, rows, kinds, self._upserts)
        if self._upserts:
            check_changes(pa.Table.from_batches([rows]), key)
        if rows.num_rows:
            stage.write(topic, rows, key)
        return WriteResult(rows.num_rows, batch.nbytes, discarded)

    def _key(self, topic: Topic, schema: pa.Schema) -> list[str]:
        if not self._upserts:
            return []
        assert self._stage is not None
        key = list(self.config.key) or key_of(schema)
        missing = [name for name in key if name not in schema.names]
        if not key or missing or self._stage.keys.setdefault(topic, key) != key:
            raise SchemaError(
                f"{topic} has no key that every row has: {', '.join(key) or 'none is named'}",
                code="PEN-4002",
                hint="set `key` in the sink to columns of the topic",
            )
        return key

    def _meet(self, topic: Topic, key: Sequence[str]) -> Known:
        """Look at the topic's table before the first of its rows is staged."""
        assert self._stage is not None
        name = self._names.claim(topic)
        target = self._ask(lambda connection: self._catalog.find(connection, name))
        if target is not None:
            refuse_unfit(topic, target, key, self.config.soft_delete)
        self._stage.targets[topic] = found = Known(target)
        return found

    def _with_known_types(self, rows: pa.RecordBatch, known: Known) -> pa.RecordBatch:
        """Columns of nulls get the table's types: left out, they would be unchanged and not null."""
        for place, each in enumerate(rows.schema):
            column = known.target.columns.get(each.name) if known.target and pa.types.is_null(each.type) else None
            if column is not None:
                rows = rows.set_column(place, each.name, pa.nulls(rows.num_rows, column.arrow))
        return rows

    def flush(self) -> None:
        assert self._stage is not None
        self._stage.flush()

    def pre_commit(self, epoch: Epoch) -> StagedTables:
        assert self._stage is not None
        stage = self._stage
        stage.flush()
        for topic, parts in stage.parts.items():
            for part in parts:
                self._rehearse(topic, stage.targets[topic], part)
        receipt = StagedTables(
            staged={topic: [part.receipt() for part in parts] for topic, parts in stage.parts.items()},
            key=stage.keys,
        )
        stage.commit()
        self._stage = None
        return receipt

    def _rehearse(self, topic: Topic, known: Known, part: Open) -> None:
        """Try the texts that become values of other types: what is staged can only go forward."""
        assert self._stage is not None
        texts = [each for each in part.schema if each.type in (pa.string(), pa.list_(pa.string()))]
        there = known.target.columns if known.target else {}
        kinds = {each.name: there[each.name].computed for each in texts if each.name in there}
        kinds |= {name: kind for each in known.altered.values() for name, kind in each.items() if name in kinds}
        new = _picked(part.schema, [each.name for each in texts if each.name not in kinds and columns.origin(each)])
        kinds |= self._ask(lambda connection: known_types(connection, new))
        tried = [
            f"count(c{part.schema.names.index(name)}::{kind})"
            for name, kind in kinds.items()
            if kind not in ("text", "text[]") and not kind.startswith("character")
        ]
        if tried:
            query = f"SELECT {', '.join(tried)} FROM {self._own(part.table)}"
            with failures.errors("PostgreSQL does not answer"), refusals(topic):
                self._stage.connection.execute(query)

    # -- on the driver -------------------------------------------------------------------------------------------

    def commit_epoch(self, epoch: Epoch, receipts: Sequence[StagedTables], end: Positions) -> None:
        parts = by_topic([receipt.staged for receipt in receipts], self.config.staging_schema)
        keys = _keys(receipts)
        if not parts:
            return
        failpoints.hit("commit.before")
        sent = {topic: self._sent(epoch.pipeline, topic, each) for topic, each in parts.items()}
        for topic, each in parts.items() if self._upserts else ():
            target = self.schema(topic)
            gone = [name for name in self._gone(topic, sent[topic]) if target is not None and name in target.names]
            parts[topic] = [replace(part, gone=gone) for part in each]
        plans = {
            topic: self._plan(topic, parts[topic], keys[topic])
            for topic in sorted(parts)
            if self._upserts and not self._is_done(epoch, topic, self._marker(epoch.pipeline, topic))
        }
        self._ask(lambda connection: self._commit(connection, epoch, parts, keys, plans, sent, end))
        self._committed.update(parts)
        applied = [part.staged.table for each in parts.values() for part in each]
        self._ask(lambda connection: self._tidy(connection, epoch, applied))

    def _commit(
        self,
        connection: psycopg.Connection[Any],
        epoch: Epoch,
        parts: dict[Topic, list[Part]],
        keys: dict[Topic, list[str]],
        plans: dict[Topic, _Planned | None],
        sent: dict[Topic, list[str]],
        end: Positions,
    ) -> None:
        with connection.transaction():
            markers = self._lock(connection, epoch.pipeline, sorted(parts))
            pending = [topic for topic, marker in markers.items() if not self._is_done(epoch, topic, marker)]
            connection.execute("SET CONSTRAINTS ALL DEFERRED")
            for place, topic in enumerate(pending):
                if place:
                    failpoints.hit("commit.before")
                with refusals(topic), _losses(epoch):
                    target = self._fit(connection, topic, parts[topic], keys[topic])
                    self._apply(connection, topic, target, parts[topic], keys[topic], plans.get(topic))
                connection.execute(
                    f'UPDATE {self._own("epochs")} SET incarnation = %s, number = %s, "end" = %s, columns = %s, '
                    "committed_at = clock_timestamp() WHERE pipeline = %s AND topic = %s AND target = %s",
                    [
                        epoch.incarnation,
                        epoch.number,
                        canonical(dict(end)),
                        sent[topic],
                        epoch.pipeline,
                        topic,
                        target.name.sql,
                    ],
                )

    def _tidy(self, connection: psycopg.Connection[Any], epoch: Epoch, applied: Iterable[str]) -> None:
        """Drop what is applied, and what earlier epochs have left: whoever reads it now only puts that off."""
        whose = self._stem(epoch).partition("-")[0]
        old = [name for name in self._staged(connection, f"{whose}-") if name < f"{whose}-{epoch.number:012d}"]
        names = list(dict.fromkeys([*applied, *old]))
        for first in range(0, len(names), DROPPED):
            some = ", ".join(map(self._own, names[first : first + DROPPED]))
            with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '1s'")
                connection.execute(f"DROP TABLE IF EXISTS {some}")

    def _staged(self, connection: psycopg.Connection[Any], prefix: str) -> list[str]:
        rows = connection.execute(
            "SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname, %s)",
            [self.config.staging_schema, prefix],
        ).fetchall()
        return [name for (name,) in rows]

    def _sent(self, pipeline: str, topic: Topic, parts: Sequence[Part]) -> list[str]:
        """Every column of the topic that ever came, this epoch's included."""
        named = [pipeline, topic, self._names.claim(topic).sql]
        query = f"SELECT columns FROM {self._own('epochs')} WHERE pipeline = %s AND topic = %s AND target = %s"
        row = self._ask(lambda connection: connection.execute(query, named).fetchone())
        return sorted({*((row and row[0]) or ()), *(name for part in parts for name in part.sent)})

    def _gone(self, topic: Topic, sent: Sequence[str]) -> list[str]:
        """Columns that came once and that the topic has no more."""
        now = self.context.topic(topic).source_schema
        return [name for name in sent if name not in now.names] if now is not None else []

    def _plan(self, topic: Topic, parts: Sequence[Part], key: Sequence[str]) -> _Planned | None:
        """What the topic's changes come to, before anything is locked; None if the table or what is staged is not there."""
        target = self._ask(lambda connection: self._catalog.find(connection, self._names.claim(topic)))
        found = Upsert(self._as_it_will_be(topic, target, parts, key), parts, key, self.config.soft_delete)
        if found.is_simple:
            return _Planned(None)
        try:
            return _Planned(self._ask(found.plan))
        except RetryableError as error:
            if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
                return None
            raise

    def _as_it_will_be(self, topic: Topic, target: Target | None, parts: Sequence[Part], key: Sequence[str]) -> Target:
        """The table with the columns that the epoch adds to it."""
        known = dict(target.columns) if target else {}
        for part in parts:
            for each in _picked(part.schema, part.sent):
                known.setdefault(each.name, Column(each.name, columns.sql_type(each.type), each.type, 0))
        return Target(self._names.claim(topic), known, target.unique if target else [frozenset(key)])

    def _fit(
        self, connection: psycopg.Connection[Any], topic: Topic, parts: Sequence[Part], key: Sequence[str]
    ) -> Target:
        """The topic's table, made or altered so that it holds the rows."""
        name, policy, soft = self._names.claim(topic), self.policy(topic), self.config.soft_delete
        schemas = [_picked(part.schema, part.sent) if self._upserts else part.schema for part in parts]
        target = self._catalog.find(connection, name)
        if target is None:
            whole = schemas[0]
            for each in schemas[1:]:
                whole = widened(topic, whole, each, policy)
            for statement in creation(connection, name, whole, key, soft):
                connection.execute(statement)
        else:
            refuse_unfit(topic, target, key, soft)
            for each in schemas:
                changes = alterations(target, altered(connection, topic, target, each, policy))
                if soft and DELETED not in target.columns:
                    changes.append(f"ADD COLUMN {quoted(DELETED)} bool NOT NULL DEFAULT false")
                if changes:
                    connection.execute(f"ALTER TABLE {name.sql} {', '.join(changes)}")
                    target = self._catalog.find(connection, name)
                    assert target is not None
        found = self._catalog.find(connection, name)
        assert found is not None
        return found

    def _apply(
        self,
        connection: psycopg.Connection[Any],
        topic: Topic,
        target: Target,
        parts: Sequence[Part],
        key: Sequence[str],
        plan: _Planned | None,
    ) -> None:
        if not self._upserts:
            apply.append(connection, target, parts)
            return
        apply.count(connection, parts)
        if plan is None:
            raise StagingLost(f"what was staged of {topic} was not there")
        Upsert(target, parts, key, self.config.soft_delete).apply(connection, plan.plan)

    # -- markers -------------------------------------------------------------------------------------------------

    def _lock(
        self, connection: psycopg.Connection[Any], pipeline: str, topics: Sequence[Topic]
    ) -> dict[Topic, CommittedEpoch | None]:
        """The markers of the topics, which no other session can move until the transaction ends."""
        found = {}
        for topic in topics:
            named = [pipeline, topic, self._names.claim(topic).sql]
            connection.execute(
                f"INSERT INTO {self._own('epochs')} (pipeline, topic, target) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                named,
            )
            row = connection.execute(f"{self._marked()} FOR UPDATE", named).fetchone()
            found[topic] = _marker(row)
        return found

    def _marked(self) -> str:
        return (
            f'SELECT incarnation, number, "end", to_regclass(target) IS NOT NULL FROM {self._own("epochs")} '
            "WHERE pipeline = %s AND topic = %s AND target = %s"
        )

    def _marker(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        named = [pipeline, topic, self._names.claim(topic).sql]
        return _marker(self._ask(lambda connection: connection.execute(self._marked(), named).fetchone()))

    def _is_done(self, epoch: Epoch, topic: Topic, marker: CommittedEpoch | None) -> bool:
        if marker is None and topic in self._committed:
            raise FatalError(
                f"the table {self._names.claim(topic).sql} of {topic} was dropped while the pipeline ran",
                code="PEN-5010",
                hint="put it back; or stop, and `penstock offsets reset FILE` to begin anew",
            )
        return is_committed(marker, epoch)

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        marker = self._marker(pipeline, topic)
        if marker is not None:
            self._committed.add(topic)
        return marker

    def sweep(self, epoch: Epoch, keep: Sequence[StagedTables]) -> None:
        kept = {part.table for receipt in keep for parts in receipt.staged.values() for part in parts}

        def drop(connection: psycopg.Connection[Any]) -> None:
            left = [self._own(name) for name in self._staged(connection, f"{self._stem(epoch)}-") if name not in kept]
            if left:
                connection.execute(f"DROP TABLE IF EXISTS {', '.join(left)}")

        self._ask(drop)

    # -- seeding, schemas and health -----------------------------------------------------------------------------

    def is_seeded(self, topic: Topic) -> bool:
        named = [topic, self._names.claim(topic).sql]
        query = (
            f"SELECT FROM {self._own('seeded')} WHERE topic = %s AND target = %s "
            "AND (NOT made OR to_regclass(target) IS NOT NULL)"
        )
        return self._ask(lambda connection: connection.execute(query, named).fetchone()) is not None

    def mark_seeded(self, topic: Topic) -> None:
        target = self._names.claim(topic).sql
        statement = (
            f"INSERT INTO {self._own('seeded')} VALUES (%s, %s, to_regclass(%s) IS NOT NULL) "
            "ON CONFLICT (topic, target) DO UPDATE SET made = EXCLUDED.made"
        )

        def mark(connection: psycopg.Connection[Any]) -> None:
            with connection.transaction():
                self._make_empty(connection, topic)
                connection.execute(statement, [topic, target, target])

        self._ask(mark)

    def _make_empty(self, connection: psycopg.Connection[Any], topic: Topic) -> None:
        """If no rows came: readers find the table empty, and not missing."""
        name, now = self._names.claim(topic), self.context.topic(topic).source_schema
        if now is None or self._catalog.find(connection, name) is not None:
            return
        key = (self.config.key or key_of(now)) if self._upserts else ()
        own = _picked(now, own_columns(now)) if self._upserts else now
        # If they have no place there, the first row will say so.
        with contextlib.suppress(SchemaError, psycopg.ProgrammingError), connection.transaction():
            empty = columns.plain(topic, pa.RecordBatch.from_pylist([], schema=own))
            if key or not self._upserts:
                for statement in creation(connection, name, empty.schema, key, self.config.soft_delete):
                    connection.execute(statement)

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of the table; more may come."""
        target = self._ask(lambda connection: self._catalog.find(connection, self._names.claim(topic)))
        return target and target.schema()

    def check(self) -> Sequence[Finding]:
        return self._ask(lambda connection: list(self._findings(connection)))

    def _findings(self, connection: psycopg.Connection[Any]) -> Iterator[Finding]:
        row = connection.execute(
            "SELECT current_setting('fsync'), pg_is_in_recovery(), has_database_privilege(current_database(), 'CREATE')"
        ).fetchone()
        assert row is not None
        fsync, standby, may_create = row
        fix = "point `dsn` at the primary" if standby else ""
        yield Finding(not standby, f"the server is a {'standby' if standby else 'primary'}", fix)
        fix = "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf()" if fsync == "off" else ""
        yield Finding(fsync == "on", f"fsync is {fsync}", fix)
        fix = "" if may_create else "make the schemas yourself, or GRANT CREATE ON DATABASE … TO CURRENT_USER"
        yield Finding(True, f"the user {'may' if may_create else 'may not'} make schemas", fix)

    def health_check(self) -> HealthStatus:
        with (
            failures.errors("PostgreSQL does not answer"),
            contextlib.closing(connections.connect(self.config)) as connection,
        ):
            row = connection.execute(
                "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'"
            ).fetchone()
        return HealthStatus.unhealthy("the server takes no writes") if row == (True,) else HealthStatus.healthy()


@dataclass(frozen=True)
class _Planned:
    plan: Plan | None
    """None: the changes are simple."""


def _keys(receipts: Sequence[StagedTables]) -> dict[Topic, list[str]]:
    """The key of every topic, which all tasks must have seen alike."""
    found: dict[Topic, list[str]] = {}
    for receipt in receipts:
        for topic in receipt.staged:
            key = receipt.key.get(topic, [])
            if found.setdefault(topic, key) != key:
                raise SchemaError(
                    f"the key of {topic} changes within an epoch: {found[topic]}, {key}",
                    code="PEN-4001",
                    hint="set `key` in the sink",
                )
    return found


def _picked(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names])


def _marker(row: Any) -> CommittedEpoch | None:
    """The marker that a row of the epochs' table is; None before the first commit, and after the target was dropped."""
    if row is None or row[0] is None or not row[3]:
        return None
    return CommittedEpoch(incarnation=row[0], number=row[1], end=json.loads(row[2]))


def _durable() -> str:
    """A receipt and a commit are promises: whatever the server's default, their transactions are on disk when it answers."""
    return (
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') NOT IN ('on', 'remote_apply')"
    )


@contextlib.contextmanager
def _losses(epoch: Epoch) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise StagingLost(f"what was staged of {epoch} is gone: {str(error).strip().partition(chr(10))[0]}") from error
