"""The catalog of Iceberg tables: a SQL database, its connections, and the name that each topic's table has in it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io import FileIO
from pyiceberg.table import CommitTableResponse
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.metadata import TableMetadata
from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from penstock import durable
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.io import properties_for
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.sink import Topic
from penstock.store import Place, is_object_url


class _Last(threading.local):
    """What the thread's last commit was about."""

    written = ""
    """The metadata file that was written, whether or not the catalog names it."""
    base = ""
    """The metadata file that the commit starts from."""


class Catalog(SqlCatalog):
    """A SQL catalog whose commits survive a power cut. Threads may commit to different tables at the same time."""

    def __init__(self, name: str, url: URL, root: Place | None = None) -> None:
        """`root`: the place of all tables, if they are in an object store."""
        properties = properties_for(root) if root is not None else {}
        super().__init__(name, uri=url.render_as_string(hide_password=False), **properties)
        self.engine.dispose()
        self.engine = _engine(url)
        self.last = _Last()

    def _write_metadata(self, metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:  # type: ignore[override]
        super()._write_metadata(metadata, io, metadata_path)
        self.last.written = metadata_path
        sync(metadata_path)  # before the catalog names it

    def commit_table(self, table: IcebergTable, *changes: Any) -> CommitTableResponse:
        self.last.base = table.metadata_location
        return super().commit_table(table, *changes)

    def _update_and_stage_table(self, current_table: IcebergTable | None, *given: Any) -> Any:
        # The requirements do not cover all that the commit depends on: a tag on a snapshot that expires, the sort order.
        if current_table is None or current_table.metadata_location != self.last.base:
            raise CommitFailedException("another writer has changed the table meanwhile")
        return super()._update_and_stage_table(current_table, *given)

    def sync(self) -> None:
        """The process that made the newest commit may have died before SQLite had synced it."""
        if self.engine.url.get_backend_name() == "sqlite" and self.engine.url.database:
            durable.fsync(self.engine.url.database)


class Catalogs:
    """The catalog of each process: connections do not survive a fork."""

    def __init__(self, name: str, url: URL, root: Place) -> None:
        self._name = name
        self._url = url
        self._root = root
        self._of: dict[int, Catalog] = {}

    def here(self) -> Catalog:
        """The catalog of this process."""
        found = self._of.get(os.getpid())
        if found is not None:
            return found
        try:
            try:
                made = Catalog(self._name, self._url, self._root)
            except DBAPIError:  # two tasks created its tables at the same time, and the other one was first
                made = Catalog(self._name, self._url, self._root)
        except DBAPIError as error:
            raise FatalError(
                f"the catalog at {self._url.render_as_string()} cannot be reached: {error.orig}",
                code="PEN-5001",
                hint="check `catalog_uri` and `catalog_password`",
            ) from error
        return self._of.setdefault(os.getpid(), made)

    def close(self) -> None:
        for pid, catalog in self._of.items():
            catalog.engine.dispose(close=pid == os.getpid())
        self._of.clear()


class Names:
    """Namespace and name of each topic's table: the options `table` and `namespace`."""

    def __init__(self, config: IcebergConfig) -> None:
        self._config = config
        self._owners: dict[tuple[str, str], Topic] = {}
        rest = config.table.replace("{topic}", "")
        if "{" in rest or "}" in rest:
            raise ConfigError(
                f"`table` has an unknown placeholder: {config.table}",
                code="PEN-1003",
                hint="the only placeholder is {topic}",
            )

    def claim(self, topic: Topic) -> tuple[str, str]:
        """The name of the topic's table; refused if another topic has the same."""
        name = self._config.table.replace("{topic}", topic.removeprefix("/")).replace("/", ".")
        namespace, _, name = name.rpartition(".")
        identifier = (namespace or self._config.namespace, name)
        other = self._owners.setdefault(identifier, topic)
        if other != topic:
            raise ConfigError(
                f"the topics {other} and {topic} meet in the table {'.'.join(identifier)}",
                code="PEN-1011",
                hint='give each a table of its own: table = "….{topic}"',
            )
        return identifier


def catalog_url(config: IcebergConfig, uri: str, root: Place) -> URL:
    """The address of the catalog's database, with its password."""
    if not uri and not isinstance(root, Path):
        raise ConfigError(
            "tables in an object store need a catalog that is elsewhere", code="PEN-1004", hint="set `catalog_uri`"
        )
    try:
        url = make_url(uri or f"sqlite:///{root / 'catalog.db'}")
    except ArgumentError as error:
        raise ConfigError(f"`catalog_uri` cannot be read: {error}", code="PEN-1003") from error
    if url.password:
        raise ConfigError(
            "`catalog_uri` holds a password",
            code="PEN-1003",
            hint='leave it out, and give it as catalog_password = { env = "NAME" }',
        )
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(
            f"a catalog in {url.get_backend_name()} is not supported yet",
            code="PEN-1009",
            hint="use sqlite:/// or postgresql://",
        )
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    return url.set(password=config.catalog_password.reveal()) if config.catalog_password else url


def sync(*locations: str) -> None:
    """Make files durable that are on a disk."""
    durable.fsync(*(local(each) for each in locations if not is_object_url(each)))


def local(location: str) -> Path:
    """A location as a path: other engines write it as an address."""
    return Path(urlparse(location).path) if location.startswith("file:") else Path(location)


@contextlib.contextmanager
def catalog_errors(topic: Topic) -> Iterator[None]:
    """Errors of a catalog are worth another try: only the table itself shows whether a commit was made."""
    try:
        yield
    except DBAPIError as error:
        raise RetryableError(f"the catalog failed at the table of {topic}: {error.orig}", code="PEN-2001") from error


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, pool_size=1)
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": 30})  # no connection survives a fork

    @event.listens_for(engine, "connect")
    def durable_commits(connection: Any, _: Any) -> None:
        # FULL, the default, does not sync the directory after the journal is dropped: a power cut would undo the commit.
        connection.execute("PRAGMA synchronous = EXTRA")

    return engine
