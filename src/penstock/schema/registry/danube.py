"""Danube's own schema registry, which is part of its brokers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import NonNegativeInt

from penstock.config import Config
from penstock.errors import ConfigError, DataError, RetryableError, SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, Incompatibility, incompatibilities, same
from penstock.schema.registry.danube_client import Calls, DanubeConfig, grpc
from penstock.schema.registry.danube_client import schemas as messages

T = TypeVar("T")

VERSIONS = 1 << 12
"""An id of ours holds the subject's id and the version, since Danube gives all versions of a subject one id."""

_TRIES = 5


class DanubeRegistryConfig(DanubeConfig):
    """`[registry]` with `type = "danube"`."""

    latest_cache_secs: NonNegativeInt = 10
    """How long the latest version of a subject is believed without asking again."""


class DanubeRegistry:
    """
    What has a version is fetched once and kept, also in copies sent to tasks; only "the latest" is asked again.

    Every call may be repeated: registering the same schema twice gives the same version.
    """

    config_type: ClassVar[type[Config]] = DanubeRegistryConfig
    is_shared: ClassVar[bool] = True

    def __init__(self, config: DanubeConfig, state_dir: Path | None = None) -> None:
        self.config = config
        self._calls: Calls | None = None
        self._versions: dict[tuple[str, int], WireSchema] = {}
        self._latest: dict[str, tuple[float, WireSchema]] = {}
        self._subjects: dict[int, str] = {}
        self._wanted: dict[str, Compatibility] = {}  # of subjects that are not there yet

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": None, "_latest": {}}  # another machine has another clock

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        self._calls = None

    def subjects(self) -> list[str]:
        return self._retried(lambda calls: calls.subjects())

    def versions(self, subject: str) -> list[int]:
        request = messages.ListVersionsRequest(subject=subject)
        answer = self._found("ListVersions", request, f"the subject {subject!r}")
        return sorted(each.version for each in answer.versions) if answer is not None else []

    def fetch_schema(self, subject: str, version: int | None = None) -> WireSchema:
        if version is not None and (subject, version) in self._versions:
            return self._versions[subject, version]
        known = self._latest.get(subject)
        if known and time.monotonic() - known[0] < self._cache_secs:
            latest = known[1]
        else:
            request = messages.GetLatestSchemaRequest(subject=subject)
            answer = self._found("GetLatestSchema", request, f"the subject {subject!r}")
            if answer is None:
                hint = "`schema_file` with auto_register = true adds it; penstock schemas list FILE shows what there is"
                raise ConfigError(f"the registry has no subject {subject!r}", code="PEN-1031", hint=hint)
            latest = self._kept(answer)
            self._latest[subject] = (time.monotonic(), latest)
        if version is None or version == latest.version:
            return latest
        return self._version(latest.id // VERSIONS, version, subject)

    def fetch_schema_by_id(self, id: int) -> WireSchema:
        return self.by_version(*unpacked(id))

    def by_version(self, id: int, version: int | None) -> WireSchema:
        """By the two numbers that a message carries; without a version, the latest."""
        subject = self._subjects.get(id)
        if subject is not None and version is not None and (subject, version) in self._versions:
            return self._versions[subject, version]
        answer = self._found("GetSchema", _by_id(id, version), f"the id {id}")
        if answer is None:
            raise DataError(
                f"the registry has no schema with the id {id} and the version {version or 'latest'}",
                code="PEN-3030",
                hint="the message was written with another broker's registry, or the version was deleted",
            )
        return self._kept(answer)

    def places(self, id: int) -> list[tuple[str, int]]:
        found = self.fetch_schema_by_id(id)
        return [(found.subject, found.version)]

    def find_schema(self, subject: str, schema: WireSchema) -> WireSchema | None:
        known = (self.fetch_schema(subject, each) for each in reversed(self.versions(subject)))
        return next((each for each in known if each.type == schema.type and same(each, schema)), None)

    def check_compatibility(self, subject: str, schema: WireSchema) -> list[Incompatibility]:
        """
        Both have a say: the broker's own comparison looks at little, and refuses some of what would fit.

        Found here are fields and rules, against the last version as the broker's modes mean it.
        """
        known = self.versions(subject)
        if not known:
            return []
        latest = self.fetch_schema(subject, known[-1])
        found = incompatibilities(self.compatibility(subject), [latest], replace(schema, subject=subject))
        if found:
            return list(found)
        request = messages.CheckCompatibilityRequest(
            subject=subject, new_schema_definition=schema.text.encode(), schema_type=schema.type
        )
        answer = self._ask("CheckCompatibility", request, f"the schema of {subject!r}")
        said = list(answer.errors) or ["it is not compatible"]
        return [] if answer.is_compatible else [Incompatibility("", "registry", each) for each in said]

    def register_schema(self, subject: str, schema: WireSchema) -> WireSchema:
        if schema.references:
            raise SchemaError(
                f"the schema of {subject!r} refers to others, which Danube's registry has no place for",
                code="PEN-4031",
                hint="write what it refers to into the schema itself",
            )
        found = self.find_schema(subject, schema)
        if found is not None:
            return found
        problems = self.check_compatibility(subject, schema)
        if problems:
            listed = "; ".join(map(str, problems))
            raise SchemaError(
                f"the schema breaks {self.compatibility(subject)} compatibility of {subject!r}: {listed}",
                code="PEN-4030",
                hint="change the fields that are named, use a new subject, or set another compatibility for this one",
            )
        request = messages.RegisterSchemaRequest(
            subject=subject, schema_type=schema.type, schema_definition=schema.text.encode(), created_by="penstock"
        )
        answer = self._ask("RegisterSchema", request, f"the schema of {subject!r}")
        self._latest.pop(subject, None)
        if subject in self._wanted:
            self.set_compatibility(subject, self._wanted.pop(subject))
        return self._version(answer.schema_id, answer.version, subject)

    def compatibility(self, subject: str) -> Compatibility:
        answer = self._found(
            "GetLatestSchema", messages.GetLatestSchemaRequest(subject=subject), f"the subject {subject!r}"
        )
        if answer is None:
            return self._wanted.get(subject, Compatibility.BACKWARD)
        return Compatibility(answer.compatibility_mode.lower())

    def set_compatibility(self, subject: str, mode: Compatibility) -> None:
        if mode.is_transitive:
            raise ConfigError(
                f"Danube's registry has no {mode} compatibility",
                code="PEN-1032",
                hint="use none, backward, forward or full: it compares with the last version",
            )
        if not self.versions(subject):
            self._wanted[subject] = mode  # there is nothing yet that it could belong to
            return
        request = messages.SetCompatibilityModeRequest(subject=subject, compatibility_mode=mode.value)
        self._ask("SetCompatibilityMode", request, f"the compatibility of {subject!r}")

    @property
    def _cache_secs(self) -> int:
        return self.config.latest_cache_secs if isinstance(self.config, DanubeRegistryConfig) else 0

    def _version(self, id: int, version: int, subject: str) -> WireSchema:
        answer = self._found("GetSchema", _by_id(id, version), f"the version {version} of {subject!r}")
        if answer is None:
            raise ConfigError(
                f"{subject!r} has no version {version}",
                code="PEN-1031",
                hint=f"it has {', '.join(map(str, self.versions(subject)))}: choose one of them in version_strategy",
            )
        return self._kept(answer)

    def _kept(self, answer: Any) -> WireSchema:
        kind, text = _definition(answer.schema_type, answer.schema_definition)
        id = packed(answer.schema_id, answer.version)
        found = WireSchema(kind, text, answer.subject, answer.version, id, origin=self.config.url)
        self._versions[found.subject, found.version] = found
        self._subjects[answer.schema_id] = found.subject
        return found

    def _found(self, method: str, request: Any, what: str) -> Any:
        """The answer; None: there is no such thing."""
        try:
            return self._retried(lambda calls: calls.registry(method, request, what))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise _refusal(error, what) from None

    def _ask(self, method: str, request: Any, what: str) -> Any:
        try:
            return self._retried(lambda calls: calls.registry(method, request, what))
        except grpc.RpcError as error:
            raise _refusal(error, what) from None

    def _retried(self, call: Callable[[Calls], T]) -> T:
        self._calls = self._calls or Calls(self.config)
        for left in range(_TRIES, -1, -1):
            try:
                return call(self._calls)
            except RetryableError:
                if not left:
                    raise
                time.sleep(0.1 * 2 ** (_TRIES - left))
        raise AssertionError


def packed(id: int, version: int) -> int:
    """Danube's id and version as one number of 32 bits; 0, which is nobody's, if they do not fit."""
    return id * VERSIONS + version if version < VERSIONS and id < (1 << 32) // VERSIONS else 0


def unpacked(id: int) -> tuple[int, int]:
    """Danube's id of the subject, and the version."""
    return divmod(id, VERSIONS)


def _by_id(id: int, version: int | None) -> Any:
    return messages.GetSchemaRequest(schema_id=id, version=version)


def _definition(kind: str, raw: bytes) -> tuple[str, str]:
    """The type and the text that was registered: the broker wraps it in a record of its own."""
    text = raw.decode()
    try:
        found = json.loads(text)
    except ValueError:
        return kind, text
    if isinstance(found, dict) and len(found) == 1:
        (inner,) = found.values()
        if isinstance(inner, dict) and "fingerprint" in inner:
            return kind, str(inner.get("raw_schema") or inner.get("raw_proto") or "")
    return kind, "" if isinstance(found, str) else text


def _refusal(error: Any, what: str) -> Exception:
    details = (error.details() or "").partition("\n")[0][:300]
    if "not compatible" in details:
        return SchemaError(
            f"the registry refuses {what}: {details}", code="PEN-4030", hint="use a new subject, or fix it"
        )
    if error.code() is grpc.StatusCode.INTERNAL:
        return SchemaError(f"the registry refuses {what}: {details}", code="PEN-4031", hint="check the schema's text")
    return ConfigError(f"the registry has no {what}: {details}", code="PEN-1031")
