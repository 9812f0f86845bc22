"""
A schema registry for tests that speaks Confluent's HTTP API: in memory, in a thread, on a free port of 127.0.0.1.

    with RegistryServer() as server:
        registry = Confluent(ConfluentConfig(url=server.url))

It has the paths, answers and error codes of the real ones, which the same tests keep honest against Apicurio.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.errors import SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, content, incompatibilities, parsed

_TYPES = {"AVRO": "avro", "JSON": "json_schema", "PROTOBUF": "protobuf"}
_NAMES = {ours: theirs for theirs, ours in _TYPES.items()}

Query: TypeAlias = Mapping[str, str]


class Refused(Exception):
    """An error as the registry answers it; the HTTP status is in the first three digits of its code."""

    def __init__(self, code: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.headers = code, message, dict(headers or {})

    @property
    def status(self) -> int:
        return int(str(self.code)[:3])


class Fault(Enum):
    """What becomes of a call."""

    NONE = "none"
    DROPPED = "dropped"
    """The connection is closed before anything is done."""
    ANSWER_LOST = "answer lost"
    """It is done, and the connection is closed before the answer."""


@dataclass
class _Subject:
    versions: dict[int, WireSchema] = field(default_factory=dict)
    """Soft-deleted ones as well: their numbers are never used again."""
    deleted: set[int] = field(default_factory=set)
    last: int = 0

    @property
    def live(self) -> list[int]:
        return [each for each in sorted(self.versions) if each not in self.deleted]


class Schemas:
    """What a registry keeps, and what it says to each call. One call at a time."""

    def __init__(self, compatibility: str = "BACKWARD") -> None:
        self._lock = threading.RLock()
        self._subjects: dict[str, _Subject] = {}
        self._ids: dict[str, int] = {}
        self._by_id: dict[int, WireSchema] = {}
        self._levels = {"": compatibility}

    def answer(self, method: str, path: str, query: Query, body: Any) -> Any:
        """What a call gives, or `Refused`."""
        for verb, pattern, call in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and verb == method:
                with self._lock:
                    return call(self, query, body, *map(unquote, found.groups()))
        raise Refused(404, "HTTP 404 Not Found")

    def list_subjects(self, query: Query, body: Any) -> list[str]:
        deleted = query.get("deleted") == "true"
        return [name for name, each in self._subjects.items() if each.live or (deleted and each.versions)]

    def list_versions(self, query: Query, body: Any, name: str) -> list[int]:
        return self._live(name).live

    def version(self, query: Query, body: Any, name: str, number: str) -> dict[str, Any]:
        return self._shown(self._version(name, number))

    def look_up(self, query: Query, body: Any, name: str) -> dict[str, Any]:
        subject, wanted = self._live(name), content(self._schema(body))
        for each in reversed(subject.live):
            if content(subject.versions[each]) == wanted:
                return self._shown(subject.versions[each])
        raise Refused(40403, "Schema not found")

    def register(self, query: Query, body: Any, name: str) -> dict[str, Any]:
        schema = self._schema(body)
        subject = self._subjects.setdefault(name, _Subject())
        wanted = content(schema)
        for each in subject.live:
            if content(subject.versions[each]) == wanted:
                return {"id": subject.versions[each].id}
        found = self._check(name, schema, subject.live)
        if found:
            raise Refused(409, f"Schema being registered is incompatible with an earlier schema; {found}")
        id = self._ids.setdefault(wanted, len(self._ids) + 1)
        subject.last += 1
        schema = replace(schema, subject=name, version=subject.last, id=id)
        subject.versions[subject.last] = self._by_id[id] = schema
        return {"id": id}

    def by_id(self, query: Query, body: Any, id: str) -> dict[str, Any]:
        if int(id) >= 2**31:  # no number to a registry whose ids have 32 bits: no such page
            raise Refused(404, "HTTP 404 Not Found")
        if int(id) not in self._by_id:
            raise Refused(40403, f"Schema {id} not found")
        shown = self._shown(self._by_id[int(id)])
        return {key: shown[key] for key in ("schema", "schemaType", "references") if key in shown}

    def places(self, query: Query, body: Any, id: str) -> list[dict[str, Any]]:
        self.by_id(query, body, id)
        return [
            {"subject": name, "version": each}
            for name, subject in self._subjects.items()
            for each in subject.live
            if subject.versions[each].id == int(id)
        ]

    def check(self, query: Query, body: Any, name: str, number: str | None = None) -> dict[str, Any]:
        subject = self._live(name)
        chosen = subject.live if number is None else [self._version(name, number).version]
        found = self._check(name, self._schema(body), chosen)
        messages = {"messages": found} if query.get("verbose") == "true" else {}
        return {"is_compatible": not found, **messages}

    def level(self, query: Query, body: Any, name: str = "") -> dict[str, str]:
        if name not in self._levels and query.get("defaultToGlobal") != "true":
            raise Refused(40408, f"Subject '{name}' does not have subject-level compatibility configured")
        return {"compatibilityLevel": self._levels.get(name, self._levels[""])}

    def set_level(self, query: Query, body: Any, name: str = "") -> dict[str, str]:
        level = str(body.get("compatibility"))
        if level.lower() not in [each.value for each in Compatibility]:
            raise Refused(42203, "Invalid compatibility level")
        self._levels[name] = level
        return {"compatibility": level}

    def delete_subject(self, query: Query, body: Any, name: str) -> list[int]:
        if query.get("permanent") == "true":
            subject = self._subjects.get(name)
            if subject is None or not subject.versions:
                raise Refused(40401, f"Subject '{name}' not found.")
            if subject.live:
                raise Refused(40405, f"Subject '{name}' was not deleted first before being permanently deleted")
            return sorted(self._subjects.pop(name).versions)
        subject = self._live(name)
        self._refuse_referenced(name, subject.live)
        gone = subject.live
        subject.deleted.update(gone)
        return gone

    def delete_version(self, query: Query, body: Any, name: str, number: str) -> int:
        version = self._version(name, number).version
        self._refuse_referenced(name, [version])
        self._subjects[name].deleted.add(version)
        return version

    def _refuse_referenced(self, name: str, versions: list[int]) -> None:
        for subject in self._subjects.values():
            for each in subject.live:
                for _, reference in subject.versions[each].references:
                    if reference.subject == name and reference.version in versions:
                        raise Refused(42206, f"One or more references exist to the schema {name}")

    def _live(self, name: str) -> _Subject:
        subject = self._subjects.get(name)
        if subject is None or not subject.live:
            raise Refused(40401, f"Subject '{name}' not found.")
        return subject

    def _version(self, name: str, number: str) -> WireSchema:
        subject = self._live(name)
        if number in ("latest", "-1"):
            return subject.versions[subject.live[-1]]
        if not number.isdigit() or not 0 < int(number) < 1 << 31:
            raise Refused(42202, f"The specified version '{number}' is not a valid version id")
        if int(number) not in subject.live:
            raise Refused(40402, f"Version {number} not found.")
        return subject.versions[int(number)]

    def _schema(self, body: Any) -> WireSchema:
        kind = _TYPES.get(body.get("schemaType") or "AVRO")
        text = body.get("schema")
        if kind is None or not isinstance(text, str):
            raise Refused(42201, "Invalid schema or schema type")
        try:
            references = tuple(
                (each["name"], self._version(each["subject"], str(each["version"])))
                for each in body.get("references") or ()
            )
            schema = WireSchema(kind, text, references=references)
            parsed(schema)
        except (Refused, SchemaError) as error:
            raise Refused(42201, f"Invalid schema: {error}") from error
        return schema

    def _check(self, name: str, schema: WireSchema, versions: list[int]) -> list[str]:
        mode = Compatibility(self._levels.get(name, self._levels[""]).lower())
        earlier = [self._subjects[name].versions[each] for each in versions]
        return [str(each) for each in incompatibilities(mode, earlier, schema)]

    def _shown(self, schema: WireSchema) -> dict[str, Any]:
        references = [
            {"name": name, "subject": each.subject, "version": each.version} for name, each in schema.references
        ]
        return {
            "subject": schema.subject,
            "version": schema.version,
            "id": schema.id,
            "schema": schema.text,
            **({"schemaType": _NAMES[schema.type]} if schema.type != "avro" else {}),
            **({"references": references} if references else {}),
        }


_NAME = "([^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/subjects", Schemas.list_subjects),
    ("GET", f"/subjects/{_NAME}/versions", Schemas.list_versions),
    ("GET", f"/subjects/{_NAME}/versions/{_NAME}", Schemas.version),
    ("POST", f"/subjects/{_NAME}", Schemas.look_up),
    ("POST", f"/subjects/{_NAME}/versions", Schemas.register),
    ("GET", r"/schemas/ids/(\d+)", Schemas.by_id),
    ("GET", r"/schemas/ids/(\d+)/versions", Schemas.places),
    ("POST", f"/compatibility/subjects/{_NAME}/versions", Schemas.check),
    ("POST", f"/compatibility/subjects/{_NAME}/versions/{_NAME}", Schemas.check),
    ("GET", "/config", Schemas.level),
    ("PUT", "/config", Schemas.set_level),
    ("GET", f"/config/{_NAME}", Schemas.level),
    ("PUT", f"/config/{_NAME}", Schemas.set_level),
    ("DELETE", f"/subjects/{_NAME}", Schemas.delete_subject),
    ("DELETE", f"/subjects/{_NAME}/versions/{_NAME}", Schemas.delete_version),
]


class RegistryServer:
    """The server; it may ask for a user, a token or a certificate, and fail the next calls on request."""

    def __init__(
        self,
        *,
        user: tuple[str, str] | None = None,
        token: str | None = None,
        certificate: tuple[Path, Path] | None = None,
        client_ca: Path | None = None,
    ) -> None:
        self.schemas = Schemas()
        self.calls: list[str] = []
        """`GET /subjects` and so on, as they came."""
        self._faults: deque[Refused | Fault] = deque()
        self._certificate, self._client_ca = certificate, client_ca
        self._allowed = None
        if user is not None:
            self._allowed = f"Basic {base64.b64encode(':'.join(user).encode()).decode()}"
        elif token is not None:
            self._allowed = f"Bearer {token}"

    def __enter__(self) -> RegistryServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if self._certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._certificate)
            if self._client_ca:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            # The handshake belongs to the call's own thread: a client that refuses ours must not stop the server.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        scheme = "https" if self._certificate else "http"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, status: int, times: int = 1, **headers: str) -> None:
        """Answer the next calls with an error."""
        self._faults.extend([Refused(status, "as the test asked", headers)] * times)

    def meet(self, *faults: Fault) -> None:
        """What becomes of the next calls, one by one."""
        self._faults.extend(faults)

    def respond(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, answer and headers of one call; status 0: hang up."""
        parts = urlsplit(target)
        self.calls.append(f"{method} {parts.path}")
        fault = self._faults.popleft() if self._faults else Fault.NONE
        if fault is Fault.DROPPED:
            return 0, None, {}
        try:
            if isinstance(fault, Refused):
                raise fault
            if self._allowed and headers.get("Authorization") != self._allowed:
                raise Refused(401, "Unauthorized")
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            answer = self.schemas.answer(method, parts.path, query, json.loads(body) if body else {})
        except Refused as error:
            return error.status, {"error_code": error.code, "message": error.message}, error.headers
        return (0 if fault is Fault.ANSWER_LOST else 200), answer, {}


def _handler(server: RegistryServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer, headers = server.respond(self.command, self.path, dict(self.headers), body)
            if status == 0:
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
