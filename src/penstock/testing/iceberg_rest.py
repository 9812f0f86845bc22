"""
A REST catalog for tests, on a free port of 127.0.0.1: real HTTP over a SQL catalog in a file.

    with RestCatalogServer(directory, properties) as catalog:
        IcebergConfig(path="s3://lake/{topic}", catalog_uri=catalog.uri, catalog_token={"env": "TOKEN"})
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlparse

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table

TOKEN, CREDENTIAL = "a-token-of-the-tests", "penstock:not-a-secret"
"""What the server takes: the token as it is, or the credential, for which it gives the token."""

_STATUS = {
    CommitFailedException: 409,
    TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
    NoSuchTableError: 404,
    NoSuchNamespaceError: 404,
}


class RestCatalogServer:
    """
    A catalog whose clients must show a token. `properties` are those of its own file access, as pyiceberg names them.

    `vended` gives, for the location of a table, the keys that are handed out with it.
    """

    def __init__(
        self,
        home: Path,
        properties: Mapping[str, str] | None = None,
        vended: Callable[[str], Mapping[str, str]] = lambda location: {},
    ) -> None:
        self.vended = vended
        self.token = TOKEN
        self.commits = 0
        self._lock = threading.Lock()
        self._catalog = SqlCatalog("default", uri=f"sqlite:///{home}/rest-catalog.db", **(properties or {}))
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="rest-catalog")

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def answer(self, method: str, path: list[str], body: str) -> dict[str, Any] | None:
        """The answer to a request; None if there is nothing to say."""
        with self._lock:
            match (method, path):
                case ("GET", ["config"]):
                    return {"defaults": {}, "overrides": {}}
                case ("POST", ["oauth", "tokens"]):
                    return self._give_token(body)
                case ("POST", ["namespaces"]):
                    asked = json.loads(body)
                    self._catalog.create_namespace(tuple(asked["namespace"]), asked.get("properties") or {})
                    return {"namespace": asked["namespace"], "properties": {}}
                case ("GET", ["namespaces", name]):
                    found = self._catalog.load_namespace_properties(_names(name))
                    return {"namespace": _names(name), "properties": found}
                case ("POST", ["namespaces", name, "properties"]):
                    asked = json.loads(body)
                    changed = self._catalog.update_namespace_properties(
                        _names(name), set(asked.get("removals") or ()), asked.get("updates") or {}
                    )
                    return {"updated": changed.updated, "removed": changed.removed, "missing": changed.missing}
                case ("POST", ["namespaces", name, "tables"]):
                    return self._created(_names(name), CreateTableRequest.model_validate_json(body))
                case ("GET", ["namespaces", name, "tables", table]):
                    return self._shown(self._catalog.load_table((*_names(name), table)))
                case ("POST", ["namespaces", name, "tables", table]):
                    return self._committed((*_names(name), table), CommitTableRequest.model_validate_json(body))
        raise NotImplementedError(f"{method} {path}")

    def _give_token(self, body: str) -> dict[str, Any]:
        asked = parse_qs(body)
        if f"{asked['client_id'][0]}:{asked['client_secret'][0]}" != CREDENTIAL:
            raise PermissionError("the credential is wrong")
        return {"access_token": self.token, "token_type": "bearer", "expires_in": 3600}

    def _created(self, namespace: tuple[str, ...], asked: CreateTableRequest) -> dict[str, Any]:
        made = self._catalog.create_table(
            (*namespace, asked.name),
            asked.table_schema,
            asked.location,
            asked.partition_spec or UNPARTITIONED_PARTITION_SPEC,
            properties=asked.properties,
        )
        return self._shown(made)

    def _committed(self, identifier: tuple[str, ...], asked: CommitTableRequest) -> dict[str, Any]:
        done = self._catalog.commit_table(self._catalog.load_table(identifier), asked.requirements, asked.updates)
        self.commits += 1
        return {"metadata-location": done.metadata_location, "metadata": json.loads(done.metadata.model_dump_json())}

    def _shown(self, table: Table) -> dict[str, Any]:
        return {
            "metadata-location": table.metadata_location,
            "metadata": json.loads(table.metadata.model_dump_json()),
            "config": dict(self.vended(table.location())),
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: RestCatalogServer

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = [unquote(each) for each in urlparse(self.path).path.strip("/").split("/")][1:]
        is_open = path in (["config"], ["oauth", "tokens"])
        if not is_open and self.headers.get("Authorization") != f"Bearer {self.server_of.token}":
            return self._send(401, _error(401, "NotAuthorizedException", "the token is wrong"))
        try:
            return self._send(200, self.server_of.answer(method, path, body))
        except PermissionError as error:
            return self._send(401, {"error": "invalid_client", "error_description": str(error)})
        except tuple(_STATUS) as error:
            status = _STATUS[type(error)]
            return self._send(status, _error(status, type(error).__name__, str(error)))

    def _send(self, status: int, answer: dict[str, Any] | None) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing: the tests' own output is enough."""


def _names(namespace: str) -> tuple[str, ...]:
    return tuple(namespace.split("\x1f"))


def _error(status: int, kind: str, text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "code": status}}
