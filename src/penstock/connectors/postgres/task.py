"""A task's side of an epoch: check the rows, stage them, and try whatever a commit could refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import is_changelog, own_columns
from penstock.changes.checks import check_changes
from penstock.connectors import upsert
from penstock.connectors.postgres import columns
from penstock.connectors.postgres.config import PostgresSinkConfig, StagedTables
from penstock.connectors.postgres.fit import MOST_COLUMNS, altered, known_types, refuse_rounding, widened
from penstock.connectors.postgres.refusals import refusals
from penstock.connectors.postgres.rules import Rules
from penstock.connectors.postgres.session import Session
from penstock.connectors.postgres.stage import Known, Open, Stage, exact, has_row
from penstock.connectors.postgres.target import refuse_unfit
from penstock.connectors.postgresql import failures
from penstock.errors import DataError, SchemaError
from penstock.schema.evolution import Policy, fit, slimmed
from penstock.sink import Topic, WriteResult


class TaskSide:
    """What one task does for one epoch; one transaction, so that a task that dies leaves nothing."""

    def __init__(
        self, session: Session, stem: str, policy: Callable[[Topic], Policy], keeps: Callable[[Topic], bool]
    ) -> None:
        self.config: PostgresSinkConfig = session.config
        self._session = session
        self._policy = policy
        self._keeps = keeps
        self._rules: dict[Topic, Rules] = {}
        self._upserts = self.config.mode == "upsert"
        self._names: dict[Topic, set[str]] = {}
        self._connection: psycopg.Connection[Any] = session.ask(lambda connection: connection)
        self._stage = session.ask(lambda connection: Stage(connection, self.config.staging_schema, stem))

    def write(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        key = upsert.key_for(self.config, topic, batch.schema, self._stage.keys) if self._upserts else []
        known = self._stage.targets.get(topic) or self._meet(topic, key)
        rows = batch
        if self._upserts:
            there = known.target.columns.values() if known.target else ()
            rows = upsert.without_unused(rows)
            rows = upsert.with_known_types(rows, {each.name: each.arrow for each in there})
        rows, discarded = self._narrowed(topic, columns.plain(topic, rows), known), 0
        upsert.refuse_own_mark(self.config, topic, rows.schema.names)
        if known.target is not None:
            try:
                rows, discarded = self._fitted(topic, rows, known, key)
            except SchemaError:
                slim = slimmed(rows, known.target.schema())
                if slim.schema == rows.schema:
                    raise
                rows, discarded = self._fitted(topic, slim, known, key)
        if self._upserts:
            check_changes(pa.Table.from_batches([rows]), key)
        if rows.num_rows:
            self._refuse_broken(topic, rows, known, rows.num_rows == batch.num_rows)
            self._stage.write(topic, rows, key)
        return WriteResult(rows.num_rows, batch.nbytes, discarded)

    def flush(self) -> None:
        self._stage.flush()

    def finish(self) -> StagedTables:
        """Everything staged and on the server's disk."""
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
        return receipt

    def _meet(self, topic: Topic, key: Sequence[str]) -> Known:
        """Look at the topic's table before the first of its rows is staged."""
        name = self._session.name(topic)
        target = self._ask(lambda connection: self._session.catalog.find(connection, name))
        if target is not None:
            refuse_unfit(topic, target, key, self.config.soft_delete)
        self._stage.targets[topic] = found = Known(target)
        if target is not None and self._keeps(topic):
            self._rules[topic] = self._ask(lambda connection: Rules.of(connection, target))
        return found

    def _narrowed(self, topic: Topic, rows: pa.RecordBatch, known: Known) -> pa.RecordBatch:
        """
        The rows without new columns that have no value, once a table could not have them all.

        One message is enough to have a column in all rows that follow; only those with a value in it are refused.
        """
        there = self._names.setdefault(topic, set(known.target.columns) if known.target else set())
        if len(there.union(rows.schema.names)) > MOST_COLUMNS:
            new = [name for name in rows.schema.names if name not in there]
            rows = rows.drop_columns([name for name in new if rows.column(name).null_count == rows.num_rows])
        if len(there.union(rows.schema.names)) > MOST_COLUMNS:
            raise DataError(
                f"with these rows the table of {topic} would have more than {MOST_COLUMNS:,} columns, which PostgreSQL has no "
                "place for",
                hint="let fewer columns come: `max_columns` of the format json, or a list of columns in the route's SQL",
            )
        there.update(rows.schema.names)
        return rows

    def _fitted(
        self, topic: Topic, rows: pa.RecordBatch, known: Known, key: Sequence[str]
    ) -> tuple[pa.RecordBatch, int]:
        """The rows as the table will take them, and how many lost something by the policy."""
        target, policy = known.target, self._policy(topic)
        assert target is not None
        rows = rows.drop_columns([name for name in known.generated if name in rows.schema.names])
        own = columns.picked(rows.schema, own_columns(rows.schema)) if self._upserts else rows.schema
        kinds = known.altered.get(exact(own))
        if kinds is None:
            kinds = self._ask(lambda connection: altered(connection, topic, target, own, policy))
            self._ask(lambda connection: refuse_rounding(connection, topic, target, own, kinds))
            known.altered[exact(own)] = kinds
        rows, discarded = fit(topic, rows, widened(topic, target.schema(), own, policy), policy, key)
        known.refuse_values(topic, rows, kinds, self._upserts)
        return rows, discarded

    def _refuse_broken(self, topic: Topic, rows: pa.RecordBatch, known: Known, in_place: bool) -> None:
        """Refuse rows that the table's own rules forbid. `in_place`: none of their batch was left out before."""
        rules = self._rules.get(topic)
        if rules is None:
            return
        at = np.arange(rows.num_rows)
        whole = rows.drop_columns([name for name in known.generated if name in rows.schema.names])
        if self._upserts and is_changelog(rows.schema):
            there = has_row(rows)
            if "_unchanged" in rows.schema.names:  # what the row will be is known to the table alone
                there = pc.and_(there, rows.column("_unchanged").is_null())
            at, whole = at[there.to_numpy(zero_copy_only=False)], rows.filter(there)
        own = columns.picked(rows.schema, own_columns(rows.schema)) if self._upserts else rows.schema
        try:
            rules.refuse(topic, whole, at.tolist(), known.altered.get(exact(own), {}))
        except DataError as error:
            error.rows = error.rows if in_place else ()
            raise

    def _rehearse(self, topic: Topic, known: Known, part: Open) -> None:
        """Try the texts that become values of other types, of keys that rows have left too."""
        texts = [each for each in part.schema if each.type in (pa.string(), pa.list_(pa.string()))]
        there = known.target.columns if known.target else {}
        kinds = {each.name: there[each.name].computed for each in texts if each.name in there}
        kinds |= {name: kind for each in known.altered.values() for name, kind in each.items() if name in kinds}
        new = columns.picked(
            part.schema, [each.name for each in texts if each.name not in kinds and columns.origin(each)]
        )
        kinds |= self._ask(lambda connection: known_types(connection, new))
        key = self._stage.keys.get(topic, []) if part.old_key else []
        tried = [
            (name, f"count({column}::{kind})")
            for name, kind in kinds.items()
            if kind not in ("text", "text[]") and not kind.startswith("character")
            for column in (
                f"c{part.schema.names.index(name)}",
                *(f"o{n}" for n, each in enumerate(key) if each == name),
            )
        ]
        if tried:
            self._try(topic, part, tried)

    def _try(self, topic: Topic, part: Open, tried: Sequence[tuple[str, str]]) -> None:
        """All casts at once, and one by one if something is refused: the error then names the column."""
        table = self._session.own(part.table)
        with failures.errors(failures.NO_ANSWER):
            try:
                with self._connection.transaction():
                    self._connection.execute(f"SELECT {', '.join(cast for _, cast in tried)} FROM {table}")
            except psycopg.DataError:
                for name, cast in tried:
                    with refusals(topic, name):
                        self._connection.execute(f"SELECT {cast} FROM {table}")

    def _ask(self, question: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        """Put a question over the connection that has staged the rows; another one would not see them."""
        with failures.errors(failures.NO_ANSWER):
            return question(self._connection)
