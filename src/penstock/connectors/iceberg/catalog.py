"""The catalog of Iceberg tables: a SQL database or a service, and the name that each topic's table has in it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import requests
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    OAuthError,
    RESTError,
    UnauthorizedError,
)
from pyiceberg.io import FileIO
from pyiceberg.table import CommitTableResponse
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.metadata import TableMetadata
from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from penstock import durable
from penstock.config import Secret
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.io import properties_for
from penstock.connectors.iceberg.vended import vends
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.sink import Topic
from penstock.store import Place, is_object_url


class _Last(threading.local):
    """What the thread's last commit was about."""

    written = ""
    """The metadata file that was written, whether or not the catalog names it."""
    base = ""
    """The metadata file that the commit starts from."""


class Staged(MetastoreCatalog):
    """A catalog that only names the newest metadata file, which its clients write. Threads may commit at the same time."""

    last: _Last

    def _write_metadata(self, metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:  # type: ignore[override]
        super()._write_metadata(metadata, io, metadata_path)
        self.last.written = metadata_path
        sync(metadata_path)  # before the catalog names it

    def commit_table(self, table: IcebergTable, *changes: Any) -> CommitTableResponse:
        self.last.base = table.metadata_location
        return super().commit_table(table, *changes)  # type: ignore[safe-super]

    def _update_and_stage_table(self, current_table: IcebergTable | None, *given: Any) -> Any:
        # The requirements do not cover all that the commit depends on: a tag on a snapshot that expires, the sort order.
        if current_table is None or current_table.metadata_location != self.last.base:
            raise CommitFailedException("another writer has changed the table meanwhile")
        return super()._update_and_stage_table(current_table, *given)

    def sync(self) -> None:
        """Make the newest commit durable; a service has done so before it answered."""


class Catalog(Staged, SqlCatalog):
    """A SQL catalog whose commits survive a power cut."""

    def __init__(self, name: str, url: URL, root: Place | None = None) -> None:
        """`root`: the place of all tables, if they are in an object store."""
        properties = properties_for(root) if root is not None else {}
        super().__init__(name, uri=url.render_as_string(hide_password=False), **properties)
        self.engine.dispose()
        self.engine = _engine(url)
        self.last = _Last()

    def sync(self) -> None:
        """The process that made the newest commit may have died before SQLite had synced it."""
        if self.engine.url.get_backend_name() == "sqlite" and self.engine.url.database:
            durable.fsync(self.engine.url.database)

    def close(self) -> None:
        self.engine.dispose()


class Rest(RestCatalog):
    """A REST catalog: the service writes the metadata, and decides by the requirements alone."""

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self.last = _Last()

    def sync(self) -> None:
        """The service has made it durable before it answered."""


AnyCatalog = Catalog | Rest
"""Catalogs of Glue and Hive are like the first."""


class Catalogs:
    """The catalog of each process: connections do not survive a fork."""

    def __init__(self, config: IcebergConfig, uri: str, root: Place) -> None:
        self._config, self._uri, self._root = config, uri, root
        self._of: dict[int, AnyCatalog] = {}
        self._revealed: dict[str, Any] = {}
        if config.catalog_kind == "sql":
            catalog_url(config, uri, root)  # what is wrong with it is said before anything starts

    def here(self) -> AnyCatalog:
        """The catalog of this process."""
        found = self._of.get(os.getpid())
        if found is not None:
            return found
        made = self._sql() if self._config.catalog_kind == "sql" else self._service()
        return self._of.setdefault(os.getpid(), made)

    def _sql(self) -> Catalog:
        url = catalog_url(self._config, self._uri, self._root)
        try:
            try:
                return Catalog(self._config.catalog, url, self._root)
            except DBAPIError:  # two tasks created its tables at the same time, and the other one was first
                return Catalog(self._config.catalog, url, self._root)
        except DBAPIError as error:
            raise FatalError(
                f"the catalog at {url.render_as_string()} cannot be reached: {error.orig}",
                code="PEN-5001",
                hint="check `catalog_uri` and `catalog_password`",
            ) from error

    def _service(self) -> AnyCatalog:
        self._revealed = properties_of(self._config)
        with self.errors(f"the catalog at {self._config.catalog_uri or self._config.catalog_kind}"):
            kind = KINDS[self._config.catalog_kind]()
            own = properties_for(self._root, vends(self._config, self._root))
            made: AnyCatalog = kind(self._config.catalog, **self._revealed, **own)
            return made

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """
        Errors of a catalog as ours. Most are worth another try: only the table itself shows whether a commit was made.
        """
        try:
            yield
        except DBAPIError as error:
            raise RetryableError(f"the catalog failed at {what}: {error.orig}", code="PEN-2001") from error
        except (UnauthorizedError, ForbiddenError, OAuthError, BadRequestError) as error:
            raise self._refused(what, error) from error
        except (RESTError, requests.RequestException) as error:
            raise RetryableError(f"the catalog failed at {what}: {_brief(error)}", code="PEN-2001") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("botocore", "thrift", "hive_metastore"):
                raise
            raise self._of_client(what, error) from error

    def _refused(self, what: str, error: Exception) -> ConnectorError:
        """Credentials may have been renewed since they were read."""
        if properties_of(self._config) != self._revealed:
            self.close()
            return RetryableError(
                f"the catalog refused expired credentials for {what}: {_brief(error)}", code="PEN-2001"
            )
        return FatalError(
            f"the catalog refused {what}: {_brief(error)}",
            code="PEN-5001",
            hint="check `catalog_uri`, `catalog_token` or `catalog_credential`, and `catalog_options`",
        )

    def _of_client(self, what: str, error: Exception) -> ConnectorError:
        """What an error of the AWS or the Hive client means."""
        code = str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
        if type(error).__name__ in _NO_ACCESS or code in _NO_ACCESS:
            return self._refused(what, error)
        return RetryableError(f"the catalog failed at {what}: {_brief(error)}", code="PEN-2001")

    def close(self) -> None:
        for pid, catalog in self._of.items():
            if isinstance(catalog, Catalog):
                catalog.engine.dispose(close=pid == os.getpid())
        self._of.clear()


def properties_of(config: IcebergConfig) -> dict[str, Any]:
    """The properties of a service's client, secrets revealed: call it where the client is made."""
    own = {"token": config.catalog_token, "credential": config.catalog_credential}
    given: dict[str, str | int | Secret | None] = {**config.catalog_options, **own}
    name = "glue.endpoint" if config.catalog_kind == "glue" else "uri"
    given[name] = config.catalog_uri or None
    texts = {name: value.reveal() if isinstance(value, Secret) else value for name, value in given.items()}
    return {name: value for name, value in texts.items() if value is not None}


def _service_class(module: str, name: str, extra: str, **more: Any) -> Any:
    try:
        base = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"a catalog of this kind needs a package that is not installed: {error.name}",
            code="PEN-1007",
            hint=f"pip install 'penstock[{extra}]'",
        ) from error

    def begin(self: Any, *given: Any, **properties: Any) -> None:
        base.__init__(self, *given, **properties)
        self.last = _Last()

    return type(name, (Staged, base), {"__init__": begin, **more})


def _hive() -> Any:
    """Hive's client ends whatever connection was begun last, of another thread too: each use gets a client of its own."""

    def client(self: Any) -> Any:
        return self._create_hive_client(self.properties)

    # The base assigns one, which nobody uses.
    return _service_class(
        "pyiceberg.catalog.hive", "HiveCatalog", "iceberg-hive", _client=property(client, lambda self, given: None)
    )


KINDS: dict[str, Callable[[], Any]] = {
    "rest": lambda: Rest,
    "glue": functools.cache(lambda: _service_class("pyiceberg.catalog.glue", "GlueCatalog", "iceberg-glue")),
    "hive": functools.cache(_hive),
}

_NO_ACCESS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "AccessDeniedException"} | {
    *("UnrecognizedClientException", "InvalidSignatureException", "ExpiredTokenException", "ExpiredToken"),
}


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


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, pool_size=1)
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": 30})  # no connection survives a fork

    @event.listens_for(engine, "connect")
    def durable_commits(connection: Any, _: Any) -> None:
        # FULL, the default, does not sync the directory after the journal is dropped: a power cut would undo the commit.
        connection.execute("PRAGMA synchronous = EXTRA")

    return engine
