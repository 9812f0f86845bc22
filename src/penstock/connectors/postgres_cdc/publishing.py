"""Publish tables: all at once if possible, else one by one, so that one that may not be published is set aside alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psycopg

from penstock.connectors.postgres_cdc.catalog import Table
from penstock.connectors.postgres_cdc.log.slot import Server
from penstock.connectors.postgres_cdc.publications import publish, publish_truncates
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgres_cdc.table_errors import TableError, table_errors
from penstock.connectors.postgresql import failures
from penstock.errors import ConfigError, ConnectorError


class Publisher:
    """Makes and completes the publications of a capture."""

    def __init__(self, session: Session) -> None:
        self._session, self._config = session, session.config

    def publish(
        self, connection: psycopg.Connection[object], tables: Mapping[str, Table], here: Server
    ) -> tuple[dict[str, Table], dict[str, ConnectorError]]:
        """Publish tables; gives back the published ones as they are now, and why the others are not."""
        lacking = {stream: table for stream, table in tables.items() if not table.published}
        publish_truncates(connection, self._config, [table for table in tables.values() if table.published])
        now: Mapping[str, Table] = {}
        if len(lacking) > 1 and self._config.manage:  # all at once, if nothing is wrong with any of them
            with contextlib.suppress(ConfigError, TableError):
                self._publish(connection, lacking, here)
            now = self._session.look_at_publications(connection)
            lacking = {stream: table for stream, table in lacking.items() if not now[stream].published}
        failed: dict[str, ConnectorError] = {}
        for stream, table in lacking.items():
            try:
                self._publish(connection, {stream: table}, here)
            except (ConfigError, TableError) as error:
                failed[stream] = error
        now = self._session.look_at_publications(connection) if lacking else now
        published = {stream: now.get(stream, table) for stream, table in tables.items() if stream not in failed}
        for stream, table in published.items():
            if not table.published:
                failed[stream] = TableError(f"{stream} was removed from its publication right after it was added")
        return {stream: table for stream, table in published.items() if stream not in failed}, failed

    def _publish(self, connection: psycopg.Connection[object], tables: Mapping[str, Table], here: Server) -> None:
        first = next(iter(tables.values()))
        with failures.errors(f"cannot publish {first.stream}"), table_errors(first, "publish"):
            publish(connection, self._config, list(tables.values()), here.version)
