"""The driver's side of an epoch: plan every topic, then apply all of them in one transaction, with their markers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from penstock import failpoints
from penstock.connectors import upsert
from penstock.connectors.postgres import apply, columns
from penstock.connectors.postgres.config import StagedTables
from penstock.connectors.postgres.events import Events, Part, by_topic, count
from penstock.connectors.postgres.fit import Fit
from penstock.connectors.postgres.plan import Plan, plan
from penstock.connectors.postgres.refusals import losses, refusals
from penstock.connectors.postgres.session import Markers, Session
from penstock.errors import FatalError, RetryableError, StagingLost
from penstock.schema.evolution import Policy
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic, is_committed

DROPPED = 100
"""Staging tables that are dropped at once; each takes room in the server's table of locks."""


@dataclass(frozen=True)
class _Planned:
    plan: Plan | None
    """None: the changes are simple."""


@dataclass(frozen=True)
class TopicCommit:
    """What one epoch brings for one topic."""

    topic: Topic
    parts: Sequence[Part]
    key: Sequence[str]
    sent: Sequence[str]
    """Every column of the topic that ever came, this epoch's included."""
    policy: Policy
    planned: _Planned | None = None
    """None: the staged rows are lost."""


class DriverSide:
    """Commits epochs."""

    def __init__(
        self,
        session: Session,
        policy: Callable[[Topic], Policy],
        source_schema: Callable[[Topic], pa.Schema | None],
    ) -> None:
        self._session = session
        self._policy = policy
        self._source_schema = source_schema
        self._markers = Markers(session)
        self._soft_delete = session.config.soft_delete
        self._upserts = session.config.mode == "upsert"

    def commit(
        self,
        epoch: Epoch,
        receipts: Sequence[StagedTables],
        end: Positions,
        committed: Collection[Topic],
        whose: str,
    ) -> set[Topic]:
        """
        Apply what the tasks staged. Gives the topics.

        `committed` names topics whose table was there before in this run; `whose` is how names of this sink's tables begin.
        """
        topics = {each.topic: each for each in self._topics(epoch, receipts)}
        if not topics:
            return set()
        failpoints.hit("commit.before")
        for topic in sorted(topics) if self._upserts else ():
            if not self._is_done(epoch, topic, self._markers.read(epoch.pipeline, topic), committed):
                topics[topic] = replace(topics[topic], planned=self._plan(topics[topic]))
        self._session.ask(lambda connection: self._apply(connection, epoch, topics, end, committed))
        applied = [part.staged.table for each in topics.values() for part in each.parts]
        self._session.ask(lambda connection: self._tidy(connection, epoch, applied, whose))
        return set(topics)

    def _topics(self, epoch: Epoch, receipts: Sequence[StagedTables]) -> Iterable[TopicCommit]:
        parts = by_topic([receipt.staged for receipt in receipts], self._session.config.staging_schema)
        for topic, mine in parts.items():
            key = upsert.one_key(topic, (each.key.get(topic, []) for each in receipts if topic in each.staged))
            brought = {name for part in mine for name in part.sent}
            sent = sorted({*self._markers.columns(epoch.pipeline, topic), *brought})
            if self._upserts:
                target = self._session.target(topic)
                known = target.schema().names if target else []
                gone = [name for name in upsert.gone_columns(sent, self._source_schema(topic)) if name in known]
                mine = [replace(part, gone=gone) for part in mine]
            yield TopicCommit(topic, mine, key, sent, self._policy(topic))

    def _plan(self, topic: TopicCommit) -> _Planned | None:
        """What the topic's changes come to, before anything is locked; None if staged rows are lost."""

        def planned(connection: psycopg.Connection[Any]) -> _Planned:
            with refusals(topic.topic):
                target = self._fit(topic).foresee(connection, self._session.catalog)
                events = Events(target, topic.parts, topic.key)
                return _Planned(None if events.is_simple else plan(connection, events))

        try:
            return self._session.ask(planned)
        except RetryableError as error:
            if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
                return None
            raise

    def _fit(self, topic: TopicCommit) -> Fit:
        schemas = [columns.picked(part.schema, part.sent) if self._upserts else part.schema for part in topic.parts]
        return Fit(topic.topic, self._session.name(topic.topic), schemas, topic.policy, topic.key, self._soft_delete)

    def _apply(
        self,
        connection: psycopg.Connection[Any],
        epoch: Epoch,
        topics: Mapping[Topic, TopicCommit],
        end: Positions,
        committed: Collection[Topic],
    ) -> None:
        with connection.transaction():
            markers = self._markers.lock(connection, epoch.pipeline, sorted(topics))
            pending = [name for name, marker in markers.items() if not self._is_done(epoch, name, marker, committed)]
            connection.execute("SET CONSTRAINTS ALL DEFERRED")
            for place, name in enumerate(pending):
                if place:
                    failpoints.hit("commit.before")
                with refusals(name), losses(epoch):
                    self._apply_topic(connection, topics[name])
                self._markers.move(connection, epoch, name, end, topics[name].sent)

    def _apply_topic(self, connection: psycopg.Connection[Any], topic: TopicCommit) -> None:
        target = self._fit(topic).make(connection, self._session.catalog)
        if not self._upserts:
            apply.append(connection, target, topic.parts)
            return
        count(connection, topic.parts)
        if topic.planned is None:
            raise StagingLost(f"the staged rows of {topic.topic} were missing")
        events = Events(target, topic.parts, topic.key)
        apply.Upsert(connection, events, self._soft_delete).apply(topic.planned.plan)

    def _is_done(self, epoch: Epoch, topic: Topic, marker: CommittedEpoch | None, committed: Collection[Topic]) -> bool:
        if marker is None and topic in committed:
            raise FatalError(
                f"the table {self._session.name(topic).sql} of {topic} was dropped while the pipeline ran",
                code="PEN-5010",
                hint="restore it; or stop, and start over with `penstock offsets reset FILE`",
            )
        return is_committed(marker, epoch)

    def _tidy(self, connection: psycopg.Connection[Any], epoch: Epoch, applied: Iterable[str], whose: str) -> None:
        """Drop what is applied, and what earlier epochs left; a table that somebody reads is left to the next epoch."""
        old = [name for name in self._session.staged(connection, whose) if name < f"{whose}{epoch.number:012d}"]
        names = list(dict.fromkeys([*applied, *old]))
        for first in range(0, len(names), DROPPED):
            some = ", ".join(map(self._session.own, names[first : first + DROPPED]))
            with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '1s'")
                connection.execute(f"DROP TABLE IF EXISTS {some}")
