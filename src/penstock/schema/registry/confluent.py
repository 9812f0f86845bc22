"""A registry that speaks Confluent's HTTP API: Confluent's own, Apicurio, Karapace, Redpanda."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import NonNegativeInt

from penstock.config import Config
from penstock.errors import ConfigError, DataError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, Incompatibility, incompatibilities, same
from penstock.schema.registry.http import Answer, Http, HttpConfig, as_error

TYPES = {"avro": "AVRO", "json_schema": "JSON", "protobuf": "PROTOBUF"}
MAX_ID = 2**31 - 1
"""Ids are signed numbers of 32 bits there; a larger one, as a frame can hold it, is answered like a wrong address."""
NO_SUBJECT, NO_VERSION, NO_SCHEMA, NO_LEVEL = 40401, 40402, 40403, 40408


class ConfluentConfig(HttpConfig):
    """`[registry]` with `type = "confluent"`."""

    latest_cache_secs: NonNegativeInt = 10
    """How long the latest version of a subject is believed without asking again; what has an id never changes."""


class Confluent:
    """
    What has an id or a version is fetched once and kept, also in copies sent to tasks; only "the latest" is asked again.

    Every call may be repeated: registering the same schema twice gives the same version.
    """

    config_type: ClassVar[type[Config]] = ConfluentConfig
    is_shared: ClassVar[bool] = True

    def __init__(self, config: ConfluentConfig, state_dir: Path | None = None) -> None:
        self.config = config
        self._http = Http(config)
        self._ids: dict[int, WireSchema] = {}
        self._versions: dict[tuple[str, int], WireSchema] = {}
        self._latest: dict[str, tuple[float, WireSchema]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": {}}  # another machine has another clock

    def subjects(self) -> list[str]:
        with self._read():
            return sorted(map(str, _listed(self._call("GET", "/subjects", what="the list of subjects"))))

    def versions(self, subject: str) -> list[int]:
        try:
            found = self._http.call("GET", f"/subjects/{_part(subject)}/versions")
        except Answer as answer:
            if answer.code == NO_SUBJECT:
                return []
            raise as_error(answer, f"the subject {subject!r}") from None
        with self._read():
            return sorted(map(int, _listed(found)))

    def fetch_schema(self, subject: str, version: int | None = None) -> WireSchema:
        if version is not None and (subject, version) in self._versions:
            return self._versions[subject, version]
        known = self._latest.get(subject)
        if version is None and known and time.monotonic() - known[0] < self.config.latest_cache_secs:
            return known[1]
        found = self._version(subject, version)
        self._versions[subject, found.version] = found
        if version is None:
            self._latest[subject] = (time.monotonic(), found)
        return found

    def fetch_schema_by_id(self, id: int) -> WireSchema:
        if id not in self._ids:
            try:
                found = self._http.call("GET", f"/schemas/ids/{id}") if id <= MAX_ID else None
            except Answer as answer:
                if answer.status != 404:
                    raise as_error(answer, f"the id {id}") from None
                found = None
            if found is None:
                raise DataError(
                    f"the registry has no schema with the id {id}",
                    code="PEN-3030",
                    hint="the message was written with another registry, or has no schema id in front: check the framing",
                )
            schema = self._schema(found, id=id)
            places = self.places(id)
            self._ids[id] = replace(schema, subject=places[0][0], version=places[0][1]) if places else schema
        return self._ids[id]

    def places(self, id: int) -> list[tuple[str, int]]:
        found = self._call("GET", f"/schemas/ids/{id}/versions", what=f"the id {id}")
        with self._read():
            return sorted((each["subject"], each["version"]) for each in _listed(found))

    def find_schema(self, subject: str, schema: WireSchema) -> WireSchema | None:
        try:
            found = self._http.call("POST", f"/subjects/{_part(subject)}", _body(schema))
        except Answer as answer:
            if answer.code == NO_SUBJECT:
                return None
            if answer.code != NO_SCHEMA:
                raise as_error(answer, f"the schema of {subject!r}") from None
            # Some registries compare bytes: there, a file that was only laid out differently would be a new version.
            known = (self.fetch_schema(subject, each) for each in reversed(self.versions(subject)))
            return next((each for each in known if same(each, schema)), None)
        with self._read():
            return replace(schema, subject=subject, version=int(found["version"]), id=int(found["id"]))

    def check_compatibility(self, subject: str, schema: WireSchema) -> list[Incompatibility]:
        """The registry decides; the fields and rules are found here, since its own texts seldom name them."""
        known = self.versions(subject)
        if not known:
            return []
        mode = self.compatibility(subject)
        place = "versions" if mode.is_transitive else "versions/latest"
        path = f"/compatibility/subjects/{_part(subject)}/{place}?verbose=true"
        answer = self._call("POST", path, _body(schema), what=f"the schema of {subject!r}")
        with self._read():
            if answer["is_compatible"]:
                return []
        earlier = [self.fetch_schema(subject, each) for each in (known if mode.is_transitive else known[-1:])]
        found = incompatibilities(mode, earlier, replace(schema, subject=subject))
        said = [str(each) for each in answer.get("messages") or [answer.get("reason") or "it is not compatible"]]
        return found or [Incompatibility("", "registry", each) for each in said]

    def register_schema(self, subject: str, schema: WireSchema) -> WireSchema:
        found = self.find_schema(subject, schema)
        if found is not None:
            return found
        path = f"/subjects/{_part(subject)}/versions"
        self._call("POST", path, _body(schema), what=f"the schema of {subject!r}")
        self._latest.pop(subject, None)
        found = self.find_schema(subject, schema)
        if found is None:
            raise ConfigError(
                f"{subject!r} was deleted while a version of it was registered", code="PEN-1031", hint="run it again"
            )
        return found

    def compatibility(self, subject: str) -> Compatibility:
        try:
            found = self._http.call("GET", f"/config/{_part(subject)}?defaultToGlobal=true")
        except Answer as answer:
            if answer.status != 404:
                raise as_error(answer, f"the compatibility of {subject!r}") from None
            found = self._call("GET", "/config", what="the compatibility of the registry")
        with self._read():
            return Compatibility(found["compatibilityLevel"].lower())

    def set_compatibility(self, subject: str, mode: Compatibility) -> None:
        body = {"compatibility": mode.value.upper()}
        self._call("PUT", f"/config/{_part(subject)}", body, what=f"the compatibility of {subject!r}")

    def _version(self, subject: str, version: int | None) -> WireSchema:
        path = f"/subjects/{_part(subject)}/versions/{version or 'latest'}"
        try:
            return self._schema(self._http.call("GET", path))
        except Answer as answer:
            what = f"{subject!r} has no version {version}" if version else f"it has no subject {subject!r}"
            if answer.status != 404:
                raise as_error(answer, what) from None
        known = self.versions(subject)
        if not known:
            hint = "`schema_file` with auto_register = true adds it; penstock schemas list FILE shows what there is"
            raise ConfigError(f"the registry has no subject {subject!r}", code="PEN-1031", hint=hint)
        raise ConfigError(
            f"{subject!r} has no version {version}",
            code="PEN-1031",
            hint=f"it has {', '.join(map(str, known))}: choose one of them in version_strategy",
        )

    def _schema(self, found: dict[str, Any], id: int = 0) -> WireSchema:
        """An answer as a schema, with all that it refers to."""
        names = {theirs: ours for ours, theirs in TYPES.items()}
        with self._read():
            text, kind = found["schema"], str(found.get("schemaType") or "AVRO")
            if not isinstance(text, str):
                raise TypeError
            if kind not in names:
                raise ConfigError(
                    f"the registry holds a schema of the type {kind!r}", code="PEN-1032", hint="use another"
                )
            references = tuple(
                (str(each["name"]), self.fetch_schema(each["subject"], int(each["version"])))
                for each in found.get("references") or ()
            )
            return WireSchema(
                names[kind],
                text,
                str(found.get("subject") or ""),
                int(found.get("version") or 0),
                int(found.get("id") or id),
                references,
            )

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        """An answer that is not what a registry says comes from another server, or from another path of it."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise ConfigError(
                f"the answer of {self.config.url} is not that of a schema registry",
                code="PEN-1032",
                hint="check `url` in [registry]: it is that of the registry's API (Apicurio's ends with /apis/ccompat/v7)",
            ) from None

    def _call(self, method: str, path: str, body: Any = None, *, what: str) -> Any:
        try:
            return self._http.call(method, path, body)
        except Answer as answer:
            raise as_error(answer, what) from None


def _listed(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError
    return found


def _body(schema: WireSchema) -> dict[str, Any]:
    references: Sequence[dict[str, Any]] = [
        {"name": name, "subject": each.subject, "version": each.version} for name, each in schema.references
    ]
    return {
        "schema": _text(schema),
        "schemaType": TYPES[schema.type],
        **({"references": references} if references else {}),
    }


def _text(schema: WireSchema) -> str:
    if schema.type != "protobuf":
        return schema.text
    from penstock.formats.protobuf.files import text_of_one_file  # its extra is not needed for the other types

    return text_of_one_file(schema)


def _part(subject: str) -> str:
    return quote(subject, safe="")
