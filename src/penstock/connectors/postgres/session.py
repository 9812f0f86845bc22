"""The sink's connection, and its own tables: which epochs every target holds, and which topics were copied whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg

from penstock.connectors.postgres.config import PostgresSinkConfig
from penstock.connectors.postgres.target import Catalog, Name, Names, Target
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import quoted
from penstock.durable import canonical
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic

T = TypeVar("T")

IDLE_SECS = 10
"""The server ends a commit whose driver is silent for this long: a run that is stopped must not keep others waiting."""

LOCK_SECS = 30
"""Longest wait for a table or a marker that another session holds; then the commit is tried again."""


class Session:
    """A connection that is made again after it broke, and what is known about the server's tables."""

    def __init__(self, config: PostgresSinkConfig) -> None:
        self.config = config
        self.names = Names(config.table, config.staging_schema)
        self.catalog = Catalog()
        self._connection: psycopg.Connection[Any] | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Put a question to the server."""
        with failures.errors(failures.NO_ANSWER):
            if self._connection is None or self._connection.closed:
                self._connection = connections.connect(self.config)
                self._connection.execute(_DURABLE)
                self._connection.execute(
                    f"SET lock_timeout = '{LOCK_SECS}s'; SET idle_in_transaction_session_timeout = '{IDLE_SECS}s'"
                )
            return question(self._connection)

    def own(self, table: str) -> str:
        """The SQL name of a table in the sink's own schema."""
        return f"{quoted(self.config.staging_schema)}.{quoted(table)}"

    def name(self, topic: Topic) -> Name:
        return self.names.claim(topic)

    def target(self, topic: Topic) -> Target | None:
        """The topic's table as it is now; None if it does not exist."""
        return self.ask(lambda connection: self.catalog.find(connection, self.name(topic)))

    def staged(self, connection: psycopg.Connection[Any], prefix: str) -> list[str]:
        """The staging tables whose names begin like this."""
        rows = connection.execute(
            "SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname, %s)",
            [self.config.staging_schema, prefix],
        ).fetchall()
        return [name for (name,) in rows]

    def make_own_tables(self) -> None:
        """Create the sink's schema and tables if they are missing; tasks and other pipelines may do so at the same time."""
        self.ask(self._make_own_tables)

    def _make_own_tables(self, connection: psycopg.Connection[Any]) -> None:
        if connection.execute("SELECT to_regclass(%s) IS NOT NULL", [self.own("seeded")]).fetchone() == (True,):
            return
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('penstock'), hashtext(%s))", [self.own("")])
            named = [self.config.staging_schema]
            if connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", named).fetchone() is None:
                connection.execute(f"CREATE SCHEMA {quoted(self.config.staging_schema)}")
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self.own('epochs')} (pipeline text, topic text, target text, incarnation text, "
                'number int8, "end" text, columns text[], committed_at timestamptz, PRIMARY KEY (pipeline, topic, target))'
            )
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self.own('seeded')} "
                "(topic text, target text, made bool, PRIMARY KEY (topic, target))"
            )


class Markers:
    """The rows of the table `epochs`: for every pipeline and topic the last epoch that its table holds."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def read(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        named = self._named(pipeline, topic)
        return _marker(self._session.ask(lambda connection: connection.execute(self._query(), named).fetchone()))

    def lock(
        self, connection: psycopg.Connection[Any], pipeline: str, topics: Sequence[Topic]
    ) -> dict[Topic, CommittedEpoch | None]:
        """The markers of the topics, which no other session can move until the transaction ends."""
        found = {}
        for topic in topics:
            named = self._named(pipeline, topic)
            connection.execute(
                f"INSERT INTO {self._table} (pipeline, topic, target) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", named
            )
            found[topic] = _marker(connection.execute(f"{self._query()} FOR UPDATE", named).fetchone())
        return found

    def move(
        self, connection: psycopg.Connection[Any], epoch: Epoch, topic: Topic, end: Positions, sent: Sequence[str]
    ) -> None:
        """Record the epoch, in the transaction that applies it."""
        connection.execute(
            f'UPDATE {self._table} SET incarnation = %s, number = %s, "end" = %s, columns = %s, '
            "committed_at = clock_timestamp() WHERE pipeline = %s AND topic = %s AND target = %s",
            [epoch.incarnation, epoch.number, canonical(dict(end)), sent, *self._named(epoch.pipeline, topic)],
        )

    def columns(self, pipeline: str, topic: Topic) -> list[str]:
        """Every column of the topic that an earlier epoch brought."""
        named = self._named(pipeline, topic)
        query = f"SELECT columns FROM {self._table} WHERE pipeline = %s AND topic = %s AND target = %s"
        row = self._session.ask(lambda connection: connection.execute(query, named).fetchone())
        return list((row and row[0]) or ())

    @property
    def _table(self) -> str:
        return self._session.own("epochs")

    def _named(self, pipeline: str, topic: Topic) -> list[str]:
        return [pipeline, topic, self._session.name(topic).sql]

    def _query(self) -> str:
        return (
            f'SELECT incarnation, number, "end", to_regclass(target) IS NOT NULL FROM {self._table} '
            "WHERE pipeline = %s AND topic = %s AND target = %s"
        )


class Seeded:
    """The rows of the table `seeded`: topics whose first copy is complete."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def has(self, topic: Topic) -> bool:
        """True if the copy was complete, and its table was not dropped since."""
        named = [topic, self._session.name(topic).sql]
        query = (
            f"SELECT FROM {self._session.own('seeded')} WHERE topic = %s AND target = %s "
            "AND (NOT made OR to_regclass(target) IS NOT NULL)"
        )
        return self._session.ask(lambda connection: connection.execute(query, named).fetchone()) is not None

    def add(self, connection: psycopg.Connection[Any], topic: Topic) -> None:
        target = self._session.name(topic).sql
        connection.execute(
            f"INSERT INTO {self._session.own('seeded')} VALUES (%s, %s, to_regclass(%s) IS NOT NULL) "
            "ON CONFLICT (topic, target) DO UPDATE SET made = EXCLUDED.made",
            [topic, target, target],
        )


def _marker(row: Any) -> CommittedEpoch | None:
    """The marker in a row of `epochs`; None before the first commit, and after the target was dropped."""
    if row is None or row[0] is None or not row[3]:
        return None
    return CommittedEpoch(incarnation=row[0], number=row[1], end=json.loads(row[2]))


_DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', false) "
    "WHERE current_setting('synchronous_commit') NOT IN ('on', 'remote_apply')"
)
"""A receipt and a commit are promises: whatever the server's default, they are on disk when it answers."""
